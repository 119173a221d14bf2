"""`build`: two models in, a finished map out, in memory."""

from __future__ import annotations

from os import PathLike

from xtok.canonical import match_bytes
from xtok.config import BuildConfig
from xtok.projection import ProjectionMap
from xtok.stages import Progress, multitoken, reapply_exact, silent, sort_cut
from xtok.tokenizers import Tokenizer, as_tokenizer


def build(
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    config: BuildConfig | None = None,
    *,
    progress: Progress = silent,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    Saved, it is the same file, byte for byte, as the three commands with files in between make.

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (for a width, revision or pattern of its own).
        teacher_model: the model of the columns, likewise.
        config: the options; the defaults if None.
        progress: called for each pass over a vocabulary.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
    """
    config = config or BuildConfig()
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    if not config.exact_match:
        projection = multitoken(student, teacher, config.multitoken, progress=progress)
        return sort_cut(projection, config.sort_cut)
    same = match_bytes(student.table, teacher.table)
    projection = multitoken(student, teacher, config.multitoken, spared=same, progress=progress)
    return sort_cut(reapply_exact(projection, same_bytes=same), config.sort_cut)
