"""What is not a prediction: what files and servers have where no model said anything.

Files, servers' answers, collators and `project_logprobs` all ask these functions. What no model can
say is not known: it is never a probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMPOSSIBLE = -1e3
"""Finite log-probabilities below this are padding, or what a server writes for −∞ or for nothing:
−9999 (vLLM), −99999 (Tinker), −1e4 (DistillKit). The least of a float32 softmax is about −104."""

STAND_IN = -9999.0
"""What JSON's null, SGLang's for −∞, is read as."""

STORED_ROUNDING = 0.01
"""What half precision may add to a sum of probabilities, and to a log-probability."""

PREDICTS_FIRST = "nothing predicts a first token: row i is of token i, not of the next"
"""What is wrong with rows that begin with a prediction."""


def is_stand_in(logprobs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which log-probabilities only stand where there is none; NaN, −∞ and padding may not.

    >>> is_stand_in(np.array([-0.5, -9999.0, -np.inf, np.nan])).tolist()
    [False, True, False, False]
    """
    return np.asarray((logprobs < IMPOSSIBLE) & ~np.isneginf(logprobs))


def own_logprobs(logprobs: NDArray[Any], firsts: NDArray[Any]) -> NDArray[Any]:
    """Return the log-probabilities of texts' own tokens, NaN where no model said one.

    That is for stand-ins, and for a first token with 0.0, as if it were certain.

    >>> own_logprobs(np.array([0.0, -9999.0, 0.0]), firsts=np.array([0])).tolist()
    [nan, nan, 0.0]
    """
    known = np.where(is_stand_in(logprobs), np.asarray(np.nan, logprobs.dtype), logprobs)
    known[firsts] = np.where(known[firsts] == 0, np.nan, known[firsts])
    return known


def says_nothing(token: int, ids: NDArray[Any], logprobs: NDArray[Any]) -> bool:
    """Whether a first token's candidates say nothing: there are none, or it is certain itself.

    >>> says_nothing(309, ids=np.array([309]), logprobs=np.array([0.0]))
    True
    """
    kept = ~is_stand_in(logprobs)
    ids, logprobs = ids[kept], logprobs[kept]
    return not len(ids) or (ids.tolist() == [token] and logprobs.tolist() == [0.0])


def without_null(logprobs: Iterable[Any]) -> list[Any]:
    """Return log-probabilities of JSON, which has no −∞: null is what stands for it."""
    return [STAND_IN if value is None else value for value in logprobs]


def candidates_of_row(
    token_ids: NDArray[Any],
    counts: NDArray[np.int64],
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the candidates of a text's tokens that a model did say.

    Args:
        token_ids: `[T]`, the text's.
        counts: `[T]`, how many candidates each has.
        ids: theirs, one after another; −1 is none.
        logprobs: theirs.

    Returns:
        counts, ids and log-probabilities.

    Raises:
        ValueError: for a candidate that is no id or occurs twice, probabilities that are none or
            sum to more than 1, and a row that predicts a first token.
    """
    kept = ~is_stand_in(logprobs) & ~np.isneginf(logprobs) & (ids != -1)
    first = slice(int(counts[:1].sum()))
    if first.stop:
        if not says_nothing(int(token_ids[0]), ids[first], logprobs[first]):
            raise ValueError(f"topk_ids begin with candidates, and {PREDICTS_FIRST}")
        kept[first] = False
    row_of = np.repeat(np.arange(len(counts)), counts)[kept]
    ids, logprobs = ids[kept], logprobs[kept]
    is_wrong = (ids < 0) | (ids >= 1 << 31)
    if is_wrong.any():
        token, wrong = row_of[is_wrong][0], ids[is_wrong][0]
        raise ValueError(f"topk_ids has {wrong} for token {token}, which is no token id")
    if not (logprobs <= STORED_ROUNDING).all():
        wrong = logprobs[~(logprobs <= STORED_ROUNDING)][0]
        raise ValueError(f"topk_logprobs has {wrong:.4g}, which is not a log-probability")
    for token, twice in listed_twice(row_of, ids):
        raise ValueError(f"topk_ids has {twice} twice for token {token}")
    sums = np.bincount(row_of, np.exp(logprobs, dtype=np.float64), len(counts))
    if len(sums) and sums.max() > 1 + STORED_ROUNDING:
        raise ValueError(
            f"the candidates of token {sums.argmax()} have probabilities that sum to "
            f"{sums.max():.4g}"
        )
    return np.bincount(row_of, minlength=len(counts)), ids, logprobs


def listed_twice(row_of: NDArray[np.int64], ids: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield each row that has a candidate more than once, and its id, 0 to 2³² − 1.

    >>> list(listed_twice(np.array([0, 0, 4, 4, 4]), np.array([7, 8, 9, 7, 9])))
    [(4, 9)]
    """
    keys = np.sort(row_of << 32 | ids)
    for key in keys[1:][keys[1:] == keys[:-1]].tolist():
        yield key >> 32, key & 0xFFFFFFFF
