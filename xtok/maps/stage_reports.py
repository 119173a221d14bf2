"""What stages report of their maps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from xtok.config import MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.file import StoredMap
from xtok.maps.projection_map import ProjectionMap, RowKind, StageReport
from xtok.tokenizers.display import plural
from xtok.tokenizers.notes import examples_of, tokenizer_notes, undecodable_tokens
from xtok.tokenizers.pairs import Pair, require_table

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
    """Return the report of a stage with all notes on the pair's tokenizers."""
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


def require_complete(any_map: StoredMap) -> None:
    """Raise an `XtokError` if the reports of a map name tokens that were not decoded or spelled."""
    failures = [failure for report in any_map.reports for failure in report.failures]
    if failures:
        raise XtokError(
            "; ".join(failures),
            hint="leave out {option} to go on without them: their rows and columns stay empty",
            parameter="strict",
        )


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
