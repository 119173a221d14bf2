"""Compile kernels with Numba, and keep them in a cache folder of the machine."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import config, njit
from numba.core import event
from numba.core.serialize import dumps, loads

from xtok._lib.io import read_sealed, write_sealed
from xtok.errors import OutputError

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Return a serial kernel that is compiled at its first call and releases the GIL.

    The cache is next to the package, else in the user's cache folder, else in a private folder for
    temporary files. A damaged cache file is compiled again and replaced.
    """
    try:
        dispatcher = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no cache folder
        folder = _private_folder()
        if folder is None:
            return njit(**OPTIONS)(function)
        config.CACHE_DIR = str(folder)
        dispatcher = njit(cache=True, **OPTIONS)(function)
    if config.DISABLE_JIT:  # `njit` returns the function itself
        return dispatcher
    cache = dispatcher._cache
    made_with = numba.__version__, cache._impl.locator.get_source_stamp()
    cache._cache_file = KernelFiles(Path(cache.cache_path, cache._impl.filename_base), made_with)
    return dispatcher


def compiled_inner(function: Callable[..., Any]) -> Any:
    """Return a kernel for calls from other kernels, without the wrapper for calls from Python.

    The wrapper takes long to compile. Pass `np.int64(0)` instead of the literal `0`: Numba compiles
    the kernel a second time for a literal argument.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


class KernelFiles:
    """Numba's cache of a kernel: one file per signature and processor, sealed with a digest.

    Numba's own class (0.68.1, November 2026) does not check its files. After a full disk or an
    interrupted copy, every later run raises an error or is aborted by LLVM: 12 of 12 kinds of
    damage ended the run.
    """

    def __init__(self, beside: Path, made_with: object) -> None:
        self._beside, self._made_with = beside, made_with

    def load(self, key: object) -> Any:
        """Return the kernel of a key; None if it is missing or damaged."""
        path = self.path(key)
        data = read_sealed(path, path.name)
        with suppress(ImportError, AttributeError):  # the class of an argument has moved
            return None if data is None else loads(data)
        return None

    def save(self, key: object, compiled: object) -> None:
        """Write the kernel of a key; if that fails, the next run compiles again."""
        path = self.path(key)
        with suppress(OutputError):
            write_sealed(path, [dumps(compiled)], path.name)

    def path(self, key: object) -> Path:
        """Return the file of a key."""
        about = hashlib.sha256(repr((self._made_with, key)).encode()).hexdigest()
        return self._beside.with_name(f"{self._beside.name}.{about[:16]}.nbc")


def _private_folder() -> Path | None:
    """Return a folder that only this user can write: kernels are code."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"xtok-kernels-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        is_private = about.st_uid == user and about.st_mode & 0o777 == 0o700
        return folder if is_private and os.access(folder, os.W_OK) and folder.is_dir() else None
    except OSError:
        return None


class _Announcer(event.Listener):  # type: ignore[misc]
    """Prints on a terminal, once per process, that kernels are being compiled."""

    def __init__(self) -> None:
        self.is_silent = not sys.stderr.isatty()

    def on_start(self, event: Any) -> None:
        if not self.is_silent and "xtok" in getattr(event.data["dispatcher"], "__module__", ""):
            from tqdm import tqdm  # its `write` does not break a progress bar

            self.is_silent = True
            words = "note: compiling kernels, which takes a few seconds, once per machine"
            tqdm.write(words, file=sys.stderr)

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())
