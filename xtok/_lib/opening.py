"""Open input files: compressed ones, damaged ones, and those that a package has to read."""

from __future__ import annotations

import importlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from xtok.errors import XtokError, install_hint

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f; pzstd writes one before each frame


@contextmanager
def reading(path: Path, what: str = "the text") -> Iterator[None]:
    """Turn what a damaged or missing file raises into an `XtokError` that names it."""
    try:
        yield
    except Exception as error:
        is_damage = isinstance(error, OSError | EOFError | UnicodeDecodeError | zlib.error)
        if not is_damage and type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise XtokError(
            f"{what} {path} cannot be read: {reason}",
            hint="check the path and its permissions; fetch a damaged file again",
        ) from error


def need(module: str, path: object) -> Any:
    """Import a module that a file needs.

    Raises:
        XtokError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise XtokError(
            f"{path} needs the package {package}, which is not installed",
            hint=install_hint(package),
        ) from error


def compression_of(raw: BinaryIO) -> Literal["gzip", "zstd"] | None:
    """Tell how a file is compressed, from its first bytes."""
    head = raw.read(4)
    raw.seek(0)
    if head.startswith(_GZIP):
        return "gzip"
    is_skipped = head[1:] == _ZSTD_SKIPPED and head[0] >> 4 == 5
    return "zstd" if head == _ZSTD or is_skipped else None


def decompressed(raw: BinaryIO, path: Path) -> Any:
    """Return a buffered reader (with `peek`) of a file's contents."""
    compression = compression_of(raw)
    if compression == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if compression == "zstd":  # unlike the package zstandard, pyarrow reports a truncated frame
        return io.BufferedReader(need("pyarrow", path).CompressedInputStream(raw, "zstd"))
    return raw


def parquet_file(path: Path, buffer_size: int = 0) -> Any:
    """Return an opened Parquet file; a buffer reads a column of a row group piece by piece."""
    parquet, arrow = need("pyarrow.parquet", path), need("pyarrow", path)
    file = arrow.OSFile(os.fsencode(path))  # of a str, pyarrow takes UTF-8 alone
    return parquet.ParquetFile(file, buffer_size=buffer_size)
