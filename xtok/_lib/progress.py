"""Progress callbacks; silent by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Called with a label and a total; the context's value is called with each step's size."""

TextProgress = Callable[[str, int], AbstractContextManager[Callable[[int, int], object]]]
"""Called with a label and the bytes of text on disk; the context's value with the bytes read and
the tokens encoded since it was last called."""

Note = Callable[[str], object]
"""Called with a sentence on what was done or left out."""


def silent(label: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """Show no progress."""
    return nullcontext(lambda size: None)


def silent_texts(label: str, total: int) -> AbstractContextManager[Callable[[int, int], object]]:
    """Show no progress."""
    return nullcontext(lambda size, tokens: None)


def silent_note(sentence: str) -> None:
    """Drop a note."""
