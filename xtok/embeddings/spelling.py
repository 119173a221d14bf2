"""Similarity of spelling: cosines of vectors of byte n-grams, which need no model.

A token's n-grams are the stretches of 1 to 4 of its bytes, a mark before the first byte and one
behind the last included, and the token as a whole. The second occurrence of an n-gram in a token is
an n-gram of its own, and so on, so that 8 spaces are nearest to 9 and 7. Each n-gram weighs
16 · log2((N + 1) / how many of both vocabularies' N tokens have it), as a whole number: sums are
exact, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from xtok.progress import Progress
from xtok.threads import available_cores

MOST_COLUMNS = 1000
"""N-grams that more columns have are left out: with 3,000, the search of Llama 3 → Qwen takes three
times as long, and the first entries stay the same."""

_LONGEST = 2048  # bytes of a token that are cut into n-grams: sums of squares stay below 2**31
_TOKEN_BITS, _TIMES_BITS = 25, 12
_BLOCK = 4096  # rows

Ints = NDArray[np.int32]


def most_similar(
    rows: Sequence[bytes],
    columns: Sequence[bytes],
    top_k: int,
    progress: Progress,
    most_columns: int = MOST_COLUMNS,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return each row's largest cosines and the places of their columns, both `[rows, top_k]`.

    They are sorted by falling cosine, then rising place; behind the last similar column, cosines
    are 0 and places -1. A row without similar columns is compared again with no n-gram left out.
    """
    values = np.zeros((len(rows), top_k))
    places = np.full((len(rows), top_k), -1, np.int32)
    if not (rows and columns):
        return values, places
    # Neighbours in the alphabet share n-grams, whose columns are in the processor's cache then.
    row_order, column_order = (
        np.array(sorted(range(len(side)), key=side.__getitem__)) for side in (rows, columns)
    )
    tokens = [rows[i] for i in row_order.tolist()] + [columns[i] for i in column_order.tolist()]
    grams, owners = _ngrams(tokens)
    counts = np.bincount(grams)
    in_columns = np.bincount(grams[owners >= len(rows)], minlength=len(counts))
    squares = np.square(np.rint(16 * np.log2((len(tokens) + 1) / counts) + 1).astype(np.int32))
    for limit in (most_columns, len(columns)):
        kept = np.where(in_columns <= limit, squares, np.int32(0))
        _fill(values, places, grams, owners, kept, column_order, progress)
        if (places[:, 0] >= 0).all():
            break
    in_order = np.argsort(row_order)
    return values[in_order], places[in_order]


def _fill(
    values: NDArray[np.float64],
    places: NDArray[np.int32],
    grams: Ints,
    owners: Ints,
    squares: Ints,
    column_places: NDArray[np.int64],
    progress: Progress,
) -> None:
    """Fill the rows that are empty, by n-grams of these squared weights; those of 0 are left out.

    Rows' tokens come before the columns', in the order of `values` and `column_places`.
    """
    from xtok.embeddings.kernels import add_up_and_keep_largest

    num_rows = len(values)
    lengths = np.sqrt(np.bincount(owners, squares[grams]))
    is_kept, of_column = squares[grams] > 0, owners >= num_rows
    columns = owners[is_kept & of_column] - num_rows
    starts = _starts(grams[is_kept & of_column], len(squares))
    of_row = is_kept & ~of_column
    order = np.argsort(owners[of_row], kind="stable")
    row_grams, row_starts = grams[of_row][order], _starts(owners[of_row], num_rows)
    with progress("comparing spellings", num_rows) as advance:

        def work(first: int) -> None:
            part = slice(first, min(first + _BLOCK, num_rows))
            add_up_and_keep_largest(
                row_starts[part.start : part.stop + 1], row_grams, lengths[part], squares, starts,
                columns, 1 / lengths[num_rows:], column_places, values[part], places[part],
            )  # fmt: skip
            advance(part.stop - part.start)

        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(work, range(0, num_rows, _BLOCK)))


def _starts(numbers: Ints, size: int) -> NDArray[np.int64]:
    """Return where each of so many numbers would begin if they were sorted, and the end."""
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=size), out=starts[1:])
    return starts


def _ngrams(tokens: list[bytes]) -> tuple[Ints, Ints]:
    """Return the n-grams of all tokens, numbered from 0, and beside each its token's place.

    They are sorted by n-gram, then token.
    """
    cut = [token[:_LONGEST] for token in tokens]
    sizes = np.fromiter(map(len, cut), np.int64, len(cut)) + 2
    owners = np.repeat(np.arange(len(cut)), sizes)
    ends = np.cumsum(sizes)
    # Symbols of 9 bits: 1 and 2 are the marks, 3 to 258 the bytes.
    symbols = np.zeros(len(owners), np.int64)
    symbols[ends - sizes], symbols[ends - 1] = 1, 2
    inner = symbols == 0
    symbols[inner] = np.frombuffer(b"".join(cut), np.uint8).astype(np.int64) + 3
    # One integer for an n-gram (up to four symbols) and its token, so that one sort groups them.
    codes, parts = symbols, [(symbols << _TOKEN_BITS | owners)[inner]]
    for n in range(1, 4):
        codes = codes[:-1] << 9 | symbols[n:]
        parts.append((codes << _TOKEN_BITS | owners[n:])[owners[n:] == owners[:-n]])
    number: dict[bytes, int] = {}
    whole = [number.setdefault(token, len(number)) for token in tokens]
    codes = np.array(whole, np.int64) | 1 << 36  # behind those of four symbols
    keys = np.concatenate([*parts, codes << _TOKEN_BITS | np.arange(len(tokens))])
    del codes, parts, symbols, owners, inner
    keys.sort()
    places = np.flatnonzero(_is_first(keys))
    times = np.arange(len(keys)) - np.repeat(places, np.diff(places, append=len(keys)))
    grams = np.cumsum(_is_first(keys >> _TOKEN_BITS)) - 1
    keys &= (1 << _TOKEN_BITS) - 1
    keys |= (grams << _TIMES_BITS | times) << _TOKEN_BITS
    keys.sort()
    grams = np.cumsum(_is_first(keys >> _TOKEN_BITS)) - 1
    return grams.astype(np.int32), (keys & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)


def _is_first(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of sorted values are not the same as the one before."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first
