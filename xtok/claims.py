"""One of many processes does a job, the others wait: claim files, on local and shared file systems.

A claim is a file that its holder created exclusively (O_EXCL) and touches every few seconds. There
are no locks: on some network file systems `flock` does nothing, on others it holds for one host.

- A claim is stale if its process is gone, which only the same machine can tell, or if it was not
  touched for `STALE_AFTER` seconds. Ages are differences of times that the file system itself
  assigned, so the hosts' clocks do not matter.
- A stale claim is not removed but succeeded: claim n + 1 counts more than claim n, and again only
  one process can create it. Nobody can remove a claim that another has just taken over.
- Two processes do the job at worst, if one sleeps longer than `STALE_AFTER`. So the job must be one
  that gives the same result twice, and replaces it whole.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from xtok.errors import XtokError
from xtok.progress import Note, silent_note

T = TypeVar("T")

HEARTBEAT = 5.0
"""Seconds between two touches of a claim."""

STALE_AFTER = 60.0
"""Seconds without a touch after which a claim is a dead process's."""

_LONGEST_PAUSE = 2.0


def once(
    target: Path,
    find: Callable[[], T | None],
    make: Callable[[], T],
    *,
    timeout: float,
    note: Note = silent_note,
) -> T:
    """Return what `find` finds; if that is nothing, one process makes it and the others wait.

    Args:
        target: what the claims are for; they are files beside it.
        find: returns what is there, or None.
        make: makes it, so that `find` of any process finds it. If it fails, another one tries.
        timeout: seconds to wait for another process.
        note: called with a sentence when this process begins to wait.

    Raises:
        XtokError: if another process takes longer than the timeout.
        OSError: if no claim can be made.
    """
    deadline = time.monotonic() + timeout
    next_look = time.monotonic()  # at the file system's clock, which costs it a file
    pause, waits = 0.02, False
    while True:
        found = find()
        if found is not None:
            return found
        holder = newest_claim(target)
        if (
            holder is None
            or holder.is_gone()
            or (time.monotonic() >= next_look and holder.is_silent())
        ):
            with _claimed(_claim_path(target, 0 if holder is None else holder.number + 1)) as ours:
                if ours:
                    found = find()  # made between the look and the claim
                    return make() if found is None else found
            continue
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + HEARTBEAT
        left = deadline - time.monotonic()
        if left <= 0:
            raise XtokError(
                f"waited {timeout:g} seconds for {holder.name}, which makes {target}",
                hint=f"if that process is gone, remove {holder.path}; else wait longer with "
                "{option}",
                parameter="timeout",
            )
        if not waits:
            note(f"waiting for {holder.name}, which makes {target}")
            waits = True
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, _LONGEST_PAUSE)


@dataclass(frozen=True)
class ClaimFile:
    """A claim as other processes see it.

    Attributes:
        path: the file.
        number: how many claims it succeeds.
        touched: when its holder last touched it, by the file system's clock.
        host: of the holder; "" if the claim was not yet written.
        machine: what tells whether `pid` means anything here.
        pid: of the holder, 0 if unknown.
    """

    path: Path
    number: int
    touched: float
    host: str
    machine: str
    pid: int

    @property
    def name(self) -> str:
        """The holder, in words."""
        return f"process {self.pid} on {self.host}" if self.host else "a process that just began"

    def is_gone(self) -> bool:
        """Tell whether the holder is known to be dead, which takes a process of its machine."""
        return self.machine == _machine() and not _is_alive(self.pid)

    def is_silent(self) -> bool:
        """Tell whether the holder has not touched its claim for `STALE_AFTER` seconds."""
        now = _file_system_time(self.path.parent)
        return now is not None and now - self.touched > STALE_AFTER


def newest_claim(target: Path) -> ClaimFile | None:
    """Return the claim on a target that counts, stale or not; None if there is none."""
    newest, number = None, 0
    while (claim := _read_claim(_claim_path(target, number), number)) is not None:
        newest, number = claim, number + 1
    return newest


def _claim_path(target: Path, number: int) -> Path:
    return target.with_name(f"{target.stem}.claim-{number}")


def _read_claim(path: Path, number: int) -> ClaimFile | None:
    try:
        with path.open("rb") as file:  # to open it is what makes NFS ask its server for the time
            touched = os.fstat(file.fileno()).st_mtime
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
        return ClaimFile(
            path, number, touched, str(data["host"]), str(data["machine"]), int(data["pid"])
        )
    except (ValueError, KeyError, TypeError):  # its holder is about to write it
        return ClaimFile(path, number, touched, "", "", 0)


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold a claim, and touch it, during the block; give False if another process has it."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    except FileExistsError:
        yield False
        return
    done = threading.Event()
    secret = secrets.token_hex(8)
    touching = threading.Thread(target=_touch, args=(descriptor, done), daemon=True)
    try:
        holder = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
        os.write(descriptor, json.dumps({**holder, "secret": secret}).encode())
        touching.start()
        yield True
    finally:
        done.set()
        if touching.ident is not None:
            touching.join()
        os.close(descriptor)
        _release(path, secret)


def _touch(descriptor: int, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT):
        with suppress(OSError):  # somebody removed the claim, and with it our say
            os.utime(descriptor)  # without a time, it is the file server's


def _release(path: Path, secret: str) -> None:
    """Remove a claim, if it is still ours, and those that it succeeded."""
    with suppress(OSError):
        if secret in path.read_text(encoding="utf-8") or not path.stat().st_size:
            path.unlink()
    stem, _, number = path.name.rpartition("-")
    for earlier in range(int(number)):
        path.with_name(f"{stem}-{earlier}").unlink(missing_ok=True)


def _machine() -> str:
    """Return what processes share that see the same process ids: the boot and the namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # elsewhere than on Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours, but there
        return True
    return True


def _file_system_time(folder: Path) -> float | None:
    """Return the time by the clock that dates a folder's files; None if none can be made there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
