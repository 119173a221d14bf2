"""Numba kernels that align two tokenizations, stored as flat arrays.

All kernels are serial, release the GIL, and do not check their arguments. In each pair of short
names, the first name belongs to the student and the second to the teacher:

    s, t   `Side`
    i, j   index of a token in `ids`; in `_align_stretch`, index in the stretch
    n, m   end of the document's tokens
    x, y   symbols of the tokens after a difference
    p, q   index in x and y
    a, b   number of symbols to skip, or number of tokens
    d      index of a document
    k      index of a chunk in its document
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.kernels import inner_kernel, kernel

CONTROL = 256  # first symbol of control tokens
FIRST_UNKNOWN = 0xFFFE  # symbol of the student's unknown tokens; the teacher's is 0xFFFF
SPACE = 32
RUN = 12  # number of equal symbols required to resume after a difference
NEAR = 24  # up to this number of skipped symbols, the search is exhaustive
FIRST_WINDOW, LAST_WINDOW = 64, 65536  # window sizes for the search with a hash table
BAND = 64  # width of the Needleman-Wunsch band
SMALL = 512  # maximum number of tokens per side in a stretch at the end without a shared boundary


class Side(NamedTuple):
    """The documents of the student or the teacher, and the symbols of the vocabulary.

    Symbols from 0 to 255 are bytes. A higher symbol is a control token or an unknown token. A
    control token and its counterpart have the same symbol. An unknown token can stand for any text.
    Tokens without symbols are skipped.
    """

    ids: NDArray[np.int32]  # [tokens], ids of all documents
    bounds: NDArray[np.int64]  # [documents + 1], start of each document in `ids`, and the end
    symbols: NDArray[np.uint16]  # [symbols], symbols of all ids
    offsets: NDArray[np.int64]  # [V + 1], start of each id in `symbols`, and the end


class Walk(NamedTuple):
    """Output arrays of the kernels. Chunk numbers start at 0 in each document."""

    student: NDArray[np.int32]  # [student tokens], chunk number or −1
    teacher: NDArray[np.int32]  # [teacher tokens], chunk number or −1
    # [student tokens]; the value at s.bounds[d] + k is True if chunk k of document d is correct
    correct: NDArray[np.bool_]
    total: NDArray[np.int64]  # [documents], number of chunks
    differs: NDArray[np.int64]  # [documents, 2], token positions of the first difference, or −1


class TokenSpans(NamedTuple):
    """A range of tokens on each side: `[s_from, s_to)` and `[t_from, t_to)`."""

    s_from: int
    s_to: int
    t_from: int
    t_to: int


@kernel
def align_documents(s, t, exact, chunks):  # type: ignore[no-untyped-def]
    """Align each document up to the first symbol that differs. `align_rest` continues there.

    `exact[student id]` is the teacher id with the same symbols, or −1. For most tokens, this lookup
    is enough.
    """
    for d in range(len(s.bounds) - 1):
        n, m = s.bounds[d + 1], t.bounds[d + 1]
        i, j, k = s.bounds[d], t.bounds[d], np.int64(0)
        base = i
        chunks.differs[d, 0] = chunks.differs[d, 1] = -1
        while i < n and j < m:
            if exact[s.ids[i]] == t.ids[j]:
                chunks.student[i] = chunks.teacher[j] = k
                chunks.correct[base + k] = True
                i, j, k = i + 1, j + 1, k + 1
            elif not _num_symbols(s, i):
                i += 1
            elif not _num_symbols(t, j):
                j += 1
            else:
                s_end, t_end, is_other = _equal_groups(s, i, n, t, j, m)
                if is_other:
                    chunks.differs[d, 0], chunks.differs[d, 1] = i, j
                if s_end < 0:
                    break
                chunks.total[d] = k
                _emit(s, t, TokenSpans(i, s_end, j, t_end), True, d, chunks)
                i, j, k = s_end, t_end, k + 1
        chunks.total[d] = k


@inner_kernel
def _num_symbols(tokens, i):  # type: ignore[no-untyped-def]
    return tokens.offsets[tokens.ids[i] + 1] - tokens.offsets[tokens.ids[i]]


@inner_kernel
def _equal_groups(s, i, n, t, j, m):  # type: ignore[no-untyped-def]
    """Find the shortest groups of tokens that start at i and j and have equal symbols.

    Returns the ends of both groups and False. If no groups are equal, returns −1, −1, and whether a
    symbol differs.
    """
    a = a_end = b = b_end = np.int64(0)
    while True:
        while a == a_end and i < n:
            a, a_end = s.offsets[s.ids[i]], s.offsets[s.ids[i] + 1]
            i += 1
        while b == b_end and j < m:
            b, b_end = t.offsets[t.ids[j]], t.offsets[t.ids[j] + 1]
            j += 1
        if a == a_end or b == b_end:
            return np.int64(-1), np.int64(-1), False
        while a < a_end and b < b_end:
            if s.symbols[a] != t.symbols[b]:
                return np.int64(-1), np.int64(-1), True
            a, b = a + 1, b + 1
        if a == a_end and b == b_end:
            return i, j, False


@kernel
def align_rest(s, t, max_comb_len, is_lossy, chunks):  # type: ignore[no-untyped-def]
    """Continue the alignment after the first difference in each document.

    Both sides skip to the nearest position where the symbols agree again. `_align_stretch` then
    aligns the tokens between the shared boundaries before and after the difference. After an
    unknown token, both sides continue at a sequence of symbols that occurs once on each side.

    If a tokenizer drops text (`is_lossy`), nothing is aligned after a difference, because equal
    sequences can be far apart. Different control tokens at the start, such as <bos>, are skipped.
    """
    for d in range(len(chunks.total)):
        i, j = chunks.differs[d, 0], chunks.differs[d, 1]
        if i < 0:
            continue
        n, m = s.bounds[d + 1], t.bounds[d + 1]
        x, x_ends = _stream(s, i, n)
        y, y_ends = _stream(t, j, m)
        p = q = np.int64(0)
        if is_lossy and not (_has_text(s, s.bounds[d], i) or _has_text(t, t.bounds[d], j)):
            p, q = _num_controls(x), _num_controls(y)
            i, j = x_ends[p], y_ends[q]
        is_other = False  # whether symbols have differed since the last shared boundary
        while p < len(x) and q < len(y):
            if x[p] == y[q]:
                p, q = p + 1, q + 1
            else:
                is_other = True
                if is_lossy:
                    break
                a, b = _skip(x, p, y, q)
                if a < 0:
                    break
                p, q = p + a, q + b
            s_end, t_end = x_ends[p], y_ends[q]
            # Token ends at p and q are shared boundaries. Token ends inside a skip are not.
            if s_end >= 0 and t_end >= 0:
                stretch = TokenSpans(i, s_end, j, t_end)
                if is_other:
                    _align_stretch(s, t, stretch, max_comb_len, d, chunks)
                else:
                    _emit(s, t, stretch, True, d, chunks)
                i, j = s_end, t_end
                is_other = False
        if is_other and not is_lossy and n - i <= SMALL and m - j <= SMALL:
            _align_stretch(s, t, TokenSpans(i, n, j, m), max_comb_len, d, chunks)


@inner_kernel
def _has_text(tokens, start, end):  # type: ignore[no-untyped-def]
    for token in tokens.ids[start:end]:
        for symbol in tokens.symbols[tokens.offsets[token] : tokens.offsets[token + 1]]:
            if symbol < CONTROL or symbol >= FIRST_UNKNOWN:
                return True
    return False


@inner_kernel
def _num_controls(stream):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    while count < len(stream) and CONTROL <= stream[count] < FIRST_UNKNOWN:
        count += 1
    return count


@inner_kernel
def _emit(s, t, stretch, is_correct, d, chunks):  # type: ignore[no-untyped-def]
    """Append a range of tokens as the next chunk of document d."""
    k = chunks.total[d]
    for i in range(stretch.s_from, stretch.s_to):
        if _num_symbols(s, i):
            chunks.student[i] = k
    for j in range(stretch.t_from, stretch.t_to):
        if _num_symbols(t, j):
            chunks.teacher[j] = k
    chunks.correct[s.bounds[d] + k] = is_correct
    chunks.total[d] = k + 1


@inner_kernel
def _stream(tokens, start, end):  # type: ignore[no-untyped-def]
    """Return the symbols of a token range, and the token that starts at each symbol, or −1."""
    total = 0
    for i in range(start, end):
        total += _num_symbols(tokens, i)
    stream = np.empty(total, np.uint16)
    ends = np.full(total + 1, -1, np.int64)
    ends[0] = start
    index = 0
    for i in range(start, end):
        symbol_start, symbol_end = tokens.offsets[tokens.ids[i]], tokens.offsets[tokens.ids[i] + 1]
        for x in range(symbol_start, symbol_end):
            stream[index] = tokens.symbols[x]
            index += 1
        if symbol_start < symbol_end:
            ends[index] = i + 1
    return stream, ends


@inner_kernel
def _agree(x, p, y, q):  # type: ignore[no-untyped-def]
    """Whether the next RUN symbols agree, or all symbols if both sides end sooner."""
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
    """Return the number of symbols to skip on each side until the sides agree again, or −1."""
    if p == q == 0 and len(x) > 1 and x[0] == SPACE and x[1] == y[0]:
        return np.int64(1), np.int64(0)  # a dummy prefix space on one side
    if p == q == 0 and len(y) > 1 and y[0] == SPACE and y[1] == x[0]:
        return np.int64(0), np.int64(1)
    a, b = _smallest_skip(x, p, y, q)
    if _is_unknown(x[p : p + max(a, 1)]) or _is_unknown(y[q : q + max(b, 1)]):
        return _skip_to_single_run(x, p, y, q)
    return a, b


@inner_kernel
def _smallest_skip(x, p, y, q):  # type: ignore[no-untyped-def]
    """Find the smallest number of symbols to skip until the sides agree; return −1 if none."""
    for total in range(1, NEAR + 1):
        for a in range(total + 1):
            b = total - a
            if p + a < len(x) and q + b < len(y) and _agree(x, p + a, y, q + b):
                return a, b
    window = FIRST_WINDOW
    while window <= LAST_WINDOW:
        a, b = _nearest_run(x, p, y, q, window, False)
        if a >= 0:
            return a, b
        if p + window >= len(x) and q + window >= len(y):
            break
        window *= 8
    return np.int64(-1), np.int64(-1)


@inner_kernel
def _nearest_run(x, p, y, q, window, is_single):  # type: ignore[no-untyped-def]
    """Find the nearest run of RUN symbols that occurs in a window of each side.

    Returns the number of symbols to skip on each side to reach the run, or −1, −1. If `is_single`
    is True, the run must occur only once in each window.
    """
    size_x, size_y = min(window, len(x) - p - RUN + 1), min(window, len(y) - q - RUN + 1)
    mask = np.uint64(4 * window - 1)
    # [slots], index of the first run in y, −1 for no run, −2 for several runs
    table = np.full(4 * window, -1, np.int32)
    for j in range(size_y):
        slot = _hash(y, q + j) & mask
        if table[slot] == -1:
            table[slot] = j
        elif is_single:
            table[slot] = -2
    if is_single:
        _drop_repeated(table, x, p, size_x)
    best_a = best_b = np.int64(-1)
    for a in range(size_x):
        if best_a >= 0 and a >= best_a + best_b:
            break
        b = np.int64(table[_hash(x, p + a) & mask])
        closer = b >= 0 and (best_a < 0 or a + b < best_a + best_b)
        if closer and _agree(x, p + a, y, q + b):
            best_a, best_b = np.int64(a), b
    return best_a, best_b


@inner_kernel
def _drop_repeated(table, x, p, size):  # type: ignore[no-untyped-def]
    """Remove from the table all runs that occur several times in x."""
    seen = np.zeros(len(table), np.bool_)
    for a in range(size):
        slot = _hash(x, p + a) & np.uint64(len(table) - 1)
        if seen[slot]:
            table[slot] = -2
        seen[slot] = True


@inner_kernel
def _is_unknown(stream):  # type: ignore[no-untyped-def]
    return (stream >= FIRST_UNKNOWN).any()


@inner_kernel
def _skip_to_single_run(x, p, y, q):  # type: ignore[no-untyped-def]
    """Find the nearest run of RUN symbols that occurs only once on each side.

    Returns the number of symbols to skip on each side, or −1, −1. A run that occurs several times
    could match at the wrong position.
    """
    longest = min(LAST_WINDOW, max(len(x) - p, len(y) - q) - RUN + 1)
    window = 1
    while window < longest:
        window *= 2
    return _nearest_run(x, p, y, q, window, True)


@inner_kernel
def _equal(x, x_from, x_to, y, y_from, y_to):  # type: ignore[no-untyped-def]
    while x_from < x_to and y_from < y_to and x[x_from] == y[y_from]:
        x_from, y_from = x_from + 1, y_from + 1
    return x_from == x_to and y_from == y_to


@inner_kernel
def _text_between(x, starts, start, end):  # type: ignore[no-untyped-def]
    """Remove control tokens at both ends of a range.

    If the rest of the range contains a control token, return an empty range.
    """
    while start < end and x[starts[start]] >= CONTROL:
        start += 1
    while start < end and x[starts[end - 1]] >= CONTROL:
        end -= 1
    for i in range(start, end):
        if x[starts[i]] >= CONTROL:
            return start, start
    return start, end


@inner_kernel
def _align_stretch(s, t, stretch, max_comb_len, d, chunks):  # type: ignore[no-untyped-def]
    """Align tokens with different symbols by a banded Needleman-Wunsch over groups of tokens.

    Two groups of up to `max_comb_len` tokens match if the groups have equal symbols. The algorithm
    (J. Mol. Biol. 48, 1970) maximizes the number of matched symbols, then the number of matches.
    The tokens between two matches form an incorrect chunk if each side has 1 to `max_comb_len`
    tokens.
    """
    x, x_ends = _stream(s, stretch.s_from, stretch.s_to)
    y, y_ends = _stream(t, stretch.t_from, stretch.t_to)
    # [n + 1] and [m + 1], offset of each token's first symbol, and the end
    s_starts, t_starts = np.flatnonzero(x_ends >= 0), np.flatnonzero(y_ends >= 0)
    # [n + 1] and [m + 1], index of each token in `ids`, and the end
    s_at, t_at = x_ends[s_starts], y_ends[t_starts]
    n, m = len(s_at) - 1, len(t_at) - 1
    if n == 0 or m == 0 or _is_unknown(x) or _is_unknown(y):
        return
    step, low = _best_steps(x, s_starts, y, t_starts, max_comb_len)
    matches = _matches(step, low, m, max_comb_len)
    # Emit the tokens before each match, then the match. The last match is empty.
    s_end = t_end = np.int64(0)
    for index in range(len(matches) - 1, -1, -1):
        i, j = matches[index, 0], matches[index, 2]
        a, a_end = _text_between(x, s_starts, s_end, i)
        b, b_end = _text_between(y, t_starts, t_end, j)
        if 0 < a_end - a <= max_comb_len and 0 < b_end - b <= max_comb_len:
            _emit(s, t, TokenSpans(s_at[a], s_at[a_end], t_at[b], t_at[b_end]), False, d, chunks)
        s_end, t_end = matches[index, 1], matches[index, 3]
        if index > 0:
            _emit(s, t, TokenSpans(s_at[i], s_at[s_end], t_at[j], t_at[t_end]), True, d, chunks)


@inner_kernel
def _best_steps(x, s_starts, y, t_starts, max_comb_len):  # type: ignore[no-untyped-def]
    """Compute the best last step for the first i student tokens and the first j teacher tokens.

    Each student token needs `width * max_comb_len**2` table lookups. Symbols are compared only if a
    match would improve the score.

    Returns:
        the steps, int32 `[n + 1, width]`, and the first j of the band for each i, int64 `[n + 1]`.
        Step 0 skips a student token, step 1 skips a teacher token, and a higher step matches two
        groups.
    """
    n, m = len(s_starts) - 1, len(t_starts) - 1
    width = min(m, BAND + max_comb_len) + 1
    score = np.zeros((n + 1, width), np.int64)
    step = np.zeros((n + 1, width), np.int32)
    low = np.empty(n + 1, np.int64)
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
                        length = s_starts[i] - s_starts[i - num_s]
                        gain = score[i - num_s, before] + 256 * length + 1
                        if gain > best and _equal(
                            x, s_starts[i - num_s], s_starts[i],
                            y, t_starts[j - num_t], t_starts[j],
                        ):  # fmt: skip
                            best, step[i, c] = gain, 2 + num_s * (max_comb_len + 1) + num_t
            score[i, c] = max(best, 0)
    return step, low


@inner_kernel
def _matches(step, low, m, max_comb_len):  # type: ignore[no-untyped-def]
    """Follow the steps back from the end. Return the matches, int64 `[matches + 1, 4]`.

    A match consists of the student's start and end, and the teacher's start and end. The first
    entry is an empty match at the end of both sides. The matches follow in reverse order.
    """
    n, width = len(low) - 1, step.shape[1]
    matches = np.empty((min(n, m) + 1, 4), np.int64)
    matches[0, :2], matches[0, 2:] = n, m
    count = 1
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
    return matches[:count]
