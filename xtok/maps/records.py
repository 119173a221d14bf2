"""Row kinds, history steps and stage reports of a map."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from xtok import __version__
from xtok.errors import XtokError
from xtok.tokenizers.display import plural
from xtok.tokenizers.notes import examples_of, tokenizer_notes
from xtok.tokenizers.pairs import Pair, require_table

if TYPE_CHECKING:
    from xtok.maps.file import StoredMap
    from xtok.maps.projection_map import ProjectionMap


class RowKind(IntEnum):
    """Origin of a row's entries."""

    EMPTY = 0
    EXACT = 1
    PIECES = 2
    ROLE = 3
    SIMILAR = 4
    COUNTED = 5
    MIXED = 6
    RELAXED = 7


_KIND_WORDS = {kind: kind.name.lower() for kind in RowKind} | {
    RowKind.PIECES: "from pieces", RowKind.ROLE: "by role", RowKind.SIMILAR: "by similarity",
}  # fmt: skip


@dataclass(frozen=True)
class StageReport:
    """Results of one stage: counts by name, and notes for the user."""

    stage: str
    counts: Mapping[str, float]
    notes: tuple[str, ...] = ()  # sentences about omitted tokens or text
    failures: tuple[str, ...] = ()  # tokens that could not be decoded or spelled


# The inputs that determine a map (except its pair and xtok's version), as JSON values
Recipe: TypeAlias = Mapping[str, Any]


class InvariantError(ValueError):
    """Error for a map that breaks an invariant."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(invariant, message)  # both, for pickling
        self.invariant, self.message = invariant, message

    def __str__(self) -> str:
        return self.message


def require(holds: object, message: str) -> None:
    """Raise a `ValueError` unless the condition holds."""
    if not holds:
        raise ValueError(message)


def require_valid(holds: object, part: str) -> None:
    """Raise a `ValueError` about an invalid part of a file unless the condition holds."""
    require(holds, f"{part} is not valid")


def history_step(stage: str, options: Mapping[str, Any], **details: Any) -> dict[str, Any]:
    """Return the history entry of a stage, with the version of xtok."""
    return {"stage": stage, "options": options, **details, "xtok_version": __version__}


def stage_report(
    stage: str,
    projection: ProjectionMap,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
    counts: Mapping[str, float] | None = None,
) -> StageReport:
    """Return the report of a stage, with the number of rows of each kind."""
    per_kind = np.bincount(projection.row_kind, minlength=len(RowKind)).tolist()
    rows = {f"rows {_KIND_WORDS[k]}": per_kind[k] for k in RowKind if per_kind[k]}
    return StageReport(stage, {**rows, **(counts or {})}, tuple(notes), tuple(failures))


def require_complete(any_map: StoredMap) -> None:
    """Raise an `XtokError` if a report names tokens that could not be decoded or spelled."""
    failures = [failure for report in any_map.reports for failure in report.failures]
    if failures:
        raise XtokError(
            "; ".join(failures),
            hint="leave out {option} to continue; the rows and columns of these tokens stay empty",
            parameter="strict",
        )


def map_notes(pair: Pair, projection: ProjectionMap, ignored: Collection[int]) -> list[str]:
    """Return notes about a map's tokenizers, scale slots and empty rows (except `ignored` rows)."""
    table, kind = require_table(projection.student), projection.row_kind
    text = [i for i in table.text_ids.tolist() if not kind[i] and i not in ignored]
    special = [i for i in table.control_names if not kind[i] and i not in ignored]
    notes = [*tokenizer_notes(pair), *_slot_notes(projection)]
    if text:
        notes.append(f"empty rows: {examples_of(text, table)}")
    if special:
        notes.append(f"no counterpart for {examples_of(special, table, 'special token')}")
    return notes


def _slot_notes(projection: ProjectionMap) -> list[str]:
    if projection.scale_slot is None:
        return []
    notes = []
    needs_none = [RowKind.EMPTY, RowKind.EXACT, RowKind.ROLE]
    lacking = (projection.scale_slot == 0) & ~np.isin(projection.row_kind, needs_none)
    if lacking.any():
        notes.append(
            f"{plural(int(lacking.sum()), 'row')} without a scale slot, because the teacher has no "
            "unused or special id for the slot"
        )
    ids, times = np.unique(projection.teacher_ids[projection.is_slot], return_counts=True)
    if len(ids):
        frequent = ids[np.argsort(-times, kind="stable")].tolist()
        notes.append(
            f"scale slots use {examples_of(frequent, projection.teacher.table, 'teacher id')}"
        )
    return notes
