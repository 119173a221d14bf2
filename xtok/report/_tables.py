"""What tables have in common: their look, and text that a terminal shows as it stands."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xtok.tokens import printable

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def new_console() -> Console:
    return Console(highlight=False)


def new_table(*headers: str) -> Table:
    table = Table(title_justify="left", caption_justify="left", header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def cell(value: str) -> Text:
    """Return a cell's text as it stands: no markup, nothing that a terminal would obey."""
    lines = value.split("\n")
    return Text("\n".join(map(printable, lines)))


def header(value: str) -> str:
    """Return text for a header, where markup is obeyed."""
    return cell(value).plain.replace("[", "\\[")
