"""Measure the similarity search of `xtok generate` against the same bare matrix product.

Both take turns in one process, on random vectors in the number of two real vocabularies, so that
the ratio holds however busy the machine is.

    python scripts/benchmark_generate.py --size 0.1          # a tenth of both vocabularies
    python scripts/benchmark_generate.py                     # 128k × 152k × 384: minutes
    python scripts/benchmark_generate.py --no-bare           # peak memory of the search alone
    python scripts/benchmark_generate.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from xtok.embeddings.similarity import Cosine
from xtok.threads import one_thread_each

STUDENT, TEACHER, DIMENSION = 128_256, 151_936, 384
_BLOCK = 1024  # rows of the bare product at once: 0.6 GB with all of the teacher's columns


def bare_product(students: torch.Tensor, teachers: torch.Tensor) -> float:
    """Multiply in blocks of rows, use nothing of the result, and return the seconds."""
    product = torch.empty(_BLOCK, len(teachers), dtype=students.dtype, device=students.device)
    start = time.perf_counter()
    for first in range(0, len(students), _BLOCK):
        rows = students[first : first + _BLOCK]
        torch.mm(rows, teachers.T, out=product[: len(rows)])
    if students.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def search(cosine: Cosine, students: NDArray[np.float32], top_k: int) -> float:
    """Find the top-k of all rows and return the seconds."""
    start = time.perf_counter()
    cosine.top_k(students, top_k, absolute=True, advance=lambda size: None)
    return time.perf_counter() - start


def tiles_alone(cosine: Cosine, students: NDArray[np.float32]) -> float:
    """Multiply in the search's own tiles, without a top-k, and return the seconds."""

    def work(rows: torch.Tensor, start: int, stop: int) -> None:
        for _ in cosine.tiles(rows):
            pass

    start = time.perf_counter()
    cosine.for_blocks(students, work)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Measure xtok generate's similarity search.")
    parser.add_argument("--size", type=float, default=1.0, help="scale of both vocabularies")
    parser.add_argument("--parts", type=int, default=8, help="turns that the two take")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    num_students = max(1, round(STUDENT * options.size))
    num_teachers = max(options.top_k, round(TEACHER * options.size))
    random = np.random.default_rng(0)
    students = random.standard_normal((num_students, DIMENSION), dtype=np.float32)
    teachers = random.standard_normal((num_teachers, DIMENSION), dtype=np.float32)
    num_threads = torch.get_num_threads()
    bare, tiles, ours = [], [], []
    with one_thread_each() as pool:
        cosine = Cosine(
            teachers,
            device=options.device,
            dtype=options.dtype,
            chunk_size=options.chunk_size,
            pool=pool,
        )
        search(cosine, students[:4096], options.top_k)  # compiles the kernel
        dtype = torch.float32 if options.device == "cpu" else getattr(torch, options.dtype)
        for part in np.array_split(students, options.parts):
            ours.append(search(cosine, part, options.top_k))
            if options.bare:
                tiles.append(tiles_alone(cosine, part))
                torch.set_num_threads(num_threads)
                both = [torch.from_numpy(v).to(options.device, dtype) for v in (part, teachers)]
                bare.append(bare_product(*both))
                torch.set_num_threads(1)
    work = 2 * num_students * num_teachers * DIMENSION / 1e9
    print(f"{num_students:,} × {num_teachers:,} × {DIMENSION}, {options.device} {options.dtype}")
    print(f"top-k: {sum(ours):.1f} s, {work / sum(ours):,.0f} GFLOP/s")
    if bare:
        print(f"bare product: {sum(bare):.1f} s, {work / sum(bare):,.0f} GFLOP/s")
        print(f"products in tiles: {sum(tiles):.1f} s, {work / sum(tiles):,.0f} GFLOP/s")
        print(f"ratio: {sum(bare) / sum(ours):.2f} of the bare product's rate")
        shares = sorted(b / o for b, o in zip(bare, ours, strict=True))
        print(f"       {shares[0]:.2f} to {shares[-1]:.2f} in {len(shares)} turns")
        print(f"       {sum(tiles) / sum(ours):.2f} of the rate of the same tiles without a top-k")
    what = "process, the bare product included" if bare else "process"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print(f"peak memory of the {what}: {peak:.2f} GiB")
    if options.device != "cpu":
        print(f"peak memory of the device: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
