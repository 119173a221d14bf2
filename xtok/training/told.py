"""What a teacher said of a text, a row of a cache in its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Told(NamedTuple):
    """What a teacher said of a text of T of its tokens."""

    ids: NDArray[np.int64]  # [T]
    is_target: NDArray[np.bool_]  # [T], of the tokens that have a prediction
    realized: NDArray[np.float32]  # [T], NaN for none
    counts: NDArray[np.int64]  # [T], candidates of each token
    top_ids: NDArray[np.int64]  # [candidates]
    top_logprobs: NDArray[np.float32]  # [candidates]

    @staticmethod
    def of(row: Mapping[str, Any]) -> Told:
        """Read a row of a cache."""
        names = ("realized_logprob", "topk_ids", "topk_logprobs", "loss_mask")
        ids, columns = np.asarray(row["input_ids"], np.int64), columns_of(row, names)
        counts, top_ids, top_logprobs = candidates_of(columns, len(ids))
        if "realized_logprob" in columns:
            realized = np.array(columns["realized_logprob"], np.float32)  # None becomes NaN
        else:
            realized = np.full(len(ids), np.nan, np.float32)
            of = np.repeat(np.arange(len(ids)), counts)
            own = top_ids == ids[of]
            realized[of[own]] = top_logprobs[own]
        is_target = np.asarray(columns.get("loss_mask", np.ones(len(ids))), np.bool_).copy()
        is_target[1:] &= ~np.isnan(realized[1:])
        return Told(ids, is_target, realized, counts, top_ids, top_logprobs)


def columns_of(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of these names that a row has, each with a value per token."""
    columns = {name: row[name] for name in names if row.get(name) is not None}
    for name, values in columns.items():
        if len(values) != len(row["input_ids"]):
            raise ValueError(f"{name} has {len(values)} rows for {len(row['input_ids'])} input_ids")
    return columns


def candidates_of(
    columns: Mapping[str, Any], num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return how many candidates each token has, and, flat, their ids and log-probabilities."""
    lists = [columns.get(name, [[]] * num_tokens) for name in ("topk_ids", "topk_logprobs")]
    counts, others = ([len(best) for best in column] for column in lists)
    if counts != others:
        raise ValueError("topk_ids and topk_logprobs have different numbers of candidates")
    ids, logprobs = map(chain.from_iterable, lists)
    return np.array(counts, np.int64), np.fromiter(ids, np.int64), np.fromiter(logprobs, np.float32)


def pad_candidates(
    counts: NDArray[np.int64], ids: NDArray[Any], logprobs: NDArray[Any], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return candidates that lie one after another as rows, `[rows, width]`: id 0, −inf behind."""
    filled = np.arange(width) < counts[:, None]
    top_ids = np.zeros(filled.shape, np.int64)
    top_logprobs = np.full(filled.shape, -np.inf, np.float32)
    top_ids[filled], top_logprobs[filled] = ids, logprobs
    return top_ids, top_logprobs
