"""`merge`: several maps of one pair in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from xtok.config import MergeConfig
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.edges import Edges, add_slots, heaviest, sum_duplicates
from xtok.maps.pair import of_one_pair
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import finished, mixed_kinds, most_frequent_slots, reported, slot_notes
from xtok.vocab.display import plural
from xtok.vocab.roles import slot_candidates


def merge(
    maps: Sequence[mapfile.MapLike],
    config: MergeConfig | None = None,
    *,
    names: Sequence[str] = (),
) -> ProjectionMap:
    """Add up the rows of several maps of one pair, each map by its weight.

    A row that some maps leave empty is the sum of the others'. It is exact only if all of them have
    the same exact token. With `fill`, the exact and role rows of the first map stay as they are.
    Slots are left out of the sum; the result has new ones if the first map has any.

    Args:
        maps: two or more maps, or paths of maps. The first decides about exact rows and slots.
        config: the options; the defaults if None.
        names: what errors call the maps.

    Raises:
        XtokError: if the maps are of different tokenizers, or their number is not that of weights.
    """
    config = config or MergeConfig()
    loaded, names = mapfile.as_maps(maps, names)
    if len(loaded) < 2:
        raise XtokError("there is only one map to merge", hint="give two or more maps")
    weights = config.map_weights or (1.0,) * len(loaded)
    if len(weights) != len(loaded):
        raise XtokError(
            f"there are {len(loaded)} maps and {plural(len(weights), 'weight')}",
            hint="give one weight per map with {option}",
            parameter="map_weights",
        )
    top_k = config.top_k or max(projection.top_k for projection in loaded)
    digests = [mapfile.sha256(projection) for projection in loaded]
    first, *_ = loaded = of_one_pair(loaded, names)
    stays = np.isin(first.row_kind, [RowKind.EXACT, RowKind.ROLE]) & config.fill
    edges, kind = _summed(loaded, weights, stays)
    edges, slot = _cut(edges, kind, first, top_k)
    merged = finished(
        Edges.concatenate([edges, first.edges.take(stays[first.student_ids])]),
        before=first,
        row_kind=kind,
        scale_slot=slot,
        top_k=top_k,
        reports=tuple(report for projection in loaded for report in projection.reports),
    ).after(
        "merge",
        {"weights": list(weights), "fill": config.fill, "top_k": top_k},
        initial_sha256=digests[0],
        merged_sha256=digests[1:],
    )
    filled = int(np.count_nonzero((first.row_kind == RowKind.EMPTY) & (kind != RowKind.EMPTY)))
    return reported(merged, slot_notes(merged), counts={"rows that were empty": filled})


def _summed(
    maps: Sequence[ProjectionMap], weights: Sequence[float], stays: NDArray[np.bool_]
) -> tuple[Edges, NDArray[np.uint8]]:
    """Return the weighted sum of the maps' rows, and the kinds of all rows.

    Rows that stay, bool `[V_student]`, are left out of the sum.
    """
    kind = maps[0].row_kind
    parts = []
    for projection, weight in zip(maps, weights, strict=True):
        takes_part = ~(projection.is_slot | stays[projection.student_ids])
        part = projection.edges.take(takes_part).normalized()
        parts.append(part._replace(weights=part.weights * weight))
        kind = np.where(stays, kind, mixed_kinds(kind, projection.row_kind))
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    several = np.bincount(edges.student_ids, minlength=len(kind)) > 1
    return edges, np.where(several & (kind == RowKind.EXACT), np.uint8(RowKind.MIXED), kind)


def _cut(
    edges: Edges, kind: NDArray[np.uint8], first: ProjectionMap, top_k: int
) -> tuple[Edges, NDArray[np.uint8] | None]:
    """Cut each row to `top_k` entries, with slots as in the first map."""
    if not first.enable_scale_trick:
        return heaviest(edges, top_k), None
    if top_k < 2:
        raise XtokError(
            "the first map has scale slots, and a row of one entry has no room for one",
            hint="give {option} of 2 or more",
            parameter="top_k",
        )
    without_slot = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])[edges.student_ids]
    candidates: Iterable[int] = most_frequent_slots(first)
    if first.teacher.table is not None:
        candidates = slot_candidates(first.teacher.table)
    slotted = heaviest(edges.take(~without_slot), top_k - 1)
    slotted, slot = add_slots(slotted, candidates, first.shape[0])
    return Edges.concatenate([heaviest(edges.take(without_slot), top_k), slotted]), slot
