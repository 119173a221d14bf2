"""The style of all tables, and text that is safe to show on a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from xtok.cli.stdout import print_result, printable_lines, result_stream

if TYPE_CHECKING:
    from xtok.inspection.bootstrap import Interval

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def new_console() -> Console:
    return Console(file=result_stream(), highlight=False)


@contextmanager
def printing(write: Callable[[str], object] | None = None) -> Iterator[Console]:
    """Give a console whose text is written at the end, to stdout unless another is given.

    Not at once, since Rich has an exit of its own, with 1, for a closed pipe.
    """
    console = new_console()
    with console.capture() as captured:
        yield console
    (write or partial(print_result, end=""))(_PADDING.sub("", captured.get()))


def print_all(
    parts: Iterable[RenderableType], write: Callable[[str], object] | None = None
) -> None:
    """Print tables and texts, one after another, as `printing` does."""
    with printing(write) as console:
        for part in parts:
            console.print(part)


_PADDING = re.compile(r" +(?=(\x1b\[0m)?$)", re.MULTILINE)
"""Blanks at the end of lines: Rich pads captions."""


def new_table(
    *headers: str,
    rows: Iterable[Sequence[str]] = (),
    right: Collection[int] = (),
    caption: str | None = None,
) -> Table:
    """Return a table; the columns of `right` hold numbers, flush right."""
    table = Table(
        caption=caption, title_justify="left", caption_justify="left", header_style="bold"
    )
    for number, header in enumerate(headers):
        table.add_column(header, overflow="fold", justify="right" if number in right else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def weight(value: float, digits: int = 4) -> str:
    """Return a weight; one that is not zero does not read so."""
    least = 10.0**-digits
    return f"{value:.{digits}f}" if value >= least / 2 else f"<{least:.{digits}f}" if value else "0"


def with_interval(interval: Interval | None) -> str:
    """Return a figure with half of its interval."""
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    return f"{interval.value:.3f}±{(interval.high - interval.low) / 2:.3f}"


def visible(token: str) -> str:
    """Return an escaped token whose spaces show, and that joins nothing that stands before it."""
    first = token[:1]
    joins = first and (unicodedata.category(first)[0] == "M" or not cell_len(first))
    return ("◌" if joins else "") + token.replace(" ", "␣")


def cell(value: str) -> Text:
    """Return a cell's text: markup and control characters are shown, not obeyed."""
    return Text(printable_lines(value))


def header(value: str) -> str:
    """Return a header's text, with Rich's markup escaped."""
    return cell(value).plain.replace("[", "\\[")
