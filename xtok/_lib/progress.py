"""Progress callbacks; silent by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str, int], AbstractContextManager[Callable[..., object]]]
"""Called with a label and a total; the context's value is called with each step's size: of text,
with the bytes on disk that were read and the tokens encoded since it was last called."""

Note = Callable[[str], object]
"""Called with a sentence on what was done or left out."""


def silent(label: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    """Show no progress."""
    return nullcontext(lambda size, tokens=0: None)


def silent_note(sentence: str) -> None:
    """Drop a note."""
