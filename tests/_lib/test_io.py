"""Files that xtok writes and removes: modes, owners, temporary files, sealed files, locks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_IMODE

import pytest
from checks import unreadable_folder

from xtok._lib.io import (
    cache_folder,
    check_output,
    locked,
    read_sealed,
    remove,
    write,
    write_sealed,
)
from xtok.errors import OutputError


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444, 0o755])
def test_an_output_keeps_the_mode_of_the_replaced_file(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")
    path.chmod(mode)
    write(path, [b"after"])
    assert (path.read_bytes(), S_IMODE(path.stat().st_mode)) == (b"after", mode)


def test_a_new_output_has_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.txt", [b""])
    finally:
        os.umask(before)
    assert S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="not root")


@root
def test_an_output_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch()
    os.chown(path, 1234, 5678)
    write(check_output(path, [".txt"]), [b"after"])
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)


@root
@pytest.mark.parametrize("owner", [(1234, 0), (65534, 5678)])
def test_an_output_whose_owner_cannot_be_kept_is_refused(
    owner: tuple[int, int],
) -> None:
    """The error comes before any work, or at the write if the owner changes in the meantime."""
    with unreadable_folder(0o777) as folder:
        path = folder / "a.txt"
        os.seteuid(0)
        path.write_bytes(b"before")
        os.chown(path, *owner)
        os.seteuid(65534)
        with pytest.raises(OutputError, match="another user"):
            check_output(path, [".txt"])
        with pytest.raises(OutputError, match="Operation not permitted"):
            write(path, [b"after"])
        assert (path.read_bytes(), os.listdir(folder)) == (b"before", ["a.txt"])


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_streams_are_refused_as_outputs(path: str) -> None:
    """The error names the given path, wherever the link points."""
    with pytest.raises(OutputError, match=f" {path} .* stream"):
        check_output(path, [".safetensors"])


def test_only_temporary_files_of_xtok_are_removed(tmp_path: Path) -> None:
    """Files are recognized by name. A folder is removed only if it is empty and not a link."""
    scratch, link, own = (tmp_path / name for name in ("scratch", "link", "own"))
    scratch.mkdir()
    own.mkdir()
    link.symlink_to(scratch)
    for name in ("000001.part", "thesis.part", "000001.part.txt"):
        (scratch / name).touch()
    (scratch / "000002.part").mkdir()
    (own / "000001.part").touch()
    for folder in (link, own, tmp_path / "none"):
        remove(folder, [r"\d{6}\.part"])
    assert {*os.listdir(tmp_path)} == {"scratch", "link"}
    assert {*os.listdir(scratch)} == {"thesis.part", "000001.part.txt", "000002.part"}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "short": lambda data: data[:7],
    "longer": lambda data: data + b"\0",
    "none": lambda data: data,
}


def test_changed_bytes_of_a_sealed_file_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_sealed(path, [b"some ", b"bytes"], "about it")
    content = path.read_bytes()

    def reread(data: bytes, about: str = "about it") -> bytes | None:
        path.write_bytes(data)
        return read_sealed(path, about)

    assert reread(content) == b"some bytes"
    assert reread(content, "something else") is None
    for offset in range(len(content)):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << offset % 8
        assert reread(bytes(flipped)) is None
    assert [name for name in DAMAGES if reread(DAMAGES[name](content))] == ["none"]
    path.unlink()
    assert read_sealed(path, "about it") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of Linux")
def test_the_cache_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XTOK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "xtok"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "xtok"
    monkeypatch.setenv("XTOK_CACHE_DIR", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"


def test_threads_of_the_same_process_take_turns(tmp_path: Path) -> None:
    inside, most = [], []

    def ask() -> None:
        with locked(tmp_path / "x", timeout=60, note=lambda note: None):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(ask)
    assert most == [1] * 8
    assert os.listdir(tmp_path) == []


def test_a_failure_frees_the_lock_and_leaves_no_file(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "a" / "b"
    for _ in range(2):
        with pytest.raises(KeyError), locked(path, timeout=0, note=notes.append):
            raise KeyError
    assert (notes, os.listdir(tmp_path)) == ([], [])
