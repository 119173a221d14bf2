#!/usr/bin/env python
"""Run xtok's files and losses in the code of other projects, and report the agreement.

    python scripts/peers.py                      # TRL and axolotl as installed
    python scripts/peers.py --nemo-rl ~/RL --distillkit ~/DistillKit
    python scripts/peers.py ... --write          # into docs/study/evidence.md

Checkouts are used in place; nothing is copied. DIR@COMMIT declares the commit of a folder without
git. Each project runs in a separate process. The exit code is 3 if a value disagrees.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from peer_checks.report import PAIRS, Check, commit_of, guarded

SCRIPTS = Path(__file__).resolve().parent
PAGE = SCRIPTS.parent / "docs" / "study" / "evidence.md"
BEGIN, END = "<!-- printed by scripts/peers.py -->\n", "<!-- end -->\n"
CHECKOUTS = ("nemo_rl", "distillkit", "verl", "clients")
INSTALLED = ("trl", "axolotl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in CHECKOUTS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="DIR[@COMMIT]", action="append", help="a checkout")
    parser.add_argument("--only-checkouts", action="store_true", help="not what is installed")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    options = parser.parse_args(argv)
    jobs = [(name, given) for name in CHECKOUTS for given in getattr(options, name) or ()]
    if not options.only_checkouts:
        jobs += [(name, "") for name in INSTALLED if importlib.util.find_spec(name)]
    tables, failed = [], 0
    first: dict[str, str] = {}  # of each note, the table that has it in full
    with tempfile.TemporaryDirectory() as work:
        for name, given in jobs:
            with get_context("spawn").Pool(1) as pool:
                title, note, checks = pool.apply(run, (name, given, Path(work)))
            failed += sum(not check.holds for check in checks)
            tables.append(table(title, without_repeat(note, title, first), checks))
            print(tables[-1], flush=True)
    if options.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        PAGE.write_text(head + BEGIN + "\n" + "\n".join(tables) + "\n" + END + tail, "utf-8")
    return 3 if failed else 0


def run(name: str, given: str, work: Path) -> tuple[str, str, list[Check]]:
    """Run the checks of a project; return the title of its table, the omissions and the lines."""
    sys.path.append(str(SCRIPTS / "examples"))
    module = importlib.import_module(f"peer_checks.{name}")
    if not given:
        title = f"{module.PEER} {importlib.metadata.version(name)}, as installed"
        return title, "", list(module.installed(work))
    folder, stated = given, ""
    if not Path(given).expanduser().exists():
        folder, _, stated = given.rpartition("@")
    checkout = Path(folder or given).expanduser().resolve(strict=True)
    peer = module.PEER if hasattr(module, "PEER") else module.peer_of(checkout)
    title = f"{peer}, commit {commit_of(checkout, stated)}"
    checks = list(guarded("checks", partial(module.checks, checkout, work)))
    return title, getattr(module, "LEFT_OUT", ""), checks


def without_repeat(note: str, title: str, first: dict[str, str]) -> str:
    """Return the note, or a reference to the earlier table with the same note."""
    if not note or first.setdefault(note, title) == title:
        return note
    return f"Run like {first[note].partition(' (')[0]}."


def table(title: str, note: str, checks: list[Check]) -> str:
    """Return Markdown with a heading, a table of the checks for several pairs, and a list."""
    agreed = sum(check.holds for check in checks)
    pairs = [pair for pair in PAIRS if any(check.what.endswith(f", {pair}") for check in checks)]
    rows: dict[str, dict[str, str]] = {}  # check: values by pair, or one value for ""
    for check in checks:
        what, figure = (cell.replace("|", "\\|") for cell in (check.what, check.figure))
        pair = what.rpartition(", ")[2]
        pair = pair if pair in pairs and len(pairs) > 1 else ""
        cells = rows.setdefault(what.removesuffix(f", {pair}"), {})
        cells[pair] = figure if check.holds else f"**no**: {figure}"
    text = f"### {title}\n\n{agreed} of {len(checks)} agree. {note}".rstrip() + "\n"
    for columns in dict.fromkeys(map(tuple, rows.values())):
        some = [(what, cells) for what, cells in rows.items() if tuple(cells) == columns]
        if columns == ("",):
            text += "\n" + "".join(f"- {what}: {cells['']}\n" for what, cells in some)
            continue
        text += f"\n| what | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|\n"
        text += "".join(f"| {what} | {' | '.join(cells.values())} |\n" for what, cells in some)
    return text


if __name__ == "__main__":
    sys.exit(main())
