"""Limits of one rendering of a chat template: its time, and the size of what it makes.

A template is a stranger's code, and Jinja's sandbox limits only ranges. Whatever can make something
large out of small parts announces its size here first; loops and calls check the clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_SECONDS = 10.0
MAX_SIZE = 500_000_000  # bytes or so of everything made on the way; a conversation has a few MB


class LimitError(RuntimeError):
    """A template costs too much."""


class _Budget:
    def __init__(self) -> None:
        self.left: float = MAX_SIZE
        self.end = time.monotonic() + MAX_SECONDS


_current: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Render within a new budget."""
    token = _current.set(_Budget())
    try:
        yield
    finally:
        _current.reset(token)


def spend(size: float = 1) -> None:
    """Subtract the size of something that is about to be made from the budget.

    Raises:
        LimitError: if the size or the time is used up.
    """
    budget = _current.get()
    if budget is None:
        return
    budget.left -= size
    if budget.left < 0:
        raise LimitError(f"it makes more than {MAX_SIZE // 10**6} MB of text and lists")
    if time.monotonic() > budget.end:
        raise LimitError(f"it takes more than {MAX_SECONDS:.0f} seconds")


def text_size(value: Any) -> int:
    """Estimate how long a value is as text; a part that is in it twice counts twice.

    Counting stops beyond the limit: a few nested lists can be endless text.
    """
    size = 0
    left: list[tuple[Any, int]] = [(value, 0)]
    while left and size <= MAX_SIZE:
        one, depth = left.pop()
        size += 100 + depth  # what an object takes, indented; also bounds the time of counting
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, Mapping):
            left += [(part, depth + 1) for item in one.items() for part in item]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += [(part, depth + 1) for part in one]
    return size


def spend_on_operator(operator: str, left: Any, right: Any) -> None:
    """Take what an operator makes from the budget: `+`, `*`, `**` or `%`."""
    if operator == "%" and isinstance(left, str):
        spend(_formatted(left, right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = (
            left.bit_length() * right if operator == "**" else (abs(left) | abs(right)).bit_length()
        )
        spend(bits * bits)  # the time that a product takes
    elif operator == "*":
        count, many = (left, right) if isinstance(left, int) else (right, left)
        spend(_length(many) * max(0, count) if isinstance(count, int) else 1)
    elif operator == "+":
        spend(_length(left) + _length(right))


# Filters, and methods of strings, that make text of all that is in a value, or add to each line.
_MAKING_TEXT = re.compile(
    "tojson|pprint|indent|wordwrap|center|ljust|rjust|zfill|batch|slice|expandtabs|translate|sum|"
    "string|safe|escape|e|forceescape|xmlattr|urlencode|urlize|trim|lower|upper|title|capitalize|"
    "striptags|wordcount"
)


def spend_on_call(name: str, value: Any, values: Sequence[Any]) -> None:
    """Take what a filter, or a method of a string, list or object, makes from the budget."""
    size: float = _length(value)
    if name in ("format", "format_map"):
        size = _formatted(str(value), values)
    elif name == "replace":
        old, new = [*(v for v in values if isinstance(v, str)), "", ""][:2]
        size = text_size(value)
        size += str(value).count(old) * len(new) if size <= MAX_SIZE else 0
    elif _MAKING_TEXT.fullmatch(name):
        size = text_size(value)
        if name in ("wordwrap", "translate"):
            size *= 1 + text_size(values)
        else:
            widths = (
                v if isinstance(v, int) else len(v) for v in values if isinstance(v, (int, str))
            )
            size *= max([1, *widths])
    spend(size)


def _length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple, Mapping)) else 1


def _formatted(form: str, values: Any) -> int:
    """Return how long a format with `%` or braces becomes at most."""
    numbers = [int(number[:12]) for number in re.findall(r"\d+", form)]
    if re.search(r"\*|:[^{}]*\{", form):  # a width, or precision, is among the values
        flat = list(values) if isinstance(values, (list, tuple)) else [values]
        flat += [v for one in flat if isinstance(one, (list, tuple)) for v in one]
        numbers += [abs(v) for v in flat if isinstance(v, int)]
    fields = form.count("%") + form.count("{")
    return len(form) + fields * (text_size(values) + max(numbers, default=0))
