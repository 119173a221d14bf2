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
_MAX_BITS = 10_000  # of an integer: Python writes no longer ones


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


def text_size(value: Any, indent: int = 0) -> int:
    """Estimate how long a value is as text; a part that is in it twice counts twice.

    Counting stops beyond the limit: a few nested lists can be endless text.
    """
    if isinstance(value, str):
        return len(value)
    size = 0
    left: list[tuple[Any, int]] = [(value, 0)]
    while left and size <= MAX_SIZE:
        one, depth = left.pop()
        size += 100 + indent * depth  # what an object takes; also bounds the time of counting
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
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
        if bits.get(operator, 0) > _MAX_BITS:
            raise LimitError(f"it computes an integer of more than {_MAX_BITS} bits")
    elif operator == "*":
        count, many = (left, right) if isinstance(left, int) else (right, left)
        spend(_length(many) * max(0, count) if isinstance(count, int) else 1)
    elif operator == "+":
        spend(_length(left) + _length(right))


def spend_on_call(name: str, value: Any, values: Sequence[Any]) -> None:
    """Take what a filter, or a method of a string, list or object, makes from the budget."""
    number = max((v for v in values if isinstance(v, int)), default=8)
    longest = max((len(v) for v in values if isinstance(v, str)), default=0)
    size: float = _length(value)
    if name in ("tojson", "pprint"):
        size = text_size(value, indent=1 + number + longest)
    elif name in ("format", "format_map"):
        size = _formatted(str(value), values)
    elif name == "replace":
        size = text_size(value)
        size += _replaced(str(value) if size <= MAX_SIZE else "", values)
    elif name in ("indent", "wordwrap"):
        size = text_size(value) * (1 + longest) + (str(value).count("\n") + 1) * number
    elif name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "truncate"):
        size = text_size(value) + 8 * number + longest
    elif name == "expandtabs":
        size += str(value).count("\t") * number
    elif name == "translate":
        size *= 1 + text_size(values)
    elif name == "sum":
        size *= size if any(isinstance(v, (list, tuple)) for v in values) else 1
    elif name in _TEXT_FILTERS:
        size = text_size(value)
    spend(size)


_TEXT_FILTERS = (
    *("string", "safe", "escape", "e", "forceescape", "xmlattr", "urlencode", "urlize"),
    *("trim", "lower", "upper", "title", "capitalize", "striptags", "wordcount"),
)


def _length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple, Mapping)) else 1


def _replaced(text: str, values: Sequence[Any]) -> int:
    old, new = (*values, "", "")[:2]
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return str.count(text, old) * len(new)


# A field of a format, with its width and precision: numbers, or `*` and `{}` for an argument.
_FIELD = re.compile(r"%(?:\([^)]*\))?[-#0 +]*([\d*.]*)|\{[^{}]*:([^{}]*\{?)|\{")
_NUMBER = re.compile(r"\d+")


def _formatted(form: str, values: Any) -> int:
    """Return how long a format with `%` or braces becomes at most."""
    given = text_size(values)
    flat = list(values) if isinstance(values, (list, tuple)) else [values]
    flat += [v for one in flat if isinstance(one, (list, tuple)) for v in one]
    largest = max([given, *(abs(v) for v in flat if isinstance(v, int))])
    size = len(form)
    for field in _FIELD.finditer(form):
        spec = (field[1] or "") + (field[2] or "")
        size += given + sum(int(number[:12]) for number in _NUMBER.findall(spec))
        size += largest if "*" in spec or "{" in spec else 0
    return size
