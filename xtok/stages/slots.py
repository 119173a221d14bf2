"""Scale slots: ids without meaning that take a sixth of a row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from xtok.config import SLOT_WEIGHT
from xtok.maps.edges import Edges


def add_slots(
    edges: Edges, candidates: Iterable[int], num_rows: int
) -> tuple[Edges, NDArray[np.uint8]]:
    """Give each non-empty row a scale slot: the first candidate that the row does not have."""
    slot_of_row = np.full(num_rows, -1)
    waiting = np.zeros(num_rows, np.bool_)
    waiting[edges.student_ids] = True
    for candidate in candidates:
        free = waiting.copy()
        free[edges.student_ids[edges.teacher_ids == candidate]] = False
        slot_of_row[free] = candidate
        waiting &= ~free
        if not waiting.any():
            break
    rows = np.flatnonzero(slot_of_row >= 0)
    slots = Edges(rows, slot_of_row[rows], np.full(len(rows), SLOT_WEIGHT))
    return Edges.concatenate([edges, slots]).normalized(), (slot_of_row >= 0).astype(np.uint8)
