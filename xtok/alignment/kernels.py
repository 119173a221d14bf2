"""Numba kernels on flat arrays: the walk over two tokenizations, and what chunks carry over.

A side is a list of token ids, `symbols` (uint16) and `offsets` (int64 `[V + 1]`): id i
stands for `symbols[offsets[i]:offsets[i + 1]]`. Symbols 0 to 255 are bytes; a higher one is a
control token that has a counterpart, the same symbol on both sides. Tokens without symbols are
skipped.

Chunks are written as they are found: their number into `s_chunk` and `t_chunk` (−1 elsewhere),
whether their bytes are equal into `correct`, and 1 into `s_exact` and `t_exact` for the tokens of a
correct chunk of one token each. All kernels are serial, release the GIL, and check nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

CONTROL = 256  # the first symbol that is not a byte
RUN = 12  # symbols that must agree before two texts count as in step again
NEAR = 24  # skipped symbols up to which every combination is tried, the fewest first
WINDOWS = (64, 512, 4096, 65536)  # skipped symbols up to which runs are looked up, in turn
BAND = 64  # width of the band of the Needleman-Wunsch table beyond its slope
SMALL = 512  # tokens per side up to which a last stretch without a shared end is aligned

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


@njit(**OPTIONS)
def _emit(s_from, s_to, t_from, t_to, is_correct, k, s, t, out):  # type: ignore[no-untyped-def]
    """Write chunk k over the tokens [s_from, s_to) and [t_from, t_to); return k + 1."""
    s_ids, _, s_offsets = s
    t_ids, _, t_offsets = t
    s_chunk, t_chunk, s_exact, t_exact, correct = out
    num_s = num_t = 0
    for i in range(s_from, s_to):
        if s_offsets[s_ids[i] + 1] > s_offsets[s_ids[i]]:
            s_chunk[i] = k
            num_s += 1
    for j in range(t_from, t_to):
        if t_offsets[t_ids[j] + 1] > t_offsets[t_ids[j]]:
            t_chunk[j] = k
            num_t += 1
    correct[k] = is_correct
    if is_correct and num_s == 1 and num_t == 1:
        for i in range(s_from, s_to):
            s_exact[i] = s_chunk[i] == k
        for j in range(t_from, t_to):
            t_exact[j] = t_chunk[j] == k
    return k + 1


@njit(**OPTIONS)
def align_document(s, t, exact, max_comb_len, out):  # type: ignore[no-untyped-def]
    """Align one document; return the number of chunks.

    Both sides are walked from one shared boundary to the next. `exact[student id]` is the teacher
    id of the same symbols, or −1: most tokens need no more than that look. From the first symbol
    on that differs, `_align_streams` goes on.
    """
    s_ids, s_symbols, s_offsets = s
    t_ids, t_symbols, t_offsets = t
    s_chunk, t_chunk, s_exact, t_exact, correct = out
    n, m = len(s_ids), len(t_ids)
    i = j = k = 0
    while i < n and j < m:
        s_id, t_id = s_ids[i], t_ids[j]
        if exact[s_id] == t_id:
            s_chunk[i] = t_chunk[j] = k
            s_exact[i] = t_exact[j] = True
            correct[k] = True
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
            length = min(a_end - a, b_end - b)
            for x in range(length):
                if s_symbols[a + x] != t_symbols[b + x]:
                    together = False
                    break
            if not together:
                break
            a, b = a + length, b + length
            if a == a_end and b == b_end:
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
            s_chunk[i : s_to + 1] = -1
            t_chunk[j : t_to + 1] = -1
            if together:
                return k
            return _align_streams(i, j, s, t, max_comb_len, k, out)
        s_exact[i] = t_exact[j] = s_to == i and t_to == j
        correct[k] = True
        i, j, k = s_to + 1, t_to + 1, k + 1
    return k


@njit(**OPTIONS)
def _stream(side, start):  # type: ignore[no-untyped-def]
    """Return the symbols from a token on, and for each the token that ends with it, or −1."""
    ids, symbols, offsets = side
    total = 0
    for i in range(start, len(ids)):
        total += offsets[ids[i] + 1] - offsets[ids[i]]
    stream = np.empty(total, np.uint16)
    ends = np.full(total, -1, np.int32)
    place = 0
    for i in range(start, len(ids)):
        for x in range(offsets[ids[i]], offsets[ids[i] + 1]):
            stream[place] = symbols[x]
            place += 1
        if offsets[ids[i] + 1] > offsets[ids[i]]:
            ends[place - 1] = i
    return stream, ends


@njit(**OPTIONS)
def _align_streams(i, j, s, t, max_comb_len, k, out):  # type: ignore[no-untyped-def]
    """Continue from the shared boundary before tokens i and j, past what differs.

    Where symbols differ, both sides skip to the nearest place from which they agree again; the
    tokens between the shared boundaries around it are a stretch for `_align_stretch`.
    """
    x, x_ends = _stream(s, i)
    y, y_ends = _stream(t, j)
    p = q = 0
    differs = False
    while p < len(x) and q < len(y):
        if x[p] == y[q]:
            p, q = p + 1, q + 1
        else:
            a, b = _skip(x, p, y, q)
            if a < 0:
                differs = True
                break
            p, q = p + a, q + b
            differs = True
        s_end = i - 1 if p == 0 else x_ends[p - 1]
        t_end = j - 1 if q == 0 else y_ends[q - 1]
        # A token's end in the past of a skip is not a boundary: only p and q themselves count.
        if (p == 0 or x_ends[p - 1] >= 0) and (q == 0 or y_ends[q - 1] >= 0):
            if differs:
                k = _align_stretch(i, s_end + 1, j, t_end + 1, s, t, max_comb_len, k, out)
            else:
                k = _emit(i, s_end + 1, j, t_end + 1, True, k, s, t, out)
            i, j = s_end + 1, t_end + 1
            differs = False
    n, m = len(s[0]), len(t[0])
    if differs and n - i <= SMALL and m - j <= SMALL:
        k = _align_stretch(i, n, j, m, s, t, max_comb_len, k, out)
    return k


@njit(**OPTIONS)
def _agree(x, p, y, q):  # type: ignore[no-untyped-def]
    """Tell whether RUN symbols agree from here on, or all that are left on both sides."""
    left = min(len(x) - p, len(y) - q)
    if left < RUN and len(x) - p != len(y) - q:
        return False
    for offset in range(min(left, RUN)):
        if x[p + offset] != y[q + offset]:
            return False
    return left > 0


@njit(**OPTIONS)
def _skip(x, p, y, q):  # type: ignore[no-untyped-def]
    """Return how many symbols to skip on both sides until they agree, the fewest; −1 for none."""
    for total in range(1, NEAR + 1):
        for a in range(total + 1):
            b = total - a
            if p + a < len(x) and q + b < len(y) and _agree(x, p + a, y, q + b):
                return a, b
    for window in WINDOWS:
        a, b = _look_up(x, p, y, q, window)
        if a >= 0:
            return a, b
        if p + window >= len(x) and q + window >= len(y):
            break
    return -1, -1


@njit(**OPTIONS)
def _hash(x, p):  # type: ignore[no-untyped-def]
    value = np.uint64(1469598103934665603)
    for offset in range(RUN):
        value = (value ^ np.uint64(x[p + offset])) * np.uint64(1099511628211)
    return value ^ (value >> np.uint64(29))


@njit(**OPTIONS)
def _look_up(x, p, y, q, window):  # type: ignore[no-untyped-def]
    """Find a run of RUN symbols of both sides by a hash table of one side's runs."""
    table = np.full(4 * window, -1, np.int32)
    mask = np.uint64(4 * window - 1)
    for b in range(min(window, len(y) - q - RUN + 1)):
        slot = _hash(y, q + b) & mask
        if table[slot] < 0:
            table[slot] = b
    best_a = best_b = -1
    for a in range(min(window, len(x) - p - RUN + 1)):
        if best_a >= 0 and a >= best_a + best_b:
            break
        b = table[_hash(x, p + a) & mask]
        closer = b >= 0 and (best_a < 0 or a + b < best_a + best_b)
        if closer and _agree(x, p + a, y, q + b):
            best_a, best_b = a, b
    return best_a, best_b


@njit(**OPTIONS)
def _equal(i, num_s, j, num_t, s, t, s_tokens, t_tokens):  # type: ignore[no-untyped-def]
    """Return how many symbols num_s tokens before i and num_t before j share; 0 if they differ."""
    s_ids, s_symbols, s_offsets = s
    t_ids, t_symbols, t_offsets = t
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


@njit(**OPTIONS)
def _with_symbols(side, start, end):  # type: ignore[no-untyped-def]
    ids, _, offsets = side
    found = np.empty(end - start, np.int64)
    count = 0
    for i in range(start, end):
        if offsets[ids[i] + 1] > offsets[ids[i]]:
            found[count] = i
            count += 1
    return found[:count]


@njit(**OPTIONS)
def _text_between(side, tokens, start, end):  # type: ignore[no-untyped-def]
    """Narrow a range to what control tokens at its two ends leave; nothing if one is within."""
    ids, symbols, offsets = side
    while start < end and symbols[offsets[ids[tokens[start]]]] >= CONTROL:
        start += 1
    while start < end and symbols[offsets[ids[tokens[end - 1]]]] >= CONTROL:
        end -= 1
    for i in range(start, end):
        if symbols[offsets[ids[tokens[i]]]] >= CONTROL:
            return start, start
    return start, end


@njit(**OPTIONS)
def _align_stretch(s_from, s_to, t_from, t_to, s, t, max_comb_len, k, out):  # type: ignore[no-untyped-def]
    """Align the tokens of a stretch that differs: banded Needleman-Wunsch over groups of tokens.

    Groups of up to `max_comb_len` tokens on each side match if their symbols are equal; the most
    matched symbols win, then the most groups. What is left between two matches is one chunk that
    is not correct, if it has text on both sides and no more than `max_comb_len` tokens on either.
    (Needleman and Wunsch, J. Mol. Biol. 48, 1970, with groups as in NeMo-RL's aligner.)
    """
    s_tokens, t_tokens = _with_symbols(s, s_from, s_to), _with_symbols(t, t_from, t_to)
    n, m = len(s_tokens), len(t_tokens)
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
                        length = _equal(i, num_s, j, num_t, s, t, s_tokens, t_tokens)
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
            num_s, num_t = divmod(step[i, c] - 2, max_comb_len + 1)
            i, j = i - num_s, j - num_t
            matches[count] = (i, i + num_s, j, j + num_t)
            count += 1
        elif step[i, c] == 1:
            j -= 1
        else:
            i -= 1
    i = j = 0
    for index in range(count, -1, -1):
        to_i, to_j = (n, m) if index == 0 else (matches[index - 1, 0], matches[index - 1, 2])
        s_first, s_last = _text_between(s, s_tokens, i, to_i)
        t_first, t_last = _text_between(t, t_tokens, j, to_j)
        if 0 < s_last - s_first <= max_comb_len and 0 < t_last - t_first <= max_comb_len:
            k = _emit(
                s_tokens[s_first], s_tokens[s_last - 1] + 1,
                t_tokens[t_first], t_tokens[t_last - 1] + 1,
                False, k, s, t, out,
            )  # fmt: skip
        if index > 0:
            i, j = matches[index - 1, 1], matches[index - 1, 3]
            k = _emit(
                s_tokens[to_i], s_tokens[i - 1] + 1, t_tokens[to_j], t_tokens[j - 1] + 1,
                True, k, s, t, out,
            )  # fmt: skip
    return k


@njit(**OPTIONS)
def align_documents(  # type: ignore[no-untyped-def]
    s_ids, s_bounds, s_symbols, s_offsets, t_ids, t_bounds, t_symbols, t_offsets,
    exact, max_comb_len,
    s_chunk, t_chunk, s_exact, t_exact, correct, num_chunks,
):  # fmt: skip
    """Align many documents: document d is `s_ids[s_bounds[d]:s_bounds[d + 1]]` and its like.

    `correct` has the student's layout: chunk k of document d is `correct[s_bounds[d] + k]`.
    """
    for d in range(len(s_bounds) - 1):
        s_from, s_to, t_from, t_to = s_bounds[d], s_bounds[d + 1], t_bounds[d], t_bounds[d + 1]
        out = (
            s_chunk[s_from:s_to], t_chunk[t_from:t_to],
            s_exact[s_from:s_to], t_exact[t_from:t_to], correct[s_from:s_to],
        )  # fmt: skip
        num_chunks[d] = align_document(
            (s_ids[s_from:s_to], s_symbols, s_offsets),
            (t_ids[t_from:t_to], t_symbols, t_offsets),
            exact, max_comb_len, out,
        )  # fmt: skip


@njit(**OPTIONS)
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
