"""Encode documents with several tokenizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok._lib.threads import available_cores
from xtok.alignment.sequences import FlatIds
from xtok.conversation.texts import TextBatch
from xtok.tokenizers import Tokenizer

_AHEAD = 4  # number of batches that are encoded at the same time


class TextEncoder:
    """Context manager that encodes documents with several tokenizers on all cores."""

    def __init__(self, *tokenizers: Tokenizer) -> None:
        self.tokenizers = tokenizers
        self.num_threads = available_cores()
        self._pool = ThreadPoolExecutor(self.num_threads)
        for tokenizer in tokenizers:
            tokenizer.library_arrays([""])  # creates the encoder once, instead of in each thread

    def __enter__(self) -> TextEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(
        self, batches: Iterable[TextBatch], total: int, advance: Callable[[int, int], object]
    ) -> Iterator[tuple[TextBatch, list[FlatIds]]]:
        """Yield each batch with its ids from each tokenizer, while the next batches are encoded.

        For each batch, `advance` is called with the number of bytes, and the number of tokens from
        the first tokenizer.
        """
        consumed, batches = 0, iter(batches)
        waiting: deque[tuple[TextBatch, Callable[[], list[FlatIds]]]] = deque()
        while True:
            for batch in islice(batches, _AHEAD - len(waiting)):
                waiting.append((batch, self.start_encoding(batch.texts)))
            if not waiting:
                break
            done, encoded = waiting.popleft()
            sides = encoded()
            advance(done.consumed - consumed, len(sides[0].ids))
            consumed = done.consumed
            yield done, sides
        advance(total - consumed, 0)

    def start_encoding(self, texts: Sequence[str]) -> Callable[[], list[FlatIds]]:
        """Start encoding in other threads, and return a function that waits for the result.

        Each document is encoded as if text preceded the document. The names of control tokens are
        encoded as ordinary text.
        """
        ends = np.cumsum([len(text) for text in texts])
        goals = np.linspace(0, ends[-1] if len(ends) else 0, self.num_threads + 1)[1:-1]
        cuts = [0, *np.searchsorted(ends, goals).tolist(), len(texts)]
        parts = [texts[a:b] for a, b in pairwise(cuts) if b > a]  # parts of similar length
        jobs = [
            [self._pool.submit(tokenizer.library_arrays, part) for part in parts]
            for tokenizer in self.tokenizers
        ]
        return lambda: [_join(row for job in group for row in job.result()) for group in jobs]


def _join(rows: Iterable[NDArray[np.int32]]) -> FlatIds:
    arrays = [*rows, np.zeros(0, np.int32)]  # np.concatenate requires at least one array
    return FlatIds(np.concatenate(arrays), offsets_of([*map(len, arrays[:-1])]))
