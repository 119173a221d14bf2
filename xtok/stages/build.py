"""`build`: two models in, a finished map out, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.config import BuildConfig, EstimateConfig
from xtok.maps.projection_map import ProjectionMap, StageReport
from xtok.maps.results import map_notes, stage_report, tokenizer_notes
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.exact import exact_matches, with_exact
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import Tokenizer, as_tokenizer

if TYPE_CHECKING:
    from xtok.counting.counts import CountedText, CountingPlan


def build(
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    config: BuildConfig | None = None,
    *,
    texts: str | Path | Sequence[str | Path] = (),
    field: str = EstimateConfig.field,
    checkpoint: Path | None = None,
    count: Callable[[CountingPlan], CountedText] | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    Saved, it is the same file, byte for byte, as the three commands with files in between make.
    With texts, the map is counted on them as by `estimate`, smoothed towards `multitoken` with the
    weights `prior`; it has no scale slot.

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (to give a width, revision or pattern).
        teacher_model: the model of the columns, likewise.
        config: the options; the defaults if None.
        texts: a path or glob of text to count on, or several, as `estimate` takes them.
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
        from xtok.counting.counts import plan_counting
        from xtok.stages.estimate import counted_map

        counting = EstimateConfig(
            top_k=config.top_k, target=config.target, exact_match=config.exact_match, field=field
        )
        plan = plan_counting(student, teacher, texts, counting)
        options = replace(config.multitoken, weights="prior", scale_trick=False)
        projection = counted_map(
            student,
            teacher,
            plan,
            counting,
            base=multitoken(student, teacher, options, progress=progress),
            options=options,
            checkpoint=checkpoint,
            count=count,
            text_progress=text_progress,
        )
        report = _report(projection, student, teacher, config)
        notes = report.notes + projection.reports[1].notes  # those of `estimate`
        return replace(projection, reports=(replace(report, notes=notes),))
    matches = open_rows = None
    if config.exact_match:
        rows = student.table_as(config.token_form, ignore=config.ignore_student_ids)
        columns = teacher.table_as(config.token_form, ignore=config.ignore_teacher_ids)
        matches = exact_matches(rows, columns, config)
        open_rows = ~matches.is_exact
    projection = multitoken(student, teacher, config.multitoken, only=open_rows, progress=progress)
    if matches is not None:
        projection = with_exact(projection, matches, config)
    projection = sort_cut(projection, config.sort_cut)
    report = _report(projection, student, teacher, config)
    report = replace(report, counts={**report.counts, **projection.reports[-1].counts})
    return replace(projection, reports=(report,))


def _report(
    projection: ProjectionMap, student: Tokenizer, teacher: Tokenizer, config: BuildConfig
) -> StageReport:
    """Return one report of the finished map; those of single stages count what was replaced."""
    notes = tokenizer_notes(student, teacher) + map_notes(projection, config.ignore_student_ids)
    failures = [failure for report in projection.reports for failure in report.failures]
    return stage_report("build", projection, notes, failures)
