"""Reports for people: lines on stderr, progress bars, JSON; the modules here print tables."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO

from xtok.report.stdout import safe_json
from xtok.vocab.display import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from xtok.maps.projection_map import StageReport


SLOW = 5.0
"""Seconds after which a step that has no bar says what it does."""


SECONDS_PER_LINE = 60.0
"""How often progress is told where stderr is no terminal."""


@contextmanager
def announced(label: str) -> Iterator[None]:
    """Say on stderr what is going on, once it takes long."""

    def announce() -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(f"{printable(label)} …", file=sys.stderr, flush=True)  # noqa: T201

    timer = Timer(SLOW, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr; elsewhere than on a terminal a line per minute, if it takes long."""
    with _new_bar(label, total, "") as bar, announced(label) if bar.disable else nullcontext():
        yield _lines(label, total) if bar.disable else bar.update


def _lines(label: str, total: int) -> Callable[[int], object]:
    start = shown = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, shown
        done, now = done + size, time.monotonic()
        if now - shown >= SECONDS_PER_LINE and done < total:
            minutes = (now - start) * (total - done) / max(done, 1) / 60
            print_note(f"{label}: {done / total:.0%}, about {minutes:.0f} minutes left")
            shown = now

    return advance


@contextmanager
def text_progress_bar(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """Show a bar of the bytes of text with tokens per second, as `progress_bar` does."""
    with _new_bar(label, total, "B") as bar, announced(label) if bar.disable else nullcontext():
        done = 0

        def advance(size: int, tokens: int) -> None:
            nonlocal done
            done += tokens
            if not bar.disable and (elapsed := bar.format_dict["elapsed"]):
                bar.set_postfix_str(f"{done / elapsed:,.0f} student tok/s", refresh=False)
            bar.update(size)

        yield advance


def _new_bar(label: str, total: int, unit: str) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        @property
        def format_dict(self) -> dict[str, Any]:
            """As wide as the terminal is now, less the ^C that it may show behind the bar."""
            columns = 0
            with suppress(OSError):
                columns = os.get_terminal_size(self.fp.fileno()).columns
            return {**super().format_dict, "ncols": max(columns - 3, 0) or self.ncols}

    return Bar(total=total, desc=label, unit=unit, unit_scale=True, disable=None, leave=False)


def to_json(result: DataclassInstance | Sequence[DataclassInstance]) -> str:
    """Return a dataclass as one JSON object, or several as a list; tokens are escaped."""
    shown = [asdict(r) for r in result] if isinstance(result, Sequence) else asdict(result)
    return safe_json(json.dumps(shown, ensure_ascii=False, indent=2))


def print_reports(reports: Iterable[StageReport]) -> None:
    """Print what the stages did and left out on stderr, a line each."""
    for report in reports:
        counts = ", ".join(_counted(n, what) for what, n in report.counts.items() if n)
        print(f"{report.stage}: {counts or 'nothing to do'}", file=sys.stderr)  # noqa: T201
        print_notes((*report.failures, *report.notes))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, a line each."""
    for note in notes:
        print_note(note)


def print_note(note: str) -> None:
    """Print a note on stderr."""
    print(f"note: {printable(note)}", file=sys.stderr, flush=True)  # noqa: T201


def print_error(message: str, hint: str, stderr: TextIO) -> None:
    """Print an error that does not end the command, in its usual two lines."""
    lines = f"error: {printable(message)}\nhint: {printable(hint)}"
    print(lines, file=stderr, flush=True)


def print_failed(what: Iterable[str], stderr: TextIO) -> None:
    """Print which checks failed, a line each."""
    for one in what:
        print(f"failed: {printable(one)}", file=stderr)


def _counted(value: float, what: str) -> str:
    if not isinstance(value, int):
        return f"{value:.2g} {what}"
    return f"{value:,} {what if value != 1 else _PLURALS.sub(_singular, what, count=1)}"


_PLURALS = re.compile(r"\b(rows|entries|weights|slots)\b")


def _singular(noun: re.Match[str]) -> str:
    return "entry" if noun[0] == "entries" else noun[0][:-1]
