"""What the cases share: tokenizers, texts, synthetic maps, and turns of xtok and a peer."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import small_tokenizers
from numpy.typing import NDArray

from xtok.projection import ProjectionMap, RowKind
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokens import TokenTable, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
TOKENIZERS = ROOT / "data" / "tokenizers"
STUDENT_WIDTH, TEACHER_WIDTH = 128_256, 151_936  # Llama 3 and Qwen
FILES = {
    "llama3": "llama3.tiktoken", "llama4": "llama4.tiktoken", "qwen": "qwen.tiktoken",
    "cl100k": "cl100k.tiktoken", "o200k": "o200k.tiktoken", "mistral-v1": "mistral-v1.model",
    "mistral-v3": "mistral-v3.model", "tekken": "tekken.json", "deepseek-v3": "deepseek-v3",
    "claude-2": "claude-2",
}  # fmt: skip
Row = dict[str, Any]
Pair = tuple[str, str]


def path_of(name: str) -> Path:
    """Return a fetched tokenizer's path."""
    path = TOKENIZERS / FILES[name]
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    return path


@cache
def tokenizer(name: str) -> Tokenizer:
    """Load a fetched tokenizer once."""
    return load_tokenizer(str(path_of(name)))


def chosen(pairs: Sequence[Pair], options: Namespace) -> Iterator[tuple[str, Pair]]:
    """Yield the pairs that `--only` leaves, each with its label."""
    for pair in pairs:
        label = " → ".join(pair)
        if options.only in label:
            yield label, pair


def documents(options: Namespace, split: str = "train") -> dict[str, list[str]]:
    """Return a corpus by language; without one, the small tokenizers' text, repeated."""
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


class Race(NamedTuple):
    """Seconds of xtok and of its peer, turn by turn."""

    ours: list[float]
    peer: list[float]

    def row(self, limit: float | None = None) -> Row:
        """Return medians, their ratio, and the range of single turns."""
        seconds = median(self.ours), median(self.peer)
        turns = sorted(a / b for a, b in zip(self.ours, self.peer, strict=True))
        found: Row = {"xtok s": seconds[0], "peer s": seconds[1], "ratio": seconds[0] / seconds[1]}
        found["turns"] = f"{turns[0]:.2f} to {turns[-1]:.2f}"
        return found if limit is None else found | {"limit": limit}


def race(ours: Callable[[], float], peer: Callable[[], float], repeat: int) -> Race:
    """Run two calls, which return their seconds, in turn; the first turn is not counted."""
    turns = [(ours(), peer()) for _ in range(repeat + 1)][1:]
    return Race(*map(list, zip(*turns, strict=True)))


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Return a call that returns its seconds, as `race` takes it."""
    return lambda: seconds(call)


# A small process starts the one that is measured: the peak of a child counts its parent's memory
# at the fork.
_MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
seconds = time.perf_counter() - start
if done.returncode:
    sys.exit(done.stderr.decode())
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def run_python(folder: Path, *arguments: str | Path) -> tuple[float, float]:
    """Run Python in a folder and return the seconds and the peak MiB of its process.

    Modules are compiled once, as those of installed packages are.
    """
    python = sys.executable
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    variables |= {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    command = [python, "-c", _MEASURE, python, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[3:9])} failed:\n{done.stderr}")
    elapsed, peak = json.loads(done.stdout)
    return elapsed, peak


def synthetic_map(
    counts: NDArray[np.int64],
    teacher_ids: NDArray[np.int64],
    widths: tuple[int, int],
    tables: Sequence[TokenTable | None] = (None, None),
) -> ProjectionMap:
    """Return a map of random weights with `counts[s]` of the teacher's ids in row s."""
    rows = np.repeat(np.arange(len(counts)), counts)
    keys = np.unique(rows * widths[1] + teacher_ids)
    student_ids, teacher_ids = np.divmod(keys, widths[1])
    weights = np.random.default_rng(0).random(len(keys)) + 1e-3
    order = np.lexsort((-weights, student_ids))
    weights = weights[order] / np.bincount(student_ids, weights)[student_ids]
    one = Vocabulary(
        model_id="synthetic",
        revision=None,
        backend=None,
        vocab_size=0,
        width_source="option",
        tokenizer_vocab_size=None,
        table=None,
    )
    sides = [replace(one, vocab_size=n, table=t) for n, t in zip(widths, tables, strict=True)]
    return ProjectionMap(
        student=sides[0],
        teacher=sides[1],
        student_ids=student_ids.astype(np.int32),
        teacher_ids=teacher_ids[order].astype(np.int32),
        weights=weights.astype(np.float32),
        row_kind=np.full(widths[0], RowKind.MIXED, np.uint8),
        scale_slot=None,
        method="multitoken",
        top_k=int(counts.max()),
        history=({"stage": "multitoken", "options": {}},),
    )
