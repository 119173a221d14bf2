"""`sort_cut`: keep the heaviest entries of each row."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from xtok.config import SortCutConfig
from xtok.errors import XtokError
from xtok.maps.edges import row_starts
from xtok.maps.map_arguments import MapLike
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import map_of_edges, with_options
from xtok.maps.records import StageReport


def sort_cut(projection: MapLike, config: SortCutConfig | None = None) -> ProjectionMap:
    """Cut each row to its `top_k` heaviest entries and normalize it; a slot stays last.

    The slot counts as an entry. Shorter rows stay the same, bit for bit.

    >>> near = xtok.generate(xtok.pair("bytes", "bytes"), "spelling")
    >>> xtok.sort_cut(near, xtok.SortCutConfig(top_k=1))
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Raises:
        XtokError: if a row would keep only its slot.
    """
    projection = ProjectionMap.of(projection)
    config = SortCutConfig.or_default(config)
    result, counts = cut_rows(projection, config)
    is_counted = "texts" in (projection.recipe or ())  # `build` then adds exact rows after the cut
    recipe = None if is_counted else with_options(projection, top_k=config.top_k)
    report = StageReport("sort-cut", counts, _weight_notes(result))
    return replace(result, reports=(*result.reports, report), recipe=recipe)


def cut_rows(
    projection: ProjectionMap, config: SortCutConfig
) -> tuple[ProjectionMap, dict[str, float]]:
    """Make the map of `sort_cut` without report and recipe; also return counts of the cut."""
    if projection.enable_scale_trick and config.top_k < 2:
        raise XtokError(
            "a row with one entry can only contain its scale slot",
            hint="set {option} to 2 or more, or build the map without the scale trick",
            parameter="top_k",
        )
    starts = row_starts(projection.student_ids)
    sizes = np.diff(starts, append=projection.nnz)
    kept = np.minimum(sizes, config.top_k)
    # places: indices of the first `kept` entries of each row in the map's arrays
    ends = np.cumsum(kept)
    places = np.arange(int(kept.sum())) + np.repeat(starts - (ends - kept), kept)
    if projection.scale_slot is not None:  # keep the slot, a row's last entry, as the last place
        has_slot = projection.scale_slot[projection.student_ids[starts]] == 1
        places[ends[has_slot] - 1] = (starts + sizes)[has_slot] - 1
    edges = projection.edges.take(places)
    is_cut = np.repeat(kept < sizes, kept)
    weights = np.where(is_cut, edges.normalized().weights, edges.weights)
    dropped = np.delete(projection.weights, places).sum(dtype=np.float64)
    counts: dict[str, float] = {
        "rows cut": int(np.count_nonzero(kept < sizes)),
        "entries cut": projection.nnz - len(places),
        "mean mass cut per row": float(dropped) / max(1, len(starts)),
    }
    edges = edges._replace(weights=weights)
    slot = projection.scale_slot
    result = map_of_edges(edges, before=projection, scale_slot=slot, top_k=config.top_k)
    return result.after("sort-cut", asdict(config)), counts


def _weight_notes(projection: ProjectionMap) -> tuple[str, ...]:
    weights = projection.weights
    if not len(weights):
        return ()
    quantiles = np.percentile(weights, [50, 90, 95, 99])
    shown = zip(("median", "90th percentile", "95th", "99th"), quantiles.tolist(), strict=True)
    starts = row_starts(projection.student_ids)
    first = int(np.count_nonzero(weights[starts] == np.maximum.reduceat(weights, starts)))
    return (
        f"{len(weights):,} weights: mean {weights.mean(dtype=np.float64):.4f}, "
        + ", ".join(f"{name} {value:.4f}" for name, value in shown)
        + f", least {weights.min():.4f}, largest {weights.max():.4f}",
        f"heaviest entry: the first in {first:,} rows, a scale slot in {len(starts) - first:,}",
    )
