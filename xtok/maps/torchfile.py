"""`.pt` files: checked for code and size, then read by PyTorch."""

from __future__ import annotations

import pickletools
import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch.load raises; nothing is unpickled
from typing import Any, BinaryIO

from xtok.errors import MAP_HINT, MapFileError


def load_pt(path: Path, source: Path) -> Any:
    """Return what a `.pt` file holds; its tensors are views of the file, not of memory.

    Mapped storages cannot grow, so that no tensor takes memory for what a file only claims.
    `path` is where its bytes are, `source` what messages call it.

    Raises:
        MapFileError: if it is damaged, or holds other things than tensors, numbers and strings.
    """
    import torch

    try:
        _check_archive(path)
        with torch.sparse.check_sparse_tensor_invariants(), warnings.catch_warnings():
            # CSR is said to be beta; newer versions say that their check of it takes time.
            warnings.filterwarnings("ignore", "Sparse C|Validating sparse", UserWarning)
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (_NotPlainError, UnpicklingError) as error:
        # PyTorch's own text recommends to load the file in a way that runs its code.
        why = f": {error}" if isinstance(error, _NotPlainError) else ""
        raise MapFileError(
            f"{source} is damaged, or holds more than tensors, which could run code{why}",
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

_MAX_PICKLE = 1 << 28
"""Bytes of a pickle: of a dict of counts, which takes up to thirty times that in memory."""

_OF_COUNTS = frozenset(
    ["BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "TUPLE2", "BINPUT", "LONG_BINPUT"]
)
"""Operations of which a dict of counts has one or more per pair. None copies what others made."""

_GLOBALS = frozenset(
    {
        "torch Size",
        "torch.serialization _get_layout",
        "collections OrderedDict",
        "collections Counter",
        *(f"torch._utils _rebuild_{what}" for what in ("tensor_v2", "parameter", "sparse_tensor")),
        *(
            f"torch {number}Storage"
            for number in (
                *("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char"),
                *("Byte", "Bool", "ComplexDouble", "ComplexFloat"),
            )
        ),
    }
)
"""What a pickle of tensors, numbers and strings calls."""


def _check_archive(path: Path) -> None:
    """Check that an archive is as `torch.save` writes it, and not a bomb; else a `ValueError`."""
    with path.open("rb") as file:
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
                    _check_pickle(archive.read(member))


def _count(file: BinaryIO, signature: bytes) -> int:
    """Count a signature in a file, which is read to its end in pieces."""
    total, before = 0, b""
    while piece := file.read(1 << 20):
        total += (before + piece).count(signature)
        before = piece[1 - len(signature) :]
    return total


def _check_pickle(pickled: bytes) -> None:
    """Check the operations of a pickle, without running them."""
    if len(pickled) > _MAX_PICKLE:
        raise ValueError(f"its pickle has {len(pickled)} bytes; save counts as a sparse tensor")
    left = _MAX_OBJECTS + len(pickled) // 1000  # a dict is written in batches of 1000 pairs
    for operation, argument, _ in pickletools.genops(pickled):
        left -= operation.name not in _OF_COUNTS
        if left < 0:
            raise _NotPlainError("its pickle has too many operations")
        if operation.name == "GLOBAL" and argument not in _GLOBALS:
            raise _NotPlainError(f"it calls {argument!r}")
