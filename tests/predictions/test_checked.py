"""Validation of predictions: valid rows pass, and typical mistakes are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from wrong_predictions import MISTAKES, Rows, T, V, random_rows, shifted

from xtok.predictions.checked import PredictionError, checked, checked_projected
from xtok.predictions.topk import TopK


def predictions(
    *rows: dict[int, float], token_ids: list[int], rest: list[float] | None = None,
    realized: list[float] | None = None,
) -> TopK:  # fmt: skip
    """Return one document; each row maps candidates to probabilities. `rest` is also in them."""
    unknown = [math.nan] * len(token_ids)
    with np.errstate(divide="ignore"):
        return TopK(
            np.array(token_ids, np.int32),
            np.array([0, len(token_ids)]),
            np.cumsum([0, *map(len, rows)]),
            np.array([i for row in rows for i in row], np.int32),
            np.log([p for row in rows for p in row.values()]).astype(np.float32),
            np.log(rest or unknown).astype(np.float32),
            np.array(realized or unknown, np.float32),
        )


def probabilities(logprobs: Any) -> list[float | None]:
    """Return probabilities of six digits, and None for NaN."""
    return [None if math.isnan(p) else round(p, 6) for p in np.exp(logprobs).tolist()]


# The rules


def test_checked_rows_are_sorted_and_complete() -> None:
    """Equal candidates are sorted by id, and padding is removed. The rest comes from the sum."""
    row = {3: 0.25, 2: 0.25, 0: 0.0, 1: 0.5}
    topk = checked(predictions({}, row, {1: 0.75}, token_ids=[4, 2, 1]), 5)
    assert topk.starts.tolist() == [0, 0, 3, 4]
    assert topk.ids.tolist() == [1, 2, 3, 1]
    assert probabilities(topk.logprobs) == [0.5, 0.25, 0.25, 0.75]
    assert probabilities(topk.rest_logprob) == [None, 0.0, 0.25]
    assert probabilities(topk.realized_logprob) == [None, 0.25, 0.75]


def test_placeholders_are_not_values() -> None:
    """0.0 is a placeholder only at the first token; the candidates replace other placeholders."""
    rows = predictions({}, {2: 1.0}, {1: 0.5}, token_ids=[4, 2, 1], realized=[0, 0, -9999])
    padded = rows._replace(
        starts=np.array([0, 0, 2, 4]),
        ids=np.array([2, 0, 1, 0], np.int32),
        logprobs=np.array([0, -9999, math.log(0.5), -99999], np.float32),
    )
    for topk in (rows, padded):
        result = checked(topk, 5)
        assert result.ids.tolist() == [2, 1]
        assert probabilities(result.realized_logprob) == [None, 1.0, 0.5]


def test_first_token_has_no_prediction() -> None:
    """A certain first token is a placeholder. A document can also start within a text."""
    rows = {2: 0.5}, {1: 0.5}
    result = checked(predictions({4: 1.0}, *rows, token_ids=[4, 2, 1]), 5)
    assert (result.starts.tolist(), result.ids.tolist()) == ([0, 0, 1, 2], [2, 1])
    shifted = predictions({4: 0.5}, *rows, token_ids=[4, 2, 1])
    with pytest.raises(PredictionError, match="row 0") as error:
        checked(shifted, 5)
    assert error.value.row == 0
    assert checked(shifted, 5, begins=False).ids.tolist() == [4, 2, 1]


@pytest.mark.parametrize(
    ("row", "options", "word"),
    [
        ({5: 0.5}, {}, "id 5"),
        ({-1: 0.5}, {}, "id -1"),
        ({1: math.nan}, {}, "nan"),
        ({1: 1.5}, {}, "0.4055"),
        ({1: 0.75, 0: 0.5}, {}, "1.25"),
        ({0: 0.25, 3: 0.125}, {}, "0.375"),  # the three others have at most 0.125 each
        ({1: 0.5}, {"rest": [math.nan, math.nan, 0.25]}, "0.75"),
        ({1: 0.5}, {"rest": [math.nan, math.nan, 0.75]}, "1.25"),
        ({0: 0.5}, {"realized": [math.nan, math.nan, math.log(0.75)]}, "1.25"),
        ({1: 0.5}, {"realized": [math.nan, math.nan, -math.inf]}, "-inf"),
        ({1: 0.5}, {"realized": [math.nan, math.nan, 0.5]}, "0.5"),
    ],
)
def test_error_names_the_row(row: dict[int, float], options: dict[str, Any], word: str) -> None:
    good = predictions({}, {2: 0.5}, {1: 0.5}, token_ids=[4, 2, 1])
    assert checked(good, 5).valid.tolist() == [False, True, True]
    with pytest.raises(PredictionError, match=word) as error:
        checked(predictions({}, {2: 0.5}, row, token_ids=[4, 2, 1], **options), 5)
    assert (error.value.row, error.value.is_document) == (2, False)


def test_candidate_that_occurs_twice() -> None:
    topk = predictions({}, {2: 0.5}, {1: 0.25, 0: 0.25}, token_ids=[4, 2, 1])
    twice = topk._replace(ids=np.array([2, 1, 1], np.int32))
    with pytest.raises(PredictionError, match="candidate 1") as error:
        checked(twice, 5)
    assert error.value.row == 2


def test_realized_values_can_differ_in_less_than_half_of_the_rows_of_a_file() -> None:
    """Programs round differently. A response of a server contains the same value twice."""
    rows: list[dict[int, float]] = [{}, {2: 0.5}, {1: 0.5}, {3: 0.5}]
    half, tenth = math.log(0.5), math.log(0.1)
    for realized, row in ([tenth, half, half], None), ([half, tenth, tenth], 2):
        topk = predictions(*rows, token_ids=[4, 2, 1, 3], realized=[math.nan, *realized])
        if row is None:
            assert probabilities(checked(topk, 5).realized_logprob) == [None, 0.1, 0.5, 0.5]
        else:
            with pytest.raises(PredictionError) as error:
                checked(topk, 5)
            assert error.value.row == row
        with pytest.raises(PredictionError) as error:
            checked(topk, 5, is_response=True)
        assert error.value.row == (row or 1)


def test_each_realized_token_of_a_response_is_a_candidate() -> None:
    realized = [math.nan, math.log(0.5), math.log(0.25)]
    topk = predictions({}, {2: 0.5}, {0: 0.5}, token_ids=[4, 2, 1], realized=realized)
    assert probabilities(checked(topk, 5).realized_logprob) == [None, 0.5, 0.25]
    with pytest.raises(PredictionError, match="realized token 1") as error:
        checked(topk, 5, is_response=True)
    assert error.value.row == 2


def test_projected_rows_can_lack_probability() -> None:
    """The rest of a projected row is stored, and not the complement of its candidates."""
    topk = predictions({}, {2: 0.5}, {1: 0.5}, token_ids=[4, 2, 1], rest=[math.nan, 0.25, 0.5])
    assert probabilities(checked_projected(topk, 5).rest_logprob) == [None, 0.25, 0.5]
    with pytest.raises(PredictionError, match=r"0\.75") as error:
        checked(topk, 5)
    assert error.value.row == 1


# Random teachers


Document = tuple[Any, Rows, Rows]
"""The ids of a text, and the candidates and log-probabilities of each row."""


def flat_topk(documents: Sequence[Document]) -> TopK:
    """Return the predictions of documents as flat arrays; the first row of each is omitted."""
    texts = [text for text, _, _ in documents]
    ids = [row for _, rows, _ in documents for row in rows[1:]]
    logprobs = [row for _, _, rows in documents for row in rows[1:]]
    sizes = [size for _, rows, _ in documents for size in (0, *map(len, rows[1:]))]
    token_ids = np.concatenate(texts)
    unknown = np.full(len(token_ids), np.nan, np.float32)
    return TopK(
        token_ids, np.cumsum([0, *map(len, texts)]), np.cumsum([0, *sizes]),
        np.concatenate(ids), np.concatenate(logprobs).astype(np.float32), unknown, unknown,
    )  # fmt: skip


def refusal(text: Any, ids: Rows, logprobs: Rows, width: int = V) -> str:
    """Return the reason for which a document is rejected, or ""."""
    try:
        checked(flat_topk([(text, ids, logprobs)]), width)
    except PredictionError as error:
        return error.problem
    return ""


def bfloat16(logprobs: Any) -> Any:
    bits = np.asarray(logprobs, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def test_valid_rows_of_any_teacher_are_accepted() -> None:
    """Rows in vLLM's flat layout and rows in half precision are valid as well."""
    for seed in range(100):
        text, ids, logprobs, _ = random_rows(seed, k=(4, 8, 20, 64)[seed % 4])
        for stored in (np.float32, np.float16, bfloat16):
            assert refusal(text, ids, [stored(values) for values in logprobs]) == ""
    flat = [np.full(8, -math.log(V))] * T
    for stored in (np.float16, bfloat16):
        rounded = [stored(values) for values in flat]
        assert refusal(text, [np.arange(8)] * T, rounded) == ""


NUM_REFUSED = {**dict.fromkeys(MISTAKES, 100), "another tokenizer": 98}


@pytest.mark.parametrize("name", MISTAKES)
def test_impossible_rows_are_refused(name: str) -> None:
    refused = sum(bool(refusal(*MISTAKES[name](*random_rows(seed)))) for seed in range(100))
    assert refused == NUM_REFUSED[name]


def random_documents() -> list[Document]:
    """Return 12 documents; each has enough rows for a reliable decision."""
    return [random_rows(seed)[:3] for seed in range(12)]


def test_several_documents_of_valid_rows_are_accepted() -> None:
    assert checked(flat_topk(random_documents()), V).bounds.tolist() == [*range(0, 13 * T, T)]


def test_each_document_is_compared_separately() -> None:
    """The error names the only document with shifted rows."""
    documents = random_documents()
    text, ids, logprobs = documents[7]
    documents[7] = text, shifted(ids, 1), shifted(logprobs, 1)
    with pytest.raises(PredictionError, match="shifted") as error:
        checked(flat_topk(documents), V)
    assert (error.value.row, error.value.is_document) == (7 * T, True)
