"""Numba kernels on flat arrays: the walk over two tokenizations, and what chunks carry over.

A side is a list of token ids, `symbols` (uint16) and `offsets` (int64 `[V + 1]`): id i
stands for `symbols[offsets[i]:offsets[i + 1]]`. Symbols 0 to 255 are bytes; a higher one is a
control token that has a counterpart, the same symbol on both sides. Tokens without symbols are
skipped.

Chunks are written as they are found: their number into `s_chunk` and `t_chunk` (−1 elsewhere),
and whether their bytes are equal into `correct`. All kernels are serial, release the GIL, and check
nothing.
"""

from __future__ import annotations

import math

import numpy as np

from xtok.kernels import inner_kernel, kernel

CONTROL = 256  # the first symbol that is not a byte
RUN = 12  # symbols that must agree before two texts count as in step again
NEAR = 24  # skipped symbols up to which every combination is tried, the fewest first
FIRST_WINDOW, LAST_WINDOW = 64, 65536  # skipped symbols up to which runs are looked up, in turn
BAND = 64  # width of the band of the Needleman-Wunsch table beyond its slope
SMALL = 512  # tokens per side up to which a last stretch without a shared end is aligned


@kernel
def align_documents(  # type: ignore[no-untyped-def]
    s_ids, s_bounds, s_symbols, s_offsets, t_ids, t_bounds, t_symbols, t_offsets, exact,
    s_chunk, t_chunk, correct, num_chunks, differs,
):  # fmt: skip
    """Align many documents: document d is `s_ids[s_bounds[d]:s_bounds[d + 1]]` and its like.

    `correct` has the student's layout: chunk k of document d is `correct[s_bounds[d] + k]`. Both
    sides are walked from one shared boundary to the next. `exact[student id]` is the teacher id of
    the same symbols, or −1: most tokens need no more than that look. `align_rest` goes on from the
    first symbol that differs: `differs[d]` (int64 `[documents, 2]`) has the tokens there, or −1.
    """
    for d in range(len(s_bounds) - 1):
        n, m = s_bounds[d + 1], t_bounds[d + 1]
        i, j, k = s_bounds[d], t_bounds[d], np.int64(0)
        base = i
        differs[d, 0] = differs[d, 1] = -1
        while i < n and j < m:
            s_id, t_id = s_ids[i], t_ids[j]
            if exact[s_id] == t_id:
                s_chunk[i] = t_chunk[j] = k
                correct[base + k] = True
                i, j, k = i + 1, j + 1, k + 1
                continue
            a, a_end = s_offsets[s_id], s_offsets[s_id + 1]
            if a == a_end:
                i += 1
                continue
            b, b_end = t_offsets[t_id], t_offsets[t_id + 1]
            if b == b_end:
                j += 1
                continue
            s_to, t_to = i, j
            s_chunk[i] = t_chunk[j] = k
            together = True
            while True:
                while a < a_end and b < b_end:
                    if s_symbols[a] != t_symbols[b]:
                        together = False
                        break
                    a, b = a + 1, b + 1
                if not together or (a == a_end and b == b_end):
                    break
                if a == a_end:
                    s_to += 1
                    while s_to < n and s_offsets[s_ids[s_to]] == s_offsets[s_ids[s_to] + 1]:
                        s_to += 1
                    if s_to == n:
                        break
                    s_chunk[s_to] = k
                    a, a_end = s_offsets[s_ids[s_to]], s_offsets[s_ids[s_to] + 1]
                else:
                    t_to += 1
                    while t_to < m and t_offsets[t_ids[t_to]] == t_offsets[t_ids[t_to] + 1]:
                        t_to += 1
                    if t_to == m:
                        break
                    t_chunk[t_to] = k
                    b, b_end = t_offsets[t_ids[t_to]], t_offsets[t_ids[t_to] + 1]
            if not together or s_to == n or t_to == m:
                for x in range(i, min(s_to + 1, n)):
                    s_chunk[x] = -1
                for y in range(j, min(t_to + 1, m)):
                    t_chunk[y] = -1
                if not together:
                    differs[d, 0], differs[d, 1] = i, j
                break
            correct[base + k] = True
            i, j, k = s_to + 1, t_to + 1, k + 1
        num_chunks[d] = k


@kernel
def align_rest(  # type: ignore[no-untyped-def]
    s_ids, s_bounds, s_symbols, s_offsets, t_ids, t_bounds, t_symbols, t_offsets, max_comb_len,
    s_chunk, t_chunk, correct, num_chunks, differs,
):  # fmt: skip
    """Go on where `align_documents` found a difference; it fills the same arrays.

    Where symbols differ, both sides skip to the nearest place from which they agree again; the
    tokens between the shared boundaries around it are a stretch for `_align_stretch`.
    """
    for d in range(len(num_chunks)):
        i, j = differs[d, 0], differs[d, 1]
        if i < 0:
            continue
        n, m = s_bounds[d + 1], t_bounds[d + 1]
        k, base = num_chunks[d], s_bounds[d]
        x, x_ends = _stream(s_ids, s_symbols, s_offsets, i, n)
        y, y_ends = _stream(t_ids, t_symbols, t_offsets, j, m)
        p = q = np.int64(0)
        is_other = np.int64(0)  # whether symbols differ since the last shared boundary
        while p < len(x) and q < len(y):
            if x[p] == y[q]:
                p, q = p + 1, q + 1
            else:
                a, b = _skip(x, p, y, q)
                is_other = np.int64(1)
                if a < 0:
                    break
                p, q = p + a, q + b
            s_end = i if p == 0 else x_ends[p - 1]
            t_end = j if q == 0 else y_ends[q - 1]
            # A token's end in the past of a skip is no boundary: only p and q themselves count.
            if s_end >= 0 and t_end >= 0:
                if is_other:
                    k = _align_stretch(
                        i, s_end, j, t_end, s_ids, s_symbols, s_offsets, t_ids, t_symbols,
                        t_offsets, max_comb_len, k, base, s_chunk, t_chunk, correct,
                    )  # fmt: skip
                else:
                    k = _emit(
                        i, s_end, j, t_end, np.int64(1), k, base, s_ids, s_offsets, t_ids,
                        t_offsets, s_chunk, t_chunk, correct,
                    )  # fmt: skip
                i, j = s_end, t_end
                is_other = np.int64(0)
        if is_other and n - i <= SMALL and m - j <= SMALL:
            k = _align_stretch(
                i, n, j, m, s_ids, s_symbols, s_offsets, t_ids, t_symbols, t_offsets,
                max_comb_len, k, base, s_chunk, t_chunk, correct,
            )  # fmt: skip
        num_chunks[d] = k


@inner_kernel
def _emit(  # type: ignore[no-untyped-def]
    s_from, s_to, t_from, t_to, is_correct, k, base, s_ids, s_offsets, t_ids, t_offsets,
    s_chunk, t_chunk, correct,
):  # fmt: skip
    """Write chunk k over the tokens [s_from, s_to) and [t_from, t_to); return k + 1."""
    for i in range(s_from, s_to):
        if s_offsets[s_ids[i] + 1] > s_offsets[s_ids[i]]:
            s_chunk[i] = k
    for j in range(t_from, t_to):
        if t_offsets[t_ids[j] + 1] > t_offsets[t_ids[j]]:
            t_chunk[j] = k
    correct[base + k] = is_correct != 0
    return k + 1


@inner_kernel
def _stream(ids, symbols, offsets, start, stop):  # type: ignore[no-untyped-def]
    """Return the symbols of some tokens, and for each the token after the one that ends there.

    That is int64, and −1 within a token.
    """
    total = 0
    for i in range(start, stop):
        total += offsets[ids[i] + 1] - offsets[ids[i]]
    stream = np.empty(total, np.uint16)
    ends = np.empty(total, np.int64)
    place = 0
    for i in range(start, stop):
        for x in range(offsets[ids[i]], offsets[ids[i] + 1]):
            stream[place] = symbols[x]
            ends[place] = i + 1 if x + 1 == offsets[ids[i] + 1] else -1
            place += 1
    return stream, ends


@inner_kernel
def _agree(x, p, y, q):  # type: ignore[no-untyped-def]
    """Tell whether RUN symbols agree from here on, or all that are left on both sides."""
    left = min(len(x) - p, len(y) - q)
    if left < RUN and len(x) - p != len(y) - q:
        return False
    for offset in range(min(left, RUN)):
        if x[p + offset] != y[q + offset]:
            return False
    return left > 0


@inner_kernel
def _hash(x, p):  # type: ignore[no-untyped-def]
    value = np.uint64(1469598103934665603)
    for offset in range(RUN):
        value = (value ^ np.uint64(x[p + offset])) * np.uint64(1099511628211)
    return value ^ (value >> np.uint64(29))


@inner_kernel
def _skip(x, p, y, q):  # type: ignore[no-untyped-def]
    """Return how many symbols to skip on both sides until they agree, the fewest; −1 for none.

    Beyond NEAR, a hash table of the runs of RUN symbols of one side is looked up by the other's.
    """
    for total in range(1, NEAR + 1):
        for a in range(total + 1):
            b = total - a
            if p + a < len(x) and q + b < len(y) and _agree(x, p + a, y, q + b):
                return a, b
    window = FIRST_WINDOW
    while window <= LAST_WINDOW:
        table = np.empty(4 * window, np.int32)
        for slot in range(4 * window):
            table[slot] = -1
        mask = np.uint64(4 * window - 1)
        for b in range(min(window, len(y) - q - RUN + 1)):
            place = _hash(y, q + b) & mask
            if table[place] < 0:
                table[place] = b
        best_a = best_b = np.int64(-1)
        for a in range(min(window, len(x) - p - RUN + 1)):
            if best_a >= 0 and a >= best_a + best_b:
                break
            other = np.int64(table[_hash(x, p + a) & mask])
            closer = other >= 0 and (best_a < 0 or a + other < best_a + best_b)
            if closer and _agree(x, p + a, y, q + other):
                best_a, best_b = np.int64(a), other
        if best_a >= 0:
            return best_a, best_b
        if p + window >= len(x) and q + window >= len(y):
            break
        window *= 8
    return np.int64(-1), np.int64(-1)


@inner_kernel
def _equal(  # type: ignore[no-untyped-def]
    i, num_s, j, num_t, s_ids, s_symbols, s_offsets, t_ids, t_symbols, t_offsets, s_tokens,
    t_tokens,
):  # fmt: skip
    """Return how many symbols num_s tokens before i and num_t before j share; 0 if they differ."""
    length = other = 0
    for x in range(i - num_s, i):
        length += s_offsets[s_ids[s_tokens[x]] + 1] - s_offsets[s_ids[s_tokens[x]]]
    for y in range(j - num_t, j):
        other += t_offsets[t_ids[t_tokens[y]] + 1] - t_offsets[t_ids[t_tokens[y]]]
    if length != other:
        return 0
    y = j - num_t
    b = t_offsets[t_ids[t_tokens[y]]]
    for x in range(i - num_s, i):
        s_id = s_ids[s_tokens[x]]
        for a in range(s_offsets[s_id], s_offsets[s_id + 1]):
            if b == t_offsets[t_ids[t_tokens[y]] + 1]:
                y += 1
                b = t_offsets[t_ids[t_tokens[y]]]
            if s_symbols[a] != t_symbols[b]:
                return 0
            b += 1
    return length


@inner_kernel
def _with_symbols(ids, offsets, start, end):  # type: ignore[no-untyped-def]
    tokens = np.empty(end - start, np.int64)
    count = 0
    for i in range(start, end):
        if offsets[ids[i] + 1] > offsets[ids[i]]:
            tokens[count] = i
            count += 1
    return tokens, count


@inner_kernel
def _text_between(ids, symbols, offsets, tokens, start, end):  # type: ignore[no-untyped-def]
    """Narrow a range to what control tokens at its two ends leave; nothing if one is within."""
    while start < end and symbols[offsets[ids[tokens[start]]]] >= CONTROL:
        start += 1
    while start < end and symbols[offsets[ids[tokens[end - 1]]]] >= CONTROL:
        end -= 1
    for i in range(start, end):
        if symbols[offsets[ids[tokens[i]]]] >= CONTROL:
            return start, start
    return start, end


@inner_kernel
def _align_stretch(  # type: ignore[no-untyped-def]
    s_from, s_to, t_from, t_to, s_ids, s_symbols, s_offsets, t_ids, t_symbols, t_offsets,
    max_comb_len, k, base, s_chunk, t_chunk, correct,
):  # fmt: skip
    """Align the tokens of a stretch that differs: banded Needleman-Wunsch over groups of tokens.

    Groups of up to `max_comb_len` tokens on each side match if their symbols are equal; the most
    matched symbols win, then the most groups. What is left between two matches is one chunk that
    is not correct, if it has text on both sides and no more than `max_comb_len` tokens on either.
    (Needleman and Wunsch, J. Mol. Biol. 48, 1970, with groups as in NeMo-RL's aligner.)
    """
    s_tokens, n = _with_symbols(s_ids, s_offsets, s_from, s_to)
    t_tokens, m = _with_symbols(t_ids, t_offsets, t_from, t_to)
    if n == 0 or m == 0:
        return k
    max_comb_len = min(max_comb_len, max(n, m))  # so that a step fits into its int32
    width = min(m, BAND + max_comb_len) + 1
    score = np.zeros((n + 1, width), np.int64)
    step = np.zeros((n + 1, width), np.int32)  # 0: from above, 1: from the left, else a group
    low = np.empty(n + 1, np.int64)  # the band's first column, row by row
    for i in range(n + 1):
        low[i] = max(0, min(m + 1 - width, i * m // n - width // 2))
        for c in range(width):
            j = low[i] + c
            best = np.int64(-1)
            if i > 0 and 0 <= j - low[i - 1] < width:
                best = score[i - 1, j - low[i - 1]]
            if c > 0 and score[i, c - 1] > best:
                best, step[i, c] = score[i, c - 1], 1
            for num_s in range(1, min(max_comb_len, i) + 1):
                for num_t in range(1, min(max_comb_len, j) + 1):
                    before = j - num_t - low[i - num_s]
                    if 0 <= before < width:
                        length = _equal(
                            np.int64(i), np.int64(num_s), j, np.int64(num_t), s_ids, s_symbols,
                            s_offsets, t_ids, t_symbols, t_offsets, s_tokens, t_tokens,
                        )  # fmt: skip
                        gain = score[i - num_s, before] + 256 * length + 1
                        if length > 0 and gain > best:
                            best, step[i, c] = gain, 2 + num_s * (max_comb_len + 1) + num_t
            score[i, c] = max(best, 0)
    # Walk back, and write the matches in order, with what is left between them.
    matches = np.empty((min(n, m) + 1, 4), np.int64)
    count = 0
    i, j = n, m
    while i > 0 and j > 0:
        c = j - low[i]
        if c < 0 or c >= width:
            break
        if step[i, c] >= 2:
            num_s = (step[i, c] - 2) // (max_comb_len + 1)
            num_t = (step[i, c] - 2) % (max_comb_len + 1)
            i, j = i - num_s, j - num_t
            matches[count, 0], matches[count, 1] = i, i + num_s
            matches[count, 2], matches[count, 3] = j, j + num_t
            count += 1
        elif step[i, c] == 1:
            j -= 1
        else:
            i -= 1
    s_end = t_end = np.int64(0)
    for index in range(count, -1, -1):
        to_i, to_j = (n, m) if index == 0 else (matches[index - 1, 0], matches[index - 1, 2])
        s_first, s_last = _text_between(s_ids, s_symbols, s_offsets, s_tokens, s_end, to_i)
        t_first, t_last = _text_between(t_ids, t_symbols, t_offsets, t_tokens, t_end, to_j)
        if 0 < s_last - s_first <= max_comb_len and 0 < t_last - t_first <= max_comb_len:
            k = _emit(
                s_tokens[s_first], s_tokens[s_last - 1] + 1,
                t_tokens[t_first], t_tokens[t_last - 1] + 1,
                np.int64(0), k, base, s_ids, s_offsets, t_ids, t_offsets,
                s_chunk, t_chunk, correct,
            )  # fmt: skip
        if index > 0:
            s_end, t_end = matches[index - 1, 1], matches[index - 1, 3]
            k = _emit(
                s_tokens[to_i], s_tokens[s_end - 1] + 1, t_tokens[to_j], t_tokens[t_end - 1] + 1,
                np.int64(1), k, base, s_ids, s_offsets, t_ids, t_offsets,
                s_chunk, t_chunk, correct,
            )  # fmt: skip
    return k


@kernel
def share_logprobs(  # type: ignore[no-untyped-def]
    s_bounds, s_chunk, t_bounds, t_chunk, num_chunks, is_correct, s_counts, t_logprobs,
    s_logprobs, by_student, logprobs, valid,
):  # fmt: skip
    """Share the sum of each chunk's teacher tokens among its student tokens, and mark these valid.

    A chunk is left out if it is not correct, or one of its tokens does not count, or the first
    token of its document is in it and is NaN. Returns the first other teacher token that is NaN,
    and the first student token that is not finite where that matters, each or −1.

    A share is a multiple of the last bit of the float32 sum, between two roundings of the shares so
    far: so the shares are exact in float32, and so is their sum. Equal shares differ in that bit.
    """
    first = 0
    for d in range(len(num_chunks)):
        i, s_to, j, t_to = s_bounds[d], s_bounds[d + 1], t_bounds[d], t_bounds[d + 1]
        for k in range(num_chunks[d]):
            while s_chunk[i] != k:
                i += 1
            while t_chunk[j] != k:
                j += 1
            s_from, counts, n, all_weights = i, is_correct[first + k], 0, 0.0
            wrong_s = wrong_t = -1
            while i < s_to and (s_chunk[i] == k or s_chunk[i] < 0):
                if s_chunk[i] == k:
                    counts = counts and s_counts[i]
                    n += 1
                    if by_student:
                        all_weights += max(0.0, -s_logprobs[i])
                        if not math.isfinite(s_logprobs[i]):
                            if i == s_bounds[d]:
                                counts = False
                            elif wrong_s < 0:
                                wrong_s = i
                i += 1
            total = 0.0
            while j < t_to and (t_chunk[j] == k or t_chunk[j] < 0):
                if t_chunk[j] == k:
                    total += t_logprobs[j]
                    if math.isnan(t_logprobs[j]):
                        if j == t_bounds[d]:
                            counts = False
                        elif wrong_t < 0:
                            wrong_t = j
                j += 1
            if not counts:
                continue
            if wrong_s >= 0 or wrong_t >= 0:
                return wrong_t, wrong_s
            rounded = float(np.float32(total))
            equal = not by_student or all_weights == 0.0
            if equal:
                all_weights = float(n)
            if rounded == 0.0 or not math.isfinite(rounded):
                unit = 0.0
            else:
                unit = math.ldexp(1.0, max(math.frexp(rounded)[1] - 24, -149))
            weights = done = 0.0
            for x in range(s_from, i):
                if s_chunk[x] == k:
                    valid[x] = True
                    if unit == 0.0:
                        logprobs[x] = rounded
                        continue
                    weights += 1.0 if equal else max(0.0, -s_logprobs[x])
                    now = np.rint(rounded / unit * (weights / all_weights))
                    logprobs[x] = (now - done) * unit
                    done = now
        first += num_chunks[d]
    return -1, -1
