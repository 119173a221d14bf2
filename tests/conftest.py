"""Small tokenizers of every kind, the real ones where they were fetched, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import small_tokenizers
from forked import TIMEOUT, Forks
from hypothesis import settings
from make import write_documents

from xtok.tokenizers import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
REAL = ROOT / "data" / "tokenizers"

# A busy machine is no failure; and where a result decides, the same examples are tried each time.
settings.register_profile("xtok", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("xtok")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small tokenizer of every kind; see `small_tokenizers.write_all`."""
    folder = tmp_path_factory.mktemp("tokenizers")
    small_tokenizers.write_all(folder)
    return folder


@pytest.fixture(scope="session")
def byte_level(small: Path) -> Tokenizer:
    return load_tokenizer(str(small / "small-byte-level"))


@pytest.fixture(scope="session")
def digits(small: Path) -> Tokenizer:
    return load_tokenizer(str(small / "small-digits"))


@pytest.fixture(scope="session")
def sentencepiece(small: Path) -> Tokenizer:
    return load_tokenizer(str(small / "small.model"))


@pytest.fixture(scope="session")
def ranks(small: Path) -> Tokenizer:
    return load_tokenizer(f"{small / 'small.tiktoken'}@{small_tokenizers.tiktoken_pattern()}")


KINDS = ("byte_level", "digits", "sentencepiece", "ranks")


@pytest.fixture(scope="session")
def tokenizers(request: pytest.FixtureRequest) -> dict[str, Tokenizer]:
    """One of each of `KINDS`."""
    return {name: request.getfixturevalue(name) for name in KINDS}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 lines of the training text as documents, some of them twice."""
    lines = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line]
    return write_documents(tmp_path_factory.mktemp("corpus") / "a.jsonl", (lines * 2)[:120])


@pytest.fixture(scope="session")
def real() -> Callable[[str], str]:
    """The path of a fetched tokenizer; the test is skipped where it was not fetched."""

    def find(name: str) -> str:
        path = REAL / name
        if not path.exists():
            pytest.skip(f"{name} is not there: run scripts/fetch_tokenizers.py")
        return str(path)

    return find


@pytest.fixture(scope="session")
def load_real(real: Callable[[str], str]) -> Callable[[str], Tokenizer]:
    """Load a fetched tokenizer, once per session."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_tokenizer(real(name))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that runs `xtok` in forks."""
    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    started = Forks({**os.environ, **plain})
    yield started
    started.stop()


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Cli:
    """Run `xtok` in an empty folder: in a fork, or with an environment, which libraries read when
    they are imported, as a process."""

    def run(
        *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        typed = [*map(str, args)]
        if not env:
            return forks.run(typed, cwd, tmp_path_factory.mktemp("streams"))
        return subprocess.run(
            [sys.executable, "-m", "xtok", *typed],
            cwd=cwd,
            env={**forks.env, **env},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    return run
