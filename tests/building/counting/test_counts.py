"""Chunks and counts match `align`, and kernels match their plain implementations."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_maps import vocabulary

from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.building.counting import counts as counting
from xtok.building.counting.aligned import AlignedTexts, align_texts
from xtok.building.counting.counts import ChunkCounts, MapRows, PairCounts, Tally
from xtok.building.counting.pair_text import DocumentCounter
from xtok.building.counting.smoothing import EPSILON
from xtok.maps.edges import Edges
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable, TokenType, Vocabulary

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"c"]
DATA, OFFSETS = np.frombuffer(b"".join(TOKENS), np.uint8), np.cumsum([0, *map(len, TOKENS)])


def side(unknown: str) -> Vocabulary:
    """Return the table of one side. Its first token has no bytes and no counterpart."""
    types = np.array([TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(TOKENS) - 1), np.uint8)
    return vocabulary(len(TOKENS), table=TokenTable(DATA, OFFSETS, types, {0: unknown}))


PAIR = Pair(side("<s>"), side("<t>"))
ALIGNER = TokenAligner(PAIR)
Documents = list[tuple[list[int], list[int]]]
Weights = dict[tuple[int, int], float]

token_ids = st.integers(0, len(TOKENS) - 1)
ids_of_a_document = st.lists(token_ids, max_size=12)
eighths = st.integers(1, 24).map(lambda n: n / 8)
given_weights = st.dictionaries(st.tuples(token_ids, token_ids), eighths)


def bytes_of(ids: list[int]) -> bytes:
    return b"".join(TOKENS[i] for i in ids)


def spelled(draw: st.DrawFn, text: bytes) -> list[int]:
    """Return one of the possible spellings of a text."""
    ids = []
    while text:
        fitting = [i for i, t in enumerate(TOKENS) if t and text.startswith(t)]
        ids.append(draw(st.sampled_from(fitting)))
        text = text[len(TOKENS[ids[-1]]) :]
    return ids


@st.composite
def two_spellings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two documents that start with equal or different text, and may have the same end."""
    student, teacher = draw(ids_of_a_document), draw(ids_of_a_document)
    if draw(st.booleans()):
        teacher = spelled(draw, bytes_of(student))
    if draw(st.booleans()):
        rest = bytes_of(draw(st.lists(token_ids, min_size=8, max_size=20)))
        student, teacher = (side + spelled(draw, rest) for side in (student, teacher))
    return student, teacher


def aligned(documents: Documents) -> AlignedTexts:
    sides = zip(*documents, strict=True) if documents else ((), ())
    return align_texts(
        ALIGNER,
        *(
            FlatIds(np.array([*chain(*side)], np.int32), np.cumsum([0, *map(len, side)]))
            for side in sides
        ),
    )


def chunks_of(s: list[int], t: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return the correct chunks of `align` that have no tokens without bytes in between."""
    return [
        (list(chunk.student_ids), list(chunk.teacher_ids))
        for chunk in TokenAligner(PAIR).pairs(s, t)
        if chunk.is_correct
        and list(chunk.student_ids) == s[slice(*chunk.student_tokens)]
        and list(chunk.teacher_ids) == t[slice(*chunk.teacher_tokens)]
    ]


def edges_of(weights: Weights) -> Edges:
    s_ids, t_ids = np.array(list(weights), np.int32).reshape(-1, 2).T
    return Edges(s_ids, t_ids, np.array(list(weights.values())))


@given(
    documents=st.lists(two_spellings(), max_size=4),
    weights=st.none() | given_weights,
    longest=st.sampled_from([2, 64]),
)
def test_the_counted_chunks_equal_those_of_align(
    documents: Documents, weights: Weights | None, longest: int
) -> None:
    text = aligned(documents)
    skipped = 0
    starts_of, chunks_in = Counter[int](), Counter[int]()
    sizes = [len(bytes_of(s)) for s, _ in documents]
    outside = text.bytes_outside(np.array(sizes, np.int64), PAIR.tables[0])
    for d, (s, t) in enumerate(documents):
        chunks = chunks_of(s, t)
        starts_of.update(student[0] << 32 | teacher[0] for student, teacher in chunks)
        pairs, left_out = naive.chunk_pairs(chunks, counting.UNIT, longest, weights)
        for student_id, teacher_id, amount in pairs:
            chunks_in[student_id << 32 | teacher_id] += amount
        skipped += left_out
        covered = [sum(len(side) for side in sides) for sides in zip(*chunks, strict=True)]
        assert text.differs[d] == ((covered or [0, 0]) != [len(s), len(t)])
        left = sizes[d] - sum(len(bytes_of(student)) for student, _ in chunks)
        assert outside[d] == (max(left, 1) if text.differs[d] else 0)
    unit = Counter({key: n * counting.UNIT for key, n in starts_of.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "LONGEST_CHUNK", longest)
        for target, expected, left_out in (
            ("start", starts_of, 0),
            ("chunk", chunks_in, skipped),
            ("both", chunks_in + unit, skipped),
        ):
            tally = Tally(target)  # type: ignore[arg-type]
            assert [tally.add(text) for _ in range(2)] == [left_out] * 2
            rows = MapRows.of(edges_of(weights), len(TOKENS)) if weights else None
            keys, amounts = tally.counts().pairs(rows)
            assert keys.tolist() == sorted(key for key, n in expected.items() if n)
            assert amounts.tolist() == [2 * expected[key] for key in keys.tolist()]


@given(
    documents=st.lists(two_spellings(), min_size=1, max_size=5),
    weights=given_weights,
    chosen=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_documents_keep_their_pairs_and_chunks(
    documents: Documents, weights: Weights, chosen: list[bool]
) -> None:
    counter = DocumentCounter()
    for group, part in (("a", documents[:2]), ("b", documents[2:])):
        counter.add(aligned(part), group)
    text, is_chosen = counter.result(), np.array(chosen[: len(documents)])
    losses = text.over_chunks(text.chunk_losses(edges_of(weights), (len(TOKENS), len(TOKENS))))
    pair_counts, sums = Counter[int](), np.zeros(len(documents))
    for d, (s, t) in enumerate(documents):
        chunks = chunks_of(s, t)
        if chosen[d]:
            pair_counts.update(student[0] << 32 | teacher[0] for student, teacher in chunks)
        sums[d] = sum(teacher[0] + 1 for _, teacher in chunks)
        loss = 0.0
        for student, teacher in chunks:
            means = np.array(
                [np.mean([weights.get((i, j), 0.0) for i in student]) for j in teacher]
            )
            loss -= np.log((1 - EPSILON) * means + EPSILON / len(TOKENS)).mean()
        assert text.num_chunks[d] == len(chunks)
        assert losses[d] == pytest.approx(loss, rel=1e-9)
    amounts = dict(zip(text.keys.tolist(), text.amounts(is_chosen).tolist(), strict=True))
    assert {key: n for key, n in amounts.items() if n} == pair_counts
    assert text.per_document((text.keys & 0xFFFFFFFF) + 1).tolist() == sums.tolist()


@given(parts=st.lists(st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 9)), max_size=60)))
def test_pair_counts_equal_a_counter(parts: list[list[tuple[int, int]]]) -> None:
    counts, expected = PairCounts(), Counter[int]()
    for part in parts:
        counts.add(*np.array(part, np.int64).reshape(-1, 2).T.copy())
        for key, amount in part:
            expected[key] += amount
    keys, amounts = counts.arrays()
    assert dict(zip(keys.tolist(), amounts.tolist(), strict=True)) == expected
    assert keys.tolist() == sorted(expected)


def test_tables_grow_past_their_first_size() -> None:
    n = 20_000
    counts, chunks = PairCounts(), ChunkCounts()
    keys = np.arange(n, dtype=np.int64) * (1 << 32 | 1)
    ids, starts = np.arange(3 * n, dtype=np.int32), 3 * np.arange(n)
    spans = np.stack([starts, starts + 2, starts + 2, starts + 3])
    for amounts in (np.ones(1, np.int64), np.arange(n)):
        counts.add(keys, amounts)
        assert np.array_equal(chunks.add(spans, ids, ids, amounts), np.arange(n))
    assert [array.tolist() for array in counts.arrays()] == [keys.tolist(), [*range(1, n + 1)]]
    assert np.array_equal(chunks.chunks().ids, ids)
    assert np.array_equal(chunks.chunks().counts, np.arange(n) + 1)
