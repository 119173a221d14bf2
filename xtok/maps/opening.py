"""Open a map file, local or on the hub. Errors name the file."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - torch.load raises it; nothing is unpickled
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED, MAP_HINT, MapFileError, describe_damage
from xtok.maps.records import InvariantError, require_valid

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = Mapping[str, NDArray[Any]]

_NO_MAP_HINT = "pass the path of a .safetensors or .pt map, for example one that xtok build made"

# Invariants that training can break and `normalize` restores
_BROKEN_BY_TRAINING = ("weights", "order", "sums", "tensors")


@contextmanager
def naming(source: Path) -> Iterator[None]:
    """Convert exceptions about a damaged file to a `MapFileError` that names the file."""
    try:
        yield
    except (*MALFORMED, RuntimeError) as error:
        message = f"{source} is not a valid map: {describe_damage(error)}"
        if isinstance(error, InvariantError) and error.invariant in _BROKEN_BY_TRAINING:
            hint = "if its weights were trained, convert the map once with {option}"
            raise MapFileError(message, hint=hint, parameter="normalize") from error
        raise MapFileError(message, hint=MAP_HINT) from error


_ON_HUB = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")


def is_on_hub(path: str | PathLike[str]) -> bool:
    """Whether a map's path is a location on the Hugging Face Hub."""
    return os.fspath(path).startswith("hf:")


def _fetch_map(source: Path) -> Path:
    from xtok.tokenizers.hub import ModelFiles

    parts = _ON_HUB.fullmatch(str(source))
    if parts is None:
        raise MapFileError(
            f"{source} does not name a file in a repo on the hub",
            hint="write hf:OWNER/NAME/FILE or hf:OWNER/NAME@REVISION/FILE",
        )
    repo = ModelFiles(parts["repo"], revision=parts["revision"])
    repo.error = MapFileError
    problem = f"{source}: the repo {repo} has no such file"
    return repo.require(parts["file"], problem, hint="check the file name and the revision")


@contextmanager
def opened(source: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the local path of a map, and whether the file is a `.pt` file."""
    if "\0" in str(source):
        raise MapFileError(f"the map {source} has a NUL in its name", hint="give another path")
    path = _fetch_map(source) if is_on_hub(source) else source
    try:
        with path.open("rb") as file:
            start = file.read(9)
            if not start:
                raise MapFileError(f"the map {source} is empty", hint=MAP_HINT)
            is_zip, is_json = start[:2] == b"PK", start[8:] == b"{"
            is_pt = is_zip or (source.suffix == ".pt" and not is_json)
            if not (is_pt or is_json or source.suffix == ".safetensors"):
                raise MapFileError(
                    f"{source} is neither a .safetensors nor a .pt file", hint=_NO_MAP_HINT
                )
            if file.seekable() and not (is_zip and source.suffix == ".safetensors"):
                yield path, is_pt
                return
            # The libraries cannot read pipes, and torch.load rejects a ZIP file with the suffix
            # .safetensors. Both are copied to a temporary file.
            with tempfile.NamedTemporaryFile() as copy:
                copy.write(start)
                shutil.copyfileobj(file, copy)
                copy.flush()
                yield Path(copy.name), is_pt
    except OSError as error:
        hint = _NO_MAP_HINT
        if source.is_dir():
            hint += "; xtok doctor compares the models"
        message = f"the map {source} cannot be read: {error.strerror or error}"
        raise MapFileError(message, hint=hint) from error


def read_parts(path: str | PathLike[str]) -> tuple[dict[str, NDArray[Any]], str] | None:
    """Return the unchecked tensors and JSON of a `.safetensors` map; None for any other file."""
    source = Path(path)
    with opened(source) as (contents, is_pt):
        tensors, header = ({}, {}) if is_pt else read_tensors(contents, source)
    return (tensors, header["xtok"]) if "xtok" in header else None


def read_tensors(contents: Path, source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the read-only tensors and the metadata of a safetensors file."""
    try:
        with safe_open(contents, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = dict(file.metadata() or {})
        with contents.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            parse_json(file.read(size))
    except (*MALFORMED, SafetensorError) as error:  # unknown dtypes raise several of these
        message = f"{source} is not a complete safetensors file: {error}"
        hint = MAP_HINT if source.suffix == ".safetensors" else _NO_MAP_HINT
        raise MapFileError(message, hint=hint) from error
    for tensor in tensors.values():
        tensor.flags.writeable = False
    return tensors, header


def load_pt(path: Path, source: Path) -> Any:
    """Load a `.pt` file. Errors name `source`.

    Tensors are memory-mapped, so a damaged file that declares huge tensors allocates no memory.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED for m in members):
                raise ValueError("the file is compressed, but torch.save never compresses")
            if sum(m.file_size for m in members) > path.stat().st_size:
                raise ValueError("the index declares more data than the file contains")
            part = archive.testzip()  # PyTorch skips this check (4 of 41 ms)
            require_valid(part is None, f"the checksum of its member {part}")
        # Sparse tensors are checked later, after the size that they declare is compared with the
        # file size.
        unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
        with unchecked, warnings.catch_warnings():
            # PyTorch warns that CSR tensors are in beta. Newer versions also warn that the check
            # takes time.
            warnings.filterwarnings("ignore", "Sparse C|Validating sparse", UserWarning)
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UnpicklingError as error:
        # PyTorch's message recommends weights_only=False, which would run code from the file.
        raise MapFileError(
            f"{source} is damaged, or contains objects that could run code",
            hint="save only tensors, numbers and strings, or a dict of counts "
            "{(student_id, teacher_id): number}, or build the map again",
        ) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise MapFileError(f"{source} is a damaged .pt file: {error}", hint=MAP_HINT) from error


# Check and convert the tensors of a `.pt` file; invalid tensors raise a `ValueError`


def torch_bytes(contents: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `.pt` file."""
    import torch

    buffer = io.BytesIO()  # torch.save would store the name of a file in the archive
    torch.save(contents, buffer)
    return buffer.getvalue()


def strided(tensor: Any, size: int) -> torch.Tensor:
    """Check a tensor's layout and size. Return the tensor detached, with bfloat16 as float32."""
    import torch

    require_valid(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided, "a tensor")
    require_valid(tensor.device.type == "cpu" and not tensor.is_complex(), "the type of a tensor")
    if tensor.nbytes > size:
        raise ValueError(f"the file has {size} bytes, but declares a tensor of {tensor.nbytes}")
    detached: torch.Tensor = tensor.detach()
    return detached.float() if detached.dtype == torch.bfloat16 else detached


def own_tensors(stored: Mapping[str, Any], size: int) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the tensors and the JSON text that xtok stored in a `.pt` (`size` bytes)."""
    arrays, metadata = stored["tensors"], stored["metadata"]
    require_valid(isinstance(metadata, str), "the metadata")
    require_valid(
        isinstance(arrays, dict) and all(isinstance(name, str) for name in arrays), "the tensors"
    )
    tensors = {}
    for name, tensor in arrays.items():
        try:
            array = strided(tensor, size).resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # dtypes that NumPy lacks
            raise ValueError(f"the type of {name} is not valid") from error
        tensors[name] = array.copy()  # a copy, because the map outlives the file
    return tensors, metadata
