"""Predictions of one sequence from a server, with the ranks of its realized tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import without_null
from xtok.predictions.topk import TopK, rows_of

MIN_REST = 2.0**-24
"""Minimum probability of all tokens outside the candidates, so that none is impossible."""


class RankedTopK(NamedTuple):
    """Predictions of one sequence, and the rank of each realized token. Row 0 is empty."""

    topk: TopK  # one document; `realized_logprob` is finite except for the first token
    ranks: NDArray[np.int64]  # [S]


def ranked_topk(
    ids: Sequence[int],
    rows: Sequence[Mapping[int, Any]],
    logprobs: Iterable[float | None],
    ranks: Sequence[int],
    own: Iterable[float | None] | None = None,
) -> RankedTopK:
    """Build predictions from the rows of a response: a mapping by candidate id for each token.

    `logprobs` are flat, for all candidates; None stands for −∞. `own` contains the realized
    log-probabilities if the format returns them separately.

    Raises:
        ValueError: if rows are missing or empty, or a candidate is not an id.
    """
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} rows for {len(ids)} ids")
    if not all(rows[1:]):
        empty = [bool(row) for row in rows].index(False, 1)
        raise ValueError(f"token {empty} has no candidates")
    starts = offsets_of([*map(len, rows)])
    candidates = np.fromiter(chain.from_iterable(rows), np.int64, starts[-1])
    outside = candidates[(candidates < 0) | (candidates >= 1 << 31)]
    if len(outside):
        raise ValueError(f"{outside[0]} is not a token id")
    unknown = np.full(len(ids), np.nan, np.float32)
    with np.errstate(over="ignore"):  # infinite values are errors later
        values, realized = (
            unknown if of is None else np.array(without_null(of), np.float64).astype(np.float32)
            for of in (logprobs, own)
        )
    topk = TopK(
        np.array(ids, np.int32), np.array([0, len(ids)]), starts, candidates.astype(np.int32),
        values, unknown, realized,
    )  # fmt: skip
    return RankedTopK(topk, np.array(ranks, np.int64))


def completed(scores: RankedTopK, vocab_size: int) -> RankedTopK:
    """Fill in missing log-probabilities of realized tokens, which trainers do not support.

    A token without a value, such as −9999, gets an equal part of the rest.
    """
    topk = scores.topk
    is_unknown = np.isnan(topk.realized_logprob)
    is_unknown[:1] = False
    realized = np.where(is_unknown, _other_logprobs(topk, vocab_size), topk.realized_logprob)
    return scores._replace(topk=topk._replace(realized_logprob=realized.astype(np.float32)))


def ranked(topk: TopK) -> RankedTopK:
    """Add the rank of each realized token among the candidates."""
    row_of = rows_of(topk.starts)
    is_better = topk.logprobs > topk.realized_logprob[row_of]
    is_better &= topk.ids != topk.token_ids[row_of]
    ranks = np.bincount(row_of, is_better, len(topk.token_ids)).astype(np.int64) + 1
    return RankedTopK(topk, ranks)


def ranked_entries(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return candidates in the layout of servers: the realized token, then the `top_k` best.

    Short rows are filled up with the lowest other ids, each with an equal part of the rest.

    Returns:
        Ids, log-probabilities and ranks, `[S, K + 1]`, and the number of entries per row, `[S]`: 0
        for the first token, K if the realized token is one of the best, otherwise K + 1.
    """
    topk, requested = scores.topk, top_k
    top_k = min(requested, vocab_size - 1)  # besides the realized token
    count = len(topk.token_ids)
    row_of = rows_of(topk.starts)
    is_other = topk.ids != topk.token_ids[row_of]
    row_of, ids, values = row_of[is_other], topk.ids[is_other], topk.logprobs[is_other]
    bounds = offsets_of(np.bincount(row_of, minlength=count))
    column = np.arange(len(row_of)) - bounds[row_of]
    kept = column < top_k
    place = row_of[kept], column[kept] + 1
    all_ids = np.zeros((count, top_k + 1), np.int32)
    logprobs = np.full((count, top_k + 1), np.nan)
    all_ids[:, 0], logprobs[:, 0] = topk.token_ids, topk.realized_logprob
    all_ids[place], logprobs[place] = ids[kept], values[kept]
    _fill_short_rows(all_ids, logprobs, 1 + np.diff(bounds), _other_logprobs(topk, vocab_size))
    ranks = np.maximum(scores.ranks, 1 + (logprobs[:, 1:] > logprobs[:, :1]).sum(1))
    sizes = np.minimum(requested + (ranks > requested), top_k + 1)
    sizes[0] = 0
    others = np.arange(1, top_k + 1)
    order = np.concatenate([ranks[:, None], others + (others >= ranks[:, None])], axis=1)
    return all_ids, logprobs, order, np.maximum(sizes, np.arange(count) > 0)


def _other_logprobs(topk: TopK, vocab_size: int) -> NDArray[np.float64]:
    p = [np.exp(v, dtype=np.float64) for v in (topk.rest_logprob, topk.realized_logprob)]
    rest = np.fmin(p[0], 1 - np.nan_to_num(p[1]))  # NaN in a row without candidates
    left = np.maximum(1, vocab_size - np.diff(topk.starts))
    return np.asarray(np.log(np.maximum(rest, MIN_REST) / left))


def _fill_short_rows(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    sizes: NDArray[np.int64],
    other_logprobs: NDArray[np.float64],
) -> None:
    width = ids.shape[1]
    short = np.flatnonzero(sizes < width)
    if not len(short):
        return
    is_taken = np.zeros((len(short), 2 * width), np.bool_)
    row, column = np.nonzero((np.arange(width) < sizes[short, None]) & (ids[short] < 2 * width))
    is_taken[row, ids[short][row, column]] = True
    free = np.argsort(is_taken, axis=1, kind="stable")
    column = np.arange(width) - sizes[short, None]
    is_new = column >= 0
    row = np.nonzero(is_new)[0]
    last = logprobs[short, np.maximum(sizes[short] - 1, 0)]
    last = np.where(sizes[short] > 1, last, 0.0)
    values = np.minimum(other_logprobs[short], last)
    place = short[row], np.nonzero(is_new)[1]
    ids[place] = free[row, column[is_new]]
    logprobs[place] = values[row]


def logprobs_of_ids(
    scores: RankedTopK, chosen: Sequence[Sequence[int]], vocab_size: int
) -> list[list[float]]:
    """Return the log-probabilities of the chosen ids of each row."""
    topk = scores.topk
    ids, logprobs, starts = topk.ids.tolist(), topk.logprobs.tolist(), topk.starts.tolist()
    tokens, realized = topk.token_ids.tolist(), topk.realized_logprob.tolist()
    of_others = _other_logprobs(topk, vocab_size).tolist()
    rows = []
    for (begin, end), row, other, token, logprob in zip(
        pairwise(starts), chosen, of_others, tokens, realized, strict=True
    ):
        known = dict(zip(ids[begin:end], logprobs[begin:end], strict=True)) if row else {}
        known[token] = logprob
        rows.append([known.get(i, other) for i in row])
    return rows
