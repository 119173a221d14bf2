"""Text files as documents: plain text, JSON lines and Parquet, plain or compressed, in shards."""

from __future__ import annotations

import glob
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xtok.errors import XtokError
from xtok.input_files import compression_of, decompressed, no_json, parquet_file, reading
from xtok.vocab.display import listed

Format = Literal["text", "jsonl", "parquet"]

DOCUMENT_BYTES = 1 << 16
"""A document of plain text ends with the line that reaches this many bytes; longer lines are cut,
between two characters."""

MAX_CHARACTERS = 1 << 20
"""Longer documents of JSON lines and Parquet are cut into several."""

MAX_LINE_BYTES = 1 << 26
"""Longer lines of JSON are an error."""

BATCH_CHARACTERS = 1 << 20
"""Documents that have this many characters together are worked on at a time."""

SHARD_BYTES = 1 << 26
"""Uncompressed text and JSON lines are cut into shards of about this many bytes."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_BLOCK = 1 << 17
_ZEROS = 4  # text has no zero byte in every so many; ASCII in UTF-16 has one in two
_ROWS_AT_ONCE = 16  # of Parquet, which may hold one long text a million times


class TextShard(NamedTuple):
    """A part of a text file that can be read on its own: documents that begin in `start`..`stop`.

    These are bytes, or row groups of Parquet; `stop` is None for the end of the file.
    """

    path: Path
    format: Format
    field: str  # with a document's text; unused for plain text
    start: int = 0
    stop: int | None = None
    group_by: str | None = None  # the field with a document's group, if documents are grouped
    size: int = 0  # its approximate share of the file's bytes on disk


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A text file as a map's history records it: its last component, and its bytes on disk."""

    name: str
    size: int
    sha256: str


class Batch(NamedTuple):
    """Documents that are worked on together."""

    texts: list[str]
    groups: list[str]  # each document's: its file's name, or what `group_by` names
    shard: int  # that all of them are in
    consumed: int  # bytes on disk that were read up to their end, in all


_TEXT_FILES = "give text files (.txt, .jsonl, .parquet, also as .gz or .zst), or a glob in quotes: "
_TEXT_FILES += "'corpus/*.jsonl.gz'"


def find_texts(patterns: str | Path | Sequence[str | Path], hint: str = _TEXT_FILES) -> list[Path]:
    """Expand a path or glob, or several, to files, each once, in the order given.

    Raises:
        XtokError: if one matches no file; its hint is `hint`.
    """
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        paths = [path]
        if not path.exists():
            paths = sorted(map(Path, glob.glob(str(pattern), recursive=True)))
        matched = [p for p in paths if not p.is_dir()]
        if not matched:
            raise XtokError(
                f"{path} is a folder" if path.is_dir() else f"there is no file {pattern}",
                hint=hint,
            )
        files.update(dict.fromkeys(matched))
    return list(files)


LITTLE_TEXT = 1_000_000
"""Bytes of text below which figures, and maps counted on it, say little."""


def little_text(num_bytes: int) -> list[str]:
    """Return a note if a text is too short to count on, or to measure with."""
    if num_bytes >= LITTLE_TEXT:
        return []
    return [f"only {num_bytes:,} bytes of text: below 1 MB, rare tokens are not settled"]


def source_of(path: Path) -> TextSource:
    """Return a file's name, size and digest.

    Raises:
        XtokError: if the file cannot be read.
    """
    sha256, size = hashlib.sha256(), 0
    with reading(path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha256.update(block)
            size += len(block)
    return TextSource(name=path.name, size=size, sha256=sha256.hexdigest())


def check_texts(
    patterns: str | Path | Sequence[str | Path], field: str, group_by: str | None = None
) -> None:
    """Check, before longer work, that texts exist, and that the first one has the fields.

    Raises:
        XtokError: as `read_batches`.
    """
    for path in find_texts(patterns)[:1]:
        next(_documents(shards(path, field, group_by)[0]), None)


def shards(
    path: Path, field: str = "text", group_by: str | None = None, kind: Format | None = None
) -> list[TextShard]:
    """Cut a file into shards: byte ranges of text and JSON lines, row groups of Parquet.

    A compressed file is one shard. The cut depends on the file alone, and on its format, which its
    name tells if it is not given.

    Raises:
        XtokError: if the file cannot be read.
    """
    kind = kind or text_format(path)
    with reading(path), path.open("rb") as raw:
        size = path.stat().st_size
        if kind == "parquet":
            total, step = parquet_file(path).metadata.num_row_groups, 1
        else:
            total, step = (1, 1) if compression_of(raw) else (size, SHARD_BYTES)
    bounds = [*(range(0, total, step) or [0]), total]
    return [
        TextShard(
            path=path,
            format=kind,
            field=field,
            group_by=group_by,
            start=start,
            stop=None if stop == total else stop,
            size=size * stop // max(1, total) - size * start // max(1, total),
        )
        for start, stop in pairwise(bounds)
    ]


def text_format(path: Path) -> Format:
    """Tell a file's format from its suffix, compression suffixes aside."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst", ".zstd")]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


def read_batches(shards: Sequence[TextShard]) -> Iterator[Batch]:
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
        for text, group, so_far in _documents(shard):
            texts.append(text)
            groups.append(group if shard.group_by else file)
            size, consumed = size + len(text), before + min(so_far, shard.size)
            if size >= BATCH_CHARACTERS:
                yield Batch(texts, groups, number, consumed)
                texts, groups, size = [], [], 0
        if texts:
            yield Batch(texts, groups, number, consumed)
        before += shard.size


def _documents(shard: TextShard) -> Iterator[tuple[str, str, int]]:
    """Return a shard's documents, each with its group and the bytes on disk read so far."""
    if shard.group_by and shard.format == "text":
        raise XtokError(
            f"{shard.path} is plain text, and has no field {shard.group_by!r} to group by",
            hint="group by files: give each group a file of its own, and no field",
        )
    with reading(shard.path):
        if shard.format == "parquet":
            for text, group in _parquet_documents(shard):
                yield from ((part, group, 0) for part in _parts(text))
            return
        with shard.path.open("rb", _BLOCK) as raw:
            file = decompressed(raw, shard.path)
            if shard.format == "text":
                for text in _plain_documents(shard, file):
                    yield text, "", raw.tell() - shard.start
                return
            for offset, line in lines(shard, file, MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise XtokError(
                        f"{shard.path}, line {line_number(shard, offset)}: more than "
                        f"{MAX_LINE_BYTES >> 20} MiB",
                        hint="give one JSON object per line, and split this document into several",
                    )
                if line.strip():
                    text, group = _json_document(shard, offset, line)
                    consumed = raw.tell() - shard.start
                    yield from ((part, group, consumed) for part in _parts(text))


def _parts(text: str) -> list[str]:
    """Cut a long document."""
    if len(text) <= MAX_CHARACTERS:
        return [text]
    starts = range(0, len(text), MAX_CHARACTERS)
    return [text[start : start + MAX_CHARACTERS] for start in starts]


def lines(shard: TextShard, file: Any, limit: int) -> Iterator[tuple[int, bytes]]:
    """Return the lines of a (decompressed) file that begin in a shard, each with its byte offset.

    A line of more bytes than the limit comes in parts, none of which ends within a character.
    """
    offset = shard.start
    if offset:  # a line that began before belongs to the previous shard
        file.seek(offset - 1)
        while not file.readline(DOCUMENT_BYTES).endswith(b"\n"):
            if not file.peek(1):
                return
        offset = file.tell()
    is_within_line = False
    while shard.stop is None or offset < shard.stop or is_within_line:
        line = file.readline(limit)
        if not line:
            return
        is_within_line = not line.endswith(b"\n")
        if is_within_line:
            for _ in range(3):  # a character of UTF-8 has up to 3 continuation bytes, 10xxxxxx
                if (after := file.peek(1)[:1]) and after[0] & 0xC0 == 0x80:
                    line += file.read(1)
        yield offset, line
        offset += len(line)


def _plain_documents(shard: TextShard, file: Any) -> Iterator[str]:
    start, document = 0, bytearray()
    for offset, line in lines(shard, file, DOCUMENT_BYTES):
        if not document:
            start = offset
        document += line
        if len(document) >= DOCUMENT_BYTES:
            yield _decode(shard, start, bytes(document))
            document.clear()
    if document:
        yield _decode(shard, start, bytes(document))


def _decode(shard: TextShard, offset: int, data: bytes) -> str:
    """Decode what begins at a byte of the (decompressed) file; a byte order mark is no text."""
    encoding, start = "latin1", 0
    if offset == 0:
        data = data.removeprefix(b"\xef\xbb\xbf")
        encoding = {b"\xff\xfe": "UTF-16LE", b"\xfe\xff": "UTF-16BE"}.get(data[:2], encoding)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        start = error.start
        line = line_number(shard, offset + start)
        raise XtokError(
            f"the text {shard.path} is not UTF-8: byte {data[start]:#04x} at offset "
            f"{offset + start}, in line {line}",
            hint=f"convert the text, if it is {encoding}, with: iconv -f {encoding} -t UTF-8",
        ) from error
    if (zeros := data.count(0)) > max(1, len(data) // _ZEROS):
        encoding = "UTF-16BE" if data.startswith(b"\0") else "UTF-16LE"
        raise XtokError(
            f"the text {shard.path} is not UTF-8: {zeros:,} of {len(data):,} bytes at offset "
            f"{offset} are zero",
            hint=f"convert the text, if it is {encoding}, with: iconv -f {encoding} -t UTF-8",
        )
    return text


def line_number(shard: TextShard, offset: int) -> int:
    """Return the line, from 1, that holds a byte of the (decompressed) file."""
    with shard.path.open("rb") as raw:
        file, number = decompressed(raw, shard.path), 1
        while offset > 0 and (block := file.read(min(offset, _BLOCK))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def _json_document(shard: TextShard, offset: int, line: bytes) -> tuple[str, str]:
    """Return the text and the group of a line of JSON."""
    text = _decode(shard, offset, line)
    try:
        value = json.loads(text)
        problem = _problem_of(value, shard)
    except (ValueError, RecursionError) as error:
        problem = no_json(error)
    if problem:
        raise XtokError(
            f"{shard.path}, line {line_number(shard, offset)}: {problem}",
            hint="give one JSON object per line, and the name of its text field with {option}; "
            "plain text needs a name that ends in .txt",
            parameter="field",
        )
    text = value[shard.field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    group = value.get(shard.group_by, "")
    return text, group if isinstance(group, str) else json.dumps(group)


_JSON_TYPES = {bool: "true or false", list: "a list", dict: "an object", type(None): "null"}


def _problem_of(value: Any, shard: TextShard) -> str:
    """Say why a JSON value is not a document of a shard; "" if it is one."""
    if not isinstance(value, dict):
        return "no JSON object"
    if shard.field not in value:
        texts = listed(sorted(k for k, v in value.items() if isinstance(v, str)), 8)
        return f"no field {shard.field!r}; fields with text: {texts or 'none'}"
    text = value[shard.field]
    if not isinstance(text, str):
        kind = _JSON_TYPES.get(type(text), "a number")
        return f"the field {shard.field!r} is {kind}, not a string"
    if shard.group_by and shard.group_by not in value:
        return f"no field {shard.group_by!r} to group by"
    return ""


def _parquet_documents(shard: TextShard) -> Iterator[tuple[str, str]]:
    """Return texts and their groups, a few rows at a time; nulls are left out."""
    file = parquet_file(shard.path)
    names = file.schema_arrow.names
    parameters = {shard.field: "field"} | ({shard.group_by: "group_by"} if shard.group_by else {})
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
                f"{shard.path}: the column {shard.field!r} is not UTF-8: {error.reason}",
                hint="write it again, as UTF-8",
            ) from error
        for text, group in zip(columns[0], columns[-1], strict=True):
            if isinstance(text, str):
                yield text, str(group)
            elif text is not None:
                raise XtokError(
                    f"{shard.path}: the column {shard.field!r} holds no text",
                    hint="name the column that holds the text with {option}",
                    parameter="field",
                )
