"""Which map is best for a loss: differences paired by document, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.config import Loss, check_loss

_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % confidence interval, by bootstrap over documents.

    `low` and `high` are None where there is only one document.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Which map is best for a loss, over all text.

    Attributes:
        loss: the loss.
        measure: the field of `MapMeasures` that decides for it.
        names: the maps, best first.
        lead: by how much the best map is below the next one, in nats; None for one map alone.
        verdict: which map to take and why, in a sentence.
    """

    loss: Loss
    measure: str
    names: tuple[str, ...]
    lead: Interval | None
    verdict: str


_NAMES = {"p-kl": "P-KL", "gold": "gold", "h-kl": "H-KL"}


def rank(
    loss: Loss,
    names: Sequence[str],
    sums: Sequence[NDArray[np.float64]],
    counts: NDArray[np.int64],
    seed: int,
) -> Ranking:
    """Rank maps for a loss by their mean cross-entropy.

    Args:
        loss: the loss.
        names: of the maps.
        sums: each map's losses, added up by document, float64 `[documents]`.
        counts: how many losses each document has, int64 `[documents]`.
        seed: of the bootstrap.
    """
    check_loss(loss)
    is_p_kl = loss == "p-kl"
    where = "over chunks, as P-KL averages" if is_p_kl else "at the first tokens it compares"
    values = [float(one.sum() / max(1, counts.sum())) for one in sums]
    best, *others = order = np.argsort(values, kind="stable").tolist()
    lead = None
    verdict = f"For {_NAMES[loss]}, {names[best]} measures {values[best]:.3f} nats {where}."
    if others:
        next_best = others[0]
        lead = _difference(sums[next_best] - sums[best], counts, seed)
        compared = (
            f"{values[best]:.3f} nats {where}, "
            f"against {values[next_best]:.3f} of {names[next_best]}"
        )
        spread = "one document, so no interval"
        if lead.low is not None:
            spread = f"95 % interval of the difference: {lead.low:.3f} to {lead.high:.3f}"
        if lead.low is not None and lead.low <= 0:
            which = f"this text does not tell {names[best]} from {names[next_best]}"
        else:
            which = f"{names[best]} is {'better' if len(order) == 2 else 'best'}"
        verdict = f"For {_NAMES[loss]}, {which}: {compared} ({spread})."
    return Ranking(
        loss=loss,
        measure="chunk_cross_entropy" if is_p_kl else "cross_entropy",
        names=tuple(names[n] for n in order),
        lead=lead,
        verdict=verdict,
    )


def _difference(sums: NDArray[np.float64], counts: NDArray[np.int64], seed: int) -> Interval:
    value = float(sums.sum() / max(1, counts.sum()))
    if len(counts) < 2:
        return Interval(value=value)
    drawn = resample(np.stack([sums, counts], axis=1), seed)
    low, high = np.quantile(drawn[:, 0] / np.maximum(drawn[:, 1], 1), [0.025, 0.975])
    return Interval(value=value, low=float(low), high=float(high))


def resample(table: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Draw documents with replacement, and add up; float64 `[resamples, columns]`."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((_RESAMPLES, table.shape[1]))
    for row in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, len(table), len(table)), minlength=len(table))
        drawn[row] = times @ table
    return drawn
