"""`convert` and `transpose`: the same map in another format, or the other way round."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from xtok.maps import file as mapfile
from xtok.maps.edges import Edges, map_order
from xtok.maps.projection_map import ProjectionMap, RowKind


def convert(
    projection: mapfile.MapLike,
    output: str | PathLike[str],
    *,
    transpose: bool = False,
    **options: Any,
) -> ProjectionMap:
    """Write a map in the format that the output's suffix names, and return it.

    Args:
        projection: a map, or the path of any file that `load` reads.
        output: a `.safetensors` or `.pt` file.
        transpose: write the map from the teacher's tokens to the student's.
        options: as for `load`, for a path.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
    """
    mapfile.check_output(output)
    if isinstance(projection, ProjectionMap) and options:
        raise TypeError(f"{', '.join(options)}: options of reading a file, not of a map")
    if not isinstance(projection, ProjectionMap):
        projection = mapfile.load(projection, **options)
    result = _transposed(projection) if transpose else projection
    mapfile.save(result, output)
    return result


def transpose(projection: mapfile.MapLike) -> ProjectionMap:
    """Return the map of the other direction: roles swapped, rows normalized, without slots.

    A row keeps the kind that all its entries come from, EXACT and ROLE only if it has one entry.
    What comes from rows of several kinds is MIXED. Rows may have far more entries than before.

    Args:
        projection: a map, or the path of one.
    """
    return _transposed(mapfile.as_map(projection))


def _transposed(projection: ProjectionMap) -> ProjectionMap:
    kept = projection.edges.take(~projection.is_slot)
    edges = Edges(kept.teacher_ids, kept.student_ids, kept.weights).normalized()
    edges = edges._replace(weights=edges.weights.astype(np.float32))
    order = map_order(edges)
    s, t, weights = edges.take(order[edges.weights[order] > 0])
    entries = np.bincount(s, minlength=projection.shape[1])
    of_entry = projection.row_kind[t]
    least, largest = np.full(len(entries), 255, np.uint8), np.zeros(len(entries), np.uint8)
    np.minimum.at(least, s, of_entry)
    np.maximum.at(largest, s, of_entry)
    several = (entries > 1) & np.isin(largest, [RowKind.EXACT, RowKind.ROLE])
    kind = np.where((least < largest) | several, np.uint8(RowKind.MIXED), largest)
    result = replace(
        projection,
        student=projection.teacher,
        teacher=projection.student,
        student_ids=s.astype(np.int32),
        teacher_ids=t.astype(np.int32),
        weights=weights.astype(np.float32),
        row_kind=np.where(entries > 0, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=None,
        top_k=max(1, int(entries.max(initial=0))),
    )
    # The ids that the last stage of each kind ignores are now those of the other side.
    swapped = {
        f"ignore_{other}_ids": step["options"][f"ignore_{ours}_ids"]
        for step in projection.history
        for ours, other in (("student", "teacher"), ("teacher", "student"))
        if f"ignore_{ours}_ids" in step["options"]
    }
    options = swapped and {"ignore_student_ids": [], "ignore_teacher_ids": [], **swapped}
    counts = {
        "rows": int(np.count_nonzero(entries)),
        "rows empty": int(np.count_nonzero(entries == 0)),
        "slots dropped": int(np.count_nonzero(projection.is_slot)),
    }
    return result.after("transpose", options, counts)
