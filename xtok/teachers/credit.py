"""Credit: divide the log-probability of a chunk among its student tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds, Sequences
from xtok.maps.edges import ranks
from xtok.predictions.topk import TopK
from xtok.teachers.credit_kernels import weigh_by_prefix


@np.errstate(all="ignore")  # NaN marks tokens without a log-probability
def chunk_sums(
    chunk_ids: NDArray[np.int64], logprobs: NDArray[Any], size: int
) -> NDArray[np.float64]:
    """Return the sum of the log-probabilities in each chunk, `[size]`, rounded to float32."""
    return np.bincount(chunk_ids, logprobs, size).astype(np.float32).astype(np.float64)


def prefix_weights(
    aligner: TokenAligner,
    student: FlatIds | Sequences,
    teacher: FlatIds | Sequences,
    chunk_ids: Sequence[NDArray[np.int64]],
    predictions: TopK,
    sums: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Compute the weights of the student tokens in each chunk from the teacher's predictions.

    C(b) is the probability that the teacher continues with the bytes b (byte-token lemma, arXiv
    2410.09303). The function first spreads the probability outside the candidates evenly over all
    other tokens. Then it estimates C(b) as the total probability of the candidates that start with
    b. This estimate ignores other tokenizations of the same bytes. `scripts/benchmark.py credit`
    measures the error.

    If s_1, s_2, … are the byte strings of a chunk's student tokens, token j gets the probability
    C(s_1…s_j) / C(s_1…s_(j-1)). The last token gets the remainder of the chunk's log-probability.
    If a teacher token has no candidates, all weights in its chunk are equal.

    `chunk_ids` contains the chunk id of each student token and of each teacher token; the largest
    id means "no chunk". `sums`, `[chunks + 1]`, contains the log-probability of each chunk.

    Returns:
        float64 `[student tokens]`, the negative log-probability of each token. The weight is 1 if
        a chunk contains only one student token.
    """
    is_shared = np.bincount(chunk_ids[0], minlength=len(sums)) > 1
    is_shared[-1] = False
    weights = np.ones(len(student.ids))
    if not is_shared.any():
        return weights
    chunks = []
    for side_ids in chunk_ids:
        positions = np.flatnonzero(is_shared[side_ids])
        sizes = np.bincount(side_ids[positions], minlength=len(sums))[is_shared]
        chunks += [positions, offsets_of(sizes)]
    sides = aligner.student.with_ids(student), aligner.teacher.with_ids(teacher)
    by_bytes = aligner.teacher.by_bytes
    weigh_by_prefix(*sides, by_bytes, predictions, tuple(chunks), sums[is_shared], weights)
    return weights


@np.errstate(all="ignore")  # NaN marks chunks without a sum
def shares(
    sums: NDArray[np.float64],
    chunk_ids: NDArray[np.int64],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Divide the sum of each chunk among the chunk's tokens in proportion to their weights.

    If all weights of a chunk are 0, the shares are equal. The float32 shares add up exactly to the
    sum.

    Args:
        sums: `[chunks + 1]`, the sum of each chunk, rounded to float32.
        chunk_ids: `[all tokens]`, the chunk number of each token.
        tokens: the indices of the tokens that get a share, in ascending order. The array contains
            either all tokens of a chunk or no token of this chunk.
        weights: `[all tokens]`, the weight of each token, at least 0.
    """
    token_share = np.zeros(len(chunk_ids), np.float32)
    total = np.bincount(chunk_ids, weights, len(sums))
    weights = np.where(total[chunk_ids] == 0, 1.0, weights)
    total = np.bincount(chunk_ids, weights, len(sums))
    # Each share is the difference between two cumulative shares. All cumulative shares are
    # multiples of the last bit of the sum, so float32 represents their differences exactly.
    last_bit = np.ldexp(1.0, np.maximum(np.frexp(sums)[1] - 24, -149))
    whole = (sums == 0) | ~np.isfinite(sums)  # each token gets the whole sum
    so_far, sum_so_far = np.zeros_like(sums), np.zeros_like(sums)
    rank = ranks(chunk_ids[tokens])  # position of the token in its chunk
    in_turn = tokens[np.argsort(rank, kind="stable")]
    for turn in np.split(in_turn, np.cumsum(np.bincount(rank))[:-1]):
        chunk = chunk_ids[turn]
        so_far[chunk] += weights[turn]
        now = np.rint(sums[chunk] / last_bit[chunk] * (so_far[chunk] / total[chunk]))
        share = (now - sum_so_far[chunk]) * last_bit[chunk]
        token_share[turn] = np.where(whole[chunk], sums[chunk], share)
        sum_so_far[chunk] = now
    return token_share
