"""External faults: killed processes, full disks, concurrent writes, hostile tokens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checks import fails, is_printable, on_a_full_disk, unreadable_folder, works
from command_lines import two_files
from conftest import ROOT, Cli
from forked import Forks
from make_maps import TINY
from make_tokenizers import copy_folder

import xtok
from xtok.errors import OutputError
from xtok.maps import file as mapfile

TEMPORARY = re.compile(r"\.[a-z]+\.[a-z]+\.([0-9a-f]{12}\.tmp|lock)")

# Forks children that run a command repeatedly, and kills each child after a random time. All
# modules are imported before the fork, so the kill hits the command's work or its write.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
from xtok.__main__ import program
def start(args, forever=False):
    child = os.fork()
    if not child:
        sys.argv = ["xtok", *args, "-q"]
        while True:
            try:
                program()
            except SystemExit as end:
                if end.code or not forever:
                    os._exit(end.code or 0)
    return child
def run(args):
    assert os.waitpid(start(args), 0)[1] == 0, args
random.seed(0)
for args in json.loads(sys.argv[1]):
    target = Path(args[-1])
    begun = time.monotonic()
    run(args)
    took, good = time.monotonic() - begun, target.read_bytes()
    for number in range(2):
        if number:
            target.unlink(missing_ok=True)
        child = start(args, forever=True)
        time.sleep(random.uniform(0, 1.5 * took))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, args
        assert not target.exists() or target.read_bytes() == good, args
    run(args)  # beside what is left, whatever it is
    assert target.read_bytes() == good, args
"""

WRITING = {
    "build.safetensors": "build M M",
    "kept.safetensors": "build M M --skip-existing",  # uses a lock
    "multitoken.safetensors": "multitoken M bytes",
    "convert.pt": "convert map.safetensors",
    "exact.safetensors": "reapply-exact map.safetensors",
    "cut.safetensors": "sort-cut map.safetensors -k 2",
    "generate.safetensors": "generate M M --embedding-model spelling",
    "events.safetensors": "events M bytes",
    "report.html": "report map.safetensors",
    "render.jsonl": "render chat.json -m M --chat-template plain",
}


def test_a_killed_command_leaves_a_whole_file_or_none(
    small: Path, tmp_path: Path, forks: Forks
) -> None:
    model = str(small / "small.model")
    xtok.build(model, "bytes").save(tmp_path / "map.safetensors")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "How many?"}]')
    work = [
        [*(model if word == "M" else word for word in line.split()), "-o", output]
        for output, line in WRITING.items()
    ]
    result = subprocess.run(
        [forks.folder / "python", "-c", KILLER, json.dumps(work)],
        cwd=tmp_path, env=forks.env, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    left = set(os.listdir(tmp_path)) - {*WRITING, "map.safetensors", "chat.json"}
    assert not [name for name in left if not TEMPORARY.fullmatch(name)]


def test_stale_temporary_files_are_removed_by_the_next_write(tmp_path: Path) -> None:
    fresh = ".map.safetensors.ba9876543210.tmp"  # a process that is still writing
    others = [".other.safetensors.0123456789ab.tmp", ".map.safetensors.notes.tmp"]
    old = time.time() - 3660
    for name in (".map.safetensors.0123456789ab.tmp", fresh, *others):
        (tmp_path / name).write_bytes(b"half")
        if name != fresh:
            os.utime(tmp_path / name, (old, old))
    TINY.save(tmp_path / "map.safetensors")
    assert {*os.listdir(tmp_path)} == {"map.safetensors", fresh, *others}


def test_a_folder_that_cannot_be_listed_can_be_written() -> None:
    with unreadable_folder(0o333) as folder:
        with pytest.raises(PermissionError):
            os.listdir(folder)
        TINY.save(folder / "map.safetensors")
        assert (folder / "map.safetensors").read_bytes() == mapfile.to_safetensors(TINY)


def test_a_full_disk_leaves_the_old_file(small: Path, tmp_path: Path, forks: Forks) -> None:
    """The disk becomes full in the middle of the write."""
    target = tmp_path / "map.safetensors"
    TINY.save(target)
    old = target.read_bytes()
    line = ["build", *two_files(small), "--output", str(target)]
    result = on_a_full_disk(forks, 9000, line, tmp_path)
    fails(result, f"{target} cannot be written: File too large", "check the free space")
    assert target.read_bytes() == old
    assert os.listdir(tmp_path) == [target.name]


def test_a_folder_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be created again between check and write, but not during the write."""
    folder = tmp_path / "maps"
    folder.mkdir()
    mapfile.check_map_output(folder / "map.safetensors")
    shutil.rmtree(folder)
    TINY.save(folder / "map.safetensors")
    assert os.listdir(folder) == ["map.safetensors"]
    fsync = os.fsync

    def removed(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(folder)

    monkeypatch.setattr(os, "fsync", removed)
    with pytest.raises(OutputError):
        TINY.save(folder / "map.safetensors")
    assert not folder.exists()


@pytest.fixture
def nobody() -> Iterator[tuple[Path, Callable[..., subprocess.CompletedProcess[str]]]]:
    """A folder that belongs to root, and a function that runs a program in it as another user."""
    folder = Path(tempfile.mkdtemp(prefix="xtok-"))  # other users cannot enter pytest's folder
    folder.chmod(0o755)
    (folder / "own").mkdir()
    (folder / "own").chmod(0o777)
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if os.geteuid():
        prefix = []
        folder.chmod(0o500)
    env = {**os.environ, "HOME": "/nonexistent", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*prefix, sys.executable, *map(str, args)]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )

    try:
        if prefix and (shutil.which("setpriv") is None or run("-c", "import numpy").returncode):
            pytest.skip("nobody cannot run this Python")
        yield folder, run
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_a_user_who_is_not_root(small: Path, nobody: Any) -> None:
    folder, run = nobody
    folder.chmod(0o755)
    for name in ("small.model", "secret.model", "secret.txt"):
        shutil.copy(small / "small.model", folder / name)
        (folder / name).chmod(0 if name.startswith("secret") else 0o644)
    xtok.build(folder / "small.model", "bytes").save(folder / "finished.safetensors")
    folder.chmod(0o555)
    build = "-m", "xtok", "build", "small.model", "bytes", "-o"
    kept = "finished.safetensors", "--skip-existing"
    assert works(run(*build, *kept)).stdout == "finished.safetensors\n"
    fails(run(*build, *kept, "--top-k", "3"), "not writable", "folder")
    assert works(run(*build, "own/map.safetensors")).stdout == "own/map.safetensors\n"
    works(run("-m", "xtok", "verify", "own/map.safetensors", "small.model", "bytes"))
    fails(
        run(*build, "map.safetensors"), "the output cannot be written: . is not writable", "folder"
    )
    fails(run(*build, "new/map.safetensors"), "not writable")
    shutil.copy(folder / "finished.safetensors", folder / "own" / "roots.safetensors")
    fails(run(*build, "own/roots.safetensors"), "another user", "delete the file")
    (folder / "own" / "roots.safetensors").unlink()
    secret = "-m", "xtok", "build", "secret.model", "bytes", "-o", "own/a.safetensors"
    fails(run(*secret), "secret.model cannot be read", "you may read it")
    text = run(*build, "own/a.safetensors", "--text", "secret.txt")
    fails(text, "secret.txt cannot be read", "permissions")
    assert os.listdir(folder / "own") == ["map.safetensors"]


WRITER = """
import sys
from xtok.maps.projection_map import ProjectionMap
projection = ProjectionMap.load(sys.argv[1])
for _ in range(150):
    projection.save(sys.argv[2])
"""


def test_two_processes_that_write_the_same_file(small: Path, tmp_path: Path, forks: Forks) -> None:
    sources = {tmp_path / "a.safetensors": 4, tmp_path / "b.safetensors": 8}
    for path, top_k in sources.items():
        xtok.build(small / "small.model", "bytes", xtok.BuildConfig(top_k=top_k)).save(path)
    contents = {path.read_bytes() for path in sources}
    target = tmp_path / "map.safetensors"
    python = forks.folder / "python"
    writers = [subprocess.Popen([python, "-c", WRITER, path, target]) for path in sources]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        with suppress(FileNotFoundError):
            seen.add(target.read_bytes())
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= contents
    assert target.read_bytes() in contents
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "map.safetensors"]


def test_a_long_history_is_cut(cli: Cli, tmp_path: Path) -> None:
    step = {"stage": "s" * 1000, "options": {"a" * 1000: "b" * 1_900_000}}
    history = (step,) * 3 + ({**step, "options": {}},) * 20
    replace(TINY, history=history).save(tmp_path / "map.safetensors")
    result = works(cli("inspect", "map.safetensors", "--num-examples", "0"))
    assert "and 13 stages more" in result.stdout
    assert len(result.stdout) < 10_000


# Vocabularies with control sequences for terminals

HOSTILE_TOKENS = ["\x1b[31mred\x1b[0m", "\u202eltr", "\x07\r\n\x9b2J", "[bold]not markup[/bold]"]


@pytest.fixture(scope="module")
def hostile_model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with terminal control sequences in its tokens, and a token of 1 MB."""
    name = "\x1b[31m[bold]evil\u202e\n"
    source, folder = small / "small-byte-level", tmp_path_factory.mktemp("hostile") / name
    document = json.loads((source / "tokenizer.json").read_text())
    added = document["added_tokens"]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = 1 + max(*document["model"]["vocab"].values(), *(token["id"] for token in added))
    for i, content in enumerate([*HOSTILE_TOKENS, "m" * 1_000], first):
        added.append({**plain, "id": i, "content": content, "special": i % 2 == 0})
    return copy_folder(source, folder, config=None, tokenizer={"added_tokens": added})


def safe(text: str) -> bool:
    return is_printable(text) and len(text) < 60_000


def test_hostile_tokens_are_shown_safely(cli: Cli, small: Path, hostile_model: Path) -> None:
    models = [hostile_model, small / "small.model"]
    assert safe(works(cli("build", *models, "--output", "map.safetensors")).stderr)
    commands = (["--num-examples", "2000"], ["--", *HOSTILE_TOKENS])
    printed = "".join(works(cli("inspect", "map.safetensors", *words)).stdout for words in commands)
    assert is_printable(printed)
    lines = "".join(line.strip("│ ") for line in printed.split("\n"))
    assert r"\x1b[31m[bold]evil" in lines
    assert "[bold]not markup" in lines
    assert "m" * 1000 not in lines
    assert safe(cli("doctor", hostile_model).stdout)
    assert safe(cli("inspect", "map.safetensors", "\x1b[31m\u202e").stderr)
    assert safe(cli("build", *models, "--student-vocab-size", "9").stderr)


# --strict


def test_strict_refuses_tokens_that_cannot_be_spelled(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    for command in ("build", "multitoken"):
        line = command, small / "small.model", "null:5", "--output", "map.safetensors"
        result = cli(*line, "--strict")
        fails(result, "null:5 cannot spell", "leave out --strict")
        assert len(re.findall(r"\d+ '.*?'", result.stderr)) == 3
        assert not (tmp_path / "map.safetensors").exists()
        assert "note: null:5 cannot spell" in works(cli(*line)).stderr
        if command == "build":  # even if the file exists
            kept = cli(*line, "--strict", "--skip-existing")
            fails(kept, "null:5 cannot spell", "leave out --strict")
            assert "is kept" in works(cli(*line, "--skip-existing")).stderr
        works(cli(command, small / "small.model", "bytes", *line[3:], "--strict"))
        (tmp_path / "map.safetensors").unlink()
