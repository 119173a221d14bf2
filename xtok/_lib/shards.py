"""Find input files, cut them into shards, and record what they are."""

from __future__ import annotations

import codecs
import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from xtok._lib.opening import check_regular, compression_of, decompressed, reading
from xtok._lib.parquet import ParquetTable
from xtok.errors import XtokError

Format = Literal["text", "jsonl", "json", "parquet"]

Paths = str | Path | Sequence[str | Path]
"""A path or glob, or several."""

SHARD_BYTES = 1 << 26
"""Uncompressed text and JSON lines are cut into shards of about this many bytes."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
_BLOCK_BYTES = 1 << 17
_BEFORE_JSON = b" \t\r\n" + codecs.BOM_UTF8


class Shard(NamedTuple):
    """A part of a file that can be read on its own: what begins in `start`..`stop`.

    These are bytes, or row groups of Parquet; `stop` is None for the end of the file.
    """

    path: Path
    format: Format
    start: int = 0
    stop: int | None = None
    size: int = 0  # its approximate share of the file's bytes on disk


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file as what is made of it records it: its last component, and its bytes on disk."""

    name: str
    size: int
    sha256: str


def find_files(patterns: Paths, hint: str) -> list[Path]:
    """Expand a path or glob, or several, to files, each once, in the order given.

    Raises:
        XtokError: if one matches no file, with the hint `hint`, or what can be read only once.
    """
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        paths = [path]
        if not path.exists():  # an existing folder is no pattern, even with brackets in its name
            folder = next(parent for parent in path.parents if parent.exists())
            rest = str(path.relative_to(folder))
            paths = sorted(map(folder.joinpath, glob.glob(rest, root_dir=folder, recursive=True)))
        matched = [p for p in paths if not p.is_dir()]
        if not matched:
            raise XtokError(
                f"{path} is a folder" if path.is_dir() else f"there is no file {pattern}",
                hint=hint,
            )
        for file in matched:
            check_regular(file)
        files.update(dict.fromkeys(matched))
    return list(files)


def source_of(path: Path) -> SourceFile:
    """Return a file's name, size and digest.

    Raises:
        XtokError: if the file cannot be read.
    """
    sha256, size = hashlib.sha256(), 0
    with reading(path), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            size += len(block)
    return SourceFile(name=path.name, size=size, sha256=sha256.hexdigest())


def format_of(path: Path) -> Format:
    """Tell a file's format from its suffix, compression suffixes aside."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst", ".zstd")]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


def shards(path: Path, kind: Format | None = None) -> list[Shard]:
    """Cut a file into shards: byte ranges of text and JSON lines, row groups of Parquet.

    A compressed file is one shard. The cut depends on the file alone, and on its format, which is
    by its name if None.

    Raises:
        XtokError: if the file cannot be read.
    """
    kind = kind or format_of(path)
    with reading(path), path.open("rb") as raw:
        size = path.stat().st_size
        if kind == "json" and decompressed(raw, path).peek(3).lstrip(_BEFORE_JSON)[:1] != b"[":
            kind = "jsonl"
        raw.seek(0)
        if kind == "parquet":
            total, step = ParquetTable(path).num_row_groups, 1
        elif kind == "json":
            total, step = 1, 1
        else:
            total, step = (1, 1) if compression_of(raw, path) else (size, SHARD_BYTES)
    bounds = [*(range(0, total, step) or [0]), total]
    return [
        Shard(
            path=path,
            format=kind,
            start=start,
            stop=None if stop == total else stop,
            size=size * stop // max(1, total) - size * start // max(1, total),
        )
        for start, stop in pairwise(bounds)
    ]
