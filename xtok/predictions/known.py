"""What is not a prediction: what files and servers have where no model said anything.

Files, servers' answers, collators and `project_logprobs` all ask these functions. What no model can
say is not known: it is never a probability.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IMPOSSIBLE = -1e3
"""Finite log-probabilities below this are padding, or what a server writes for −∞ or for nothing:
−9999 (vLLM), −99999 (Tinker), −1e4 (DistillKit). The least of a float32 softmax is about −104."""

STAND_IN = -9999.0
"""What JSON's null, SGLang's for −∞, is read as."""

NEXT = "nothing predicts a first token: row i is of token i, not of the next"
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


def is_of_nothing(token: int, ids: NDArray[Any], logprobs: NDArray[Any]) -> bool:
    """Whether a first token's candidates say nothing: there are none, or it is certain itself.

    >>> is_of_nothing(309, ids=np.array([309]), logprobs=np.array([0.0]))
    True
    """
    kept = ~is_stand_in(logprobs)
    ids, logprobs = ids[kept], logprobs[kept]
    return not len(ids) or (ids.tolist() == [token] and logprobs.tolist() == [0.0])
