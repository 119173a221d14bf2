"""Commands as processes: time and peak memory, compared with a smaller program or command.

In a row of the table, `file:NAME` is a fetched tokenizer and `folder:NAME` a model folder with it;
`pattern:NAME` is its split pattern; `text:N` is N megabytes of JSON Lines; `map:OPTIONS` is a map
from Llama 3 to Qwen; `map:folders` a map between folders, `map:wide` a map with 32 entries per row;
`ranks:N` a synthetic vocabulary of N tokens, `model:NAME` a folder of scripts/fetch_models.py.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from argparse import Namespace
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from itertools import chain, count, cycle
from pathlib import Path

import hub_folders
import numpy as np

from benchmarks.harness import (
    Row,
    documents,
    path_of,
    race,
    run_python,
    scaled_widths,
    synthetic_map,
    tokenizer,
)  # fmt: skip
from xtok.tokenizers import _tiktoken
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

BARE = str(Path(__file__).with_name("bare.py"))
PATTERNS = {
    "llama3": _tiktoken.LLAMA_3_PATTERN,
    "qwen": _tiktoken.QWEN_PATTERN,
    "o200k": _tiktoken.O200K_PATTERN,
}
COLD = (
    "import os, tempfile; os.environ['NUMBA_CACHE_DIR'] = tempfile.mkdtemp()\n"
    "from xtok.__main__ import program; program()"
)
STARTS = {  # the first word of a row, and the arguments of Python
    "xtok": ["-m", "xtok"],
    "without-kernels": ["-c", COLD],
    "bare": [BARE],
}
PAIR, FOLDERS = "file:llama3 file:qwen", "folder:llama3 folder:qwen"
FAR = "model:gemma3 folder:qwen"  # share little
ENCODE = f"{PAIR} pattern:llama3 pattern:qwen"
COMMANDS = (  # command, compared program, maximum ratio
    (f"xtok build {PAIR}", f"bare build {ENCODE}", 1.5),
    ("xtok build file:o200k file:qwen",
     "bare build file:o200k file:qwen pattern:o200k pattern:qwen", 1.5),
    ("xtok build file:claude-2 file:mistral-v3", "bare build file:claude-2 file:mistral-v3", 1.5),
    ("xtok build file:deepseek-v3 file:qwen",
     "bare build file:deepseek-v3 file:qwen '' pattern:qwen", 1.5),
    (f"xtok build {FOLDERS}", f"bare build {FOLDERS}", 0.4),
    (f"xtok build {FAR}", f"bare build {FAR}", 0.6),
    ("xtok build folder:qwen folder:deepseek-v3", "bare build folder:qwen folder:deepseek-v3", 0.8),
    ("xtok build folder:mistral-v3 folder:llama3",
     "bare build folder:mistral-v3 folder:llama3", 0.8),
    (f"xtok build {PAIR} --for p-kl", f"xtok build {PAIR}", 3),
    (f"xtok build {FOLDERS} --for p-kl", f"bare build {FOLDERS}", 0.9),
    (f"xtok build {FAR} --for p-kl", f"bare build {FAR}", 1.5),
    *((f"xtok build {PAIR} --for p-kl --text text:{size}", beside, 1.5) for size in (2, 12)
      for beside in (f"xtok build {PAIR} --for p-kl", f"bare encode text:{size} {ENCODE}")),
    (f"xtok events {PAIR} --for csd", f"bare build {ENCODE}", 1.5),
    (f"xtok events {FOLDERS} --for csd", f"bare build {FOLDERS}", 0.5),
    (f"xtok doctor {FOLDERS}", f"xtok build {FOLDERS}", 1),
    (f"xtok verify map: {PAIR}", f"bare load {PAIR}", 1.1),
    (f"xtok verify map:folders {FOLDERS}", f"bare load {FOLDERS}", 1.1),
    (f"xtok align {PAIR} 'Hello there'", f"bare load {PAIR}", 1.3),
    (f"xtok align {FOLDERS} 'Hello there'", f"bare load {FOLDERS}", 1.3),
    (f"xtok align {PAIR} 'Hello there'", "bare kernel", 1),
    ("without-kernels align file:claude-2 file:qwen 'ﬁne'", "bare kernel", 4),
    ("xtok convert map: -o new.pt", "bare imports torch", 1.15),
    ("xtok report 'map:--for p-kl' -o a.html", "xtok report map: -o b.html", 1.1),
    (f"xtok generate {PAIR} --embedding-model spelling", f"xtok build {PAIR}", 4),
    ("xtok generate ranks:512000 file:qwen --embedding-model spelling",
     "xtok build ranks:512000 file:qwen", 4),
    ("xtok sort-cut map:wide", "bare read map:wide copy.safetensors", 2),
    ("xtok reapply-exact map:wide", "bare read map:wide copy.safetensors", 2),
    ("xtok convert map:wide -o new.safetensors", "bare read map:wide copy.safetensors", 2),
    ("xtok inspect map:wide", "bare read map:wide", 2),
    ("xtok transplant model:smollm2 folder:llama3 --quiet -o new-model",
     "bare save model:smollm2 folder:llama3 saved", 2),
    ("xtok --help", "bare imports typer rich numpy", 1.75),
)  # fmt: skip
WRITES = {"build", "events", "generate", "sort-cut", "reapply-exact"}


def commands(options: Namespace) -> Iterator[Row]:
    """Compare the commands of every row that contains `--only`, after one warm-up run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for ours, beside, limit in COMMANDS:
            if options.only in f"{ours}, beside {beside}":
                run, beside_it = [
                    partial(run_python, scratch, *arguments(line, folder, options))
                    for line in (ours, beside)
                ]
                times = race(run, beside_it, options.repeat).row(limit)
                yield {"command": ours, "beside": beside, **times}


def arguments(line: str, folder: Path, options: Namespace) -> list[str]:
    """Return the arguments of Python; write the files that they name first."""
    start, *words = shlex.split(line)
    if start != "bare" and words[0] in WRITES:
        words += ["--quiet", "-o", "new.safetensors"]
    return [*STARTS[start], *(given(word, folder, options) for word in words)]


def given(word: str, folder: Path, options: Namespace) -> str:
    """Return the value of a placeholder."""
    kind, _, name = word.partition(":")
    if kind in ("file", "model"):
        return str(path_of(name))
    if kind == "pattern":
        return PATTERNS[name]
    if kind not in MAKERS:
        return word
    path = (folder / word.replace(" ", "")).with_suffix(SUFFIXES.get(kind, ""))
    if not path.exists():
        MAKERS[kind](path, name, options)
    return f"{path}@{PATTERNS['o200k']}" if kind == "ranks" else str(path)


def write_folder(path: Path, name: str, options: Namespace) -> None:
    """Write a tokenizer as a model folder."""
    hub_folders.write(name, path)


def write_text(path: Path, megabytes: str, options: Namespace) -> None:
    """Write JSON lines: a corpus, over and over."""
    left = 1e6 * float(megabytes) * options.size
    with path.open("w", encoding="utf-8") as file:
        for text in cycle(chain.from_iterable(documents(options).values())):
            left -= file.write(json.dumps({"text": text}) + "\n")
            if left <= 0:
                break


def write_ranks(path: Path, number: str, options: Namespace) -> None:
    """Write the tokens of o200k, then concatenated tokens up to the requested number."""
    tokens = [token for token in tokenizer("o200k").table.tokens() if token]
    joined = (
        tokens[i % len(tokens)] + tokens[(7 * i + i // len(tokens)) % len(tokens)] for i in count()
    )
    ranks: dict[bytes, int] = {}
    for token in chain(tokens, joined):
        ranks.setdefault(token, len(ranks))
        if len(ranks) >= int(number) * options.size:
            break
    lines = (f"{b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path.write_text("".join(lines), encoding="ascii")


def write_map(path: Path, name: str, options: Namespace) -> None:
    """Build a map, or write a random map in which the sides share every second token."""
    if name != "wide":
        kind, more = ("folder", []) if name == "folders" else ("file", name.split())
        sides = [given(f"{kind}:{side}", path.parent, options) for side in ("llama3", "qwen")]
        run_python(str(path.parent), "-m", "xtok", "build", *sides, *more, "-q", "-o", path)
        return
    rng, widths = np.random.default_rng(0), scaled_widths(options)
    tables = []
    for width, odd in zip(widths, (b"s%06x", b"t%06x"), strict=True):
        form = (b"%06x", odd)
        entries = [TokenEntry(i, TokenType.NORMAL, form[i % 2] % i) for i in range(width)]
        tables.append(Decoded(entries).table(width))
    steps = rng.integers(1, max(2, widths[1] // 32), (widths[0], 32))
    ids = (np.cumsum(steps, axis=1) % widths[1]).ravel()
    synthetic_map(np.full(widths[0], 32), ids, widths, tables).save(path)


MAKERS = {"folder": write_folder, "text": write_text, "ranks": write_ranks, "map": write_map}
SUFFIXES = {"text": ".jsonl", "ranks": ".tiktoken", "map": ".safetensors"}
