"""How Numba compiles kernels, once per machine, and which folder keeps them."""

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
    """Return a kernel that is compiled when it is first called, is serial, and releases the GIL.

    Numba keeps it next to the package, else in the user's cache folder; if it may write neither, in
    a folder that only this user can read, below the one for temporary files. What is damaged there
    is compiled again, and replaced.
    """
    try:
        dispatcher = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # there is no folder to keep it in
        folder = _private_folder()
        if folder is None:
            return njit(**OPTIONS)(function)
        config.CACHE_DIR = str(folder)
        dispatcher = njit(cache=True, **OPTIONS)(function)
    if config.DISABLE_JIT:  # then it is the function itself
        return dispatcher
    cache = dispatcher._cache
    made_with = numba.__version__, cache._impl.locator.get_source_stamp()
    cache._cache_file = KernelFiles(Path(cache.cache_path, cache._impl.filename_base), made_with)
    return dispatcher


def compiled_inner(function: Callable[..., Any]) -> Any:
    """Return a kernel that only others call: the way in from Python takes long to compile.

        Python → its way in → project_rows → _room, which has none

    A literal argument would compile it a second time: hence `np.int64(0)`.

        _room(a, b, n, most)             compiled for n of int64
        _room(a, b, 0, most)             again, for n of Literal[int](0)
        _room(a, b, np.int64(0), most)   the first one
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


class KernelFiles:
    """Where Numba looks for a compiled kernel, and leaves it: a file per signature and processor.

    Numba's own class trusts what it reads: a file that a full disk or a killed copy cut short makes
    every later run raise, or LLVM abort it. That is so up to 0.68.1, the newest in November 2026:
    its index and its kernel, each empty, cut at 20 bytes, halved, with flipped bytes, as text and
    as noise, made 12 of 12 runs end, and the next ones too. These files end with their digest; a
    damaged one is none, nor a copy of another kernel's.
    """

    def __init__(self, beside: Path, made_with: object) -> None:
        self._beside, self._made_with = beside, made_with

    def load(self, key: object) -> Any:
        """Return what is kept under a key, or None."""
        path = self.path(key)
        data = read_sealed(path, path.name)
        with suppress(ImportError, AttributeError):  # of arguments whose class has moved since
            return None if data is None else loads(data)
        return None

    def save(self, key: object, compiled: object) -> None:
        """Keep a kernel under a key; without room for it, the next run compiles again."""
        path = self.path(key)
        with suppress(OutputError):
            write_sealed(path, [dumps(compiled)], path.name)

    def path(self, key: object) -> Path:
        """Return where a kernel is kept."""
        about = hashlib.sha256(repr((self._made_with, key)).encode()).hexdigest()
        return self._beside.with_name(f"{self._beside.name}.{about[:16]}.nbc")


def _private_folder() -> Path | None:
    """Return a folder for kernels, which are code: nobody else may write there."""
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
            from tqdm import tqdm  # which writes above a bar, not into it

            self.is_silent = True
            words = "note: compiling kernels, which takes a few seconds, once per machine"
            tqdm.write(words, file=sys.stderr)

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())
