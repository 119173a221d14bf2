"""`sort_cut`: keep the heaviest entries of each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xtok.config import SortCutConfig
from xtok.errors import XtokError
from xtok.maps.creating import map_from_edges
from xtok.maps.edges import ranks
from xtok.maps.map_arguments import MapLike
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import with_options
from xtok.maps.records import StageReport


def sort_cut(projection: MapLike, config: SortCutConfig | None = None) -> ProjectionMap:
    """Cut each row to its `top_k` heaviest entries, and normalize the row.

    A scale slot is included in the `top_k` entries, and stays last. Rows with at most `top_k`
    entries do not change.

    >>> near = xtok.generate(xtok.load_pair("bytes", "bytes"), "spelling")
    >>> xtok.sort_cut(near, xtok.SortCutConfig(top_k=1))
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Raises:
        XtokError: if `top_k` is 1 and the map has slots.
    """
    projection = ProjectionMap.of(projection)
    config = SortCutConfig.or_default(config)
    result, counts = cut_rows(projection, config.top_k)
    is_counted = "texts" in (projection.recipe or ())  # `build` adds its exact rows after a cut
    recipe = None if is_counted else with_options(projection, top_k=config.top_k)
    report = StageReport("sort-cut", counts)
    return replace(result, reports=(*result.reports, report), recipe=recipe)


def cut_rows(projection: ProjectionMap, top_k: int) -> tuple[ProjectionMap, dict[str, float]]:
    """Return the cut map without report and recipe, and the counts for the report."""
    if projection.enable_scale_trick and top_k < 2:
        raise XtokError(
            "a row with a scale slot needs at least 2 entries",
            hint="set {option} to 2 or more, or build the map without scale slots",
            parameter="top_k",
        )
    slot, sizes = projection.scale_slot, projection.entries_per_row
    has_slot = np.zeros(len(sizes), np.uint8) if slot is None else slot
    row_limits = (top_k - has_slot.astype(np.int64))[projection.student_ids]
    is_kept = (ranks(projection.student_ids) < row_limits) | projection.is_slot
    edges, is_cut = projection.edges.take(is_kept), sizes > top_k
    normalized = edges.normalized().weights
    weights = np.where(is_cut[edges.student_ids], normalized, edges.weights)
    dropped = projection.weights[~is_kept].sum(dtype=np.float64)
    counts: dict[str, float] = {
        "rows cut": int(np.count_nonzero(is_cut)),
        "entries cut": projection.nnz - len(weights),
        "mean mass cut per row": float(dropped) / max(1, int(np.count_nonzero(sizes))),
    }
    edges = edges._replace(weights=weights)
    result = map_from_edges(edges, before=projection, scale_slot=slot, top_k=top_k)
    return result.after("sort-cut", {"top_k": top_k}), counts
