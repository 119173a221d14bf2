"""Many maps at once: a list of pairs, what building them would give, and building them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xtok import mapfile, pipeline
from xtok.canonical import match_bytes
from xtok.config import BuildConfig
from xtok.errors import XtokError
from xtok.matching import special_edges
from xtok.progress import Progress, silent
from xtok.projection import ProjectionMap, heaviest
from xtok.stages import require_complete
from xtok.tokenizers import load_tokenizer, model_id

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair of models by name, where its map goes, and the line of the list it is on."""

    line: int
    student: str
    teacher: str
    output: Path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a map of two tokenizers will be, told without building it.

    Attributes:
        rows: the student's width.
        columns: the teacher's width.
        pinned: rows with one entry: tokens of both sides, and special tokens.
        max_entries: entries if every other row is as full as it may be.
        max_bytes: bytes of the `.safetensors` file then. Real maps have 55 to 100 % of it.
    """

    rows: int
    columns: int
    pinned: int
    max_entries: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What became of a pair: its map, or an error, or neither where a file was there already."""

    pair: Pair
    projection: ProjectionMap | None = None
    error: XtokError | None = None


def read_pairs(path: Path, output_dir: Path, config: BuildConfig) -> list[Pair]:
    """Read a list of pairs: on each line a student, a teacher and, if it has a name, the output.

    Columns are parted by tabs, or by spaces on a line without tabs; blank lines and those that
    begin with `#` do not count.

    Args:
        path: the list.
        output_dir: the folder of the outputs, which names in the list are relative to.
        config: the options that the default names tell.

    Raises:
        XtokError: if it cannot be read, a line is none, or two lines have one output.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise XtokError(
            f"the list of pairs {path} cannot be read: {reason}",
            hint="give a text file with a student and a teacher on each line",
        ) from error
    pairs: dict[Path, Pair] = {}
    for number, text in enumerate(lines, 1):
        words = [word.strip() for word in (text.split("\t") if "\t" in text else text.split())]
        words = [word for word in words if word]
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise XtokError(
                f"line {number} of {path} has {len(words)} columns",
                hint="write a student, a teacher and, if you like, an output; part them by tabs "
                "where a path has spaces",
            )
        student, teacher, *named = words
        ids = model_id(student), model_id(teacher)
        name = named[0] if named else name_of_map(*ids, config)
        pair = Pair(line=number, student=student, teacher=teacher, output=output_dir / name)
        output = Path(os.path.abspath(pair.output))  # without `..`
        if output in pairs:
            raise XtokError(
                f"line {number} of {path} has the output of line {pairs[output].line}, {name}",
                hint="name another one in a third column",
            )
        pairs[output] = pair
    if not pairs:
        raise XtokError(
            f"the list of pairs {path} has none",
            hint="write a student and a teacher on each line",
        )
    return list(pairs.values())


def name_of_map(student_id: str, teacher_id: str, config: BuildConfig) -> str:
    """Return the file name that `build` gives to a map that has none."""
    slot = "" if config.scale_trick else "no-scale-trick"
    return mapfile.default_name(student_id, teacher_id, f"top{config.top_k}", slot)


def plan(student: Tokenizer, teacher: Tokenizer, config: BuildConfig | None = None) -> Plan:
    """Return what `build` will make of two tokenizers, at most."""
    config = config or BuildConfig()
    rows = student.table_as(config.token_form, ignore=config.ignore_student_ids)
    columns = teacher.table_as(config.token_form, ignore=config.ignore_teacher_ids)
    special = heaviest(special_edges(rows, columns, config), config.top_k)
    sizes = np.zeros(len(rows), np.int64)
    sizes[rows.text_ids] = min(config.top_k, len(columns))
    beside_slot = config.scale_trick and not config.exact_match
    np.add.at(sizes, special.student_ids, 1)
    sizes[special.student_ids] += beside_slot
    if config.exact_match:
        sizes[list(match_bytes(rows, columns))] = 1
    entries = int(sizes.sum())
    empty = ProjectionMap(
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        student_ids=np.zeros(0, np.int32),
        teacher_ids=np.zeros(0, np.int32),
        weights=np.zeros(0, np.float32),
        row_kind=np.zeros(len(rows), np.uint8),
        scale_slot=np.zeros(len(rows), np.uint8) if config.scale_trick else None,
        method="multitoken",
        top_k=config.top_k,
    )
    size = len(mapfile.to_safetensors(empty)) + _HISTORY + len(str(config.options))
    return Plan(
        rows=len(rows),
        columns=len(columns),
        pinned=int(np.count_nonzero(sizes == 1)),
        max_entries=entries,
        max_bytes=size + 12 * entries,
    )


_HISTORY = 1024
"""Bytes that the stages' options and the numbers in the header take, at most."""


def build_pairs(
    pairs: Sequence[Pair],
    config: BuildConfig | None = None,
    *,
    skip_existing: bool = False,
    strict: bool = False,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    progress: Progress = silent,
) -> Iterator[PairResult]:
    """Build and save the maps of a list, loading each tokenizer once; an error ends its pair only.

    A tokenizer is let go after the last pair that needs it.

    Args:
        pairs: as `read_pairs` returns them.
        config: the options of all maps; the defaults if None.
        skip_existing: leave out pairs whose output is there. Files are whole or not there at all,
            so that a list can be gone through again after a failure.
        strict: a token that cannot be decoded or spelled is an error.
        load: what loads a tokenizer.
        progress: called for each pass over a vocabulary.
    """
    if skip_existing:
        there = {pair.output for pair in pairs if pair.output.exists()}
        yield from (PairResult(pair=pair) for pair in pairs if pair.output in there)
        pairs = [pair for pair in pairs if pair.output not in there]
    left = Counter(model for pair in pairs for model in (pair.student, pair.teacher))
    loaded: dict[str, Tokenizer] = {}

    def tokenizer(model: str) -> Tokenizer:
        if model not in loaded:
            loaded[model] = load(model)
        return loaded[model]

    for pair in pairs:
        try:
            mapfile.check_output(pair.output)
            sides = tokenizer(pair.student), tokenizer(pair.teacher)
            projection = pipeline.build(*sides, config, progress=progress)
            if strict:
                require_complete(projection)
            projection.save(pair.output)
            yield PairResult(pair=pair, projection=projection)
        except XtokError as error:
            yield PairResult(pair=pair, error=error)
        except OSError as error:
            told = XtokError(
                f"{error.filename or pair.output}: {error.strerror or error}",
                hint="check the path, its permissions, and the free space",
            )
            yield PairResult(pair=pair, error=told)
        for model in (pair.student, pair.teacher):
            left[model] -= 1
            if not left[model]:
                loaded.pop(model, None)
