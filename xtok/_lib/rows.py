"""Read rows from JSON, JSON Lines and Parquet files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from xtok._lib.lines import FileRow, LineOffset, decode, json_lines, too_long
from xtok._lib.opening import MAX_ROW_BYTES, decompressed, reading
from xtok._lib.parquet import ParquetTable, python_values
from xtok._lib.parsing import json_problem, parse_json
from xtok._lib.shards import Shard
from xtok.errors import XtokError

_FIRST_LINE = re.compile(r"\s*([^\n]+)\n(?=\s*\S)")  # first of several lines


def read_rows(
    shard: Shard, *, hint: str, parameter: str = "", columns: Collection[str] | None = None
) -> Iterator[FileRow]:
    """Yield the rows of a shard. The same data gives the same rows in all formats.

    A `json` shard contains JSON Lines, one row, or an array of rows. A list of messages is one row.
    If the text is not JSON, the error contains `hint` and `parameter`. If `columns` is given, only
    the columns in `columns` are read from a Parquet file. The values of all other columns are True.
    """
    with reading(shard.path):
        if shard.format == "parquet":
            yield from _table_rows(shard, columns)
            return
        document = _document(shard, hint, parameter) if shard.format == "json" else None
        if document is None:
            yield from json_lines(shard, hint=hint, parameter=parameter)
        elif isinstance(document, list) and not any(map(_is_message, document)):
            for index, value in enumerate(document):
                yield FileRow(f"{shard.path}, row {index}", value, shard.size)
        else:
            yield FileRow(str(shard.path), document, shard.size)


def _document(shard: Shard, hint: str, parameter: str) -> Any:
    path = shard.path
    with path.open("rb") as raw:
        data = decompressed(raw, path).read(MAX_ROW_BYTES + 1)
    if len(data) > MAX_ROW_BYTES:
        raise too_long(path)
    text = decode(LineOffset(path, 0), data)
    first = _FIRST_LINE.match(text)
    if not text.strip():
        return None
    if first:
        with suppress(ValueError):
            parse_json(first[1], allow_nan=True)
            return None  # JSON Lines
    try:
        return parse_json(text, allow_nan=True)
    except ValueError as error:
        location = f"{path}, line {getattr(error, 'lineno', 1)}"
        problem = f"{location}: {json_problem(error)}"
        raise XtokError(problem, hint=hint, parameter=parameter) from error


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "messages" not in value


def _table_rows(shard: Shard, columns: Collection[str] | None) -> Iterator[FileRow]:
    table = ParquetTable(shard.path)
    names = table.schema.names
    read_names = [name for name in names if columns is None or name in columns] or names[:1]
    groups = range(table.num_row_groups)[shard.start : shard.stop]
    for locations, batch in table.batches(groups, read_names):
        rows = python_values(batch.to_struct_array(), locations)
        for location, row in zip(locations, rows, strict=True):
            value = {name: row.get(name) if name in read_names else True for name in names}
            yield FileRow(location, value, 0)
