"""Causes of errors: files, folders and models that tests of error messages share.

Each test of messages has a dict from hints to causes, and from causes to messages. A `…` at the end
stands for a message of another library, or for a list that may grow.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

import xtok
from xtok import ProjectionMap, SpellingMap, XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair

Cause = Callable[[], object]


def file(name: str, content: str | bytes = "") -> str:
    """Write a file, and return its name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def create(name: str, make: Callable[[str], object]) -> str:
    make(name)
    return name


def spellings(student: str = "bytes") -> SpellingMap:
    spelling_map: SpellingMap = xtok.spellings(student, "bytes")
    return spelling_map


def folder(stem: str, content: str | None = None, **parts: object) -> str:
    """Copy a tokenizer's folder, and change the text or parts of a JSON file."""
    shutil.copytree("small/small-digits", "model")
    path = Path("model", f"{stem}.json")
    path.write_text(content or json.dumps({**json.loads(path.read_text()), **parts}))
    return "model"


@cache
def small_tokenizer(name: str = "small-byte-level") -> Tokenizer:
    return load_tokenizer(f"small/{name}")


@cache
def bytes_pair() -> Pair:
    return xtok.load_pair("bytes", "bytes")


@cache
def bytes_map() -> ProjectionMap:
    return xtok.build("bytes", "bytes")


@cache
def bytes_to_pieces() -> Pair:
    return xtok.load_pair("bytes", small_tokenizer("small.model"))


def read_map(content: bytes, name: str = "map.safetensors", **options: Any) -> ProjectionMap:
    return ProjectionMap.load(file(name, content), **options)


def parquet(**columns: object) -> Path:
    write_table(pyarrow.table(columns), "a.parquet")
    return Path("a.parquet")


QUESTION = {"role": "user", "content": "x"}

ANSWER = {"role": "assistant", "content": "y"}


def with_module(module: str, cause: Cause, other: object = None) -> object:
    """Call a cause with another module in place of a package, or without the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, other)
        return cause()


Errors = Mapping[str, Sequence[tuple[Cause, str]]]
"""The causes and messages of each hint."""


def messages_test(errors: Errors) -> Callable[[Cause, str, str], None]:
    """Return the test of the message and the hint of each error."""
    cases = [(cause, message, hint) for hint in errors for cause, message in errors[hint]]

    @pytest.mark.usefixtures("empty_folder")
    @pytest.mark.parametrize(("cause", "message", "hint"), cases)
    def test(cause: Cause, message: str, hint: str) -> None:
        check_error(cause, message, hint)

    return test


def check_error(cause: Cause, message: str, hint: str) -> None:
    """Check that a cause raises an error with this message and this hint.

    Paths of the current folder, and of its link to the small tokenizers, are relative.
    """
    with pytest.raises(XtokError) as caught:
        cause()
    for text, expected in ((caught.value.message, message), (caught.value.hint, hint)):
        shown = text.replace(f"{Path.cwd()}/", "").replace(str(Path("small").readlink()), "small")
        is_equal = shown.startswith(expected[:-1]) if expected.endswith("…") else shown == expected
        assert is_equal, shown
        assert "\n" not in shown
