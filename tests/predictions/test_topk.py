"""Predictions in flat arrays: selected rows, candidates and widths; concatenation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from xtok.predictions.topk import (
    TopK,
    candidate_indices,
    cut_to_width,
    document_starts,
    joined,
    keep_candidates,
    masses,
    segment_ids,
    take_rows,
)

NONE = math.nan

# Three documents, of which the second is empty: 5 6 7, nothing, 8 9. Rows 0 and 3 predict nothing.
TOPK = TopK(
    token_ids=np.array([5, 6, 7, 8, 9], np.int32),
    bounds=np.array([0, 3, 3, 5]),
    starts=np.array([0, 0, 2, 3, 3, 6]),
    ids=np.array([6, 2, 7, 9, 1, 3], np.int32),
    logprobs=np.array([-0.5, -1.5, -0.25, -0.75, -1.25, -2.5], np.float32),
    rest_logprob=np.array([NONE, -2.0, NONE, NONE, -math.inf], np.float32),
    realized_logprob=np.array([NONE, -0.5, -0.25, NONE, -0.75], np.float32),
)
NOTHING = take_rows(TOPK, np.array([], np.int64), np.array([], np.int32), np.array([0, 0]))


def lists(topk: TopK) -> dict[str, list[Any]]:
    """Return the arrays as lists, with None for NaN; check their dtypes."""
    assert [array.dtype for array in topk] == [array.dtype for array in TOPK]
    return {
        name: [None if math.isnan(value) else value for value in array.tolist()]
        for name, array in topk._asdict().items()
    }


def test_valid_rows_have_candidates() -> None:
    assert TOPK.valid.tolist() == [False, True, True, False, True]


def test_segments_and_documents_that_are_empty_have_no_items() -> None:
    assert segment_ids(TOPK.starts).tolist() == [1, 1, 2, 4, 4, 4]
    assert segment_ids(TOPK.bounds).tolist() == [0, 0, 0, 2, 2]
    assert document_starts(TOPK.bounds).tolist() == [0, 3]


def test_candidate_indices_of_row_minus_1_are_empty() -> None:
    starts, indices = candidate_indices(TOPK.starts, np.array([4, -1, 0, 1, 1]))
    assert starts.tolist() == [0, 3, 3, 3, 5, 7]
    assert indices.tolist() == [3, 4, 5, 0, 1, 0, 1]


def test_row_minus_1_has_no_prediction() -> None:
    rows, token_ids = np.array([4, -1, 1]), np.array([9, 0, 6], np.int32)
    assert lists(take_rows(TOPK, rows, token_ids, np.array([0, 2, 3]))) == {
        "token_ids": [9, 0, 6],
        "bounds": [0, 2, 3],
        "starts": [0, 3, 3, 5],
        "ids": [9, 1, 3, 6, 2],
        "logprobs": [-0.75, -1.25, -2.5, -0.5, -1.5],
        "rest_logprob": [-math.inf, None, -2.0],
        "realized_logprob": [-0.75, None, -0.5],
    }


def test_kept_candidates_keep_the_other_values_of_their_rows() -> None:
    kept = keep_candidates(TOPK, np.array([True, False, False, False, True, True]))
    assert lists(kept) == {
        **lists(TOPK),
        "starts": [0, 0, 1, 1, 1, 3],
        "ids": [6, 1, 3],
        "logprobs": [-0.5, -1.25, -2.5],
    }


def test_candidates_outside_the_width_move_to_the_rest() -> None:
    """An unknown rest stays unknown, and a row can lose its only candidate."""
    before = lists(TOPK)
    cut = cut_to_width(TOPK, 6)
    rest = float(np.float32(math.log(math.exp(-2.0) + math.exp(-0.5))))
    assert lists(cut) == {
        **before,
        "starts": [0, 0, 1, 1, 1, 3],
        "ids": [2, 1, 3],
        "logprobs": [-1.5, -1.25, -2.5],
        "rest_logprob": [None, rest, None, None, -0.75],
    }
    assert lists(TOPK) == before
    assert cut_to_width(TOPK, 10) is TOPK


def test_sums_of_candidates() -> None:
    assert masses(TOPK).tolist() == pytest.approx([0, 0.829661, 0.778801, 0, 0.840956], abs=1e-6)
    assert masses(NOTHING).dtype == np.float64


def test_joined_predictions_continue_the_offsets() -> None:
    part = take_rows(TOPK, np.array([-1, 2]), np.array([3, 7], np.int32), np.array([0, 2]))
    assert lists(joined([part, NOTHING, TOPK])) == {
        "token_ids": [3, 7, 5, 6, 7, 8, 9],
        "bounds": [0, 2, 2, 5, 5, 7],
        "starts": [0, 0, 1, 1, 3, 4, 4, 7],
        "ids": [7, 6, 2, 7, 9, 1, 3],
        "logprobs": [-0.25, -0.5, -1.5, -0.25, -0.75, -1.25, -2.5],
        "rest_logprob": [None, None, None, -2.0, None, None, -math.inf],
        "realized_logprob": [None, -0.25, None, -0.5, -0.25, None, -0.75],
    }


def test_an_empty_document_has_no_rows() -> None:
    empty = lists(NOTHING)
    nothing: dict[str, list[Any]] = {name: [] for name in empty}
    assert empty == {**nothing, "bounds": [0, 0], "starts": [0]}
    assert lists(joined([NOTHING, NOTHING])) == {**empty, "bounds": [0, 0, 0]}
    assert cut_to_width(NOTHING, 1) is NOTHING
