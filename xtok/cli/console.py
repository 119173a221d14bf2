"""Reports for people: lines on stderr, progress bars, JSON; the modules here print tables."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TextIO

from xtok.cli.stdout import safe_json
from xtok.tokenizers.display import printable

if TYPE_CHECKING:
    from xtok.maps.projection_map import StageReport


EVERY = 10.0
"""Seconds from line to line where there is no room for a bar."""


_steps: list[Callable[[], str]] = []
"""Labels of running steps without a bar, innermost last."""


@contextmanager
def telling() -> Iterator[None]:
    """Print every ten seconds on stderr what a command is at, unless a bar shows it."""
    start, ended = time.monotonic(), Event()

    def tell() -> None:
        while not ended.wait(EVERY):
            steps = [*_steps]
            if steps or not _columns():
                step = printable(steps[-1]() if steps else "working")
                if not step:  # of a server, which has nothing to tell
                    continue
                with suppress(OSError, ValueError):  # nobody reads it
                    sys.stderr.write(f"{_duration(time.monotonic() - start)}: {step}\n")
                    sys.stderr.flush()

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def announced(label: str, total: int = 0) -> Iterator[Callable[..., object]]:
    """Have `telling` tell of a step that has no bar."""
    start, done = time.monotonic(), 0

    def advance(size: int, tokens: int = 0) -> None:
        nonlocal done
        done += size

    def line() -> str:
        if not (total and done):
            return label
        left = (time.monotonic() - start) * max(total - done, 0) / done
        return f"{label}: {min(done / total, 1):.0%}, about {_duration(left)} left"

    _steps.append(line)
    try:
        yield advance
    finally:
        _steps.remove(line)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def progress_bar(label: str, total: int, unit: str = "") -> Iterator[Callable[..., object]]:
    """Show a bar on stderr; where there is no room for one, a line every ten seconds."""
    if _columns():
        with _new_bar(label, total, unit) as bar:
            yield bar.advance
    else:
        with announced(label, total) as advance:
            yield advance


text_progress_bar = partial(progress_bar, unit="B")
"""Show a bar of the bytes of text with tokens per second."""


def _columns() -> int:
    """Return the width of stderr's terminal: 0 for none, and in a pty whose size nobody set."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def _new_bar(label: str, total: int, unit: str) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        tokens = 0

        def advance(self, size: int, tokens: int = 0) -> None:
            self.tokens += tokens
            if self.tokens and (elapsed := self.format_dict["elapsed"]):
                self.set_postfix_str(f"{self.tokens / elapsed:,.0f} student tok/s", refresh=False)
            self.update(size)

        @property
        def format_dict(self) -> dict[str, Any]:
            """As wide as the terminal is now, less the ^C that it may show behind the bar."""
            return {**super().format_dict, "ncols": max(_columns() - 3, 1)}

    return Bar(total=total, desc=label, unit=unit, unit_scale=True, leave=False)


def to_json(result: object) -> str:
    """Return a result, dataclasses in it or itself one, as JSON; tokens are escaped."""
    return safe_json(json.dumps(result, ensure_ascii=False, indent=2, default=asdict))


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
    """Print a note on stderr; if nobody reads it, work goes on."""
    with suppress(OSError):
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
