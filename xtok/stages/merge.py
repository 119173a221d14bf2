"""`merge`: several maps of one pair in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from xtok.config import (
    MergeConfig,
)
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.edges import Edges, heaviest, sum_duplicates
from xtok.maps.pair import of_one_pair
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import (
    finished,
    history_with,
    most_frequent,
    reported,
    slot_notes,
    stage_report,
)
from xtok.stages.slots import add_slots
from xtok.vocab.display import plural
from xtok.vocab.roles import slot_candidates

if TYPE_CHECKING:
    pass


def merge(
    maps: Sequence[ProjectionMap],
    config: MergeConfig | None = None,
    *,
    names: Sequence[str] = (),
) -> ProjectionMap:
    """Add up the rows of several maps of one pair, each map by its weight.

    A row that some maps leave empty is the sum of the others'. What they pin to different tokens is
    no pin. With `fill`, the exact and role rows
    of the first map stay as they are. Slots are left out of the sum; the result has new ones if
    the first map has any.

    Args:
        maps: two or more, the first of which decides about pinned rows and slots.
        config: the options; the defaults if None.
        names: what errors call the maps.

    Raises:
        XtokError: if the maps are of different tokenizers, or their number is not that of weights.
    """
    config = config or MergeConfig()
    if len(maps) < 2:
        raise XtokError("there is only one map to merge", hint="give two or more maps")
    weights = config.map_weights or (1.0,) * len(maps)
    if len(weights) != len(maps):
        raise XtokError(
            f"there are {len(maps)} maps and {plural(len(weights), 'weight')}",
            hint=f"give one weight per map: --map-weights {','.join(['1'] * len(maps))}",
        )
    digests = [mapfile.sha256(projection) for projection in maps]
    maps = of_one_pair(maps, names)
    first = maps[0]
    pinned = np.isin(first.row_kind, [RowKind.EXACT, RowKind.ROLE]) & config.fill
    kind = first.row_kind
    parts = []
    for projection, weight in zip(maps, weights, strict=True):
        takes_part = ~(projection.is_slot | pinned[projection.student_ids])
        part = projection.edges.take(takes_part).normalized()
        parts.append(part._replace(weights=part.weights * weight))
        both = (projection.row_kind != kind) & (projection.row_kind != 0) & (kind != 0)
        mixed = np.where(both, np.uint8(RowKind.MIXED), np.maximum(kind, projection.row_kind))
        kind = np.where(pinned, kind, mixed)
    top_k = config.top_k or max(projection.top_k for projection in maps)
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    several = np.bincount(edges.student_ids, minlength=len(kind)) > 1
    kind = np.where(several & (kind == RowKind.EXACT), np.uint8(RowKind.MIXED), kind)
    slot = None
    if first.enable_scale_trick:
        if top_k < 2:
            raise XtokError(
                "the first map has scale slots, for which --top-k 1 leaves no room",
                hint="give --top-k 2 or more",
            )
        single = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])[edges.student_ids]
        slotted = heaviest(edges.take(~single), top_k - 1)
        columns = first.teacher.table
        candidates: Iterable[int] = most_frequent(first.teacher_ids[first.is_slot])
        if columns is not None:
            candidates = slot_candidates(columns)
        slotted, slot = add_slots(slotted, candidates, first.shape[0])
        edges = Edges.concatenate([heaviest(edges.take(single), top_k), slotted])
    else:
        edges = heaviest(edges, top_k)
    kept = first.edges.take(pinned[first.student_ids])
    options = {"weights": list(weights), "fill": config.fill, "top_k": top_k}
    step = {
        "stage": "merge",
        "options": options,
        "initial_sha256": digests[0],
        "merged_sha256": digests[1:],
    }
    merged = finished(
        Edges.concatenate([edges, kept]),
        student=first.student,
        teacher=first.teacher,
        row_kind=kind,
        scale_slot=slot,
        method=first.method,
        top_k=top_k,
        history=history_with(first, step),
        reports=tuple(report for projection in maps for report in projection.reports),
    )
    filled = int(np.count_nonzero((first.row_kind == 0) & (kind != 0)))
    report = stage_report("merge", merged, slot_notes(merged))
    return reported(
        merged, replace(report, counts={**report.counts, "rows that were empty": filled})
    )
