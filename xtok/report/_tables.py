"""The style of all tables, and text that is safe to show on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xtok.report.stdout import print_result, printable_lines, result_stream

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def new_console() -> Console:
    return Console(file=result_stream(), highlight=False)


@contextmanager
def printing() -> Iterator[Console]:
    """Give a console whose text goes to stdout at the end.

    Not at once, since Rich has an exit of its own, with 1, for a closed pipe.
    """
    console = new_console()
    with console.capture() as captured:
        yield console
    print_result(captured.get(), end="")


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


def cell(value: str) -> Text:
    """Return a cell's text: markup and control characters are shown, not obeyed."""
    return Text(printable_lines(value))


def header(value: str) -> str:
    """Return a header's text, with Rich's markup escaped."""
    return cell(value).plain.replace("[", "\\[")
