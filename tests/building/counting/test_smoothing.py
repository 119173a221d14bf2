"""Counts smoothed towards a map, and the choice of the smoothing strength."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xtok.building.counting.counts import pair_edges
from xtok.building.counting.smoothing import ALPHAS, choose_alpha, losses, smooth, weights_at
from xtok.maps.edges import Edges, heaviest

pairs = st.tuples(st.integers(0, 3), st.integers(0, 5))
counts = st.dictionaries(pairs, st.integers(1, 9), max_size=12)
weights = st.dictionaries(pairs, st.integers(1, 8), min_size=1, max_size=12)


def arrays(counted: dict[tuple[int, int], int]) -> tuple[np.ndarray, np.ndarray]:
    keys = sorted(counted)
    return (
        np.array([s << 32 | t for s, t in keys], np.int64),
        np.array([counted[key] for key in keys], np.int64),
    )


def test_smoothing_is_the_posterior_mean() -> None:
    base = Edges(np.array([0, 0, 1]), np.array([5, 6, 7]), np.array([0.75, 0.25, 1.0]))
    counted = Edges(np.array([0, 0, 2]), np.array([6, 8, 9]), np.array([3, 1, 4]))
    smoothed = smooth(counted, base, 4.0)
    rows = zip(smoothed.student_ids.tolist(), smoothed.teacher_ids.tolist(), strict=True)
    weights = dict(zip(rows, smoothed.weights.tolist(), strict=True))
    # (counts + 4 base) / (N + 4): row 0 has N = 4, row 1 no counts, row 2 no base.
    assert weights == {(0, 5): 3 / 8, (0, 6): 4 / 8, (0, 8): 1 / 8, (1, 7): 1.0, (2, 9): 1.0}


def test_alpha_is_small_where_counts_predict_and_large_where_the_base_does() -> None:
    base = Edges(np.array([0]), np.array([1]), np.array([1.0]))
    cases: tuple[tuple[int, list[int], float], ...]
    cases = ((3, [2, 2], 0.25), (3, [1, 1], 64.0), (1, [1, 2], 1.0), (3, [], 4.0))
    for counted, held, alpha in cases:
        pairs = np.array([2]), np.array([counted])
        held_pairs = np.array(held, np.int64), np.ones(len(held), np.int64)
        assert choose_alpha(pairs, held_pairs, base, 2, 10) == alpha


@given(counted=counts, held=counts, base=weights, top_k=st.integers(1, 4))
def test_alpha_is_chosen_by_the_losses_of_whole_maps(
    counted: dict[tuple[int, int], int],
    held: dict[tuple[int, int], int],
    base: dict[tuple[int, int], int],
    top_k: int,
) -> None:
    """The scores of requested rows equal the scores computed from whole maps."""
    keys, amounts = arrays(base)
    edges = pair_edges(keys, amounts.astype(np.float32)).normalized()
    edges = edges._replace(weights=edges.weights.astype(np.float32))
    counted_pairs, held_pairs = arrays(counted), arrays(held)
    scores = []
    for alpha in ALPHAS:
        smoothed = heaviest(
            smooth(pair_edges(counted_pairs[0], counted_pairs[1] / 2), edges, alpha), top_k
        )
        scores.append((losses(weights_at(smoothed, held_pairs[0]), 6) * held_pairs[1]).sum())
    expected = ALPHAS[int(np.argmin(scores))] if held and counted else 4.0
    assert choose_alpha(counted_pairs, held_pairs, edges, top_k, 6, unit=2) == expected
