"""`.pt` files of `torch.save`, read without running code or taking memory for mere claims."""

from __future__ import annotations

import pickletools
import re
import zipfile
from array import array
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO

import numpy as np

from xtok.errors import MAP_HINT, MapFileError
from xtok.mapfile._tensorfile import MAX_HEADER
from xtok.projection import Edges


def load_pt(file: BinaryIO, source: Path) -> Any:
    """Return what a `.pt` file holds: `Edges` for counts of pairs, else what PyTorch makes of it.

    No memory is taken for what a file claims and does not hold, or for Python objects without end.

    Args:
        file: the file, open, which can seek.
        source: its path, for messages.

    Raises:
        MapFileError: if it is damaged, or holds other things than tensors, numbers and strings.
    """
    import torch

    try:
        counts = _checked(file)
        if counts is not None:
            return counts
        file.seek(0)
        with torch.sparse.check_sparse_tensor_invariants():
            return torch.load(file, weights_only=True, map_location="cpu")
    except _NotPlainError as error:
        raise MapFileError(
            f"{source} is damaged, or holds more than tensors, which could run code: {error}",
            hint="save only tensors, numbers and strings in it, or a dict of counts "
            "{(student_id, teacher_id): number}, or make it again",
        ) from error
    except Exception as error:
        raise MapFileError(f"{source} is not a whole .pt file: {error}", hint=MAP_HINT) from error


class _NotPlainError(Exception):
    """A pickle that holds other objects than a map has, or more of them."""


_MAX_MEMBERS = 4096
_MAX_OBJECTS = 4096
"""Members of an archive and operations of its pickle; a map has dozens, and some hundreds. Each
takes up to a kilobyte, and operations can copy what others made."""

_GLOBALS = re.compile(
    r"torch \w+Storage|torch Size|torch\._utils _rebuild_(tensor_v2|parameter|sparse_tensor)"
    r"|torch\.serialization _get_layout|collections OrderedDict"
)
"""What a pickle of tensors, numbers and strings calls."""


def _checked(file: BinaryIO) -> Edges | None:
    """Check that an archive is as `torch.save` writes it, and not a bomb; return counts of pairs.

    Raises:
        _NotPlainError: if there are other objects in it.
        ValueError: if it is damaged, or holds less than it claims.
    """
    if _count(file, b"PK\x01\x02") > _MAX_MEMBERS:  # before zipfile makes an object of each
        raise ValueError(f"it has more than {_MAX_MEMBERS} members")
    size = file.tell()
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members):
            raise ValueError("it is compressed, which torch.save does not do")
        if sum(m.file_size for m in members) > size:
            raise ValueError("it claims to hold more than it has bytes")
        for member in members:
            if member.filename.lower().endswith("data.pkl"):
                pickled = archive.read(member)
                counts = _read_counts(pickled)
                if counts is not None:
                    return counts
                _require_plain(pickled)
    return None


def _count(file: BinaryIO, signature: bytes) -> int:
    """Count a signature in a file, which is read to its end in pieces."""
    file.seek(0)
    found, before = 0, b""
    while piece := file.read(1 << 20):
        found += (before + piece).count(signature)
        before = piece[1 - len(signature) :]
    return found


def _require_plain(pickled: bytes) -> None:
    if len(pickled) > MAX_HEADER + _MAX_OBJECTS * 16:
        raise _NotPlainError(f"its pickle has {len(pickled)} bytes")
    for number, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
        if number >= _MAX_OBJECTS:
            raise _NotPlainError(f"its pickle has more than {_MAX_OBJECTS} operations")
        if operation.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
            raise _NotPlainError(f"it calls {argument!r}")


# A dict (or Counter) of pairs as Python pickles it by protocol 2, which torch.save takes: integers
# of 1, 2, 4 and more bytes, floats of 8; each pair is memoized; batches of up to 1000 items, the
# last of which may have none, between `(` and `u`. As a dict it would take twenty times the file.
_INTEGER = rb"(K.|M..|J.{4})"
_COUNT = rb"(K.|M..|J.{4}|G.{8}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_MEMO = rb"(?:q.|r.{4})"
_HEAD = re.compile(rb"\x80\x02(?:ccollections\nCounter\n" + _MEMO + rb")?}" + _MEMO + rb"\(?", re.S)
_ITEM = re.compile(rb"(?:u\()?" + _INTEGER + _INTEGER + rb"\x86" + _MEMO + _COUNT, re.S)
_TAIL = re.compile(rb"(?:u\(u|[us])(?:\x85" + _MEMO + rb"R" + _MEMO + rb")?\.", re.S)


def _read_counts(pickled: bytes) -> Edges | None:
    """Return what a pickled `{(student_id, teacher_id): count}` holds; None if it is none."""
    head = _HEAD.match(pickled)
    place = head.end() if head else len(pickled)
    s, t, w = array("i"), array("i"), array("d")
    for item in _ITEM.finditer(pickled, place):
        if item.start() != place:
            return None
        place = item.end()
        student_id, teacher_id, count = item.groups()
        s.append(_integer(student_id))
        t.append(_integer(teacher_id))
        w.append(_integer(count) if count[:1] in b"KMJ" else _long_or_float(count))
    if not (s and _TAIL.fullmatch(pickled, place)):
        return None
    return Edges(np.frombuffer(s, np.int32), np.frombuffer(t, np.int32), np.frombuffer(w))


def _integer(pickled: bytes) -> int:
    return int.from_bytes(pickled[1:], "little", signed=len(pickled) == 5)


def _long_or_float(pickled: bytes) -> float:
    if pickled[:1] == b"G":
        return float(unpack(">d", pickled[1:])[0])
    return int.from_bytes(pickled[2:], "little", signed=True)
