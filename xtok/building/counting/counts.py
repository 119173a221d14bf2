"""Count pairs of tokens, and count distinct chunks.

Counts are integers, so the order of the texts does not change the counts. A pair is stored as an
int64 (see `pair_keys`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.building.counting.kernels import add_chunks, chunk_pairs
from xtok.config import Target
from xtok.maps.edges import Edges, pair_keys, pair_order, row_starts

if TYPE_CHECKING:
    from xtok.building.counting.aligned import AlignedTexts

UNIT = 720_720  # count of one chunk, divided among its pairs; divisible by all numbers up to 16

# Maximum number of tokens of a chunk on each side. Longer chunks are skipped and reported.
LONGEST_CHUNK = 64

Pairs: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]  # pairs, and their counts

_CHUNKS_AT_ONCE = 1 << 16
_ONE = np.ones(1, np.int64)


def count_unit(target: Target) -> int:
    """Return the count of a pair that occurs once."""
    return 1 if target == "start" else UNIT


def pair_edges(keys: NDArray[np.int64], counts: NDArray[Any]) -> Edges:
    """Convert pairs and their counts to edges."""
    return Edges((keys >> 32).astype(np.int32), keys.astype(np.int32), counts)


class MapRows(NamedTuple):
    """Rows of a map as arrays for kernels. Row s has the entries `bounds[s]` to `bounds[s + 1]`.

    The columns of each row are ascending.
    """

    bounds: NDArray[np.int64]
    columns: NDArray[np.int32]
    weights: NDArray[np.float64]

    @staticmethod
    def of(edges: Edges, num_rows: int) -> MapRows:
        """Convert edges, in any order but without duplicates, to rows."""
        edges = edges.take(pair_order(edges)[0])
        bounds = offsets_of(np.bincount(edges.student_ids, minlength=num_rows))
        return MapRows(bounds, edges.teacher_ids.astype(np.int32), edges.weights.astype(np.float64))


_NO_ROWS = MapRows(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))


class PairCounts:
    """Counts of pairs, stored in sorted arrays, the *runs*.

    Each run is at least twice as long as the next run, so each pair is merged only a few times.
    Sorting takes less than 1 % of the time that encoding takes.
    """

    def __init__(self) -> None:
        self._runs: list[Pairs] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]

    def add(self, keys: NDArray[np.int64], amounts: NDArray[np.int64] = _ONE) -> None:
        """Increase the count of each pair by its amount, or by a single amount."""
        if len(amounts) == 1:
            distinct, counts = np.unique(keys, return_counts=True)
            run = distinct, counts * amounts
        else:
            run = sum_pairs([(keys, amounts)])
        while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
            run = sum_pairs([self._runs.pop(), run])
        self._runs.append(run)

    def arrays(self) -> Pairs:
        """Return the pairs in ascending order, and their counts, both int64."""
        self._runs = [sum_pairs(self._runs)]
        return self._runs[0]


def sum_pairs(parts: Sequence[Pairs]) -> Pairs:
    """Add up the counts of equal pairs, and sort by pair."""
    keys, counts = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(keys, kind="stable")  # a stable sort is fast for sorted parts
    starts = row_starts(keys[order])
    counts = np.add.reduceat(counts[order], starts) if len(starts) else counts
    return keys[order][starts], counts


class DistinctChunks(NamedTuple):
    """Distinct chunks and their counts."""

    ids: NDArray[np.int32]  # ids of all chunks, concatenated; student ids first in each chunk
    bounds: NDArray[np.int64]  # [chunks + 1], start of each chunk in `ids`
    widths: NDArray[np.int64]  # [chunks], number of student tokens
    counts: NDArray[np.int64]

    def recount(self, counts: NDArray[np.int64]) -> DistinctChunks:
        """Return a copy with new counts; omit chunks that are too long or have the count 0."""
        lengths = np.diff(self.bounds)
        is_used = (counts > 0) & ~is_too_long(self.widths, lengths - self.widths)
        bounds = offsets_of(lengths[is_used])
        ids = self.ids[np.repeat(is_used, lengths)]
        return DistinctChunks(ids, bounds, self.widths[is_used], counts[is_used])

    @property
    def keys(self) -> NDArray[np.int64]:
        """The pair of tokens at the start of each chunk, int64."""
        starts = self.bounds[:-1]
        return pair_keys(self.ids[starts], self.ids[starts + self.widths])

    def pairs(self, predicted: MapRows | None = None) -> Pairs:
        """Return the pairs of tokens within chunks, in ascending order, with their counts.

        The count of a chunk is divided equally among its teacher tokens. Each part is divided among
        the student tokens, equally or in proportion to their weights in `predicted`. With weights,
        this is the E step of IBM Model 1 (Brown et al., Computational Linguistics 19(2), 1993,
        section 4.2), which averages the rows of a chunk, as P-KL does.
        """
        pairs = PairCounts()
        for start in range(0, len(self.counts), _CHUNKS_AT_ONCE):
            end = start + _CHUNKS_AT_ONCE
            bounds, widths = self.bounds[start : end + 1], self.widths[start:end]
            part = DistinctChunks(self.ids, bounds, widths, self.counts[start:end])
            num_pairs = int((widths * (np.diff(bounds) - widths)).sum())
            keys, amounts = np.empty((2, num_pairs), np.int64)
            chunk_pairs(part, UNIT, predicted or _NO_ROWS, keys, amounts)
            is_used = amounts > 0
            pairs.add(keys[is_used], amounts[is_used])
        return pairs.arrays()


class ChunkCounts:
    """Counts of chunks in an open-addressed hash table. The index of a chunk never changes."""

    def __init__(self) -> None:
        self._size = 0
        self._allocate(1 << 12, 1 << 14)

    def __len__(self) -> int:
        return self._size

    def _allocate(self, num_chunks: int, num_ids: int) -> None:
        ids, bounds = np.empty(num_ids, np.int32), np.zeros(num_chunks + 1, np.int64)
        self._chunks = DistinctChunks(ids, bounds, *np.empty((2, num_chunks), np.int64))
        self._table = np.full(num_chunks, -1, np.int64)

    def add(
        self,
        spans: NDArray[np.int64],
        s_ids: NDArray[np.int32],
        t_ids: NDArray[np.int32],
        amounts: NDArray[np.int64] = _ONE,
    ) -> NDArray[np.int64]:
        """Increase the count of each chunk by its amount, or by a single amount.

        `spans` is int64 `[4, chunks]` (see `AlignedTexts`). Returns the indices of the chunks,
        int64.
        """
        indices = np.empty(spans.shape[1], np.int64)
        self._make_room(len(indices), int((spans[1] - spans[0] + spans[3] - spans[2]).sum()))
        self._size = add_chunks(
            tuple(spans), amounts, s_ids, t_ids, self._chunks, self._table, self._size, indices
        )
        return indices

    def _make_room(self, num_chunks: int, num_ids: int) -> None:
        num_chunks += self._size
        num_ids += int(self._chunks.bounds[self._size])
        if 4 * num_chunks > 3 * len(self._table) or num_ids > len(self._chunks.ids):
            ids, bounds, widths, counts = self.chunks()
            self._allocate(1 << (4 * num_chunks // 3).bit_length(), 2 * num_ids)
            self._size = 0
            middles = bounds[:-1] + widths
            self.add(np.stack([bounds[:-1], middles, middles, bounds[1:]]), ids, ids, counts)

    def chunks(self) -> DistinctChunks:
        """Return all chunks with their counts."""
        size, (ids, bounds, widths, counts) = self._size, self._chunks
        ids, bounds = ids[: bounds[size]].copy(), bounds[: size + 1].copy()
        return DistinctChunks(ids, bounds, widths[:size].copy(), counts[:size].copy())


class Counts(NamedTuple):
    """Counts of pairs at shared token boundaries, and of chunks."""

    keys: NDArray[np.int64]  # pairs in ascending order
    counts: NDArray[np.int64]  # multiples of `count_unit`
    chunks: DistinctChunks

    def pairs(self, predicted: MapRows | None = None) -> Pairs:
        """Return all pairs in ascending order, and their counts; see `DistinctChunks.pairs`."""
        return sum_pairs([(self.keys, self.counts), self.chunks.pairs(predicted)])


class Tally:
    """Accumulates the counts for a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._pairs, self._chunks = PairCounts(), ChunkCounts()

    def add(self, aligned: AlignedTexts, chosen: NDArray[np.bool_] | slice = slice(None)) -> int:
        """Count the chosen chunks and their first pairs; return the number of skipped chunks."""
        if self.target != "chunk":
            self._pairs.add(aligned.keys[chosen], np.full(1, count_unit(self.target), np.int64))
        if self.target == "start":
            return 0
        spans = aligned.spans[:, chosen]
        is_long = is_too_long(spans[1] - spans[0], spans[3] - spans[2])
        self._chunks.add(spans[:, ~is_long], aligned.student.ids, aligned.teacher.ids)
        return int(is_long.sum())

    def counts(self) -> Counts:
        """Return the counts."""
        return Counts(*self._pairs.arrays(), self._chunks.chunks())


def is_too_long(num_student: NDArray[np.int64], num_teacher: NDArray[np.int64]) -> Any:
    """Return a mask of the chunks that have too many tokens to count."""
    return np.maximum(num_student, num_teacher) > LONGEST_CHUNK
