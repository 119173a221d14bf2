"""Safetensors files, by the safetensors library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

MAX_HEADER = 1 << 23
"""Bytes of the longest JSON text that is read or written."""

MAX_BRACKETS = 1 << 18
"""Brackets and braces in it, those in names included: an empty list takes thirty times its text in
memory, and other JSON twelve times."""


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of a file, read-only, and its metadata.

    Raises:
        ValueError: if it is not a whole safetensors file; tensors of a type that NumPy lacks may
            raise an `AttributeError` or `TypeError`.
    """
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    for tensor in tensors.values():
        tensor.flags.writeable = False
    return tensors, metadata


def write_tensors(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file.

    Args:
        tensors: contiguous arrays.
        metadata: one key at most; the library writes several in random order.

    Raises:
        ValueError: if the metadata are too long to be read.
    """
    from safetensors.numpy import save

    for text in metadata.values():
        check_json(text)
    return bytes(save(dict(tensors), dict(metadata)))


def check_json(text: str) -> None:
    """Check that JSON in a map file takes a bounded amount of memory.

    Raises:
        ValueError: if it is longer than `MAX_HEADER`, or has more than `MAX_BRACKETS`.
    """
    size = len(text.encode())
    if size > MAX_HEADER:
        raise ValueError(f"its metadata take {size} bytes, and may take {MAX_HEADER}")
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"its metadata have more than {MAX_BRACKETS} brackets")
