"""Compute confidence intervals of means over documents, and rank maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.loss_names import LOSS_INFO, BuildLoss

_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with a 95 % confidence interval. A single document has no interval."""

    value: float
    low: float | None = None
    high: float | None = None


def format_interval(interval: Interval) -> str:
    """Format a value with half the width of its confidence interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    return f"{interval.value:.3f}±{(interval.high - interval.low) / 2:.3f}"


def mean_interval(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Interval:
    """Return the mean loss, with a confidence interval from resampled documents.

    `sums` and `counts`, float64 `[documents]`, contain the sum and the number of losses in each
    document.
    """
    value = float(sums.sum() / max(1, counts.sum()))
    if len(sums) < 2:
        return Interval(value=value)
    sample_sums, sample_counts = resample(np.stack([sums, counts], axis=1)).T
    low, high = np.quantile(sample_sums / np.maximum(1, sample_counts), [0.025, 0.975]).tolist()
    return Interval(value=value, low=low, high=high)


def resample(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw documents with replacement; return each sample's sums, float64 `[samples, columns]`.

    The random seed is fixed.
    """
    rng = np.random.default_rng(0)
    samples = np.empty((_RESAMPLES, table.shape[1]))
    for row in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, len(table), len(table)), minlength=len(table))
        samples[row] = times @ table
    return samples


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A ranking of maps for one loss, by cross-entropy on all text."""

    loss: BuildLoss
    names: tuple[str, ...]  # names of the maps, best first
    lead: Interval | None  # lead of the best map over the second map, in nats; None for one map
    sentence: str


def rank(
    loss: BuildLoss, names: Sequence[str], sums: NDArray[np.float64], counts: NDArray[np.float64]
) -> Ranking:
    """Rank maps for a loss by their mean cross-entropy.

    `sums`, float64 `[maps, documents]`, are the sums of losses per document, and `counts`, float64
    `[documents]`, are the numbers of losses.
    """
    measured = counts > 0  # documents without losses would change the interval
    sums, counts = sums[:, measured], counts[measured]
    label = LOSS_INFO[loss].label
    place = "over chunks" if loss == "p-kl" else "at shared token boundaries"
    values = [float(map_sums.sum() / max(1, counts.sum())) for map_sums in sums]
    best, *others = order = np.argsort(values, kind="stable").tolist()
    lead = None
    sentence = f"For {label}, the loss of {names[best]} is {values[best]:.3f} nats {place}."
    if others:
        second = others[0]
        lead = mean_interval(sums[second] - sums[best], counts)
        which = f"{names[best]} is {'best' if others[1:] else 'better'}"
        if (lead.value if lead.low is None else lead.low) <= 0:
            which = f"this text shows no difference between {names[best]} and {names[second]}"
        spread = "no interval, because there is only one document"
        if lead.low is not None:
            spread = f"95 % interval of the difference: {lead.low:.3f} to {lead.high:.3f}"
        sentence = (
            f"For {label}, {which}: {values[best]:.3f} nats {place}, against "
            f"{values[second]:.3f} for {names[second]} ({spread})."
        )
    return Ranking(loss=loss, names=tuple(names[n] for n in order), lead=lead, sentence=sentence)
