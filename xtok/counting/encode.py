"""Documents encoded by two tokenizers: where their tokens begin at one byte, and counts of pairs.

A pair is an int64, `student_id << 32 | teacher_id`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import Target
from xtok.maps.edges import Edges
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

UNIT = 720_720
"""What a chunk counts for, shared by its pairs: divisible by every number up to 16."""

LONGEST_CHUNK = 64
"""Chunks with more tokens than this on a side are passed over, and reported."""

BATCH_BYTES = 1 << 22
"""Text that is encoded and counted at once."""


class PairCounts:
    """How often each pair of a student and a teacher id was seen: integers, in a hash table."""

    def __init__(self) -> None:
        self._size = 0
        self._keys = np.full(1 << 12, -1, np.int64)
        self._counts = np.zeros(1 << 12, np.int64)

    def __len__(self) -> int:
        return self._size

    def add(self, keys: NDArray[np.int64], amounts: NDArray[np.int64]) -> None:
        """Add amounts (of length 1: the same for all) to keys, `student_id << 32 | teacher_id`."""
        from xtok.counting.kernels import add_counts

        done = 0
        while done < len(keys):
            room = 3 * len(self._keys) // 4 - self._size
            rest = amounts if len(amounts) == 1 else amounts[done:]
            count, new = add_counts(keys[done:], rest, self._keys, self._counts, room)
            done, self._size = done + count, self._size + new
            if done < len(keys):
                self._grow()

    def _grow(self) -> None:
        from xtok.counting.kernels import add_counts

        used = self._keys >= 0
        keys, counts = self._keys[used], self._counts[used]
        self._keys = np.full(2 * len(self._keys), -1, np.int64)
        self._counts = np.zeros(len(self._keys), np.int64)
        add_counts(keys, counts, self._keys, self._counts, len(keys))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the keys in rising order, and their counts, int64 `[pairs]` both."""
        used = self._keys >= 0
        order = np.argsort(self._keys[used])
        return self._keys[used][order], self._counts[used][order]


class Side(NamedTuple):
    """Many documents as ids of one tokenizer: `ids` int32, `bounds` int64 `[documents + 1]`.

    Document d is `ids[bounds[d]:bounds[d + 1]]`.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """How many tokens the documents have."""
        return int(self.bounds[-1] - self.bounds[0])

    def documents(self, start: int, stop: int) -> Side:
        """Return some of the documents; their places in `ids` stay the same."""
        return Side(self.ids, self.bounds[start : stop + 1])

    def of(self, chosen: NDArray[np.bool_]) -> Side:
        """Return the chosen documents, bool `[documents]`; a copy unless all are."""
        if chosen.all():
            return self
        lengths = np.diff(self.bounds)
        bounds = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
        return Side(self.ids[np.repeat(chosen, lengths)], bounds)


class Starts(NamedTuple):
    """Where tokens of both sides begin at one byte; see `cooccurrence_kernels.common_starts`."""

    s_starts: NDArray[np.int64]
    t_starts: NDArray[np.int64]
    num_starts: NDArray[np.int64]
    same_bytes: NDArray[np.int64]
    complete: NDArray[np.bool_]

    @property
    def num_differing(self) -> int:
        """Documents on which the two sides stop spelling the same bytes."""
        return int(np.count_nonzero(~self.complete))

    def bytes_of(self, texts: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of these documents, and those behind a first difference."""
        sizes = np.array([len(text.encode()) for text in texts], np.int64)
        return int(sizes.sum()), int((sizes - self.same_bytes)[~self.complete].clip(0).sum())


class PairEncoder:
    """Encodes documents with two tokenizers at once, on all cores, and finds their common starts.

    As a context manager it ends its threads.

    Args:
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        num_threads: how many threads encode; as many as there are cores if None.
    """

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, num_threads: int | None = None
    ) -> None:
        self.student, self.teacher = student, teacher
        self.num_threads = num_threads or available_cores()
        self._pool = ThreadPoolExecutor(self.num_threads)
        self._tables = [_plain(tokenizer.table) for tokenizer in (student, teacher)]

    def __enter__(self) -> PairEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode(self, texts: Sequence[str]) -> tuple[Side, Side]:
        """Encode documents as in the middle of a text; control tokens in them are plain text."""
        parts = _parts(texts, self.num_threads)
        jobs = [
            [self._pool.submit(tokenizer.library_arrays, part) for part in parts]
            for tokenizer in (self.student, self.teacher)
        ]
        student, teacher = (_joined([job.result() for job in side]) for side in jobs)
        return student, teacher

    def starts(self, student: Side, teacher: Side) -> Starts:
        """Find the common starts of documents that `encode` returned."""
        from xtok.counting.kernels import common_starts

        (s_data, s_offsets), (t_data, t_offsets) = self._tables
        room = min(student.num_tokens, teacher.num_tokens)
        places = np.empty((2, room), np.int64)
        num = len(student.bounds) - 1
        num_starts, same = np.zeros((2, num), np.int64)
        complete = np.zeros(num, np.bool_)
        count = common_starts(
            *student, s_data, s_offsets, *teacher, t_data, t_offsets,
            *places, num_starts, same, complete,
        )  # fmt: skip
        return Starts(places[0, :count], places[1, :count], num_starts, same, complete)


def start_keys(student: Side, teacher: Side, starts: Starts) -> NDArray[np.int64]:
    """Return `student_id << 32 | teacher_id` of each common start, int64 `[starts]`."""
    keys = student.ids[starts.s_starts].astype(np.int64) << 32
    keys |= teacher.ids[starts.t_starts]
    return keys


def batches(texts: Iterable[str], size: int = BATCH_BYTES) -> Iterator[list[str]]:
    """Group documents until they have `size` characters together."""
    batch: list[str] = []
    total = 0
    for text in texts:
        batch.append(text)
        total += len(text)
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def available_cores() -> int:
    """Return how many cores this process may use; all of them where a system does not say."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plain(table: TokenTable) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.ascontiguousarray(table.data), np.ascontiguousarray(table.offsets)


def _parts(texts: Sequence[str], number: int) -> list[Sequence[str]]:
    """Cut documents into parts of about equal length, in order."""
    ends = np.cumsum([len(text) for text in texts])
    goals = np.linspace(0, ends[-1] if len(ends) else 0, number + 1)[1:-1]
    cuts = [0, *np.searchsorted(ends, goals).tolist(), len(texts)]
    return [texts[a:b] for a, b in pairwise(cuts) if b > a]


def _joined(parts: list[list[NDArray[np.int32]]]) -> Side:
    rows = [row for part in parts for row in part]
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=bounds[1:])
    return Side(np.concatenate([*rows, np.zeros(0, np.int32)]), bounds)


def chunk_keys(
    student: Side, teacher: Side, starts: Starts
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the pairs within chunks, their shares in `UNIT`s, and how many chunks were too long.

    Every token of a chunk goes with every token of its other side: a chunk of n and m tokens
    counts `UNIT`, shared by its n * m pairs.
    """
    from xtok.counting.kernels import chunk_pairs

    def run(keys: NDArray[np.int64], amounts: NDArray[np.int64]) -> tuple[int, int]:
        count, skipped = chunk_pairs(
            *student, *teacher, starts.s_starts, starts.t_starts, starts.num_starts,
            starts.complete, UNIT, LONGEST_CHUNK, keys, amounts,
        )  # fmt: skip
        return int(count), int(skipped)

    none = np.zeros(0, np.int64)
    count, skipped = run(none, none)
    keys, amounts = np.empty((2, count), np.int64)
    if count:
        run(keys, amounts)
    return keys, amounts, skipped


def pair_keys(
    student: Side, teacher: Side, starts: Starts, target: Target
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the pairs of a target, their amounts, and how many chunks were too long.

    A sighting is `unit_of(target)`. Amounts of length 1 are the same for all pairs.
    """
    if target == "start":
        return start_keys(student, teacher, starts), np.ones(1, np.int64), 0
    keys, amounts, skipped = chunk_keys(student, teacher, starts)
    if target == "both":
        begun = start_keys(student, teacher, starts)
        keys = np.concatenate([begun, keys])
        amounts = np.concatenate([np.full(len(begun), UNIT), amounts])
    return keys, amounts, skipped


def unit_of(target: Target) -> int:
    """Return what `pair_keys` counts a sighting as."""
    return 1 if target == "start" else UNIT


def pair_edges(keys: NDArray[np.int64], counts: NDArray[Any]) -> Edges:
    """Return pairs and their counts as edges."""
    return Edges(keys >> 32, keys & 0xFFFFFFFF, counts)


def edge_keys(edges: Edges) -> NDArray[np.int64]:
    """Return `student_id << 32 | teacher_id` of each edge, int64."""
    return edges.student_ids.astype(np.int64) << 32 | edges.teacher_ids
