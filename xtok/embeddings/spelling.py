"""Similarity of spelling: cosines of vectors of byte n-grams, which need no model.

A token's n-grams are the stretches of 1 to 4 of its bytes, a mark before the first byte and one
behind the last included, and the token as a whole. The second occurrence of an n-gram in a token is
an n-gram of its own, and so on, so that 8 spaces are nearest to 9 and 7. Each n-gram weighs
16 · log2((N + 1) / how many of both vocabularies' N tokens have it), as a whole number: sums are
exact, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

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
    for limit in (most_columns, len(columns)):
        shared = _shared_ngrams(tokens, len(rows), limit)
        _fill(values, places, shared, column_order, progress)
        if (places[:, 0] >= 0).all():
            break
    in_order = np.argsort(row_order)
    return values[in_order], places[in_order]


class _Shared(NamedTuple):
    """The n-grams that a row and a column have, and the length of every token's vector."""

    grams: Ints
    owners: Ints  # beside each n-gram, the place of its token; the rows come before the columns
    squares: Ints  # [n-grams], the squared weight of each
    lengths: NDArray[np.float64]  # [tokens]


def _shared_ngrams(tokens: list[bytes], num_rows: int, most_columns: int) -> _Shared:
    """Return the n-grams that up to so many columns have, of one number of bytes after another."""
    sums = np.zeros(len(tokens))
    parts: list[tuple[Ints, Ints]] = []
    weights = [np.zeros(0, np.int32)]
    size = 0
    for grams, owners in _ngrams(tokens):
        of_row = owners < num_rows
        counts = np.bincount(grams)
        in_rows = np.bincount(grams[of_row], minlength=len(counts))
        squares = np.square(np.rint(16 * np.log2((len(tokens) + 1) / counts) + 1).astype(np.int32))
        squares[counts - in_rows > most_columns] = 0
        sums += np.bincount(owners, squares[grams], minlength=len(tokens))
        is_shared = (squares > 0) & (in_rows > 0) & (counts > in_rows)
        number = np.cumsum(is_shared, dtype=np.int32) - 1 + np.int32(size)
        kept = is_shared[grams]
        parts.append((number[grams[kept]], owners[kept]))
        weights.append(squares[is_shared])
        size += len(weights[-1])
    grams, owners = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Shared(grams, owners, np.concatenate(weights), np.sqrt(sums))


def _fill(
    values: NDArray[np.float64],
    places: NDArray[np.int32],
    shared: _Shared,
    column_places: NDArray[np.int64],
    progress: Progress,
) -> None:
    """Fill the rows that are empty, in the order of `values` and `column_places`."""
    from xtok.embeddings.kernels import add_up_and_keep_largest

    num_rows = len(values)
    of_row = shared.owners < num_rows
    columns = shared.owners[~of_row] - np.int32(num_rows)
    starts = _starts(shared.grams[~of_row], len(shared.squares))
    owners = shared.owners[of_row]
    row_grams = shared.grams[of_row][np.argsort(owners, kind="stable")]
    row_starts, lengths = _starts(owners, num_rows), shared.lengths
    with progress("comparing spellings", num_rows) as advance:

        def work(first: int) -> None:
            part = slice(first, min(first + _BLOCK, num_rows))
            add_up_and_keep_largest(
                row_starts[part.start : part.stop + 1], row_grams, lengths[part], shared.squares,
                starts, columns, 1 / lengths[num_rows:], column_places, values[part], places[part],
            )  # fmt: skip
            advance(part.stop - part.start)

        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(work, range(0, num_rows, _BLOCK)))


def _starts(numbers: Ints, size: int) -> NDArray[np.int64]:
    """Return where each of so many numbers would begin if they were sorted, and the end."""
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=size), out=starts[1:])
    return starts


def _ngrams(tokens: list[bytes]) -> Iterator[tuple[Ints, Ints]]:
    """Give the n-grams of all tokens, numbered from 0, and beside each its token's place.

    First those of one symbol, then of two, three and four, then whole tokens: one kind at a time
    takes a part of the memory. They are sorted by n-gram, then token.
    """
    cut = [token[:_LONGEST] for token in tokens]
    sizes = np.fromiter(map(len, cut), np.int64, len(cut)) + 2
    owners = np.repeat(np.arange(len(cut), dtype=np.int32), sizes)
    ends = np.cumsum(sizes)
    # Symbols of 9 bits: 1 and 2 are the marks, 3 to 258 the bytes.
    symbols = np.zeros(len(owners), np.int16)
    symbols[ends - sizes], symbols[ends - 1] = 1, 2
    inner = symbols == 0
    symbols[inner] = np.frombuffer(b"".join(cut), np.uint8).astype(np.int16) + 3
    yield _numbered(symbols[inner].astype(np.int64), owners[inner])
    for n in range(2, 5):
        is_within = owners[n - 1 :] == owners[: len(owners) - n + 1]
        codes = np.zeros(int(is_within.sum()), np.int64)
        for place in range(n):
            codes <<= 9
            codes |= symbols[place : len(owners) - n + 1 + place][is_within]
        yield _numbered(codes, owners[n - 1 :][is_within])
    number: dict[bytes, int] = {}
    whole = np.array([number.setdefault(token, len(number)) for token in tokens], np.int64)
    yield _numbered(whole, np.arange(len(tokens), dtype=np.int32))


def _numbered(codes: NDArray[np.int64], owners: Ints) -> tuple[Ints, Ints]:
    """Return n-grams, given as numbers below 2**38, as numbers from 0; sorted with their tokens.

    Of equal ones in a token, each is an n-gram of its own.
    """
    codes <<= _TOKEN_BITS  # one integer for an n-gram and its token, so that one sort groups them
    codes |= owners
    codes.sort()
    repeated = np.flatnonzero(~_is_first(codes))
    begins = np.flatnonzero(np.diff(repeated, prepend=-2) != 1)
    times = 1 + np.arange(len(repeated)) - np.repeat(begins, np.diff(begins, append=len(repeated)))
    owners = (codes & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)
    codes >>= _TOKEN_BITS
    codes = np.cumsum(_is_first(codes), out=codes)
    codes <<= _TIMES_BITS
    codes[repeated] |= times
    codes <<= _TOKEN_BITS
    codes |= owners
    codes.sort()
    owners = (codes & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)
    codes >>= _TOKEN_BITS
    return np.cumsum(_is_first(codes), dtype=np.int32) - np.int32(1), owners


def _is_first(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of sorted values are not the same as the one before."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first
