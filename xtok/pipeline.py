"""`build`: two models in, a finished map out, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.canonical import match_bytes
from xtok.config import BuildConfig, EstimateConfig
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.projection import ProjectionMap
from xtok.stages import finished_report, multitoken, reapply_exact, sort_cut
from xtok.tokenizers import Tokenizer, as_tokenizer

if TYPE_CHECKING:
    from xtok.counting import CountedText, CountingPlan


def build(
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    config: BuildConfig | None = None,
    *,
    texts: Sequence[str | Path] = (),
    field: str = EstimateConfig.field,
    checkpoint: Path | None = None,
    count: Callable[[CountingPlan], CountedText] | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    Saved, it is the same file, byte for byte, as the three commands with files in between make.
    With texts, the map is counted on them, and `estimate` takes the place of the last two; it
    starts from the weights `prior`, and there is no scale slot.

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (for a width, revision or pattern of its own).
        teacher_model: the model of the columns, likewise.
        config: the options; the defaults if None.
        texts: paths and globs of text to count on, as `estimate` takes them.
        field: the field or column that holds the text.
        checkpoint: as in `estimate`.
        count: likewise.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if a text cannot be read.
    """
    config = config or BuildConfig()
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    if texts:
        first = replace(config.multitoken, weights="prior", scale_trick=False)
        from xtok.counting import estimate

        projection = estimate(
            student,
            teacher,
            texts,
            EstimateConfig(
                top_k=config.top_k,
                target=config.target,
                pin_exact=config.exact_match,
                field=field,
            ),
            base=multitoken(student, teacher, first, progress=progress),
            checkpoint=checkpoint,
            count=count,
            text_progress=text_progress,
        )
        counted = projection.reports[1]
        done = finished_report("build", projection, student, teacher, config.ignore_student_ids)
        return replace(projection, reports=(replace(done, notes=done.notes + counted.notes),))
    same = match_bytes(student.table, teacher.table) if _pins_same_bytes(config) else None
    projection = multitoken(
        student, teacher, config.multitoken, spared=same or (), progress=progress
    )
    if config.exact_match:
        projection = reapply_exact(projection, student=student, teacher=teacher, same_bytes=same)
    projection = sort_cut(projection, config.sort_cut)
    done = finished_report("build", projection, student, teacher, config.ignore_student_ids)
    return replace(projection, reports=(done, projection.reports[-1]))


def _pins_same_bytes(config: BuildConfig) -> bool:
    """Tell whether every row of a token whose bytes the teacher has is sure to be pinned.

    Such rows, most of those of related vocabularies, need not be spelled.
    """
    return (
        config.exact_match
        and config.weights == "decay"
        and config.canonicalization == "exact"
        and config.token_form == "bytes"
        and not (config.ignore_student_ids or config.ignore_teacher_ids)
    )
