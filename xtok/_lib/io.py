"""Output paths: checked before any work, written whole or not at all; the cache folder."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path

from xtok._lib.progress import Note
from xtok.errors import OutputError


def check_output(
    path: str | PathLike[str],
    suffixes: Sequence[str],
    what: str = "output",
    *,
    or_folder: bool = False,
) -> Path:
    """Check that a file can be written, before any work; its folder need not exist.

    Args:
        path: the file; a symbolic link stands for what it leads to.
        suffixes: those that it may have, the usual one first.
        what: what errors call the file.
        or_folder: whether the caller takes a folder, too, so that the hint may name one.

    Returns:
        the path to write to.

    Raises:
        OutputError: if the suffix is another one, the path is a folder or a device, or its folder
            cannot be written to.
    """
    if "\0" in os.fspath(path):
        raise OutputError(f"the {what} {path} has a NUL character", hint="give another path")
    if os.fspath(path) == "-":
        raise OutputError(f"the {what} cannot be - (stdout)", hint="name a file")
    target = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    if target.is_symlink():
        raise OutputError(
            f"the {what} {target} is a symbolic link that leads to itself",
            hint="remove it, or give another path",
        )
    if target.is_dir():
        raise OutputError(f"the {what} {target} is a folder", hint="name a file in it")
    if target.suffix not in suffixes:
        raise OutputError(
            f"the {what} {target} does not end in {' or '.join(suffixes)}",
            hint=f"name it {_with_suffix(target, suffixes[0])}"
            + (f", or {target}{os.sep} if that is a folder" * (or_folder and not target.exists())),
        )
    if target.exists() and not target.is_file():
        raise OutputError(f"the {what} {target} is not a regular file", hint="give another path")
    folder = target.parent
    while not folder.exists() and folder != folder.parent:  # it is made in the nearest above it
        folder = folder.parent
    if not folder.is_dir():
        raise OutputError(
            f"the folder of the {what}, {folder}, is a file", hint="give a path in a folder"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"the folder of the {what}, {folder}, is not writable",
            hint="change its permissions, or give a path elsewhere",
        )
    return target


def _with_suffix(path: Path, suffix: str) -> Path:
    """Return the path with the suffix instead of its own, if it has one and not just a dot."""
    name = path.stem if path.suffix[1:].isalpha() else path.name
    return path.with_name((name or "map") + suffix)


def write(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file of these parts whole, or raise an `OutputError` and leave what was there."""
    with atomic_output(target) as temporary, temporary.open("wb") as file:
        file.writelines(parts)


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together, or raise an `OutputError` and leave what was there."""
    with ExitStack() as stack:
        for target, content in contents.items():
            with stack.enter_context(atomic_output(target)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a full disk is known before the first is renamed


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Give a temporary name as `atomic_path` does; what fails is an `OutputError`."""
    try:
        with atomic_path(target) as temporary:
            yield temporary
    except OSError as error:
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="check the free space and the permissions of its folder, or give another path",
        ) from error


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a temporary name in the target's folder, which is created if need be.

    At the end, what was written is flushed and renamed; after an error nothing is left.
    """
    temporary = target.with_name(f".{shorten_name(target.name, 200)}.{secrets.token_hex(6)}.tmp")
    with parents_of(target):
        _remove_stale(target)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def parents_of(target: Path) -> Iterator[None]:
    """Create the target's folder if need be; at the end, remove what was created and is empty."""
    created = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in created:
            with suppress(OSError):  # the target is in it, or what another process has put there
                folder.rmdir()


@contextmanager
def locked(target: Path, *, timeout: float, note: Note) -> Iterator[None]:
    """Let one process at a time into the block, which makes a file.

    The kernel frees the lock of a process that dies. Without the lock, which some network file
    systems do not have, and after the timeout, the block runs all the same: it has to write the
    file whole, and to make the same one each time.

    Args:
        target: the file; the lock is an empty file next to it, removed at the end.
        timeout: seconds to wait for another process.
        note: called with a sentence when this process begins to wait, and when it stops waiting.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{shorten_name(target.name, 200)}.lock"))
    with parents_of(target):
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                note(f"waiting for another process that makes {target}")
                lock.acquire(timeout=timeout)
        except Timeout:
            note(f"waited {timeout:g} seconds for {target}; making it in this process, too")
        except (OSError, NotImplementedError) as error:
            note(f"{target.parent} has no locks: other processes may make the same file ({error})")
        try:
            yield
        finally:
            if lock.is_locked:
                Path(lock.lock_file).unlink(missing_ok=True)  # who waits for it begins a new one
                lock.release()


def cache_folder() -> Path:
    """Return `$XTOK_CACHE_DIR`, or `xtok` in the platform's cache folder."""
    from platformdirs import user_cache_path

    folder = os.environ.get("XTOK_CACHE_DIR")
    return Path(folder).expanduser() if folder else user_cache_path("xtok", appauthor=False)


def shorten_name(name: str, num_bytes: int) -> str:
    """Return the beginning of a file name, at most so many bytes: systems limit them to 255."""
    return os.fsencode(name)[:num_bytes].decode("utf-8", "ignore")


STALE_AFTER = 3600.0
"""Seconds after which a temporary file is a killed process's: a write takes a few."""


def _remove_stale(target: Path) -> None:
    """Remove temporary files that killed writers of this target left behind."""
    start = re.escape(shorten_name(target.name, 200))
    pattern = re.compile(rf"\.{start}\.[0-9a-f]{{12}}\.tmp")
    before = time.time() - STALE_AFTER
    with suppress(OSError):  # a folder may be writable, and yet not be listed
        for path in target.parent.iterdir():
            with suppress(OSError):  # another process was quicker, or it is not ours to remove
                if pattern.fullmatch(path.name) and path.stat().st_mtime < before:
                    path.unlink()
