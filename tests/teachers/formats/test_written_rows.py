"""Projected rows in the columns and lines of other programs."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from naive_projecting import top_k

from xtok.teachers.formats import axolotl, distillkit, vllm
from xtok.teachers.formats.columns import StudentSide
from xtok.teachers.formats.documents import Documents

STORED = Documents(
    top_k([[5, 6, 7], [4, 8]], [{}, {6: 0.5, 2: 0.25}, {9: 0.5}, {}, {}], None),
    {"id": pyarrow.array(["a", None])},
    ["row 0", "row 1"],
    np.array([False, True, True, True, True]),
)
TO = StudentSide(model="student", width=2, pad_id=99)


def rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return round(values, 4) if isinstance(values, float) else values


def test_axolotls_columns_predict_the_next_token() -> None:
    """Row i predicts token i + 1, renormalized, as in `DataCollatorForKD` of Axolotl 0.19."""
    columns = axolotl.table(STORED, TO).to_pydict()
    assert rounded([columns[name] for name in columns]) == [
        ["a", None],
        [[5, 6, 7], [4, 8]],
        [[1, 1, 1], [1, 1]],
        [[-100, 6, 7], [4, 8]],
        [[[6, 2], [9, 99], [99, 99]], [[99, 99], [99, 99]]],
        [[[-0.4055, -1.0986], [0.0, -1e9], [-1e9, -1e9]], [[-1e9, -1e9], [-1e9, -1e9]]],
        [[[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 0]]],
    ]
    assert list(columns)[1:] == [
        *("input_ids", "attention_mask", "labels"),
        *("target_token_ids", "target_logprobs", "target_mask"),
    ]


def test_axolotls_columns_of_unlikely_candidates() -> None:
    """Their probabilities are 0 in float32, but the ratios of the probabilities are not."""
    topk = top_k([[5, 6]], [{}, {6: 0.5, 2: 0.5}], None)
    topk = topk._replace(logprobs=np.array([-200, -201], np.float32))
    table = axolotl.table(Documents(topk, {}, ["row 0"]), TO)
    assert rounded(table.to_pydict()["target_logprobs"]) == [[[-0.3133, -1.3133], [-1e9, -1e9]]]


def test_distillkits_columns_are_not_renormalized() -> None:
    """Row i predicts token i + 1, not renormalized; DistillKit masks row i by `labels[i]`."""
    columns = distillkit.table(STORED, TO).to_pydict()
    columns = {name: rounded(values) for name, values in columns.items()}
    assert columns == {
        "id": ["a", None],
        "input_ids": [[5, 6, 7], [4, 8]],
        "labels": [[5, 6, -100], [-100, -100]],
        "token_ids": [[[6, 2], [9, 99]], [[99, 99]]],
        "top_values": [[[-0.6931, -1.3863], [-0.6931, -1e4]], [[-1e4, -1e4]]],
    }


def test_vllms_lines_are_ordered_by_rank() -> None:
    """Entries are ordered by rank and include the text's own token; the first token has null.

    The own token 7 is not a candidate, so it is at most as likely as the last candidate.
    """
    realized = np.array([np.nan, -0.7, -0.6, np.nan, np.nan], np.float32)
    topk = STORED.topk._replace(realized_logprob=realized)
    first, second = map(json.loads, vllm.lines(STORED._replace(topk=topk), "student"))
    [choice] = first["choices"]
    assert (first["id"], first["model"], choice["prompt_token_ids"]) == ("a", "student", [5, 6, 7])
    nothing, *entries = choice["prompt_logprobs"]
    assert nothing is None
    assert [
        [(i, e["rank"], round(e["logprob"], 4)) for i, e in row.items()] for row in entries
    ] == [
        [("6", 1, -0.6931), ("2", 2, -1.3863)],
        [("9", 1, -0.6931), ("7", 2, -0.6931)],
    ]
    assert second["choices"][0]["prompt_logprobs"] == [None, {}]


def test_rows_of_vllms_lines_sum_to_at_most_one() -> None:
    """A realized token that is not a candidate has at most the rest of its row, if it is known."""
    topk = top_k([[5, 7, 7, 7, 7]], [{}, *[{6: 0.5, 2: 0.25}] * 4], None)
    topk = topk._replace(
        rest_logprob=np.log([1, 0.25, 0.25, 2.0**-30, np.nan]).astype(np.float32),
        realized_logprob=np.log([1, 0.125, 0.9, 0.9, 0.9]).astype(np.float32),
    )
    [line] = map(json.loads, vllm.lines(Documents(topk, {}, ["row 0"]), "student"))
    entries = [row["7"] for row in line["choices"][0]["prompt_logprobs"][1:]]
    assert [entry["rank"] for entry in entries] == [3, 3, 3, 3]
    probabilities = [math.exp(entry["logprob"]) for entry in entries]
    assert probabilities == pytest.approx([0.125, 0.25, 2.0**-24, 0.25])


def test_vllms_lines_are_json() -> None:
    """NaN and infinity are null, also within lists."""
    columns = {
        "score": pyarrow.array([math.nan, 0.5]),
        "scores": pyarrow.array([[1.0, -math.inf], None]),
    }
    unknown = STORED.topk._replace(realized_logprob=np.full(5, np.nan, np.float32))
    lines = vllm.lines(STORED._replace(topk=unknown, columns=columns), "student")
    first, second = map(json.loads, lines)
    assert (first["score"], first["scores"]) == (None, [1.0, None])
    assert (second["score"], second["scores"]) == (0.5, None)
