"""Numba kernels for the probability that a teacher continues with given bytes.

The kernels are serial, release the GIL, and do not check their arguments. Short names:

    s, t   `Side` of the student and of the teacher, with the symbols of each token
    c      number of a chunk
    student_rows, teacher_rows   positions of the chunk's tokens
    ends   offset of the end of each student token in the chunk's bytes
    j      index of a student token in the chunk
    i      id of a teacher token
    k      index of a candidate in the predictions
    x      index of a symbol
"""

from __future__ import annotations

import numpy as np

from xtok._lib.kernels import inner_kernel, kernel
from xtok.alignment.kernels import CONTROL


@kernel
def weigh_by_prefix(s, t, by_bytes, predictions, chunks, sums, weights):  # type: ignore[no-untyped-def]
    """Set the weight of each student token to the negative log-probability of its bytes.

    `by_bytes` contains the teacher's ids, sorted by the symbols of the tokens. `chunks` contains
    four arrays: the positions of the student's tokens, the start of each chunk in this array, and
    the same two arrays for the teacher. A row with K = 64 candidates takes 0.3 µs.
    """
    s_positions, s_bounds, t_positions, t_bounds = chunks
    for c in range(len(s_bounds) - 1):
        student_rows = s_positions[s_bounds[c] : s_bounds[c + 1]]
        teacher_rows = t_positions[t_bounds[c] : t_bounds[c + 1]]
        ends = np.cumsum(s.offsets[s.ids[student_rows] + 1] - s.offsets[s.ids[student_rows]])
        reached = _reached(ends, teacher_rows, t, by_bytes, predictions)
        weights[student_rows] = 1.0  # default: equal shares, for example without candidates
        if reached[-1] == 0.0 or not np.isfinite(sums[c]):
            continue
        before = 0.0
        for j in range(len(student_rows) - 1):
            # The first bytes of a chunk are at least as likely as the whole chunk.
            now = min(before, max(np.log(reached[j]), sums[c]))
            weights[student_rows[j]] = before - now
            before = now
        weights[student_rows[-1]] = before - sums[c]


@inner_kernel
def _reached(ends, positions, t, by_bytes, predictions):  # type: ignore[no-untyped-def]
    """Return the probability of the chunk's bytes up to the end of each student token.

    The last student token is omitted. If a teacher token that starts before the last student token
    has no candidates, all probabilities are 0.
    """
    reached, fits = np.zeros(len(ends) - 1), np.zeros(len(ends) - 1, np.int64)
    text = np.empty(ends[-1], np.uint16)
    size = np.int64(0)
    for i in t.ids[positions]:
        for x in range(t.offsets[i], t.offsets[i + 1]):
            text[size] = t.symbols[x]
            size += 1
    # `path` is the probability of the chunk's teacher tokens before `position`, and `start` is the
    # number of their bytes. At each position, the loop adds to reached[j] the probability of all
    # tokens that match the chunk's bytes at least up to the end of student token j.
    path, start = 1.0, np.int64(0)
    for position in positions:
        first, end = predictions.starts[position], predictions.starts[position + 1]
        if start >= ends[-2]:
            break
        if first == end:
            reached[:] = 0.0
            break
        own = t.ids[position]
        p_own = np.exp(np.float64(predictions.realized_logprob[position]))
        rest = np.exp(np.float64(predictions.rest_logprob[position]))
        rest = 0.0 if np.isnan(rest) else rest
        # fits[j] is the number of candidates that contribute to reached[j]. `others` is the number
        # of text tokens that are not candidates. These tokens share the rest evenly.
        fits[:] = 0
        is_listed, others = False, len(by_bytes)
        for k in range(first, end + 1):  # the last step adds `own` if `own` is not a candidate
            i, p = own, p_own
            if k < end:
                i = predictions.ids[k]
                p = p_own if i == own else np.exp(np.float64(predictions.logprobs[k]))
                is_listed |= i == own
            elif not is_listed:
                rest = max(0.0, rest - p_own)
            else:
                break
            x = t.offsets[i]
            others -= x < t.offsets[i + 1] and t.symbols[x] < CONTROL
            shared = num_shared(t.symbols, t.offsets[i], t.offsets[i + 1], text[start:])
            for j in range(len(reached)):
                if start < ends[j] <= start + shared:
                    reached[j] += path * p
                    fits[j] += 1
        for j in range(len(reached)):
            if start < ends[j] and rest > 0.0:
                prefix = text[start : ends[j]]
                start_of = prefix_bound(t.symbols, t.offsets, by_bytes, prefix, False)
                end_of = prefix_bound(t.symbols, t.offsets, by_bytes, prefix, True)
                reached[j] += path * rest * (end_of - start_of - fits[j]) / max(1, others)
        path *= p_own
        start += t.offsets[own + 1] - t.offsets[own]
    return reached


@inner_kernel
def num_shared(data, start, end, text):  # type: ignore[no-untyped-def]
    """Return the length of the common prefix of `data[start:end]` and a text, in symbols."""
    same, most = np.int64(0), min(len(text), end - start)
    while same < most and data[start + same] == text[same]:
        same += 1
    return same


@inner_kernel
def prefix_bound(data, offsets, order, prefix, behind):  # type: ignore[no-untyped-def]
    """Return the index of the first token in `order` that starts with a prefix.

    If `behind` is True, return the index after the last token that starts with the prefix.
    """
    low, high = np.int64(0), np.int64(len(order))
    while low < high:
        middle = (low + high) // 2
        start, end = offsets[order[middle]], offsets[order[middle] + 1]
        same = num_shared(data, start, end, prefix)
        x = start + same
        is_less = same < len(prefix) and (x == end or data[x] < prefix[same])
        if is_less or (behind and same == len(prefix)):
            low = middle + 1
        else:
            high = middle
    return low
