"""Find input files, split them into shards, and record their identity."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from xtok._lib.opening import check_regular, compression_of, decompressed, reading
from xtok._lib.parquet import ParquetTable
from xtok.errors import XtokError

Format: TypeAlias = Literal["text", "jsonl", "json", "parquet"]

Paths: TypeAlias = str | Path | Sequence[str | Path]
"""One or several paths or glob patterns."""

SHARD_BYTES = 1 << 26
"""Approximate size of a shard of uncompressed text or JSON Lines."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
_BEFORE_JSON = b" \t\r\n" + codecs.BOM_UTF8


class Shard(NamedTuple):
    """A part of a file: the lines that begin in a range of bytes, or Parquet row groups.

    If `stop` is None, the part ends at the end of the file.
    """

    path: Path
    format: Format
    start: int = 0
    stop: int | None = None
    size: int = 0  # approximate size of the shard on disk, in bytes


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """Identity of an input file, as recorded in outputs: base name, size and digest."""

    name: str
    size: int
    sha256: str


def find_files(patterns: Paths, hint: str) -> list[Path]:
    """Expand paths and glob patterns to files, in the given order and without duplicates."""
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        paths = [path]
        if not path.exists():  # brackets in the name of an existing folder are literal
            folder = next(parent for parent in path.parents if parent.exists())
            rest = str(path.relative_to(folder))
            paths = sorted(map(folder.joinpath, glob.glob(rest, root_dir=folder, recursive=True)))
        matched = [p for p in paths if not p.is_dir()]
        if not matched:
            problem = f"{path} is a folder" if path.is_dir() else f"no file matches {pattern}"
            raise XtokError(problem, hint=hint)
        for file in matched:
            check_regular(file)
        files.update(dict.fromkeys(matched))
    return list(files)


def source_of(path: Path) -> SourceFile:
    """Return a file's name, size and digest."""
    with reading(path), path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        name = os.fsencode(path.name).decode("utf-8", "backslashreplace")
        return SourceFile(name=name, size=file.tell(), sha256=sha256)


def format_of(path: Path) -> Format:
    """Return the format that a file's suffix declares. A suffix such as .gz is ignored."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst", ".zstd")]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


def shards(path: Path, kind: Format | None = None) -> list[Shard]:
    """Split a file into shards: byte ranges of text and JSON Lines, or Parquet row groups.

    A compressed file or a JSON array is one shard. The default for `kind` is `format_of(path)`.
    """
    kind = kind or format_of(path)
    with reading(path), path.open("rb") as raw:
        size = path.stat().st_size
        if kind == "json" and decompressed(raw, path).peek(3).lstrip(_BEFORE_JSON)[:1] != b"[":
            kind = "jsonl"
        raw.seek(0)
        total, step = 1, 1
        if kind == "parquet":
            total = ParquetTable(path).num_row_groups
        elif kind != "json" and not compression_of(raw, path):
            total, step = size, SHARD_BYTES
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
