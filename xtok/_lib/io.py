"""Write files: checked before any work, complete or absent, and deleted only by name.

A replaced file keeps its mode and owner. xtok deletes only files with names that it
creates. Cached files end with a digest, and a file with another digest is not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from stat import S_IMODE
from typing import BinaryIO

from xtok._lib.parsing import parse_json
from xtok._lib.progress import Note
from xtok.errors import OutputError, XtokError

_STREAM = re.compile("-|/dev/(stdin|stdout|stderr|fd/.*)|/proc/[^/]+/fd/.*")


def check_output(
    path: str | PathLike[str],
    suffixes: Sequence[str],
    what: str = "output",
    *,
    or_folder: bool = False,
) -> Path:
    """Check that a file can be written, before any work. Its folder may be missing.

    Args:
        path: the file; a symbolic link stands for its target.
        suffixes: the valid suffixes, the usual one first.
        what: the name of the file in errors.
        or_folder: whether the caller also accepts a folder, for the hint.

    Returns:
        the path to write to.

    Raises:
        OutputError: if the suffix is invalid, the path is not a regular file, the folder is not
            writable, or the existing file belongs to another user.
    """
    name = f"the {what} {path}"
    if "\0" in os.fspath(path):
        raise OutputError(f"{name} contains a NUL character", hint="give another path")
    if _STREAM.fullmatch(os.path.abspath(path) if os.fspath(path) != "-" else "-"):
        raise OutputError(f"{name} is a stream, not a file", hint="name a file")
    target = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    if target.is_symlink():
        raise OutputError(
            f"{name} is a symbolic link to itself",
            hint="delete it, or give another path",
        )
    if target.is_dir():
        raise OutputError(f"{name} is a folder", hint="name a file in it")
    if target.suffix not in suffixes:
        raise OutputError(
            f"{name} does not end in {' or '.join(suffixes)}",
            hint=f"name it {_with_suffix(target, suffixes[0])}"
            + (f", or {target}{os.sep} if that is a folder" * (or_folder and not target.exists())),
        )
    _check_folder(target, what)
    _check_owner(target, name)
    return target


def check_folder(path: str | PathLike[str], record: str) -> Path:
    """Check that a folder can be written, before any work.

    It must be missing, empty, or a folder that xtok wrote and that is unchanged since.

    Args:
        path: the folder; a symbolic link stands for its target.
        record: the name of the JSON file that xtok writes last. Its `files` are the names and
            sizes of the other files.

    Raises:
        OutputError: if the folder cannot be written, or contains other files.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.exists() and not target.is_dir():
        raise OutputError(f"the output {path} is a file, expected a folder", hint="name a folder")
    _check_folder(target, "output")
    if target.is_dir() and (others := _unrecorded(target, record)):
        raise OutputError(
            f"the output folder {path} contains {others[0]}, which xtok did not write or which "
            "changed since",
            hint="name a new folder, or delete this one first",
        )
    return target


def _unrecorded(folder: Path, record: str) -> list[str]:
    """Return the files of a folder that differ from its record, or are newer than it."""
    files = {path.name: path.lstat() for path in folder.iterdir()}
    written: dict[str, int] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        written = dict(parse_json((folder / record).read_bytes())["files"])
    return sorted(
        name
        for name, about in files.items()
        if name != record
        and (written.get(name) != about.st_size or about.st_mtime_ns > files[record].st_mtime_ns)
    )


def _check_owner(target: Path, name: str) -> None:
    if target.exists() and not target.is_file():
        raise OutputError(f"{name} is not a regular file", hint="give another path")
    if target.exists() and os.name == "posix" and os.geteuid():
        about = target.stat()
        if about.st_uid != os.geteuid() or about.st_gid not in (os.getegid(), *os.getgroups()):
            raise OutputError(
                f"{name} belongs to another user; replacing it would change its owner",
                hint="choose another path, or delete the file first",
            )


def _check_folder(target: Path, what: str) -> None:
    """Check that the folder of the target, or its nearest existing parent, is writable."""
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        problem, hint = "is a file", "give a path in a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem, hint = "is not writable", "change its permissions, or give a path elsewhere"
    else:
        return
    raise _in_cache(target, f"{folder} {problem}") or OutputError(
        f"the folder of the {what}, {folder}, {problem}", hint=hint
    )


def _in_cache(target: Path, reason: str) -> OutputError | None:
    """Return an error that names the cache folder, if the target is in it."""
    if not target.is_relative_to(cache_folder()):
        return None
    return OutputError(
        f"the cache folder {cache_folder()} is not writable: {reason}",
        hint="set XTOK_CACHE_DIR to a writable folder, or give a path",
    )


def _with_suffix(path: Path, suffix: str) -> Path:
    """Replace a suffix of letters; append the suffix to other names."""
    name = path.stem if path.suffix[1:].isalpha() else path.name
    return path.with_name((name or "map") + suffix)


def write(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a complete file, or raise an `OutputError` and leave the existing file unchanged."""
    with atomic_output(target) as temporary, temporary.open("wb") as file:
        file.writelines(parts)


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write all files, or raise an `OutputError` and leave the existing files unchanged."""
    with ExitStack() as stack:
        for target, content in contents.items():
            with stack.enter_context(atomic_output(target)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # detects a full disk before the first file is renamed


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to the target, and rename it to the target at the end.

    The new file gets the mode and owner of an existing target. After an error nothing is left.

    Raises:
        OutputError: if the file cannot be written.
    """
    temporary = target.with_name(f".{shorten_name(target.name, 200)}.{secrets.token_hex(6)}.tmp")
    with _writing(target), parents_of(target):
        remove(target.parent, [_temporary_names(target)], age=STALE_AFTER, with_folder=False)
        before = target.stat() if target.exists() else None
        try:
            mode = 0o666 if before is None else 0o600  # private until it has the old mode
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if before is not None:
                _like(temporary, before)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the target, and rename it to the target at the end.

    An existing target is replaced. After an error nothing is left; the folder of a killed process
    is removed when the same target is written an hour later.

    Raises:
        OutputError: if the folder cannot be written.
    """
    stem = f".{shorten_name(target.name, 200)}.{secrets.token_hex(6)}"
    temporary, before = (target.with_name(stem[:-1] + end + ".tmp") for end in "01")
    with _writing(target), parents_of(target):
        _remove_stale_folders(target)
        try:
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if target.exists():
                target.replace(before)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if before.exists() and not target.exists():
                before.replace(target)
            raise
        shutil.rmtree(before, ignore_errors=True)


def _remove_stale_folders(target: Path) -> None:
    names, limit = re.compile(_temporary_names(target)), time.time() - STALE_AFTER
    folders = (path for path in target.parent.iterdir() if names.fullmatch(path.name))
    for folder in folders:
        if max(p.lstat().st_mtime for p in (folder, *folder.glob("*"))) < limit:
            shutil.rmtree(folder, ignore_errors=True)


def _like(path: Path, about: os.stat_result) -> None:
    """Set owner and mode, if they differ: some file systems do not support a change."""
    now = path.stat()
    if (now.st_uid, now.st_gid) != (about.st_uid, about.st_gid):
        os.chown(path, about.st_uid, about.st_gid)
    if now.st_mode != about.st_mode:
        path.chmod(S_IMODE(about.st_mode))


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise _in_cache(target, reason) or OutputError(
            f"{target} cannot be written: {reason}",
            hint="check the free space and the permissions of its folder, or give another path",
        ) from error


@contextmanager
def parents_of(target: Path) -> Iterator[None]:
    """Create the target's folder; at the end, remove the created folders that are empty."""
    created = [folder for folder in target.parents if not folder.exists()]
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in created:
            remove(folder)


@contextmanager
def locked(
    target: Path, *, timeout: float, note: Note, busy: XtokError | None = None
) -> Iterator[None]:
    """Run the block in one process at a time.

    The block also runs without the lock: after the timeout, and on network file systems without
    locks. So it must write the file atomically and deterministically. The lock of a process that
    dies is released.

    Args:
        target: the file that the block writes; the lock is an empty file next to it.
        timeout: seconds to wait for another process.
        note: receives a sentence when this process starts or stops waiting.
        busy: the error to raise instead of waiting.

    Raises:
        ValueError: if the timeout is negative or infinite.
    """
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, and must be a number of seconds")
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{shorten_name(target.name, 200)}.lock"))
    with parents_of(target):
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if busy is not None:
                    raise busy from None
                note(f"waiting for another process that writes {target}")
                lock.acquire(timeout=timeout)
        except Timeout:
            note(f"waited {timeout:g} seconds for {target}; writing it in this process as well")
        except (OSError, NotImplementedError) as error:
            note(
                f"{target.parent} does not support locks ({error}); other processes may write the "
                "same file"
            )
        try:
            yield
        finally:
            if lock.is_locked:
                Path(lock.lock_file).unlink(missing_ok=True)  # a waiting process creates a new one
                lock.release()


# Files for later runs, sealed with a digest

_DIGEST = hashlib.sha256().digest_size


def write_sealed(target: Path, parts: Iterable[bytes | memoryview], about: str) -> None:
    """Write a file that ends with a digest of its contents and of `about`."""
    digest = hashlib.sha256(about.encode())

    def sealed() -> Iterator[bytes | memoryview]:
        for part in parts:
            digest.update(part)
            yield part
        yield digest.digest()

    write(target, sealed())


@contextmanager
def opened_sealed(path: Path, about: str) -> Iterator[BinaryIO | None]:
    """Open a file of `write_sealed`; None if it is missing or its digest differs."""
    try:
        file = path.open("rb")
    except OSError:
        yield None
        return
    with file:
        digest = hashlib.sha256(about.encode())
        left = os.fstat(file.fileno()).st_size - _DIGEST
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        is_whole = file.read() == digest.digest()
        file.seek(0)
        yield file if is_whole else None


def read_sealed(path: Path, about: str) -> bytes | None:
    """Return the contents of a file of `write_sealed`; None as in `opened_sealed`."""
    with opened_sealed(path, about) as file:
        return None if file is None else file.read()[:-_DIGEST]


def remove(
    folder: Path, names: Iterable[str] = (), *, age: float = 0.0, with_folder: bool = True
) -> None:
    """Delete files of xtok in a folder, and the folder if it is then empty.

    Args:
        folder: the folder; targets of links are not deleted.
        names: regular expressions for the names of the files.
        age: the minimum age of the files in seconds.
        with_folder: whether to delete the empty folder.
    """
    pattern = re.compile("|".join(names) or "(?!)")
    with suppress(OSError):  # writable folders can be unreadable
        for path in folder.iterdir():
            with suppress(OSError):  # deleted by another process, or a folder
                is_ours = pattern.fullmatch(path.name)
                if is_ours and (not age or path.lstat().st_mtime < time.time() - age):
                    path.unlink()
    if with_folder:
        with suppress(OSError):  # not empty
            folder.rmdir()


def cache_folder() -> Path:
    """Return `$XTOK_CACHE_DIR`, or `xtok` in the platform's cache folder."""
    from platformdirs import user_cache_path

    folder = os.environ.get("XTOK_CACHE_DIR")
    return Path(folder).expanduser() if folder else user_cache_path("xtok", appauthor=False)


def shorten_name(name: str, num_bytes: int) -> str:
    """Cut a file name to a number of bytes; file systems allow at most 255."""
    return os.fsencode(name)[:num_bytes].decode("utf-8", "ignore")


STALE_AFTER = 3600.0
"""Age in seconds at which a temporary file is left over from a killed process."""


def _temporary_names(target: Path) -> str:
    return rf"\.{re.escape(shorten_name(target.name, 200))}\.[0-9a-f]{{12}}\.tmp"
