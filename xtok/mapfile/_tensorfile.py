"""Safetensors files: read as views of their bytes, written without a copy.

The format is that of huggingface/safetensors (README.md, "Format"): the header's length as a
little-endian uint64, the header in JSON, the tensors one after another without holes. Its own
binding copies each tensor twice in either direction, which for a map is most of the time and of
the memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HEADER = 1 << 23
"""Bytes of the longest header that is read or written."""

MAX_BRACKETS = 1 << 18
"""Brackets and braces in a header, those in names included: an empty list takes thirty times its
text in memory, and other JSON twelve times."""

# In the order in which the library lays tensors out: later ones first, then by name.
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_RANK = {name: place for place, name in enumerate(_DTYPES)}


def read_tensors(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of a file, read-only views of its bytes, and its metadata.

    Raises:
        ValueError: if it is not a whole safetensors file; JSON may raise a `RecursionError`, and
            other shapes of it a `TypeError`, `KeyError` or `AttributeError`.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is cut off, or of another format")
    text = data[8 : 8 + length]
    check_json(text)
    header = json.loads(text, object_pairs_hook=_without_repeats)
    metadata = dict(header.pop("__metadata__", None) or {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not text")
    content = memoryview(data)[8 + length :]
    places = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    if [0, *(end for _, end in places)] != [*(start for start, _ in places), len(content)]:
        raise ValueError("its tensors overlap, or do not fill it")
    return {name: _view(name, content, entry) for name, entry in header.items()}, metadata


def check_json(text: bytes | str) -> None:
    """Check that JSON in a map file takes a bounded amount of memory.

    Raises:
        ValueError: if it is longer than `MAX_HEADER`, or has more than `MAX_BRACKETS`.
    """
    text = text if isinstance(text, bytes) else text.encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"its metadata take {len(text)} bytes, and may take {MAX_HEADER}")
    if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
        raise ValueError(f"its metadata have more than {MAX_BRACKETS} brackets")


def _view(name: str, content: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of the type {entry['dtype']}, which no map has")
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)) or len(shape) > 8:
        raise ValueError(f"the place or shape of {name} is not valid")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} does not fit its place in the file")
    return np.frombuffer(content[start:end], dtype).reshape(shape)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def file_parts(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Give the parts of the file that `safetensors.numpy.save` makes, byte for byte.

    Args:
        tensors: contiguous arrays.
        metadata: one key at most; the library writes several in random order.

    Raises:
        ValueError: if the header would be too long to be read.
    """
    names = sorted(tensors, key=lambda name: (-_RANK[_NAMES[tensors[name].dtype]], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in names:
        array = tensors[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    check_json(text)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        if tensors[name].size:
            yield tensors[name].reshape(-1).view(np.uint8).data
