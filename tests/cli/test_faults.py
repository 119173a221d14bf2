"""What can go wrong from outside: killed processes, full disks, damaged and hostile files."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace as dataclasses_replace
from pathlib import Path
from typing import Any

import pytest
from checks import fails, works
from conftest import ROOT, Cli
from forked import Forks
from make import TINY, two_files

import xtok
from xtok._lib.io import STALE_AFTER
from xtok.cli.options import StrictOutput
from xtok.errors import OutputError, XtokError
from xtok.maps import file as mapfile
from xtok.maps.stage_reports import stage_report

TEMPORARY = re.compile(r"\.[a-z-]+\.[a-z]+\.[0-9a-f]{12}\.tmp")

# Forks children that run a command over and over, and kills each after a random time. A fork has
# imported everything already, so that it is the work and the write that are hit.
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
    for number in range(4):
        if number % 2:
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
    "build": ["M", "M"],
    "multitoken": ["M", "bytes"],
    "convert": ["map.safetensors"],
    "reapply-exact": ["map.safetensors"],
    "sort-cut": ["map.safetensors", "-k", "2"],
    "generate": ["M", "M", "--embedding-model", "spelling"],
    "events": ["M", "bytes"],
    "report": ["map.safetensors"],
    "render": ["chat.json", "-m", "M", "--chat-template", "plain"],
}


def test_a_command_killed_at_any_moment_leaves_a_whole_file_or_none(
    small: Path, tmp_path: Path, forks: Forks
) -> None:
    model = str(small / "small.model")
    xtok.build(model, "bytes").save(tmp_path / "map.safetensors")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "How many?"}]')
    suffixes = {"report": "html", "render": "jsonl", "convert": "pt"}
    outputs = {name: f"{name}.{suffixes.get(name, 'safetensors')}" for name in WRITING}
    work = [
        [name, *(model if word == "M" else word for word in args), "-o", outputs[name]]
        for name, args in WRITING.items()
    ]
    done = subprocess.run(
        [forks.folder / "python", "-c", KILLER, json.dumps(work)],
        cwd=tmp_path, env=forks.env, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = set(os.listdir(tmp_path)) - {*outputs.values(), "map.safetensors", "chat.json"}
    assert not [name for name in left if not TEMPORARY.fullmatch(name)]


def test_stale_temporary_files_are_removed_by_the_next_write(tmp_path: Path) -> None:
    stale = tmp_path / ".map.safetensors.0123456789ab.tmp"
    fresh = tmp_path / ".map.safetensors.ba9876543210.tmp"
    other = tmp_path / ".other.safetensors.0123456789ab.tmp"
    named = tmp_path / ".map.safetensors.notes.tmp"
    for path in (stale, fresh, other, named):
        path.write_bytes(b"half")
    for path in (stale, other, named):
        old = time.time() - STALE_AFTER - 60
        os.utime(path, (old, old))
    TINY.save(tmp_path / "map.safetensors")
    assert not stale.exists()
    assert fresh.exists()  # a process that is still writing
    assert other.exists()
    assert named.exists()


def test_a_folder_that_cannot_be_listed_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(folder: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    TINY.save(tmp_path / "map.safetensors")
    assert (tmp_path / "map.safetensors").read_bytes() == mapfile.to_safetensors(TINY)


def test_a_full_disk_leaves_the_old_file(small: Path, tmp_path: Path) -> None:
    """The system's own limit on a file's size stands for the disk: the write ends half-way."""
    target = tmp_path / "map.safetensors"
    TINY.save(target)
    old = target.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "xtok", "build", *two_files(small), "--output", str(target)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )
    fails(done, f"{target} cannot be written: File too large", "check the free space")
    assert target.read_bytes() == old
    assert os.listdir(tmp_path) == [target.name]


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "maps"
    folder.mkdir()
    mapfile.check_output(folder / "map.safetensors")
    shutil.rmtree(folder)
    TINY.save(folder / "map.safetensors")
    assert os.listdir(folder) == ["map.safetensors"]


def test_a_folder_that_vanishes_while_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "maps"
    folder.mkdir()
    fsync = os.fsync

    def removed(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(folder)

    monkeypatch.setattr(os, "fsync", removed)
    with pytest.raises(OutputError, match="No such file"):
        TINY.save(folder / "map.safetensors")
    assert not folder.exists()


@pytest.fixture
def nobody() -> Iterator[tuple[Path, Callable[..., subprocess.CompletedProcess[str]]]]:
    """A folder of root's, and a function that runs a program in it as a user who is not root."""
    folder = Path(tempfile.mkdtemp(prefix="xtok-"))  # pytest's own is closed to others
    folder.chmod(0o755)
    (folder / "own").mkdir(mode=0o777)
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
    kept = run(*build, "finished.safetensors", "--skip-existing")
    assert (kept.returncode, kept.stdout) == (0, "finished.safetensors\n"), kept.stderr
    other = run(*build, "finished.safetensors", "--skip-existing", "--top-k", "3")
    fails(other, "not writable", "path")
    done = run(*build, "own/map.safetensors")
    assert (done.returncode, done.stdout) == (0, "own/map.safetensors\n"), done.stderr
    assert (
        run("-m", "xtok", "verify", "own/map.safetensors", "small.model", "bytes").returncode == 0
    )
    fails(run(*build, "map.safetensors"), "the folder of the output, ., is not writable", "path")
    fails(run(*build, "new/map.safetensors"), "not writable")
    secret = "-m", "xtok", "build", "secret.model", "bytes", "-o", "own/a.safetensors"
    fails(run(*secret), "secret.model cannot be read: Permission denied", "permissions")
    text = run(*build, "own/a.safetensors", "--text", "secret.txt")
    fails(text, "secret.txt cannot be read: Permission denied", "permissions")
    assert os.listdir(folder / "own") == ["map.safetensors"]


WRITER = """
import sys
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.stage_reports import stage_report
projection = ProjectionMap.load(sys.argv[1])
for _ in range(150):
    projection.save(sys.argv[2])
"""


def test_two_processes_that_write_the_same_file(small: Path, tmp_path: Path) -> None:
    contents = set()
    for name, top_k in (("a.safetensors", 4), ("b.safetensors", 8)):
        xtok.build(small / "small.model", "bytes", xtok.BuildConfig(top_k=top_k)).save(
            tmp_path / name
        )
        contents.add((tmp_path / name).read_bytes())
    target = tmp_path / "map.safetensors"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / name, target])
        for name in ("a.safetensors", "b.safetensors")
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        with suppress(FileNotFoundError):
            seen.add(target.read_bytes())
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= contents
    assert target.read_bytes() in contents
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "map.safetensors"]


KERNEL = """
import numpy as np
from xtok.building.embeddings.kernels import keep_largest
values, ids = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32)
keep_largest(np.arange(20, dtype=np.float32).reshape(1, 20), 20, 0, False, values, ids)
print(values, ids)
"""


def test_processes_that_compile_a_kernel_at_once(tmp_path: Path) -> None:
    """The cache of compiled kernels is empty, and all of them write it."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", KERNEL], env=env, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    results = [process.communicate()[0] for process in processes]
    again = subprocess.run(
        [sys.executable, "-c", KERNEL], env=env, stdout=subprocess.PIPE, check=True
    )
    assert {process.returncode for process in processes} == {0}
    assert {*results, again.stdout} == {again.stdout}
    assert again.stdout.strip()


def test_a_long_history_is_cut(cli: Cli, tmp_path: Path) -> None:
    step = {"stage": "s" * 1000, "options": {"a" * 1000: "b" * 1_900_000}}
    dataclasses_replace(TINY, history=(step,) * 3 + ({**step, "options": {}},) * 20).save(
        tmp_path / "map.safetensors"
    )
    done = works(cli("inspect", "map.safetensors", "--num-examples", "0"))
    assert "and 13 stages more" in done.stdout
    assert len(done.stdout) < 10_000


# Vocabularies that would write to the terminal

HOSTILE_TOKENS = {
    "\x1b[31mred\x1b[0m": "\\x1b[31mred\\x1b[0m",
    "\u202eltr": "\\xe2\\x80\\xaeltr",
    "\x07\r\n\x9b2J": "\\x07\\r\\n\\xc2\\x9b2J",
    "[bold]not markup[/bold]": "[bold]not markup[/bold]",
}


@pytest.fixture(scope="module")
def hostile_model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer has tokens that a terminal obeys, and one of a megabyte."""
    folder = tmp_path_factory.mktemp("hostile") / "evil\x1b[2J"
    shutil.copytree(small / "small-byte-level", folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    names = [*HOSTILE_TOKENS, "m" * 1_000]
    first = 1 + max(
        *document["model"]["vocab"].values(), *(t["id"] for t in document["added_tokens"])
    )
    for i, name in enumerate(names, first):
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        document["added_tokens"].append({**token, "id": i, "content": name, "special": i % 2 == 0})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    for config in folder.glob("config.json"):
        config.unlink()
    return folder


def safe(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and len(text) < 60_000


def test_hostile_tokens_are_shown_safely(
    cli: Cli, small: Path, hostile_model: Path, tmp_path: Path
) -> None:
    models = ["--student-model", hostile_model, "--teacher-model", small / "small.model"]
    built = cli("build", *models, "--output", "map.safetensors")
    assert built.returncode == 0, built.stderr[-500:]
    assert safe(built.stderr)
    commands = (["--num-examples", "2000"], ["--", *HOSTILE_TOKENS])
    shown = [cli("inspect", "map.safetensors", *words) for words in commands]
    assert [done.returncode for done in shown] == [0, 0]
    printed = "".join(done.stdout for done in shown).split("\n")
    lines = "".join(line.strip("│ ") for line in printed)
    assert all(line.isprintable() for line in printed)
    assert "[bold]not markup" in lines
    assert "m" * 1000 not in lines
    assert safe(cli("doctor", hostile_model).stdout)
    assert safe(cli("inspect", "map.safetensors", "\x1b[31m\u202e").stderr)
    assert safe(
        cli("build", *models, "--output", "a.safetensors", "--student-vocab-size", "9").stderr
    )


# --strict


def unspellable(folder: Path) -> Path:
    """A SentencePiece model without byte tokens: it cannot spell most of another's tokens."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("a small text of few letters\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "letters"), vocab_size=16, minloglevel=2
    )
    return folder / "letters.model"


def test_strict_refuses_tokens_that_cannot_be_spelled(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    sides = ["--student-model", small / "small.model", "--teacher-model", unspellable(tmp_path)]
    for command in ("build", "multitoken"):
        done = cli(command, *sides, "--output", "map.safetensors", "--strict")
        fails(done, "letters.model cannot spell", "leave out --strict")
        assert len(re.findall(r"\d+ '.*?'", done.stderr)) == 3
        assert not (tmp_path / "map.safetensors").exists()
        lax = cli(command, *sides, "--output", f"{command}.safetensors")
        assert lax.returncode == 0
        assert "note: letters.model cannot spell" in lax.stderr


def test_strict_refuses_tokens_that_cannot_be_decoded() -> None:
    report = stage_report("multitoken", TINY, [], ["student a: no bytes behind 1 id"])
    failed = dataclasses_replace(TINY, reports=(report,))
    with pytest.raises(XtokError, match="no bytes behind 1 id"):
        StrictOutput(strict=True).require_complete(failed)
    StrictOutput(strict=True).require_complete(TINY)
    StrictOutput().require_complete(failed)
