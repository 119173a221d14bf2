"""Progress callbacks; silent by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str, int], AbstractContextManager[Callable[..., object]]]
"""Called with a label and a total. The value of the context is called with the size of each step;
for text, with the bytes read from disk and the tokens encoded since the last call."""

Note = Callable[[str], object]
"""Called with a sentence for the user."""


def silent(label: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    """Show no progress."""
    return nullcontext(lambda size, tokens=0: None)


def silent_note(sentence: str) -> None:
    """Drop a note."""
