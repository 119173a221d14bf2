"""Compile kernels with Numba, and cache compiled kernels on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import config, njit
from numba.core.serialize import dumps, loads

from xtok._lib.io import read_sealed, write_sealed
from xtok.errors import OutputError

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Return a serial kernel that is compiled at its first call and releases the GIL.

    The cache is next to the package, in the user's cache folder, or in a private temporary folder.
    """
    try:
        dispatcher = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no cache folder
        folder = _private_folder()
        if folder is None:
            return njit(**OPTIONS)(function)
        config.CACHE_DIR = str(folder)
        dispatcher = njit(cache=True, **OPTIONS)(function)
    if config.DISABLE_JIT:  # `njit` returned the Python function, which has no cache
        return dispatcher
    cache = dispatcher._cache
    made_with = numba.__version__, cache._impl.locator.get_source_stamp()
    cache._cache_file = KernelFiles(Path(cache.cache_path, cache._impl.filename_base), made_with)
    return dispatcher


def compiled_inner(function: Callable[..., Any]) -> Any:
    """Compile a kernel that only other kernels call.

    The kernel has no wrapper for calls from Python, because compiling the wrapper is slow. Callers
    pass `np.int64(0)` instead of `0`, because Numba compiles a second version for a literal.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


class KernelFiles:
    """Numba's cache of one compiled kernel, with one file per signature and processor.

    The files end with a digest. The cache of Numba 0.68.1 does not check its files: in a test, each
    of 12 kinds of damage crashed later runs.
    """

    def __init__(self, beside: Path, made_with: object) -> None:
        self._beside, self._made_with = beside, made_with

    def load(self, key: object) -> Any:
        """Return the kernel for a key, or None if the kernel's file is missing or damaged."""
        path = self.path(key)
        data = read_sealed(path, path.name)
        with suppress(ImportError, AttributeError):  # the class of an argument was moved or removed
            return None if data is None else loads(data)
        return None

    def save(self, key: object, compiled: object) -> None:
        """Write the kernel for a key. If this fails, the next run compiles the kernel again."""
        path = self.path(key)
        with suppress(OutputError):
            write_sealed(path, [dumps(compiled)], path.name)

    def path(self, key: object) -> Path:
        """Return the path of the file for a key."""
        digest = hashlib.sha256(repr((self._made_with, key)).encode()).hexdigest()
        return self._beside.with_name(f"{self._beside.name}.{digest[:16]}.nbc")


def _private_folder() -> Path | None:
    # Kernels are code, so only this user may write to the folder.
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"xtok-kernels-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_private = status.st_uid == user and status.st_mode & 0o777 == 0o700
        return folder if is_private and os.access(folder, os.W_OK) and folder.is_dir() else None
    except OSError:
        return None
