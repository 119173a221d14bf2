"""Documents encoded by two tokenizers, and their shared token boundaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.threads import available_cores

if TYPE_CHECKING:
    from xtok.counting.texts import Batch
    from xtok.tokenizers import Tokenizer

_WAITING = 3
"""Batches that are encoded while one is worked on."""


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


class AlignedTexts(NamedTuple):
    """Documents of two sides, and the tokens of both that begin at one byte.

    See `kernels.shared_boundaries`. A chunk lies between two neighbouring boundaries; the last one
    of a document counts only if the two sides agree to the end.
    """

    student: EncodedTexts
    teacher: EncodedTexts
    s_starts: NDArray[np.int64]
    t_starts: NDArray[np.int64]
    num_starts: NDArray[np.int64]
    same_bytes: NDArray[np.int64]
    complete: NDArray[np.bool_]

    @property
    def documents(self) -> NDArray[np.int64]:
        """The document of each boundary, int64."""
        return np.repeat(np.arange(len(self.num_starts)), self.num_starts)

    @property
    def keys(self) -> NDArray[np.int64]:
        """The pair of tokens that begin at each boundary, int64; see `counts`."""
        keys = self.student.ids[self.s_starts].astype(np.int64) << 32
        keys |= self.teacher.ids[self.t_starts]
        return keys

    def chunks(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where the chunk behind each boundary lies, and whether it is one.

        A row of the first, int64 `[boundaries, 4]`: its first token and its end in the student's
        ids, then in the teacher's.
        """
        last = np.cumsum(self.num_starts)[self.num_starts > 0] - 1
        spans = np.empty((len(self.s_starts), 4), np.int64)
        sides = (self.student, self.s_starts), (self.teacher, self.t_starts)
        for column, (side, starts) in zip((0, 2), sides, strict=True):
            spans[:, column] = starts
            spans[:-1, column + 1] = starts[1:]
            spans[last, column + 1] = side.bounds[1:][self.num_starts > 0]
        is_chunk = np.ones(len(spans), np.bool_)
        is_chunk[last] = self.complete[self.num_starts > 0]
        return spans, is_chunk

    def lost_bytes(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes of each document, and how many follow a first difference, int64 both."""
        sizes = np.array([len(text.encode()) for text in texts], np.int64)
        return sizes, np.where(self.complete, 0, (sizes - self.same_bytes).clip(0))


class EncodedBatch(NamedTuple):
    """Documents that are worked on together, as ids of several tokenizers; see `texts.Batch`."""

    texts: list[str]
    groups: list[str]
    shard: int
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
        for tokenizer in tokenizers:
            tokenizer.library_arrays([""])  # its encoder is made here, not in each thread

    def __enter__(self) -> TextEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(
        self,
        batches: Iterable[Batch],
        total: int,
        advance: Callable[[int, int], object] = _ignore,
    ) -> Iterator[EncodedBatch]:
        """Encode batches of documents, the next ones while one is worked on.

        Args:
            batches: of documents.
            total: bytes on disk.
            advance: called with the bytes on disk and the first tokenizer's tokens of each batch.

        Raises:
            XtokError: as `texts.read_batches`.
        """
        consumed = 0
        waiting: deque[tuple[Batch, Callable[[], list[EncodedTexts]]]] = deque()
        for batch in chain(batches, repeat(None)):
            if batch is not None:
                waiting.append((batch, self.start_encoding(batch.texts)))
            if not waiting:
                break
            if batch is None or len(waiting) > _WAITING:
                done, encoded = waiting.popleft()
                sides = encoded()
                advance(done.consumed - consumed, sides[0].num_tokens)
                consumed = done.consumed
                yield EncodedBatch(done.texts, done.groups, done.shard, sides)
        advance(total - consumed, 0)

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

    def align(self, student: EncodedTexts, teacher: EncodedTexts) -> AlignedTexts:
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
        return AlignedTexts(
            student, teacher, places[0, :count], places[1, :count], num_starts, same_bytes, complete
        )


def _joined(rows: Iterable[NDArray[np.int32]]) -> EncodedTexts:
    arrays = [*rows, np.zeros(0, np.int32)]  # the last, so that there is one to concatenate
    return EncodedTexts(np.concatenate(arrays), np.cumsum([0, *map(len, arrays[:-1])]))
