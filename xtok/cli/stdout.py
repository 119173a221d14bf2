"""Reserve stdout for results. All other output of a running command goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from xtok.cli.console import print_note
from xtok.tokenizers.display import printable, shorten

_MAX_LINES = 20  # limit for lines that libraries print, for example about 100,000 unknown keys

_result: TextIO | None = None


def result_stream() -> TextIO:
    """Return the stream for results."""
    return _result or sys.stdout


def print_result(text: str, end: str = "\n") -> None:
    """Print a result, or a part of a result, on stdout."""
    print(text, end=end, file=result_stream())


def print_path(path: Path) -> None:
    """Print the path of a file: escaped on a terminal, otherwise as exact bytes."""
    stream = result_stream()
    if stream.isatty():
        print_result(printable(os.fspath(path)))
    else:
        stream.flush()
        stream.buffer.write(os.fsencode(path) + b"\n")
        stream.flush()


@contextmanager
def redirected(stream: TextIO, descriptor: int, file: IO[bytes]) -> Iterator[int]:
    """Redirect a stream to a file, together with the output of C and Rust code.

    Yields a copy of the stream's descriptor.
    """
    stream.flush()
    saved = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield saved
    finally:
        stream.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Reserve stdout for results, and print all other output on stderr at the end.

    Other output comes, for example, from a model's custom code. Log messages of libraries are
    escaped.
    """
    global _result
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # a test replaced sys.stdout
        yield
        return
    _escape_log_messages()
    encoding = sys.stdout.encoding
    with _scratch_file() as others:
        try:
            with (
                redirected(sys.stdout, descriptor, others) as stdout,
                open(stdout, "w", -1, encoding, "backslashreplace", closefd=False) as _result,
            ):
                yield
        finally:
            _result = None
            _show_printed(others)


def _scratch_file() -> IO[bytes]:
    import tempfile

    with suppress(OSError):
        return tempfile.TemporaryFile()
    return open(os.devnull, "w+b")  # no temporary folder is writable


def _show_printed(file: IO[bytes]) -> None:
    file.seek(0)
    lines = [line for line in file.read(100_000).decode(errors="replace").split("\n") if line]
    more = [f"at least {len(lines) - _MAX_LINES} more lines"] if len(lines) > _MAX_LINES else []
    for line in lines[:_MAX_LINES] + more:
        print_note(f"a library printed: {shorten(printable(line))}")


def _escape_log_messages() -> None:
    import logging
    import warnings

    warning = warnings.formatwarning

    def format_warning(*args: Any, **kwargs: Any) -> str:
        return printable_lines(warning(*args, **kwargs))

    class SafeRecord(logging.LogRecord):
        def getMessage(self) -> str:
            return printable_lines(super().getMessage())

    warnings.formatwarning = format_warning
    logging.setLogRecordFactory(SafeRecord)
    # This logger warns if a config and its model use two names for the same type.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)


def printable_lines(text: str) -> str:
    """Escape a text for printing, but keep its line breaks."""
    return "\n".join(map(printable, text.split("\n")))
