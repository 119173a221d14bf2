"""Documents encoded by two tokenizers: their shared token boundaries, and counts of pairs.

A pair is an int64, `student_id << 32 | teacher_id`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import Target
from xtok.counting.texts import Batch, Place, TextShard, read_batches
from xtok.maps.edges import Edges, pair_order
from xtok.threads import available_cores

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

UNIT = 720_720
"""What a chunk counts for, split among its pairs: divisible by every number up to 16."""

_CHUNKS_AT_ONCE = 1 << 16

LONGEST_CHUNK = 64
"""Chunks with more tokens than this on a side are skipped, and reported."""


class EncodedTexts(NamedTuple):
    """Documents as ids of one tokenizer: document d is `ids[bounds[d]:bounds[d + 1]]`.

    `ids` is int32, `bounds` int64 `[documents + 1]`.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.bounds[-1] - self.bounds[0])

    def of(self, chosen: NDArray[np.bool_]) -> EncodedTexts:
        """Return the chosen documents, bool `[documents]`; a copy unless all are."""
        if chosen.all():
            return self
        lengths = np.diff(self.bounds)
        bounds = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
        return EncodedTexts(self.ids[np.repeat(chosen, lengths)], bounds)


class Rows(NamedTuple):
    """A map's rows as kernels take them: entries of row s are `bounds[s]` to `bounds[s + 1]`.

    `bounds` is int64 `[V_student + 1]`, `columns` int32 and rising in a row, `weights` float64.
    """

    bounds: NDArray[np.int64]
    columns: NDArray[np.int32]
    weights: NDArray[np.float64]

    @staticmethod
    def of(edges: Edges, num_rows: int) -> Rows:
        """Return edges, in any order and without duplicates, as rows."""
        edges = edges.take(pair_order(edges)[0])
        bounds = np.zeros(num_rows + 1, np.int64)
        np.cumsum(np.bincount(edges.student_ids, minlength=num_rows), out=bounds[1:])
        return Rows(bounds, edges.teacher_ids.astype(np.int32), edges.weights.astype(np.float64))


_NO_ROWS = Rows(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))


class SharedBoundaries(NamedTuple):
    """Tokens of both sides that begin at one byte; see `kernels.shared_boundaries`."""

    s_starts: NDArray[np.int64]
    t_starts: NDArray[np.int64]
    num_starts: NDArray[np.int64]
    same_bytes: NDArray[np.int64]
    complete: NDArray[np.bool_]

    @property
    def num_differing(self) -> int:
        """Documents that the two sides do not spell with the same bytes to the end."""
        return int(np.count_nonzero(~self.complete))

    def bytes_of(self, texts: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of these documents, and how many follow a first difference."""
        sizes = np.array([len(text.encode()) for text in texts], np.int64)
        return int(sizes.sum()), int((sizes - self.same_bytes)[~self.complete].clip(0).sum())


class EncodedBatch(NamedTuple):
    """Documents that are worked on together, as ids of several tokenizers; see `texts.Batch`."""

    texts: list[str]
    groups: list[str]
    end: Place
    sides: list[EncodedTexts]


def _ignore(size: int, tokens: int) -> None:
    """Advance nothing."""


class TextEncoder:
    """Encodes documents with several tokenizers on all cores; as a context it ends its threads.

    Args:
        tokenizers: a pair's are the student's and the teacher's.
        num_threads: one per available core if None.
    """

    def __init__(self, *tokenizers: Tokenizer, num_threads: int | None = None) -> None:
        self.tokenizers = tokenizers
        self.num_threads = num_threads or available_cores()
        self._pool = ThreadPoolExecutor(self.num_threads)

    def __enter__(self) -> TextEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(
        self,
        shards: Sequence[TextShard],
        advance: Callable[[int, int], object] = _ignore,
        first: Place = Place(),  # noqa: B008
    ) -> Iterator[EncodedBatch]:
        """Read and encode texts from a place on.

        Args:
            shards: of the texts.
            advance: called with the bytes on disk and the first tokenizer's tokens of each batch.
            first: the place.

        Raises:
            XtokError: as `read_batches`.
        """
        consumed = first.consumed
        waiting: deque[tuple[Batch, Callable[[], list[EncodedTexts]]]] = deque()
        batches = read_batches(shards, first)
        while True:
            batch = next(batches, None)
            if batch is not None:  # is encoded while the one before is worked on
                waiting.append((batch, self.start_encoding(batch.texts)))
            if not waiting:
                break
            if batch is None or len(waiting) > 1:
                (texts, groups, end), encoded = waiting.popleft()
                sides = encoded()
                advance(end.consumed - consumed, sides[0].num_tokens)
                consumed = end.consumed
                yield EncodedBatch(texts, groups, end, sides)
        advance(sum(shard.size for shard in shards) - consumed, 0)

    def encode(self, texts: Sequence[str]) -> list[EncodedTexts]:
        """Encode documents as in the middle of a text; control tokens in them are plain text."""
        return self.start_encoding(texts)()

    def start_encoding(self, texts: Sequence[str]) -> Callable[[], list[EncodedTexts]]:
        """Encode documents in other threads; what is returned waits for the result of `encode`."""
        ends = np.cumsum([len(text) for text in texts])
        goals = np.linspace(0, ends[-1] if len(ends) else 0, self.num_threads + 1)[1:-1]
        cuts = [0, *np.searchsorted(ends, goals).tolist(), len(texts)]
        parts = [texts[a:b] for a, b in pairwise(cuts) if b > a]  # of about equal length
        jobs = [
            [self._pool.submit(tokenizer.library_arrays, part) for part in parts]
            for tokenizer in self.tokenizers
        ]
        return lambda: [_joined(row for job in side for row in job.result()) for side in jobs]

    def boundaries(self, student: EncodedTexts, teacher: EncodedTexts) -> SharedBoundaries:
        """Find the shared token boundaries of documents by the first two tokenizers."""
        from xtok.counting.kernels import shared_boundaries

        tables = [
            (np.ascontiguousarray(table.data), np.ascontiguousarray(table.offsets))
            for table in (tokenizer.table for tokenizer in self.tokenizers[:2])
        ]
        places = np.empty((2, min(student.num_tokens, teacher.num_tokens)), np.int64)
        num_documents = len(student.bounds) - 1
        num_starts, same_bytes = np.zeros((2, num_documents), np.int64)
        complete = np.zeros(num_documents, np.bool_)
        count = shared_boundaries(
            *student, *tables[0], *teacher, *tables[1], *places, num_starts, same_bytes, complete
        )
        return SharedBoundaries(
            places[0, :count], places[1, :count], num_starts, same_bytes, complete
        )


def _joined(rows: Iterable[NDArray[np.int32]]) -> EncodedTexts:
    arrays = [*rows, np.zeros(0, np.int32)]  # the last, so that there is one to concatenate
    return EncodedTexts(np.concatenate(arrays), np.cumsum([0, *map(len, arrays[:-1])]))


def boundary_keys(
    student: EncodedTexts, teacher: EncodedTexts, boundaries: SharedBoundaries
) -> NDArray[np.int64]:
    """Return the pair of tokens that begin at each shared boundary, int64."""
    keys = student.ids[boundaries.s_starts].astype(np.int64) << 32
    keys |= teacher.ids[boundaries.t_starts]
    return keys


def unit_of(target: Target) -> int:
    """Return what one occurrence counts."""
    return 1 if target == "start" else UNIT


def pair_edges(keys: NDArray[np.int64], counts: NDArray[Any]) -> Edges:
    """Return pairs and their counts as edges."""
    return Edges((keys >> 32).astype(np.int32), keys.astype(np.int32), counts)


def edge_keys(edges: Edges) -> NDArray[np.int64]:
    """Return the pair of each edge, int64."""
    return edges.student_ids.astype(np.int64) << 32 | edges.teacher_ids


class PairCounts:
    """How often each pair occurs: integers, in an open-addressed hash table of NumPy arrays."""

    def __init__(self) -> None:
        self._size = 0
        self._keys = np.full(1 << 12, -1, np.int64)
        self._counts = np.zeros(1 << 12, np.int64)

    def __len__(self) -> int:
        return self._size

    def add(self, keys: NDArray[np.int64], amounts: NDArray[np.int64]) -> None:
        """Add amounts to pairs; one amount holds for all of them."""
        from xtok.counting.kernels import add_counts

        done = 0
        while done < len(keys):
            room = 3 * len(self._keys) // 4 - self._size
            rest = amounts if len(amounts) == 1 else amounts[done:]
            count, new = add_counts(keys[done:], rest, self._keys, self._counts, room)
            done, self._size = done + count, self._size + new
            if done < len(keys):  # no room: move everything to a table of twice the size
                old_keys, old_counts = self.arrays()
                self._keys = np.full(2 * len(self._keys), -1, np.int64)
                self._counts = np.zeros(len(self._keys), np.int64)
                add_counts(old_keys, old_counts, self._keys, self._counts, len(old_keys))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs in rising order, and their counts, int64 both."""
        used = self._keys >= 0
        order = np.argsort(self._keys[used])
        return self._keys[used][order], self._counts[used][order]


class Counts(NamedTuple):
    """How often pairs of tokens occur, and chunks of several student tokens.

    An occurrence of a pair counts `unit_of(target)`, as do the pairs of a chunk together. Chunks of
    one student token are pairs already. The others are kept, each different one once: how their
    student tokens share them depends on a map.
    """

    keys: NDArray[np.int64]  # pairs, `student_id << 32 | teacher_id`, in rising order
    counts: NDArray[np.int64]
    chunk_ids: NDArray[np.int32]  # tokens of the different chunks, the student's first
    chunk_bounds: NDArray[np.int64]  # where each begins, and the last one ends
    chunk_widths: NDArray[np.int64]  # how many of its tokens are the student's
    chunk_counts: NDArray[np.int64]

    def pairs(self, given: Rows | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all pairs in rising order, and their counts; a chunk's n * m pairs share its own.

        They do so equally. Given a map's rows, the m teacher tokens share it equally, and the n
        student tokens share a teacher token's part as their rows predict it. That is the E step of
        IBM Model 1 (Brown et al., Computational Linguistics 19(2), 1993, section 4.2), whose
        likelihood is that of P-KL's average over a chunk's rows; equal shares are the step from a
        map of equal weights.
        """
        if not len(self.chunk_counts):
            return self.keys, self.counts
        from xtok.counting.kernels import chunk_pairs

        pairs = PairCounts()
        pairs.add(self.keys, self.counts)
        rows = _NO_ROWS if given is None else given
        for start in range(0, len(self.chunk_counts), _CHUNKS_AT_ONCE):
            some = slice(start, start + _CHUNKS_AT_ONCE)
            bounds = self.chunk_bounds[start : start + _CHUNKS_AT_ONCE + 1]
            widths = self.chunk_widths[some]
            num_pairs = int((widths * (np.diff(bounds) - widths)).sum())
            keys, amounts = np.empty((2, num_pairs), np.int64)
            chunk_pairs(
                self.chunk_ids, bounds, widths, self.chunk_counts[some], UNIT, *rows, keys, amounts
            )
            used = amounts > 0
            pairs.add(keys[used], amounts[used])
        return pairs.arrays()


class Tally:
    """Counts of a target that grow: what is counted is a sum of integers, in any order."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pair_counts = PairCounts()
        self._size = 0
        self._allocate(1 << 12, 1 << 14)

    def _allocate(self, places: int, num_ids: int) -> None:
        self._ids = np.empty(num_ids, np.int32)
        self._bounds = np.zeros(places + 1, np.int64)
        self._widths, self._counts = np.empty((2, places), np.int64)
        self._table = np.full(places, -1, np.int64)

    def add(
        self, student: EncodedTexts, teacher: EncodedTexts, boundaries: SharedBoundaries
    ) -> int:
        """Count documents; return how many chunks were too long."""
        if self.target != "chunk":
            amount = np.full(1, unit_of(self.target), np.int64)
            self.pair_counts.add(boundary_keys(student, teacher, boundaries), amount)
        if self.target == "start":
            return 0
        from xtok.counting.kernels import split_chunks

        keys, amounts = np.empty((2, teacher.num_tokens), np.int64)
        spans = np.empty((len(boundaries.s_starts), 4), np.int64)
        num_pairs, num_spans, skipped = split_chunks(
            *student, *teacher, *boundaries[:3], boundaries.complete, UNIT, LONGEST_CHUNK,
            keys, amounts, spans,
        )  # fmt: skip
        self.pair_counts.add(keys[:num_pairs], amounts[:num_pairs])
        self._add_chunks(spans[:num_spans], np.ones(1, np.int64), student.ids, teacher.ids)
        return int(skipped)

    def add_counts(self, counts: Counts) -> None:
        """Add what was counted elsewhere, or before."""
        self.pair_counts.add(counts.keys, counts.counts)
        middles = counts.chunk_bounds[:-1] + counts.chunk_widths
        spans = np.stack([counts.chunk_bounds[:-1], middles, middles, counts.chunk_bounds[1:]], 1)
        self._add_chunks(spans, counts.chunk_counts, counts.chunk_ids, counts.chunk_ids)

    def _add_chunks(
        self,
        spans: NDArray[np.int64],
        amounts: NDArray[np.int64],
        s_ids: NDArray[np.int32],
        t_ids: NDArray[np.int32],
    ) -> None:
        if not len(spans):
            return
        from xtok.counting.kernels import add_chunks

        while True:
            done, self._size = add_chunks(
                spans, amounts, s_ids, t_ids, self._ids, self._bounds, self._widths, self._counts,
                self._table, self._size,
            )  # fmt: skip
            if done == len(spans):
                return
            spans, amounts = spans[done:], amounts if len(amounts) == 1 else amounts[done:]
            before = self._chunks()
            longest = int((spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]).max())
            self._allocate(2 * len(self._table), 2 * len(self._ids) + longest)
            self._size = 0
            self.add_counts(Counts(np.zeros(0, np.int64), np.zeros(0, np.int64), *before))

    def _chunks(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        size, end = self._size, self._bounds[self._size]
        return (
            self._ids[:end], self._bounds[: size + 1], self._widths[:size], self._counts[:size]
        )  # fmt: skip

    def counts(self) -> Counts:
        """Return the counts so far."""
        return Counts(*self.pair_counts.arrays(), *(array.copy() for array in self._chunks()))
