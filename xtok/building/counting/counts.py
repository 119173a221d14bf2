"""Counts of token pairs and chunks, as integers: independent of order and grouping.

A pair is an int64, `student_id << 32 | teacher_id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.config import Target
from xtok.maps.edges import Edges, pair_order

if TYPE_CHECKING:
    from xtok.building.counting.aligned import AlignedTexts

UNIT = 720_720  # count of a chunk, shared by its pairs; divisible by every number up to 16

# Maximum number of tokens of a chunk on each side; longer chunks are skipped and reported
LONGEST_CHUNK = 64

_CHUNKS_AT_ONCE = 1 << 16
_ONE = np.ones(1, np.int64)


def unit_of(target: Target) -> int:
    """Return the count of one occurrence."""
    return 1 if target == "start" else UNIT


def pair_edges(keys: NDArray[np.int64], counts: NDArray[Any]) -> Edges:
    """Convert pairs and their counts to edges."""
    return Edges((keys >> 32).astype(np.int32), keys.astype(np.int32), counts)


def edge_keys(edges: Edges) -> NDArray[np.int64]:
    """Convert edges to pairs, int64."""
    return edges.student_ids.astype(np.int64) << 32 | edges.teacher_ids


class MapRows(NamedTuple):
    """Rows of a map for kernels; row s contains the entries `bounds[s]` to `bounds[s + 1]`.

    `bounds` is int64, `columns` int32, ascending in each row, `weights` float64.
    """

    bounds: NDArray[np.int64]
    columns: NDArray[np.int32]
    weights: NDArray[np.float64]

    @staticmethod
    def of(edges: Edges, num_rows: int) -> MapRows:
        """Convert edges without duplicates, in any order."""
        edges = edges.take(pair_order(edges)[0])
        bounds = offsets_of(np.bincount(edges.student_ids, minlength=num_rows))
        return MapRows(bounds, edges.teacher_ids.astype(np.int32), edges.weights.astype(np.float64))


_NO_ROWS = MapRows(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))


class PairCounts:
    """Number of occurrences of each pair, in an open-addressed hash table of NumPy arrays."""

    def __init__(self) -> None:
        self._size = 0
        self._keys = np.full(1 << 12, -1, np.int64)
        self._counts = np.zeros(1 << 12, np.int64)

    def __len__(self) -> int:
        return self._size

    def add(self, keys: NDArray[np.int64], amounts: NDArray[np.int64] = _ONE) -> None:
        """Add amounts to pairs; a single amount applies to all pairs."""
        from xtok.building.counting.kernels import add_counts

        done = 0
        while done < len(keys):
            room = 3 * len(self._keys) // 4 - self._size  # at most three quarters of the slots
            rest = amounts if len(amounts) == 1 else amounts[done:]
            count, new = add_counts(keys[done:], rest, self._keys, self._counts, room)
            done, self._size = done + count, self._size + new
            if done < len(keys):  # full: move everything to a table of twice the size
                old_keys, old_counts = self.arrays()
                self._keys = np.full(2 * len(self._keys), -1, np.int64)
                self._counts = np.zeros(len(self._keys), np.int64)
                add_counts(old_keys, old_counts, self._keys, self._counts, len(old_keys))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs in ascending order, and their counts, both int64."""
        used = self._keys >= 0
        order = np.argsort(self._keys[used])
        return self._keys[used][order], self._counts[used][order]


class DistinctChunks(NamedTuple):
    """Distinct chunks, and the number of occurrences of each."""

    ids: NDArray[np.int32]  # ids of all chunks, concatenated; in each, the student's tokens first
    bounds: NDArray[np.int64]  # [chunks + 1], start of each chunk in `ids`
    widths: NDArray[np.int64]  # [chunks], number of student tokens
    counts: NDArray[np.int64]

    def take(self, chosen: NDArray[np.bool_]) -> DistinctChunks:
        """Select chunks, bool `[chunks]`."""
        lengths = np.diff(self.bounds)
        bounds = offsets_of(lengths[chosen])
        ids = self.ids[np.repeat(chosen, lengths)]
        return DistinctChunks(ids, bounds, self.widths[chosen], self.counts[chosen])

    @property
    def keys(self) -> NDArray[np.int64]:
        """The pair of tokens at the start of each chunk, int64."""
        starts = self.bounds[:-1]
        keys = self.ids[starts].astype(np.int64) << 32
        keys |= self.ids[starts + self.widths]
        return keys


class ChunkCounts:
    """Number of occurrences of each chunk, in an open-addressed hash table; indices are stable."""

    def __init__(self) -> None:
        self._size = 0
        self._allocate(1 << 12, 1 << 14)

    def __len__(self) -> int:
        return self._size

    def _allocate(self, places: int, num_ids: int) -> None:
        self._ids = np.empty(num_ids, np.int32)
        self._bounds = np.zeros(places + 1, np.int64)
        self._widths, self._counts = np.empty((2, places), np.int64)
        self._table = np.full(places, -1, np.int64)

    def add(
        self,
        spans: NDArray[np.int64],
        s_ids: NDArray[np.int32],
        t_ids: NDArray[np.int32],
        amounts: NDArray[np.int64] = _ONE,
    ) -> NDArray[np.int64]:
        """Add amounts to chunks; a single amount applies to all. Return their indices, int64.

        `spans` is int64 `[4, chunks]`, as in `AlignedTexts`.
        """
        from xtok.building.counting.kernels import add_chunks

        places = np.empty(spans.shape[1], np.int64)
        done = 0
        while done < len(places):
            rest = amounts if len(amounts) == 1 else amounts[done:]
            count, self._size = add_chunks(
                *spans[:, done:], rest, s_ids, t_ids, self._ids, self._bounds, self._widths,
                self._counts, self._table, self._size, places[done:],
            )  # fmt: skip
            done += count
            if done < len(places):  # full: move everything to a table of twice the size
                before = self.chunks()
                i, i_end, j, j_end = spans[:, done:]
                longest = int((i_end - i + j_end - j).max())
                self._allocate(2 * len(self._table), 2 * len(self._ids) + longest)
                self._size = 0
                self.add_chunks(before)
        return places

    def add_chunks(self, chunks: DistinctChunks) -> None:
        """Add the counts of other chunks."""
        starts, middles = chunks.bounds[:-1], chunks.bounds[:-1] + chunks.widths
        spans = np.stack([starts, middles, middles, chunks.bounds[1:]])
        self.add(spans, chunks.ids, chunks.ids, chunks.counts)

    def chunks(self) -> DistinctChunks:
        """Return the counts."""
        size = self._size
        return DistinctChunks(
            self._ids[: self._bounds[size]].copy(),
            self._bounds[: size + 1].copy(),
            self._widths[:size].copy(),
            self._counts[:size].copy(),
        )


class Counts(NamedTuple):
    """Counts of pairs at shared token boundaries, and of chunks, in units of `unit_of(target)`."""

    keys: NDArray[np.int64]  # pairs in ascending order
    counts: NDArray[np.int64]
    chunks: DistinctChunks

    def pairs(
        self, predicted: MapRows | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all pairs in ascending order, and their counts, including the pairs within chunks.

        The pairs of a chunk share its count equally, or in proportion to the student tokens'
        weights for each teacher token: the E step of IBM Model 1 (Brown et al., Computational
        Linguistics 19(2), 1993, section 4.2). Its likelihood equals P-KL's average over a chunk's
        rows.
        """
        ids, all_bounds, all_widths, all_counts = self.chunks
        if not len(all_counts):
            return self.keys, self.counts
        from xtok.building.counting.kernels import chunk_pairs

        pairs = PairCounts()
        pairs.add(self.keys, self.counts)
        rows = _NO_ROWS if predicted is None else predicted
        for start in range(0, len(all_counts), _CHUNKS_AT_ONCE):
            stop = start + _CHUNKS_AT_ONCE
            bounds, widths = all_bounds[start : stop + 1], all_widths[start:stop]
            num_pairs = int((widths * (np.diff(bounds) - widths)).sum())
            keys, amounts = np.empty((2, num_pairs), np.int64)
            counts = all_counts[start:stop]
            chunk_pairs(ids, bounds, widths, counts, UNIT, *rows, keys, amounts)
            used = amounts > 0
            pairs.add(keys[used], amounts[used])
        return pairs.arrays()


class Tally:
    """Growing counts for a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._pairs, self._chunks = PairCounts(), ChunkCounts()

    def add(self, aligned: AlignedTexts, chosen: NDArray[np.bool_] | None = None) -> int:
        """Count chunks, bool `[chunks]`, and pairs at their starts; return the number skipped."""
        if self.target != "chunk":
            keys = aligned.keys if chosen is None else aligned.keys[chosen]
            self._pairs.add(keys, np.full(1, unit_of(self.target), np.int64))
        if self.target == "start":
            return 0
        spans = aligned.spans if chosen is None else aligned.spans[:, chosen]
        is_long = is_too_long(spans[1] - spans[0], spans[3] - spans[2])
        self._chunks.add(spans[:, ~is_long], aligned.student.ids, aligned.teacher.ids)
        return int(is_long.sum())

    def counts(self) -> Counts:
        """Return the counts."""
        return Counts(*self._pairs.arrays(), self._chunks.chunks())


def is_too_long(num_student: NDArray[np.int64], num_teacher: NDArray[np.int64]) -> Any:
    """Whether chunks with these numbers of tokens are excluded from the counts, bool."""
    return np.maximum(num_student, num_teacher) > LONGEST_CHUNK
