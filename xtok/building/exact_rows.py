"""The rows of a map for which the teacher has an equal token."""

from __future__ import annotations

import numpy as np

from xtok.building.matches import Matches, matching_options
from xtok.config import MultitokenConfig
from xtok.maps.edges import Edges
from xtok.maps.making import map_of_edges
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind


def with_exact(
    projection: ProjectionMap,
    matches: Matches,
    config: MultitokenConfig,
) -> ProjectionMap:
    """Put matches, which were made with these options, in the place of a map's own rows.

    student   the map's row                     matches           the row then
    ` the`    ` t` 0.76, `he` 0.07, slot 0.17   equal: ` the`     ` the` 1, no slot
    `</s>`    `</` 0.76, `s>` 0.07, slot 0.17   role: `<end>`     `<end>` 1, no slot
    ` The`    ` T` 0.76, `he` 0.07, slot 0.17   relaxed: ` the`   ` the` 0.83, slot 0.17
    ` zq`     ` z` 0.76, `q` 0.07, slot 0.17    none              as it was
    """
    relaxed_rows = matches.relaxed.student_ids
    kind = projection.row_kind.copy()
    kind[matches.equal.student_ids] = RowKind.EXACT
    kind[matches.special.student_ids] = RowKind.ROLE
    kind[relaxed_rows] = RowKind.RELAXED
    near = np.full(len(kind), -1)
    near[relaxed_rows] = matches.relaxed.teacher_ids
    of_row, near_of_row = projection.student_ids, near[projection.student_ids]
    # Of a row with a near-equivalent only the slot is left, and leaves it the rest of 1. In a map
    # of another program, the slot may be on the near-equivalent itself: then there is none.
    is_slot = projection.is_slot & (projection.teacher_ids != near_of_row)
    kept = ~matches.is_exact[of_row] & ((near_of_row < 0) | is_slot)
    others = projection.edges.take(kept)
    taken = np.zeros(len(kind))
    taken[others.student_ids] = others.weights
    relaxed = matches.relaxed._replace(weights=1 - taken[relaxed_rows])
    slot = projection.scale_slot
    result = map_of_edges(
        Edges.concatenate([relaxed, others, matches.equal, matches.special]),
        before=projection,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(taken > 0, slot, np.uint8(0)),
    )
    return result.after("reapply-exact", matching_options(config))
