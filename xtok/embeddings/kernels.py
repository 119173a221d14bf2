"""Numba kernels of `similarity`."""

from __future__ import annotations

from xtok.kernels import kernel

STRIDE = 64  # similarities that are compared at once, before any is looked at alone


@kernel
def keep_largest(tile, num_columns, first_id, absolute, values, ids):  # type: ignore[no-untyped-def]
    """Merge a tile of similarities into each row's `k` largest so far.

    Args:
        tile: float32 `[rows, columns]`, no NaN.
        num_columns: how many of the tile's columns count.
        first_id: the id of the first column; every id so far is smaller.
        absolute: compare absolute values.
        values: float32 `[rows, k]`, falling in each row; ties stay in the order of ids.
        ids: int32 `[rows, k]`, beside the values.
    """
    k = values.shape[1]
    for row in range(tile.shape[0]):
        floor = values[row, k - 1]
        for start in range(0, num_columns, STRIDE):
            stop = min(start + STRIDE, num_columns)
            above = 0
            for column in range(start, stop):
                x = tile[row, column]
                above += (x > floor) | (absolute & (x < -floor))
            if above == 0:
                continue
            for column in range(start, stop):
                x = tile[row, column]
                if absolute:
                    x = abs(x)
                if x > floor:
                    place = k - 1
                    while place > 0 and values[row, place - 1] < x:
                        values[row, place] = values[row, place - 1]
                        ids[row, place] = ids[row, place - 1]
                        place -= 1
                    values[row, place] = x
                    ids[row, place] = first_id + column
                    floor = values[row, k - 1]
