"""Predictions for many documents, stored in flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of


class TopK(NamedTuple):
    """Predictions for concatenated documents. Row i predicts token i from the preceding tokens.

    Log-probabilities are natural logarithms, and are not renormalized over the candidates.
    """

    token_ids: NDArray[np.int32]  # [N]
    bounds: NDArray[np.int64]  # [documents + 1]; document d is token_ids[bounds[d]:bounds[d + 1]]
    # [N + 1]; the candidates of row i are ids[starts[i]:starts[i + 1]]. A row without candidates
    # has no prediction.
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]  # [nnz], unique in a row; most likely first, then lower id first
    logprobs: NDArray[np.float32]  # [nnz]
    # [N], log(1 - sum of the candidates), −inf if the sum is 1; NaN if the row has no prediction,
    # or if the source renormalized the candidates
    rest_logprob: NDArray[np.float32]
    realized_logprob: NDArray[np.float32]  # [N], for token_ids[i]; NaN if unknown

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Mask `[N]` of the rows that have a prediction."""
        return np.diff(self.starts) > 0


def segment_ids(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the segment that contains each item, such as a candidate's row."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def candidate_indices(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the candidates of selected rows, as starts and indices. Row −1 is empty."""
    sizes = np.append(np.diff(starts), 0)[rows]
    chosen = offsets_of(sizes)
    return chosen, np.arange(chosen[-1]) + np.repeat(starts[rows] - chosen[:-1], sizes)


def take_rows(
    topk: TopK, rows: NDArray[np.int64], token_ids: NDArray[np.int32], bounds: NDArray[np.int64]
) -> TopK:
    """Build predictions for other documents from selected rows.

    The row index −1 gives a row without a prediction.
    """
    starts, index = candidate_indices(topk.starts, rows)
    rest, realized = (
        np.append(values, np.float32(np.nan))[rows]
        for values in (topk.rest_logprob, topk.realized_logprob)
    )
    return TopK(token_ids, bounds, starts, topk.ids[index], topk.logprobs[index], rest, realized)


def keep_candidates(topk: TopK, is_kept: NDArray[np.bool_]) -> TopK:
    """Keep only the candidates for which `is_kept` is True."""
    starts = offsets_of(is_kept)[topk.starts]
    return topk._replace(starts=starts, ids=topk.ids[is_kept], logprobs=topk.logprobs[is_kept])


def document_starts(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first token of each document that is not empty."""
    return bounds[:-1][np.diff(bounds) > 0]


def cut_to_width(topk: TopK, width: int) -> TopK:
    """Remove candidates with ids of at least `width`, and add their probability to the rest."""
    is_kept = topk.ids < width
    if is_kept.all():
        return topk
    lost_mass = masses(topk._replace(logprobs=np.where(is_kept, -np.inf, topk.logprobs)))
    rest, more = topk.rest_logprob.copy(), lost_mass > 0
    rest[more] = np.log(np.exp(rest[more], dtype=np.float64) + lost_mass[more])
    return keep_candidates(topk._replace(rest_logprob=rest), is_kept)


def masses(topk: TopK) -> NDArray[np.float64]:
    """Return the sum of the candidates' probabilities in each row."""
    probabilities = np.exp(topk.logprobs, dtype=np.float64)
    sums = np.bincount(segment_ids(topk.starts), probabilities, len(topk.token_ids))
    return sums.astype(np.float64)  # bincount returns integers if there are no rows


def joined(topks: Sequence[TopK]) -> TopK:
    """Concatenate predictions."""
    sizes = zip(*((np.diff(topk.bounds), np.diff(topk.starts)) for topk in topks), strict=True)
    bounds, starts = (offsets_of(np.concatenate(arrays)) for arrays in sizes)
    columns = [np.concatenate(column) for column in zip(*topks, strict=True)]
    return TopK(columns[0], bounds, starts, *columns[3:])
