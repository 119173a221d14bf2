"""`ProjectionMap`: a sparse matrix `[V_student, V_teacher]`, its invariants, and row operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok import __version__
from xtok.maps.edges import (
    _SHORT,
    SUM_TOLERANCE,
    Edges,
    Ids,
    Weights,
    _has_duplicates,
    first_out_of_order,
    map_order,
    row_starts,
)
from xtok.vocab.table import Vocabulary

if TYPE_CHECKING:
    import torch


class RowKind(IntEnum):
    """How a row of a map came about."""

    EMPTY = 0
    EXACT = 1
    PIECES = 2
    ROLE = 3
    EMBEDDING = 4
    COUNTED = 5
    MIXED = 6
    RELAXED = 7


REORDERED = "rows reordered"
"""What a report counts rows under whose entries were not in a map's order."""


@dataclass(frozen=True)
class StageReport:
    """What a stage did, for a person: how many of what, and what deserves a look.

    Attributes:
        stage: the stage's name.
        counts: what was counted, to how many.
        notes: one sentence for each thing that was left out or could not be done.
        failures: likewise for tokens that could not be decoded or spelled; `--strict` refuses them.
    """

    stage: str
    counts: Mapping[str, float]
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class InvariantError(ValueError):
    """A map that breaks one of `INVARIANTS`, whose name is `invariant`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionMap:
    """A cross-tokenizer projection map W, float32 `[V_student, V_teacher]`, as sorted COO.

    Entries are sorted by student id, then by falling weight, then by teacher id; a row's scale
    slot comes last whatever its weight. Every non-empty row sums to 1.

    Attributes:
        student: the vocabulary of the rows.
        teacher: the vocabulary of the columns.
        student_ids: int32 `[nnz]`.
        teacher_ids: int32 `[nnz]`.
        weights: float32 `[nnz]`, > 0.
        row_kind: uint8 `[V_student]`, a `RowKind` each.
        scale_slot: uint8 `[V_student]`, 1 where the row's last entry is the scale slot; None for a
            map without the scale trick.
        method: how the edges were found: `multitoken`, `estimate`, `generate`, or `imported`.
        top_k: how many entries a row may have.
        history: one object per stage: its name, its options, the version that ran it.
        reports: what the stages of this process have to say; not saved.
    """

    student: Vocabulary
    teacher: Vocabulary
    student_ids: Ids
    teacher_ids: Ids
    weights: Weights
    row_kind: NDArray[np.uint8]
    scale_slot: NDArray[np.uint8] | None
    method: str
    top_k: int
    history: tuple[Mapping[str, Any], ...] = ()
    reports: tuple[StageReport, ...] = ()

    def __repr__(self) -> str:
        sides = (self.student, self.teacher)
        rows, columns = (f"{'' if v.width_is_known else '≥'}{v.vocab_size}" for v in sides)
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        return f"ProjectionMap({pair}, {rows} × {columns}, nnz={self.nnz})"

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return len(self.weights)

    @property
    def enable_scale_trick(self) -> bool:
        """Whether rows may have a scale slot."""
        return self.scale_slot is not None

    @property
    def edges(self) -> Edges:
        """The three arrays of the COO matrix."""
        return Edges(self.student_ids, self.teacher_ids, self.weights)

    @property
    def entries_per_row(self) -> NDArray[np.int64]:
        """The number of entries of each row, int64 `[V_student]`."""
        starts = row_starts(self.student_ids)
        entries = np.zeros(self.shape[0], np.int64)
        entries[self.student_ids[starts]] = np.diff(starts, append=self.nnz)
        return entries

    @property
    def is_slot(self) -> NDArray[np.bool_]:
        """Which entries are scale slots, bool `[nnz]`."""
        found = np.zeros(self.nnz, np.bool_)
        if self.scale_slot is not None and self.nnz:
            last = np.append(self.student_ids[1:] != self.student_ids[:-1], True)
            found = last & (self.scale_slot[self.student_ids] == 1)
        return found

    @property
    def heaviest_teacher_ids(self) -> Ids:
        """The heaviest entry of each row but for its slot, int32 `[V_student]`; −1 for none."""
        found = np.full(self.shape[0], -1, np.int32)
        entries = self.edges.take(~self.is_slot)
        rows, places = np.unique(entries.student_ids, return_index=True)
        found[rows] = entries.teacher_ids[places]
        return found

    def row(self, student_id: int) -> tuple[Ids, Weights]:
        """Return the teacher ids (int32) and weights (float32) of one row, heaviest first."""
        if not 0 <= student_id < self.shape[0]:
            raise IndexError(f"student id {student_id} is not in 0..{self.shape[0] - 1}")
        ends = np.array([student_id, student_id + 1], self.student_ids.dtype)  # else ids are copied
        start, end = np.searchsorted(self.student_ids, ends)
        return self.teacher_ids[start:end], self.weights[start:end]

    def check(self) -> None:
        """Check every invariant of the class.

        Raises:
            InvariantError: naming the first one that does not hold, and where.
        """
        if "_holds" not in vars(self):
            for name, (check, _) in INVARIANTS.items():
                _check_named(name, check, self)
            arrays = (*self.edges, self.row_kind, self.scale_slot)
            if not any(array is not None and array.flags.writeable for array in arrays):
                vars(self)["_holds"] = True  # of arrays that cannot change, once is enough

    def to_torch(self) -> torch.Tensor:
        """Return W as a coalesced sparse COO tensor, float32 `[V_student, V_teacher]`."""
        import torch

        order = np.lexsort((self.teacher_ids, self.student_ids))
        indices = np.stack([self.student_ids[order], self.teacher_ids[order]]).astype(np.int64)
        return torch.sparse_coo_tensor(
            torch.from_numpy(indices),
            torch.from_numpy(self.weights[order]),
            self.shape,
            is_coalesced=True,
            check_invariants=True,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the map as `.safetensors`, or in NeMo-RL's layout as `.pt`; see `mapfile.save`."""
        from xtok.maps import file as mapfile

        mapfile.save(self, path)

    @staticmethod
    def load(path: str | PathLike[str], **options: Any) -> ProjectionMap:
        """Read a `.safetensors` or `.pt` map; see `mapfile.load`."""
        from xtok.maps import file as mapfile

        return mapfile.load(path, **options)


def _check_named(name: str, check: Callable[[ProjectionMap], None], m: ProjectionMap) -> None:
    try:
        check(m)
    except ValueError as error:
        raise InvariantError(name, str(error)) from error


# The checks are few passes over the entries, none of which needs more memory than they do.


def _check_shapes(m: ProjectionMap) -> None:
    num_rows, _ = m.shape
    _require(len(m.student_ids) == len(m.teacher_ids) == m.nnz, "the three arrays differ in length")
    _require(m.row_kind.shape == (num_rows,), f"row_kind is not of shape [{num_rows}]")
    if m.scale_slot is not None:
        _require(m.scale_slot.shape == (num_rows,), f"scale_slot is not of shape [{num_rows}]")


def _check_ids(m: ProjectionMap) -> None:
    num_rows, num_columns = m.shape
    _require_in(m.student_ids, num_rows, "student_ids")
    _require_in(m.teacher_ids, num_columns, "teacher_ids")


def _check_weights(m: ProjectionMap) -> None:
    lowest, highest = m.weights.min(initial=1), m.weights.max(initial=1)  # NaN comes through
    _require(bool(np.isfinite(lowest) and np.isfinite(highest)), "weights are not all finite")
    _require(bool(lowest > 0), "weights are not all > 0")


def _check_kinds(m: ProjectionMap) -> None:
    _require_in(m.row_kind, len(RowKind), "row_kind")
    starts, sizes = _rows(m)
    filled = np.zeros(m.shape[0], np.bool_)
    filled[m.student_ids[starts]] = True
    _require(
        bool((filled == (m.row_kind != RowKind.EMPTY)).all()),
        "row_kind is not empty exactly where a row is",
    )
    if m.scale_slot is not None:
        _require_in(m.scale_slot, 2, "scale_slot")
        _require(bool(filled[m.scale_slot == 1].all()), "an empty row has a scale slot")
    most = int(sizes.max(initial=0))
    _require(m.top_k >= most, f"a row has more than top_k={m.top_k} entries")


def _check_order(m: ProjectionMap) -> None:
    rising = m.student_ids[1:] >= m.student_ids[:-1]
    _require(bool(rising.all()), "student_ids are not sorted")
    place = first_out_of_order(m.edges, m.is_slot)
    if place is not None:
        row = int(m.student_ids[place])
        raise ValueError(f"row {row} is not sorted by falling weight, then teacher id")
    _require(not _has_duplicates(m.edges, *_rows(m)), "a row has the same teacher id twice")


def _check_sums(m: ProjectionMap) -> None:
    starts, sizes = _rows(m)
    sums = _sums(m.weights, starts, int(sizes.max(initial=0)))
    off = np.abs(sums - 1) > SUM_TOLERANCE
    if off.any():
        place = int(np.argmax(off))
        row = int(m.student_ids[starts[place]])
        raise ValueError(f"row {row} sums to {sums[place]:.6g}, not 1")


def _rows(m: ProjectionMap) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each non-empty row begins, and how many entries it has; int64."""
    starts = row_starts(m.student_ids)
    return starts, np.diff(starts, append=m.nnz)


def _sums(weights: Weights, starts: NDArray[np.int64], most_entries: int) -> NDArray[Any]:
    """Return the sums of rows that begin at `starts`, exact to well within `SUM_TOLERANCE`.

    For short rows float32 is exact enough to tell that all is well (2^-24 per entry), and takes a
    quarter of the time.
    """
    if not len(starts):
        return np.zeros(0)
    if most_entries <= _SHORT:
        rough = np.add.reduceat(weights, starts)
        if (np.abs(rough - 1) < SUM_TOLERANCE / 2).all():
            return np.asarray(rough)
    return np.asarray(np.add.reduceat(weights, starts, dtype=np.float64))


INVARIANTS: Mapping[str, tuple[Callable[[ProjectionMap], None], str]] = {
    "shapes": (_check_shapes, "every array has its length"),
    "ids": (_check_ids, "within the two widths"),
    "weights": (_check_weights, "finite and above 0"),
    "row kinds": (_check_kinds, "fit the rows, which have at most top_k entries"),
    "order": (_check_order, "sorted, no pair twice"),
    "sums": (_check_sums, "every row that has entries sums to 1"),
}
"""What holds for every map: a check that raises a `ValueError`, and what it says if it does not.
A check may rely on those before it."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_in(values: NDArray[Any], bound: int, name: str) -> None:
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < bound):
        raise ValueError(f"{name} are not all in 0..{bound - 1}")


def transpose(projection: ProjectionMap) -> ProjectionMap:
    """Return the map of the other direction: roles swapped, rows normalized, without slots.

    A row keeps the kind that all its entries come from; pinned kinds only if it has one entry. What
    comes from rows of several kinds is MIXED. Rows may have far more entries than before.
    """
    kept = projection.edges.take(~projection.is_slot)
    edges = Edges(kept.teacher_ids, kept.student_ids, kept.weights).normalized()
    edges = edges._replace(weights=edges.weights.astype(np.float32))
    order = map_order(edges)
    s, t, weights = edges.take(order[edges.weights[order] > 0])
    entries = np.bincount(s, minlength=projection.shape[1])
    of_entry = projection.row_kind[t]
    least, largest = np.full(len(entries), 255, np.uint8), np.zeros(len(entries), np.uint8)
    np.minimum.at(least, s, of_entry)
    np.maximum.at(largest, s, of_entry)
    several = (entries > 1) & np.isin(largest, [RowKind.EXACT, RowKind.ROLE])
    kind = np.where((least < largest) | several, np.uint8(RowKind.MIXED), largest)
    counts = {
        "rows": int(np.count_nonzero(entries)),
        "rows empty": int(np.count_nonzero(entries == 0)),
        "slots dropped": int(np.count_nonzero(projection.is_slot)),
    }
    step = {
        "stage": "transpose",
        "options": _swapped_ids(projection.history),
        "xtok_version": __version__,
    }
    return replace(
        projection,
        student=projection.teacher,
        teacher=projection.student,
        student_ids=s.astype(np.int32),
        teacher_ids=t.astype(np.int32),
        weights=weights.astype(np.float32),
        row_kind=np.where(entries > 0, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=None,
        top_k=max(1, int(entries.max(initial=0))),
        history=(*projection.history, step),
        reports=(*projection.reports, StageReport("transpose", counts)),
    )


def _swapped_ids(history: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ids that the last stage ignores, each as those of the other side."""
    found: dict[str, Any] = {}
    for step in history:
        for ours, other in (("student", "teacher"), ("teacher", "student")):
            if f"ignore_{ours}_ids" in step["options"]:
                found[f"ignore_{other}_ids"] = step["options"][f"ignore_{ours}_ids"]
    if found:
        found = {"ignore_student_ids": [], "ignore_teacher_ids": []} | found
    return found
