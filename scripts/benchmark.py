#!/usr/bin/env python
"""Time xtok's commands, each beside the least that a program must do for the same, and print both.

`build` is compared with a script that imports the same tokenizer library, loads both tokenizers and
encodes each vocabulary once in the other's; the commands on a map file with reading and writing the
file; `--help` with the smallest Typer program. Everything runs as a process of its own, the two of
a pair in turn, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = ROOT / "data" / "tokenizers"
MIB = 1 << 20

# Least programs. They do what must be done, as directly as the libraries allow, and nothing else.
# A tiktoken file: the library's own loader, and its plain call, which for short texts is far
# quicker than its batch call. A tokenizer.json: the Rust library alone, without transformers.
BARE_BUILD = """
import sys

def load(path):
    if path.endswith(".model"):
        from sentencepiece import SentencePieceProcessor
        model = SentencePieceProcessor(model_file=path)
        tokens = [model.id_to_piece(i).replace("\\u2581", " ") for i in range(len(model))]
        return tokens, model.encode
    if path.endswith(".tiktoken"):
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
        ranks = load_tiktoken_bpe(path)
        encoding = tiktoken.Encoding(
            path, pat_str=PATTERNS[path], mergeable_ranks=ranks, special_tokens={}
        )
        tokens = [token.decode("utf-8", "replace") for token in ranks]
        return tokens, lambda texts: list(map(encoding.encode_ordinary, texts))
    from tokenizers import Tokenizer
    rust = Tokenizer.from_file(path + "/tokenizer.json")
    decode = rust.decoder.decode
    tokens = [decode([display]) for display in rust.get_vocab()]
    return tokens, lambda texts: [
        e.ids for e in rust.encode_batch_fast(texts, add_special_tokens=False)
    ]

PATTERNS = PATTERNS_HERE
students, by_student = load(sys.argv[1])
teachers, by_teacher = load(sys.argv[2])
found = by_teacher(students), by_student(teachers)
"""
BARE_REWRITE = """
import sys
import numpy
from safetensors.numpy import load_file, save_file
save_file(load_file(sys.argv[1]), sys.argv[2])
"""
BARE_READ = """
import sys
import numpy
from safetensors.numpy import load_file
load_file(sys.argv[1])
"""
BARE_TYPER = """
import typer
app = typer.Typer()

@app.command()
def one(name: str = "x") -> None:
    "Do one thing."

@app.command()
def two(name: str = "x") -> None:
    "Do another."

app()
"""

PAIRS = {
    "Llama 3 → Qwen": ("llama3.tiktoken", "qwen.tiktoken"),
    "o200k → Qwen": ("o200k.tiktoken", "qwen.tiktoken"),
    "Claude 2 → Mistral v3": ("claude-2", "mistral-v3.model"),
    "DeepSeek → Qwen": ("deepseek-v3", "qwen.tiktoken"),
}


class Comparison(NamedTuple):
    """What is run beside what, and how many times its time is allowed."""

    name: str
    command: Sequence[str]
    bare: Sequence[str]
    limit: float
    memory: bool = False


class Run(NamedTuple):
    """Seconds and bytes of a process."""

    seconds: float
    memory: int


# Run by a process of its own, so that its largest child is the one that is measured.
_MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
seconds = time.perf_counter() - start
if done.returncode:
    sys.exit(done.stderr.decode())
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""


def run(command: Sequence[str], folder: Path) -> Run:
    """Run a process; return its time and its largest memory."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} failed:\n{done.stderr}")
    return Run(*json.loads(done.stdout))


def environment(folder: Path) -> dict[str, str]:
    """Return variables under which modules are compiled once, as those of installed packages are.

    The one run that is not counted does that, for both programs alike.
    """
    found = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    more = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOT, "PYTHONPYCACHEPREFIX": folder / "compiled"}
    return found | {name: str(value) for name, value in more.items()}


def xtok(*arguments: str | Path) -> list[str]:
    """Return a command of xtok."""
    return [sys.executable, "-m", "xtok", *map(str, arguments)]


def bare(script: str, *arguments: str | Path) -> list[str]:
    """Return a command that runs a script."""
    return [sys.executable, "-c", script, *map(str, arguments)]


def builds() -> list[Comparison]:
    """`build` of the pairs whose tokenizers were fetched."""
    from xtok.tokenizers import _tiktoken

    patterns = {
        str(TOKENIZERS / "llama3.tiktoken"): _tiktoken.LLAMA_3_PATTERN,
        str(TOKENIZERS / "qwen.tiktoken"): _tiktoken.QWEN_PATTERN,
        str(TOKENIZERS / "o200k.tiktoken"): _tiktoken.O200K_PATTERN,
    }
    script = BARE_BUILD.replace("PATTERNS_HERE", repr(patterns))
    found = []
    for name, pair in PAIRS.items():
        models = [TOKENIZERS / model for model in pair]
        if all(model.exists() for model in models):
            command = xtok("build", "--student-model", models[0], "--teacher-model", models[1])
            command += ["--output", "built.safetensors", "--quiet"]
            found.append(Comparison(f"build {name}", command, bare(script, *models), 1.3, True))
    return found


def map_commands(folder: Path) -> list[Comparison]:
    """The commands on a map of 128k rows of 32 entries."""
    write_map(folder / "map.safetensors")
    initial = ["--initial-projection-path", "map.safetensors", "--quiet", "--output"]
    rewrite = bare(BARE_REWRITE, "map.safetensors", "copy.safetensors")
    return [
        Comparison("sort-cut", xtok("sort-cut", *initial, "cut.safetensors"), rewrite, 2),
        Comparison(
            "reapply-exact", xtok("reapply-exact", *initial, "exact.safetensors"), rewrite, 2
        ),
        Comparison(
            "convert", xtok("convert", "map.safetensors", "--output", "new.safetensors"), rewrite, 2
        ),
        Comparison(
            "inspect", xtok("inspect", "map.safetensors"), bare(BARE_READ, "map.safetensors"), 2
        ),
    ]


def write_map(path: Path) -> None:
    """Write a map of 128,256 × 151,936 with 32 entries in each row, weights of a random draw."""
    import numpy as np

    from xtok.projection import ProjectionMap
    from xtok.tokens import Entry, TokenType, Vocabulary, decode_vocabulary

    rng = np.random.default_rng(0)
    rows, columns, top_k = 128_256, 151_936, 32
    sides = []
    for name, width, odd in (("student", rows, b"s%06x"), ("teacher", columns, b"t%06x")):
        form = (b"%06x", odd)  # every other token is one of both
        entries = [Entry(i, TokenType.NORMAL, form[i % 2] % i) for i in range(width)]
        table, _ = decode_vocabulary(entries, width=width)
        sides.append(
            Vocabulary(
                model_id=name,
                revision=None,
                backend=None,
                vocab_size=width,
                width_source="tokenizer",
                tokenizer_vocab_size=width,
                table=table,
            )
        )
    weights = -np.sort(-rng.random((rows, top_k), np.float32), axis=1) + np.float32(1e-3)
    weights /= weights.sum(axis=1, keepdims=True)
    steps = rng.integers(1, columns // top_k, (rows, top_k))
    ids = (np.cumsum(steps, axis=1) % columns).astype(np.int32)
    ids.sort(axis=1)
    ProjectionMap(
        student=sides[0],
        teacher=sides[1],
        student_ids=np.repeat(np.arange(rows, dtype=np.int32), top_k),
        teacher_ids=ids.ravel(),
        weights=weights.ravel(),
        row_kind=np.full(rows, 2, np.uint8),
        scale_slot=None,
        method="multitoken",
        top_k=top_k,
        history=({"stage": "multitoken", "options": {}},),
    ).save(path)


def compare(one: Comparison, repetitions: int, folder: Path) -> dict[str, Any]:
    """Run the two in turn, after one run that warms the disk's cache; compare the medians."""
    runs: dict[str, list[Run]] = {"ours": [], "bare": []}
    for repetition in range(repetitions + 1):
        for name, command in (("ours", one.command), ("bare", one.bare)):
            measured = run(command, folder)
            if repetition:
                runs[name].append(measured)
    seconds = {name: statistics.median(r.seconds for r in all_) for name, all_ in runs.items()}
    memory = {name: statistics.median(r.memory for r in all_) for name, all_ in runs.items()}
    ratio = seconds["ours"] / seconds["bare"]
    above = (memory["ours"] - memory["bare"]) / MIB
    return {
        "name": one.name,
        "seconds": round(seconds["ours"], 3),
        "bare_seconds": round(seconds["bare"], 3),
        "ratio": round(ratio, 2),
        "limit": one.limit,
        "mib": round(memory["ours"] / MIB),
        "mib_above_bare": round(above),
        "met": ratio <= one.limit and (not one.memory or above <= 512),
    }


def main() -> None:
    """Print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="the names that contain this")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    print(f"{'':30} xtok      bare      ratio (limit)  memory, above the bare program's")
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_ = [*builds(), *map_commands(folder)]
        all_.append(Comparison("--help", xtok("--help"), bare(BARE_TYPER, "--help"), 1.5))
        for one in all_:
            if arguments.only in one.name:
                r = compare(one, arguments.repetitions, folder)
                found.append(r)
                print(
                    f"{r['name']:30} {r['seconds']:6.2f} s  {r['bare_seconds']:6.2f} s  "
                    f"{r['ratio']:5.2f} ({r['limit']})  {'met   ' if r['met'] else 'MISSED'} "
                    f"{r['mib']:5} MiB, {r['mib_above_bare']:+} MiB",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
