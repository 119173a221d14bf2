"""Measures of counted pairs of tokens: entropy and leak."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def entropy_of(ids: NDArray[Any], counts: NDArray[Any]) -> float:
    """Return the entropy of counts summed by id, in bits."""
    _, places = np.unique(ids, return_inverse=True)
    sums = np.bincount(places, counts)
    shares = sums[sums > 0] / (counts.sum() or 1)
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def share_of(counts: NDArray[Any], chosen: NDArray[np.bool_]) -> float:
    """Return the share of the chosen counts, 0 without counts."""
    return float(counts[chosen].sum() / (counts.sum() or 1))


def entropy_kept(
    events: tuple[NDArray[Any], NDArray[Any]],
    tokens: tuple[NDArray[Any], NDArray[Any]],
    counts: NDArray[Any],
) -> float:
    """Return the smaller event entropy of the two sides, divided by the smaller token entropy."""
    whole = min(entropy_of(ids, counts) for ids in tokens)
    return min(entropy_of(ids, counts) for ids in events) / whole if whole > 0 else 1.0
