"""What many tests check: how a command or a file fails, and within what time."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from xtok.cli import make_app
from xtok.errors import XtokError
from xtok.tokenizers import load_tokenizer

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return a value that is not None."""
    assert value is not None
    return value


def error_of(call: Callable[[], object]) -> str:
    """Return what a call says is wrong; it says in a line what to do about it, too."""
    with pytest.raises(XtokError) as caught:
        call()
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.hint
    return caught.value.message


def not_loaded(model: str | Path, **options: Any) -> str:
    """Return why a tokenizer cannot be loaded."""
    return error_of(lambda: load_tokenizer(str(model), **options))


def fails(done: subprocess.CompletedProcess[str], message: str, hint: str = "") -> None:
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert lines[-2].startswith("error: "), done.stderr
    assert message in lines[-2]
    assert lines[-1].startswith("hint: ")
    assert hint in lines[-1]
    assert "Traceback" not in done.stderr


def usage_error(*args: str) -> str:
    """Return what a command line that is wrong prints on a wide terminal."""
    done = CliRunner().invoke(make_app(args[:1]), args, env={"COLUMNS": "300", "TERM": "dumb"})
    assert (done.exit_code, done.stdout) == (2, "")
    return done.stderr


def mutant(data: bytes, chance: random.Random) -> bytes:
    """Cut a file, flip bits, write a huge or negative number, or repeat or drop a part."""
    place = chance.randrange(len(data))
    if chance.random() < 0.5:
        place = place % 400  # headers have the lengths
    kind = chance.randrange(5)
    if kind == 0:
        return data[:place]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(chance.choice((1, 1, 8))):
            flipped[place] ^= 1 << chance.randrange(8)
            place = chance.randrange(len(data))
        return bytes(flipped)
    size: int = chance.choice((1, 4, 8))
    if kind == 2:
        number = chance.choice((2**63, 2**64 - 1, 2**31, 2**40, 0, 1_000_000)) % (1 << 8 * size)
        return data[:place] + number.to_bytes(size, "little") + data[place + size :]
    length = chance.randrange(1, 200)
    part = data[place : place + length]
    return data[:place] + part * (2 if kind == 3 else 0) + data[place + length :]


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
