"""A map file that many processes request: kept and built once, also after kills and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_type

import pytest
from checks import fails, works
from command_lines import two_files
from conftest import ROOT, Cli
from forked import Forks
from make_maps import equal_maps
from make_tokenizers import byte_ranks

import xtok
from xtok import BuildConfig, ProjectionMap, Tokenizer
from xtok.building.build import build
from xtok.errors import OutputError
from xtok.maps.file import sha256, to_safetensors
from xtok.maps.provenance import difference, make_recipe
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.pairs import Pair

pytestmark = pytest.mark.usefixtures("few_synthetic_texts")

# Loads a tokenizer, then forks processes that all ask for one map. A log has a line for each event:
# a process "builds", "writes" (all bytes are written), "replaced" the map's file, or prints a note.
# A process sleeps for `delay` after the event `pause`. Children are reaped at the end.
REQUESTS = """
import os, sys, time
from pathlib import Path
from xtok.maps import file
from xtok.building import build as stage
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.pairs import Pair
model, path, log, count = *sys.argv[1:4], int(sys.argv[4])
delay, timeout = map(float, sys.argv[5:7])
pause = sys.argv[7]
tokenizer, find_matches = load_tokenizer(model), stage.find_matches
expected = file.sha256(stage.build(tokenizer, tokenizer))
def log_event(event):
    with open(log, "a") as file:
        file.write(f"{event.split()[0]} {os.getpid()}\\n")
    if event == pause:
        time.sleep(delay)
def logged_matches(*args, **options):
    log_event("builds")
    return find_matches(*args, **options)
stage.find_matches = logged_matches  # called at the beginning of each build
replace = Path.replace
def logged_replace(self, target):
    log_event("writes")
    replace(self, target)
    log_event("replaced")
    return target
Path.replace = logged_replace
children = []
for _ in range(count):
    child = os.fork()
    if not child:
        map_path = stage.get_map(tokenizer, tokenizer, path=path, timeout=timeout, note=log_event)
        os._exit(0 if file.sha256(map_path) == expected else 9)
    children.append(child)
sys.stdin.read()
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(*sorted(codes))
"""


class MapRequests:
    """Groups of processes that ask for the map of a small tokenizer and itself."""

    def __init__(self, small: Path, folder: Path, forks: Forks) -> None:
        self.forks, self.model = forks, small / "small.model"
        self.path, self.log = folder / "maps" / "map.safetensors", folder / "log"
        self.log.touch()

    def start(
        self, count: int, *, delay: float = 0, timeout: float = 120, reap: bool = True,
        pause: str = "builds",
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start a group of processes; without `reap`, `exit_codes` reaps them."""
        arguments = map(str, (self.model, self.path, self.log, count, delay, timeout, pause))
        return subprocess.Popen(
            [self.forks.folder / "python", "-c", REQUESTS, *arguments],
            env=self.forks.env,
            stdin=subprocess.DEVNULL if reap else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, event: str) -> list[int]:
        """Return the processes that logged an event."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [int(pid) for word, pid in lines if word == event]

    def until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 100
        while not happened():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def wrote_the_map(self) -> bool:
        """Return whether the file contains the map that `build` makes."""
        return self.path.read_bytes() == to_safetensors(xtok.build(self.model, self.model))

    def left_nothing_else(self) -> bool:
        return os.listdir(self.path.parent) == [self.path.name]


def exit_codes(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate(timeout=200)
    assert err == ""
    return [int(code) for code in out.split()]


@pytest.fixture
def requests(small: Path, tmp_path: Path, forks: Forks) -> MapRequests:
    return MapRequests(small, tmp_path, forks)


# Many processes


def test_sixteen_processes_build_a_map_once(requests: MapRequests) -> None:
    group = requests.start(16, delay=0.5)
    assert exit_codes(group) == [0] * 16
    assert len(requests.pids("builds")) == 1
    assert requests.pids("waiting")  # a late process reads the finished file
    assert requests.wrote_the_map()
    assert requests.left_nothing_else()


def test_another_process_builds_if_the_builder_is_killed(requests: MapRequests) -> None:
    """A new process does not wait until the killed one is reaped: a zombie holds no lock."""
    doomed = requests.start(1, delay=1000, reap=False)
    requests.until(lambda: len(requests.pids("builds")) == 1)
    others = requests.start(3)
    requests.until(lambda: len(requests.pids("waiting")) == 3)
    [pid] = requests.pids("builds")
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    assert exit_codes(others) == [0] * 3
    assert time.monotonic() - started < 60  # the timeout is 120 seconds
    assert "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert exit_codes(doomed) == [-signal.SIGKILL]
    assert len(requests.pids("builds")) == 2
    assert requests.wrote_the_map()
    assert requests.left_nothing_else()


@pytest.mark.parametrize("moment", ["builds", "writes", "replaced"])
def test_a_builder_killed_at_any_moment_leaves_the_right_map(
    requests: MapRequests, moment: str
) -> None:
    """After kills of the builder and of a waiting process, the next process gets the map."""
    builder = requests.start(1, delay=1000, pause=moment)
    requests.until(lambda: len(requests.pids(moment)) == 1)
    waiting = requests.start(1)
    if moment == "replaced":  # a late process reads the finished file
        assert exit_codes(waiting) == [0]
    else:
        requests.until(lambda: len(requests.pids("waiting")) == 1)
        [pid] = requests.pids("waiting")
        os.kill(pid, signal.SIGKILL)
        assert exit_codes(waiting) == [-signal.SIGKILL]
    [pid] = requests.pids("builds")
    os.kill(pid, signal.SIGKILL)
    assert exit_codes(builder) == [-signal.SIGKILL]
    assert requests.path.exists() == (moment == "replaced")
    xtok.get_map(requests.model, requests.model, path=requests.path)
    assert requests.wrote_the_map()


def test_a_builder_that_is_stopped_is_not_waited_for_without_end(requests: MapRequests) -> None:
    sleeper = requests.start(1, delay=1)
    requests.until(lambda: len(requests.pids("builds")) == 1)
    [pid] = requests.pids("builds")
    os.kill(pid, signal.SIGSTOP)
    notes: list[str] = []
    options: Any = {"path": requests.path, "timeout": 1, "note": notes.append}
    try:
        projection = xtok.get_map(requests.model, requests.model, **options)
        assert equal_maps(ProjectionMap.load(requests.path), projection)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [note.split()[0] for note in notes] == ["waiting", "waited"]
    assert projection.reports[-1].stage == "build"
    assert exit_codes(sleeper) == [0]
    assert requests.wrote_the_map()
    assert requests.left_nothing_else()


# The lock


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock, the map is built, and its file is complete."""

    def refuse(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    notes: list[str] = []
    xtok.get_map("bytes", "bytes", path=tmp_path / "map.pt", note=notes.append)
    assert ["does not support locks" in note for note in notes] == [True]
    assert ProjectionMap.load(tmp_path / "map.pt").nnz == 256


# The map


Sides = tuple[Tokenizer, Tokenizer]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    student = byte_ranks(tmp_path / "student.tiktoken", "th", "the", " the", "20", "201")
    return student, byte_ranks(tmp_path / "teacher.tiktoken", "th", " th", " the", width=260)


@pytest.mark.parametrize("loss", [None, "p-kl", "gold"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_get_map_is_build(sides: Sides, tmp_path: Path, loss: Any, suffix: str) -> None:
    config = BuildConfig() if loss is None else BuildConfig.for_loss(loss)
    path = tmp_path / f"map{suffix}"
    expected = xtok.build(*sides, config)
    built = xtok.get_map(*sides, for_loss=loss, path=path)
    inode = path.stat().st_ino
    kept = xtok.get_map(*sides, config, path=str(path))
    assert path.stat().st_ino == inode
    assert equal_maps(built, expected)
    assert equal_maps(kept, expected)
    assert equal_maps(xtok.build(*sides, for_loss=loss), expected)
    assert [report.stage for report in built.reports] == ["build"]


CONFIGS = [
    BuildConfig(),
    BuildConfig(exact_match=False, top_k=8),
    BuildConfig(prep_top_k=3, top_k=2, scale_trick=False),
    BuildConfig(special_tokens="fuzzy", canonicalization="relaxed", ignore_student_ids=(5, 7)),
    BuildConfig.for_loss("p-kl"),
    BuildConfig.for_loss("gold"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_map_differs_only_for_other_options(
    pieces_to_digits: Pair, tmp_path: Path, config: BuildConfig
) -> None:
    path = tmp_path / "map.safetensors"
    build(pieces_to_digits, config=config).save(path)
    projection = ProjectionMap.load(path)
    for other in CONFIGS:
        assert (difference(projection, pieces_to_digits, make_recipe(other)) is None) == (
            other == config
        )


@pytest.fixture(scope="module")
def pieces_to_digits(sentencepiece: Tokenizer, digits: Tokenizer) -> Pair:
    return xtok.load_pair(sentencepiece, digits)


def test_how_a_map_differs(small: Path, pieces_to_digits: Pair) -> None:
    sentencepiece, digits = pieces_to_digits.tokenizers
    built = build(pieces_to_digits)
    wide = load_tokenizer(str(small / "small.model"), vocab_size=2000)
    byte = load_tokenizer(str(small / "small-byte-level"), vocab_size=3000)
    narrow = xtok.build(sentencepiece, load_tokenizer(str(small / "small-digits"), vocab_size=3000))
    usual, gold = BuildConfig(), BuildConfig.for_loss("gold", top_k=4)
    to_bytes, bare = xtok.load_pair(sentencepiece, byte), replace(built, recipe={})
    for projection, other_pair, config, why in (
        (built, pieces_to_digits, BuildConfig(top_k=8), "the map's top_k is 4, not 8"),
        (
            built,
            pieces_to_digits,
            BuildConfig(exact_match=False),
            "the map's exact_match is True, not False",
        ),
        (built, pieces_to_digits, gold, "the map's scale_trick is True, not False"),
        (built, xtok.load_pair(wide, digits), usual, "the map's student has width 1000, not 2000"),
        (
            narrow,
            to_bytes,
            usual,
            "the map's teacher small-digits has other tokens than small-byte-level",
        ),
        (bare, pieces_to_digits, usual, "the map's top_k is None, not 4"),
    ):
        assert difference(projection, other_pair, make_recipe(config)) == why


def test_a_map_that_was_changed_has_no_recipe(pieces_to_digits: Pair, tmp_path: Path) -> None:
    """A map of an earlier version lacks both, so `get_map` builds it again."""
    built, usual = build(pieces_to_digits), make_recipe(BuildConfig())
    assert built.recipe == usual
    spelled = xtok.multitoken(pieces_to_digits)
    assert xtok.sort_cut(xtok.reapply_exact(spelled)).recipe == usual
    saved = tmp_path / "saved.safetensors"
    built.save(saved)
    others = [
        xtok.sort_cut(built, xtok.SortCutConfig(top_k=4)),
        xtok.reapply_exact(xtok.sort_cut(spelled)),
        xtok.reapply_exact(spelled, special_tokens="off"),
        xtok.multitoken(pieces_to_digits, initial=spelled),
        xtok.ProjectionModule(built, learnable=True).to_map(),
        ProjectionMap.load(saved, preserve_last=False),
    ]
    assert [changed.recipe for changed in others] == [None] * 6
    why = "the map has no recipe, because an earlier version or another command made it"
    assert difference(others[0], pieces_to_digits, usual) == why


def test_a_map_that_was_counted_on_other_text(pieces_to_digits: Pair, tmp_path: Path) -> None:
    text, config = tmp_path / "a.txt", BuildConfig()
    text.write_text("one two three\n" * 40)
    initial = xtok.multitoken(pieces_to_digits)
    built = build(pieces_to_digits, config=config, texts=[text], initial=initial)

    def differs(
        config: BuildConfig, initial: ProjectionMap | None, texts: Sequence[Path] = (text,)
    ) -> str | None:
        recipe = build(pieces_to_digits, config=config, texts=texts, initial=initial).recipe
        return difference(built, pieces_to_digits, recipe)

    synthetic = BuildConfig(weights="synthetic", scale_trick=False)
    assert differs(config, initial) is None
    assert differs(synthetic, None, ()) == "the map was counted on other text"
    assert differs(config, None) == "the map was counted with another initial map"
    assert differs(config, built) == "the map was counted with another initial map"
    assert differs(BuildConfig(top_k=3), initial) == "the map's top_k is 4, not 3"
    text.write_text("one two threE\n" * 40)  # of the same size
    assert differs(config, initial) == "the map was counted on other text"


def test_another_field_is_another_map(pieces_to_digits: Pair, tmp_path: Path) -> None:
    path, text = tmp_path / "map.safetensors", tmp_path / "a.jsonl"
    text.write_text('{"a": "one two three four five", "b": "six"}\n' * 40)
    get = partial(xtok.get_map, *pieces_to_digits.tokenizers, path=path, texts=text)
    notes: list[str] = []
    projections = [get(field=field, note=notes.append) for field in ("a", "b", "b")]
    sizes = [m.history[1]["counted"]["num_bytes"] for m in projections]
    assert sizes == [40 * 23, 40 * 3, 40 * 3]
    why = "the map was counted on another field"
    assert notes == [f"{path} exists, and is replaced: {why}", f"{path} exists, and is kept"]


@pytest.mark.parametrize("size", [0, 100, -100])
def test_a_damaged_map_is_built_again(sides: Sides, tmp_path: Path, size: int) -> None:
    path = tmp_path / "map.safetensors"
    xtok.get_map(*sides, path=path)
    before = path.read_bytes()
    path.write_bytes(before[:size])
    notes: list[str] = []
    projection = xtok.get_map(*sides, path=path, note=notes.append)
    assert path.read_bytes() == before
    assert len(projection.reports) == 1
    assert ["is replaced" in note for note in notes] == [True]


def test_invalid_arguments_are_errors_before_models_are_loaded(
    sides: Sides, tmp_path: Path
) -> None:
    functions: tuple[Any, ...] = (xtok.get_map, xtok.build)
    for function in functions:
        # the error comes before the models are loaded
        with pytest.raises(ValueError, match="not both"):
            function("no/model", "no/model", BuildConfig(), for_loss="gold")
        with pytest.raises(ValueError, match="loss is 'kl'"):
            function(*sides, for_loss="kl")
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            xtok.get_map(*sides, timeout=timeout, path=tmp_path / "map.pt")
    path = tmp_path / "map.safetensors"
    made = xtok.get_map(*sides, path=path)
    for function in (xtok.build, partial(xtok.get_map, path=path)):  # the file exists
        with pytest.raises(ValueError, match="'initial' requires 'texts'"):
            function(*sides, initial=made)
        with pytest.raises(ValueError, match="requires weights='synthetic'"):
            function(*sides, BuildConfig(target="both"))


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_output_is_checked_before_the_map_is_built(tmp_path: Path, rebuild: bool) -> None:
    def progress(*_: Any, **__: Any) -> Any:
        raise AssertionError("the build began")

    for name, problem in [("map.json", "does not end in"), ("", "is a folder")]:
        with pytest.raises(OutputError, match=problem):
            xtok.get_map(
                "bytes", "null:5", path=tmp_path / name, rebuild=rebuild, progress=progress
            )
    assert not [*tmp_path.iterdir()]


# The command


def test_build_keeps_the_same_map(cli: Cli, small: Path, tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    args = ["build", *two_files(small), "-o", "maps", "--skip-existing"]
    path = tmp_path / "maps" / "small_to_small_top4.safetensors"
    built, kept = works(cli(*args)), works(cli(*args))
    assert built.stdout == kept.stdout == f"maps/{path.name}\n"
    assert "is kept" in kept.stderr
    replaced = works(cli(*args[:-2], str(path), "--skip-existing", "--top-k", "3", "-q"))
    assert replaced.stderr == ""
    assert ProjectionMap.load(path).top_k == 3
    assert os.listdir(path.parent) == [path.name]


# The job script


def run_script(folder: Path, *arguments: str, task: str = "") -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    env |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SLURM_ARRAY_TASK_ID": task}
    command = ["bash", str(ROOT / "scripts" / "examples" / "slurm_build.sh"), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_task_of_the_job_builds_its_line(small: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.txt"
    pairs.write_text(f"bytes bytes\n{small / 'small.model'}\tbytes\nnone.model bytes\n\n")
    arguments = "pairs.txt", "maps", "--top-k", "3"
    result = [run_script(tmp_path, *arguments, task="2") for _ in range(2)]
    expected = (0, "maps/small_to_bytes_top3.safetensors\n")
    assert [(d.returncode, d.stdout) for d in result] == [expected] * 2
    assert "is kept" in result[1].stderr
    for task, culprit in (
        ("3", "none.model"), ("4", "line 4"), ("5", "line 5"), ("0", "array"), ("", "array")
    ):  # fmt: skip
        fails(run_script(tmp_path, *arguments, task=task), culprit)
    fails(run_script(tmp_path), "the list of pairs or the folder is missing", "--array=1-N")
    fails(run_script(tmp_path, "none.txt", "maps", task="1"), "none.txt cannot be read", "")


def test_without_a_path_a_map_is_kept_in_the_cache(
    pieces_to_digits: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is the call that a loss recommends; other options or texts give another file."""
    monkeypatch.setenv("XTOK_CACHE_DIR", str(tmp_path / "cache"))
    text = tmp_path / "a.txt"
    text.write_text("one two three\n" * 40)
    calls: list[dict[str, Any]] = [
        {"for_loss": "p-kl"}, {"for_loss": "p-kl"}, {},
        {"texts": text},
    ]  # fmt: skip
    maps = [xtok.get_map(*pieces_to_digits.tokenizers, **options) for options in calls]
    assert len(list((tmp_path / "cache" / "maps").glob("*.safetensors"))) == 3
    # the second call reads the cached map
    assert [bool(m.reports) for m in maps] == [True, False, True, True]
    built = [xtok.build(*pieces_to_digits.tokenizers, **options) for options in calls]
    assert [*map(sha256, maps)] == [*map(sha256, built)]


@pytest.mark.parametrize("folder", ["/proc/nowhere", "file"])
def test_a_cache_that_cannot_be_written_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output was given, so the error names the cache folder and its environment variable."""
    (tmp_path / "file").touch()
    cache = tmp_path / folder
    monkeypatch.setenv("XTOK_CACHE_DIR", str(cache))
    with pytest.raises(OutputError, match=f"cache folder {cache}") as caught:
        xtok.get_map("bytes", "bytes")
    assert "XTOK_CACHE_DIR" in caught.value.hint


# Event maps and spelling maps


@pytest.mark.parametrize("loss", ["event-kl", "csd"])
def test_event_maps_are_reused(
    cli: Cli, small: Path, tmp_path: Path, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTOK_CACHE_DIR", str(tmp_path / "cache"))
    ours, theirs = small / "small-digits", small / "small.model"
    path, notes = tmp_path / "e.safetensors", list[str]()
    first = xtok.get_map(ours, theirs, for_loss=loss, path=path, note=notes.append)
    make = xtok.spellings if loss == "csd" else xtok.events
    assert sha256(first) == sha256(make(ours, theirs))
    before = path.read_bytes()
    kept = xtok.get_map(ours, theirs, for_loss=loss.replace("-", "_"), path=path, note=notes.append)
    assert (sha256(kept), path.read_bytes(), kept.reports) == (sha256(first), before, ())
    assert notes == [f"{path} exists, and is kept"]
    other = cli("events", theirs, ours, "--for", loss, "-o", path, "--skip-existing")
    assert f"{path} exists, and is replaced: the map's student has width" in other.stderr
    assert path.read_bytes() != before
    xtok.get_map(ours, theirs, for_loss=loss)
    [cached] = (tmp_path / "cache" / "maps").glob("*.safetensors")
    assert cached.read_bytes() == before
    with pytest.raises(ValueError, match=f"{loss}.*config"):
        xtok.get_map(ours, theirs, xtok.BuildConfig(), for_loss=loss)


def test_events_replace_a_map_of_another_kind(cli: Cli, tmp_path: Path) -> None:
    xtok.build("bytes", "bytes").save(tmp_path / "m.safetensors")
    notes: list[str] = []
    options: Any = {"for_loss": "event-kl", "path": tmp_path / "m.safetensors"}
    projection = xtok.get_map("bytes", "bytes", **options, note=notes.append)
    assert isinstance(projection, xtok.EventMap)
    assert "not an event map" in notes[0]
    line = "events", "bytes", "bytes", "--for", "csd", "-o", "s.pt", "--skip-existing"
    assert cli(*line).stdout == cli(*line).stdout == "s.pt\ns.reverse.pt\n"
    assert "s.pt exists, and is replaced" in cli(*line).stderr


def test_unknown_options_are_errors() -> None:
    options: Any = {"rebuilt": True}
    with pytest.raises(TypeError, match="rebuilt"):
        xtok.get_map("bytes", "bytes", **options)


def test_type_checkers_know_the_class(tmp_path: Path) -> None:
    """Mypy checks this."""
    path = tmp_path / "m.safetensors"
    assert_type(xtok.get_map("bytes", "bytes", path=path), xtok.ProjectionMap)
    assert_type(xtok.get_map("bytes", "bytes", path=path, for_loss="gold"), xtok.ProjectionMap)
    assert_type(xtok.get_map("bytes", "bytes", path=path, for_loss="event-kl"), xtok.EventMap)
    assert_type(xtok.get_map("bytes", "bytes", path=path, for_loss="csd"), xtok.SpellingMap)


def test_get_map_rebuilds_and_is_strict_on_request(tmp_path: Path) -> None:
    path, notes = tmp_path / "m.safetensors", list[str]()
    with pytest.raises(xtok.XtokError, match="null:5 cannot spell"):
        xtok.get_map("bytes", "null:5", path=path, strict=True)
    assert not path.exists()
    maps = [
        xtok.get_map("bytes", "null:5", path=path, rebuild=again, note=notes.append)
        for again in (False, False, True)
    ]
    assert [bool(m.reports) for m in maps] == [True, False, True]
    assert notes == [f"{path} exists, and is kept"]
