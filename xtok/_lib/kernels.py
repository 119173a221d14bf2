"""Kernels: functions on flat arrays that Numba compiles, or that Python runs on small inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np


class Kernel:
    """A kernel that is compiled at its first call, because importing Numba takes 0.4 s.

    The object has the attributes of the compiled function, so that other kernels can call it.
    """

    def __init__(self, function: Callable[..., Any], *, is_inner: bool = False) -> None:
        self.py_func, self._is_inner = function, is_inner

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    @functools.cached_property
    def _compiled(self) -> Any:
        from xtok._lib.compiling import compiled, compiled_inner

        return (compiled_inner if self._is_inner else compiled)(self.py_func)


kernel = Kernel
inner_kernel = functools.partial(Kernel, is_inner=True)


def in_python(kernel: Any) -> Any:
    """Return a version of a kernel that runs in Python, without Numba, for small inputs.

    The kernels that the given kernel calls also run in Python.
    """
    code, names = kernel.py_func.__code__, dict(kernel.py_func.__globals__)
    called = {n: names[n] for n in code.co_names if hasattr(names.get(n), "py_func")}
    names |= {name: in_python(other) for name, other in called.items()}
    return np.errstate(over="ignore")(FunctionType(code, names))
