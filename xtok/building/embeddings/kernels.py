"""Numba kernels for `similarity` and `spelling`."""

from __future__ import annotations

import numpy as np

from xtok._lib.kernels import kernel

STRIDE = 64  # number of similarities that are compared at once with the smallest kept value


@kernel
def keep_largest(tile, num_columns, first_id, absolute, values, ids):  # type: ignore[no-untyped-def]
    """Merge a tile of similarities into the `k` largest values of each row.

    `tile` is float32 `[rows, columns]` without NaN. `first_id`, the id of its first column, is
    larger than all ids so far. `values`, float32 `[rows, k]`, are descending; ties are in the order
    of `ids`.
    """
    k = values.shape[1]
    for row in range(tile.shape[0]):
        floor = values[row, k - 1]
        for start in range(0, num_columns, STRIDE):
            end = min(start + STRIDE, num_columns)
            above = 0
            for column in range(start, end):
                x = tile[row, column]
                above += (x > floor) | (absolute & (x < -floor))
            if above == 0:
                continue
            for column in range(start, end):
                x = tile[row, column]
                if absolute:
                    x = abs(x)
                if x > floor:
                    rank = k - 1
                    while rank > 0 and values[row, rank - 1] < x:
                        values[row, rank] = values[row, rank - 1]
                        ids[row, rank] = ids[row, rank - 1]
                        rank -= 1
                    values[row, rank] = x
                    ids[row, rank] = first_id + column
                    floor = values[row, k - 1]


@kernel
def add_up_and_keep_largest(shared, first, values, indices):  # type: ignore[no-untyped-def]
    """Fill each empty row with the `k` columns of largest cosine.

    The dot product of a row and a column is the sum of the squared weights of their shared n-grams.
    `first` is the number of the first row. `indices`, int32 `[rows, k]`, are -1 in empty rows.
    `values`, float64 `[rows, k]`, are descending, with 0 as padding. Ties are sorted by index.
    """
    row_starts, row_grams, row_lengths, squares, starts, columns, per_length, column_order = shared
    k = values.shape[1]
    sums = np.zeros(len(per_length), np.int32)
    touched = np.empty(len(per_length) + 1, np.int32)
    for row in range(values.shape[0]):
        if indices[row, 0] >= 0:
            continue
        num_touched = 0
        for i in range(row_starts[first + row], row_starts[first + row + 1]):
            gram = row_grams[i]
            for j in range(starts[gram], starts[gram + 1]):
                column = columns[j]
                touched[num_touched] = column  # a repeated column is overwritten
                num_touched += sums[column] == 0
                sums[column] += squares[gram]
        for i in range(num_touched):
            column = touched[i]
            x = sums[column] * per_length[column]
            sums[column] = 0
            if x < values[row, k - 1]:
                continue
            id = column_order[column]
            rank = k
            while rank > 0 and (
                values[row, rank - 1] < x
                or (values[row, rank - 1] == x and indices[row, rank - 1] > id)
            ):
                rank -= 1
                if rank + 1 < k:
                    values[row, rank + 1] = values[row, rank]
                    indices[row, rank + 1] = indices[row, rank]
            if rank < k:
                values[row, rank], indices[row, rank] = x, id
        for rank in range(k):
            values[row, rank] = min(values[row, rank] / row_lengths[first + row], 1.0)
