"""Measure the memory that reading a `.pt` map takes, for each layout that xtok reads.

Prints, as a multiple of the file, the peak of a fresh process's resident memory, less what it had
after the imports and a first small map.

    python scripts/measure_pt_memory.py --megabytes 20 --megabytes 200    # Linux
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COLUMNS = 150_000

READ = """
import re, sys
from pathlib import Path
from xtok import mapfile

def peak():
    "Kilobytes; resource.getrusage would count those of the parent before exec as well."
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

warm, path, rows, columns = *sys.argv[1:3], *map(int, sys.argv[3:])
mapfile.load(warm, teacher_vocab_size=4)
before = peak()
mapfile.load(path, student_vocab_size=rows, teacher_vocab_size=columns)
print(peak() - before)
"""


def padded(size: int, top_k: int) -> tuple[Any, int, int]:
    """Return a padded map of a size in bytes, and its shape."""
    rows = size // (12 * top_k)
    ids = torch.randint(0, COLUMNS - top_k, (rows, 1)) + torch.arange(top_k)
    weights = torch.rand(rows, top_k).sort(descending=True).values
    return {"indices": ids, "likelihoods": weights}, rows, COLUMNS


def counts(size: int, number: type) -> tuple[Any, int, int]:
    """Return counts of pairs, ints or floats, likewise."""
    items, rows = size // (17 if number is int else 23), 128_000
    ids = (torch.randint(0, n, (items,)).tolist() for n in (rows, COLUMNS))
    pairs = enumerate(zip(*ids, strict=True))
    return {pair: number(i % 1000 + 1) for i, pair in pairs}, rows, COLUMNS


def sparse(size: int) -> tuple[Any, int, int]:
    """Return a sparse matrix, likewise."""
    entries, rows = size // 20, 128_000
    ids = torch.stack([torch.randint(0, n, (entries,)) for n in (rows, COLUMNS)])
    matrix = torch.sparse_coo_tensor(
        ids, torch.rand(entries), (rows, COLUMNS), check_invariants=True
    )
    return matrix.coalesce(), rows, COLUMNS


def dense(size: int) -> tuple[Any, int, int]:
    """Return a matrix without zeros, likewise."""
    rows = size // (4 * 2500)
    return torch.rand(rows, 2500) + 0.01, rows, 2500


LAYOUTS: dict[str, Callable[[int], tuple[Any, int, int]]] = {
    "indices and likelihoods, 4 columns": lambda size: padded(size, 4),
    "indices and likelihoods, 32 columns": lambda size: padded(size, 32),
    "a dict of integers": lambda size: counts(size, int),
    "a dict of floats": lambda size: counts(size, float),
    "a sparse matrix": sparse,
    "a dense matrix": dense,
}


def main() -> None:
    """Print a line for each layout and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, action="append", help="sizes [20 and 200]")
    sizes = parser.parse_args().megabytes or [20, 200]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        warm, path = Path(folder, "warm.pt"), Path(folder, "map.pt")
        few = {"indices": torch.tensor([[3, 1]]), "likelihoods": torch.tensor([[0.5, 0.25]])}
        torch.save(few, warm)
        for name, make in LAYOUTS.items():
            for megabytes in sizes:
                loaded, *shape = make(megabytes * 10**6)
                torch.save(loaded, path)
                del loaded
                command = [sys.executable, "-c", READ, *map(str, (warm, path, *shape))]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                size = path.stat().st_size
                factor = int(done.stdout) * 1024 / size
                print(f"{name}: {size / 1e6:.0f} MB, {factor:.1f} times the file", flush=True)


if __name__ == "__main__":
    main()
