"""What a server says of one sequence: candidates by rank, the sequence's own tokens among them."""

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
"""The least share that tokens outside the candidates have together: none is impossible."""


class RankedTopK(NamedTuple):
    """Predictions of one sequence, and the rank of each of its tokens; row 0 is empty."""

    topk: TopK  # one document; `realized_logprob` is finite from the second token on
    ranks: NDArray[np.int64]  # [S], of each token itself


def ranked_topk(
    ids: Sequence[int],
    rows: Sequence[Mapping[int, Any]],
    logprobs: Iterable[float | None],
    ranks: Sequence[int],
    own: Iterable[float | None] | None = None,
) -> RankedTopK:
    """Return a server's rows of candidates by id, and the log-probabilities of all.

    Args:
        ids: that it was asked for.
        rows: of each id.
        logprobs: of all candidates, as JSON has them: null stands for −∞.
        ranks: of the ids themselves.
        own: their log-probabilities, where these are apart from the candidates.

    Raises:
        ValueError: if there are more or fewer rows than ids, or one says nothing, but the first.
    """
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} rows for {len(ids)} ids")
    if not all(rows[1:]):
        empty = [bool(row) for row in rows].index(False, 1)
        raise ValueError(f"it has no candidates for token {empty}")
    starts = offsets_of([*map(len, rows)])
    candidates = np.fromiter(chain.from_iterable(rows), np.int64, starts[-1])
    outside = candidates[(candidates < 0) | (candidates >= 1 << 31)]
    if len(outside):
        raise ValueError(f"{outside[0]} is not a token id")
    unknown = np.full(len(ids), np.nan, np.float32)
    with np.errstate(over="ignore"):  # what is infinite then is refused as such
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
    """Return scores with a value for each token after the first.

    One that no model said one of, as where a server writes −9999, has that of the tokens that are
    no candidates: an equal part of the rest. Trainers take no gaps.
    """
    topk = scores.topk
    is_unknown = np.isnan(topk.realized_logprob)
    is_unknown[:1] = False
    realized = np.where(is_unknown, _other_logprobs(topk, vocab_size), topk.realized_logprob)
    return scores._replace(topk=topk._replace(realized_logprob=realized.astype(np.float32)))


def ranked(topk: TopK) -> RankedTopK:
    """Return a document's predictions with the rank of each token among the candidates."""
    row_of = rows_of(topk.starts)
    is_better = topk.logprobs > topk.realized_logprob[row_of]
    is_better &= topk.ids != topk.token_ids[row_of]
    ranks = np.bincount(row_of, is_better, len(topk.token_ids)).astype(np.int64) + 1
    return RankedTopK(topk, ranks)


def ranked_entries(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return candidates as servers write them: the token itself, then the `top_k` best of each row.

    Where fewer are known, the lowest other ids follow, each with an equal part of the rest; the
    token itself is behind those that are likelier. A vocabulary of fewer ids has all of them.

    Returns:
        ids, log-probabilities and ranks, `[S, K + 1]`; and how many entries a row has, `[S]`: 0 for
        the first token, K where it is one of the best, or K + 1.
    """
    topk, wanted = scores.topk, top_k
    top_k = min(wanted, vocab_size - 1)  # besides the token itself
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
    sizes = np.minimum(wanted + (ranks > wanted), top_k + 1)
    sizes[0] = 0
    others = np.arange(1, top_k + 1)
    order = np.concatenate([ranks[:, None], others + (others >= ranks[:, None])], axis=1)
    return all_ids, logprobs, order, np.maximum(sizes, np.arange(count) > 0)


def _other_logprobs(topk: TopK, vocab_size: int) -> NDArray[np.float64]:
    """Return the log-probability of a token that is not a candidate, in each row."""
    p = [np.exp(v, dtype=np.float64) for v in (topk.rest_logprob, topk.realized_logprob)]
    rest = np.fmin(p[0], 1 - np.nan_to_num(p[1]))  # nothing is known of a row without candidates
    left = np.maximum(1, vocab_size - np.diff(topk.starts))
    return np.asarray(np.log(np.maximum(rest, MIN_REST) / left))


def _fill_short_rows(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    sizes: NDArray[np.int64],
    other_logprobs: NDArray[np.float64],
) -> None:
    """Fill rows that are short with the lowest ids that they do not have."""
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
    scores: RankedTopK, wanted: Sequence[Sequence[int]], vocab_size: int
) -> list[list[float]]:
    """Return the log-probabilities of the wanted ids of each row."""
    topk = scores.topk
    ids, logprobs, starts = topk.ids.tolist(), topk.logprobs.tolist(), topk.starts.tolist()
    tokens, realized = topk.token_ids.tolist(), topk.realized_logprob.tolist()
    of_others = _other_logprobs(topk, vocab_size).tolist()
    rows = []
    for (begin, end), row, other, token, logprob in zip(
        pairwise(starts), wanted, of_others, tokens, realized, strict=True
    ):
        known = dict(zip(ids[begin:end], logprobs[begin:end], strict=True)) if row else {}
        known[token] = logprob
        rows.append([known.get(i, other) for i in row])
    return rows
