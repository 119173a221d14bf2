"""What people wait for: commands as processes, beside a command or program that does less."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

import hub_folders

from benchmarks.harness import ROOT, Row, documents, path_of, race, run_python
from benchmarks.processes import BARE, PATTERNS, Words

XTOK = ("-m", "xtok")
NO_KERNELS = (
    "-c", "import os, tempfile; os.environ['NUMBA_CACHE_DIR'] = tempfile.mkdtemp()\n"
    "from xtok.__main__ import program; program()",
)  # fmt: skip
QUIET = ("--quiet", "-o", "new.safetensors")


def waits(options: Namespace) -> Iterator[Row]:
    """Each row of a command: what it runs beside, and how many times that it may take."""
    student, teacher = (path_of(name) for name in ("llama3", "qwen"))
    patterns = [PATTERNS[name] for name in ("llama3", "qwen")]
    pair: Words = (student, teacher)
    with tempfile.TemporaryDirectory() as folder:
        folders: Words = [hub_folders.write(n, Path(folder, n)) for n in ("llama3", "qwen")]
        texts = {size: write_text(Path(folder, f"{size}.jsonl"), size, options) for size in (1, 4)}
        maps: Words = [Path(folder, name) for name in ("p-kl.safetensors", "recipe.safetensors")]
        loss = ("--for", "p-kl")
        for path, extra in zip(maps, (loss, ()), strict=True):
            run_python(folder, *XTOK, "build", *pair, *extra, "--quiet", "-o", path)
        plain: Words = (*XTOK, "build", *pair, *QUIET)
        cases: dict[str, tuple[Words, Words, float]] = {
            "build --for p-kl, beside build": ((*plain, *loss), plain, 3),
            "build --for p-kl of folders, beside AutoTokenizer": (
                (*XTOK, "build", *folders, *loss, *QUIET), (BARE, "build", *folders, "", ""), 1.5,
            ),
            **{
                f"build --for p-kl --text, {size} MB, beside encoding": (
                    (*plain, *loss, "--text", path), (BARE, "encode", *pair, path, *patterns), 1.5,
                )
                for size, path in texts.items()
            },
            "align, no kernels kept, beside a small kernel": (
                (*NO_KERNELS, "align", *pair, "Hello there"), (BARE, "kernel"), 6,
            ),
            "align, beside a small kernel": (
                (*XTOK, "align", *pair, "Hello there"), (BARE, "kernel"), 1,
            ),
            "report of a map for p-kl, beside a map of the recipe": (
                (*XTOK, "report", maps[0], "--quiet", "-o", "a.html"),
                (*XTOK, "report", maps[1], "--quiet", "-o", "b.html"), 1.1,
            ),
            "doctor of two folders, beside build": (
                (*XTOK, "doctor", *folders), (*XTOK, "build", *folders, *QUIET), 1,
            ),
            "--help, beside importing its libraries": (
                (*XTOK, "--help"), ("-c", "import typer, rich, numpy"), 1.75,
            ),
        }  # fmt: skip
        for label, (ours, beside, limit) in cases.items():
            if options.only in label:
                ours_run, peer_run = (partial(run_python, folder, *w) for w in (ours, beside))
                yield {"command": label, **race(ours_run, peer_run, options.repeat).row(limit)}


def write_text(path: Path, megabytes: float, options: Namespace) -> Path:
    """Write JSON lines of a size: a corpus, over and over."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in islice(cycle(chain.from_iterable(documents(options).values())), 1_000_000):
            size += file.write(json.dumps({"text": text}) + "\n")
            if size >= 1e6 * megabytes * options.size:
                break
    return path


def tests(options: Namespace) -> Iterator[Row]:
    """The tests, whole, beside those that need no real tokenizer."""
    whole, small = (
        partial(run_python, str(ROOT), "-m", "pytest", "-q", *words)
        for words in ((), ("-m", "not real"))
    )
    yield {"command": "pytest", **race(whole, small, options.repeat).row()}
