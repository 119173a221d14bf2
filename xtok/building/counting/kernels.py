"""Numba kernels that locate and count chunks, and compute their losses.

`ids` (int32) contains the ids of all documents from one tokenizer. `bounds` (int64
`[documents + 1]`) contains the start of each document in `ids`. The kernels are serial, release the
GIL, and do not check their arguments. In the kernels of distinct chunks, `c` is the number of a
chunk. `a` and `b` are the indices of a student token and a teacher token in the chunks' ids.
"""

from __future__ import annotations

import numpy as np

from xtok._lib.kernels import inner_kernel, kernel


@kernel
def chunk_spans(  # type: ignore[no-untyped-def]
    ids, bounds, chunk_ids, num_chunks, lengths, starts, ends, is_chunk
):
    """Find the start and the end of each chunk in one tokenizer's ids.

    `chunk_ids`, int32 `[tokens]`, contains the number of each token's chunk within its document, or
    −1 outside chunks. `num_chunks` is int64 `[documents]`, and `lengths`, int64 `[V]`, is the
    number of bytes per token. The outputs are `starts` and `ends`, int64 `[chunks]`, and
    `is_chunk`, bool `[chunks]`, which becomes False for chunks with a gap or a token without bytes.
    """
    chunk = np.int64(-1)  # number of chunks in the previous documents
    for d in range(len(num_chunks)):
        before = np.int64(-1)  # number of the previous chunk
        for i in range(bounds[d], bounds[d + 1]):
            if chunk_ids[i] != before and chunk_ids[i] >= 0:
                before = chunk_ids[i]
                chunk += 1
                starts[chunk] = ends[chunk] = i
            if chunk_ids[i] >= 0:
                is_chunk[chunk] &= ends[chunk] == i and lengths[ids[i]] > 0
                ends[chunk] = i + 1


@inner_kernel
def entry_weight(rows, row, column):  # type: ignore[no-untyped-def]
    """Return the weight of a column in a row, or 0 if the row has no such entry."""
    bounds, columns, weights = rows
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
    spans, amounts, s_ids, t_ids, chunks, table, size, indices
):
    """Add amounts to the counts of chunks, and return the new number of distinct chunks.

    `spans` consists of four int64 arrays: the start and the end of each chunk in `s_ids`, then in
    `t_ids`. `amounts` contains one int64 per chunk, or a single int64 for all chunks. `chunks`
    contains `size` distinct chunks, and has room for more. `table`, int64 `[2**n]`, is an
    open-addressed hash table of chunk indices, with −1 in free places. The output `indices`
    contains the index of each chunk.
    """
    s_starts, s_ends, t_starts, t_ends = spans
    ids, bounds, widths, counts = chunks
    mask = np.int64(len(table) - 1)
    for x in range(len(s_starts)):
        i, i_end, j, j_end = s_starts[x], s_ends[x], t_starts[x], t_ends[x]
        n, length = i_end - i, i_end - i + j_end - j
        mixed = _mix(_mix(np.uint64(n), s_ids, i, i_end), t_ids, j, j_end)
        slot = np.int64(mixed >> np.uint64(32)) & mask
        while table[slot] >= 0:
            index = table[slot]
            start = bounds[index]
            if (
                widths[index] == n
                and bounds[index + 1] - start == length
                and _has(ids, start, s_ids, i, i_end)
                and _has(ids, start + n, t_ids, j, j_end)
            ):
                break
            slot = (slot + 1) & mask
        if table[slot] < 0:
            start = bounds[size]
            ids[start : start + n] = s_ids[i:i_end]
            ids[start + n : start + length] = t_ids[j:j_end]
            table[slot], bounds[size + 1] = size, start + length
            widths[size], counts[size] = n, 0
            size += 1
        indices[x] = table[slot]
        counts[indices[x]] += amounts[0] if len(amounts) == 1 else amounts[x]
    return size


@inner_kernel
def _mix(mixed, ids, start, end):  # type: ignore[no-untyped-def]
    for a in range(start, end):
        mixed = (mixed ^ np.uint64(ids[a])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@inner_kernel
def _has(ids, index, others, start, end):  # type: ignore[no-untyped-def]
    while start < end and ids[index] == others[start]:
        index, start = index + 1, start + 1
    return start == end


@kernel
def chunk_pairs(chunks, unit, rows, keys, amounts):  # type: ignore[no-untyped-def]
    """List the pairs of tokens within distinct chunks, with an amount for each pair.

    The amounts of a chunk add up to `unit` times its count, except for rounding. Every teacher
    token gets an equal part. The student tokens share this part in proportion to their weights in
    `rows`, or equally if all their weights are 0. `chunks` is a `DistinctChunks`, and `rows` a
    `MapRows`.
    """
    ids, bounds, widths, counts = chunks
    index = np.int64(0)
    for c in range(len(widths)):
        start, end = bounds[c], bounds[c + 1]
        n = widths[c]
        m = end - start - n
        for b in range(start + n, end):
            total = 0.0
            if len(rows.bounds):
                for a in range(start, start + n):
                    total += entry_weight(rows, ids[a], ids[b])
            for a in range(start, start + n):
                keys[index] = np.int64(ids[a]) << 32 | ids[b]
                if total > 0.0:
                    share = entry_weight(rows, ids[a], ids[b]) / total
                    amounts[index] = np.int64(unit // m * share + 0.5) * counts[c]
                else:
                    amounts[index] = unit // (n * m) * counts[c]
                index += 1


@kernel
def chunk_losses(chunks, rows, epsilon, uniform, losses):  # type: ignore[no-untyped-def]
    """Compute the cross-entropy of each distinct chunk for P-KL, float64 `[chunks]`.

    The prediction for a chunk is the mean of its student tokens' rows. The loss is the mean of
    `-ln((1 - epsilon) * prediction + uniform)` over its teacher tokens.
    """
    ids, bounds, widths, _ = chunks
    for c in range(len(widths)):
        start, middle, end = bounds[c], bounds[c] + widths[c], bounds[c + 1]
        loss = 0.0
        for b in range(middle, end):
            total = 0.0
            for a in range(start, middle):
                total += entry_weight(rows, ids[a], ids[b])
            loss -= np.log((1 - epsilon) * total / (middle - start) + uniform)
        losses[c] = loss / (end - middle)
