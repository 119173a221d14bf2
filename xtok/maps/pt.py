"""`.pt` files: what they hold, read without running code, and no larger than the file."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch.load raises; nothing is unpickled
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from xtok.errors import MAP_HINT, MapFileError

if TYPE_CHECKING:
    import torch


def require(holds: object, what: str) -> None:
    """Raise a `ValueError` that names what is not valid, unless it holds."""
    if not holds:
        raise ValueError(f"{what} is not valid")


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
            require(part is None, f"the checksum of its part {part}")
        # Sparse tensors are checked when it is known that they are no larger than the file.
        unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
        with unchecked, warnings.catch_warnings():
            # CSR is said to be beta; newer versions say that their check of it takes time.
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


def strided(tensor: Any, size: int) -> torch.Tensor:
    """Return a dense tensor without its gradient; `ValueError` if it is more than its file."""
    import torch

    require(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided, "a tensor")
    require(tensor.device.type == "cpu" and not tensor.is_complex(), "the type of a tensor")
    if tensor.nbytes > size:
        raise ValueError(f"it holds {size} bytes, and claims a tensor of {tensor.nbytes}")
    plain: torch.Tensor = tensor.detach()
    return plain.float() if plain.dtype == torch.bfloat16 else plain


def own_tensors(own: Mapping[str, Any], size: int) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the tensors and the JSON text that xtok put into a `.pt` of `size` bytes."""
    named, metadata = own["tensors"], own["metadata"]
    require(isinstance(metadata, str), "the metadata")
    require(isinstance(named, dict) and all(isinstance(name, str) for name in named), "the tensors")
    tensors = {}
    for name, tensor in named.items():
        plain = strided(tensor, size).resolve_neg()
        try:
            array = plain.numpy()
        except (TypeError, RuntimeError) as error:  # types that NumPy lacks
            raise ValueError(f"the type of {name} is not valid") from error
        tensors[name] = array.copy()  # the map outlives the file
    return tensors, metadata
