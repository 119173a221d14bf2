"""Validation of predictions: valid rows pass, and typical mistakes are found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from wrong_predictions import WRONG, Rows, T, V, moved, teacher_rows

from xtok.predictions.checked import PredictionError, checked
from xtok.predictions.topk import TopK


def refusal(text: Any, ids: Rows, logprobs: Rows, width: int = V) -> str:
    """Return the reason for which a document is rejected, or "". The first row is ignored."""
    starts = np.cumsum([0, 0, *map(len, ids[1:])])
    nothing = np.full(len(text), np.nan, np.float32)
    flat = np.concatenate(ids[1:]), np.concatenate(logprobs[1:]).astype(np.float32)
    topk = TopK(text, np.array([0, len(text)]), starts, *flat, nothing, nothing)
    try:
        checked(topk, width)
    except PredictionError as error:
        return error.problem
    return ""


def bfloat16(logprobs: Any) -> Any:
    bits = np.asarray(logprobs, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def test_valid_rows_of_any_teacher_are_accepted() -> None:
    """Rows in vLLM's flat layout and rows in half precision are valid as well."""
    for seed in range(100):
        text, ids, logprobs, _ = teacher_rows(seed, k=(4, 8, 20, 64)[seed % 4])
        for stored in (np.float32, np.float16, bfloat16):
            assert refusal(text, ids, [stored(values) for values in logprobs]) == ""
    flat = [np.full(8, -math.log(V))] * T
    for stored in (np.float16, bfloat16):
        rounded = [stored(values) for values in flat]
        assert refusal(text, [np.arange(8)] * T, rounded) == ""


@pytest.mark.parametrize("name", WRONG)
def test_impossible_rows_are_refused(name: str) -> None:
    refused = sum(bool(refusal(*WRONG[name](*teacher_rows(seed)))) for seed in range(100))
    assert refused >= 95


def test_each_document_is_compared_separately() -> None:
    """Only one of 12 documents is shifted; each has enough rows for a reliable decision."""
    caches = [teacher_rows(seed) for seed in range(12)]
    bad = list(caches)
    bad[7] = (caches[7][0], moved(caches[7][1], 1), moved(caches[7][2], 1), caches[7][3])
    for documents in (caches, bad):
        text = np.concatenate([document[0] for document in documents])
        counts = [n for document in documents for n in (0, *map(len, document[1][1:]))]
        ids, logprobs = (
            np.concatenate([row for document in documents for row in document[part][1:]])
            for part in (1, 2)
        )
        nothing = np.full(len(text), np.nan, np.float32)
        bounds = np.arange(13) * T
        starts = np.cumsum([0, *counts])
        topk = TopK(text, bounds, starts, ids, logprobs.astype(np.float32), nothing, nothing)
        if documents is caches:
            checked(topk, V)
            continue
        with pytest.raises(PredictionError, match="shifted by one") as error:
            checked(topk, V)
        assert (error.value.row, error.value.is_document) == (7 * T, True)
