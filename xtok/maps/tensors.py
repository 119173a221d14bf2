"""Check the tensors of a `.pt` file and convert them to arrays; errors are a `ValueError`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def require_valid(holds: object, description: str) -> None:
    """Raise a `ValueError` with the description unless the condition holds."""
    if not holds:
        raise ValueError(f"{description} is not valid")


def torch_bytes(contents: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `.pt` file."""
    import torch

    buffer = io.BytesIO()  # torch.save would write a file's name into the archive
    torch.save(contents, buffer)
    return buffer.getvalue()


def strided(tensor: Any, size: int) -> torch.Tensor:
    """Return a dense tensor without gradient, at most as large as its file; bfloat16 as float32."""
    import torch

    require_valid(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided, "a tensor")
    require_valid(tensor.device.type == "cpu" and not tensor.is_complex(), "the type of a tensor")
    if tensor.nbytes > size:
        raise ValueError(f"it has {size} bytes, but declares a tensor of {tensor.nbytes}")
    detached: torch.Tensor = tensor.detach()
    return detached.float() if detached.dtype == torch.bfloat16 else detached


def own_tensors(stored: Mapping[str, Any], size: int) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the tensors and the JSON text that xtok stored in a `.pt` of `size` bytes."""
    named, metadata = stored["tensors"], stored["metadata"]
    require_valid(isinstance(metadata, str), "the metadata")
    require_valid(
        isinstance(named, dict) and all(isinstance(name, str) for name in named), "the tensors"
    )
    tensors = {}
    for name, tensor in named.items():
        try:
            array = strided(tensor, size).resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # dtypes missing in NumPy
            raise ValueError(f"the type of {name} is not valid") from error
        tensors[name] = array.copy()  # the map outlives the file
    return tensors, metadata
