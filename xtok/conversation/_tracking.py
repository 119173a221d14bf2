"""Define strings, lists and objects that record the message from which each value was copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

KeyPath: TypeAlias = tuple[str | int, ...]


class Run(NamedTuple):
    """A range of characters that the template copied from one string of a message."""

    start: int
    end: int
    message: int  # index of the message, or −1 for tools and documents
    path: KeyPath  # path of the string in the message, such as ("content", 0, "text")
    offset: int  # offset of `start` in the string, or −1 for derived text such as JSON


class Mark(NamedTuple):
    """A position at which a part of the template's output starts or ends."""

    position: int
    # Start or end of a loop's body (enter, leave), of a generation prompt (prompt, prompted) or of
    # a generation block (generation, generated).
    kind: str
    loop: int = 0  # number of the loop, starting at 1
    message: int = -1  # index of the loop's current message


class TrackedText(str):
    """A string with runs (ranges of characters that come from messages) and marks."""

    __slots__ = ("_marks", "_runs")
    _runs: tuple[Run, ...]
    _marks: tuple[Mark, ...]

    def __new__(
        cls, text: str = "", runs: tuple[Run, ...] = (), marks: tuple[Mark, ...] = ()
    ) -> TrackedText:
        self = super().__new__(cls, text)
        self._runs, self._marks = runs, marks
        return self

    def _slice(self, start: int, end: int) -> TrackedText:
        """Return a slice with its runs, but without marks (0 ≤ start ≤ end ≤ length)."""
        runs = tuple(
            r._replace(
                start=max(r.start, start) - start,
                end=min(r.end, end) - start,
                offset=r.offset if r.offset < 0 else r.offset + max(0, start - r.start),
            )
            for r in self._runs
            if r.start < end and r.end > start
        )
        return TrackedText(str.__getitem__(self, slice(start, end)), runs)

    def _slice_parts(self, parts: Iterable[str], gap: int = 0) -> list[str]:
        pieces: list[str] = []
        start = 0
        for part in parts:
            start = self.find(part, start)
            pieces.append(self._slice(start, start + len(part)))
            start += len(part) + gap
        return pieces

    def _track_same_length(self, text: str) -> str:
        return TrackedText(text, self._runs) if len(text) == len(self) else text

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concatenate((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concatenate((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._slice(start, max(start, stop)) if step == 1 else text
        index = range(len(self))[key]
        return self._slice(index, index + 1)

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self._slice(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._slice(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._slice(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._slice(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._slice_parts(super().split(sep, maxsplit), len(sep or ""))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._slice_parts(super().partition(sep))
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        return join_with(new, self.split(old, count))

    def lower(self) -> str:
        return self._track_same_length(super().lower())

    def upper(self) -> str:
        return self._track_same_length(super().upper())

    def capitalize(self) -> str:
        return self._track_same_length(super().capitalize())


def concatenate(parts: Iterable[Any]) -> str:
    """Join parts like `"".join(map(str, parts))`, and keep their runs and marks."""
    texts = [str(part) for part in parts]
    if not any(isinstance(text, TrackedText) for text in texts):
        return "".join(texts)
    runs: list[Run] = []
    marks: list[Mark] = []
    length = 0
    for text in texts:
        if isinstance(text, TrackedText):
            runs += [r._replace(start=r.start + length, end=r.end + length) for r in text._runs]
            marks += [m._replace(position=m.position + length) for m in text._marks]
        length += len(text)
    return TrackedText("".join(texts), tuple(runs), tuple(marks))


def join_with(separator: str, parts: Iterable[Any]) -> str:
    """Join parts like `separator.join(map(str, parts))`, and keep their runs and marks."""
    joined: list[Any] = []
    for part in parts:
        joined += [separator, part]
    return concatenate(joined[1:])


class TrackedObject(dict[str, Any]):
    """A message, or an object in a message, that records its source.

    The attributes do not hide keys from templates, because the sandbox rejects names that start
    with an underscore.
    """

    _message: int
    _path: KeyPath


class TrackedItems(list[Any]):
    """A list in a message that records its source."""

    _message: int
    _path: KeyPath


for _kind in (TrackedText, TrackedObject, TrackedItems):  # for Jinja's error messages
    _kind.__name__, _kind.__module__ = _kind.__mro__[1].__name__, "builtins"


def origin_of(value: Any) -> tuple[int, KeyPath] | None:
    """Return the message index and path of a tracked value. For a text, use its first run."""
    if isinstance(value, TrackedText) and value._runs:
        return value._runs[0].message, value._runs[0].path
    is_container = isinstance(value, (TrackedObject, TrackedItems))
    return (value._message, value._path) if is_container else None


def to_json_types(value: Any, *, arrays: bool = False) -> Any:
    """Convert nested dataclasses and pydantic models to dicts, as Transformers does.

    Arrays in tool calls become lists. Other arrays are kept, because an array can be an image.
    """
    if isinstance(value, np.generic) or (arrays and isinstance(value, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_json_types(item, arrays=arrays) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif callable(dump := getattr(value, "model_dump", None)):
        return to_json_types(dump(), arrays=arrays)
    if not isinstance(value, Mapping):
        return value
    return {k: to_json_types(v, arrays=arrays or k == "tool_calls") for k, v in value.items()}


def track(value: Any, message: int, path: KeyPath) -> Any:
    """Copy a value of JSON types, and record the source of each string, list and object."""
    if isinstance(value, str):
        text = str.__str__(value)
        return TrackedText(text, (Run(0, len(text), message, path, 0),) if text else ())
    if value is None or isinstance(value, (bool, int, float)):
        return value
    copy: TrackedObject | TrackedItems
    if isinstance(value, Mapping):
        copy = TrackedObject({k: track(v, message, (*path, k)) for k, v in value.items()})
    elif isinstance(value, (list, tuple)):
        copy = TrackedItems(track(v, message, (*path, i)) for i, v in enumerate(value))
    else:  # an image or array; templates only test whether the value exists
        return f"<{type(value).__name__}>"
    copy._message, copy._path = message, path
    return copy
