"""Largest cosine similarities of two lists of vectors, in tiles of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.building.embeddings.kernels import keep_largest

if TYPE_CHECKING:
    import torch

Vectors = NDArray[np.float32]
Advance = Callable[[int], object]
Weigh = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

# Rows and columns of a tile on a CPU: 4 MB. Every product has this shape and runs on one thread, so
# its bits depend neither on the chunk size nor on the number of threads.
TILE = (512, 2048)

CUDA_TILE = (4096, 16384)


class Cosine:
    """Similarity of student vectors to a fixed list of teacher vectors.

    Args:
        teachers: float32 `[m, d]`, finite, without zero vectors.
        device: `cpu`, `cuda`, or `cuda:N`.
        dtype: rounding of the normalized vectors; sums stay float32.
        chunk_size: number of student vectors to prepare at once.
        pool: threads of `one_thread_each`.
    """

    def __init__(
        self,
        teachers: Vectors,
        *,
        device: str,
        dtype: str,
        chunk_size: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        import torch

        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rows, self._columns = TILE if self._device.type == "cpu" else CUDA_TILE
        self._chunk = -(-chunk_size // self._rows) * self._rows
        self._pool = pool
        self._num_teachers = len(teachers)
        self._teachers = self._prepared(teachers, self._columns)

    def top_k(
        self,
        students: Vectors,
        k: int,
        *,
        absolute: bool,
        advance: Advance,
        weigh: Weigh | None = None,
    ) -> tuple[Vectors, NDArray[np.int32], NDArray[np.float64]]:
        """Return each student vector's `k` largest cosines and teacher indices, both `[n, k]`.

        They are sorted by descending value, then index; `absolute` compares |cosine|. Also return
        the sum of all m weights, `[n]`, if `weigh` converts cosines and a row's largest to weights.
        """
        import torch

        values = np.full((len(students), k), -2, np.float32)
        ids = np.full((len(students), k), -1, np.int32)
        sums = np.zeros(len(students))

        def work(rows: torch.Tensor, start: int) -> None:
            part = slice(start, start + self._rows)
            size = len(values[part])
            for first, tile in self._tiles(rows):
                cosines = tile[:size].cpu().numpy()
                keep_largest(cosines, cosines.shape[1], first, absolute, values[part], ids[part])
            if weigh is not None:
                largest = torch.from_numpy(values[part, :1]).to(self._device)
                for _, tile in self._tiles(rows):
                    weights = weigh(tile[:size], largest)
                    sums[part] += weights.sum(1, dtype=torch.float64).cpu().numpy()
            advance(size)

        run = self._pool.map if self._device.type == "cpu" else map
        for start in range(0, len(students), self._chunk):
            rows = self._prepared(students[start : start + self._chunk], self._rows)
            list(run(work, rows.split(self._rows), range(start, len(students), self._rows)))
        return values, ids, sums

    def _prepared(self, vectors: Vectors, multiple: int) -> torch.Tensor:
        import torch

        length = -(-len(vectors) // multiple) * multiple
        # A GPU multiplies low precision directly. A CPU rounds to it and multiplies as float32,
        # which gives the same products.
        on_cpu = self._device.type == "cpu"
        dtype = torch.float32 if on_cpu else self._dtype
        result = torch.zeros(length, vectors.shape[1], dtype=dtype, device=self._device)
        for start in range(0, len(vectors), 8192):
            part = vectors[start : start + 8192].astype(np.float64)
            part /= np.sqrt(np.square(part).sum(axis=1, keepdims=True))
            rounded = torch.from_numpy(part.astype(np.float32)).to(self._dtype)
            result[start : start + len(part)] = rounded.to(self._device)
        return result

    def _tiles(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        import torch

        options: dict[str, Any] = {}
        if rows.dtype != torch.float32:
            options["out_dtype"] = torch.float32
        shape = (len(rows), self._columns)
        tile = torch.empty(shape, dtype=torch.float32, device=self._device)
        for start in range(0, len(self._teachers), self._columns):
            columns = self._teachers[start : start + self._columns].T
            torch.mm(rows, columns, out=tile, **options)
            yield start, tile[:, : self._num_teachers - start]
