"""`ProjectionMap`: its invariants, rows and conversions."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from make_maps import GOOD, SLOT, tiny_map, vocabulary

from xtok.maps.edges import Edges, map_order, ranks, row_sums, sum_duplicates
from xtok.maps.projection_map import ProjectionMap


def test_rows_shape_and_counts() -> None:
    GOOD.check()
    assert GOOD.shape == (4, 6)
    assert GOOD.nnz == 5
    assert repr(GOOD) == "ProjectionMap(m → m, 4 × 6, nnz=5)"
    assert GOOD.entries_per_row.tolist() == [2, 0, 1, 2]
    ids, weights = GOOD.row(0)
    assert (ids.tolist(), weights.tolist()) == ([3, 1], [0.75, 0.25])
    assert GOOD.row(1)[0].tolist() == []
    with pytest.raises(IndexError, match=r"student id 4 is outside 0\.\.3"):
        GOOD.row(4)


def test_slots_are_the_last_entries_of_their_rows() -> None:
    with_slots = replace(GOOD, scale_slot=SLOT)
    with_slots.check()
    assert with_slots.is_slot.tolist() == [False, True, False, False, True]
    assert not GOOD.is_slot.any()
    # A slot may be heavier than the entries before it.
    tiny_map({0: [(1, 0.25), (3, 0.75)]}, scale_slot=np.array([1, 0, 0, 0], np.uint8)).check()


def test_to_torch_returns_the_same_matrix() -> None:
    matrix = GOOD.to_torch()
    assert matrix.is_coalesced()
    assert matrix.to_dense().tolist() == [
        [0, 0.25, 0, 0.75, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
        [0.5, 0, 0, 0, 0.5, 0],
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (tiny_map({0: [(1, 0.25), (3, 0.75)]}), "row 0 is not sorted"),
        (tiny_map({0: [(3, 0.5), (1, 0.5)]}), "row 0 is not sorted"),
        (tiny_map({2: [(1, 1.0)], 0: [(1, 1.0)]}), "student_ids"),
        (tiny_map({0: [(1, 0.5), (1, 0.5)]}), "row 0 is not sorted"),
        (tiny_map({0: [(1, 0.5), (2, 0.3), (1, 0.2)]}), "a teacher id twice"),
        (tiny_map({0: [(1, 1.0), (2, 0.0)]}), "not above 0"),
        (tiny_map({0: [(-1, 1.0)]}), "teacher_ids"),
        (
            replace(GOOD, student_ids=GOOD.student_ids + 1),
            "student_ids",
        ),
        (replace(GOOD, weights=GOOD.weights[:4]), "differ in length"),
        (replace(GOOD, row_kind=GOOD.row_kind[:3]), "row_kind"),
        (replace(GOOD, scale_slot=SLOT[:3]), "scale_slot"),
        (replace(GOOD, scale_slot=SLOT * 2), "scale_slot"),
        (replace(GOOD, scale_slot=np.ones(4, np.uint8)), "an empty row"),
        (replace(GOOD, top_k=1), "more entries than top_k=1"),
    ],
)
def test_check_names_the_broken_invariant(broken: ProjectionMap, message: str) -> None:
    """The other invariants are in `test_failed_checks_name_the_damage` of verify."""
    with pytest.raises(ValueError, match=message):
        broken.check()


edges = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), max_size=40)


@given(edges)
def test_row_operations_match_plain_loops(entries: list[tuple[int, int, int]]) -> None:
    rows: dict[int, dict[int, int]] = {}
    for s, t, w in entries:
        row = rows.setdefault(s, {})
        row[t] = row.get(t, 0) + w
    s_ids, t_ids, weights = np.array(entries, np.int64).reshape(-1, 3).T
    added = sum_duplicates(Edges(s_ids, t_ids, weights.astype(np.float64)))
    assert list(zip(*(a.tolist() for a in added), strict=True)) == [
        (s, t, w) for s in sorted(rows) for t, w in sorted(rows[s].items())
    ]
    assert row_sums(added).tolist() == [sum(rows[s].values()) for s in added.student_ids.tolist()]
    ordered = added.take(map_order(added))
    in_row = ranks(ordered.student_ids)
    assert list(zip(ordered.student_ids, ordered.teacher_ids, in_row, strict=True)) == [
        (s, t, index)
        for s in sorted(rows)
        for index, (t, _) in enumerate(sorted(rows[s].items(), key=lambda e: (-e[1], e[0])))
    ]


def test_map_order_puts_the_slot_last() -> None:
    row = Edges(np.array([0, 0, 0]), np.array([5, 1, 2]), np.array([0.6, 0.2, 0.2]))
    assert map_order(row).tolist() == [0, 1, 2]
    assert map_order(row, np.array([True, False, False])).tolist() == [1, 2, 0]


def test_map_order_compares_negative_and_tiny_weights() -> None:
    weights = np.array([-1, -0.0, 0, -2, 1e-40, np.inf])
    unordered = Edges(np.array([1, 1, 1, 0, 1, 1]), np.array([5, 4, 3, 2, 1, 0]), weights)
    assert map_order(unordered).tolist() == [3, 5, 4, 2, 1, 0]


def test_a_map_whose_arrays_can_change_is_checked_each_time() -> None:
    weights = GOOD.weights.copy()
    projection = replace(GOOD, weights=weights)
    projection.check()
    weights[0] = 0.5
    with pytest.raises(ValueError, match=r"row 0 sum to 0\.75"):
        projection.check()
    fixed = copy.deepcopy(GOOD)
    for array in (*fixed.edges, fixed.row_kind):
        array.flags.writeable = False
    fixed.check()
    copied = copy.deepcopy(fixed)  # its arrays can change
    copied.weights[0] = 0.5
    with pytest.raises(ValueError, match=r"row 0 sum to 0\.75"):
        copied.check()


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    twice=st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)),
)
def test_a_repeated_id_in_any_row_is_an_error(sizes: list[int], twice: tuple[int, int]) -> None:
    """The check works for any sizes of rows."""
    rows = {
        i: [(t, (size - t) * 2 / (size * (size + 1))) for t in range(size)]
        for i, size in enumerate(sizes)
        if size
    }
    kind = np.array([2 if size else 0 for size in sizes], np.uint8)
    sides = {"student": vocabulary(len(sizes)), "teacher": vocabulary(9)}
    assume(rows)
    tiny_map(rows, **sides, row_kind=kind, top_k=9).check()
    long = [i for i, size in enumerate(sizes) if size > 1]
    assume(long)
    row = rows[long[twice[0] % len(long)]]
    first, second = twice[1] % len(row), (twice[1] // 9 + 1) % len(row)
    row[first] = (row[second if second != first else first - 1][0], row[first][1])
    with pytest.raises(ValueError, match="a teacher id twice"):
        tiny_map(rows, **sides, row_kind=kind, top_k=9).check()
