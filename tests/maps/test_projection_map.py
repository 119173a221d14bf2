"""`ProjectionMap`: its invariants, rows and conversions."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from make_maps import GOOD, SLOT, tiny_map, vocabulary

from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import InvariantError


def test_rows_shape_and_counts() -> None:
    GOOD.check()
    assert GOOD.shape == (4, 6)
    assert GOOD.nnz == 5
    assert repr(GOOD) == "ProjectionMap(m → m, 4 × 6, nnz=5)"
    assert GOOD.entries_per_row.tolist() == [2, 0, 1, 2]
    ids, weights = GOOD.row(0)
    assert (ids.tolist(), weights.tolist()) == ([3, 1], [0.75, 0.25])
    assert GOOD.row(1)[0].tolist() == []
    with pytest.raises(IndexError, match="student id 4"):
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
    ("broken", "invariant"),
    [
        (tiny_map({0: [(1, 0.25), (3, 0.75)]}), "order"),
        (tiny_map({0: [(3, 0.5), (1, 0.5)]}), "order"),
        (tiny_map({2: [(1, 1.0)], 0: [(1, 1.0)]}), "order"),
        (tiny_map({0: [(1, 0.5), (1, 0.5)]}), "order"),
        (tiny_map({0: [(1, 0.5), (2, 0.3), (1, 0.2)]}), "order"),
        (tiny_map({0: [(1, 1.0), (2, 0.0)]}), "weights"),
        (tiny_map({0: [(-1, 1.0)]}), "ids"),
        (replace(GOOD, student_ids=GOOD.student_ids + 1), "ids"),
        (replace(GOOD, weights=GOOD.weights[:4]), "shapes"),
        (replace(GOOD, row_kind=GOOD.row_kind[:3]), "shapes"),
        (replace(GOOD, scale_slot=SLOT[:3]), "shapes"),
        (replace(GOOD, scale_slot=SLOT * 2), "row kinds"),
        (replace(GOOD, scale_slot=np.ones(4, np.uint8)), "row kinds"),
        (replace(GOOD, top_k=1), "row kinds"),
    ],
)
def test_check_names_the_broken_invariant(broken: ProjectionMap, invariant: str) -> None:
    with pytest.raises(InvariantError) as error:
        broken.check()
    assert error.value.invariant == invariant


def test_a_map_whose_arrays_can_change_is_checked_each_time() -> None:
    weights = GOOD.weights.copy()
    projection = replace(GOOD, weights=weights)
    projection.check()
    weights[0] = 0.5
    with pytest.raises(InvariantError) as error:
        projection.check()
    assert error.value.invariant == "sums"
    fixed = copy.deepcopy(GOOD)
    for array in (*fixed.edges, fixed.row_kind):
        array.flags.writeable = False
    fixed.check()
    copied = copy.deepcopy(fixed)  # its arrays can change
    copied.weights[0] = 0.5
    with pytest.raises(InvariantError) as error:
        copied.check()
    assert error.value.invariant == "sums"


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
    with pytest.raises(ValueError, match="twice"):
        tiny_map(rows, **sides, row_kind=kind, top_k=9).check()
