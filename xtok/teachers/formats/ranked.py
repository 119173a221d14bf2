"""Predictions for one sequence from a server, with the ranks of the realized tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.topk import TopK, segment_ids
from xtok.teachers.formats.flat_values import JsonRow, json_document

MIN_REST = 2.0**-24
"""Minimum total probability of the tokens outside the candidates, so that no token has
probability 0."""


class RankedTopK(NamedTuple):
    """Predictions for one sequence, and the rank of each realized token. Row 0 is empty."""

    topk: TopK  # one document; `completed` fills in missing values of `realized_logprob`
    ranks: NDArray[np.int64]  # [S]


def ranked_topk(
    ids: Sequence[int],
    rows: Sequence[JsonRow],
    ranks: Sequence[int],
    hint: str,
    own: Sequence[float | None] = (),
) -> RankedTopK:
    """Build predictions for `ids` from the rows of a response; see `json_document`."""
    if not all(rows[1:]):
        empty = [bool(row) for row in rows].index(False, 1)
        raise ValueError(f"token {empty} has no candidates")
    topk = json_document([*ids], rows, "its response", hint, own)
    return RankedTopK(topk, np.array(ranks, np.int64))


def completed(scores: RankedTopK, vocab_size: int) -> RankedTopK:
    """Fill in missing log-probabilities of the text's tokens, because trainers require all values.

    The rest of a row is divided equally among the tokens that are not candidates. A token without a
    value gets the same part as every other token that is not a candidate.
    """
    topk = scores.topk
    is_unknown = np.isnan(topk.realized_logprob)
    is_unknown[:1] = False
    realized = np.where(is_unknown, _other_logprobs(topk, vocab_size), topk.realized_logprob)
    return scores._replace(topk=topk._replace(realized_logprob=realized.astype(np.float32)))


def ranked(topk: TopK) -> RankedTopK:
    """Add the rank of each realized token among the candidates."""
    row_ids = segment_ids(topk.starts)
    is_better = topk.logprobs > topk.realized_logprob[row_ids]
    is_better &= topk.ids != topk.token_ids[row_ids]
    ranks = np.bincount(row_ids, is_better, len(topk.token_ids)).astype(np.int64) + 1
    return RankedTopK(topk, ranks)


def ranked_entries(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the entries of a server's response: the text's token, then the best candidates.

    If a row has fewer than `top_k` candidates, the lowest other ids are added. Each added id gets
    an equal part of the rest (see `completed`), but is never more likely than a candidate.

    Returns:
        ids, log-probabilities and ranks, `[S, K + 1]`, and the number of valid entries in each row,
        `[S]`. The first row has no valid entries. Each other row has K valid entries if the text's
        token is among the K best tokens, otherwise K + 1.
    """
    topk, requested = scores.topk, top_k
    top_k = min(requested, vocab_size - 1)  # in addition to the realized token
    count = len(topk.token_ids)
    row_ids = segment_ids(topk.starts)
    is_other = topk.ids != topk.token_ids[row_ids]
    row_ids, ids, values = row_ids[is_other], topk.ids[is_other], topk.logprobs[is_other]
    bounds = offsets_of(np.bincount(row_ids, minlength=count))
    column = np.arange(len(row_ids)) - bounds[row_ids]
    is_kept = column < top_k
    cells = row_ids[is_kept], column[is_kept] + 1
    all_ids = np.zeros((count, top_k + 1), np.int32)
    logprobs = np.full((count, top_k + 1), np.nan)
    all_ids[:, 0], logprobs[:, 0] = topk.token_ids, topk.realized_logprob
    all_ids[cells], logprobs[cells] = ids[is_kept], values[is_kept]
    _fill_short_rows(all_ids, logprobs, 1 + np.diff(bounds), _other_logprobs(topk, vocab_size))
    ranks = np.maximum(scores.ranks, 1 + (logprobs[:, 1:] > logprobs[:, :1]).sum(1))
    sizes = np.minimum(requested + (ranks > requested), top_k + 1)
    sizes[0] = 0
    others = np.arange(1, top_k + 1)
    order = np.concatenate([ranks[:, None], others + (others >= ranks[:, None])], axis=1)
    return all_ids, logprobs, order, np.maximum(sizes, np.arange(count) > 0)


def _other_logprobs(topk: TopK, vocab_size: int) -> NDArray[np.float64]:
    p = [np.exp(v, dtype=np.float64) for v in (topk.rest_logprob, topk.realized_logprob)]
    rest = np.fmin(p[0], 1 - np.nan_to_num(p[1]))  # NaN in rows without candidates
    num_left = np.maximum(1, vocab_size - np.diff(topk.starts))
    return np.asarray(np.log(np.maximum(rest, MIN_REST) / num_left))


def _fill_short_rows(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    sizes: NDArray[np.int64],
    other_logprobs: NDArray[np.float64],
) -> None:
    width = ids.shape[1]
    for row in np.flatnonzero(sizes < width).tolist():
        size = int(sizes[row])
        listed = {*ids[row, :size].tolist()}
        free = [i for i in range(width) if i not in listed]
        ids[row, size:] = free[: width - size]
        last = logprobs[row, size - 1] if size > 1 else 0.0
        logprobs[row, size:] = min(other_logprobs[row], last)


def lookup_logprobs(
    scores: RankedTopK, chosen: Sequence[Sequence[int]], vocab_size: int
) -> list[list[float]]:
    """Return the log-probabilities of the chosen ids in each row."""
    topk, other_logprobs = scores.topk, _other_logprobs(scores.topk, vocab_size).tolist()
    tokens, realized = topk.token_ids.tolist(), topk.realized_logprob.tolist()
    ids, logprobs = topk.ids.tolist(), topk.logprobs.tolist()
    rows = []
    for n, (start, end) in enumerate(pairwise(topk.starts.tolist())):
        by_id = dict(zip(ids[start:end], logprobs[start:end], strict=True))
        by_id[tokens[n]] = realized[n]
        rows.append([by_id.get(i, other_logprobs[n]) for i in chosen[n]])
    return rows
