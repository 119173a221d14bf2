"""Projected predictions equal plain implementations and exhaustive enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from make_tokenizers import byte_ranks
from naive_projecting import (
    END,
    Bigrams,
    Projection,
    Row,
    ids_and_bounds,
    map_of,
    small,
    top_k,
    topk_rows,
)

import xtok
from xtok.predictions.topk import TopK
from xtok.teachers.projector import Projector
from xtok.teachers.projector_kernels import RESPLIT_RATE
from xtok.tokenizers import Tokenizer, load_tokenizer

QUICK = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes minutes, and rarely helps
PLAIN = xtok.BuildConfig(scale_trick=False)
LETTERS = [b"a", b"b"]
words = st.lists(
    st.text("ab", min_size=2, max_size=4).map(str.encode), max_size=5, unique=True
).map(lambda more: LETTERS + more)


def shares(ids: Sequence[int]) -> st.SearchStrategy[dict[int, float]]:
    """Draw a distribution over some of these ids."""
    weights = st.dictionaries(st.sampled_from(list(ids)), st.integers(1, 9), min_size=1)
    return weights.map(lambda row: {i: n / sum(row.values()) for i, n in row.items()})


@st.composite
def documents(draw: st.DrawFn, tokens: Sequence[bytes]) -> list[tuple[list[int], list[Row]]]:
    """Draw texts as token ids with predictions; each text may end with the end of text."""
    text_ids = range(1, len(tokens) + 1)
    documents_drawn = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.sampled_from(text_ids), min_size=1, max_size=6))
        ids += draw(st.sampled_from([[], [END]]))
        rows: list[Row] = [draw(shares([END, *text_ids])) for _ in ids]
        documents_drawn.append((ids, [{}, *rows[1:]]))
    return documents_drawn


def spelled(student: Tokenizer, ids: Sequence[int], tokens: Sequence[bytes]) -> list[int]:
    """Return the student's ids of a teacher's document, with the same end of text."""
    text = b"".join(tokens[i] for i in ids)
    return student.segment(text) + [END] * (ids[-1] == END)


def assert_equal_topk(first: TopK, other: TopK) -> None:
    """Check that all arrays are equal bit for bit."""
    arrays: Any = zip(first, other, strict=True)
    for a, b in arrays:
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def assert_close(row: Row, want: Row) -> None:
    for i in row.keys() | want.keys():
        assert row.get(i, 0.0) == pytest.approx(want.get(i, 0.0), rel=1e-5, abs=1e-6)


def projected(
    sides: tuple[Tokenizer, Tokenizer], back: Any, ids: Sequence[int], rows: Sequence[Row],
    spelling: Sequence[int],
) -> TopK:  # fmt: skip
    """Project a teacher's predictions of a text with a map of these rows."""
    student, teacher = sides
    projector = Projector(xtok.load_pair(student, teacher), map_of(back, teacher, student))
    return projector.project(top_k([ids], rows, None), *ids_and_bounds([spelling]), 99)


@settings(max_examples=100, phases=QUICK)
@given(st.data(), words, words, st.booleans(), st.sampled_from([1, 2, 3, 9]), st.booleans())
def test_rows_match_the_naive_projection(
    data: Any, ours: list[bytes], theirs: list[bytes], merges: bool, k: int, along_path: bool
) -> None:
    assume(ours != theirs)
    student, teacher = small(ours, merges=merges), small(theirs)
    tokens = teacher.table.tokens()
    given_rows = data.draw(documents(theirs))
    back = {t: data.draw(shares(range(1, len(ours) + 1))) for t in range(1, len(tokens), 2)}
    back[END] = {END: 1.0}
    texts = [ids for ids, _ in given_rows]
    rows = [row for _, part in given_rows for row in part]
    predictions = top_k(texts, rows, k)
    spellings = [spelled(student, ids, tokens) for ids in texts]
    back_map = map_of(back, teacher, student)
    projector, again = (
        Projector(xtok.load_pair(student, teacher), back_map, threads, along_path=along_path)
        for threads in (2, 1)
    )
    topk = projector.project(predictions, *ids_and_bounds(spellings), 99)
    for either in (projector, again):  # the result depends neither on earlier calls nor on threads
        assert_equal_topk(either.project(predictions, *ids_and_bounds(spellings), 99), topk)
    best = [sorted(row.items(), key=lambda item: (-item[1], item[0])) for row in topk_rows(topk)]
    cut = projector.project(predictions, *ids_and_bounds(spellings), 2)
    assert [list(row.items()) for row in topk_rows(cut)] == [row[:2] for row in best]

    known = topk_rows(predictions)
    for row, whole_row, i in zip(known, rows, predictions.token_ids.tolist(), strict=True):
        if whole_row:
            row[i] = whole_row.get(i, 0.0)
    expected: list[dict[int, float]] = []
    bounds = np.cumsum([0, *map(len, texts)])
    for ids, spelling, begin in zip(texts, spellings, bounds, strict=False):
        document_rows = known[begin : begin + len(ids)]
        reference = Projection(ids, document_rows, tokens, back, student, along_path=along_path)
        expected += reference.expected_rows(spelling)
    for row, want in zip(topk_rows(topk), expected, strict=True):
        assert_close(row, want)
    for projected_rows in (topk, cut):
        rests = np.exp(projected_rows.rest_logprob.astype(np.float64))
        for row, rest in zip(topk_rows(projected_rows), rests, strict=True):
            assert not row or sum(row.values()) + rest == pytest.approx(1, abs=1e-5)


@settings(max_examples=100, phases=QUICK)
@given(st.data(), words, words, st.integers(0, 6))
def test_rows_of_a_bigram_teacher_are_exact_at_common_starts(
    data: st.DataObject, ours: list[bytes], theirs: list[bytes], seed: int
) -> None:
    """With a map of true probabilities, rows are exact where both sides start a token.

    Each teacher token has at least half the length of the longest student token, so student tokens
    extend over at most two of them.
    """
    longest = max(map(len, ours))
    theirs = [word for word in theirs if 2 * len(word) >= longest]
    assume(theirs and ours != theirs)
    student, teacher = small(ours), small(theirs)
    tokens = teacher.table.tokens()
    text_ids = range(1, len(tokens))
    model = Bigrams({t: data.draw(shares([END, *text_ids])) for t in range(len(tokens))}, tokens)
    spell = student.segment
    back = {t: model.begins(t, spell, longest, tokens[t]) for t in text_ids} | {END: {END: 1.0}}
    rng = np.random.default_rng(seed)
    ids = [int(rng.choice(text_ids))]
    while len(ids) < 6 and ids[-1] != END:
        row = model.rows[ids[-1]]
        ids.append(int(rng.choice(list(row), p=list(row.values()))))
    rows: list[Row] = [{}, *(model.rows[t] for t in ids[:-1])]
    spelling = spelled(student, ids, tokens)
    topk = projected((student, teacher), back, ids, rows, spelling)
    begins = np.cumsum([0, *(len(tokens[i]) for i in ids)]).tolist()
    start = 0
    for s, row in zip(spelling, topk_rows(topk), strict=True):
        index = begins.index(start) if start in begins else 0
        if index and index < len(ids):
            assert_close(row, model.begins(ids[index - 1], spell, longest))
        start += len(student.table[s])


def test_equal_tokenizers_give_the_input_bit_for_bit(byte_level: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    ids = np.array(byte_level.encode_batch(["A text, and some more of it: 12345."])[0], np.int32)
    n, k, width = len(ids), 7, len(byte_level.table)
    starts = np.concatenate([[0, 0], k * np.arange(1, n)])
    given_ids = np.concatenate([rng.permutation(width)[:k] for _ in ids[1:]]).astype(np.int32)
    logprobs = np.sort(-rng.exponential(20, (n - 1, k)).astype(np.float32))[:, ::-1] - np.float32(5)
    logprobs[0, 0] = -1e-9
    rest, realized = -rng.exponential(1, (2, n)).astype(np.float32)
    rest[0], realized[:2] = np.nan, np.nan
    bounds = np.array([0, n])
    predictions = TopK(ids, bounds, starts, given_ids, logprobs.ravel(), rest, realized)
    projector = Projector(
        xtok.load_pair(byte_level, byte_level), xtok.build(byte_level, byte_level, PLAIN)
    )
    assert_equal_topk(projector.project(predictions, ids, bounds, k), predictions)
    cut = projector.project(predictions, ids, bounds, 1)
    assert cut.logprobs.tolist() == logprobs[:, 0].tolist()
    left = np.exp(rest[1:].astype(np.float64)) + np.exp(logprobs[:, 1:].astype(np.float64)).sum(1)
    assert cut.rest_logprob[1:] == pytest.approx(np.log(left), abs=1e-5)


def test_ids_beyond_the_students_width_are_rest_for_equal_tokenizers(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "narrow.tiktoken", "ab", "cd")
    teacher = byte_ranks(tmp_path / "wide.tiktoken", "ab", "cd", width=300)
    ids, bounds, nan = np.array([256, 257], np.int32), np.array([0, 2]), np.nan
    shares, rest = np.log(np.array([[0.5, 0.3, 0.1], [nan, 0.1, nan]], np.float32))
    candidates, realized = np.array([257, 299, 97], np.int32), np.array([nan, shares[0]], "f4")
    predictions = TopK(ids, bounds, np.array([0, 0, 3]), candidates, shares, rest[:2], realized)
    projector = Projector(xtok.load_pair(student, teacher), xtok.build(teacher, student, PLAIN))
    topk = projector.project(predictions, ids, bounds, 3)
    assert topk.ids.tolist() == [257, 97]
    assert np.exp(topk.logprobs) == pytest.approx([0.5, 0.1])
    assert np.exp(topk.rest_logprob[1]) == pytest.approx(0.4)


def test_realized_tokens_have_the_probability_of_their_bytes() -> None:
    """`abb` consists of two teacher tokens; `a` and `ab` begin and end within them."""
    sides = small([*LETTERS, b"abb"]), small([*LETTERS, b"ab", b"ba"])
    tokens = sides[1].table.tokens()
    a, b, ab, ba = (tokens.index(x) for x in (b"a", b"b", b"ab", b"ba"))
    rows: list[Row] = [{}, {ab: 0.5, a: 0.25, b: 0.25}, {b: 0.5, ba: 0.5}, {ba: 0.75, b: 0.25}]
    back = {t: {1 if tokens[t].startswith(b"a") else 2: 1.0} for t in (a, b, ab, ba)}
    topk = projected(sides, back, [b, ab, b, ba], rows, [2, 3, 2, 1])
    assert topk_rows(topk)[0] == {}
    # every continuation of `ab` becomes `abb`
    assert_close(topk_rows(topk)[1], {3: 0.5, 1: 0.25, 2: 0.25})
    assert_close(topk_rows(topk)[2], {2: 1.0})
    # after a token that ends with `b`, the next token is unknown
    assert_close(topk_rows(topk)[3], {1: 0.75})
    assert np.exp(topk.rest_logprob[1:]) == pytest.approx([0, 0, 0.25], abs=1e-6)
    assert topk.valid.tolist() == [False, True, True, True]
    assert np.exp(topk.realized_logprob[1:]) == pytest.approx([0.25, 1.0, 0.75])


def test_spelling_inside_a_token_depends_on_the_preceding_text(tmp_path: Path) -> None:
    r"""`(a` is one token, but after `!` the letters form a separate word."""
    path = tmp_path / "ranks.tiktoken"
    byte_ranks(path, "(a", "ab")
    student = load_tokenizer(rf"{path}@[^\s\p{{L}}]?\p{{L}}+|[^\s\p{{L}}]+")
    teacher = small([*(bytes([letter]) for letter in b"!(abc"), b"!("])
    a, c, both = (teacher.table.tokens().index(x) for x in (b"a", b"c", b"!("))
    assert student.segment(b"c!(a") == [*b"c!(a"]
    assert student.segment(b"(a") == [256]
    rows: list[Row] = [{}, {both: 1.0}, {a: 0.5, c: 0.5}]
    topk = projected((student, teacher), {}, [c, both, a], rows, [*b"c!(a"])
    assert_close(topk_rows(topk)[2], {ord("("): 1.0})


def test_unlikely_splits_inside_a_token_have_a_low_weight() -> None:
    """After `a`, the rest of `ac` is unlikely, because the student has the token `ac`."""
    student, teacher = small([*LETTERS, b"c", b"ac"]), small([*LETTERS, b"c", b"ab", b"ac", b"abb"])
    b, ab, ac = (teacher.table.tokens().index(x) for x in (b"b", b"ab", b"ac"))
    rows: list[Row] = [{}, {ab: 0.3, ac: 0.3, b: 0.1}]
    topk = projected((student, teacher), {}, [b, ab], rows, student.segment(b"bab"))
    # `a`, `c` and `abb` share the unknown 0.3; `a` and `abb` match the bytes so far.
    total = 0.3 + RESPLIT_RATE * 0.3 + 0.3 * 2 / 3
    assert_close(topk_rows(topk)[2], {2: 0.3 / total, 3: RESPLIT_RATE * 0.3 / total})
    assert np.exp(topk.rest_logprob[2]) == pytest.approx(0.2 / total, abs=1e-6)


def test_rows_are_not_valid_where_the_texts_differ() -> None:
    """Rows are invalid from the first difference to the next shared token boundary."""
    student, teacher = small([*LETTERS, b"c"]), small([*LETTERS, b"ab"])
    text, other = b"a" * 20 + b"b" * 20, b"a" * 20 + b"c" + b"b" * 20
    ids = [teacher.segment(text)[0]] * 19 + teacher.segment(b"ab") + teacher.segment(b"b" * 19)
    rows: list[Row] = [{}, *({1: 0.5, 2: 0.5} for _ in ids[1:])]
    topk = projected((student, teacher), {1: {1: 1.0}}, ids, rows, student.segment(other))
    assert np.flatnonzero(~topk.valid).tolist() == [0, 19, 20, 21]


def test_renormalized_predictions_have_no_rest() -> None:
    student, teacher = small([*LETTERS, b"ab"]), small([*LETTERS, b"ba"])
    predictions = top_k([[1, 1, 1]], [{}, {1: 1.0}, {2: 1.0}], None)
    unknown = predictions._replace(rest_logprob=np.full(3, np.nan, np.float32))
    back = {1: {1: 1.0}, 2: {2: 1.0}}
    projector = Projector(xtok.load_pair(student, teacher), map_of(back, teacher, student))
    topk = projector.project(unknown, *ids_and_bounds([[1, 1, 1]]), 9)
    assert np.isnan(topk.rest_logprob).all()
    assert [*map(sorted, topk_rows(topk))] == [[], [3], [2]]


def test_maps_of_other_pairs_are_refused() -> None:
    student, teacher = small(LETTERS), small([*LETTERS, b"ab"])
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(4, 3\)"):
        Projector(xtok.load_pair(student, teacher), map_of({}, student, teacher))
