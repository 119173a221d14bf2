"""`sort_cut`: the heaviest entries of each row."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from xtok.config import (
    SortCutConfig,
)
from xtok.errors import XtokError
from xtok.maps.edges import row_starts
from xtok.maps.projection_map import REORDERED, ProjectionMap, StageReport
from xtok.maps.results import finished, history_with

if TYPE_CHECKING:
    pass


def sort_cut(projection: ProjectionMap, config: SortCutConfig | None = None) -> ProjectionMap:
    """Cut each row to its `top_k` heaviest entries and normalize what is left; a slot stays last.

    The slot is one of the `top_k`. Rows that are not cut stay as they are, bit for bit.

    Raises:
        XtokError: if nothing but the slot would be left of a row.
    """
    config = config or SortCutConfig()
    if projection.enable_scale_trick and config.top_k < 2:
        raise XtokError(
            "--top-k 1 leaves no entry beside the scale slot",
            hint="give --top-k 2 or more, or build the map with --no-scale-trick",
        )
    starts = row_starts(projection.student_ids)
    sizes = np.diff(starts, append=projection.nnz)
    kept = np.minimum(sizes, config.top_k)
    ends = np.cumsum(kept)
    places = np.arange(int(kept.sum())) + np.repeat(starts - (ends - kept), kept)
    if projection.scale_slot is not None:  # a row's last entry is kept instead of the next best
        has_slot = projection.scale_slot[projection.student_ids[starts]] == 1
        places[ends[has_slot] - 1] = (starts + sizes)[has_slot] - 1
    edges = projection.edges.take(places)
    is_cut = np.zeros(projection.shape[0], np.bool_)
    is_cut[projection.student_ids[starts]] = kept < sizes
    dropped = np.ones(projection.nnz, np.bool_)
    dropped[places] = False
    weights = np.where(is_cut[edges.student_ids], edges.normalized().weights, edges.weights)
    mass = float(projection.weights[dropped].sum(dtype=np.float64))
    report = StageReport(
        "sort-cut",
        {
            "rows cut": int(is_cut.sum()),
            "entries cut": projection.nnz - len(places),
            "mean mass cut per row": mass / max(1, int(np.count_nonzero(projection.row_kind))),
            "rows whose order changed": sum(
                report.counts.get(REORDERED, 0) for report in projection.reports
            ),
        },
    )
    return finished(
        edges._replace(weights=weights),
        student=projection.student,
        teacher=projection.teacher,
        row_kind=projection.row_kind,
        scale_slot=projection.scale_slot,
        method=projection.method,
        top_k=config.top_k,
        history=history_with(projection, {"stage": "sort-cut", "options": asdict(config)}),
        reports=(*projection.reports, report),
    )
