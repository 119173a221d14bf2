"""Common checks: errors of commands and files, and time limits."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from command_lines import run_python
from forked import Forks
from rich.cells import cell_len
from typer.testing import CliRunner

from xtok.cli import make_app
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType

T = TypeVar("T")
Done = subprocess.CompletedProcess[str]


def not_none(value: T | None) -> T:
    """Return a value that is not None."""
    assert value is not None
    return value


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the `XtokError` that a call raises; check that it has a hint."""
    with pytest.raises(XtokError) as caught:
        call()
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.hint
    return caught.value.message


def not_loaded(model: str | Path, **options: Any) -> str:
    """Return the error message of a tokenizer that cannot be loaded."""
    return error_of(lambda: load_tokenizer(str(model), **options))


def related_by_bytes(projection: ProjectionMap) -> None:
    """Check that each text row has entries, and that each is a part of its token or contains it."""
    table, columns = not_none(projection.student.table), not_none(projection.teacher.table).tokens()
    rows = table.tokens()
    assert (projection.entries_per_row[table.text_ids] > 0).all()
    for s, t in zip(projection.student_ids.tolist(), projection.teacher_ids.tolist(), strict=True):
        if rows[s]:
            assert columns[t]
            assert columns[t] in rows[s] or rows[s] in columns[t]


def identity(projection: ProjectionMap) -> None:
    """Check that the row of each used token has one entry: a token with the same bytes."""
    table = not_none(projection.student.table)
    tokens, same = table.tokens(), table.canonical_ids()
    used = np.flatnonzero(table.types != TokenType.UNUSED).tolist()
    assert projection.student_ids.tolist() == used
    assert projection.teacher_ids.tolist() == [same[tokens[i]] if tokens[i] else i for i in used]
    assert (projection.weights == 1).all()


def works(result: Done) -> Done:
    assert result.returncode == 0, result.stderr
    return result


def fails(result: Done, message: str, hint: str = "") -> None:
    lines = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert lines[-2].startswith("error: "), result.stderr
    assert message in lines[-2]
    assert lines[-1].startswith("hint: ")
    assert hint in lines[-1]
    assert "Traceback" not in result.stderr


def printed_json(result: Done) -> Any:
    """Return the object that a command prints with `--json`."""
    return json.loads(works(result).stdout)


def fits_80_columns(text: str) -> bool:
    return max(map(cell_len, text.splitlines())) <= 80


def is_printable(text: str) -> bool:
    """Return whether a text contains no control characters except line ends."""
    return all(line.isprintable() for line in text.split("\n"))


def usage_error(*args: str) -> str:
    """Return the stderr of a wrong command line on a wide terminal."""
    result = CliRunner().invoke(make_app(args[:1]), args, env={"COLUMNS": "300", "TERM": "dumb"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(
        r"(note: .*\n)*error: .+\nhint: run xtok( [a-z-]+)? --help\n", result.stderr
    )
    return result.stderr


KILLED = """
import os, signal, sys
stop = getattr(signal, sys.argv.pop(1))
{code}
from xtok.__main__ import program
program()
"""


def killed(code: str, stop: str, args: list[str], folder: Path, forks: Forks | None = None) -> Done:
    """Run `xtok` with code that sends it a signal: `os.kill(os.getpid(), stop)`.

    Without `forks` it runs as a separate process, which a signal can stop during imports.
    """
    program = KILLED.format(code=code)
    if forks is None:
        return run_python(program, stop, *args, cwd=folder)
    return forks.run(["-c", program, stop, *args], folder, program="python")


def on_a_full_disk(forks: Forks, size: int, args: list[str], folder: Path) -> Done:
    """Run `xtok` with a limit on the size of a file, which fails like a full disk."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    code += "from xtok.__main__ import program; program()"
    return forks.run(["-c", code, *args], folder, program="python")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes, which fails like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def one_core() -> Iterator[None]:
    """Let this thread, and threads that it starts, use a single core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def unreadable_folder(mode: int) -> Iterator[Path]:
    """Yield a folder with this mode; until the end, this process does not run as root."""
    folder, user = Path(tempfile.mkdtemp(prefix="xtok-")), os.geteuid()
    folder.chmod(mode)
    os.seteuid(user or 65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
        shutil.rmtree(folder)


def mutant(data: bytes, chance: random.Random) -> bytes:
    """Cut a file, flip bits, write a huge or negative number, or repeat or drop a part."""
    offset = chance.randrange(len(data))
    if chance.random() < 0.5:
        offset = offset % 400  # a header contains the lengths
    kind = chance.randrange(5)
    if kind == 0:
        return data[:offset]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(chance.choice((1, 1, 8))):
            flipped[offset] ^= 1 << chance.randrange(8)
            offset = chance.randrange(len(data))
        return bytes(flipped)
    size: int = chance.choice((1, 4, 8))
    if kind == 2:
        number = chance.choice((2**63, 2**64 - 1, 2**31, 2**40, 0, 1_000_000)) % (1 << 8 * size)
        return data[:offset] + number.to_bytes(size, "little") + data[offset + size :]
    length = chance.randrange(1, 200)
    part = data[offset : offset + length]
    return data[:offset] + part * (2 if kind == 3 else 0) + data[offset + length :]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"not done within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
