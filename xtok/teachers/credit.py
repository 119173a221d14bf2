"""How the student's tokens of a chunk share the log-probability of the teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.kernels import Side
from xtok.alignment.sequences import FlatIds, Sequences
from xtok.maps.edges import ranks
from xtok.predictions.topk import TopK
from xtok.teachers.credit_kernels import weigh_by_prefix

if TYPE_CHECKING:
    from xtok.alignment.aligner import TokenAligner


@np.errstate(all="ignore")  # of tokens without a log-probability
def chunk_sums(number: NDArray[np.int64], logprobs: NDArray[Any], size: int) -> NDArray[np.float64]:
    """Return the sum of each chunk's log-probabilities `[size]`, rounded to float32."""
    return np.bincount(number, logprobs, size).astype(np.float32).astype(np.float64)


def prefix_weights(
    aligner: TokenAligner,
    student: FlatIds | Sequences,
    teacher: FlatIds | Sequences,
    numbers: Sequence[NDArray[np.int64]],
    predictions: TopK,
    sums: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Weigh the student's tokens of each chunk by what the teacher predicts of their bytes.

    Let C(b) be the probability that the teacher goes on with the bytes b (the byte-token lemma,
    arXiv 2410.09303). Token j of a chunk has C(s_1…s_j) / C(s_1…s_(j-1)), and the last what is left
    of the sum; all have the same, where a row that C needs has no candidates.

    C counts the candidates that begin with the bytes, along the tokens that the teacher itself has
    for them, and shares the rest equally among all other tokens. That the teacher may write the
    same bytes in other tokens is left out: it hardly ever does. How far the shares are off then:
    `scripts/benchmark.py credit`.

    Args:
        aligner: of both.
        student: its tokens.
        teacher: its tokens.
        numbers: for both, the chunk of each token; the last chunk is for tokens that are in none.
        predictions: of the teacher's tokens.
        sums: `[chunks + 1]`, the log-probability of each chunk's teacher tokens.

    Returns:
        float64 `[student tokens]`, −log of what each token has; 1 for tokens that share nothing.
    """
    is_shared = np.bincount(numbers[0], minlength=len(sums)) > 1
    is_shared[-1] = False
    weights = np.ones(len(student.ids))
    if not is_shared.any():
        return weights
    chunks = []
    for number in numbers:
        places = np.flatnonzero(is_shared[number])
        sizes = np.bincount(number[places], minlength=len(sums))[is_shared]
        chunks += [places, offsets_of(sizes)]
    sides = (
        Side(tokens.ids, tokens.bounds, table.symbols, table.offsets)
        for tokens, table in ((student, aligner.student), (teacher, aligner.teacher))
    )
    by_bytes = aligner.teacher.by_bytes
    weigh_by_prefix(*sides, by_bytes, predictions, tuple(chunks), sums[is_shared], weights)
    return weights


@np.errstate(all="ignore")  # of chunks without a sum
def shares(
    sums: NDArray[np.float64],
    number: NDArray[np.int64],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Share each chunk's sum among its tokens by weight; equally, if all weights are 0.

    A share is a multiple of the last bit of the float32 sum, between two roundings of the shares so
    far: so the shares are exact in float32, and so is their sum. Equal shares differ in that bit.

    Args:
        sums: `[chunks + 1]`, float32 values.
        number: `[all tokens]`, the chunk of each.
        tokens: those that get a share, rising; a chunk's tokens all do, or none.
        weights: `[all tokens]`, 0 or above.
    """
    share_of = np.zeros(len(number), np.float32)
    total = np.bincount(number, weights, len(sums))
    weights = np.where(total[number] == 0, 1.0, weights)
    total = np.bincount(number, weights, len(sums))
    last_bit = np.ldexp(1.0, np.maximum(np.frexp(sums)[1] - 24, -149))
    whole = (sums == 0) | ~np.isfinite(sums)  # each token takes all of it
    so_far, done = np.zeros_like(sums), np.zeros_like(sums)
    place = ranks(number[tokens])  # within its chunk
    in_turn = tokens[np.argsort(place, kind="stable")]
    for turn in np.split(in_turn, np.cumsum(np.bincount(place))[:-1]):
        chunk = number[turn]
        so_far[chunk] += weights[turn]
        now = np.rint(sums[chunk] / last_bit[chunk] * (so_far[chunk] / total[chunk]))
        share = (now - done[chunk]) * last_bit[chunk]
        share_of[turn] = np.where(whole[chunk], sums[chunk], share)
        done[chunk] = now
    return share_of
