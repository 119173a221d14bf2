#!/usr/bin/env python
"""Benchmarks: each case compares xtok with a peer, or with a minimal program for the same task.

    python scripts/benchmark.py --list
    python scripts/benchmark.py commands --only 'xtok build'
    python scripts/benchmark.py align project --corpus FOLDER

Prints Markdown tables, or with --json JSON lines. `ratio` is xtok's median divided by the peer's,
`turns` the smallest and largest ratio of a single turn. Several cases run in sequence, each
in a separate process; the last line is the peak memory of the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CASES = {  # name: (module and function in benchmarks/, description)
    "commands": ("commands:commands", "commands as processes, beside one that does less"),
    "align": ("alignment:align", "the alignment beside a plain Python walk"),
    "project": ("alignment:project", "`project_logprobs` beside a plain Python walk; its sums"),
    "estimate": ("counting:estimate", "counting on text: tokens a second"),
    "estimate-memory": ("counting:memory", "peak memory over 100 million tokens"),
    "p-kl": ("training:p_kl_cost", "P-KL's memory and time beside a bare log-softmax"),
    "losses": ("training:loss_cost", "a step from hidden states beside logits; CSD, ALM, event KL"),
    "steps": ("hidden:real_steps", "whole steps of two real models, from hidden states and logits"),
    "events": ("quality:events", "event maps' leak and bits on held-out text (minutes)"),
    "options": ("quality:options_of_build", "what the options of `build` change, and cost on text"),
    "chunks": ("quality:chunks", "maps for P-KL over chunks (ten minutes)"),
    "credit": ("credit:credit", "shares of a chunk's log-probability beside exact byte marginals"),
    "projecting": ("projecting:quality", "projected predictions beside what a teacher writes"),
    "projecting-cost": ("storing:cost", "`xtok project`: core-hours and gigabytes of a cache"),
    "serving": ("serving:serving", "`xtok serve`: student tokens per second, and its memory"),
    "synthetic": ("synthetic:constants", "the constants of counting/synthetic.py, measured"),
    "csd": ("completions:held", "what CSD's events hold of a teacher, and how truly"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, or list them; return the exit code."""
    options = parse(argv)
    if options.list or not options.cases:
        for name, (_, what) in CASES.items():
            print(f"{name:16} {what}")
        return 0
    if len(options.cases) == 1:
        return run(options.cases[0], options)
    failed = 0
    for case in options.cases:
        child = get_context("spawn").Process(target=run_and_exit, args=(case, options))
        child.start()
        child.join()
        failed |= child.exitcode != 0
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; all cases share them."""
    parser = argparse.ArgumentParser(description="Measure xtok beside its peers.")
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="what to measure; none: list the cases")
    add("--list", action="store_true", help="list the cases")
    add("--json", action="store_true", help="print JSON lines")
    add("--repeat", type=int, default=5, help="turns that count (default: %(default)s)")
    add("--size", type=float, default=1.0, help="scale of synthetic inputs and texts")
    add("--only", default="", help="only pairs or commands with this in their label")
    add("--corpus", type=Path, help="folder of LANGUAGE.train.jsonl.gz and LANGUAGE.valid.jsonl.gz")
    add("--teacher", type=Path, help="projecting, csd: folder of a language model")
    add("--work", type=Path, help="projecting, csd: folder that keeps what the teacher wrote")
    add("--embedding-model", help="chunks: a model as `generate` takes it")
    add("--liger", type=Path, help="losses: folder with `liger_kernel`, to compare with")
    add("--device", default="cpu", help="p-kl, losses, steps: cpu or cuda")
    options = parser.parse_args(argv)
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)} (choose from {', '.join(CASES)})")
    return options


def run_and_exit(case: str, options: argparse.Namespace) -> None:
    """Run one case as a process."""
    sys.exit(run(case, options))


def run(case: str, options: argparse.Namespace) -> int:
    """Run one case in this process and print its rows."""
    module, _, function = CASES[case][0].partition(":")
    try:
        show(getattr(importlib.import_module(f"benchmarks.{module}"), function)(options), options)
    except FileNotFoundError as error:
        hint = "run scripts/fetch_tokenizers.py or scripts/fetch_models.py"
        print(f"error: {error}\nhint: {hint}", file=sys.stderr)
        return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    show([{"case": case, "peak MiB of the process": peak}], options)
    return 0


def show(rows: Iterable[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print rows as they arrive, with a new header when the columns change."""
    columns: list[str] = []
    for row in rows:
        if options.json:
            print(json.dumps(row, ensure_ascii=False), flush=True)
            continue
        if list(row) != columns:
            columns = list(row)
            print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        print(f"| {' | '.join(map(text, row.values()))} |", flush=True)


def text(value: object) -> str:
    """Return a number with three digits or more, anything else as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
