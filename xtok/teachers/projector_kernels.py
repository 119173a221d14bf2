"""Numba kernels that project predictions row by row on flat arrays.

The kernels are serial, release the GIL, and do not check their arguments. Short names:

    x   row of `RowBlock`, that is, one student token of a text
    j   position of a teacher token in the texts
    u   offset of the row's first byte in the teacher token at position j
    t   id of the teacher token at position j, the realized token
    k   index of a candidate in the predictions, or of an entry in the map
    c   id of a candidate
    e   number of a stem in `StemTable`
    s   student token, or another destination of `Parts`
    p   probability of a candidate or of a part
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.kernels import inner_kernel, kernel
from xtok.predictions.topk import TopK
from xtok.teachers.credit_kernels import num_shared, prefix_bound

ROOT = 62  # bit that marks a root key in `StemTable` (the remainder of one token)
ID_BITS = 24  # number of bits of an id in a key, enough for `MAX_WIDTH`
NEGLIGIBLE = 2.0**-24  # half a float32 step at 1; smaller parts of a map row are added to the rest

RESPLIT_RATE = 0.01
"""Assumed probability that the student, in a text, splits a teacher token at a byte where it does
not split the isolated token. Measured: 0.4 to 3 % for SmolLM2, Llama 3 and Qwen with the tokens of
Gemma 3, on manual pages in four languages and on Python.
"""
CLOSE_RATIO = 1 + 2.0**-9
"""Two probabilities (down to e**-8192) with at least this ratio have different float32
logarithms."""
BUCKETS = 1024  # buckets of probabilities; the lowest bucket contains all values below 2**-64


class TeacherTokens(NamedTuple):
    """A teacher's tokens, the map's rows, and the pairs of bytes that a student token can span."""

    data: NDArray[np.uint8]  # token t is data[offsets[t]:offsets[t + 1]]
    offsets: NDArray[np.int64]  # [V_teacher + 1]
    is_text: NDArray[np.bool_]  # [V_teacher], whether the token has bytes
    ends_text: NDArray[np.bool_]  # [V_teacher], whether it is a control token
    is_open: NDArray[np.bool_]  # [V_teacher], whether the next token can change its split
    row_bounds: NDArray[np.int64]  # [V_teacher + 1], rows of the map
    columns: NDArray[np.int32]  # [2 * nnz], student id of entry k at 2 * k
    weights: NDArray[np.float32]  # [2 * nnz], same memory, weight of entry k at 2 * k + 1
    joined: NDArray[np.bool_]  # [256, 256], pairs of bytes that a student token can span
    num_texts: int  # number of tokens with bytes


class StudentTokens(NamedTuple):
    """A student's tokens, sorted by their bytes."""

    data: NDArray[np.uint8]  # token t is data[offsets[t]:offsets[t + 1]]
    offsets: NDArray[np.int64]  # [V_student + 1]
    order: NDArray[np.int32]  # ids in the order of their bytes, which are unique


class StemTable(NamedTuple):
    """Stems: byte strings of one or more teacher tokens, with the student's spelling.

    Token t without its first u bytes has the key `1 << ROOT | u << ID_BITS | t`. Stem e, followed
    by token t, has the key `(e + 1) << ID_BITS | t`. An example with the teacher tokens 7 (`20`)
    and 5 (`1`):

        stem   bytes   key
        0      20      1 << ROOT | 0 << ID_BITS | 7    token 7
        1      201     (0 + 1) << ID_BITS | 5          stem 0, then token 5
        2      0       1 << ROOT | 1 << ID_BITS | 7    token 7 without its first byte
    """

    slots: NDArray[np.int32]  # [2**n], hash table (open addressing): key → stem, −1 if free
    keys: NDArray[np.int64]  # [stems]
    first: NDArray[np.int32]  # [stems], first student token of the stem, or −1
    # [stems], destination if the next token is unknown: a token, or `-2 - t` for map row t
    token_or_row: NDArray[np.int32]
    may_grow: NDArray[np.bool_]  # [stems], whether a longer student token starts with the stem
    is_boundary: NDArray[np.bool_]  # [stems], whether a student token starts at the stem
    # [stems], number of teacher tokens that start with the bytes before the stem
    num_same_start: NDArray[np.int32]


class RowBlock(NamedTuple):
    """A block of student rows: their positions in teacher tokens, and up to `top_k` candidates."""

    position: NDArray[np.int64]  # [rows], teacher token at the first byte of the student token
    inside: NDArray[np.int64]  # [rows], offset of this byte in the teacher token
    is_aligned: NDArray[np.bool_]  # [rows], whether both tokens start at the same byte
    last: NDArray[np.int64]  # [rows], end of the teacher's document
    realized: NDArray[np.int32]  # [rows], student token
    size: NDArray[np.int64]  # [rows], number of candidates; −1 if the row is unfinished
    ids: NDArray[np.int32]  # [rows, top_k]
    logprobs: NDArray[np.float32]  # [rows, top_k]
    rest: NDArray[np.float32]  # [rows], log-probability of the rest
    own: NDArray[np.float32]  # [rows], log-probability of the student token, or NaN


class ProjectorArrays(NamedTuple):
    """The input of `project_rows`, and the rows that `project_rows` fills."""

    teacher: TeacherTokens
    predictions: TopK
    stems: StemTable
    rows: RowBlock


class Scratch(NamedTuple):
    """Working memory of one thread for one row."""

    mass: NDArray[np.float64]  # [V_student], probability of each token; 0 between rows
    tokens: NDArray[np.int32]  # [V_student + 1], tokens with a probability
    values: NDArray[np.float64]  # [V_student + 1], their probabilities
    kept: NDArray[np.int32]  # [V_student + 1], positions of the heaviest tokens
    order: NDArray[np.int32]  # [V_student + 1], the same positions, sorted
    starts: NDArray[np.int64]  # [BUCKETS], start of each bucket in `order`; 0 between rows
    missing: NDArray[np.int64]  # number of keys that have no stem, then these keys


class Parts(NamedTuple):
    """The parts into which a row's probability is divided, in arrays with room for more parts."""

    goes_to: NDArray[np.int32]  # a student token (s), row t of the map (-2 - t), or the rest (-1)
    mass: NDArray[np.float64]


@inner_kernel
def _slot(slots, keys, key):  # type: ignore[no-untyped-def]
    mask = np.int64(len(slots) - 1)
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(32)) & mask
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@inner_kernel
def _looked_up(slots, keys, key, missing):  # type: ignore[no-untyped-def]
    """Return the stem of a key. If the key is missing, add it to `missing` and return −1."""
    e = slots[_slot(slots, keys, key)]
    if e < 0:
        missing[0] += 1
        missing[missing[0]] = key
    return e


@kernel
def add_stems(slots, keys, start):  # type: ignore[no-untyped-def]
    """Insert `keys[start:]`, which must be new."""
    for e in range(start, len(keys)):
        slots[_slot(slots, keys, keys[e])] = e


@kernel
def find_seams(student, stems, more, joins, may_grow):  # type: ignore[no-untyped-def]
    """Find pairs of a stem and a following token that a student token can span.

    Args:
        student: see `StudentTokens`.
        stems: four arrays: the bytes of all stems, each with the preceding bytes; the offsets of
            these byte strings; the start of each stem within its byte string; the stem of each
            pair, int64 `[pairs]`.
        more: three arrays: the teacher's bytes, and the start and end of each pair's token in them.
        joins: bool `[pairs]`, output: whether a student token contains bytes of both parts.
        may_grow: bool `[pairs]`, output: whether a longer student token starts with the pair's
            bytes.
    """
    data, offsets, order = student
    stem_data, stem_offsets, stem_starts, stem_of = stems
    more_data, more_starts, more_ends = more
    longest = np.diff(offsets).max()
    both = np.empty(0, np.uint8)
    for n in range(len(stem_of)):
        stem_start, stem_end = stem_offsets[stem_of[n]], stem_offsets[stem_of[n] + 1]
        seam = stem_end - stem_start
        size = seam + more_ends[n] - more_starts[n]
        if size > len(both):
            both = np.empty(2 * size, np.uint8)
        both[:seam] = stem_data[stem_start:stem_end]
        both[seam:size] = more_data[more_starts[n] : more_ends[n]]
        joins[n] = False
        for start in range(max(0, seam - longest + 1), seam):
            if _has_token(student, both[start:size], seam - start):
                joins[n] = True
                break
        text = both[stem_starts[stem_of[n]] : size]
        # The last token that starts with these bytes. If there is no such token, any other token.
        last = order[prefix_bound(data, offsets, order, text, True) - 1]
        a, b = offsets[last], offsets[last + 1]
        may_grow[n] = b - a > len(text) and num_shared(data, a, b, text) == len(text)


@inner_kernel
def _has_token(student, text, least):  # type: ignore[no-untyped-def]
    """Return whether a text starts with a token of more than `least` bytes."""
    data, offsets, order = student
    for size in range(least + 1, len(text) + 1):
        n = prefix_bound(data, offsets, order, text[:size], False)
        if n == len(order):
            return False
        a, b = offsets[order[n]], offsets[order[n] + 1]
        if num_shared(data, a, b, text[:size]) < size:  # no token starts with these bytes
            return False
        if b - a == size:
            return True
    return False


@kernel
def project_rows(arrays, todo, is_same, top_k, scratch):  # type: ignore[no-untyped-def]
    """Project the rows `todo` until `scratch.missing` is full.

    If a row needs a stem that is not in the `StemTable`, the stem's key is added to
    `scratch.missing`, and the row stays unfinished. A row with K = 64 takes 7 to 10 µs, mostly to
    read rows of the map. Spelling new stems takes the same time again (`scripts/benchmark.py
    serving`).
    """
    _, predictions, _, rows = arrays
    mass, tokens, values, _, _, _, missing = scratch
    parts = Parts(np.empty(1024, np.int32), np.empty(1024, np.float64))
    missing[0] = 0
    for x in todo:
        j, u = rows.position[x], rows.inside[x]
        before = missing[0]
        most = predictions.starts[j + 1] - predictions.starts[j] + 2
        if before + most >= len(missing):
            break
        if is_same and u == 0:
            _copy(predictions, j, rows, x, top_k, len(mass))
            continue
        parts = _room(parts, np.int64(0), most)
        count, on_path, rest = _part_candidates(arrays, x, parts, missing)
        parts, count, is_known, is_full = _part_path(arrays, x, on_path, parts, count, missing)
        if is_full or missing[0] > before:
            continue
        scale = 1.0
        if u > 0:  # condition on the text's bytes before this row
            total = rest + parts.mass[:count].sum()
            scale = 1.0 / total if total > 0.0 else 0.0
            rest *= scale
        count, rest = _add_up(arrays.teacher, parts, count, scale, rest, mass, tokens)
        own = mass[rows.realized[x]]
        rows.own[x] = np.log(own) if own > 0.0 else np.nan
        for n in range(count):
            values[n] = mass[tokens[n]]
            mass[tokens[n]] = 0.0
        size = _keep_best(scratch, count, top_k)
        is_known &= not np.isnan(predictions.rest_logprob[j])
        rest = _write(rows, x, scratch, size, count, rest)
        rows.rest[x] = np.log(min(1.0, max(0.0, rest))) if is_known and size else np.nan
        rows.size[x] = size


@inner_kernel
def _part_candidates(arrays, x, parts, missing):  # type: ignore[no-untyped-def]
    """Divide the probability of a row's candidates, except the realized token, into parts.

    The rest is spread evenly over the tokens that are not candidates. If the student token starts
    inside the teacher token, only tokens that begin with the same bytes count.

    Returns:
        the number of parts, the realized token's probability, and the remaining probability.
    """
    # Local variables, because access through the tuple would count references within loops.
    teacher, predictions, stems, rows = arrays
    goes_to, part = parts
    j, u, is_aligned = rows.position[x], rows.inside[x], rows.is_aligned[x]
    data, offsets, is_text = teacher.data, teacher.offsets, teacher.is_text
    ids, logprobs, slots, keys = predictions.ids, predictions.logprobs, stems.slots, stems.keys
    token_or_row, is_boundary, t = stems.token_or_row, stems.is_boundary, predictions.token_ids[j]
    so_far = data[offsets[t] : offsets[t] + u]
    start, end = predictions.starts[j], predictions.starts[j + 1]
    rest = np.exp(np.float64(predictions.rest_logprob[j]))
    realized = predictions.realized_logprob[j]
    if np.isnan(rest):
        rest = 0.0
    count = listed = fitting = np.int64(0)
    on_path = 0.0
    follows = u > 0 or is_text[t]
    is_listed = False
    # If the realized token is not a candidate, the rest includes its probability. The extra step at
    # `end` then subtracts this probability from the rest, and adds the realized token.
    for k in range(start, end + 1):
        if k < end:
            c, logprob = ids[k], logprobs[k]
            is_listed |= c == t
        elif not is_listed and start < end and not np.isnan(realized):
            c, logprob = t, realized
            rest = max(0.0, rest - np.exp(np.float64(logprob)))
        else:
            break
        listed += is_text[c]
        if u > 0 and num_shared(data, offsets[c], offsets[c + 1], so_far) < u:
            continue
        p = np.exp(np.float64(logprob))
        fitting += 1
        if c == t and follows:
            on_path = p  # for `_part_path`
            continue
        goes_to[count] = -2 - c  # at u = 0, the map converts the candidate
        if u > 0:
            goes_to[count] = -1  # the candidate ends here, so its continuation is unknown
            if offsets[c + 1] - offsets[c] > u:
                key = np.int64(1) << ROOT | u << ID_BITS | np.int64(c)
                e = _looked_up(slots, keys, key, missing)
                if e >= 0:
                    goes_to[count] = token_or_row[e]
                    p *= _likely(is_boundary[e], is_aligned)
        part[count] = p
        count += 1
    if u > 0:
        # `num_same_start` tokens start with the text's first u bytes, and `fitting` of them are
        # candidates. `listed` is the number of all candidates with bytes.
        key = np.int64(1) << ROOT | u << ID_BITS | np.int64(t)
        e = _looked_up(slots, keys, key, missing)
        if e >= 0:
            rest *= max(0, stems.num_same_start[e] - fitting) / max(1, teacher.num_texts - listed)
    return count, on_path, rest


@inner_kernel
def _likely(is_boundary, is_aligned):  # type: ignore[no-untyped-def]
    """Return the probability that the student splits before a stem, as in the text."""
    return 1.0 if is_boundary or not is_aligned else RESPLIT_RATE


@inner_kernel
def _part_path(arrays, x, on_path, parts, count, missing):  # type: ignore[no-untyped-def]
    """Follow the tokens of the text while a longer student token can match, and add parts.

    Returns:
        the enlarged parts, the number of parts, whether the rests of all rows are known, and
        whether `missing` is full.
    """
    teacher, predictions, stems, rows = arrays
    data, offsets, is_text, ends_text, is_open, _, _, _, joined, _ = teacher
    token_ids, _, starts, ids, logprobs, rest_logprob, realized_logprob = predictions
    slots, keys, stem_first, token_or_row, may_grow, is_boundary, _ = stems
    goes_to, part = parts
    j, u, last, is_aligned = rows.position[x], rows.inside[x], rows.last[x], rows.is_aligned[x]
    is_known, t = True, token_ids[j]
    key = np.int64(1) << ROOT | u << ID_BITS | np.int64(t)
    # At the start of each step, `key` is the key of the text's bytes from the row's first byte to
    # the end of token t at position j. `on_path` is the product of the realized tokens'
    # probabilities up to there, and is not yet assigned to a destination.
    while on_path > 0.0:
        e = _looked_up(slots, keys, key, missing)
        if e < 0:
            break
        j += 1
        likely = _likely(is_boundary[e], is_aligned)
        # No longer student token starts with the stem, or the document has no next prediction.
        if not may_grow[e] or j >= last or starts[j] == starts[j + 1]:
            goes_to[count], part[count] = token_or_row[e], on_path * likely
            count += 1
            break
        start, end = starts[j], starts[j + 1]
        if missing[0] + end - start + 2 >= len(missing):
            return Parts(goes_to, part), count, is_known, True
        goes_to, part = _room(Parts(goes_to, part), count, end - start + 2)
        first, is_any, last_byte = stem_first[e], is_open[t], data[offsets[t + 1] - 1]
        t = token_ids[j]
        left, p_next, is_listed = np.exp(np.float64(rest_logprob[j])), 0.0, False
        if np.isnan(left):
            is_known, left = False, 0.0
        for k in range(start, end):
            c = ids[k]
            p = np.exp(np.float64(logprobs[k]))
            if c == t:
                p_next, is_listed = p, True
                continue
            goes_to[count] = first if is_text[c] or ends_text[c] else -1
            part[count] = on_path * p * likely
            # Only these candidates can change the student's first token of the stem.
            if is_text[c] and (is_any or joined[last_byte, data[offsets[c]]]):
                child = (np.int64(e) + 1) << ID_BITS | np.int64(c)
                grown = _looked_up(slots, keys, child, missing)
                if grown >= 0:
                    goes_to[count] = stem_first[grown]
                    part[count] = on_path * p * _likely(is_boundary[grown], is_aligned)
            count += 1
        if not is_listed and not np.isnan(realized_logprob[j]):
            p_next = np.exp(np.float64(realized_logprob[j]))
            left = max(0.0, left - p_next)
        goes_to[count], part[count] = token_or_row[e], on_path * left * likely
        count += 1
        on_path *= p_next
        # A realized token without bytes ends the path.
        if on_path > 0.0 and not is_text[t]:
            goes_to[count] = first if ends_text[t] else -1
            part[count] = on_path * likely
            count += 1
            break
        key = (np.int64(e) + 1) << ID_BITS | np.int64(t)
    return Parts(goes_to, part), count, is_known, False


@inner_kernel
def _add_up(teacher, parts, size, scale, rest, mass, tokens):  # type: ignore[no-untyped-def]
    """Add up the parts for each student token. Returns the number of tokens, and the rest."""
    row_bounds, columns, weights = teacher.row_bounds, teacher.columns, teacher.weights
    goes_to, part = parts
    count = np.uint64(0)  # unsigned, so that Numba generates no code for negative indices
    for n in range(size):
        s, p = goes_to[n], part[n] * scale
        if s >= 0:
            if mass[s] == 0.0 and p > 0.0:
                tokens[count] = s
                count += np.uint64(1)
            mass[s] += p
        elif s == -1:
            rest += p
        else:
            whole = p
            for k in range(np.uint64(row_bounds[-2 - s]), np.uint64(row_bounds[-1 - s])):
                q = whole * np.float64(weights[k + k + np.uint64(1)])
                if q < NEGLIGIBLE:
                    break
                p -= q
                column = np.uint32(columns[k + k])
                before = mass[column]
                tokens[count] = column  # branchless, because the branch is unpredictable
                count += np.uint64(before == 0.0)
                mass[column] = before + q
            rest += p
    return count, rest


@inner_kernel
def _write(rows, x, scratch, size, count, rest):  # type: ignore[no-untyped-def]
    """Write the first `size` tokens in order. Returns the rest, including the remaining tokens."""
    _, tokens, values, _, order, _, _ = scratch
    for n in range(size):
        rows.ids[x, n] = tokens[order[n]]
        rows.logprobs[x, n] = _rounded(values[order[n]])
        values[order[n]] = 0.0
    for n in range(count):
        rest += values[n]
    return rest


@inner_kernel
def _room(parts, count, more):  # type: ignore[no-untyped-def]
    """Return arrays with the first `count` parts and room for `more` parts."""
    size = count + more
    if size <= len(parts.mass):
        return parts
    larger = Parts(np.empty(2 * size, np.int32), np.empty(2 * size, np.float64))
    larger.goes_to[:count] = parts.goes_to[:count]
    larger.mass[:count] = parts.mass[:count]
    return larger


@inner_kernel
def _copy(predictions, j, rows, x, top_k, width):  # type: ignore[no-untyped-def]
    """Copy a prediction. Candidates beyond `top_k` or the student's width are added to the rest."""
    start, end = predictions.starts[j], predictions.starts[j + 1]
    size, cut = np.int64(0), 0.0
    for k in range(start, end):
        if size < top_k and predictions.ids[k] < width:
            rows.ids[x, size], rows.logprobs[x, size] = predictions.ids[k], predictions.logprobs[k]
            size += 1
        else:
            cut += np.exp(np.float64(predictions.logprobs[k]))
    rows.rest[x] = predictions.rest_logprob[j]
    if start + size < end:
        rows.rest[x] = np.log(np.exp(np.float64(predictions.rest_logprob[j])) + cut)
    rows.own[x] = predictions.realized_logprob[j]
    rows.size[x] = size


@inner_kernel
def _keep_best(scratch, count, top_k):  # type: ignore[no-untyped-def]
    """Sort the `top_k` most likely tokens into `order`, ties by id, and return their number.

    To find the best 64 of 64 to 800 tokens, a bucket sort (16 buckets per octave) takes 1 µs, a
    heap takes 3 to 11 µs, and a full sort takes 2 to 38 µs.
    """
    _, tokens, values, kept, order, starts, _ = scratch
    bits = values.view(np.int64)
    lowest = _lowest_bucket(bits, count, top_k)
    edge, size = _edge(lowest) if lowest else np.int64(0), np.uint64(0)
    for n in range(count):
        kept[size] = n
        size += np.uint64(bits[n] >= edge)
    for n in range(size):
        starts[_bucket(bits[kept[n]])] += 1
    before = np.int64(0)
    for bucket in range(BUCKETS - 1, lowest - 1, -1):
        starts[bucket], before = before, before + starts[bucket]
    for n in range(size):
        bucket = _bucket(bits[kept[n]])
        order[starts[bucket]] = kept[n]
        starts[bucket] += 1
    starts[lowest:] = 0
    for n in range(1, size):
        new, m = order[n], n
        while m > 0 and _is_better(tokens, values, new, order[m - 1]):
            order[m] = order[m - 1]
            m -= 1
        order[m] = new
    return min(np.int64(size), top_k)


@inner_kernel
def _lowest_bucket(bits, count, top_k):  # type: ignore[no-untyped-def]
    """Return the bucket just below the bucket of the `top_k`th largest value.

    After rounding, values in the returned bucket can equal the `top_k`th largest value.
    """
    lowest, above = np.int64(0), np.int64(BUCKETS if count > top_k else 1)
    while above - lowest > 1:
        middle = (lowest + above) // 2
        edge, at_least = _edge(middle), np.int64(0)
        for n in range(count):
            at_least += bits[n] >= edge
        if at_least < top_k:
            above = middle
        else:
            lowest = middle
    return max(np.int64(0), lowest - 1)


@inner_kernel
def _is_better(tokens, values, a, b):  # type: ignore[no-untyped-def]
    """Whether a is more likely than b after rounding, or equally likely with a lower id."""
    p, q = values[a], values[b]
    is_close = p < CLOSE_RATIO * q and q < CLOSE_RATIO * p
    if is_close and (p == q or _rounded(p) == _rounded(q)):
        return tokens[a] < tokens[b]
    return p > q


@inner_kernel
def _rounded(p):  # type: ignore[no-untyped-def]
    return np.float32(min(0.0, np.log(p)))


@inner_kernel
def _bucket(bits):  # type: ignore[no-untyped-def]
    return min(BUCKETS - 1, max(0, (bits >> 48) - (1023 << 4) + BUCKETS - 1))


@inner_kernel
def _edge(bucket):  # type: ignore[no-untyped-def]
    """Return the bits of the smallest probability in a bucket (not for the lowest bucket)."""
    return (bucket + (1023 << 4) - BUCKETS + 1) << 48
