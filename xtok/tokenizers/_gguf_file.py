"""The metadata of a `.gguf` file, read with every length checked against the file's size."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

# Value types of the format: ggml-org/ggml, docs/gguf.md.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_NUMBERS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays; files in use have one


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the fields of a file by name; tensors are not read.

    Raises:
        ValueError: if a length does not fit the file, or something in it is unknown.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).fields()
        except struct.error as error:
            raise ValueError("it ends before its metadata does") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 4  # behind the magic
        self._order = "<"
        version = self._number("I")
        if version & 0xFFFF == 0:  # a file of a big-endian machine
            self._order, self._place = ">", 4
            version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its version {version} is not 2 or 3")

    def fields(self) -> dict[str, Any]:
        self._number("Q")  # tensors
        fields: dict[str, Any] = {}
        for _ in range(self._count(13)):  # the shortest field: an empty name, a type, a byte
            name = self._string()
            if name in fields:
                raise ValueError(f"it has the field {name!r} twice")
            fields[name] = self._value(self._number("I"))
        return fields

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ValueError(f"it has a value of the type {kind}")
        inner = self._number("I")
        if inner not in _NUMBERS:
            return [self._value(inner, depth + 1) for _ in range(self._count(8))]
        letter = _NUMBERS[inner]
        return self._numbers(f"{self._count(struct.calcsize(f'={letter}'))}{letter}")

    def _string(self) -> str:
        length = self._count(1)
        self._place += length
        return self._data[self._place - length : self._place].decode()

    def _number(self, letter: str) -> Any:
        [value] = self._numbers(letter)
        return value

    def _numbers(self, form: str) -> list[Any]:
        values = struct.unpack_from(self._order + form, self._data, self._place)
        self._place += struct.calcsize(f"={form}")
        return list(values)

    def _count(self, size: int) -> int:
        """Read how many values follow, of at least `size` bytes each."""
        count: int = self._number("Q")
        if count * size > len(self._data) - self._place:
            raise ValueError(f"it announces {count} values, more than it has")
        return count
