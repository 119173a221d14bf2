"""What a stage returns: a finished map and its report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.edges import Edges, add_slots, heaviest, in_map_order, sum_duplicates
from xtok.maps.projection_map import ProjectionMap, RowKind, StageReport
from xtok.tokenizers.display import listed, plural
from xtok.tokenizers.pairs import SIDES, Pair, require_table
from xtok.tokenizers.roles import slot_candidates
from xtok.tokenizers.table import TokenTable


def map_of_edges(
    edges: Edges,
    *,
    scale_slot: NDArray[np.uint8] | None,
    before: ProjectionMap | None = None,
    **fields: Any,
) -> ProjectionMap:
    """Round the weights to float32, sort the rows, and put slots (a row's last edge) behind.

    Fields of the map that are not given are those of the map `before`.
    """
    edges = edges._replace(weights=edges.weights.astype(np.float32, copy=False))
    last = np.zeros(len(edges.weights), np.bool_)
    if scale_slot is not None:
        final = np.zeros(len(scale_slot), np.int64)
        np.maximum.at(final, edges.student_ids, np.arange(len(last)))
        last[final[scale_slot == 1]] = True
    keep = edges.weights > 0  # a piece's weight may be too small for float32
    if not keep.all():
        edges, last = edges.take(keep), last[keep]
    edges = in_map_order(edges, last)
    fields |= {
        "student_ids": edges.student_ids.astype(np.int32, copy=False),
        "teacher_ids": edges.teacher_ids.astype(np.int32, copy=False),
        "weights": edges.weights,
        "scale_slot": scale_slot,
    }
    return ProjectionMap(**fields) if before is None else replace(before, **fields)


_IN_WORDS = {
    RowKind.EMPTY: "empty",
    RowKind.EXACT: "exact",
    RowKind.PIECES: "from pieces",
    RowKind.ROLE: "by role",
    RowKind.SIMILAR: "by similarity",
    RowKind.COUNTED: "counted",
    RowKind.MIXED: "mixed",
    RowKind.RELAXED: "relaxed",
}


def stage_report(
    stage: str,
    projection: ProjectionMap,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
    counts: Mapping[str, float] | None = None,
) -> StageReport:
    """Return the report of a stage: the rows of its result by kind, and more counts."""
    per_kind = np.bincount(projection.row_kind, minlength=len(RowKind)).tolist()
    rows = {f"rows {_IN_WORDS[k]}": per_kind[k] for k in RowKind if per_kind[k]}
    return StageReport(stage, {**rows, **(counts or {})}, tuple(notes), tuple(failures))


def report_of_pair(
    stage: str,
    pair: Pair,
    projection: ProjectionMap,
    config: MultitokenConfig,
    *,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
    counts: Mapping[str, float] | None = None,
) -> StageReport:
    """Return the report of a stage with all that is to say of the pair's tokenizers."""
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    notes = [*tokenizer_notes(pair), *map_notes(projection, ignored[0]), *notes]
    failures = [*undecodable_tokens(pair, ignored), *failures]
    return stage_report(stage, projection, notes, failures, counts)


def with_report(
    projection: ProjectionMap,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
    counts: Mapping[str, float] | None = None,
) -> ProjectionMap:
    """Return a map with the report of its last stage."""
    stage = projection.history[-1]["stage"]
    report = stage_report(stage, projection, notes, failures, counts)
    return replace(projection, reports=(*projection.reports, report))


def tokenizer_notes(pair: Pair) -> list[str]:
    """Return a note on each side's width and where it comes from, and on what changes text."""
    notes = []
    for side, tokenizer in zip(SIDES, pair.tokenizers, strict=True):
        vocabulary = tokenizer.vocabulary
        notes.append(
            f"{side} {vocabulary.model_id}: {vocabulary.vocab_size:,} ids wide "
            f"(from the {vocabulary.width_source})"
        )
        notes += [
            f"{vocabulary.model_id} changes text: {normalizer}: {changes}"
            for normalizer, changes in tokenizer.text_changes
        ]
    return [*notes, *case_notes(pair)]


def case_notes(pair: Pair) -> list[str]:
    """Return a note for each side whose vocabulary has no upper case, where the other's has."""
    ends = ("their rows are empty", "no row leads to them")
    notes = []
    for one, end in zip((pair, pair.reversed), ends, strict=True):
        if count := len(one.upper_case):
            notes.append(
                f"{count:,} of {len(one.tables[0].text_ids):,} tokens of {one.student.model_id} "
                f"have upper-case letters, and {one.teacher.model_id} has none: {end}"
            )
    return notes


def undecodable_tokens(
    pair: Pair, ignored: tuple[Collection[int], Collection[int]] = ((), ())
) -> list[str]:
    """Return a sentence for each side that has ids that should stand for text and do not."""
    failures = []
    for side, tokenizer, left_out in zip(SIDES, pair.tokenizers, ignored, strict=True):
        undecodable = [i for i in tokenizer.undecodable if i not in left_out]
        if undecodable:
            what = examples_of(undecodable, tokenizer.table, "id")
            failures.append(f"{side} {tokenizer.vocabulary.model_id}: no bytes behind {what}")
    return failures


def map_notes(projection: ProjectionMap, ignored: Collection[int] = ()) -> list[str]:
    """Return notes on a finished map: its scale slots, and rows that are empty.

    Rows of `ignored` ids are empty on request.
    """
    table, kind = require_table(projection.student), projection.row_kind
    text = [i for i in table.text_ids.tolist() if not kind[i] and i not in ignored]
    special = [i for i in table.control_names if not kind[i] and i not in ignored]
    notes = _slot_notes(projection)
    if text:
        notes.append(f"empty rows: {examples_of(text, table)}")
    if special:
        notes.append(f"no counterpart for {examples_of(special, table, 'special token')}")
    return notes


def _slot_notes(projection: ProjectionMap) -> list[str]:
    """Return a note on rows that have no scale slot, and one on the ids that serve as slots."""
    if projection.scale_slot is None:
        return []
    notes = []
    needs_none = [RowKind.EMPTY, RowKind.EXACT, RowKind.ROLE]
    lacking = (projection.scale_slot == 0) & ~np.isin(projection.row_kind, needs_none)
    if lacking.any():
        notes.append(
            f"{plural(int(lacking.sum()), 'row')} without a scale slot: no teacher id is free of "
            "meaning"
        )
    ids, times = np.unique(projection.teacher_ids[projection.is_slot], return_counts=True)
    if len(ids):
        frequent = ids[np.argsort(-times, kind="stable")].tolist()
        notes.append(
            f"scale slots on {examples_of(frequent, projection.teacher.table, 'teacher id')}"
        )
    return notes


def examples_of(ids: Sequence[int], table: TokenTable | None, what: str = "token") -> str:
    """Count ids in words, with the first few as examples."""
    names = (str(i) if table is None else f"{i} {table.quoted(i)}" for i in ids)
    return f"{plural(len(ids), what)}: {listed(names)}"


def check_ignored(pair: Pair, config: MultitokenConfig) -> None:
    """Raise an `XtokError` if the pair has no such ids to ignore."""
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    for side, width, ids in zip(SIDES, pair.shape, ignored, strict=True):
        if ids and max(ids) >= width:
            raise XtokError(
                f"there is no {side} id {max(ids)} to ignore: "
                f"{getattr(pair, side).model_id} is {width} wide",
                hint=f"give ids from 0 to {width - 1} with {{option}}",
                parameter=f"ignore_{side}_ids",
            )


def map_of_rows(
    pair: Pair,
    edges: Edges,
    kind: NDArray[np.uint8],
    config: MultitokenConfig,
    method: str,
    earlier: ProjectionMap | None = None,
) -> ProjectionMap:
    """Add up edges, normalize and cut the rows, and give them slots if they have any.

    `kind` is that of the rows, uint8 `[V_student]`; one without edges is empty whatever it says.
    """
    edges = sum_duplicates(edges).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(kind)) > 0
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        ignored = config.ignore_teacher_ids
        candidates = [i for i in slot_candidates(pair.tables[1]) if i not in ignored]
        edges, slot = add_slots(edges, candidates, len(kind))
    return map_of_edges(
        edges,
        student=pair.sides[0],
        teacher=pair.sides[1],
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method=method,
        top_k=config.top_k,
        history=() if earlier is None else earlier.history,
        reports=() if earlier is None else earlier.reports,
    )


def unspelled_note(pair: Pair, ids: Collection[int]) -> list[str]:
    """Name the student tokens that the teacher cannot spell; nothing if there are none."""
    examples = examples_of(sorted(ids), pair.tables[0]) if ids else ""
    return [f"{pair.teacher.model_id} cannot spell {examples}"] if ids else []
