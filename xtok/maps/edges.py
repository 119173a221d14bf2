"""Edges of a map as flat arrays, and the operations on their rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass

SUM_TOLERANCE = 1e-4
"""How far from 1 the float32 weights of a row may sum."""

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


class Edges(NamedTuple):
    """Weighted pairs of a student and a teacher id, as three arrays of one length."""

    student_ids: NDArray[np.signedinteger[Any]]
    teacher_ids: NDArray[np.signedinteger[Any]]
    weights: NDArray[np.floating[Any]]

    def take(self, selection: NDArray[Any]) -> Edges:
        """Return the edges of a boolean mask, or in an order."""
        return Edges(*(array[selection] for array in self))

    def normalized(self) -> Edges:
        """Return the edges with weights that sum to 1 for each student id."""
        return self._replace(weights=self.weights / row_sums(self))

    @staticmethod
    def concatenate(parts: Iterable[Edges]) -> Edges:
        """Return all edges of several lists, one list after another."""
        return Edges(*map(np.concatenate, zip(*parts, strict=True)))


def first_out_of_order(edges: Edges, last: NDArray[np.bool_] | None = None) -> int | None:
    """Return the first edge that stands before one that should come before it, or None.

    The order is that of `map_order`; student ids are sorted.
    """
    s, t, w = edges
    for start in range(0, len(s) - 1, _BLOCK):
        here = slice(start, min(start + _BLOCK, len(s) - 1))
        after = slice(here.start + 1, here.stop + 1)
        fits = w[after] < w[here]
        if last is not None:
            fits &= last[after] >= last[here]
            fits |= last[after] > last[here]
        fits |= s[after] != s[here]
        if not fits.all():
            tie = (w[after] == w[here]) & (t[after] > t[here])
            if last is not None:
                tie &= last[after] == last[here]
            fits |= tie
            if not fits.all():
                return start + int(np.argmin(fits))
    return None


_BLOCK = 1 << 15
"""Entries that are looked at at once: what fits the processor's cache."""

_SHORT = 64


def _has_duplicates(edges: Edges, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    """Tell whether a row has a teacher id twice; rows begin at `starts` and have `sizes` entries.

    Rows are sorted side by side, short ones filled up, which for 4 million edges in rows of 32
    takes a twentieth of the time of one sort of all pairs.
    """
    s, t, _ = edges
    most = int(sizes.max(initial=0))
    if len(sizes) * most > _FILLED * len(t):  # a few long rows
        pairs = np.sort(s.astype(np.int64) << 32 | t)
        return bool((pairs[1:] == pairs[:-1]).any())
    per_block = max(1, _BLOCK // max(1, most))
    places = np.arange(most, dtype=np.int32)
    for first in range(0, len(starts), per_block):
        here = sizes[first : first + per_block]
        ids = t[starts[first] : starts[first] + here.sum()]
        if len(ids) < len(here) * most:
            filled = np.repeat(-1 - places[None], len(here), axis=0)  # no ids, none of them twice
            filled[places < here[:, None]] = ids
            ids = filled
        rows = np.sort(ids.reshape(len(here), most), axis=1)
        if (rows[:, 1:] == rows[:, :-1]).any():
            return True
    return False


_FILLED = 4
"""How many times the entries may become with short rows filled up to the longest one."""


def pair_order(edges: Edges) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges' order by student, then teacher id, and where each pair begins in it."""
    s, t = edges.student_ids.astype(np.int64), edges.teacher_ids.astype(np.int64)
    pairs = s << 32 | t
    order = np.argsort(pairs, kind="stable")
    return order, row_starts(pairs[order])


def sum_duplicates(edges: Edges) -> Edges:
    """Add up the weights of equal pairs, in the order given; sorted by student, then teacher id.

    Ids are int64, weights float64.
    """
    order, starts = pair_order(edges)
    s, t = (ids[order[starts]].astype(np.int64) for ids in edges[:2])
    weights = edges.weights[order].astype(np.float64)
    return Edges(s, t, np.add.reduceat(weights, starts) if len(starts) else weights)


def row_sums(edges: Edges) -> NDArray[np.float64]:
    """Return, for each edge, the sum of its row's weights, float64 `[nnz]`."""
    if not len(edges.weights):
        return np.zeros(0)
    sums: NDArray[np.float64] = np.bincount(edges.student_ids, edges.weights)[edges.student_ids]
    return sums


def ranks(student_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return each edge's place in its row, int64 `[nnz]`, from 0; student ids are sorted."""
    starts = row_starts(student_ids)
    return np.arange(len(student_ids)) - np.repeat(starts, np.diff(starts, append=len(student_ids)))


def row_starts(student_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each non-empty row begins, int64; student ids are sorted."""
    is_start = np.ones(len(student_ids), np.bool_)
    np.not_equal(student_ids[1:], student_ids[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def map_order(edges: Edges, last: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the order that a map has: student id, (`last` behind,) falling weight, teacher id.

    Weights are compared as float32, as a map has them.
    """
    keys: list[NDArray[Any]] = [edges.teacher_ids, -edges.weights.astype(np.float32)]
    if last is not None:
        keys.append(last)
    return np.lexsort((*keys, edges.student_ids))


def in_map_order(edges: Edges, last: NDArray[np.bool_]) -> Edges:
    """Return the edges in the order of `map_order`; weights are float32.

    What is in order stays as it is, and rows of several maps need only be put in their order.
    """
    if (edges.student_ids[1:] < edges.student_ids[:-1]).any():
        order = np.argsort(edges.student_ids, kind="stable")
        edges, last = edges.take(order), last[order]
    if first_out_of_order(edges, last) is None:
        return edges
    return edges.take(map_order(edges, last))


def heaviest(edges: Edges, top_k: int) -> Edges:
    """Keep the `top_k` heaviest edges of each row, normalized, in a map's order."""
    edges = edges.take(map_order(edges))
    return edges.take(ranks(edges.student_ids) < top_k).normalized()
