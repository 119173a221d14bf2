"""Read documents from plain text, JSON, JSON Lines and Parquet files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from xtok._lib.lines import BLOCK_BYTES, FileRow, LineOffset, decode, lines
from xtok._lib.opening import decompressed, reading
from xtok._lib.rows import read_rows
from xtok._lib.shards import Paths, Shard, find_files, format_of, shards
from xtok.conversation.files import chat_record
from xtok.errors import XtokError
from xtok.tokenizers.display import listed

DOCUMENT_BYTES = 1 << 16
"""Size of a document in plain text, in bytes. A document ends with the line that reaches this size.
A longer line is split between two characters."""

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a document in JSON, JSON Lines or Parquet. Longer documents are
split."""

BATCH_CHARACTERS = 1 << 20
"""Approximate number of characters in a batch."""

SHORT_TEXT_BYTES = 1_000_000
"""If a text has fewer bytes, measurements and counted weights are unreliable."""

_TEXT_FILES_HINT = (
    "pass text files (.txt, .jsonl, .parquet, also .gz or .zst), or a quoted glob such as "
    "'corpus/*.jsonl.gz'"
)
_OBJECTS_HINT = (
    "write each row as a JSON object, and name its text field with {option}; a plain-text file "
    "must have a name that ends in .txt"
)


_SAMPLES_HINT = 'write one JSON value per line: a text, {"text": "…"} or {"messages": […]}'


class TextBatch(NamedTuple):
    """A batch of documents from one file."""

    texts: list[str]
    group: str  # name of the file
    consumed: int  # number of bytes read so far from all shards


def find_texts(patterns: Paths) -> list[Path]:
    """Return the text files that match paths or patterns."""
    return find_files(patterns, _TEXT_FILES_HINT)


def text_shards(patterns: Paths) -> list[Shard]:
    """Return the shards of the text files that match paths or patterns."""
    return [shard for path in find_texts(patterns) for shard in shards(path)]


def short_text_notes(num_bytes: int) -> list[str]:
    """Return a note if the text is too short for reliable counts."""
    if num_bytes >= SHORT_TEXT_BYTES:
        return []
    return [f"only {num_bytes:,} bytes of text; below 1 MB, counts of rare tokens are unreliable"]


def check_texts(patterns: Paths, field: str) -> None:
    """Check that the files exist and that the first row has the field."""
    for path in find_texts(patterns)[:1]:
        next(_read_documents(shards(path)[0], field), None)


def read_batches(shards: Sequence[Shard], field: str = "text") -> Iterator[TextBatch]:
    """Yield the documents of the shards in batches.

    A conversation becomes one document with the text of all messages. Unpaired surrogates become
    U+FFFD. Long documents are split (see `MAX_CHARACTERS`).
    """
    names = Counter(path.name for path in {shard.path for shard in shards})
    consumed_before = 0
    for shard in shards:
        file = shard.path.name if names[shard.path.name] == 1 else str(shard.path)
        texts: list[str] = []
        size = consumed = 0
        for text, so_far in _read_documents(shard, field):
            texts.append(text)
            size, consumed = size + len(text), consumed_before + min(so_far, shard.size)
            if size >= BATCH_CHARACTERS:
                yield TextBatch(texts, file, consumed)
                texts, size = [], 0
        if texts:
            yield TextBatch(texts, file, consumed)
        consumed_before += shard.size


def _read_documents(shard: Shard, field: str) -> Iterator[tuple[str, int]]:
    with reading(shard.path):
        if shard.format == "text":
            yield from _plain_documents(shard)
        else:
            for row in read_rows(
                shard, hint=_OBJECTS_HINT, parameter="field", columns={field, "messages"}
            ):
                text, num_read = _read_document(row, field), max(0, row.read - shard.start)
                if text is not None:
                    for start in range(0, len(text) or 1, MAX_CHARACTERS):
                        yield text[start : start + MAX_CHARACTERS], num_read


def read_samples(
    patterns: Paths, columns: Sequence[str] | None = None
) -> Iterator[tuple[object, Any]]:
    """Yield samples for a `DistillationCollator`, each with its location for errors.

    In plain text, a sample is a paragraph, and blank lines separate paragraphs. In other files, a
    sample is a row. If `columns` is given, other columns of a Parquet file are not read. Their
    values are True.
    """
    for path in find_texts(patterns):
        with reading(path):
            if format_of(path) == "text":
                yield from ((path, text) for text in _paragraphs(path))
            else:
                for shard in shards(path):
                    rows = read_rows(shard, hint=_SAMPLES_HINT, columns=columns)
                    yield from ((row.location, row.value) for row in rows)


def _paragraphs(path: Path) -> Iterator[str]:
    documents = (text for text, _ in _plain_documents(Shard(path, "text")))
    text_lines = (line for text in documents for line in re.findall(r".*\n|.+", text))
    for is_text, group in groupby(text_lines, lambda line: bool(line.strip())):
        if is_text:
            yield "".join(group).rstrip("\r\n")


def _plain_documents(shard: Shard) -> Iterator[tuple[str, int]]:
    start, document = 0, bytearray()
    with shard.path.open("rb", BLOCK_BYTES) as raw:
        file = decompressed(raw, shard.path)  # a deleted zstd reader closes `raw`
        last = (0, b"")  # the end of the file also ends a document
        for offset, line in chain(lines(shard, file, DOCUMENT_BYTES), [last]):
            if not document:
                start = offset
            document += line
            if len(document) >= DOCUMENT_BYTES or (document and not line):
                text = decode(LineOffset(shard.path, start), bytes(document))
                yield text, raw.tell() - shard.start
                document.clear()


def _read_document(row: FileRow, field: str) -> str | None:
    value = row.value
    if isinstance(value, dict) and "messages" in value and value.get(field) is None:
        text: str | None = "\n".join(_message_texts(chat_record(value, row.location).messages))
    elif problem := _find_problem(value, field):
        raise XtokError(f"{row.location}: {problem}", hint=_OBJECTS_HINT, parameter="field")
    else:
        text = value[field]
    if text is not None:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _message_texts(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


_JSON_TYPES = {bool: "true or false", list: "a list", dict: "an object"}


def _find_problem(value: Any, field: str) -> str:
    if not isinstance(value, dict):
        return "the row is not a JSON object"
    if field not in value:
        return f"the row has no field {field!r}, only: {listed(value, 8) or 'nothing'}"
    if not isinstance(value[field], str | None):
        kind = _JSON_TYPES.get(type(value[field]), "a number")
        return f"the field {field!r} is {kind}, not a string"
    return ""
