"""Compute the largest cosine similarities of two lists of vectors, in tiles of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.building.embeddings.kernels import keep_largest
from xtok.config import GenerateConfig

if TYPE_CHECKING:
    import torch

Vectors: TypeAlias = NDArray[np.float32]
Weigh: TypeAlias = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

# Rows and columns of a tile on a CPU (4 MB). Every matrix product has this shape and runs on one
# thread, so the chunk size and the number of threads do not change the result.
TILE = (512, 2048)

CUDA_TILE = (4096, 16384)

# Number of student vectors to prepare at once. This limits the memory, and does not change results.
CHUNK_SIZE = 8192


def largest_cosines(
    students: Vectors,
    teachers: Vectors,
    config: GenerateConfig,
    *,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], object],
    weigh: Weigh | None = None,
) -> tuple[Vectors, NDArray[np.int32], NDArray[np.float64]]:
    """Return each student vector's largest cosines, and their teacher indices, `[n, top_k]`.

    Each row is sorted by descending value, then by index. The third result, `[n]`, is the sum of
    all m weights in each row. If `weigh` is None, the sum is 0.

    Args:
        students: the student's vectors, float32 `[n, d]`, finite, without zero vectors.
        teachers: the teacher's vectors, `[m, d]`, with the same requirements.
        config: the options. The transform `power` compares |cosine|. Normalized vectors are
            rounded to `dtype`; sums are always float32.
        pool: a pool from `one_thread_each`.
        advance: called with the number of compared vectors.
        weigh: a function that converts cosines, and each row's largest cosine, to weights.
    """
    import torch

    device, dtype, k = config.device, config.dtype, min(config.top_k, len(teachers))
    on_cpu, absolute = device == "cpu", config.transform == "power"
    num_rows, num_columns = TILE if on_cpu else CUDA_TILE
    columns = _prepare(teachers, num_columns, device, dtype)
    values = np.full((len(students), k), -2, np.float32)
    ids = np.full((len(students), k), -1, np.int32)
    sums = np.zeros(len(students))

    def tiles(rows: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        is_low = rows.dtype != torch.float32
        options: dict[str, Any] = {"out_dtype": torch.float32} if is_low else {}
        tile = torch.empty((num_rows, num_columns), dtype=torch.float32, device=device)
        for start in range(0, len(teachers), num_columns):
            torch.mm(rows, columns[start : start + num_columns].T, out=tile, **options)
            yield start, tile[:size, : len(teachers) - start]

    def work(rows: torch.Tensor, start: int) -> None:
        part = slice(start, start + num_rows)
        size = len(values[part])
        for first, tile in tiles(rows, size):
            cosines = tile.cpu().numpy()
            keep_largest(cosines, cosines.shape[1], first, absolute, values[part], ids[part])
        if weigh is not None:
            largest = torch.from_numpy(values[part, :1]).to(device)
            for _, tile in tiles(rows, size):
                sums[part] += weigh(tile, largest).sum(1, dtype=torch.float64).cpu().numpy()
        advance(size)

    run = pool.map if on_cpu else map
    step = -(-CHUNK_SIZE // num_rows) * num_rows
    for start in range(0, len(students), step):
        rows = _prepare(students[start : start + step], num_rows, device, dtype)
        starts = range(start, len(students), num_rows)
        list(run(work, rows.split(num_rows), starts))
    return values, ids, sums


def _prepare(vectors: Vectors, multiple: int, device: str, dtype: str) -> torch.Tensor:
    """Normalize and round vectors, and append zero vectors up to a multiple of `multiple`."""
    import torch

    low: torch.dtype = getattr(torch, dtype)
    # A GPU multiplies in low precision directly. On a CPU, vectors are rounded to low precision and
    # multiplied as float32, which gives the same products.
    length = -(-len(vectors) // multiple) * multiple
    stored_dtype = torch.float32 if device == "cpu" else low
    result = torch.zeros(length, vectors.shape[1], dtype=stored_dtype, device=device)
    for start in range(0, len(vectors), 8192):
        part = vectors[start : start + 8192].astype(np.float64)
        part /= np.sqrt(np.square(part).sum(axis=1, keepdims=True))
        rounded = torch.from_numpy(part.astype(np.float32)).to(low)
        result[start : start + len(part)] = rounded.to(device)
    return result
