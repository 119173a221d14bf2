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

from numba import config, njit
from numba.core import event
from numba.core.caching import IndexDataCacheFile

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Return a kernel that is compiled when it is first called, is serial, and releases the GIL.

    Numba keeps it beside the package, else in the user's cache folder; if it may write neither, in
    a folder that only this user can read, below the one for temporary files. What is damaged there
    is compiled anew, and replaced.
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
    source = cache._impl.locator.get_source_stamp()
    cache._cache_file = _CheckedFile(cache.cache_path, cache._impl.filename_base, source)
    return dispatcher


def compiled_inner(function: Callable[..., Any]) -> Any:
    """Return a kernel that only others call: the way in from Python takes long to compile.

    A literal argument would compile it a second time: hence `np.int64(0)`.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


class _CheckedFile(IndexDataCacheFile):  # type: ignore[misc]
    """The files that keep a kernel: one for each version of Numba and each signature.

    Numba's own trust what they read: a file that a full disk or a killed copy cut short makes every
    later run raise, or LLVM abort it. Here each ends with its sha256.
    """

    def load(self, key: object) -> Any:
        """Return what is kept under a key, or None."""
        name = self._name(key)
        try:
            content = Path(self._data_path(name)).read_bytes()
        except OSError:
            return None
        return self._load_data(name) if content == self._signed(name, content[:-32]) else None

    def save(self, key: object, data: object) -> None:
        """Keep data under a key; without room for it, the next run compiles again."""
        name = self._name(key)
        with suppress(OSError), self._open_for_write(self._data_path(name)) as file:
            file.write(self._signed(name, self._dump(data)))

    def _name(self, key: object) -> str:
        digest = hashlib.sha256(repr((self._version, key)).encode()).digest()
        return str(self._data_name(int.from_bytes(digest[:6], "big")))

    def _signed(self, name: str, data: bytes) -> bytes:
        """Return data with the digest of them, their name and their source; unpickling skips it."""
        about = repr((name, self._source_stamp)).encode()
        return data + hashlib.sha256(about + data).digest()


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
            words = "note: compiling kernels, once on this machine, for some seconds"
            tqdm.write(words, file=sys.stderr)

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())
