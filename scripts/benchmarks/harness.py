"""Shared by the cases: tokenizers, texts, synthetic maps, races of xtok against a peer."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
import timeit
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import fetch_models
import fetch_tokenizers
import numpy as np
import small_tokenizers
from numpy.typing import NDArray

from xtok.maps.creating import map_from_edges
from xtok.maps.edges import Edges, sum_duplicates
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.table import TokenTable, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (128_256, 151_936)  # Llama 3 and Qwen
FILES = {f.name: f.target.removesuffix("/tokenizer.json") for f in fetch_tokenizers.FILES}
Row = dict[str, Any]
Pair = tuple[str, str]


def path_of(name: str) -> Path:
    """Return a fetched tokenizer's path, or a fetched model's."""
    if name in fetch_models.NAMES:
        path = fetch_models.folder_of(name)
    else:
        path = fetch_tokenizers.DEFAULT_DIR / FILES[name]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return path


@cache
def tokenizer(name: str) -> Tokenizer:
    """Load a fetched tokenizer once."""
    return load_tokenizer(str(path_of(name)))


def chosen(pairs: Sequence[Pair], options: Namespace) -> Iterator[tuple[str, Pair]]:
    """Yield the pairs that `--only` selects, each with its label."""
    for pair in pairs:
        label = " → ".join(pair)
        if options.only in label:
            yield label, pair


def scaled_widths(options: Namespace) -> tuple[int, int]:
    """Return the widths of synthetic vocabularies."""
    return max(64, int(WIDTHS[0] * options.size)), max(64, int(WIDTHS[1] * options.size))


def documents(options: Namespace, split: str = "train") -> dict[str, list[str]]:
    """Return a corpus by language; without `--corpus` the small tokenizers' text, repeated."""
    if options.corpus is None:
        return {"own text": ["\n".join(small_tokenizers.CORPUS)] * max(1, int(200 * options.size))}
    texts = {}
    for path in sorted(options.corpus.glob(f"*.{split}.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line)["text"] for line in lines]
        texts[path.name.partition(".")[0]] = rows[: max(1, int(len(rows) * options.size))]
    if not texts:
        raise SystemExit(f"error: no *.{split}.jsonl.gz in {options.corpus}")
    return texts


def pieces(options: Namespace, characters: int) -> list[str]:
    """Return the documents of all languages in pieces of at most so many characters, shuffled."""
    texts = [
        text[i : i + characters]
        for of_language in documents(options).values()
        for text in of_language
        for i in range(0, len(text), characters)
    ]
    shuffled: list[str] = np.random.default_rng(0).permutation(np.array(texts, object)).tolist()
    return shuffled


class Run(NamedTuple):
    """The seconds of a call, and the peak memory of a process."""

    seconds: float
    mib: float = 0


class Race(NamedTuple):
    """Seconds of xtok and of its peer, turn by turn, and their median peak memory."""

    ours: list[float]
    peer: list[float]
    mib: list[float]

    def row(self, limit: float | None = None) -> Row:
        """Return medians, their ratio, and the range of single turns."""
        ours, peer = median(self.ours), median(self.peer)
        turns = sorted(a / b for a, b in zip(self.ours, self.peer, strict=True))
        row: Row = {"xtok s": ours, "peer s": peer, "ratio": ours / peer}
        row["turns"] = f"{turns[0]:.2f} to {turns[-1]:.2f}"
        if limit is not None:
            row["limit"] = limit
        if self.mib[0]:
            row |= {"MiB": self.mib[0], "above the peer's": self.mib[0] - self.mib[1]}
        return row


def race(ours: Callable[[], object], peer: Callable[[], object], repeat: int) -> Race:
    """Run two calls in turn; the first turn does not count. A call may time itself, as a `Run`."""

    def turn(call: Callable[[], object]) -> Run:
        start = time.perf_counter()
        result = call()
        return result if isinstance(result, Run) else Run(time.perf_counter() - start)

    sides = list(zip(*[(turn(ours), turn(peer)) for _ in range(repeat + 1)][1:], strict=True))
    seconds = [[run.seconds for run in side] for side in sides]
    return Race(seconds[0], seconds[1], [median(run.mib for run in side) for side in sides])


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Return the median time of a call."""
    return median(timeit.repeat(call, number=1, repeat=repeat))


def memory_status(name: str) -> int:
    """Return a size of this process as Linux reports it (`VmRSS`, `VmHWM`), in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# A small process starts the measured one: a child's peak includes its parent's memory at the fork.
_MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
seconds = time.perf_counter() - start
if done.returncode:
    sys.exit(done.stderr.decode())
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def run_python(folder: str, *arguments: str | Path) -> Run:
    """Run Python in a folder, with compiled modules like an installed package."""
    python = sys.executable
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    variables |= {"PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
    command = [python, "-c", _MEASURE, python, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[3:9])} failed:\n{done.stderr}")
    return Run(*json.loads(done.stdout))


def synthetic_map(
    counts: NDArray[np.int64],
    teacher_ids: NDArray[np.int64],
    widths: tuple[int, int],
    tables: Sequence[TokenTable | None] = (None, None),
) -> ProjectionMap:
    """Return a map of random weights with `counts[s]` of the teacher's ids in row s."""
    rows = np.repeat(np.arange(len(counts)), counts)
    weights = np.random.default_rng(0).random(len(rows)) + 1e-3
    one = Vocabulary(
        model_id="synthetic", revision=None, backend=None, vocab_size=0, width_source="option",
        tokenizer_vocab_size=None, table=None,
    )  # fmt: skip
    sides = [replace(one, vocab_size=n, table=t) for n, t in zip(widths, tables, strict=True)]
    return map_from_edges(
        sum_duplicates(Edges(rows, teacher_ids, weights)).normalized(),
        student=sides[0], teacher=sides[1], row_kind=np.full(widths[0], RowKind.MIXED, np.uint8),
        scale_slot=None, method="multitoken", top_k=int(counts.max()),
        history=({"stage": "multitoken", "options": {}},),
    )  # fmt: skip
