"""Numba kernels on flat arrays: one prediction over teacher tokens after another.

All kernels are serial, release the GIL, and check nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.kernels import inner_kernel, kernel

ROOT = 62  # the bit that marks what is left of a token, in a key of `Stems`
ID_BITS = 24  # an id's in a key; `MAX_WIDTH` fits


class Teacher(NamedTuple):
    """A teacher's tokens, the map's rows of them, and what they say of the student's."""

    data: NDArray[np.uint8]  # token t is data[offsets[t]:offsets[t + 1]]
    offsets: NDArray[np.int64]  # [V_teacher + 1]
    is_text: NDArray[np.bool_]  # [V_teacher], whether the text goes on with the token's bytes
    ends_text: NDArray[np.bool_]  # [V_teacher], a control token: a student's token ends before it
    is_open: NDArray[np.bool_]  # [V_teacher], what follows may change where it is split
    row_bounds: NDArray[np.int64]  # [V_teacher + 1], the map's rows, in its order
    columns: NDArray[np.int32]  # student ids
    weights: NDArray[np.float64]
    joined: NDArray[np.bool_]  # [256, 256], whether two bytes are neighbours in a student token


class Predictions(NamedTuple):
    """A teacher's predictions, as `project.TopK` has them."""

    token_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    rest_logprob: NDArray[np.float32]
    realized_logprob: NDArray[np.float32]


class Stems(NamedTuple):
    """Byte strings that teacher tokens spell, and what the student makes of each.

    The key of what is left of token t after u bytes is `1 << ROOT | u << ID_BITS | t`; that of stem
    e with token t after it `(e + 1) << ID_BITS | t`.
    """

    slots: NDArray[np.int32]  # [2**n], an open-addressed table of stems by key, −1 where free
    keys: NDArray[np.int64]  # [stems]
    first: NDArray[np.int32]  # [stems], the student's first token, or −1 if it cannot spell it
    row: NDArray[np.int32]  # [stems], the teacher token of the same bytes, if it is a root; else −1
    grows: NDArray[np.bool_]  # [stems], whether a student token begins with it and is longer


class Rows(NamedTuple):
    """Rows of the student, and their projections: at most `top_k` candidates each."""

    place: NDArray[np.int64]  # [rows], the teacher's token at the byte where the student's begins
    inside: NDArray[np.int64]  # [rows], how many bytes of it are before that
    last: NDArray[np.int64]  # [rows], the end of the teacher's document
    realized: NDArray[np.int32]  # [rows], the student's token itself
    count: NDArray[np.int64]  # [rows], the candidates found; −1 where the row is not done
    ids: NDArray[np.int32]  # [rows, top_k]
    logprobs: NDArray[np.float32]  # [rows, top_k]
    rest: NDArray[np.float32]  # [rows], a log-probability
    own: NDArray[np.float32]  # [rows], that of the student's token; NaN if it has no part


@inner_kernel
def _slot(slots, keys, key):  # type: ignore[no-untyped-def]
    """Return where a key is in the table, or where there is room for it."""
    mask = np.int64(len(slots) - 1)
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(32)) & mask
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def add_stems(slots, keys, start):  # type: ignore[no-untyped-def]
    """Enter the keys from `start` on, none of which is there, into the table."""
    for e in range(start, len(keys)):
        slots[_slot(slots, keys, keys[e])] = e


@inner_kernel
def _begins(teacher, t, prefix, length):  # type: ignore[no-untyped-def]
    """Tell whether token t begins with the first bytes of another."""
    a, b = teacher.offsets[t], teacher.offsets[prefix]
    if teacher.offsets[t + 1] - a < length:
        return False
    same = 0
    while same < length and teacher.data[a + same] == teacher.data[b + same]:
        same += 1
    return same == length


@inner_kernel
def _add(mass, touched, count, s, p):  # type: ignore[no-untyped-def]
    """Add a probability to a student's token; return how many tokens have one."""
    if mass[s] == 0.0 and p > 0.0:
        touched[count] = s
        count += 1
    mass[s] += p
    return count


@inner_kernel
def _spread(teacher, t, p, mass, touched, count):  # type: ignore[no-untyped-def]
    """Add a token's probability to those of its row of the map."""
    for k in range(teacher.row_bounds[t], teacher.row_bounds[t + 1]):
        count = _add(mass, touched, count, teacher.columns[k], p * teacher.weights[k])
    return count


@inner_kernel
def _settle(teacher, stems, e, p, mass, touched, count):  # type: ignore[no-untyped-def]
    """Add the probability of a stem of which nothing is known but its bytes.

    Returns:
        How many tokens have a probability, and how much of it none has.
    """
    t = stems.row[e]
    if t >= 0 and teacher.row_bounds[t] < teacher.row_bounds[t + 1]:
        return _spread(teacher, t, p, mass, touched, count), 0.0
    if stems.first[e] >= 0:
        return _add(mass, touched, count, stems.first[e], p), 0.0
    return count, p


@kernel
def project_rows(  # type: ignore[no-untyped-def]
    teacher, given, stems, rows, todo, is_same, top_k, mass, touched, missing
):
    """Project the rows `todo`, until there is no more room for the keys of stems that are missing.

    Args:
        teacher: a `Teacher`.
        given: `Predictions`.
        stems: `Stems`.
        rows: `Rows`; what is found is written there, where no stem is missing.
        todo: int64, which rows, none of which is done.
        is_same: whether both have one tokenizer.
        top_k: the most candidates of a row.
        mass: float64 `[V_student]`, zeros; they are left as such.
        touched: int32 `[V_student]`.
        missing: int64, is filled with keys, some of them several times.

    Returns:
        How many keys are missing.
    """
    misses = np.int64(0)
    heap = np.empty(top_k, np.float64)
    for x in todo:
        j, u = rows.place[x], rows.inside[x]
        t = given.token_ids[j]
        start, end = given.starts[j], given.starts[j + 1]
        if misses + end - start + 2 > len(missing):
            break
        if is_same and u == 0:
            _copy(given, j, rows, x, top_k)
            continue
        misses_before = misses
        count = np.int64(0)
        rest = np.exp(np.float64(given.rest_logprob[j]))
        known = not np.isnan(rest)
        if not known:
            rest = 0.0
        lost = 0.0  # of what is known: the student's tokens for it are not
        total = on_path = 0.0
        follows = u > 0 or teacher.is_text[t]
        is_listed = is_full = False
        for k in range(start, end):
            c = given.ids[k]
            p = np.exp(np.float64(given.logprobs[k]))
            is_listed |= c == t
            if u > 0 and not _begins(teacher, c, t, u):
                continue
            total += p
            if c == t and follows:
                on_path = p
            elif u == 0:
                if teacher.row_bounds[c] == teacher.row_bounds[c + 1]:
                    lost += p
                count = _spread(teacher, c, p, mass, touched, count)
            elif teacher.offsets[c + 1] - teacher.offsets[c] == u:
                lost += p  # what follows it is not known
            else:
                key = np.int64(1) << ROOT | u << ID_BITS | np.int64(c)
                e = stems.slots[_slot(stems.slots, stems.keys, key)]
                if e < 0:
                    missing[misses] = key
                    misses += 1
                else:
                    count, left = _settle(teacher, stems, e, p, mass, touched, count)
                    lost += left
        if not is_listed and start < end and not np.isnan(given.realized_logprob[j]):
            p = np.exp(np.float64(given.realized_logprob[j]))
            rest = max(0.0, rest - p)
            total += p
            if follows:
                on_path = p
            else:
                count = _spread(teacher, t, p, mass, touched, count)
        # Along the path: what the text really has, with the prediction at each next place.
        key = np.int64(1) << ROOT | u << ID_BITS | np.int64(t)
        while on_path > 0.0:
            e = stems.slots[_slot(stems.slots, stems.keys, key)]
            if e < 0:
                missing[misses] = key
                misses += 1
                break
            j += 1
            start = end = np.int64(0)
            if stems.grows[e] and j < rows.last[x]:
                start, end = given.starts[j], given.starts[j + 1]
            if start == end:
                count, left = _settle(teacher, stems, e, on_path, mass, touched, count)
                lost += left
                break
            is_full = misses + end - start + 2 > len(missing)
            if is_full:
                break
            before = given.token_ids[j - 1]
            last_byte = teacher.data[teacher.offsets[before + 1] - 1]
            t = given.token_ids[j]
            p_rest = np.exp(np.float64(given.rest_logprob[j]))
            if np.isnan(p_rest):
                known, p_rest = False, 0.0
            p_next = 0.0
            is_listed = False
            for k in range(start, end):
                c = given.ids[k]
                p = np.exp(np.float64(given.logprobs[k]))
                if c == t:
                    is_listed = True
                    p_next = p
                    continue
                first = np.int32(-1)
                if teacher.is_text[c]:
                    next_byte = teacher.data[teacher.offsets[c]]
                    if teacher.is_open[before] or teacher.joined[last_byte, next_byte]:
                        child = (np.int64(e) + 1) << ID_BITS | np.int64(c)
                        found = stems.slots[_slot(stems.slots, stems.keys, child)]
                        if found < 0:
                            missing[misses] = child
                            misses += 1
                            continue
                        first = stems.first[found]
                    else:
                        first = stems.first[e]
                elif teacher.ends_text[c]:
                    first = stems.first[e]
                if first >= 0:
                    count = _add(mass, touched, count, first, on_path * p)
                else:
                    lost += on_path * p
            if not is_listed and not np.isnan(given.realized_logprob[j]):
                p_next = np.exp(np.float64(given.realized_logprob[j]))
                p_rest = max(0.0, p_rest - p_next)
            count, left = _settle(teacher, stems, e, on_path * p_rest, mass, touched, count)
            lost += left
            on_path *= p_next
            if not teacher.is_text[t]:
                if stems.first[e] >= 0 and teacher.ends_text[t]:
                    count = _add(mass, touched, count, stems.first[e], on_path)
                else:
                    lost += on_path
                break
            key = (np.int64(e) + 1) << ID_BITS | np.int64(t)
        if is_full or misses > misses_before:
            for n in range(count):
                mass[touched[n]] = 0.0
            continue
        # What does not go on as the text did is not possible: the rest keeps its share.
        scale = 1.0
        if u > 0:
            scale = (1.0 - rest) / total if total > 0.0 else 0.0
        own = mass[rows.realized[x]] * scale
        rows.own[x] = np.log(own) if own > 0.0 else np.nan
        rest += scale * lost
        size = _keep_best(mass, touched, count, heap, rows.ids[x])
        for n in range(size):
            rows.logprobs[x, n] = min(0.0, np.log(scale * heap[n]))
            mass[rows.ids[x, n]] = 0.0
        for n in range(count):
            rest += scale * mass[touched[n]]
            mass[touched[n]] = 0.0
        _settle_ties(rows.ids[x], rows.logprobs[x], size)
        rows.rest[x] = np.log(min(1.0, rest)) if known else np.nan
        rows.count[x] = size if scale > 0.0 else 0
    return misses


@inner_kernel
def _copy(given, j, rows, x, top_k):  # type: ignore[no-untyped-def]
    """Write a prediction as it is, but for what is cut."""
    start, end = given.starts[j], given.starts[j + 1]
    size = min(end - start, top_k)
    rows.ids[x, :size] = given.ids[start : start + size]
    rows.logprobs[x, :size] = given.logprobs[start : start + size]
    rows.rest[x] = given.rest_logprob[j]
    if start + size < end:
        cut = np.exp(given.logprobs[start + size : end].astype(np.float64)).sum()
        rows.rest[x] = np.log(np.exp(np.float64(given.rest_logprob[j])) + cut)
    rows.own[x] = given.realized_logprob[j]
    rows.count[x] = size


@inner_kernel
def _is_worse(p, s, q, r):  # type: ignore[no-untyped-def]
    return p < q or (p == q and s > r)


@inner_kernel
def _sift(heap, ids, place, size):  # type: ignore[no-untyped-def]
    """Let an entry sink in a heap whose root is the worst."""
    p, s = heap[place], ids[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        other = child + 1
        if other < size and _is_worse(heap[other], ids[other], heap[child], ids[child]):
            child = other
        if not _is_worse(heap[child], ids[child], p, s):
            break
        heap[place], ids[place] = heap[child], ids[child]
        place = child
    heap[place], ids[place] = p, s


@inner_kernel
def _keep_best(mass, touched, count, heap, ids):  # type: ignore[no-untyped-def]
    """Write the heaviest tokens, ties by the lower id, best first; return how many."""
    size = min(count, len(heap))
    for n in range(size):
        heap[n], ids[n] = mass[touched[n]], touched[n]
    for n in range(size // 2 - 1, -1, -1):
        _sift(heap, ids, n, size)
    for n in range(size, count):
        p, s = mass[touched[n]], touched[n]
        if _is_worse(heap[0], ids[0], p, s):
            heap[0], ids[0] = p, s
            _sift(heap, ids, np.int64(0), size)
    for n in range(size - 1, 0, -1):
        heap[0], heap[n] = heap[n], heap[0]
        ids[0], ids[n] = ids[n], ids[0]
        _sift(heap, ids, np.int64(0), n)
    return size


@inner_kernel
def _settle_ties(ids, logprobs, size):  # type: ignore[no-untyped-def]
    """Sort by id what is equal after rounding."""
    for n in range(1, size):
        m = n
        while m > 0 and logprobs[m - 1] == logprobs[m] and ids[m - 1] > ids[m]:
            ids[m - 1], ids[m] = ids[m], ids[m - 1]
            m -= 1
