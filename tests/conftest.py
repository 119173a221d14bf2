"""Fixtures: small tokenizers of every kind, fetched real tokenizers, and the command line."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

# The models of tests are too small for PyTorch's threads, and two processes run tests. If a test
# requests threads, a waiting thread must not use a core. PyTorch reads both variables on import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hub_folders
import projected_caches
import pytest
import small_tokenizers
import stored_teachers
from command_lines import write_documents
from forked import Forks
from hypothesis import HealthCheck, settings
from make_maps import built

import xtok
from xtok import TokenAligner
from xtok.building.counting import synthetic
from xtok.config import BACK_MAP
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair

if TYPE_CHECKING:
    from running_servers import ServePair

ROOT = Path(__file__).parents[1]
REAL = ROOT / "data" / "tokenizers"

# A shell starts background jobs with SIGINT ignored, and their child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines, because a test may run on a busy machine; in CI, every run uses the same examples.
# All examples of a test share its function-scoped fixtures, as these tests expect.
settings.register_profile(
    "xtok", deadline=None, derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.load_profile("xtok")


def pytest_collection_finish() -> None:
    """Exempt the imported libraries from garbage collection, which takes a tenth of the time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slowest tests; load real tokenizers in one process."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items:
        if {"load_real", "hub_folder", "load_hub"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.xdist_group("real"))
        group = item.get_closest_marker("xdist_group")
        # pytest-xdist reads the group from the id. Its version 3.8 cannot change the id of pytest
        # 9.2, so each process would run a part of each group.
        if group and hasattr(item, "_id") and item.config.getoption("loadgroup", default=False):
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


FETCHED = [
    "llama3.tiktoken",
    "qwen.tiktoken",
    "mistral-v1.model",
    "mistral-v3.model",
    "cl100k.tiktoken",
    "o200k.tiktoken",
    "deepseek-v3",
    "claude-2",
]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep xtok's cache in a folder of this session."""
    os.environ["XTOK_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small tokenizer of every kind; see `small_tokenizers.write_all`."""
    folder = tmp_path_factory.mktemp("tokenizers")
    small_tokenizers.write_all(folder)
    return folder


@pytest.fixture
def empty_folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder that contains `small`, a link to the small tokenizers."""
    monkeypatch.chdir(tmp_path)
    Path("small").symlink_to(small)


@pytest.fixture(scope="session")
def byte_level(small: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of 1,200 tokens with single digits, like Qwen's."""
    return load_tokenizer(str(small / "small-byte-level"))


@pytest.fixture(scope="session")
def digits(small: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of 800 tokens with up to three digits, like Llama 3's."""
    return load_tokenizer(str(small / "small-digits"))


@pytest.fixture(scope="session")
def sentencepiece(small: Path) -> Tokenizer:
    """A SentencePiece BPE tokenizer of 1,000 tokens with byte fallback, like Mistral's."""
    return load_tokenizer(str(small / "small.model"))


@pytest.fixture(scope="session")
def ranks(small: Path) -> Tokenizer:
    """A tiktoken rank file of 1,000 tokens with its split pattern; no special tokens."""
    return load_tokenizer(f"{small / 'small.tiktoken'}@{small_tokenizers.tiktoken_pattern()}")


@pytest.fixture(scope="session")
def composing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with NFKC normalization, like the tokenizer of Claude 2."""
    folder = tmp_path_factory.mktemp("nfkc") / "nfkc"
    small_tokenizers.byte_level_bpe(folder, vocab_size=900, digits=1, normalizer="NFKC")
    return load_tokenizer(str(folder))


KINDS = ("byte_level", "digits", "sentencepiece", "ranks")


Tokenizers = dict[str, Tokenizer]
Aligners = dict[tuple[str, str], TokenAligner]


@pytest.fixture(scope="session")
def tokenizers(request: pytest.FixtureRequest) -> Tokenizers:
    """One tokenizer of each of `KINDS`."""
    return {name: request.getfixturevalue(name) for name in KINDS}


@pytest.fixture(scope="session")
def aligners(tokenizers: Tokenizers) -> Aligners:
    """An aligner for each pair of `KINDS`."""
    sides = tokenizers.items()
    return {(a, b): TokenAligner(xtok.load_pair(s, t)) for a, s in sides for b, t in sides}


@pytest.fixture(scope="session")
def pair(byte_level: Tokenizer, digits: Tokenizer) -> Pair:
    """The pair of student `byte_level` and teacher `digits`."""
    return xtok.load_pair(byte_level, digits)


@pytest.fixture(scope="session")
def to_pieces(byte_level: Tokenizer, sentencepiece: Tokenizer) -> Pair:
    """The pair of student `byte_level` and teacher `sentencepiece`."""
    return xtok.load_pair(byte_level, sentencepiece)


@pytest.fixture(scope="session")
def map_to_digits(pair: Pair) -> ProjectionMap:
    """The default map of `pair`: rows of `byte_level`, columns of `digits`."""
    return built(*pair.tokenizers)


@pytest.fixture(scope="session")
def back_map(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The file of the back map that `project` builds from teacher `byte_level` to `digits`."""
    path = tmp_path_factory.mktemp("map") / "back.safetensors"
    built(byte_level, digits, BACK_MAP).save(path)
    return path


@pytest.fixture(scope="session")
def back(pair: Pair) -> Pair:
    """The pair of `back_map`: student `digits`, teacher `byte_level`."""
    return pair.reversed


@pytest.fixture(scope="session")
def models(small: Path) -> list[str]:
    """The paths of the two tokenizers of `back`."""
    return [str(small / "small-digits"), str(small / "small-byte-level")]


@pytest.fixture(scope="session")
def stored(byte_level: Tokenizer) -> list[stored_teachers.Row]:
    """Rows of a teacher's predictions, with their text."""
    return stored_teachers.teacher_rows(byte_level, stored_teachers.TEXTS, with_text=True)


@pytest.fixture
def cache_file(stored: list[stored_teachers.Row], tmp_path: Path) -> Path:
    """A neutral cache of `stored`: three row groups of two rows each."""
    return stored_teachers.write_neutral(tmp_path / "a.parquet", stored)


@pytest.fixture(scope="session")
def rows(byte_level: Tokenizer) -> list[stored_teachers.Row]:
    """The rows of `stored` without their text."""
    return stored_teachers.teacher_rows(byte_level, stored_teachers.TEXTS)


@pytest.fixture
def project(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> projected_caches.Project:
    """Project rows, or a cache, from teacher `byte_level` to student `digits`."""
    return projected_caches.projecting(digits, byte_level, back_map, tmp_path)


@pytest.fixture
def few_synthetic_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw less synthetic text, so that a test is quick."""
    monkeypatch.setattr(synthetic, "NUM_TEXTS", 500)
    monkeypatch.setattr(synthetic, "MANY_TEXTS", 500)


SetNumber = Callable[[int], None]


@pytest.fixture
def set_block(monkeypatch: pytest.MonkeyPatch) -> SetNumber:
    """Set the maximum number of elements in a temporary tensor of a loss."""
    return partial(monkeypatch.setattr, "xtok.training.sparse.BLOCK_NUMBERS")


@pytest.fixture
def set_row_limit(monkeypatch: pytest.MonkeyPatch) -> SetNumber:
    """Set the maximum size of a row of an input file, in bytes."""

    def set_limit(num_bytes: int) -> None:
        for module in ("lines", "parquet", "rows"):
            monkeypatch.setattr(f"xtok._lib.{module}.MAX_ROW_BYTES", num_bytes)

    return set_limit


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 lines of the training text as documents, some of them twice."""
    lines = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line]
    return write_documents(tmp_path_factory.mktemp("corpus") / "a.jsonl", (lines * 2)[:120])


@pytest.fixture(scope="module")
def serve_pair(tokenizers: Tokenizers) -> Iterator[ServePair]:
    """Start `xtok serve` for two of `KINDS`, once per module."""
    from running_servers import served_pairs  # imports the libraries of a server

    with served_pairs(tokenizers) as get:
        yield get


Real = Callable[[str], str]


@pytest.fixture(scope="session")
def real() -> Real:
    """The path of a fetched tokenizer; a test is skipped if the tokenizer is missing."""

    def find(name: str) -> str:
        path = REAL / name
        if not path.exists():
            pytest.skip(f"{name} is missing: run scripts/fetch_tokenizers.py")
        return str(path)

    return find


Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def load_real(real: Real) -> Load:
    """Load a fetched tokenizer, once per session."""

    @cache
    def load(name: str) -> Tokenizer:
        return load_tokenizer(real(name))

    return load


@pytest.fixture(scope="session")
def hub_folder(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One of `hub_folders.NAMES`, written once per session."""
    parent = tmp_path_factory.mktemp("hub")

    @cache
    def write(name: str) -> Path:
        return hub_folders.write(name, parent / name, REAL)

    def find(name: str) -> Path:
        real("qwen.tiktoken")
        return write(name)

    return find


@pytest.fixture(scope="session")
def load_hub(hub_folder: Callable[[str], Path]) -> Load:
    """Load one of `hub_folders.NAMES`, once per session."""
    return cache(lambda name: load_tokenizer(hub_folder(name)))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A process that runs programs in forks."""
    started = Forks(os.environ, tmp_path_factory.mktemp("forks"))
    yield started
    started.stop()


@pytest.fixture
def cli(tmp_path: Path, forks: Forks) -> Cli:
    """Run `xtok` in an empty folder."""

    def run(
        *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        return forks.run(args, cwd, env)

    return run
