"""A map built once for all who ask: real processes, killed, stopped, and at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from test_cli import fails, two_files
from test_stages import byte_ranks

import xtok
from xtok import BuildConfig, ProjectionMap, Tokenizer, XtokError, claims
from xtok.claims import newest_claim, once
from xtok.inspection.cache import clear_cache, list_cache
from xtok.stages.map_cache import CachedMap, cached_map

# Loads a tokenizer, then forks processes that all ask for one map. Each build is a line in a log,
# and so is the note of each process that begins to wait. A build sleeps first, as told.
ASKING = """
import os, sys, time
from xtok.maps import file
from xtok.stages import map_cache
from xtok.tokenizers import load_tokenizer
model, cache, log, count, delay = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
tokenizer, build = load_tokenizer(model), map_cache.build
expected = file.sha256(build(tokenizer, tokenizer))
def tell(what):
    with open(log, "a") as file:
        file.write(f"{what} {os.getpid()}\\n")
def slow(*args, **options):
    tell("builds")
    time.sleep(delay)
    return build(*args, **options)
map_cache.build = slow
children = []
for _ in range(count):
    child = os.fork()
    if not child:
        found = map_cache.get_map(
            tokenizer, tokenizer, cache_dir=cache, timeout=120, note=lambda note: tell("waits")
        )
        os._exit(0 if file.sha256(found) == expected else 9)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(*sorted(codes))
"""


class Askers:
    """Groups of processes that ask for the map of a small tokenizer and itself."""

    def __init__(self, small: Path, tmp_path: Path) -> None:
        self.model = small / "small.model"
        self.cache, self.log = tmp_path / "cache", tmp_path / "log"
        self.log.touch()

    def start(self, count: int, *, delay: float = 0) -> subprocess.Popen[str]:
        forks = "ignore::DeprecationWarning"  # Python 3.12 warns of threads, such as NumPy's
        arguments = map(str, (self.model, self.cache, self.log, count, delay))
        return subprocess.Popen(
            [sys.executable, "-W", forks, "-c", ASKING, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self, what: str) -> list[int]:
        """Return the processes that built, or waited."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [int(pid) for word, pid in lines if word == what]

    def until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 100
        while not happened():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    @property
    def cached(self) -> CachedMap:
        tokenizer = xtok.load_tokenizer(self.model)
        return cached_map(tokenizer, tokenizer, BuildConfig(), self.cache)


def exit_codes(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate(timeout=200)
    assert err == ""
    return [int(code) for code in out.split()]


@pytest.fixture
def askers(small: Path, tmp_path: Path) -> Askers:
    return Askers(small, tmp_path)


def built_file(askers: Askers, tmp_path: Path) -> bytes:
    xtok.build(askers.model, askers.model).save(tmp_path / "built.safetensors")
    return (tmp_path / "built.safetensors").read_bytes()


# Many processes


def test_sixteen_processes_build_one_map(askers: Askers, tmp_path: Path) -> None:
    group = askers.start(16, delay=0.5)
    assert exit_codes(group) == [0] * 16
    assert len(askers.told("builds")) == 1
    assert len(askers.told("waits")) == 15
    path = askers.cached.path
    assert path.read_bytes() == built_file(askers, tmp_path)
    assert sorted(file.name for file in path.parent.iterdir()) == [
        path.with_suffix(".json").name,
        path.name,
    ]


def test_a_builder_that_is_killed_is_succeeded_at_once(askers: Askers, tmp_path: Path) -> None:
    doomed = askers.start(1, delay=1000)
    askers.until(lambda: len(askers.told("builds")) == 1)
    others = askers.start(3)
    askers.until(lambda: len(askers.told("waits")) == 3)
    os.kill(askers.told("builds")[0], signal.SIGKILL)
    assert exit_codes(doomed) == [-signal.SIGKILL]
    started = time.monotonic()
    assert exit_codes(others) == [0] * 3
    assert time.monotonic() - started < claims.STALE_AFTER / 2  # its process is known to be gone
    assert len(askers.told("builds")) == 2
    path = askers.cached.path
    assert path.read_bytes() == built_file(askers, tmp_path)
    assert len(list(path.parent.iterdir())) == 2  # no claim is left


def test_killed_at_any_moment(askers: Askers, tmp_path: Path) -> None:
    """Whatever a killed process leaves, the next one gives the right map."""
    expected = built_file(askers, tmp_path)
    for delay in (0.0, 0.01, 0.03, 0.06, 0.1):
        group = askers.start(2)
        askers.until(lambda: len(askers.told("builds")) > 0)
        time.sleep(delay)
        for pid in {*askers.told("builds"), *askers.told("waits")}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        group.communicate(timeout=100)
        askers.log.write_text("")
        xtok.get_map(askers.model, askers.model, cache_dir=askers.cache)
        assert askers.cached.path.read_bytes() == expected
        clear_cache(askers.cache)
        assert list_cache(askers.cache).files == ()


def test_a_builder_that_is_stopped_is_succeeded_and_does_no_harm(
    askers: Askers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another host whose process is gone: only its silence tells."""
    monkeypatch.setattr(claims, "STALE_AFTER", 1.0)
    sleeper = askers.start(1, delay=1)
    askers.until(lambda: len(askers.told("builds")) == 1)
    [pid] = askers.told("builds")
    os.kill(pid, signal.SIGSTOP)
    path = askers.cached.path
    try:
        found = xtok.get_map(askers.model, askers.model, cache_dir=askers.cache, timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.reports[-1].counts == {"map built for the cache": 1}
    assert exit_codes(sleeper) == [0]
    assert path.read_bytes() == built_file(askers, tmp_path)
    assert len(list(path.parent.iterdir())) == 2


# Claims


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "result.bin"


def make_claim(target: Path, *, age: float = 0, number: int = 0, text: str | None = None) -> Path:
    holder = {"host": "node7", "machine": "node7 of another boot", "pid": 1234}
    claim = target.with_name(f"{target.stem}.claim-{number}")
    claim.write_text(json.dumps(holder) if text is None else text)
    touched = claim.stat().st_mtime - age
    os.utime(claim, (touched, touched))
    return claim


def found_or_made(target: Path, timeout: float = 0.2, **options: Any) -> str:
    def find() -> str | None:
        return "found" if target.exists() else None

    def make() -> str:
        target.touch()
        return "made"

    return once(target, find, make, timeout=timeout, **options)


def test_the_first_makes_it_and_the_next_find_it(target: Path) -> None:
    assert found_or_made(target) == "made"
    assert found_or_made(target) == "found"
    assert [path.name for path in target.parent.iterdir()] == ["result.bin"]


def test_a_holder_on_another_host_is_waited_for(target: Path) -> None:
    claim = make_claim(target, age=claims.STALE_AFTER - 20)
    notes: list[str] = []
    with pytest.raises(XtokError) as caught:
        found_or_made(target, note=notes.append)
    assert caught.value.message == (
        f"waited 0.2 seconds for process 1234 on node7, which makes {target}"
    )
    assert caught.value.hint == (
        f"if that process is gone, remove {claim}; else wait longer with timeout="
    )
    assert notes == [f"waiting for process 1234 on node7, which makes {target}"]
    assert claim.exists()


def test_a_claim_that_nobody_touches_is_succeeded(target: Path) -> None:
    for number in range(3):  # two who succeeded the first are gone, too
        make_claim(target, age=claims.STALE_AFTER + 5, number=number)
    assert newest_claim(target) is not None
    assert found_or_made(target) == "made"
    assert [path.name for path in target.parent.iterdir()] == ["result.bin"]


def test_the_clock_of_this_host_does_not_matter(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_claim(target)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86_400)
    with pytest.raises(XtokError, match="waited"):
        found_or_made(target)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_claim_that_is_not_written_counts_until_it_is_old(target: Path, text: str) -> None:
    make_claim(target, text=text)
    with pytest.raises(XtokError, match=r"waited 0\.2 seconds for a process that just began"):
        found_or_made(target)
    make_claim(target, text=text, age=claims.STALE_AFTER + 5)
    assert found_or_made(target) == "made"


def test_a_failure_is_no_claim(target: Path) -> None:
    def fail() -> str:
        raise KeyError("no")

    with pytest.raises(KeyError):
        once(target, lambda: None, fail, timeout=0)
    assert list(target.parent.iterdir()) == []
    assert found_or_made(target) == "made"


def test_a_holder_touches_its_claim(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT", 0.02)

    def make() -> float:
        claim = newest_claim(target)
        assert claim is not None
        end = time.monotonic() + 60
        while (now := newest_claim(target)) is not None and now.touched == claim.touched:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (claim.pid, claim.is_gone(), claim.is_silent()) == (os.getpid(), False, False)
        return 1.0

    assert once(target, lambda: None, make, timeout=0) == 1.0


def test_threads_of_one_process_make_it_once(target: Path) -> None:
    made: list[str] = []

    def ask() -> None:
        made.append(found_or_made(target, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == ["found"] * 7 + ["made"]


def test_a_claim_that_somebody_removed_is_not_taken_from_its_next_holder(target: Path) -> None:
    def make() -> str:
        make_claim(target)  # removed by hand, and claimed by another process
        return "made"

    assert once(target, lambda: None, make, timeout=0) == "made"
    assert (target.parent / "result.claim-0").exists()


# The map


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Tokenizer, Tokenizer]:
    student = byte_ranks(tmp_path / "student.tiktoken", "th", "the", " the", "20", "201")
    return student, byte_ranks(tmp_path / "teacher.tiktoken", "th", " th", " the", width=260)


def test_get_map_is_build(sides: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    for number, loss in enumerate((None, "p-kl", "gold")):
        config = BuildConfig() if loss is None else BuildConfig.for_loss(loss)  # type: ignore[arg-type]
        cache, expected = tmp_path / "cache", tmp_path / "expected.safetensors"
        xtok.build(*sides, config).save(expected)
        maps = [
            xtok.get_map(*sides, for_loss=loss, cache_dir=cache),  # type: ignore[arg-type]
            xtok.get_map(*sides, config, cache_dir=cache),
        ]
        for projection in maps:
            projection.save(tmp_path / "found.safetensors")
            assert (tmp_path / "found.safetensors").read_bytes() == expected.read_bytes()
        assert cached_map(*sides, config, cache).path.read_bytes() == expected.read_bytes()
        assert len(list_cache(cache).files) == number + 1
        # What the build reported, whoever asks.
        assert maps[0].reports[:-1] == maps[1].reports[:-1] == xtok.build(*sides, config).reports
        assert [m.reports[-1].counts for m in maps] == [
            {"map built for the cache": 1},
            {"map found in the cache": 1},
        ]


def test_whatever_the_file_depends_on_is_in_its_name(
    sides: tuple[Tokenizer, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = sides

    def path(one: Tokenizer, other: Tokenizer, **options: Any) -> Path:
        return cached_map(one, other, BuildConfig(**options), tmp_path).path

    paths = {path(student, teacher), path(teacher, student), path(student, teacher, top_k=8)}
    wider = xtok.load_tokenizer(tmp_path / "teacher.tiktoken", vocab_size=270, pattern=".")
    paths.add(path(student, wider))
    (tmp_path / "other").mkdir()
    tokens = "th", "the", " the", "20", "201"
    splits = byte_ranks(tmp_path / "other" / "student.tiktoken", *tokens, digits=1)
    assert splits.table.sha256() == student.table.sha256()  # the same tokens, and name
    paths.add(path(splits, teacher))
    again = byte_ranks(tmp_path / "other" / "student.tiktoken", *tokens)
    assert path(again, teacher) == path(student, teacher)
    monkeypatch.setattr("xtok.stages.map_cache.__version__", "9.9.9")
    paths.add(path(student, teacher))
    assert len(paths) == 6


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the data of a tensor: still a whole file of the format
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_digest(path: Path) -> None:
    entry = path.with_suffix(".json")
    entry.write_text(entry.read_text().replace('"sha256": "', '"sha256": "0'))


def no_json(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def other_json(path: Path) -> None:
    path.with_suffix(".json").write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "its sha256 is another"),
        (cut, "its sha256 is another"),
        (other_digest, "its sha256 is another"),
        (no_json, "Expecting property name"),
        (other_json, "json is not xtok's"),
        (lambda path: path.unlink(), None),
        (lambda path: path.with_suffix(".json").unlink(), None),
    ],
)
def test_a_damaged_map_is_built_again(
    sides: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    damage: Callable[[Path], None],
    problem: str | None,
) -> None:
    xtok.get_map(*sides, cache_dir=tmp_path / "cache")
    path = cached_map(*sides, BuildConfig(), tmp_path / "cache").path
    before = path.read_bytes()
    damage(path)
    projection = xtok.get_map(*sides, cache_dir=tmp_path / "cache")
    report = projection.reports[-1]
    assert report.counts == {"map built for the cache": 1}
    if problem is None:
        assert report.notes == ()
    else:
        [note] = report.notes
        assert note.startswith(f"the cached map {path} is damaged (")
        assert note.endswith("), and was built again")
        assert problem in note
    assert path.read_bytes() == before
    found = xtok.get_map(*sides, cache_dir=tmp_path / "cache")
    assert found.reports[-1].counts == {"map found in the cache": 1}


def test_mistakes_of_a_caller(sides: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give config or for_loss, not both"):
        xtok.get_map(*sides, BuildConfig(), for_loss="gold", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="loss is 'kl'"):
        xtok.get_map(*sides, for_loss="kl", cache_dir=tmp_path)  # type: ignore[arg-type]
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a number of seconds"):
            xtok.get_map(*sides, timeout=timeout, cache_dir=tmp_path)


def test_a_folder_that_cannot_be_used(sides: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(XtokError) as caught:
        xtok.get_map(*sides, cache_dir=tmp_path / "file")
    assert caught.value.message == (
        f"the map cannot be kept in the cache {tmp_path / 'file' / 'maps'}: Not a directory"
    )
    assert caught.value.parameter == "cache_dir"
    assert "XTOK_CACHE_DIR" in caught.value.hint


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this machine reaches, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# Asks for a map that is there, and for one that is not, as a user whom permissions concern.
AS_NOBODY = """
import os, sys
import xtok
from xtok.maps import file
folder, other = sys.argv[1:]
bytes_ = xtok.load_tokenizer("bytes")
for _ in range(2):  # imports what that user may not be able to read
    expected = file.sha256(xtok.get_map(bytes_, bytes_, cache_dir=other))
if os.geteuid() == 0:
    os.setuid(65534)
assert file.sha256(xtok.get_map(bytes_, bytes_, cache_dir=folder)) == expected
try:
    xtok.get_map(bytes_, bytes_, xtok.BuildConfig(top_k=3), cache_dir=folder)
except xtok.XtokError as error:
    print(error.message)
"""


def test_a_read_only_cache_gives_what_it_has(open_folder: Path, tmp_path: Path) -> None:
    xtok.get_map("bytes", "bytes", cache_dir=open_folder)
    maps = open_folder / "maps"
    maps.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(open_folder), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        maps.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the map cannot be kept in the cache {maps}: Permission denied\n"


# The commands


def test_build_takes_a_map_from_the_cache(cli: Cli, small: Path, tmp_path: Path) -> None:
    env = {"XTOK_CACHE_DIR": str(tmp_path / "cache")}
    plain = cli("build", *two_files(small), "-o", "plain.safetensors", "-q")
    assert plain.returncode == 0
    built = cli("build", *two_files(small), "--cache", env=env)
    found = cli("build", *two_files(small), "--cache", env=env)
    assert built.returncode == found.returncode == 0
    assert built.stdout == found.stdout
    path = Path(built.stdout.removesuffix("\n"))
    assert path.parent == tmp_path / "cache" / "maps"
    assert path.read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    assert built.stderr.endswith("cache: 1 map built for the cache\n")
    assert found.stderr == built.stderr.replace("built for the", "found in the")
    copied = cli("build", *two_files(small), "--cache", "-o", "map.pt", "--quiet", env=env)
    assert (copied.returncode, copied.stdout, copied.stderr) == (0, "map.pt\n", "")
    again = ProjectionMap.load(tmp_path / "map.pt")
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == [
        "again.safetensors", "cache", "map.pt", "plain.safetensors"
    ]  # fmt: skip


def test_build_waits_no_longer_than_told(cli: Cli, small: Path, tmp_path: Path) -> None:
    args = ["build", *two_files(small), "--cache", "--cache-dir", "cache"]
    path = tmp_path / cli(*args).stdout.removesuffix("\n")
    path.with_suffix(".json").unlink()
    claim = make_claim(path)
    done = cli(*args, "--cache-timeout", "0.5")
    fails(
        done,
        "waited 0.5 seconds for process 1234 on node7, which makes cache/maps/",
        f"remove cache/maps/{claim.name}; else wait longer with --cache-timeout",
    )
    assert "note: waiting for process 1234 on node7" in done.stderr


def test_build_with_a_full_cache(small: Path, tmp_path: Path) -> None:
    """The system's own limit on a file's size stands for the disk."""
    done = subprocess.run(
        [sys.executable, "-m", "xtok", "build", *two_files(small), "--cache", "--cache-dir", "c"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )
    fails(done, "the map cannot be kept in the cache c/maps: ", "folder that can be written to")
    assert "File too large" in done.stderr
    assert "with --cache-dir, or in XTOK_CACHE_DIR" in done.stderr
    assert list((tmp_path / "c" / "maps").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cache-dir", "x"], "--cache-dir goes with --cache"),
        (["--cache-timeout", "5"], "--cache-timeout goes with --cache"),
        (["--cache", "--text", "x"], "--text does not go with --cache"),
        (["--cache", "--dry-run"], "--dry-run does not go with --cache"),
        (["--cache", "--skip-existing"], "--skip-existing does not go with --cache"),
    ],
)
def test_options_that_do_not_go_together(cli: Cli, args: list[str], message: str) -> None:
    done = cli("build", "bytes", "bytes", *args)
    assert done.returncode == 2
    assert message in done.stderr


def test_list_and_clear(cli: Cli, small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    env = {"XTOK_CACHE_DIR": str(cache)}
    empty = cli("cache", env=env)
    assert (empty.returncode, empty.stdout) == (0, f"{cache}: 0 files, 0.0 MB\n")
    for loss in ("p-kl", "gold"):
        cli("build", *two_files(small), "--cache", "--for", loss, env=env)
    maps = cache / "maps"
    leftover = maps / f".{'0' * 64}.safetensors.0123456789ab.tmp"
    leftover.write_bytes(b"half")
    in_use = maps / f"{'1' * 64}.claim-0"
    make_claim(maps / f"{'1' * 64}.safetensors")
    strangers = [cache / "notes.txt", maps / "my.safetensors"]
    for path in strangers:
        path.write_text("mine")
    listed = cli("cache", "list", env=env)
    assert listed.returncode == 0
    assert listed.stdout.startswith(f"{cache}: 4 files, ")
    assert max(map(len, listed.stdout.splitlines()[1:])) <= 80
    assert listed.stdout.count("│ map") == 2
    files = json.loads(cli("cache", "--json", env=env).stdout)["files"]
    name = "small_to_small_top8_no-scale-trick_weights-prior"
    assert [(file["kind"], file["name"]) for file in files] == [
        ("map", name),
        ("map", f"{name}_target-both_no-exact-match"),
        ("in use", in_use.name),
        ("leftover", leftover.name),
    ]
    sizes = [Path(file["path"]).stat().st_size for file in files[:2]]
    assert [file["num_bytes"] > size for file, size in zip(files, sizes, strict=False)] == [
        True
    ] * 2
    cleared = cli("cache", "clear", env=env)
    assert cleared.stdout.startswith(f"{cache}: 3 files, ")
    assert " removed\n" in cleared.stdout
    left = {path for path in cache.rglob("*") if path.is_file()}
    assert left == {*strangers, in_use}
    assert cli("cache", "empty").returncode == 2


def test_embeddings_are_listed_too(tmp_path: Path) -> None:
    import numpy as np

    from xtok.embeddings.cache import Cache

    key = {"kind": "sentence", "model": "org/model"}
    Cache(tmp_path).put(key, np.zeros((2, 3), np.float32))
    (tmp_path / f"{'a' * 64}.safetensors").write_bytes(b"no")
    files = list_cache(tmp_path).files
    assert [(file.kind, file.name) for file in files] == [
        ("embeddings", "damaged"),
        ("embeddings", "sentence:org/model"),
    ]
    assert clear_cache(tmp_path).files == files
    assert list(tmp_path.iterdir()) == []
