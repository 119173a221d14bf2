"""Opening a map's file: what it is, its tensors or what a `.pt` holds, and errors that name it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch.load raises; nothing is unpickled
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED, MAP_HINT, MapFileError
from xtok.maps.records import InvariantError
from xtok.maps.tensors import require_valid

_NO_MAP_HINT = "give the path of a .safetensors or .pt map; xtok build makes one of two models"

_BROKEN_BY_TRAINING = ("weights", "order", "sums", "tensors")
"""The invariants that training breaks, and `normalize` restores."""


@contextmanager
def naming(source: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into an error that names it."""
    try:
        yield
    except (*MALFORMED, RuntimeError) as error:
        missing = "it lacks " if isinstance(error, KeyError) else ""
        message = f"{source} is not a valid map: {missing}{error}"
        if isinstance(error, InvariantError) and error.invariant in _BROKEN_BY_TRAINING:
            hint = "if its weights were trained, convert the map once with {option}"
            raise MapFileError(message, hint=hint, parameter="normalize") from error
        raise MapFileError(message, hint=MAP_HINT) from error


_ON_HUB = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")


def is_on_hub(path: str | PathLike[str]) -> bool:
    """Whether a map's path is a location on the Hugging Face Hub, not a local file."""
    return os.fspath(path).startswith("hf:")


def _downloaded(source: Path) -> Path:
    """Return the local copy of `hf:OWNER/NAME/FILE` or `hf:OWNER/NAME@REVISION/FILE`.

    Raises:
        MapFileError: if the file is not available.
    """
    from xtok.tokenizers.hub import ModelFiles

    parts = _ON_HUB.fullmatch(str(source))
    if parts is None:
        raise MapFileError(
            f"{source} does not name a file of a repo on the hub",
            hint="give hf:OWNER/NAME/FILE, or hf:OWNER/NAME@REVISION/FILE",
        )
    repo = ModelFiles(parts["repo"], revision=parts["revision"])
    repo.error = MapFileError
    path = repo.find(parts["file"], required=True)
    if path is None:
        raise MapFileError(
            f"{source}: the repo {repo} has no such file",
            hint="check the file's name and the revision",
        )
    return path


@contextmanager
def opened(source: Path) -> Iterator[tuple[Path, bool]]:
    """Give the path of a map's contents, and whether it is a `.pt`.

    The kind of file is detected from its first bytes, else from the suffix.
    """
    if "\0" in str(source):
        raise MapFileError(f"the map {source} has a NUL in its name", hint="give another path")
    path = _downloaded(source) if is_on_hub(source) else source
    try:
        with path.open("rb") as file:
            start = file.read(9)
            if not start:
                raise MapFileError(f"the map {source} is empty", hint=MAP_HINT)
            is_zip, is_json = start[:2] == b"PK", start[8:] == b"{"
            is_pt = is_zip or (source.suffix == ".pt" and not is_json)
            if not (is_pt or is_json or source.suffix == ".safetensors"):
                raise MapFileError(
                    f"{source} is neither a .safetensors nor a .pt", hint=_NO_MAP_HINT
                )
            if file.seekable() and not (is_zip and source.suffix == ".safetensors"):
                yield path, is_pt
                return
            # The libraries read no pipes, and torch.load takes any .safetensors for safetensors.
            with tempfile.NamedTemporaryFile() as copy:
                copy.write(start)
                shutil.copyfileobj(file, copy)
                copy.flush()
                yield Path(copy.name), is_pt
    except OSError as error:
        hint = _NO_MAP_HINT
        if source.is_dir():
            hint += ", xtok doctor compares them"
        message = f"the map {source} cannot be read: {error.strerror or error}"
        raise MapFileError(message, hint=hint) from error


def read_parts(path: str | PathLike[str]) -> tuple[dict[str, NDArray[Any]], str] | None:
    """Return a `.safetensors` map's tensors and metadata, not checked; None for any other file.

    `assemble` makes a map of them.

    Raises:
        MapFileError: if the file cannot be read.
    """
    source = Path(path)
    with opened(source) as (contents, is_pt):
        tensors, header = ({}, {}) if is_pt else read_tensors(contents, source)
    return (tensors, header["xtok"]) if "xtok" in header else None


def read_tensors(contents: Path, source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of a safetensors file, read-only, and its metadata."""
    try:
        with safe_open(contents, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = dict(file.metadata() or {})
        with contents.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            parse_json(file.read(size))
    except (*MALFORMED, SafetensorError) as error:  # types that NumPy lacks raise several kinds
        message = f"{source} is not a whole safetensors file: {error}"
        hint = MAP_HINT if source.suffix == ".safetensors" else _NO_MAP_HINT
        raise MapFileError(message, hint=hint) from error
    for tensor in tensors.values():
        tensor.flags.writeable = False
    return tensors, header


def load_pt(path: Path, source: Path) -> Any:
    """Return what a `.pt` file holds; its tensors are views of the file, not of memory.

    Mapped storages cannot grow, so that no tensor takes memory for what a file only claims.

    Args:
        path: where its bytes are.
        source: what messages call it.

    Raises:
        MapFileError: if it holds more than tensors, numbers and strings, or is damaged.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED for m in members):
                raise ValueError("it is compressed, which torch.save does not do")
            if sum(m.file_size for m in members) > path.stat().st_size:
                raise ValueError("it claims to hold more than it has bytes")
            part = archive.testzip()  # PyTorch does not check it; it takes 4 ms of 41
            require_valid(part is None, f"the checksum of its part {part}")
        # Sparse tensors are checked when it is known that they are no larger than the file.
        unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
        with unchecked, warnings.catch_warnings():
            # It warns that CSR is beta; newer versions, that checking it takes time.
            warnings.filterwarnings("ignore", "Sparse C|Validating sparse", UserWarning)
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UnpicklingError as error:
        # PyTorch's own text recommends to load the file in a way that runs its code.
        raise MapFileError(
            f"{source} is damaged, or holds more than tensors, which could run code",
            hint="save only tensors, numbers and strings in it, or a dict of counts "
            "{(student_id, teacher_id): number}, or make it again",
        ) from error
    except Exception as error:
        raise MapFileError(f"{source} is not a whole .pt file: {error}", hint=MAP_HINT) from error
