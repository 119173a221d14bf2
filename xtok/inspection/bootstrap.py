"""Confidence intervals of means over documents, by drawing documents again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % confidence interval, which one document alone does not give."""

    value: float
    low: float | None = None
    high: float | None = None


def interval(value: Any, drawn: NDArray[np.float64], num_documents: int) -> Interval:
    """Return a figure with its interval, from its values for resampled documents."""
    if num_documents < 2:
        return Interval(value=float(value))
    low, high = np.nanquantile(drawn, [0.025, 0.975]).tolist()
    return Interval(value=float(value), low=low, high=high)


def resample(table: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Draw documents with replacement, and add up; float64 `[resamples, columns]`."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((_RESAMPLES, table.shape[1]))
    for row in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, len(table), len(table)), minlength=len(table))
        drawn[row] = times @ table
    return drawn
