"""Documents of text files: plain text, JSON lines and Parquet, plain or compressed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from xtok._lib.lines import LinePlace, decode, json_lines, lines
from xtok._lib.opening import decompressed, parquet_file, reading
from xtok._lib.shards import Paths, Shard, find_files, format_of, shards
from xtok.conversation.files import without_missing
from xtok.errors import XtokError
from xtok.tokenizers.display import listed

DOCUMENT_BYTES = 1 << 16
"""A document of plain text ends with the line that reaches this many bytes; longer lines are cut,
between two characters."""

MAX_CHARACTERS = 1 << 20
"""Longer documents of JSON lines and Parquet are cut into several."""

MAX_LINE_BYTES = 1 << 26
"""Longer lines of JSON are an error."""

BATCH_CHARACTERS = 1 << 20
"""Documents that have this many characters together are worked on at a time."""

LITTLE_TEXT = 1_000_000
"""Bytes of text below which figures, and maps counted on it, are unreliable."""

_BLOCK_BYTES = 1 << 17
_ROWS_AT_ONCE = 16  # of Parquet, which may hold one long text a million times
_TEXT_FILES_HINT = (
    "give text files (.txt, .jsonl, .parquet, also as .gz or .zst), or a glob in quotes: "
    "'corpus/*.jsonl.gz'"
)
_OBJECTS_HINT = (
    "give one JSON object per line, and the name of its text field with {option}; plain "
    "text needs a name that ends in .txt"
)


_SAMPLES_HINT = 'write a JSON value per line: a text, {"text": "…"} or {"messages": […]}'


class TextColumns(NamedTuple):
    """What of a JSON object, or row of Parquet, is read; plain text has none of it."""

    text: str = "text"
    group: str | None = None  # the field with a document's group, if documents are grouped


class Batch(NamedTuple):
    """Documents that are worked on together."""

    texts: list[str]
    groups: list[str]  # each document's: its file's name, or what `TextColumns.group` names
    shard: int  # that all of them are in
    consumed: int  # bytes on disk that were read up to their end, in all


def find_texts(patterns: Paths) -> list[Path]:
    """Return text files as `find_files` does."""
    return find_files(patterns, _TEXT_FILES_HINT)


def little_text(num_bytes: int) -> list[str]:
    """Return a note if a text is too short to count on, or to measure with."""
    if num_bytes >= LITTLE_TEXT:
        return []
    return [f"only {num_bytes:,} bytes of text: below 1 MB, counts of rare tokens are unreliable"]


def check_texts(patterns: Paths, field: str, group_by: str | None = None) -> None:
    """Check, before longer work, that texts exist, and that the first one has the fields.

    Raises:
        XtokError: as `read_batches`.
    """
    for path in find_texts(patterns)[:1]:
        next(_documents(shards(path)[0], TextColumns(field, group_by)), None)


def read_batches(shards: Sequence[Shard], columns: TextColumns) -> Iterator[Batch]:
    """Read documents. This is how all of xtok reads text.

    Lone surrogates become U+FFFD; what is too long is cut (see `MAX_CHARACTERS`).

    Raises:
        XtokError: with the file and the line, for bytes that are not UTF-8, a line that is not a
            JSON object, or a field that is missing or not a string.
    """
    names = Counter(path.name for path in {shard.path for shard in shards})
    before = 0
    for number, shard in enumerate(shards):
        file = shard.path.name if names[shard.path.name] == 1 else str(shard.path)
        texts: list[str] = []
        groups: list[str] = []
        size = consumed = 0
        for text, group, so_far in _documents(shard, columns):
            texts.append(text)
            groups.append(group if columns.group else file)
            size, consumed = size + len(text), before + min(so_far, shard.size)
            if size >= BATCH_CHARACTERS:
                yield Batch(texts, groups, number, consumed)
                texts, groups, size = [], [], 0
        if texts:
            yield Batch(texts, groups, number, consumed)
        before += shard.size


def contexts_in(texts: Paths, field: str) -> tuple[int, int, float]:
    """Count the rows of texts, those with a `teacher_context`, and how much longer it makes these.

    The last is in bytes, and a ratio; of several contexts of a row, the longest counts.
    """
    rows = with_context = size = more = 0
    paths = [path for path in find_texts(texts) if format_of(path) != "text"]
    columns = field, "teacher_context"  # a cache's columns of candidates are many times as large
    for _, row in chain.from_iterable(read_samples(path, columns) for path in paths):
        text = row.get(field) if isinstance(row, dict) else None
        if isinstance(text, str):
            context = row.get("teacher_context")
            each = context if isinstance(context, list) else [context]
            longest = max((len(one.encode()) for one in each if isinstance(one, str)), default=0)
            rows, with_context = rows + 1, with_context + (longest > 0)
            size, more = size + len(text.encode()) * (longest > 0), more + longest
    return rows, with_context, 1 + more / max(1, size)


def _documents(shard: Shard, columns: TextColumns) -> Iterator[tuple[str, str, int]]:
    """Return a shard's documents, each with its group and the bytes on disk read so far."""
    if columns.group and shard.format == "text":
        raise XtokError(
            f"{shard.path} is plain text, and has no field {columns.group!r} to group by",
            hint="group by files: give each group a file of its own, and no field",
        )
    with reading(shard.path):
        if shard.format == "text":
            yield from _plain_documents(shard)
        elif shard.format == "parquet":
            for text, group in _parquet_documents(shard, columns):
                yield from ((part, group, 0) for part in _parts(text))
        else:
            rows = json_lines(
                shard, max_bytes=MAX_LINE_BYTES, hint=_OBJECTS_HINT, parameter="field"
            )
            for place, value, read in rows:
                text, group = _json_document(place, value, columns)
                yield from ((part, group, read - shard.start) for part in _parts(text))


def read_samples(
    patterns: Paths, columns: Sequence[str] | None = None
) -> Iterator[tuple[object, Any]]:
    """Read texts and conversations as a `DistillationCollator` takes them, each with its place.

    A file is plain text, with paragraphs between blank lines; JSON lines, with a sample on each; or
    Parquet, with one in each row, of which `columns` are read, those of them that it has.

    Raises:
        XtokError: as `read_batches`.
    """
    for path in find_texts(patterns):
        with reading(path):
            if format_of(path) == "text":
                yield from ((path, text) for text in _paragraphs(path))
            elif format_of(path) == "parquet":
                batches = parquet_file(path).iter_batches(
                    _ROWS_AT_ONCE, columns=columns, use_threads=False
                )
                rows = (row for batch in batches for row in batch.to_pylist())
                yield from ((f"{path}, row {n}", without_missing(r)) for n, r in enumerate(rows))
            else:
                for line in json_lines(
                    Shard(path, "jsonl"), max_bytes=MAX_LINE_BYTES, hint=_SAMPLES_HINT
                ):
                    yield line.place, line.value


def _paragraphs(path: Path) -> Iterator[str]:
    """Return what is between the blank lines of a file, whatever ends its lines."""
    documents = (text for text, _, _ in _plain_documents(Shard(path, "text")))
    lines_of = (line for text in documents for line in re.findall(r".*\n|.+", text))
    for is_text, group in groupby(lines_of, lambda line: bool(line.strip())):
        if is_text:
            yield "".join(group).rstrip("\r\n")


def _parts(text: str) -> list[str]:
    """Cut a long document."""
    if len(text) <= MAX_CHARACTERS:
        return [text]
    starts = range(0, len(text), MAX_CHARACTERS)
    return [text[start : start + MAX_CHARACTERS] for start in starts]


def _plain_documents(shard: Shard) -> Iterator[tuple[str, str, int]]:
    start, document = 0, bytearray()
    with shard.path.open("rb", _BLOCK_BYTES) as raw:
        file = decompressed(raw, shard.path)  # of zstd, it closes `raw` when nobody holds it
        for offset, line in lines(shard, file, DOCUMENT_BYTES):
            if not document:
                start = offset
            document += line
            if len(document) >= DOCUMENT_BYTES:
                text = decode(LinePlace(shard.path, start), bytes(document))
                yield text, "", raw.tell() - shard.start
                document.clear()
        if document:
            yield (
                decode(LinePlace(shard.path, start), bytes(document)),
                "",
                raw.tell() - shard.start,
            )


def _json_document(place: LinePlace, value: Any, columns: TextColumns) -> tuple[str, str]:
    """Return the text and the group of a line of JSON."""
    if problem := _problem_of(value, columns):
        raise XtokError(f"{place}: {problem}", hint=_OBJECTS_HINT, parameter="field")
    if columns.group and columns.group not in value:
        raise XtokError(
            f"{place}: no field {columns.group!r} to group by, but: {listed(value, 8)}",
            hint="name one of its fields with {option}; by default, each file is a group",
            parameter="group_by",
        )
    text = value[columns.text].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    group = value.get(columns.group, "")
    return text, _group(group)


def _group(value: Any) -> str:
    """Return a group's name: the same, whatever the format of the file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


_JSON_TYPES = {bool: "true or false", list: "a list", dict: "an object", type(None): "null"}


def _problem_of(value: Any, columns: TextColumns) -> str:
    """Return why a JSON value is not a document; "" if it is one."""
    if not isinstance(value, dict):
        return "not a JSON object"
    if columns.text not in value:
        texts = listed(sorted(k for k, v in value.items() if isinstance(v, str)), 8)
        return f"no field {columns.text!r}; fields with text: {texts or 'none'}"
    text = value[columns.text]
    if not isinstance(text, str):
        kind = _JSON_TYPES.get(type(text), "a number")
        return f"the field {columns.text!r} is {kind}, not a string"
    return ""


def _parquet_documents(shard: Shard, wanted: TextColumns) -> Iterator[tuple[str, str]]:
    """Return texts and their groups, a few rows at a time; nulls are left out."""
    file = parquet_file(shard.path)
    names = file.schema_arrow.names
    parameters = {wanted.text: "field"} | ({wanted.group: "group_by"} if wanted.group else {})
    for column, parameter in parameters.items():
        if column not in names:
            raise XtokError(
                f"{shard.path} has no column {column!r}, but: {listed(names, 8) or 'none'}",
                hint="name one of its columns with {option}",
                parameter=parameter,
            )
    stop = file.metadata.num_row_groups if shard.stop is None else shard.stop
    for batch in file.iter_batches(
        row_groups=list(range(shard.start, stop)),
        columns=list(parameters),
        batch_size=_ROWS_AT_ONCE,
        use_threads=False,
    ):
        try:
            columns = [batch.column(name).to_pylist() for name in parameters]
        except UnicodeDecodeError as error:  # Parquet does not check what a writer calls a string
            raise XtokError(
                f"{shard.path}: the column {wanted.text!r} is not UTF-8: {error.reason}",
                hint="write it again, as UTF-8",
            ) from error
        for text, group in zip(columns[0], columns[-1], strict=True):
            if isinstance(text, str):
                yield text, _group(group)
            elif text is not None:
                raise XtokError(
                    f"{shard.path}: the column {wanted.text!r} holds no text",
                    hint="name the column that holds the text with {option}",
                    parameter="field",
                )
