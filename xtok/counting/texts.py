"""Text files as documents: plain text, JSON lines and Parquet, plain or compressed, in shards."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

from xtok.errors import XtokError, install_hint

Format = Literal["text", "jsonl", "parquet"]

DOCUMENT_BYTES = 1 << 16
"""A plain text file is cut into documents at the first line end after this many bytes."""

MAX_LINE_BYTES = 1 << 20
"""A longer line of plain text is cut between two characters."""

SHARD_BYTES = 1 << 26
"""A file that can be read from the middle is counted in shards of about this many bytes."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f; pzstd writes one before each frame
_DAMAGE = (OSError, EOFError, UnicodeDecodeError, zlib.error)
_MOST_CONTINUED = 3  # bytes of a character after its first one
_HASH_AT_ONCE = 1 << 22
_BLOCK = 1 << 17


@dataclass(frozen=True, kw_only=True)
class TextShard:
    """A part of a text file that can be read on its own.

    Attributes:
        path: the file.
        format: what it holds: `text`, `jsonl` (an object per line) or `parquet`.
        field: the field or column that holds a document's text; of plain text, without meaning.
        start: the first byte (text, jsonl) or row group (parquet) that may begin a document.
        stop: the first byte or row group of the next shard; None for the end of the file.
        number: its place among the shards of its file.
        group_by: a field or column that says which group a document is of.
        size: about how many bytes of the file it is, as it lies on disk.
    """

    path: Path
    format: Format
    field: str
    start: int = 0
    stop: int | None = None
    number: int = 0
    group_by: str | None = None
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """What a text file is, for the record: its name without the folder, and its contents' digest.

    Attributes:
        name: the last component of the path.
        size: in bytes, as it lies on disk.
        sha256: of the file as it lies on disk.
    """

    name: str
    size: int
    sha256: str


def find_texts(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and globs name, each once, in the order given.

    Raises:
        XtokError: if one names no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        paths = [path]
        if not path.exists():
            paths = sorted(map(Path, glob.glob(str(pattern), recursive=True)))
        files = [p for p in paths if not p.is_dir()]
        if not files:
            folder = f"{path} is a folder" if path.is_dir() else f"there is no file {pattern}"
            raise XtokError(
                f"--text: {folder}",
                hint="give text files (.txt, .jsonl, .parquet, also as .gz or .zst), or a glob in "
                "quotes: --text 'corpus/*.jsonl.gz'",
            )
        found.update(dict.fromkeys(files))
    return list(found)


def describe_text(path: Path) -> TextSource:
    """Read a file once for its size and digest.

    Raises:
        XtokError: if it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with _reading(path), path.open("rb") as file:
        while block := file.read(_HASH_AT_ONCE):
            digest.update(block)
            size += len(block)
    return TextSource(name=path.name, size=size, sha256=digest.hexdigest())


def shards(path: Path, field: str = "text") -> list[TextShard]:
    """Cut a file into shards: byte ranges of text and JSON lines, row groups of Parquet.

    A compressed file is one shard. The cut depends on the file alone.

    Raises:
        XtokError: if the file cannot be read.
    """
    found = text_format(path)
    with _reading(path):
        size = path.stat().st_size
        if found == "parquet":
            total, step = _parquet(path).metadata.num_row_groups, 1
        else:
            with path.open("rb") as raw:
                is_compressed = _compression(raw) is not None
            total, step = (1, 1) if is_compressed else (size, SHARD_BYTES)
    starts = [*range(0, total, step)] or [0]
    bounds = [*starts, total]
    return [
        TextShard(
            path=path,
            format=found,
            field=field,
            start=start,
            stop=None if number + 1 == len(starts) else stop,
            number=number,
            size=size * stop // max(1, total) - size * start // max(1, total),
        )
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]


def text_format(path: Path) -> Format:
    """Return what a file holds, by its suffix but for that of a compression."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst", ".zstd")]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


class ShardReader:
    """Reads the documents of a shard, in order. Lone surrogates become U+FFFD.

    Attributes:
        consumed: bytes of the file (as it lies on disk) that were read so far.

    Raises:
        XtokError: while it is read, naming the file and the place of what is no text: bytes that
            are not UTF-8, a line that is no JSON object, a field that is missing or no string.
    """

    def __init__(self, shard: TextShard) -> None:
        self.shard = shard
        self.consumed = 0
        self._groups: list[str] = []

    def take_groups(self) -> list[str]:
        """Return the groups of the documents that were read since this was last called."""
        taken, self._groups = self._groups, []
        return taken

    def __iter__(self) -> Iterator[str]:
        shard = self.shard
        if shard.group_by and shard.format == "text":
            raise XtokError(
                f"{shard.path} is plain text, and has no field {shard.group_by!r} to group by",
                hint="group by files: give each group a file of its own, and no field",
            )
        with _reading(shard.path):
            if shard.format == "parquet":
                yield from _parquet_documents(shard, self._groups)
                return
            with shard.path.open("rb") as raw:
                if shard.format == "jsonl":
                    for place, line in _lines(shard, raw, None):
                        self.consumed = raw.tell() - shard.start
                        if line.strip():
                            yield _json_document(shard, place, line, self._groups)
                else:
                    for document in _plain_documents(shard, raw):
                        self.consumed = raw.tell() - shard.start
                        yield document


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]  # none is loaded to name its errors
        if package not in ("pyarrow", "zstandard") and not isinstance(error, _DAMAGE):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise XtokError(
            f"the text {path} cannot be read: {reason}",
            hint="check the path and its permissions; a damaged file has to be fetched again",
        ) from error


def _compression(raw: BinaryIO) -> Literal["gzip", "zstd"] | None:
    head = raw.read(4)
    raw.seek(0)
    if head.startswith(_GZIP):
        return "gzip"
    is_skipped = head[1:] == _ZSTD_SKIPPED and head[0] >> 4 == 5
    return "zstd" if head == _ZSTD or is_skipped else None


def _decompressed(raw: BinaryIO, path: Path) -> Any:
    """Return a buffered reader (with `peek`) of what a file holds, compressed or not."""
    compression = _compression(raw)
    if compression == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if compression == "zstd":
        return io.BufferedReader(_ZstdReader(raw, _need("zstandard", path).ZstdDecompressor()))
    return raw


class _ZstdReader(io.RawIOBase):
    """Frames of zstd, one after another; unlike the package's own reader, it tells a cut-off one.

    Args:
        raw: the compressed file.
        decompressor: of the package zstandard.
    """

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what comes next, as far as it is decompressed."""
        while not self._ready:
            block = self._frame.unused_data if self._frame and self._frame.eof else b""
            block = block or self._raw.read(_BLOCK)
            if not block:
                if self._frame and not self._frame.eof:
                    raise EOFError("it ends within a frame of zstd")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(block))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _need(module: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise XtokError(
            f"{path} needs the package {module.partition('.')[0]}, which is not installed",
            hint=install_hint("text"),
        ) from error


def _lines(shard: TextShard, raw: BinaryIO, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """Return the lines that begin in a shard, with the byte that each begins at.

    With a limit, a longer line comes in parts, none of which ends within a character.
    """
    file = _decompressed(raw, shard.path)
    place = shard.start
    if place:  # what begins before the shard belongs to the one before
        file.seek(place - 1)
        while not file.readline(MAX_LINE_BYTES).endswith(b"\n"):
            if not file.peek(1):
                return
        place = file.tell()
    within = False
    while shard.stop is None or place < shard.stop or within:
        line = file.readline(-1 if limit is None else limit)
        if not line:
            return
        for _ in range(0 if limit is None or line.endswith(b"\n") else _MOST_CONTINUED):
            line += file.read(1) if _continues(file.peek(1)) else b""
        within = not line.endswith(b"\n")
        yield place, line
        place += len(line)


def _continues(head: bytes) -> bool:
    """Tell whether these bytes go on with a character of UTF-8."""
    return bool(head) and 0x80 <= head[0] < 0xC0


def _plain_documents(shard: TextShard, raw: BinaryIO) -> Iterator[str]:
    parts: list[bytes] = []
    size = start = 0
    for place, line in _lines(shard, raw, MAX_LINE_BYTES):
        if not parts:
            start = place
        parts.append(line)
        size += len(line)
        if size >= DOCUMENT_BYTES:
            yield _decode(shard, start, b"".join(parts))
            parts, size = [], 0
    if parts:
        yield _decode(shard, start, b"".join(parts))


def _decode(shard: TextShard, place: int, data: bytes) -> str:
    if place == 0:
        for mark, name in ((b"\xff\xfe", "UTF-16LE"), (b"\xfe\xff", "UTF-16BE")):
            if data.startswith(mark):
                raise _not_utf8(shard, data[0], 0, name)
        data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(shard, data[error.start], place + error.start, "latin1") from error


def _not_utf8(shard: TextShard, byte: int, offset: int, encoding: str) -> XtokError:
    line = _line_number(shard, offset)
    return XtokError(
        f"the text {shard.path} is not UTF-8: byte {byte:#04x} at offset {offset}, in line {line}",
        hint=f"convert the text, if it is {encoding}, with: iconv -f {encoding} -t UTF-8",
    )


def _line_number(shard: TextShard, place: int) -> int:
    """Return the number of the line that a byte of the (decompressed) file is in, from 1."""
    with shard.path.open("rb") as raw:
        file, number = _decompressed(raw, shard.path), 1
        while place > 0 and (block := file.read(min(place, _BLOCK))):
            number += block.count(b"\n")
            place -= len(block)
    return number


def _json_document(shard: TextShard, place: int, line: bytes, groups: list[str]) -> str:
    text = _decode(shard, place, line)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        problem = f"no JSON: {error}"
    else:
        problem = _problem_of(found, shard)
        if not problem:
            if shard.group_by:
                group = found[shard.group_by]
                groups.append(group if isinstance(group, str) else json.dumps(group))
            return _without_surrogates(found[shard.field])
    raise XtokError(
        f"{shard.path}, line {_line_number(shard, place)}: {problem}",
        hint="give one JSON object per line, and the name of its text with --field; plain text "
        "needs a name that ends in .txt",
    )


def _problem_of(found: Any, shard: TextShard) -> str:
    """Say why a JSON value is no document of a shard; nothing if it is one."""
    if not isinstance(found, dict):
        return "no JSON object"
    if shard.field not in found:
        has = ", ".join(sorted(k for k, v in found.items() if isinstance(v, str))[:8])
        return f"no field {shard.field!r}; fields with text: {has or 'none'}"
    value = found[shard.field]
    if not isinstance(value, str):
        return f"the field {shard.field!r} is no string but {_JSON_TYPES[type(value)]}"
    if shard.group_by and shard.group_by not in found:
        return f"no field {shard.group_by!r} to group by"
    return ""


_JSON_TYPES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parquet(path: Path) -> Any:
    module = _need("pyarrow.parquet", path)
    try:
        return module.ParquetFile(path)
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        raise XtokError(
            f"the text {path} is no Parquet file: {error}", hint="fetch it again"
        ) from error


def _parquet_documents(shard: TextShard, groups: list[str]) -> Iterator[str]:
    file = _parquet(shard.path)
    names = file.schema_arrow.names
    columns = [shard.field, *([shard.group_by] if shard.group_by else [])]
    for column in columns:
        if column not in names:
            option = "--field" if column == shard.field else "--group-by"
            raise XtokError(
                f"{shard.path} has no column {column!r}, but: {', '.join(names[:8])}",
                hint=f"name one of its columns with {option}",
            )
    total = file.metadata.num_row_groups
    row_groups = list(range(shard.start, total if shard.stop is None else shard.stop))
    for batch in file.iter_batches(
        row_groups=row_groups, columns=columns, batch_size=256, use_threads=False
    ):
        texts, groups_of = (batch.column(name) for name in (columns[0], columns[-1]))
        for value, group in zip(_values(shard, texts), _values(shard, groups_of), strict=True):
            if isinstance(value, str):
                if shard.group_by:
                    groups.append(str(group))
                yield value
            elif value is not None:
                raise XtokError(
                    f"{shard.path}: the column {shard.field!r} holds no text",
                    hint="name the column that holds the text with --field",
                )


def _values(shard: TextShard, column: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:  # Parquet does not check what its writer calls a string
        raise XtokError(
            f"{shard.path}: the column {shard.field!r} is not UTF-8: {error.reason}",
            hint="write it again, as UTF-8",
        ) from error
    return values
