"""`convert`: a map as another file format, or as the tables that other programs read."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, get_args

from xtok.config import MapFormat
from xtok.errors import XtokError
from xtok.io import check_output, write
from xtok.maps import file as mapfile
from xtok.maps.map_like import MapLike
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.subtokens import nemo_table
from xtok.progress import Note, silent_note
from xtok.tokenizers import ModelLike, PairLike
from xtok.tokenizers import pair as pair_of
from xtok.vocab.pair import Pair

SUFFIX_OF: dict[MapFormat, str] = {
    "safetensors": ".safetensors",
    "pt": ".pt",
    "nemo-subtokens": ".pt",
}


def convert(
    projection: MapLike,
    output: str | PathLike[str],
    *,
    to: MapFormat | None = None,
    student_model: PairLike | None = None,
    teacher_model: ModelLike | None = None,
    note: Note = silent_note,
    **options: Any,
) -> list[Path]:
    """Write a map in another format, and return the paths of the files written.

    Args:
        projection: a map, or the path of any file that `load` reads.
        output: the file.
        to: `safetensors`; `pt`, as NeMo-RL reads it; or `nemo-subtokens`, the two tables of
            NeMo-RL's drafts, the teacher's beside the output as `NAME.reverse.pt`. None tells by
            the suffix.
        student_model: the model of the rows, for `nemo-subtokens`.
        teacher_model: the model of the columns.
        note: called with a sentence on what was cut.
        options: as for `load`, for a path.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
        XtokError: if the tokenizers are missing or not the map's.
    """
    target = check_converted(output, to)
    if isinstance(projection, ProjectionMap) and options:
        raise TypeError(f"{', '.join(options)}: options of reading a file, not of a map")
    if not isinstance(projection, ProjectionMap):
        projection = ProjectionMap.load(projection, **options)
    if to == "nemo-subtokens":
        pair = pair_of(student_model, teacher_model, of=projection)
        return _write_subtokens(projection, target, pair, note)
    projection.save(target)
    return [target]


def check_converted(output: str | PathLike[str], to: MapFormat | None) -> Path:
    """Check, before any work is done, that a map can be written there in a format.

    Raises:
        OutputError: if it cannot be, or the suffix is not the format's.
        ValueError: if there is no such format.
    """
    if to is None:
        return mapfile.check_output(output)
    if to not in SUFFIX_OF:
        raise ValueError(f"to is {to!r}, and must be one of {get_args(MapFormat)}")
    return check_output(output, (SUFFIX_OF[to],), f"{to} file")


def _write_subtokens(
    projection: ProjectionMap,
    target: Path,
    pair: Pair,
    note: Note,
) -> list[Path]:
    if pair.student_tokenizer is None or pair.teacher_tokenizer is None:
        raise XtokError(
            "nemo-subtokens spells tokens, which takes both tokenizers",
            hint="give both models that the map was made with, the student's with {option}",
            parameter="student_model",
        )
    pair.admit(projection)
    reverse = target.with_name(f"{target.stem}.reverse{target.suffix}")
    tables = nemo_table(pair, note), nemo_table(pair.reversed, note)
    for path, table in zip((target, reverse), tables, strict=True):
        write(path, [table])
    return [target, reverse]
