"""Common style of tables, and escaping of text for terminals."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from xtok.cli.stdout import print_result, printable_lines, result_stream

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


@contextmanager
def printing(write: Callable[[str], object] | None = None) -> Iterator[Console]:
    """Yield a console. At the end, pass the console's text to `write` (default: stdout).

    The console does not write directly to stdout, because Rich exits with 1 if a pipe is closed.
    """
    console = Console(file=result_stream(), highlight=False)
    with console.capture() as captured:
        yield console
    (write or partial(print_result, end=""))(_PADDING.sub("", captured.get()))


def print_all(parts: Iterable[RenderableType]) -> None:
    """Print tables and texts one after another."""
    with printing() as console:
        for part in parts:
            console.print(part)


_PADDING = re.compile(r" +(?=(\x1b\[0m)?$)", re.MULTILINE)
"""Matches the spaces that Rich adds to the ends of lines in captions."""


def new_table(
    *headers: str,
    rows: Iterable[Sequence[str]] = (),
    right: Collection[int] = (),
    caption: str | None = None,
) -> Table:
    """Return a table with the given rows. The columns in `right` are right-aligned."""
    shown = caption and Text(printable_lines(caption), "table.caption")
    table = Table(caption=shown, caption_justify="left")
    for index, header in enumerate(map(cell, headers)):
        table.add_column(header, overflow="fold", justify="right" if index in right else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(value: str) -> Text:
    """Escape markup and control characters in a cell's text."""
    return Text(printable_lines(value))
