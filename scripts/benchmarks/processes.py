"""Commands as processes: time and peak memory, beside the small programs of bare.py."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import hub_folders
import numpy as np

from benchmarks import harness
from benchmarks.harness import Row, chosen, path_of, race, run_python
from xtok.tokenizers import _tiktoken
from xtok.vocab.table import Entry, TokenType, decode_vocabulary

BARE = Path(__file__).with_name("bare.py")
PAIRS = (
    ("llama3", "qwen"), ("o200k", "qwen"), ("claude-2", "mistral-v3"), ("deepseek-v3", "qwen"),
)  # fmt: skip
FOLDERS = (("llama3", "qwen"), ("qwen", "deepseek-v3"), ("mistral-v3", "llama3"))
PATTERNS = {
    "llama3": _tiktoken.LLAMA_3_PATTERN,
    "qwen": _tiktoken.QWEN_PATTERN,
    "o200k": _tiktoken.O200K_PATTERN,
}
Words = Sequence[str | Path]


def compare(label: str, command: Words, bare: Words, limit: float, options: Namespace) -> Row:
    """Run a command of xtok and a small program in turn, in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        ours = partial(run_python, folder, "-m", "xtok", *command)
        times = race(ours, partial(run_python, folder, BARE, *bare), options.repeat)
    return {"command": label, **times.row(limit)}


def build(options: Namespace) -> Iterator[Row]:
    """`build` beside loading both tokenizers and encoding each vocabulary in the other's."""
    for label, pair in chosen(PAIRS, options):
        student, teacher = map(path_of, pair)
        sides: Words = ["--student-model", student, "--teacher-model", teacher]
        command = ["build", *sides, "--output", "built.safetensors", "--quiet"]
        bare: Words = ["build", student, teacher, *(PATTERNS.get(name, "") for name in pair)]
        yield compare(f"build {label}", command, bare, 1.5, options)


def folders(options: Namespace) -> Iterator[Row]:
    """`build` on folders as on the hub beside AutoTokenizer and encoding each vocabulary."""
    with tempfile.TemporaryDirectory() as scratch:
        for label, pair in chosen(FOLDERS, options):
            student, teacher = (hub_folders.write(name, Path(scratch, name)) for name in pair)
            sides: Words = ["--student-model", student, "--teacher-model", teacher]
            command = ["build", *sides, "--output", "built.safetensors", "--quiet"]
            yield compare(
                f"build {label}", command, ["build", student, teacher, "", ""], 0.8, options
            )


def looking(options: Namespace) -> Iterator[Row]:
    """`doctor` of two folders, and `report` of a map for P-KL, beside plain `build`."""
    with tempfile.TemporaryDirectory() as scratch:
        sides = [hub_folders.write(name, Path(scratch, name)) for name in FOLDERS[0]]

        def xtok(*words: str | Path) -> object:
            return run_python(scratch, "-m", "xtok", *words, "-q")

        xtok("build", *sides, "--for", "p-kl", "-o", "p-kl.safetensors")
        build = partial(xtok, "build", *sides, "-o", "plain.safetensors")
        commands: tuple[Words, ...] = (("doctor", *sides), ("report", "p-kl.safetensors"))
        for words in commands:
            times = race(partial(xtok, *words), build, options.repeat)
            yield {"command": str(words[0]), **times.row(1)}


def spelling(options: Namespace) -> Iterator[Row]:
    """`generate` by spelling beside plain `build`."""
    for label, pair in chosen(PAIRS, options):
        sides = [str(path_of(name)) for name in pair]
        with tempfile.TemporaryDirectory() as folder:
            ours, peer = (
                partial(
                    run_python, folder, "-m", "xtok", command, *sides, "-q", "-o", "x.safetensors"
                )
                for command in ("generate", "build")
            )
            times = race(ours, peer, options.repeat)
        yield {"command": f"generate {label}", **times.row(4)}


def maps(options: Namespace) -> Iterator[Row]:
    """The commands on a map of 128k rows of 32 entries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "map.safetensors")
        write_map(path, harness.scaled_widths(options))
        output = ("--quiet", "--output", "new.safetensors")
        initial = ("--initial-projection-path", path, *output)
        commands: dict[str, Words] = {
            "sort-cut": initial,
            "reapply-exact": initial,
            "convert": (path, *output[1:]),
            "inspect": (path,),
        }
        for name, words in commands.items():
            if options.only in name:
                copy = [] if name == "inspect" else ["copy.safetensors"]
                yield compare(name, [name, *words], ["read", path, *copy], 2, options)


def show_help(options: Namespace) -> Iterator[Row]:
    """`xtok --help`."""
    yield compare("--help", ["--help"], ["show_help"], 1.5, options)


def write_map(path: Path, widths: tuple[int, int]) -> None:
    """Write a map with 32 entries per row; the two sides share every other token."""
    rng = np.random.default_rng(0)
    steps = rng.integers(1, max(2, widths[1] // 32), (widths[0], 32))
    tables = []
    for width, odd in zip(widths, (b"s%06x", b"t%06x"), strict=True):
        form = (b"%06x", odd)
        entries = [Entry(i, TokenType.NORMAL, form[i % 2] % i) for i in range(width)]
        tables.append(decode_vocabulary(entries, width=width)[0])
    ids = (np.cumsum(steps, axis=1) % widths[1]).ravel()
    harness.synthetic_map(np.full(widths[0], 32), ids, widths, tables).save(path)
