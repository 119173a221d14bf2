"""Open and decompress input files. Errors name the file that cannot be read."""

from __future__ import annotations

import importlib
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from xtok.errors import XtokError, install_hint

_READ: Mapping[bytes, Literal["gzip", "zstd"]] = {
    rb"\x1f\x8b": "gzip",
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": "zstd",  # pzstd writes a skippable frame first
}

_NOT_READ = {
    rb"BZh[1-9](1AY&SY|\x17rE8)": ("compressed with bzip2", "bzip2 -d"),
    rb"\xfd7zXZ\0": ("compressed with xz", "xz -d"),
    rb"\x5d\0\0": ("compressed with lzma", "xz -d"),
    rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18": ("compressed with lz4", "lz4 -d"),
    rb"\x1f[\x9d\xa0]": ("compressed with compress", "gzip -d"),
    rb"LZIP\x01": ("compressed with lzip", "lzip -d"),
    rb"\x89LZO\0": ("compressed with lzop", "lzop -d"),
    rb"\xff\x06\0\0sNaPpY": ("compressed with snappy", "snzip -d"),
    rb"PK(\x03\x04|\x05\x06)": ("a zip archive", "unzip"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "7z x"),
    rb"Rar!\x1a\x07": ("a RAR archive", "unrar x"),
    rb".{257}ustar[\0 ]": ("a tar archive", "tar -xf"),
}
"""First bytes of unsupported compressions and archives → name and unpack command.

`fsspec` recognizes a compression only by the suffix, and would read a misnamed file as text.
"""

_HEAD_BYTES = 512

MAX_ROW_BYTES = 1 << 29
"""Maximum size of a row or page of Parquet, and of a line or document of JSON.

vLLM writes rows of 300 MB (8,192 tokens with 512 candidates each). DuckDB writes pages of 100 MB.
"""


def check_regular(path: Path) -> None:
    """Check that a file is not a pipe or a device, which cannot be read twice."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        problem = f"{path} is {'a pipe' if path.is_fifo() else 'a device'}, not a regular file"
        hint = "write the data to a file first; xtok reads the file more than once"
        raise XtokError(problem, hint=hint)


@contextmanager
def reading(path: Path, noun: str = "the text") -> Iterator[None]:
    """Convert errors about a damaged or missing file into an `XtokError` that names the file."""
    check_regular(path)
    try:
        yield
    except Exception as error:
        is_damage = isinstance(error, OSError | EOFError | UnicodeDecodeError | zlib.error)
        if not is_damage and type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise XtokError(
            f"{noun} {path} cannot be read: {reason}",
            hint="check the path and its permissions; if the file is damaged, download it again",
        ) from error


def need(module: str, path: object) -> Any:
    """Import an optional module that a file requires, or raise an error with the package's name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        problem = f"{path} requires the package {package}, which is not installed"
        raise XtokError(problem, hint=install_hint(package)) from error


def compression_of(raw: Any, path: Path) -> Literal["gzip", "zstd"] | None:
    """Detect a supported compression from a file's first bytes. Others raise an `XtokError`."""
    head = raw.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    for magic, (kind, fix) in _NOT_READ.items():
        if re.match(magic, head, re.DOTALL):
            raise XtokError(
                f"{path} is {kind}", hint=f"unpack the file ({fix}); .gz and .zst are supported"
            )
    return next((name for magic, name in _READ.items() if re.match(magic, head)), None)


def decompressed(raw: Any, path: Path) -> Any:
    """Return a buffered reader (with `peek`) for the decompressed contents of a file."""
    compression = compression_of(raw, path)
    if compression is None:
        return raw
    if compression == "gzip":
        import gzip

        content: Any = gzip.GzipFile(fileobj=raw)
    else:  # unlike the package zstandard, pyarrow reports a truncated frame
        content = io.BufferedReader(need("pyarrow", path).CompressedInputStream(raw, "zstd"))
    if again := compression_of(content, path):
        problem = f"{path} is compressed twice: decompression gives another {again} file"
        raise XtokError(problem, hint="decompress one layer; .gz and .zst are supported")
    return content
