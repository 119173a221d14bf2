"""A teacher's predictions as arrays, for many documents, and what is chosen and joined of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of


class TopK(NamedTuple):
    """Predictions for documents that are laid one after another; row i is of token i.

    Row i is what is predicted for token i from the tokens before it. Log-probabilities are natural,
    and true ones: not normalized over the candidates.
    """

    token_ids: NDArray[np.int32]  # [N], the documents' tokens
    bounds: NDArray[np.int64]  # [documents + 1]; document d is token_ids[bounds[d]:bounds[d + 1]]
    # [N + 1]; candidates of row i are ids[starts[i]:starts[i + 1]], none where nothing is predicted
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]  # [nnz], the best first in a row, ties by the lower id; none twice
    logprobs: NDArray[np.float32]  # [nnz]
    rest_logprob: NDArray[np.float32]  # [N], log(1 - sum of the candidates), −inf for none; NaN
    # where it is not known: the source renormalized the candidates, or there is no prediction
    realized_logprob: NDArray[np.float32]  # [N], of token_ids[i]; NaN where not known

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which rows have a prediction, bool `[N]`."""
        return np.diff(self.starts) > 0


def rows_of(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each candidate."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def candidates_of(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts of chosen rows, −1 for an empty one, and where their candidates are."""
    sizes = np.append(np.diff(starts), 0)[rows]
    chosen = offsets_of(sizes)
    return chosen, np.arange(chosen[-1]) + np.repeat(starts[rows] - chosen[:-1], sizes)


def chosen_rows(
    topk: TopK, rows: NDArray[np.int64], token_ids: NDArray[np.int32], bounds: NDArray[np.int64]
) -> TopK:
    """Return predictions for other documents, whose tokens have these rows; −1 for none."""
    starts, kept = candidates_of(topk.starts, rows)
    rest, realized = (
        np.append(values, np.float32(np.nan))[rows]
        for values in (topk.rest_logprob, topk.realized_logprob)
    )
    return TopK(token_ids, bounds, starts, topk.ids[kept], topk.logprobs[kept], rest, realized)


def with_candidates(topk: TopK, kept: NDArray[np.bool_]) -> TopK:
    """Return predictions of which these candidates are kept."""
    starts = offsets_of(kept)[topk.starts]
    return topk._replace(starts=starts, ids=topk.ids[kept], logprobs=topk.logprobs[kept])


def firsts_of(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the documents' first tokens are; documents without tokens have none."""
    return bounds[:-1][np.diff(bounds) > 0]


def within(topk: TopK, width: int) -> TopK:
    """Return predictions without candidates of ids beyond a width, which are in the rest."""
    kept = topk.ids < width
    if kept.all():
        return topk
    lost = masses(topk._replace(logprobs=np.where(kept, -np.inf, topk.logprobs)))
    rest, more = topk.rest_logprob.copy(), lost > 0
    rest[more] = np.log(np.exp(rest[more], dtype=np.float64) + lost[more])
    return with_candidates(topk._replace(rest_logprob=rest), kept)


def masses(topk: TopK) -> NDArray[np.float64]:
    """Return the probability of each row's candidates together."""
    probabilities = np.exp(topk.logprobs, dtype=np.float64)
    sums = np.bincount(rows_of(topk.starts), probabilities, len(topk.token_ids))
    return sums.astype(np.float64)  # of no rows they are integers


def joined(topks: Sequence[TopK]) -> TopK:
    """Return the documents of several predictions as those of one."""
    sizes = zip(*((np.diff(topk.bounds), np.diff(topk.starts)) for topk in topks), strict=True)
    bounds, starts = (offsets_of(np.concatenate(of_all)) for of_all in sizes)
    columns = [np.concatenate(column) for column in zip(*topks, strict=True)]
    return TopK(columns[0], bounds, starts, *columns[3:])


def split(topk: TopK) -> Iterator[TopK]:
    """Yield the predictions of each document alone."""
    for begin, end in pairwise(topk.bounds.tolist()):
        of_row, of_candidate = slice(begin, end), slice(topk.starts[begin], topk.starts[end])
        yield TopK(
            topk.token_ids[of_row], np.array([0, end - begin]),
            topk.starts[begin : end + 1] - topk.starts[begin],
            topk.ids[of_candidate], topk.logprobs[of_candidate],
            topk.rest_logprob[of_row], topk.realized_logprob[of_row],
        )  # fmt: skip
