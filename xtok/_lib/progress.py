"""Progress callbacks; silent by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str, int], AbstractContextManager[Callable[..., object]]]
"""Called with a label and a total. Returns a context manager. Its value is called with the size
of each step; for text, with the bytes read and the tokens encoded since the last call."""

Note = Callable[[str], object]
"""Called with a sentence for the user."""


def silent(label: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    """Ignore all progress."""
    return nullcontext(lambda size, tokens=0: None)


def silent_note(sentence: str) -> None:
    """Ignore a note."""
