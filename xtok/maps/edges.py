"""Edges of a map as flat arrays, with operations on rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOT_WEIGHT = 0.2  # weight of a scale slot, before the row and its slot are normalized together

SUM_TOLERANCE = 1e-4  # maximum deviation of a row's sum of float32 weights from 1

_ROW_SUM_ROUNDING = 1e-6  # maximum rounding error of a row's sum (2^-24 per weight)


class Edges(NamedTuple):
    """Weighted pairs of a student id and a teacher id, as three arrays of equal length."""

    student_ids: NDArray[np.signedinteger[Any]]
    teacher_ids: NDArray[np.signedinteger[Any]]
    weights: NDArray[np.floating[Any]]

    def take(self, selection: NDArray[Any]) -> Edges:
        """Select edges by a boolean mask or by indices."""
        return Edges(*(array[selection] for array in self))

    def normalized(self) -> Edges:
        """Scale the weights so that each student id's weights sum to 1."""
        return self._replace(weights=self.weights / row_sums(self))

    @staticmethod
    def concatenate(parts: Iterable[Edges]) -> Edges:
        """Concatenate edges."""
        return Edges(*map(np.concatenate, zip(*parts, strict=True)))


def out_of_order(edges: Edges, last: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of neighbouring edges that are not in `map_order`.

    The student ids must be sorted.
    """
    s, t, w = edges
    # One bool per pair of neighbours, to save memory on large maps
    in_order: NDArray[np.bool_] = (w[1:] < w[:-1]) | ((w[1:] == w[:-1]) & (t[1:] > t[:-1]))
    in_order &= last[1:] == last[:-1]
    in_order |= (last[1:] > last[:-1]) | (s[1:] != s[:-1])
    return ~in_order


def pair_order(edges: Edges) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices that sort edges by both ids, and the start of each run of equal pairs."""
    pairs = pair_keys(edges.student_ids, edges.teacher_ids)
    order = np.argsort(pairs, kind="stable")
    return order, row_starts(pairs[order])


def num_duplicates(edges: Edges) -> int:
    """Return the number of edges with the same two ids as another edge, not counting the first."""
    pairs = pair_keys(edges.student_ids, edges.teacher_ids)
    pairs.sort()
    return int(np.count_nonzero(pairs[1:] == pairs[:-1]))


def pair_keys(student_ids: NDArray[Any], teacher_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return each pair of ids as one integer, `student_id << 32 | teacher_id`, int64.

    >>> [hex(key) for key in pair_keys(np.array([1, 2]), np.array([10, 11]))]
    ['0x10000000a', '0x20000000b']
    """
    keys = student_ids.astype(np.int64)
    keys <<= 32  # in place, to save memory on large maps
    keys |= teacher_ids
    return keys


def sum_duplicates(edges: Edges) -> Edges:
    """Add up the weights of equal pairs, and sort by student id, then teacher id.

    The result has int64 ids and float64 weights.

    >>> edges = Edges(np.array([1, 0, 1]), np.array([5, 6, 5]), np.array([1.0, 2.0, 3.0]))
    >>> [array.tolist() for array in sum_duplicates(edges)]
    [[0, 1], [6, 5], [2.0, 4.0]]
    """
    order, starts = pair_order(edges)
    s, t = (ids[order[starts]].astype(np.int64) for ids in edges[:2])
    weights = edges.weights[order].astype(np.float64)
    return Edges(s, t, np.add.reduceat(weights, starts) if len(starts) else weights)


def row_sums(edges: Edges) -> NDArray[np.float64]:
    """Return the sum of the weights in each edge's row, float64 `[nnz]`."""
    if not len(edges.weights):
        return np.zeros(0)
    sums: NDArray[np.float64] = np.bincount(edges.student_ids, edges.weights)[edges.student_ids]
    return sums


def ranks(student_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return each edge's position within its row, int64 `[nnz]`; student ids must be sorted.

    >>> ranks(np.array([0, 0, 3])).tolist()
    [0, 1, 0]
    """
    starts = row_starts(student_ids)
    return np.arange(len(student_ids)) - np.repeat(starts, np.diff(starts, append=len(student_ids)))


def row_starts(student_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return the start of each non-empty row, int64; student ids must be sorted."""
    is_start = np.ones(len(student_ids), np.bool_)
    np.not_equal(student_ids[1:], student_ids[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def map_order(edges: Edges, last: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the indices that sort edges by student id, `last`, weight (descending), teacher id.

    Weights are compared as float32.
    """
    order, _ = pair_order(edges)
    # As integers, the bits of positive floats have the same order as the floats. The order of
    # negative floats is reversed.
    bits = np.subtract(0, edges.weights, dtype=np.float32, casting="same_kind").view(np.int32)
    bits ^= bits >> 31 & np.iinfo(np.int32).max
    rows = edges.student_ids.astype(np.int64) * 2
    if last is not None:
        rows += last
    keys = (rows << 32) + bits
    return order[np.argsort(keys[order], kind="stable")]


def in_map_order(edges: Edges, last: NDArray[np.bool_]) -> Edges:
    """Sort edges in the order of `map_order`, unless they are already sorted.

    Weights must be float32.
    """
    if (edges.student_ids[1:] < edges.student_ids[:-1]).any():
        order = np.argsort(edges.student_ids, kind="stable")
        edges, last = edges.take(order), last[order]
    return edges.take(map_order(edges, last)) if out_of_order(edges, last).any() else edges


def heaviest(edges: Edges, top_k: int) -> Edges:
    """Keep the `top_k` heaviest edges of each row, normalized and in the order of `map_order`.

    >>> edges = Edges(np.array([0, 0, 0]), np.array([5, 6, 7]), np.array([1.0, 3.0, 1.0]))
    >>> heaviest(edges, 2).teacher_ids.tolist(), heaviest(edges, 2).weights.tolist()
    ([6, 5], [0.75, 0.25])
    """
    edges = edges.take(map_order(edges))
    return edges.take(ranks(edges.student_ids) < top_k).normalized()


def slot_entries(
    student_ids: NDArray[Any], scale_slot: NDArray[np.uint8] | None
) -> NDArray[np.bool_]:
    """Return a mask of the entries that are scale slots, bool `[nnz]`."""
    if scale_slot is None or not len(student_ids):
        return np.zeros(len(student_ids), np.bool_)
    is_last = np.append(student_ids[1:] != student_ids[:-1], True)
    is_slot: NDArray[np.bool_] = is_last & (scale_slot[student_ids] == 1)
    return is_slot


def single_edges(student_ids: Collection[Any], teacher_ids: Collection[Any]) -> Edges:
    """Return an edge with weight 1 for each pair of ids."""
    s, t = (np.fromiter(ids, np.int32, len(ids)) for ids in (student_ids, teacher_ids))
    return Edges(s, t, np.ones(len(s), np.float32))


def add_slots(
    edges: Edges, candidates: Iterable[int], num_rows: int
) -> tuple[Edges, NDArray[np.uint8]]:
    """Add a scale slot to each non-empty row: the first candidate id that is not in the row."""
    row_slots = np.full(num_rows, -1)
    waiting = np.zeros(num_rows, np.bool_)
    waiting[edges.student_ids] = True
    for candidate in candidates:
        free = waiting.copy()
        free[edges.student_ids[edges.teacher_ids == candidate]] = False
        row_slots[free] = candidate
        waiting &= ~free
        if not waiting.any():
            break
    rows = np.flatnonzero(row_slots >= 0)
    slots = Edges(rows, row_slots[rows], np.full(len(rows), SLOT_WEIGHT))
    return Edges.concatenate([edges, slots]).normalized(), (row_slots >= 0).astype(np.uint8)


def repaired(
    edges: Edges, last: NDArray[np.bool_], has_order: bool, tolerance: float = _ROW_SUM_ROUNDING
) -> tuple[Edges, NDArray[np.int32], dict[str, float]]:
    """Add up duplicates, drop zero weights, normalize, sort, and count the repairs.

    Valid rows do not change. The mask `last` marks slots. The second result contains the student
    ids of rows with a slot.
    """
    keep = edges.weights > 0
    edges, last = edges.take(keep), last[keep]
    moved = edges.student_ids[1:][out_of_order(edges, last)] if has_order else ()
    duplicates, num_slots = num_duplicates(edges), 0
    if duplicates:
        order, starts = pair_order(edges)
        last = np.logical_or.reduceat(last[order], starts)
        num_slots = int((last & (np.diff(starts, append=len(order)) > 1)).sum())
        edges = sum_duplicates(edges)
    sums = row_sums(edges)
    is_off = np.abs(sums - 1) > tolerance
    weights = np.where(is_off, edges.weights / sums, edges.weights).astype(np.float32)
    is_positive = weights > 0  # in float32
    counts: dict[str, float] = {
        "zero weights dropped": int((~keep).sum()) + int((~is_positive).sum()),
        "rows reordered": len(np.unique(moved)),
        "slots merged into an entry with the same id": num_slots,
        "duplicate entries added up": duplicates,
        "rows normalized": len(np.unique(edges.student_ids[is_off])),
    }
    s, t = (ids.astype(np.int32) for ids in edges[:2])
    edges, last = Edges(s, t, weights).take(is_positive), last[is_positive]
    last &= np.bincount(edges.student_ids, minlength=1)[edges.student_ids] > 1
    slotted = edges.student_ids[last]
    return in_map_order(edges, last), slotted, {name: n for name, n in counts.items() if n}
