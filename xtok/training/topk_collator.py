"""A data collator for the stored predictions that `xtok project` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import checked, checked_projected, fill_null
from xtok.predictions.topk import TopK
from xtok.tokenizers.table import MAX_WIDTH
from xtok.training.batches import Batch, StoredTopK
from xtok.training.rows import IGNORED, check_length, checked_columns, read_flags, read_ids, stack


@dataclass(frozen=True, kw_only=True)
class TopKCollator:
    """Builds a batch for the loss `topk-kl` from rows of stored predictions.

    A sample is a mapping of lists, such as a row of `xtok project`'s Parquet file. `input_ids` are
    student ids. For each token, `topk_ids` and `topk_logprobs` contain the candidates, and
    `rest_logprob` contains the logarithm of the remaining probability. If `rest_logprob` is None,
    the remaining probability is 1 minus the sum of the candidates' probabilities. Entry i of a list
    predicts token i, so the first entry is empty or None. All tokens with candidates contribute to
    the loss, unless `valid`, `loss_mask` or, without a `loss_mask`, a label of -100 in `labels`
    excludes a token. Rows contain no padding. The `Batch` contains one teacher, which has only the
    key `stored`.
    """

    max_length: int | None = None  # maximum number of tokens per row; None: no limit
    pad_id: int = 0  # pad id of `input_ids`

    pairs: ClassVar[list[None]] = [None]

    def __post_init__(self) -> None:
        check_length(self.max_length)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch for the given rows.

        Raises:
            ValueError: if rows or columns are missing or invalid.
        """
        if not rows:
            raise ValueError("a batch needs at least one sample")
        for row in rows:
            named = row if isinstance(row, Mapping) else {}
            if missing := [name for name in _NEEDED if named.get(name) is None]:
                raise ValueError(f"a row has no {missing[0]}")
        counts = (len(ids) for row in rows for ids in row["topk_ids"] if ids is not None)
        width = max(counts, default=0)
        columns = [self._columns(row, max(1, width)) for row in rows]

        def padded(name: str, fill: float = 0) -> torch.Tensor:
            return stack([c[name][: self.max_length] for c in columns], fill)

        stored = StoredTopK(
            top_ids=padded("top_ids"), top_logprobs=padded("top_logprobs", -np.inf),
            rest_logprob=padded("rest_logprob", -np.inf), valid=padded("valid"),
        )  # fmt: skip
        return {
            "input_ids": padded("input_ids", self.pad_id), "labels": padded("labels", IGNORED),
            "attention_mask": padded("attention_mask"), "teachers": [{"stored": stored}],
        }  # fmt: skip

    def _columns(self, row: Mapping[str, Any], width: int) -> dict[str, NDArray[Any]]:
        ids, columns = read_ids(row["input_ids"], "input_ids"), checked_columns(row, _PER_TOKEN)
        topk = _checked_topk(columns, ids)
        counts = np.diff(topk.starts)
        top_ids, top_logprobs = pad_candidates(counts, topk.ids, topk.logprobs, width)
        is_target = read_flags(columns, "loss_mask", len(ids))
        return {
            "input_ids": ids, "attention_mask": np.ones(len(ids), np.int64),
            "labels": np.where(is_target, ids, IGNORED),
            "top_ids": top_ids, "top_logprobs": top_logprobs,
            "rest_logprob": np.where(topk.valid, topk.rest_logprob, np.float32(-np.inf)),
            "valid": read_flags(columns, "valid", len(ids)) & is_target & topk.valid,
        }  # fmt: skip


_NEEDED = ("input_ids", "topk_ids", "topk_logprobs")
_PER_TOKEN = ("topk_ids", "topk_logprobs", "rest_logprob", "valid", "loss_mask")


def _checked_topk(columns: Mapping[str, Any], token_ids: NDArray[np.int64]) -> TopK:
    lists = [[() if x is None else x for x in columns[name]] for name in _NEEDED[1:]]
    counts, others = ([len(best) for best in column] for column in lists)
    if counts != others:
        raise ValueError("topk_ids and topk_logprobs have different numbers of candidates")
    ids, logprobs = map(chain.from_iterable, lists)
    flat, values = read_ids([*ids], "topk_ids"), np.array(fill_null(logprobs), np.float32)
    values[flat == -1] = -np.inf
    nothing = np.full(len(token_ids), np.nan, np.float32)
    rest = np.array(columns.get("rest_logprob", nothing), np.float32)  # None becomes NaN
    bounds = np.array([0, len(token_ids)])
    topk = TopK(token_ids, bounds, offsets_of(counts), flat, values, rest, nothing)  # type: ignore[arg-type]
    return (checked_projected if "rest_logprob" in columns else checked)(topk, MAX_WIDTH)


def pad_candidates(
    counts: NDArray[np.int64], ids: NDArray[Any], logprobs: NDArray[Any], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Pad concatenated candidates to `[rows, width]` with the id 0 and the log-probability −∞."""
    filled = np.arange(width) < counts[:, None]
    top_ids = np.zeros(filled.shape, np.int64)
    top_logprobs = np.full(filled.shape, -np.inf, np.float32)
    top_ids[filled], top_logprobs[filled] = ids, logprobs
    return top_ids, top_logprobs
