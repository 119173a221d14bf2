"""A teacher's predictions in the student's tokens, beside plain twins and all that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from naive_projecting import (
    END,
    Bigrams,
    Projection,
    Row,
    map_of,
    rows_of,
    small,
    top_k,
)

from xtok.projecting.project import Projector, TopK
from xtok.tokenizers import Tokenizer

LETTERS = [b"a", b"b"]
words = st.lists(
    st.text("ab", min_size=2, max_size=4).map(str.encode), max_size=5, unique=True
).map(lambda more: LETTERS + more)


def shares(ids: Sequence[int]) -> st.SearchStrategy[dict[int, float]]:
    """Some of these ids, with probabilities that add up to 1."""
    weights = st.dictionaries(st.sampled_from(list(ids)), st.integers(1, 9), min_size=1)
    return weights.map(lambda row: {i: n / sum(row.values()) for i, n in row.items()})


@st.composite
def documents(draw: st.DrawFn, tokens: Sequence[bytes]) -> list[tuple[list[int], list[Row]]]:
    """Texts as tokens, none for the last or all followed by an end of text, and predictions."""
    text_ids = range(1, len(tokens) + 1)
    found = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.sampled_from(text_ids), min_size=1, max_size=6))
        ids += draw(st.sampled_from([[], [END]]))
        rows: list[Row] = [draw(shares([END, *text_ids])) for _ in ids]
        found.append((ids, [{}, *rows[1:]]))
    return found


def spelled(student: Tokenizer, ids: Sequence[int], tokens: Sequence[bytes]) -> list[int]:
    """The student's ids of a teacher's document; both have the same end of text."""
    text = b"".join(tokens[i] for i in ids)
    return student.segment(text) + [END] * (ids[-1] == END)


def assert_close(row: Row, want: Row) -> None:
    for i in row.keys() | want.keys():
        assert row.get(i, 0.0) == pytest.approx(want.get(i, 0.0), rel=1e-5, abs=1e-6)


def flat(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([i for row in rows for i in row], np.int32)
    return ids, np.cumsum([0, *map(len, rows)])


@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(st.data(), words, words, st.booleans(), st.sampled_from([1, 2, 3, 9]))
def test_every_row_is_what_the_rule_says(
    data: st.DataObject, ours: list[bytes], theirs: list[bytes], merges: bool, k: int
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
    projector = Projector(student, teacher.table, map_of(back, teacher, student), num_threads=2)
    found = projector.project(predictions, *flat(spellings), 99)

    known = rows_of(predictions)
    for row, all_of_it, i in zip(known, rows, predictions.token_ids.tolist(), strict=True):
        if i in all_of_it:
            row[i] = all_of_it[i]
    expected: list[dict[int, float]] = []
    begin = 0
    for ids, ours_of_it in zip(texts, spellings, strict=True):
        twin = Projection(ids, known[begin : begin + len(ids)], tokens, back, student)
        ends = np.cumsum([0, *(len(tokens[i]) for i in ids)])
        for start in np.cumsum([0, *(len(student.table[s]) for s in ours_of_it)])[:-1]:
            place = min(int(np.searchsorted(ends, start, side="right")) - 1, len(ids) - 1)
            expected.append(twin.at(place, int(start - ends[place])) or {})
        begin += len(ids)
    total = np.exp(found.rest_logprob.astype(np.float64))
    for row, want, rest in zip(rows_of(found), expected, total, strict=True):
        assert_close(row, want)
        if row:
            assert sum(row.values()) + rest == pytest.approx(1, abs=1e-5)
