"""Print notes, reports and progress on stderr, and convert results to JSON."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from xtok.tokenizers.display import printable

if TYPE_CHECKING:
    from xtok.errors import XtokError
    from xtok.maps.records import StageReport


EVERY = 10.0
"""Seconds between two progress lines if stderr is not a terminal."""


@contextmanager
def progress_bar(label: str, total: int = 0) -> Iterator[Callable[..., object]]:
    """Show a progress bar on stderr, or only the label for a step without a total.

    If stderr is not a terminal, print a line every ten seconds instead.
    """
    if _columns():
        with _new_bar(label, total) as bar:
            yield bar.advance
    else:
        yield _new_lines(label, total)


def _new_lines(label: str, total: int) -> Callable[..., object]:
    start, num_done = time.monotonic(), 0
    printed = start

    def advance(size: int, tokens: int = 0) -> None:
        nonlocal num_done, printed
        num_done += size
        now = time.monotonic()
        if total and now - printed >= EVERY:
            printed = now
            left = (now - start) * max(total - num_done, 0) / max(num_done, 1)
            share = f"{min(num_done / total, 1):.0%}"
            if num_done >= total / 100:  # earlier estimates are too inaccurate
                time_left = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
                share += f", about {time_left} left"
            with suppress(OSError, ValueError):  # stderr is closed
                print(f"{printable(label)}: {share}", file=sys.stderr, flush=True)  # noqa: T201

    return advance


def _columns() -> int:
    """Return the width of stderr's terminal, or 0 if the width is unknown."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def _new_bar(label: str, total: int) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        tokens = 0

        def advance(self, size: int, tokens: int = 0) -> None:
            self.tokens += tokens
            if self.tokens and (elapsed := self.format_dict["elapsed"]):
                self.unit = "B"  # bytes of text
                self.set_postfix_str(f"{self.tokens / elapsed:,.0f} student tok/s", refresh=False)
            self.update(size)

        @property
        def format_dict(self) -> dict[str, Any]:
            """Fit the bar to the terminal's width, with room for ^C."""
            is_label = not (self.total or self.n)
            bar = "{desc} …" if is_label else None
            return {**super().format_dict, "ncols": max(_columns() - 3, 1), "bar_format": bar}

    return Bar(total=total, desc=label, unit="", unit_scale=True, leave=False)


def print_reports(reports: Iterable[StageReport]) -> None:
    """Print the counts, failures and notes of each stage on stderr."""
    for report in reports:
        counts = ", ".join(_count_noun(n, noun) for noun, n in report.counts.items() if n)
        _print(f"{report.stage}: {counts or 'nothing to do'}")
        print_notes((*report.failures, *report.notes))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, one per line."""
    for note in notes:
        print_note(note)


def print_note(note: str) -> None:
    """Print a note on stderr."""
    _print(f"note: {printable(note)}")


def print_error(error: XtokError) -> None:
    """Print an error and its hint, in two lines."""
    _print(f"error: {printable(error.message)}\nhint: {printable(error.hint)}")


def _print(lines: str) -> None:
    with suppress(OSError):  # stderr is closed, or a file on a full disk
        print(lines, file=sys.stderr, flush=True)  # noqa: T201


def _count_noun(value: float, noun: str) -> str:
    if not isinstance(value, int):
        return f"{value:.2g} {noun}"
    if value == 1:
        noun = re.sub("|".join(_SINGULAR), lambda plural: _SINGULAR[plural[0]], noun, count=1)
    return f"{value:,} {noun}"


_SINGULAR = {"rows": "row", "entries": "entry", "weights": "weight", "slots": "slot"}
