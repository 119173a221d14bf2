"""`plan` and `difference`: what `build` would make, and how a file differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.config import BuildConfig
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.edges import heaviest, single_edges
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.results import finished
from xtok.stages.matches import compared_tables, matching_options, special_edges
from xtok.vocab.table import match_bytes

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a map of two tokenizers, known without building it.

    Attributes:
        rows: the student's width.
        columns: the teacher's width.
        single_entry: rows of one entry: tokens of both sides, and special tokens.
        max_entries: entries if every other row is as full as it may be.
        max_bytes: bytes of the `.safetensors` file then. Real maps have 55 to 100 % of it.
    """

    rows: int
    columns: int
    single_entry: int
    max_entries: int
    max_bytes: int


def plan(student: Tokenizer, teacher: Tokenizer, config: BuildConfig | None = None) -> Plan:
    """Return what `build` will make of two tokenizers, at most."""
    config = config or BuildConfig()
    rows, columns = compared_tables(student, teacher, config)
    special = heaviest(special_edges(rows, columns, config), config.top_k)
    sizes = np.zeros(len(rows), np.int64)
    sizes[rows.text_ids] = min(config.top_k, len(columns))
    beside_slot = config.scale_trick and not config.exact_match
    np.add.at(sizes, special.student_ids, 1)
    sizes[special.student_ids] += beside_slot
    if config.exact_match:
        sizes[list(match_bytes(rows, columns))] = 1
    entries = int(sizes.sum())
    empty = empty_map(student, teacher, config)
    # The stages' options and the numbers in the header take a kilobyte more, at most.
    size = len(mapfile.to_safetensors(empty)) + 1024 + len(str(config.options))
    return Plan(
        rows=len(rows),
        columns=len(columns),
        single_entry=int(np.count_nonzero(sizes == 1)),
        max_entries=entries,
        max_bytes=size + 12 * entries,
    )


def empty_map(student: Tokenizer, teacher: Tokenizer, config: BuildConfig) -> ProjectionMap:
    """Return a map with the vocabularies of two tokenizers and without entries."""
    num_rows = len(student.table)
    return finished(
        single_edges({}),
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        row_kind=np.zeros(num_rows, np.uint8),
        scale_slot=np.zeros(num_rows, np.uint8) if config.scale_trick else None,
        method="multitoken",
        top_k=config.top_k,
    )


def difference(
    path: Path,
    student: Tokenizer,
    teacher: Tokenizer,
    config: BuildConfig,
    texts: Sequence[str | Path] = (),
) -> str | None:
    """Return how a file differs from the map that `build` would make, or None.

    Tokenizers are compared by their tokens, options by the history in the file, texts by name and
    size. Versions of xtok are not compared.
    """
    try:
        existing = mapfile.load(path)
    except XtokError as error:
        return error.message
    for side, tokenizer in (("student", student), ("teacher", teacher)):
        before, now = getattr(existing, side), tokenizer.vocabulary
        if before.vocab_size != now.vocab_size:
            return f"its {side} is {before.vocab_size} wide, not {now.vocab_size}"
        if before.table is None or before.table.sha256() != tokenizer.table.sha256():
            return f"its {side} {before.model_id} has other tokens than {now.model_id}"
    stages, steps = [step["stage"] for step in existing.history], _steps(config, bool(texts))
    if stages != [stage for stage, _ in steps]:
        return f"its stages are {', '.join(stages) or 'unknown'}"
    for step, (stage, options) in zip(existing.history, steps, strict=True):
        there = {k: v for k, v in step["options"].items() if k != "alpha"}  # chosen on the text
        for name in sorted({*there, *options}):
            if there.get(name) != options.get(name):
                old, new = (by.get(name, "the default") for by in (there, options))
                return f"its {stage} has {name} {old}, not {new}"
    return "it was counted on other text" if texts and _are_other(texts, existing.history) else None


def _are_other(texts: Sequence[str | Path], history: Sequence[Mapping[str, Any]]) -> bool:
    from xtok.counting.texts import find_texts

    here = [(path.name, path.stat().st_size) for path in find_texts(texts)]
    there = [(one["name"], one["size"]) for step in history for one in step.get("texts", ())]
    return here != there


def _steps(config: BuildConfig, counted: bool) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the stages of `build` and their options, as a map's history tells them."""
    first, exact = config.multitoken, ("reapply-exact", matching_options(config))
    if counted:
        first = replace(first, weights="prior", scale_trick=False)
        last = "estimate", {"top_k": config.top_k, "target": config.target}
        steps = [("multitoken", first.options), last, exact]
    else:
        steps = [("multitoken", first.options), exact, ("sort-cut", asdict(config.sort_cut))]
    return [step for step in steps if config.exact_match or step is not exact]
