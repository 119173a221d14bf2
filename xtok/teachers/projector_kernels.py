"""Numba kernels that project predictions row by row on flat arrays.

The kernels are serial, release the GIL, and do not check their arguments. Short names:

    x   row of `RowBlock`, that is, one student token of a text
    j   position of a teacher token in the texts
    u   offset of the row's first byte in the teacher token at position j
    t   id of the teacher token at position j, the realized token
    k   index of a candidate in the predictions, or of an entry in the map
    c   id of a candidate
    e   number of a stem in `StemTable`
    s   student token, or another destination of `Contributions`
    p   probability of a candidate or of a contribution
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.kernels import inner_kernel, kernel
from xtok.teachers.credit_kernels import num_shared
from xtok.teachers.stem_kernels import child_key, find_stem, root_key

NEGLIGIBLE = 2.0**-24  # smaller contributions are added to the rest; float32 rounds 1 + 2**-24 to 1

RESPLIT_RATE = 0.01
"""Assumed probability of a split that occurs only in context: the student splits a teacher token in
a text at a byte at which the student does not split the isolated token. The measured probability
was 0.4 to 3 % for the students SmolLM2, Llama 3 and Qwen with the tokens of Gemma 3, in manual
pages in four languages and in Python code.
"""
CLOSE_RATIO = 1 + 2.0**-9
"""If the ratio of two probabilities is at least this value, their float32 logarithms differ. This
holds for probabilities down to e**-8192."""
BUCKETS = 1024  # number of buckets; the lowest bucket contains all probabilities below 2**-64


class TeacherTokens(NamedTuple):
    """A teacher's tokens, the rows of the map, and the boundaries that student tokens can cross."""

    data: NDArray[np.uint8]  # token t is data[offsets[t]:offsets[t + 1]]
    offsets: NDArray[np.int64]  # [V_teacher + 1]
    is_text: NDArray[np.bool_]  # [V_teacher], whether the token has bytes
    ends_text: NDArray[np.bool_]  # [V_teacher], whether the token is a control token
    ends_in_space: NDArray[np.bool_]  # [V_teacher], see `crossable_boundaries`
    row_bounds: NDArray[np.int64]  # [V_teacher + 1], bounds of the map's rows
    columns: NDArray[np.int32]  # [2 * nnz], student id of entry k at 2 * k
    weights: NDArray[np.float32]  # [2 * nnz], weight of entry k at 2 * k + 1, in the same memory
    may_join: NDArray[np.bool_]  # [256, 256], see `crossable_boundaries`
    num_texts: int  # number of tokens with bytes


class RowBlock(NamedTuple):
    """A block of student rows: their positions in teacher tokens, and up to `top_k` candidates."""

    # [rows], index of the teacher token that contains the student token's first byte
    position: NDArray[np.int64]
    inside: NDArray[np.int64]  # [rows], offset of this byte in the teacher token
    is_aligned: NDArray[np.bool_]  # [rows], whether both tokens start at the same byte
    path_end: NDArray[np.int64]  # [rows], index of the teacher token where `_follow_path` stops
    token_ids: NDArray[np.int32]  # [rows], student token
    size: NDArray[np.int64]  # [rows], number of candidates; −1 if the row is unfinished
    ids: NDArray[np.int32]  # [rows, top_k]
    logprobs: NDArray[np.float32]  # [rows, top_k]
    rest_logprob: NDArray[np.float32]  # [rows]
    realized_logprob: NDArray[np.float32]  # [rows], for the student token; NaN if unknown


class Scratch(NamedTuple):
    """Working memory of one thread for one row."""

    mass: NDArray[np.float64]  # [V_student], probability of each token; 0 between rows
    tokens: NDArray[np.int32]  # [V_student + 1], tokens with a probability above 0
    values: NDArray[np.float64]  # [V_student + 1], the probabilities of `tokens`
    kept: NDArray[np.int32]  # [V_student + 1], indices of the most likely entries of `tokens`
    order: NDArray[np.int32]  # [V_student + 1], the indices in `kept`, most likely first
    starts: NDArray[np.int64]  # [BUCKETS], start of each bucket in `order`; 0 between rows
    missing: NDArray[np.int64]  # see `find_stem`


class Contributions(NamedTuple):
    """The contributions to a row before the map is applied, with room for more contributions."""

    # a student token, or -2 - t for row t of the map, or -1 for the rest
    destination: NDArray[np.int32]
    amount: NDArray[np.float64]  # probability


@kernel
def project_rows(arrays, todo, is_same, top_k, width, max_missing):  # type: ignore[no-untyped-def]
    """Project the rows with the indices `todo`, and return the keys of missing stems.

    `arrays` contains a `TeacherTokens`, the predictions as `TopK`, a `StemTable`, and a `RowBlock`,
    which receives the results. If a row needs a stem that is not in the `StemTable`, the row stays
    unfinished. The kernel stops before a row that could raise the number of missing keys to more
    than `max_missing`.

    A row with K = 64 candidates takes 7 to 10 µs, mostly for reading rows of the map. If stems are
    new, spelling them doubles this time (`scripts/benchmark.py serving`).
    """
    teacher, predictions, _, rows = arrays
    scratch = Scratch(
        np.zeros(width), np.empty(width + 1, np.int32), np.empty(width + 1),
        np.empty(width + 1, np.int32), np.empty(width + 1, np.int32), np.zeros(BUCKETS, np.int64),
        np.empty(max_missing, np.int64),
    )  # fmt: skip
    mass, tokens, values, _, _, _, missing = scratch
    missing[0] = 0
    inputs = (*arrays, missing)
    contributions = Contributions(np.empty(1024, np.int32), np.empty(1024, np.float64))
    for x in todo:
        j, u = rows.position[x], rows.inside[x]
        num_missing = missing[0]
        most = predictions.starts[j + 1] - predictions.starts[j] + 2
        if num_missing + most >= len(missing):
            break
        if is_same and u == 0:
            _copy(predictions, j, rows, x, top_k, len(mass))
            continue
        contributions = _with_room(contributions, np.int64(0), most)
        count, on_path, rest = _project_candidates(inputs, x, contributions)
        contributions, count, is_known, is_full = _follow_path(
            inputs, x, on_path, contributions, count
        )
        if is_full or missing[0] > num_missing:
            continue
        scale = 1.0
        if u > 0:  # divide by the probability of the teacher token's first u bytes
            total = rest + contributions.amount[:count].sum()
            scale = 1.0 / total if total > 0.0 else 0.0
            rest *= scale
        count, rest = _add_up(teacher, contributions, count, scale, rest, mass, tokens)
        realized = mass[rows.token_ids[x]]
        rows.realized_logprob[x] = np.log(realized) if realized > 0.0 else np.nan
        for n in range(count):
            values[n] = mass[tokens[n]]
            mass[tokens[n]] = 0.0
        size = _keep_best(scratch, count, top_k)
        rest = _write(rows, x, scratch, size, count, rest)
        is_known &= not np.isnan(predictions.rest_logprob[j])
        rows.rest_logprob[x] = np.log(min(1.0, max(0.0, rest))) if is_known and size else np.nan
        rows.size[x] = size
    return missing[1 : missing[0] + 1]


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
    rows.rest_logprob[x] = predictions.rest_logprob[j]
    if start + size < end:
        rows.rest_logprob[x] = np.log(np.exp(np.float64(predictions.rest_logprob[j])) + cut)
    rows.realized_logprob[x] = predictions.realized_logprob[j]
    rows.size[x] = size


@inner_kernel
def _project_candidates(inputs, x, contributions):  # type: ignore[no-untyped-def]
    """Add a contribution for each candidate of a row, except the realized token.

    The rest is spread evenly over the tokens that are not candidates. If the student token starts
    inside the teacher token, only tokens that begin with the same bytes contribute.

    Returns:
        the number of contributions, the realized token's probability, and the rest.
    """
    # Copy the arrays to local variables. Otherwise, each access to the tuple in the loops would
    # update a reference count.
    teacher, predictions, stems, rows, missing = inputs
    destination, amount = contributions
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
            on_path = p  # for `_follow_path`
            continue
        destination[count] = -2 - c  # at u = 0, the map converts the candidate
        if u > 0:
            destination[count] = -1  # the candidate ends here, so its continuation is unknown
            if offsets[c + 1] - offsets[c] > u:
                e = find_stem(slots, keys, root_key(c, u), missing)
                if e >= 0:
                    destination[count] = token_or_row[e]
                    p *= _resplit_factor(is_boundary[e], is_aligned)
        amount[count] = p
        count += 1
    if u > 0:
        # `num_same_start` is the number of teacher tokens that start with the first u bytes, and
        # `fitting` is the number of candidates among them. `listed` is the number of all candidates
        # with bytes.
        e = find_stem(slots, keys, root_key(t, u), missing)
        if e >= 0:
            rest *= max(0, stems.num_same_start[e] - fitting) / max(1, teacher.num_texts - listed)
    return count, on_path, rest


@inner_kernel
def _follow_path(inputs, x, on_path, contributions, count):  # type: ignore[no-untyped-def]
    """Follow the realized tokens while a longer student token can match.

    At each step, the bytes so far are joined with each candidate for the next token. The next
    realized token is an exception: this token extends the path.

    Returns:
        the contributions, their number, whether the rests of all predictions are known, and whether
        `missing` is full.
    """
    teacher, predictions, stems, rows, missing = inputs
    data, offsets, is_text, ends_text, ends_in_space, _, _, _, may_join, _ = teacher
    token_ids, _, starts, ids, logprobs, rest_logprob, realized_logprob = predictions
    slots, keys, first_token, token_or_row, is_prefix, is_boundary, _ = stems
    destination, amount = contributions
    j, u = rows.position[x], rows.inside[x]
    is_aligned, path_end = rows.is_aligned[x], rows.path_end[x]
    is_known, t = True, token_ids[j]
    key = root_key(t, u)
    # At the start of each step, `key` is the key of the text's bytes from the row's first byte to
    # the end of token t at position j. `on_path` is the product of the probabilities of the
    # realized tokens up to this position. `on_path` is not yet assigned to a destination.
    while on_path > 0.0:
        e = find_stem(slots, keys, key, missing)
        if e < 0:
            break
        j += 1
        factor = _resplit_factor(is_boundary[e], is_aligned)
        if not is_prefix[e] or j >= path_end or starts[j] == starts[j + 1]:
            destination[count], amount[count] = token_or_row[e], on_path * factor
            count += 1
            break
        start, end = starts[j], starts[j + 1]
        if missing[0] + end - start + 2 >= len(missing):
            return Contributions(destination, amount), count, is_known, True
        destination, amount = _with_room(Contributions(destination, amount), count, end - start + 2)
        first, is_space, last_byte = first_token[e], ends_in_space[t], data[offsets[t + 1] - 1]
        t = token_ids[j]
        rest, p_next, is_listed = np.exp(np.float64(rest_logprob[j])), 0.0, False
        if np.isnan(rest):
            is_known, rest = False, 0.0
        for k in range(start, end):
            c = ids[k]
            p = np.exp(np.float64(logprobs[k]))
            if c == t:
                p_next, is_listed = p, True
                continue
            destination[count] = first if is_text[c] or ends_text[c] else -1
            amount[count] = on_path * p * factor
            # Only candidates of this kind can change the student's first token of the stem.
            if is_text[c] and (is_space or may_join[last_byte, data[offsets[c]]]):
                child = find_stem(slots, keys, child_key(e, c), missing)
                if child >= 0:
                    destination[count] = first_token[child]
                    amount[count] = on_path * p * _resplit_factor(is_boundary[child], is_aligned)
            count += 1
        if not is_listed and not np.isnan(realized_logprob[j]):
            p_next = np.exp(np.float64(realized_logprob[j]))
            rest = max(0.0, rest - p_next)
        destination[count], amount[count] = token_or_row[e], on_path * rest * factor
        count += 1
        on_path *= p_next
        # A realized token without bytes ends the path.
        if on_path > 0.0 and not is_text[t]:
            destination[count] = first if ends_text[t] else -1
            amount[count] = on_path * factor
            count += 1
            break
        key = child_key(e, t)
    return Contributions(destination, amount), count, is_known, False


@inner_kernel
def _resplit_factor(is_boundary, is_aligned):  # type: ignore[no-untyped-def]
    """Return the probability that the student splits before a stem, as in the text."""
    return 1.0 if is_boundary or not is_aligned else RESPLIT_RATE


@inner_kernel
def _with_room(contributions, count, more):  # type: ignore[no-untyped-def]
    """Return arrays with the first `count` contributions, and room for `more` contributions."""
    size = count + more
    if size <= len(contributions.amount):
        return contributions
    larger = Contributions(np.empty(2 * size, np.int32), np.empty(2 * size, np.float64))
    larger.destination[:count] = contributions.destination[:count]
    larger.amount[:count] = contributions.amount[:count]
    return larger


@inner_kernel
def _add_up(teacher, contributions, size, scale, rest, mass, tokens):  # type: ignore[no-untyped-def]
    """Add up the contributions to each student token. Return the number of tokens, and the rest."""
    row_bounds, columns, weights = teacher.row_bounds, teacher.columns, teacher.weights
    destination, amount = contributions
    count = np.uint64(0)  # unsigned, so that Numba generates no code for negative indices
    for n in range(size):
        s, p = destination[n], amount[n] * scale
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
                tokens[count] = column  # no branch: hard to predict for a CPU
                count += np.uint64(before == 0.0)
                mass[column] = before + q
            rest += p
    return count, rest


@inner_kernel
def _keep_best(scratch, count, top_k):  # type: ignore[no-untyped-def]
    """Sort the `top_k` most likely tokens into `order`, and return the number of sorted tokens.

    Ties are broken by the lower id.

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
    """Return the bucket directly below the bucket that contains the `top_k`th largest value.

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
    """Whether the token at index `a` is more likely after rounding than the token at index `b`.

    Of equally likely tokens, the token with the lower id is better.
    """
    p, q = values[a], values[b]
    is_close = p < CLOSE_RATIO * q and q < CLOSE_RATIO * p
    if is_close and (p == q or _rounded(p) == _rounded(q)):
        return tokens[a] < tokens[b]
    return p > q


@inner_kernel
def _bucket(bits):  # type: ignore[no-untyped-def]
    return min(BUCKETS - 1, max(0, (bits >> 48) - (1023 << 4) + BUCKETS - 1))


@inner_kernel
def _edge(bucket):  # type: ignore[no-untyped-def]
    """Return the bits of the smallest probability in a bucket, except for the lowest bucket."""
    return (bucket + (1023 << 4) - BUCKETS + 1) << 48


@inner_kernel
def _write(rows, x, scratch, size, count, rest):  # type: ignore[no-untyped-def]
    """Write the first `size` tokens in `order`.

    Return the rest, including the probabilities of all other tokens.
    """
    _, tokens, values, _, order, _, _ = scratch
    for n in range(size):
        rows.ids[x, n] = tokens[order[n]]
        rows.logprobs[x, n] = _rounded(values[order[n]])
        values[order[n]] = 0.0
    for n in range(count):
        rest += values[n]
    return rest


@inner_kernel
def _rounded(p):  # type: ignore[no-untyped-def]
    return np.float32(min(0.0, np.log(p)))
