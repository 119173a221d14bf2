"""Confidence intervals of means over documents, and which map is best by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import Loss, loss_name

_RESAMPLES = 1000
LOSS_NAMES = {"p-kl": "P-KL", "gold": "gold", "h-kl": "H-KL"}


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


def resample(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw documents with replacement, and add up; float64 `[resamples, columns]`.

    The draws are the same each time, so that figures are.
    """
    rng = np.random.default_rng(0)
    drawn = np.empty((_RESAMPLES, table.shape[1]))
    for row in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, len(table), len(table)), minlength=len(table))
        drawn[row] = times @ table
    return drawn


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Which map is best for a loss, over all text."""

    loss: Loss
    measure: str  # the field of `MapMeasures` that decides for it
    names: tuple[str, ...]  # of the maps, best first
    lead: Interval | None  # of the best map over the next one, in nats; None for one map alone
    verdict: str


def rank(
    loss: Loss,
    names: Sequence[str],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> Ranking:
    """Rank maps for a loss by their mean cross-entropy.

    Args:
        loss: the loss.
        names: of the maps.
        sums: each map's losses, added up by document, float64 `[maps, documents]`.
        counts: how many losses each document has, int64 `[documents]`.
    """
    loss = loss_name(loss)
    measured = counts > 0  # documents without losses do not count for the spread
    sums, counts = sums[:, measured], counts[measured]
    measure, where = "cross_entropy", "at the first tokens it compares"
    if loss == "p-kl":
        measure, where = "chunk_cross_entropy", "over chunks, as P-KL averages"
    values = [float(one.sum() / max(1, counts.sum())) for one in sums]
    best, *others = order = np.argsort(values, kind="stable").tolist()
    lead = None
    verdict = f"For {LOSS_NAMES[loss]}, {names[best]} measures {values[best]:.3f} nats {where}."
    if others:
        other = others[0]
        difference = sums[other] - sums[best]
        drawn = resample(np.stack([difference, counts], axis=1))
        value = difference.sum() / counts.sum()
        lead = interval(value, drawn[:, 0] / drawn[:, 1], len(counts))
        which = f"{names[best]} is {'best' if others[1:] else 'better'}"
        if (lead.value if lead.low is None else lead.low) <= 0:
            which = f"this text does not tell {names[best]} from {names[other]}"
        spread = "one document, so no interval"
        if lead.low is not None:
            spread = f"95 % interval of the difference: {lead.low:.3f} to {lead.high:.3f}"
        verdict = (
            f"For {LOSS_NAMES[loss]}, {which}: {values[best]:.3f} nats {where}, against "
            f"{values[other]:.3f} of {names[other]} ({spread})."
        )
    names = tuple(names[n] for n in order)
    return Ranking(loss=loss, measure=measure, names=names, lead=lead, verdict=verdict)
