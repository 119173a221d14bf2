"""Numba kernels that look up stems, and compare stems with the student's tokens.

The kernels are serial, release the GIL, and do not check their arguments.
"""

from __future__ import annotations

import numpy as np

from xtok._lib.kernels import inner_kernel, kernel
from xtok.teachers.credit_kernels import num_shared, prefix_bound

ROOT = 62  # index of the bit that marks the key of a root
ID_BITS = 24  # number of bits of a teacher id in a key, enough for `MAX_WIDTH`


@inner_kernel
def root_key(t, u):  # type: ignore[no-untyped-def]
    """Return the key of token t without its first u bytes."""
    return np.int64(1) << ROOT | u << ID_BITS | np.int64(t)


@inner_kernel
def child_key(e, t):  # type: ignore[no-untyped-def]
    """Return the key of stem e, followed by token t."""
    return (np.int64(e) + 1) << ID_BITS | np.int64(t)


@inner_kernel
def find_stem(slots, keys, key, missing):  # type: ignore[no-untyped-def]
    """Return the stem of a key, or −1 if there is no such stem.

    If there is no such stem, the key is added to `missing`. This array starts with the number of
    missing keys, followed by the keys.
    """
    e = slots[_slot(slots, keys, key)]
    if e < 0:
        missing[0] += 1
        missing[missing[0]] = key
    return e


@kernel
def insert_stems(slots, keys, start):  # type: ignore[no-untyped-def]
    """Insert the stems of `keys[start:]`, which must be new, into the hash table."""
    for e in range(start, len(keys)):
        slots[_slot(slots, keys, keys[e])] = e


@inner_kernel
def _slot(slots, keys, key):  # type: ignore[no-untyped-def]
    mask = np.int64(len(slots) - 1)
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(32)) & mask
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def compare_pairs(student, stems, pairs, teacher_data):  # type: ignore[no-untyped-def]
    """Find pairs of a stem and a teacher token that student tokens cross or extend.

    In each pair, the teacher token follows the stem.

    Args:
        student: see `SortedTokens`.
        stems: three arrays: the bytes of all stems, where the omitted bytes precede each stem; the
            offset of each stem's omitted bytes; the number of omitted bytes of each stem.
        pairs: three arrays, int64 `[pairs]`: the index of the stem, and the start and end of the
            teacher token in `teacher_data`.
        teacher_data: the bytes of the teacher's tokens.

    Returns:
        is_crossed: bool `[pairs]`, whether the bytes of the pair contain a student token that
            starts in the stem (or its omitted bytes) and ends in the teacher token.
        is_prefix: bool `[pairs]`, whether a longer student token starts with the stem and the
            teacher token.
    """
    stem_data, stem_offsets, num_omitted = stems
    stem_of, starts, ends = pairs
    longest = np.diff(student.offsets).max()
    is_crossed, is_prefix = np.zeros((2, len(stem_of)), np.bool_)
    text = np.empty(0, np.uint8)
    for n in range(len(stem_of)):
        stem_start, stem_end = stem_offsets[stem_of[n]], stem_offsets[stem_of[n] + 1]
        boundary = stem_end - stem_start  # in `text`
        size = boundary + ends[n] - starts[n]
        if size > len(text):
            text = np.empty(2 * size, np.uint8)
        text[:boundary] = stem_data[stem_start:stem_end]
        text[boundary:size] = teacher_data[starts[n] : ends[n]]
        for first in range(max(0, boundary - longest + 1), boundary):
            if _has_token(student, text[first:size], boundary - first):
                is_crossed[n] = True
                break
        is_prefix[n] = _is_prefix(student, text[num_omitted[stem_of[n]] : size])
    return is_crossed, is_prefix


@inner_kernel
def _has_token(student, text, least):  # type: ignore[no-untyped-def]
    """Return whether a text starts with a token of more than `least` bytes."""
    data, offsets, order = student
    for size in range(least + 1, len(text) + 1):
        # `first` is the first token that starts with `text[:size]`, if such a token exists.
        n = prefix_bound(data, offsets, order, text[:size], False)
        first = order[min(n, len(order) - 1)]
        a, b = offsets[first], offsets[first + 1]
        if num_shared(data, a, b, text[:size]) < size:
            return False
        if b - a == size:
            return True
    return False


@inner_kernel
def _is_prefix(student, text):  # type: ignore[no-untyped-def]
    """Return whether a longer token starts with a text."""
    data, offsets, order = student
    # `last` is the last token that starts with the text, if such a token exists.
    last = order[prefix_bound(data, offsets, order, text, True) - 1]
    a, b = offsets[last], offsets[last + 1]
    return b - a > len(text) and num_shared(data, a, b, text) == len(text)
