"""The cache as a table that fits 80 columns."""

from __future__ import annotations

from xtok.inspection.cache import CacheContents
from xtok.report._tables import cell, new_table, printing
from xtok.vocab.display import plural


def print_cache(contents: CacheContents, *, removed: bool = False) -> None:
    """Print the files with their sizes, and the folder."""
    with printing() as console:
        total = f"{plural(len(contents.files), 'file')}, {_megabytes(contents.num_bytes)}"
        console.print(cell(f"{contents.folder}: {total}{' removed' * removed}"), soft_wrap=True)
        if not contents.files:
            return
        table = new_table("what", "kind", "size")
        table.columns[2].justify = "right"
        for column in table.columns[1:]:
            column.no_wrap = True
        for file in contents.files:
            table.add_row(cell(file.name), file.kind, _megabytes(file.num_bytes))
        console.print(table)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
