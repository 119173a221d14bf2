"""Read text files as a whole, line by line, or as JSON Lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xtok._lib.opening import MAX_ROW_BYTES, decompressed, reading
from xtok._lib.parsing import json_problem, parse_json
from xtok._lib.shards import Shard
from xtok.errors import XtokError

BLOCK_BYTES = 1 << 17
_CONTROLS = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # control characters of binary files
MAX_TEXT_BYTES = 1 << 26
"""Maximum decompressed size of a file in `read_small`."""

_ZEROS = 4  # if more than one byte in 4 is zero, a text is probably UTF-16


class LineOffset(NamedTuple):
    """The byte offset of a line in a file. Only error messages compute the line number."""

    path: Path
    offset: int  # offset in bytes of the decompressed file

    def __str__(self) -> str:
        return f"{self.path}, line {line_number(self.path, self.offset)}"


class FileRow(NamedTuple):
    """A row of a file: a JSON value, or the columns of a table by name."""

    location: Any  # for errors: file and row, or file and line (in JSON Lines a `LineOffset`)
    value: Any
    read: int  # bytes on disk from the start of the file to the end of the row; 0 in Parquet


def lines(shard: Shard, file: Any, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield the byte offset and the bytes of each line that begins in a shard.

    Lines longer than `limit` bytes are split between two characters.
    """
    offset = shard.start
    if offset:  # a line that began earlier belongs to the previous shard
        file.seek(offset - 1)
        while not file.readline(BLOCK_BYTES).endswith(b"\n"):
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
            for _ in range(3):  # a UTF-8 character has up to 3 continuation bytes (10xxxxxx)
                if (after := file.peek(1)[:1]) and after[0] & 0xC0 == 0x80:
                    line += file.read(1)
        yield offset, line
        offset += len(line)


def json_lines(
    shard: Shard, *, hint: str, parameter: str = "", strict: bool = False
) -> Iterator[FileRow]:
    """Yield the values of the lines that begin in a shard. Empty lines are skipped.

    If a line is not JSON, the error contains `hint` and `parameter`. `strict` rejects unpaired
    surrogates.
    """
    with shard.path.open("rb", BLOCK_BYTES) as raw:
        file = decompressed(raw, shard.path)  # keep a reference: a deleted reader closes `raw`
        for offset, line in lines(shard, file, MAX_ROW_BYTES + 1):
            location = LineOffset(shard.path, offset)
            if len(line) > MAX_ROW_BYTES:
                raise too_long(location)
            if not line.strip():
                continue
            text = decode(location, line.rstrip(b" \t\r\n")).removeprefix("\ufeff")
            try:
                value = parse_json(text, allow_nan=True)
                if strict and (b"\\ud" in line or b"\\uD" in line):
                    json.dumps(value, ensure_ascii=False).encode()
            except ValueError as error:
                problem = f"{location}: {json_problem(error)}"
                raise XtokError(problem, hint=hint, parameter=parameter) from error
            yield FileRow(location, value, raw.tell())


def too_long(location: object) -> XtokError:
    """Return the error for a JSON line or document that is too long."""
    problem = f"{location}: JSON value is larger than {MAX_ROW_BYTES >> 20} MiB"
    return XtokError(problem, hint="write one JSON value per line, and split long values")


def read_text(path: Path, noun: str) -> str:
    """Return the text of a small UTF-8 file. Error messages call the file `noun`."""
    return decode(LineOffset(path, 0), read_small(path, noun))


def read_small(path: Path, noun: str) -> bytes:
    """Return the decompressed contents of a small file. Error messages call the file `noun`."""
    with reading(path, noun), path.open("rb") as raw:
        data: bytes = decompressed(raw, path).read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        problem = f"{noun} {path} is larger than {MAX_TEXT_BYTES >> 20} MiB"
        raise XtokError(problem, hint="give another file")
    return data


def decode(location: LineOffset, data: bytes) -> str:
    """Decode UTF-8 bytes of a file, and remove a byte order mark at the start."""
    path, offset = location
    encoding = "latin1"
    if offset == 0:
        encoding = {b"\xff\xfe": "UTF-16LE", b"\xfe\xff": "UTF-16BE"}.get(data[:2], encoding)
    try:
        text, zeros = data.decode(), data.count(0)
        if zeros <= max(1, len(data) // _ZEROS):
            return text if offset else text.removeprefix("\ufeff")
        encoding = "UTF-16BE" if data.startswith(b"\0") else "UTF-16LE"
        problem = f"{zeros:,} of {len(data):,} bytes at offset {offset} are zero"
    except UnicodeDecodeError as error:
        start = offset + error.start
        problem = f"byte {data[error.start]:#04x} at offset {start}, "
        problem += f"in line {line_number(path, start)}"
    hint = f"if the file is {encoding}, convert it: iconv -f {encoding} -t UTF-8"
    if encoding == "latin1" and _CONTROLS.search(data):
        problem += "; the file also contains control characters"
        hint = "give a text file: .txt, .jsonl or .parquet, also as .gz or .zst"
    raise XtokError(f"{path} is not UTF-8: {problem}", hint=hint)


def line_number(path: Path, offset: int) -> int:
    """Return the line number (from 1) at a byte offset of the decompressed file."""
    with path.open("rb") as raw:
        file, number = decompressed(raw, path), 1
        while offset > 0 and (block := file.read(min(offset, BLOCK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return number
