"""The packed columns of a report page, read as `page.js` reads them."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

from xtok.inspection.page.search import PageColumns, pack_columns
from xtok.inspection.report import PageData


def unpack(columns: PageColumns, name: str) -> NDArray[np.int64]:
    """Return the numbers of a column."""
    width, data = columns[name]
    planes = np.frombuffer(zlib.decompress(base64.b64decode(data), -15), np.uint8)
    numbers = np.zeros(len(planes) // width, np.int64)
    for number, plane in enumerate(planes.reshape(width, -1)):
        numbers += plane.astype(np.int64) << 8 * number
    return numbers


def unpack_weights(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weights of codes, which have three digits."""
    weights: NDArray[np.float64] = (codes % 900 + 100) / 10.0 ** (codes // 900 + 2)
    return weights


def unpack_map(examined: PageData, number: int = 0) -> list[tuple[int, int, float]]:
    """Return the entries of a map of a page: student id, teacher id and weight."""
    columns = pack_columns(examined)
    deltas = unpack(columns, "partner")
    steps = np.where(deltas % 2, (deltas - 1) // 2, -deltas // 2)
    partner, last = np.full(len(deltas), -1), -1
    for i in np.flatnonzero(deltas).tolist():
        last += 1 + int(steps[i])
        partner[i] = last
    sizes, own, ids, codes = (
        unpack(columns, f"{name}_{number}") for name in ("sizes", "own", "ids", "weights")
    )
    rows = np.repeat(np.arange(len(sizes)), sizes)
    teachers = partner[rows]
    teachers[own == 0] = ids
    return list(zip(rows.tolist(), teachers.tolist(), unpack_weights(codes).tolist(), strict=True))
