"""What a teacher said of a text, a row of a cache in its own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.training.losses.boundaries import ROUNDING

LAYOUT = "for the first token, which nothing predicts: row i must be of token i, not of the next"
"""What is wrong with a row that predicts its first token."""


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
        """Read a row of a cache.

        Raises:
            ValueError: if columns differ in length, the first token has a prediction, or a token is
                more than certain.
        """
        ids = np.asarray(row["input_ids"], np.int64)
        names = ("realized_logprob", "topk_ids", "topk_logprobs", "loss_mask")
        columns = {name: row[name] for name in names if row.get(name) is not None}
        for name, values in columns.items():
            if len(values) != len(ids):
                raise ValueError(f"{name} has {len(values)} rows for {len(ids)} input_ids")
        counts = np.array(
            [len(best) for best in columns.get("topk_ids", [[]] * len(ids))], np.int64
        )
        if [len(best) for best in columns.get("topk_logprobs", [[]] * len(ids))] != counts.tolist():
            raise ValueError("topk_ids and topk_logprobs have different numbers of candidates")
        if counts[:1].any():
            raise ValueError(f"topk_ids begin with candidates {LAYOUT}")
        flat_ids, flat_logprobs = (
            chain.from_iterable(columns.get(name, ())) for name in ("topk_ids", "topk_logprobs")
        )
        top_ids = np.fromiter(flat_ids, np.int64)
        top_logprobs = np.fromiter(flat_logprobs, np.float32)
        if "realized_logprob" in columns:
            realized = np.array(columns["realized_logprob"], np.float32)  # None becomes NaN
            if not np.isnan(realized[:1]).all():
                raise ValueError(f"realized_logprob begins with a value {LAYOUT}")
        else:
            realized = np.full(len(ids), np.nan, np.float32)
            of = np.repeat(np.arange(len(ids)), counts)
            own = top_ids == ids[of]
            realized[of[own]] = top_logprobs[own]
        if (wrong := realized > ROUNDING).any():
            raise ValueError(f"realized_logprob has {realized[wrong][0]:.4g}, and is at most 0")
        is_target = np.asarray(columns.get("loss_mask", np.ones(len(ids))), np.bool_).copy()
        is_target[1:] &= ~np.isnan(realized[1:])
        return Told(ids, is_target, realized, counts, top_ids, top_logprobs)


def pad_candidates(
    counts: NDArray[np.int64], ids: NDArray[Any], logprobs: NDArray[Any], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return candidates that lie one after another as rows, `[rows, width]`: id 0, −inf behind."""
    filled = np.arange(width) < counts[:, None]
    top_ids = np.zeros(filled.shape, np.int64)
    top_logprobs = np.full(filled.shape, -np.inf, np.float32)
    top_ids[filled], top_logprobs[filled] = ids, logprobs
    return top_ids, top_logprobs
