"""Write files atomically, after early checks of the output path.

xtok deletes only files that xtok created. It recognizes these files by their names. A replaced file
keeps its mode and owner. Cached files end with a digest.
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
    noun: str = "output",
    *,
    or_folder: bool = False,
) -> Path:
    """Check that a file can be written, and return its path.

    Call this function before any long work. The file's folder can be missing. Error messages call
    the file `noun`.
    """
    target = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    problem, hint = "", "give another path"
    if "\0" in os.fspath(path):
        problem = "contains a NUL character"
    elif _STREAM.fullmatch(os.path.abspath(path) if os.fspath(path) != "-" else "-"):
        problem, hint = "is a stream, not a file", "name a file"
    elif target.is_symlink():
        problem, hint = "is a symbolic link to itself", "delete the link, or give another path"
    elif target.is_dir():
        problem, hint = "is a folder", "name a file in the folder"
    elif target.suffix not in suffixes:
        problem = f"does not end in {' or '.join(suffixes)}"
        stem = target.stem if target.suffix[1:].isalpha() else target.name  # Llama-3.2: no suffix
        hint = f"name it {target.with_name((stem or 'map') + suffixes[0])}"
        if or_folder and not target.exists():
            hint += f", or {target}{os.sep} for a folder"
    elif target.exists() and not target.is_file():
        problem = "is not a regular file"
    else:
        _check_folder(target, noun)
        if _is_foreign(target):
            problem = "belongs to another user; replacing it would change its owner"
            hint = "choose another path, or delete the file first"
    if problem:
        raise OutputError(f"the {noun} {path} {problem}", hint=hint)
    return target


def check_folder(path: str | PathLike[str], record: str) -> Path:
    """Check that an output folder is missing, empty, or unchanged since xtok wrote it.

    `record` is the JSON file that xtok writes last. Its entry `files` contains the names and sizes
    of the other files.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.exists() and not target.is_dir():
        raise OutputError(f"the output {path} is a file, expected a folder", hint="name a folder")
    _check_folder(target, "output")
    if target.is_dir() and (others := _find_unrecorded(target, record)):
        raise OutputError(
            f"the output folder {path} contains {others[0]}, which xtok did not write, "
            "or which has changed since then",
            hint="choose a new folder, or delete this folder first",
        )
    return target


def _find_unrecorded(folder: Path, record: str) -> list[str]:
    files = {path.name: path.lstat() for path in folder.iterdir()}
    written: dict[str, int] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        written = dict(parse_json((folder / record).read_bytes())["files"])
    return sorted(
        name
        for name, status in files.items()
        if name != record
        and (written.get(name) != status.st_size or status.st_mtime_ns > files[record].st_mtime_ns)
    )


def _is_foreign(target: Path) -> bool:
    if os.name != "posix" or not os.geteuid() or not target.exists():
        return False
    status = target.stat()
    return status.st_uid != os.geteuid() or status.st_gid not in (os.getegid(), *os.getgroups())


def _check_folder(target: Path, noun: str) -> None:
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        problem, hint = "is a file, not a folder", "choose another folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem, hint = "is not writable", "change its permissions, or choose another folder"
    else:
        return
    raise _in_cache(target, f"{folder} {problem}") or OutputError(
        f"the {noun} cannot be written: {folder} {problem}", hint=hint
    )


def _in_cache(target: Path, reason: str) -> OutputError | None:
    if not target.is_relative_to(cache_folder()):
        return None
    return OutputError(
        f"the cache folder {cache_folder()} is not writable: {reason}",
        hint="set XTOK_CACHE_DIR to a writable folder, or give another path",
    )


def other_file(path: Path, why: str) -> OutputError:
    """Return the error for an existing file that xtok replaces only on request."""
    hint = "choose the output with {option}, or delete this file first"
    problem = f"{path} already exists and is not replaced: {why.removeprefix(f'{path} ')}"
    return OutputError(problem, hint=hint, parameter="path")


def write(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write one file, or raise an `OutputError` and leave the existing file unchanged."""
    write_all({target: parts})


def write_all(contents: Mapping[Path, Iterable[bytes | memoryview]]) -> None:
    """Write all files, or raise an `OutputError` and leave the existing files unchanged."""
    with ExitStack() as stack:
        for target, parts in contents.items():
            with stack.enter_context(atomic_output(target)).open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())  # detects a full disk before the first file is renamed


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to the target, and rename it to the target at the end.

    The new file has the mode and owner of an existing target. After an error, the temporary file is
    deleted.
    """
    temporary = target.with_name(f".{shorten_name(target.name, 200)}.{secrets.token_hex(6)}.tmp")
    with _writing(target), parents_of(target):
        _remove_stale(target)
        before = target.stat() if target.exists() else None
        try:
            mode = 0o666 if before is None else 0o600  # `_like` copies the mode later
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
    """Yield a temporary folder next to the target. At the end, replace the target by this folder.

    After an error, the temporary folder is deleted and the target is unchanged.
    """
    stem = f".{shorten_name(target.name, 200)}.{secrets.token_hex(6)}"
    temporary, before = (target.with_name(stem[:-1] + end + ".tmp") for end in "01")
    with _writing(target), parents_of(target):
        _remove_stale(target)
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


def _remove_stale(target: Path) -> None:
    """Delete the temporary files of killed processes that wrote the same target."""
    names = re.compile(rf"\.{re.escape(shorten_name(target.name, 200))}\.[0-9a-f]{{12}}\.tmp")
    limit = time.time() - STALE_AFTER
    with suppress(OSError):  # a folder can be writable but not readable
        for path in filter(lambda path: names.fullmatch(path.name), target.parent.iterdir()):
            with suppress(OSError):  # deleted by another process
                if max(p.lstat().st_mtime for p in (path, *path.glob("*"))) < limit:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _like(path: Path, status: os.stat_result) -> None:
    now = path.stat()  # some file systems reject `chown` and `chmod`, even without a change
    if (now.st_uid, now.st_gid) != (status.st_uid, status.st_gid):
        os.chown(path, status.st_uid, status.st_gid)
    if now.st_mode != status.st_mode:
        path.chmod(S_IMODE(status.st_mode))


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
    """Create the target's folder. At the end, remove the new folders that are still empty."""
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
    """Hold a lock while the `with` block writes `target`.

    If another process holds the lock, raise the error `busy`. If `busy` is None, wait. If the lock
    is not free after `timeout` seconds, the block runs without the lock. The block also runs
    without the lock if the file system does not support locks. Therefore, the block must write the
    file atomically and deterministically.
    """
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, expected a number of seconds")
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{shorten_name(target.name, 200)}.lock"))
    with parents_of(target):
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if busy is not None:
                    raise busy from None
                note(f"waiting for another process that is writing {target}")
                lock.acquire(timeout=timeout)
        except Timeout:
            note(f"waited {timeout:g} seconds for {target}; this process writes the file, too")
        except (OSError, NotImplementedError) as error:
            note(
                f"{target.parent} does not support locks ({error}); other processes may write the "
                "same file"
            )
        try:
            yield
        finally:
            if lock.is_locked:
                Path(lock.lock_file).unlink(missing_ok=True)  # waiting processes create it again
                lock.release()


# Files for later runs, sealed with a digest

_DIGEST = hashlib.sha256().digest_size


def write_sealed(target: Path, parts: Iterable[bytes | memoryview], context: str) -> None:
    """Write a file that ends with a digest of its contents and of the string `context`."""
    digest = hashlib.sha256(context.encode())

    def sealed() -> Iterator[bytes | memoryview]:
        for part in parts:
            digest.update(part)
            yield part
        yield digest.digest()

    write(target, sealed())


@contextmanager
def opened_sealed(path: Path, context: str) -> Iterator[BinaryIO | None]:
    """Open a sealed file. Yield None if the file is missing or damaged."""
    try:
        file = path.open("rb")
    except OSError:
        yield None
        return
    with file:
        digest = hashlib.sha256(context.encode())
        left = os.fstat(file.fileno()).st_size - _DIGEST
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        is_whole = file.read() == digest.digest()
        file.seek(0)
        yield file if is_whole else None


def read_sealed(path: Path, context: str) -> bytes | None:
    """Return the contents of a sealed file, or None if the file is missing or damaged."""
    with opened_sealed(path, context) as file:
        return None if file is None else file.read()[:-_DIGEST]


def remove(folder: Path, names: Iterable[str] = ()) -> None:
    """Delete the files that match the regular expressions `names`. Then delete an empty folder."""
    pattern = re.compile("|".join(names) or "(?!)")
    with suppress(OSError):  # an unreadable folder
        for path in folder.iterdir():
            if pattern.fullmatch(path.name):
                with suppress(OSError):  # deleted by another process, or a folder
                    path.unlink()
    with suppress(OSError):  # not empty
        folder.rmdir()


def cache_folder() -> Path:
    """Return `$XTOK_CACHE_DIR`, or `xtok` in the platform's cache folder."""
    from platformdirs import user_cache_path

    folder = os.environ.get("XTOK_CACHE_DIR")
    return Path(folder).expanduser() if folder else user_cache_path("xtok", appauthor=False)


def shorten_name(name: str, num_bytes: int) -> str:
    """Shorten a file name to a number of bytes, because file systems allow at most 255."""
    return os.fsencode(name)[:num_bytes].decode("utf-8", "ignore")


STALE_AFTER = 3600.0
"""Seconds after which xtok assumes that a temporary file belongs to a killed process."""
