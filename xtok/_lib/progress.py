"""Progress callbacks; silent by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[..., object]]]
"""A function that receives a label and a total, and returns a context manager. The context manager
yields a function that receives the size of each step. For text, this function receives the bytes
read and the tokens encoded in each step."""

Note: TypeAlias = Callable[[str], object]
"""A function that receives a sentence for the user."""


def silent(label: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    """Ignore all progress."""
    return nullcontext(lambda size, tokens=0: None)


def silent_note(sentence: str) -> None:
    """Ignore a note."""
