"""Numba kernels on flat arrays: shared token boundaries, counts of pairs, losses of chunks.

Documents of a side are `ids` (int32) and `bounds` (int64 `[documents + 1]`): document d is
`ids[bounds[d]:bounds[d + 1]]`. The kernels are serial, release the GIL, and check nothing.
"""

from __future__ import annotations

import numpy as np

from xtok.kernels import inner_kernel, kernel


@kernel
def shared_boundaries(  # type: ignore[no-untyped-def]
    s_ids, s_bounds, s_data, s_offsets, t_ids, t_bounds, t_data, t_offsets,
    s_starts, t_starts, num_starts, same_bytes, complete,
):  # fmt: skip
    """Find the tokens of both sides that begin at one byte, document by document; return how many.

    Both sides' bytes are compared along the way. A document ends where they differ: a boundary
    counts if all bytes before it agree, and those that its two tokens share. Student token i is
    `s_data[s_offsets[i]:s_offsets[i + 1]]` (uint8, int64); the teacher's likewise. The last five
    arrays are filled: `s_starts` and `t_starts` (int64) with the places of these tokens in `s_ids`
    and `t_ids`, one document after another; per document, `num_starts` (int64) with their number,
    `same_bytes` (int64) with the bytes that agree, `complete` (bool) with whether all do.
    """
    count = 0
    for d in range(len(s_bounds) - 1):
        i, n = s_bounds[d], s_bounds[d + 1]
        j, m = t_bounds[d], t_bounds[d + 1]
        first = count
        same = 0
        differs = False
        a = a_end = b = b_end = np.int64(0)
        while True:
            if a == a_end and b == b_end:
                if i == n or j == m:
                    break
                a, a_end = s_offsets[s_ids[i]], s_offsets[s_ids[i] + 1]
                b, b_end = t_offsets[t_ids[j]], t_offsets[t_ids[j] + 1]
                s_starts[count], t_starts[count] = i, j
                count += 1
                i, j = i + 1, j + 1
                is_start = True
                differs = a == a_end or b == b_end  # an unknown token has no bytes
            elif a == a_end:
                if i == n:
                    break
                a, a_end = s_offsets[s_ids[i]], s_offsets[s_ids[i] + 1]
                i += 1
                is_start = False
                differs = a == a_end
            elif b == b_end:
                if j == m:
                    break
                b, b_end = t_offsets[t_ids[j]], t_offsets[t_ids[j] + 1]
                j += 1
                is_start = False
                differs = b == b_end
            length = min(a_end - a, b_end - b)
            for x in range(length):
                if s_data[a + x] != t_data[b + x]:
                    differs = True
                    break
                same += 1
            if differs:
                count -= is_start
                break
            a, b = a + length, b + length
        num_starts[d] = count - first
        same_bytes[d] = same
        complete[d] = not differs and i == n and j == m and a == a_end and b == b_end
    return count


@kernel
def add_counts(keys, amounts, table_keys, table_counts, room):  # type: ignore[no-untyped-def]
    """Add amounts to an open-addressed table, while there is room.

    Args:
        keys: int64, ≥ 0.
        amounts: int64, as many, or one for all.
        table_keys: int64 `[2**n]`, −1 where free.
        table_counts: int64 `[2**n]`.
        room: how many new keys may be added.

    Returns:
        How many keys were added until the room was used up, and how many of them were new.
    """
    mask = np.int64(len(table_keys) - 1)
    new = 0
    same = len(amounts) == 1
    for x in range(len(keys)):
        key = keys[x]
        mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
        slot = np.int64(mixed >> np.uint64(32)) & mask
        while table_keys[slot] != key:
            if table_keys[slot] < 0:
                if new == room:
                    return x, new
                table_keys[slot] = key
                new += 1
                break
            slot = (slot + 1) & mask
        table_counts[slot] += amounts[0] if same else amounts[x]
    return len(keys), new


@inner_kernel
def weight_of(bounds, columns, weights, row, column):  # type: ignore[no-untyped-def]
    """Return a row's weight for a column, 0 if it has no such entry; columns rise in a row."""
    low, high = bounds[row], bounds[row + 1]
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < column:
            low = middle + 1
        else:
            high = middle
    if low < bounds[row + 1] and columns[low] == column:
        return weights[low]
    return 0.0


@kernel
def add_chunks(  # type: ignore[no-untyped-def]
    spans, amounts, s_ids, t_ids, ids, bounds, widths, counts, table, size, places
):
    """Add amounts to chunks in an open-addressed table, while there is room.

    Args:
        spans: int64 `[chunks, 4]`, where a chunk's tokens lie in `s_ids` and `t_ids` (int32).
        amounts: int64, as many, or one for all.
        s_ids: see above.
        t_ids: see above.
        ids: int32, the tokens of the different chunks, the student's first.
        bounds: int64, where each of them begins in `ids`, and the last one ends.
        widths: int64, how many of its tokens are the student's.
        counts: int64, how often it occurs.
        table: int64 `[2**n]`, places in these three, −1 where free.
        size: how many different chunks there are.
        places: int64, filled with each chunk's place among them.

    Returns:
        How many chunks were added until the room was used up, and the new size.
    """
    mask = np.int64(len(table) - 1)
    for x in range(len(spans)):
        i, i_end, j, j_end = spans[x, 0], spans[x, 1], spans[x, 2], spans[x, 3]
        n, m = i_end - i, j_end - j
        mixed = np.uint64(n)
        for a in range(i, i_end):
            mixed = (mixed ^ np.uint64(s_ids[a])) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        for b in range(j, j_end):
            mixed = (mixed ^ np.uint64(t_ids[b])) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        slot = np.int64(mixed >> np.uint64(32)) & mask
        while True:
            place = table[slot]
            if place < 0:
                start = bounds[size]
                if 4 * size >= 3 * len(table) or start + n + m > len(ids):
                    return x, size
                for a in range(n):
                    ids[start + a] = s_ids[i + a]
                for b in range(m):
                    ids[start + n + b] = t_ids[j + b]
                table[slot] = place = size
                bounds[size + 1] = start + n + m
                widths[size] = n
                counts[size] = 0
                size += 1
                break
            start = bounds[place]
            same = widths[place] == n and bounds[place + 1] - start == n + m
            for a in range(n if same else 0):
                same = same and ids[start + a] == s_ids[i + a]
            for b in range(m if same else 0):
                same = same and ids[start + n + b] == t_ids[j + b]
            if same:
                break
            slot = (slot + 1) & mask
        counts[place] += amounts[0] if len(amounts) == 1 else amounts[x]
        places[x] = place
    return len(spans), size


@kernel
def chunk_pairs(  # type: ignore[no-untyped-def]
    ids, bounds, widths, counts, unit, row_bounds, columns, weights, keys, amounts
):
    """List the pairs of tokens within different chunks; those of a chunk share `unit` * its count.

    Its teacher tokens have equal parts of `unit`. With empty `row_bounds`, so have the student
    tokens of each part; else these share it in proportion to their weights for the teacher token,
    where any has one, to the nearest integer. Entries of row s are `row_bounds[s]` to
    `row_bounds[s + 1]`, with rising `columns`.
    """
    place = np.int64(0)
    for c in range(len(widths)):
        start, end = bounds[c], bounds[c + 1]
        n = widths[c]
        m = end - start - n
        for b in range(start + n, end):
            total = 0.0
            if len(row_bounds):
                for a in range(start, start + n):
                    total += weight_of(row_bounds, columns, weights, ids[a], ids[b])
            for a in range(start, start + n):
                keys[place] = np.int64(ids[a]) << 32 | ids[b]
                if total > 0.0:
                    share = weight_of(row_bounds, columns, weights, ids[a], ids[b]) / total
                    amounts[place] = np.int64(unit // m * share + 0.5) * counts[c]
                else:
                    amounts[place] = unit // (n * m) * counts[c]
                place += 1


@kernel
def chunk_losses(  # type: ignore[no-untyped-def]
    ids, bounds, widths, row_bounds, columns, weights, epsilon, uniform, losses
):
    """Fill in the cross-entropy of different chunks as P-KL averages it, float64 `[chunks]`.

    A chunk's prediction is the mean of its student tokens' rows; its loss the mean over its teacher
    tokens of `-ln((1 - epsilon) * prediction + uniform)`. Arrays are those of `chunk_pairs`.
    """
    for c in range(len(widths)):
        start, middle, end = bounds[c], bounds[c] + widths[c], bounds[c + 1]
        loss = 0.0
        for b in range(middle, end):
            total = 0.0
            for a in range(start, middle):
                total += weight_of(row_bounds, columns, weights, ids[a], ids[b])
            loss -= np.log((1 - epsilon) * total / (middle - start) + uniform)
        losses[c] = loss / (end - middle)
