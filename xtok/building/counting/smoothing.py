"""Smooth counts towards a map, and measure how well a map predicts counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.building.counting.counts import Pairs, pair_edges
from xtok.maps.edges import Edges, heaviest, pair_keys, sum_duplicates

ALPHAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # candidates for alpha

EPSILON = 1e-3  # share of the uniform distribution in predictions; keeps cross-entropies finite


def smooth(counts: Edges, base: Edges, alpha: float) -> Edges:
    """Return `(counts + alpha * base) / (N + alpha)` for each row, where N is the row's count.

    The result is the posterior mean of each row under a Dirichlet prior (MacKay and Peto, Natural
    Language Engineering 1(3), 1995). The prior's mean is the row in `base`, and its strength is
    `alpha` pseudo-counts.
    """
    weighted = base._replace(weights=alpha * base.weights.astype(np.float64))
    return sum_duplicates(Edges.concatenate([counts, weighted])).normalized()


def choose_alpha(
    pairs: Pairs, held_out: Pairs, base: Edges, top_k: int, width: int, unit: int = 1
) -> float:
    """Return the alpha with which the smoothed map best predicts the held-out counts.

    If several values are equally good, the smallest is returned. Without counts, the result is 4.
    """
    if not (len(held_out[0]) and len(pairs[0])):
        return 4.0
    rows = np.unique(held_out[0] >> 32)  # only these rows matter
    counts = pair_edges(pairs[0], pairs[1] / unit)
    counts, base = (e.take(np.isin(e.student_ids, rows)) for e in (counts, base))
    entropies = []
    for alpha in ALPHAS:
        best = heaviest(smooth(counts, base, alpha), top_k)
        entropies.append((losses(weights_at(best, held_out[0]), width) * held_out[1]).sum())
    return ALPHAS[int(np.argmin(entropies))]


def losses(weights: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return `-ln((1 - eps) * weight + eps / width)` for each weight, in nats."""
    nats: NDArray[np.float64] = -np.log((1 - EPSILON) * weights + EPSILON / width)
    return nats


def weights_at(edges: Edges, keys: NDArray[Any]) -> NDArray[np.float64]:
    """Return the weight of each pair (see `pair_keys`), or 0 for pairs without an edge."""
    if not len(edges.weights):
        return np.zeros(len(keys))
    edge_keys = pair_keys(edges.student_ids, edges.teacher_ids)
    order = np.argsort(edge_keys)
    edge_keys, weights = edge_keys[order], edges.weights[order].astype(np.float64)
    indices = np.searchsorted(edge_keys, keys).clip(0, len(edge_keys) - 1)
    return np.where(edge_keys[indices] == keys, weights[indices], 0.0)


def entropy_of(ids: NDArray[Any], counts: NDArray[Any]) -> float:
    """Add up counts by id, and return their entropy in bits."""
    _, indices = np.unique(ids, return_inverse=True)
    sums = np.bincount(indices, counts)
    shares = sums[sums > 0] / (counts.sum() or 1)
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def share_of(counts: NDArray[Any], is_counted: NDArray[np.bool_]) -> float:
    """Return the sum of the selected counts as a share of all counts, or 0 without counts."""
    return float(counts[is_counted].sum() / (counts.sum() or 1))


def entropy_kept(
    events: tuple[NDArray[Any], NDArray[Any]],
    tokens: tuple[NDArray[Any], NDArray[Any]],
    counts: NDArray[Any],
) -> float:
    """Return the entropy of events divided by the entropy of tokens.

    Both are the smaller of the entropies of the two sides.
    """
    total = min(entropy_of(ids, counts) for ids in tokens)
    return min(entropy_of(ids, counts) for ids in events) / total if total > 0 else 1.0
