"""A simulated GPU: tensors with the device `cuda:0` and their data on the CPU.

An operation on tensors of two devices is an error, as in CUDA. Operations that make the CPU wait
for the GPU, because it needs a value or a size, are counted. Autograd, views, in-place operations
and `out=` work as on other devices.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")
LIBRARY = "/xtok/"

FETCHES = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Operations that return their result, or its size, to the CPU."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations with indices.

The indices may be on the CPU, and the CPU waits for the GPU if an index is a mask.
"""

BETWEEN = {"_to_copy", "copy_", "lift_fresh"}
"""Operations that may have a tensor on the CPU and another tensor on the GPU."""


class OnGPU(torch.Tensor):
    """A tensor on the simulated GPU; PyTorch itself treats it as a tensor on `meta`."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGPU:
        tensor: OnGPU = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=torch.device("meta"),
        )  # fmt: skip
        tensor.held = held
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGPU({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{function} outside of pretended_gpu()")


class _Dispatch(TorchDispatchMode):
    """Run each operation on the CPU, and check it as on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fetches: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
        to_gpu = bool(on_gpu)
        if kwargs.get("device") is not None:
            to_gpu = torch.device(kwargs["device"]).type in ("cuda", "meta")
            kwargs |= {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        name = function.overloadpacket.__name__
        self._check(name, args, kwargs, tensors, on_gpu, to_gpu)
        if function is torch.ops.aten.mm.dtype_out:  # exists only on CUDA
            args, function = (*(x.held.to(args[2]) for x in args[:2]),), torch.ops.aten.mm.out
        results = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        # An in-place operation returns its input.
        inputs = {id(_inner(tensor)): tensor for tensor in tensors}

        def outer(result: Any) -> Any:
            if id(result) in inputs or not (to_gpu and isinstance(result, torch.Tensor)):
                return inputs.get(id(result), result)
            return OnGPU(result)

        return tree_map(outer, results)

    def _check(
        self, name: str, args: Any, kwargs: Any, tensors: list[Any], on_gpu: list[Any], to_gpu: bool
    ) -> None:
        """Count operations that make the CPU wait; raise an error for tensors on two devices."""
        on_cpu = [t for t in tensors if not isinstance(t, OnGPU) and t.dim()]
        if name in BETWEEN:
            into_cpu = not isinstance(args[0], OnGPU) if name == "copy_" else not to_gpu
            self._count(bool(on_gpu) and into_cpu, "copy to the CPU")
            return
        if on_gpu and on_cpu and not (name in INDEXED and isinstance(args[0], OnGPU)):
            shapes = [list(tensor.shape) for tensor in on_cpu]
            raise RuntimeError(f"{name} at {_line()} on two devices; on the CPU: {shapes}")
        if not on_gpu:
            return
        self._count(name in FETCHES, name)
        self._count(name == "repeat_interleave" and kwargs.get("output_size") is None, name)
        if name in INDEXED:
            indices = [index for index in args[1] if index is not None]
            self._count(any(not isinstance(index, OnGPU) for index in indices), "index on the CPU")
            self._count(any(index.dtype == torch.bool for index in indices), "mask")

    def _count(self, happens: bool, operation: str) -> None:
        if happens:
            self.fetches[f"{operation} at {_line()}"] += 1


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, OnGPU) else value


def _line() -> str:
    """Return the innermost line of the library that is running."""
    frame = sys._getframe()
    while LIBRARY not in frame.f_code.co_filename:
        if frame.f_back is None:
            return "a test, or backward"
        frame = frame.f_back
    return f"{frame.f_code.co_filename.split(LIBRARY)[-1]}:{frame.f_lineno}"


def on_cpu(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the data of a tensor on the simulated GPU without counting a fetch."""
    assert isinstance(tensor, OnGPU)
    return tensor.held


@contextmanager
def pretended_gpu() -> Iterator[Counter[str]]:
    """Use the simulated GPU as `cuda`; count fetches by operation and line."""
    # `torch.tensor` makes its tensor on the CPU and then moves it, which this mode intercepts.
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    # Random numbers come from the CPU.
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
    }
    try:
        with patch.multiple(torch.cuda, **replaced), _Dispatch() as dispatch:
            yield dispatch.fetches
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
