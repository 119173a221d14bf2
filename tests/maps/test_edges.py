"""Operations on edges: sums of duplicates, sums and ranks of rows, and the order of a map."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xtok.maps.edges import Edges, map_order, ranks, row_sums, sum_duplicates

entry_lists = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), max_size=40
)
Entries = list[tuple[int, int, int]]


def edges_of(entries: Entries) -> Edges:
    s_ids, t_ids, weights = np.array(entries, np.int64).reshape(-1, 3).T
    return Edges(s_ids, t_ids, weights.astype(np.float64))


def summed(entries: Entries) -> dict[tuple[int, int], int]:
    """Return the sum of the weights of each pair of ids, in ascending order of the ids."""
    sums: dict[tuple[int, int], int] = {}
    for s, t, w in sorted(entries):
        sums[s, t] = sums.get((s, t), 0) + w
    return sums


@given(entry_lists)
def test_sum_duplicates_adds_up_equal_pairs_and_sorts_by_ids(entries: Entries) -> None:
    added = sum_duplicates(edges_of(entries))
    assert list(zip(*(array.tolist() for array in added), strict=True)) == [
        (s, t, w) for (s, t), w in summed(entries).items()
    ]


@given(entry_lists)
def test_row_sums_has_the_sum_of_the_row_for_each_edge(entries: Entries) -> None:
    expected = [sum(w for row, _, w in entries if row == s) for s, _, _ in entries]
    assert row_sums(edges_of(entries)).tolist() == expected


@given(st.lists(st.integers(0, 5), max_size=40).map(sorted))
def test_ranks_count_the_earlier_edges_of_the_row(student_ids: list[int]) -> None:
    expected = [student_ids[:index].count(s) for index, s in enumerate(student_ids)]
    assert ranks(np.array(student_ids, np.int64)).tolist() == expected


@given(entry_lists)
def test_map_order_sorts_by_row_then_weight_then_teacher_id(entries: Entries) -> None:
    distinct = [(s, t, w) for (s, t), w in summed(entries).items()]
    order = map_order(edges_of(distinct)).tolist()
    expected = sorted(distinct, key=lambda entry: (entry[0], -entry[2], entry[1]))
    assert [distinct[index] for index in order] == expected


def test_map_order_puts_the_slot_last() -> None:
    row = Edges(np.array([0, 0, 0]), np.array([5, 1, 2]), np.array([0.6, 0.2, 0.2]))
    assert map_order(row).tolist() == [0, 1, 2]
    assert map_order(row, np.array([True, False, False])).tolist() == [1, 2, 0]


def test_map_order_compares_negative_and_tiny_weights() -> None:
    weights = np.array([-1, -0.0, 0, -2, 1e-40, np.inf])
    unordered = Edges(np.array([1, 1, 1, 0, 1, 1]), np.array([5, 4, 3, 2, 1, 0]), weights)
    assert map_order(unordered).tolist() == [3, 5, 4, 2, 1, 0]
