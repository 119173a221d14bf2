"""Tensors of a `.pt` file as arrays, checked; what is wrong is a `ValueError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def require_valid(holds: object, what: str) -> None:
    """Raise a `ValueError` that names what is not valid, unless it holds."""
    if not holds:
        raise ValueError(f"{what} is not valid")


def strided(tensor: Any, size: int) -> torch.Tensor:
    """Return a dense tensor without its gradient; `ValueError` if it is more than its file."""
    import torch

    require_valid(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided, "a tensor")
    require_valid(tensor.device.type == "cpu" and not tensor.is_complex(), "the type of a tensor")
    if tensor.nbytes > size:
        raise ValueError(f"it holds {size} bytes, and claims a tensor of {tensor.nbytes}")
    plain: torch.Tensor = tensor.detach()
    return plain.float() if plain.dtype == torch.bfloat16 else plain


def own_tensors(stored: Mapping[str, Any], size: int) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the tensors and the JSON text that xtok put into a `.pt` of `size` bytes."""
    named, metadata = stored["tensors"], stored["metadata"]
    require_valid(isinstance(metadata, str), "the metadata")
    require_valid(
        isinstance(named, dict) and all(isinstance(name, str) for name in named), "the tensors"
    )
    tensors = {}
    for name, tensor in named.items():
        plain = strided(tensor, size).resolve_neg()
        try:
            array = plain.numpy()
        except (TypeError, RuntimeError) as error:  # types that NumPy lacks
            raise ValueError(f"the type of {name} is not valid") from error
        tensors[name] = array.copy()  # the map outlives the file
    return tensors, metadata
