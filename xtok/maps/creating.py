"""Create projection maps from edges: normalize, cut and sort rows, and add scale slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import MultitokenConfig
from xtok.maps.edges import Edges, add_slots, heaviest, in_map_order, sum_duplicates
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import slot_candidates


def map_from_edges(
    edges: Edges,
    *,
    scale_slot: NDArray[np.uint8] | None,
    before: ProjectionMap | None = None,
    **fields: Any,
) -> ProjectionMap:
    """Create a map: round weights to float32, and sort each row with its slot last.

    `scale_slot`, uint8 `[V_student]`, is 1 for rows in which the last edge is a scale slot. Missing
    fields are copied from `before`.
    """
    edges = edges._replace(weights=edges.weights.astype(np.float32, copy=False))
    last = np.zeros(len(edges.weights), np.bool_)
    if scale_slot is not None:
        final = np.zeros(len(scale_slot), np.int64)
        np.maximum.at(final, edges.student_ids, np.arange(len(last)))
        last[final[scale_slot == 1]] = True
    keep = edges.weights > 0  # a piece's weight may underflow to 0 in float32
    if not keep.all():
        edges, last = edges.take(keep), last[keep]
    edges = in_map_order(edges, last)
    fields |= {
        "student_ids": edges.student_ids.astype(np.int32, copy=False),
        "teacher_ids": edges.teacher_ids.astype(np.int32, copy=False),
        "weights": edges.weights,
        "scale_slot": scale_slot,
    }
    return ProjectionMap(**fields) if before is None else replace(before, **fields)


def map_from_rows(
    pair: Pair,
    edges: Edges,
    kind: NDArray[np.uint8],
    config: MultitokenConfig,
    method: str,
    earlier: ProjectionMap | None = None,
) -> ProjectionMap:
    """Create a map from unsorted edges: add up duplicates, normalize, cut, and add scale slots."""
    edges = sum_duplicates(edges).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(kind)) > 0
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        ignored = config.ignore_teacher_ids
        candidates = [i for i in slot_candidates(pair.tables[1]) if i not in ignored]
        edges, slot = add_slots(edges, candidates, len(kind))
    return map_from_edges(
        edges,
        student=pair.sides[0],
        teacher=pair.sides[1],
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method=method,
        top_k=config.top_k,
        history=() if earlier is None else earlier.history,
        reports=() if earlier is None else earlier.reports,
    )
