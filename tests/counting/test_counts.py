"""Shared boundaries, chunks and their counts: the kernels beside plain twins."""

from __future__ import annotations

from collections import Counter

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xtok.counting import counts as counting
from xtok.counting import kernels
from xtok.counting.counts import ChunkCounts, PairCounts, Rows, Tally
from xtok.counting.encode import AlignedTexts, EncodedTexts
from xtok.counting.pair_text import DocumentCounter
from xtok.counting.smoothing import EPSILON
from xtok.maps.edges import Edges

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"c"]
DATA, OFFSETS = np.frombuffer(b"".join(TOKENS), np.uint8), np.cumsum([0, *map(len, TOKENS)])
Documents = list[tuple[list[int], list[int]]]
Weights = dict[tuple[int, int], float]

ids_of_a_document = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)
token_ids = st.integers(0, len(TOKENS) - 1)
eighths = st.integers(1, 24).map(lambda n: n / 8)


@st.composite
def two_spellings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to spell one string, or sometimes two strings."""
    student = draw(ids_of_a_document)
    if draw(st.booleans()):
        return student, draw(ids_of_a_document)
    rest, teacher = b"".join(TOKENS[i] for i in student), []
    while rest:
        fitting = [i for i, t in enumerate(TOKENS) if t and rest.startswith(t)]
        teacher.append(draw(st.sampled_from(fitting)))
        rest = rest[len(TOKENS[teacher[-1]]) :]
    return student, teacher


def aligned(documents: Documents) -> AlignedTexts:
    sides = [
        EncodedTexts(
            np.array([i for ids in side for i in ids], np.int32), np.cumsum([0, *map(len, side)])
        )
        for side in zip(*documents, strict=True)
    ] or [EncodedTexts(np.zeros(0, np.int32), np.zeros(1, np.int64))] * 2
    places = np.empty((2, min(side.num_tokens for side in sides)), np.int64)
    num_starts, same_bytes = np.zeros((2, len(documents)), np.int64)
    complete = np.zeros(len(documents), np.bool_)
    count = kernels.shared_boundaries(
        *sides[0], DATA, OFFSETS, *sides[1], DATA, OFFSETS,
        *places, num_starts, same_bytes, complete,
    )  # fmt: skip
    return AlignedTexts(
        sides[0], sides[1], places[0, :count], places[1, :count], num_starts, same_bytes, complete
    )


def rows_of(weights: Weights) -> Rows:
    s_ids, t_ids = np.array(list(weights), np.int64).reshape(-1, 2).T
    return Rows.of(Edges(s_ids, t_ids, np.array(list(weights.values()))), len(TOKENS))


@given(
    documents=st.lists(two_spellings(), max_size=4),
    weights=st.none() | st.dictionaries(st.tuples(token_ids, token_ids), eighths),
    longest=st.sampled_from([2, 64]),
)
def test_boundaries_and_chunks_are_those_of_the_plain_walk(
    documents: Documents, weights: Weights | None, longest: int
) -> None:
    text = aligned(documents)
    skipped = at = 0
    starts_of, chunks_of = Counter[int](), Counter[int]()
    for d, (s, t) in enumerate(documents):
        starts, num_same, agrees = naive.shared_boundaries(
            [TOKENS[i] for i in s], [TOKENS[j] for j in t]
        )
        n = int(text.num_starts[d])
        own = np.stack([text.s_starts, text.t_starts])[:, at : at + n].T
        assert (own - [text.student.bounds[d], text.teacher.bounds[d]]).tolist() == [
            list(start) for start in starts
        ]
        assert (text.same_bytes[d], text.complete[d]) == (num_same, agrees)
        at += n
        starts_of.update(s[i] << 32 | t[j] for i, j in starts)
        pairs, left_out = naive.chunk_pairs(s, t, starts, agrees, counting.UNIT, longest, weights)
        for student_id, teacher_id, amount in pairs:
            chunks_of[student_id << 32 | teacher_id] += amount
        skipped += left_out
    unit = Counter({key: n * counting.UNIT for key, n in starts_of.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "LONGEST_CHUNK", longest)
        for target, expected, left_out in (
            ("start", starts_of, 0),
            ("chunk", chunks_of, skipped),
            ("both", chunks_of + unit, skipped),
        ):
            tally, merged = Tally(target), Tally(target)  # type: ignore[arg-type]
            assert [tally.add(text) for _ in range(2)] == [left_out] * 2
            merged.add_counts(tally.counts())
            keys, amounts = merged.counts().pairs(rows_of(weights) if weights else None)
            assert keys.tolist() == sorted(key for key, n in expected.items() if n)
            assert amounts.tolist() == [2 * expected[key] for key in keys.tolist()]


@given(
    documents=st.lists(two_spellings(), min_size=1, max_size=5),
    weights=st.dictionaries(st.tuples(token_ids, token_ids), eighths),
    chosen=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_documents_keep_their_pairs_and_chunks(
    documents: Documents, weights: Weights, chosen: list[bool]
) -> None:
    counter = DocumentCounter()
    counter.add(aligned(documents[:2]), ["a"] * len(documents[:2]))
    counter.add(aligned(documents[2:]), ["b"] * len(documents[2:]))
    text, is_chosen = counter.result(), np.array(chosen[: len(documents)])
    edges = Edges(*rows_edges(weights))
    found = text.over_chunks(text.chunk_losses(edges, (len(TOKENS), len(TOKENS))))
    of_pairs, sums = Counter[int](), np.zeros(len(documents))
    for d, (s, t) in enumerate(documents):
        starts, _, agrees = naive.shared_boundaries([TOKENS[i] for i in s], [TOKENS[j] for j in t])
        ends = [*starts[1:], (len(s), len(t))][: len(starts)]
        chunks = [*zip(starts, ends, strict=True)][: None if agrees else -1]
        if chosen[d]:
            of_pairs.update(s[i] << 32 | t[j] for i, j in starts)
        sums[d] = sum(t[j] + 1 for _, j in starts)
        losses = [
            -np.mean([
                np.log(
                    (1 - EPSILON) * np.mean([weights.get((i, j), 0.0) for i in s[a:b]])
                    + EPSILON / len(TOKENS)
                )
                for j in t[c:e]
            ])
            for (a, c), (b, e) in chunks
        ]  # fmt: skip
        assert text.num_chunks[d] == len(chunks)
        assert found[d] == pytest.approx(sum(losses), rel=1e-9)
    amounts = dict(zip(text.keys.tolist(), text.amounts(is_chosen).tolist(), strict=True))
    assert {key: n for key, n in amounts.items() if n} == of_pairs
    assert text.per_document((text.keys & 0xFFFFFFFF) + 1).tolist() == sums.tolist()


def rows_edges(
    weights: Weights,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
    ids = np.array(list(weights), np.int32).reshape(-1, 2)
    return ids[:, 0], ids[:, 1], np.array(list(weights.values()))


@given(parts=st.lists(st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 9)), max_size=60)))
def test_counts_are_those_of_a_counter(parts: list[list[tuple[int, int]]]) -> None:
    counts, expected = PairCounts(), Counter[int]()
    for part in parts:
        keys = np.array([k for k, _ in part], np.int64)
        counts.add(keys, np.array([n for _, n in part], np.int64))
        for key, amount in part:
            expected[key] += amount
    keys, found = counts.arrays()
    assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == expected
    assert keys.tolist() == sorted(expected)
    assert len(counts) == len(expected)


def test_tables_grow_past_their_first_size() -> None:
    n = 20_000
    counts, chunks = PairCounts(), ChunkCounts()
    keys = np.arange(n, dtype=np.int64) * (1 << 32 | 1)
    ids, starts = np.arange(3 * n, dtype=np.int32), 3 * np.arange(n)
    spans = np.stack([starts, starts + 2, starts + 2, starts + 3], 1)
    for amounts in (np.ones(1, np.int64), np.arange(n)):
        counts.add(keys, amounts)
        assert np.array_equal(chunks.add(spans, ids, ids, amounts), np.arange(n))
    assert [array.tolist() for array in counts.arrays()] == [keys.tolist(), [*range(1, n + 1)]]
    assert np.array_equal(chunks.chunks().ids, ids)
    assert np.array_equal(chunks.chunks().counts, np.arange(n) + 1)
