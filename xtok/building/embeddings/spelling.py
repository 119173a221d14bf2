"""Compare spellings by the cosines of byte n-gram vectors, without a model.

The n-grams of a token are its substrings of 1 to 4 bytes, with marks at both ends, and the whole
token. Each repetition of an n-gram counts as a different n-gram, so 8 spaces are most similar to 9
and 7 spaces. If n of all N tokens contain an n-gram, its weight is 16 · log2((N + 1) / n) + 1.
Weights are rounded to integers, because sums of integers are equal on all machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress
from xtok._lib.threads import available_cores
from xtok.building.embeddings.kernels import add_up_and_keep_largest
from xtok.maps.edges import ranks

# Maximum number of columns that contain an n-gram; more frequent n-grams are ignored. With a limit
# of 3,000, the search for Llama 3 → Qwen takes three times as long, but the first entry of each row
# is the same.
MOST_COLUMNS = 1000

_LONGEST = 2048  # maximum number of bytes; keeps sums of squares below 2**31
_TOKEN_BITS, _TIMES_BITS = 25, 12
BLOCK_ROWS = 4096
_PARTS = 4  # number of parts into which the n-grams of one length are split

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float64]


def most_similar(
    rows: Sequence[bytes],
    columns: Sequence[bytes],
    top_k: int,
    progress: Progress,
    most_columns: int = MOST_COLUMNS,
) -> tuple[Floats, Ints]:
    """Return the largest cosines of each row and their column indices, `[rows, top_k]`.

    Rows are sorted by descending cosine, then by index, and padded with 0 and -1. A row without
    similar columns is compared again, with all n-grams.
    """
    values = np.zeros((len(rows), top_k))
    indices = np.full((len(rows), top_k), -1, np.int32)
    if not (rows and columns):
        return values, indices
    # Sorted neighbours share n-grams, so their columns are already in the processor's cache.
    row_order, column_order = (
        np.array(sorted(range(len(texts)), key=texts.__getitem__)) for texts in (rows, columns)
    )
    tokens = [rows[i] for i in row_order.tolist()] + [columns[i] for i in column_order.tolist()]
    for limit in (most_columns, len(columns)):
        is_empty = indices[:, 0] < 0
        if is_empty.any():
            _fill(values, indices, _shared_ngrams(tokens, is_empty, limit, column_order), progress)
    in_order = np.argsort(row_order)
    return values[in_order], indices[in_order]


class SharedGrams(NamedTuple):
    """The n-grams that occur in rows and in columns, as arrays for the kernel."""

    row_starts: NDArray[np.int64]  # [rows + 1], start of each row in `row_grams`
    row_grams: Ints
    row_lengths: Floats
    squares: Ints  # [n-grams], squared weights
    starts: NDArray[np.int64]  # [n-grams + 1], start of each n-gram in `columns`
    columns: Ints
    per_length: Floats  # [columns], 1 / vector length
    column_order: NDArray[np.int64]  # [columns], index of the column in the result


def _shared_ngrams(
    tokens: list[bytes], is_wanted: NDArray[np.bool_], limit: int, column_order: NDArray[np.int64]
) -> SharedGrams:
    num_rows, sums = len(is_wanted), np.zeros(len(tokens))
    entries: list[NDArray[np.int64]] = []  # row << 32 | n-gram
    columns: list[Ints] = []
    sizes, weights = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)]
    size = 0
    for grams, owners in _ngrams(tokens):
        is_column = owners >= num_rows
        is_row = ~is_column
        is_row[is_row] = is_wanted[owners[is_row]]
        counts = np.bincount(grams)
        in_rows, in_columns = (
            np.bincount(grams[mask], minlength=len(counts)) for mask in (is_row, is_column)
        )
        squares = np.square(np.rint(16 * np.log2((len(tokens) + 1) / counts) + 1).astype(np.int32))
        squares[in_columns > limit] = 0
        sums += np.bincount(owners, squares[grams], minlength=len(tokens))
        is_shared = (squares > 0) & (in_rows > 0) & (in_columns > 0)
        new_ids = np.cumsum(is_shared) - 1 + size
        is_kept = is_shared[grams]
        is_row &= is_kept
        entries.append(owners[is_row].astype(np.int64) << 32 | new_ids[grams[is_row]])
        columns.append(owners[is_kept & is_column] - np.int32(num_rows))
        sizes.append(in_columns[is_shared])
        weights.append(squares[is_shared])
        size += len(weights[-1])
    by_row = np.concatenate(entries)
    entries.clear()
    by_row.sort()
    row_starts, lengths = np.searchsorted(by_row, np.arange(num_rows + 1) << 32), np.sqrt(sums)
    return SharedGrams(
        row_starts, by_row.astype(np.int32), lengths[:num_rows], np.concatenate(weights),
        np.cumsum(np.concatenate(sizes)), np.concatenate(columns), 1 / lengths[num_rows:],
        column_order,
    )  # fmt: skip


def _fill(values: Floats, indices: Ints, shared: SharedGrams, progress: Progress) -> None:
    with progress("comparing spellings", len(values)) as advance:

        def work(first: int) -> None:
            part = slice(first, first + BLOCK_ROWS)
            add_up_and_keep_largest(shared, first, values[part], indices[part])
            advance(len(values[part]))

        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(work, range(0, len(values), BLOCK_ROWS)))


def _ngrams(tokens: list[bytes]) -> Iterator[tuple[Ints, Ints]]:
    """Yield sorted, numbered n-grams with the indices of their tokens.

    Whole tokens come first, then n-grams by length. Each length is split by last symbol, to save
    memory.
    """
    known: dict[bytes, int] = {}
    token_numbers = np.array([known.setdefault(token, len(known)) for token in tokens], np.int64)
    del known
    yield _number(token_numbers, np.arange(len(tokens), dtype=np.int32))
    texts = [token[:_LONGEST] for token in tokens]
    sizes = np.fromiter(map(len, texts), np.int64, len(texts)) + 2
    owners = np.repeat(np.arange(len(texts), dtype=np.int32), sizes)
    ends = np.cumsum(sizes)
    # Symbols have 9 bits: 1 and 2 are the marks, and 3 to 258 are the bytes.
    is_byte = np.ones(len(owners), np.bool_)
    is_byte[ends - sizes] = is_byte[ends - 1] = False
    symbols = np.zeros(len(owners), np.int16)
    symbols[is_byte] = np.frombuffer(b"".join(texts), np.uint8)
    symbols += 3
    symbols[ends - sizes], symbols[ends - 1] = 1, 2
    for n in range(1, 5):
        is_within = is_byte if n == 1 else owners[n - 1 :] == owners[: len(owners) - n + 1]
        for part in range(_PARTS):
            indices = np.flatnonzero(is_within & (symbols[n - 1 :] % _PARTS == part))
            codes = np.zeros(len(indices), np.int64)
            for offset in range(n):
                codes <<= 9
                codes |= symbols[offset:][indices]
            yield _number(codes, owners[indices])


def _number(codes: NDArray[np.int64], owners: Ints) -> tuple[Ints, Ints]:
    codes <<= _TOKEN_BITS  # n-gram and token in one integer, for a single sort
    codes |= owners
    codes.sort()
    times = ranks(codes)  # number of earlier occurrences in the same token
    owners = (codes & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)
    codes = (_numbers(codes >> _TOKEN_BITS) << _TIMES_BITS | times) << _TOKEN_BITS | owners
    codes.sort()
    owners = (codes & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)
    return _numbers(codes >> _TOKEN_BITS).astype(np.int32), owners


def _numbers(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(np.diff(codes, prepend=codes[:1]) != 0)
