"""`xtok project`: files in, a file out; killed runs, clusters, and what reads the output."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import small_tokenizers
import stored_teachers as teachers
from conftest import Cli
from stored_teachers import Row

import xtok
from xtok.config import ProjectConfig
from xtok.errors import XtokError
from xtok.projecting.back_map import BACK_MAP
from xtok.projecting.rows import RowProjector
from xtok.tokenizers import Tokenizer
from xtok.vocab import pair
from xtok.vocab.table import TokenTable

TEXTS = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line][:6]


@pytest.fixture(scope="module")
def rows(byte_level: Tokenizer) -> list[Row]:
    return teachers.rows_of(byte_level, TEXTS, with_text=True)


@pytest.fixture(scope="module")
def back_map(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("map") / "back.safetensors"
    xtok.build(byte_level, digits, BACK_MAP).save(path)
    return path


def test_the_command(
    cli: Cli, small: Path, rows: list[Row], back_map: Path, tmp_path: Path
) -> None:
    """The path on stdout, what was done on stderr; without a map, the same file."""
    teachers.write_neutral(tmp_path / "a.parquet", rows)
    models = [small / "small-digits", small / "small-byte-level"]
    done = cli("project", "a.parquet", *models, "-k", "8", "-o", "out.parquet")
    assert (done.returncode, done.stdout) == (0, "out.parquet\n"), done.stderr
    assert "note: 6 documents; 224 of 227 student tokens have a target (98.7%), " in done.stderr
    assert "not counting 6 that begin a text; mean rest: 15.0%\n" in done.stderr
    assert "note: bits per byte of this text, by the teacher: 1.571\n" in done.stderr
    about = pyarrow.parquet.read_schema(tmp_path / "out.parquet").metadata
    assert {about[name] for name in (b"k", b"format_version", b"temperature")} == {
        b"8",
        b"1",
        b"1.0",
    }
    assert (about[b"convention"], about[b"tokenizer"]) == (b"T", b"small-digits")
    done = cli(
        "project", "a.parquet", *models, "--map", back_map, "-k", "8", "-o", "same.parquet",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["documents"], found["student_tokens"]) == (6, 233)
    assert found["paths"] == ["same.parquet"]
    assert (tmp_path / "same.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "out.parquet", "same.parquet"}


@pytest.mark.parametrize("with_map", [True, False])
def test_bytes_and_roles_are_matched_once(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, with_map: bool,
) -> None:  # fmt: skip
    matched: list[tuple[str, bool]] = []

    def counted(name: str) -> Callable[..., dict[int, int]]:
        match: Callable[..., dict[int, int]] = getattr(pair, name)

        def count(ours: TokenTable, theirs: TokenTable) -> dict[int, int]:
            matched.append((name, ours is digits.table))
            return match(ours, theirs)

        return count

    for name in ("match_bytes", "match_roles"):
        monkeypatch.setattr(pair, name, counted(name))
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    given = back_map if with_map else None
    xtok.project(path, xtok.pair(digits, byte_level), tmp_path / "out.parquet", back_map=given)
    assert sorted(matched) == sorted(set(matched))
    assert ("match_roles", False) in matched


def test_mistakes(cli: Cli, small: Path, rows: list[Row], tmp_path: Path) -> None:
    teachers.write_neutral(tmp_path / "a.parquet", rows)
    models = [small / "small-digits", small / "small-byte-level"]
    done = cli("project", "none-*.parquet", "no-model", "no-model", "-o", "out.parquet")
    assert done.returncode == 1
    hint = "give files of top-k log-probabilities (Parquet, or a server's answers as JSON lines), "
    hint += "or a glob in quotes: 'cache/*.parquet'"
    assert done.stderr == f"error: there is no file none-*.parquet\nhint: {hint}\n"
    done = cli("project", "a.parquet", *models, "-o", "out.jsonl")
    assert done.stderr.startswith("error: the output out.jsonl does not end in .parquet\nhint: ")
    done = cli("project", "a.parquet", *models, "-o", "a.parquet")
    assert done.stderr.startswith("error: the output a.parquet is an input\nhint: ")
    done = cli("project", "a.parquet", *models[::-1], "-o", "out.parquet")
    assert done.returncode == 1
    assert done.stderr == (
        "error: a.parquet: the sides are swapped: its ids are those of small-byte-level, and "
        "small-digits was given as the teacher\n"
        "hint: give the student first, then the teacher whose predictions these are\n"
    )
    nothing = pyarrow.parquet.read_table(tmp_path / "a.parquet").slice(0, 0)
    pyarrow.parquet.write_table(nothing, tmp_path / "empty.parquet")
    done = cli("project", "empty.parquet", *models, "-o", "out.parquet")
    assert done.stderr.splitlines()[-2] == "error: the files hold no rows"
    (tmp_path / "empty.parquet").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_without_pyarrow(
    byte_level: Tokenizer, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = teachers.write_lines(tmp_path / "a.jsonl", [teachers.vllm_answer(r) for r in rows])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(XtokError, match="needs the package pyarrow") as error:
        xtok.project(path, xtok.pair(byte_level, byte_level), tmp_path / "out.parquet")
    assert error.value.hint == "pip install pyarrow"
    assert [*tmp_path.iterdir()] == [path]


# Runs that do not end


@contextmanager
def stopping(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """Interrupt within the second part."""
    steps: list[int] = []

    def advance(size: int, tokens: int) -> None:
        steps.append(tokens)
        if len(steps) == 2:
            raise KeyboardInterrupt

    yield advance


def test_a_killed_run_goes_on(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is done is not done again, and the bytes are those of a run in one go."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    run = partial(xtok.project, path, xtok.pair(digits, byte_level), back_map=back_map)
    run(tmp_path / "whole.parquet")
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(out, text_progress=stopping)
    checkpoint = tmp_path / "out.parquet.checkpoint"
    assert not out.exists()
    assert {p.name for p in checkpoint.iterdir()} == {"job.json", "000000.part"}
    with pytest.raises(XtokError, match="is of another run, of other options") as error:
        run(out, config=ProjectConfig(top_k=3))
    assert error.value.hint == f"delete it to start again: rm -r {checkpoint}"
    made: list[int] = []
    project_rows = RowProjector.__call__

    def counting(self: RowProjector, rows: Any) -> Any:
        made.append(len(rows.places))
        return project_rows(self, rows)

    monkeypatch.setattr(RowProjector, "__call__", counting)
    notes: list[str] = []
    assert run(out, note=notes.append).documents == 6
    assert made == [2, 2]
    assert notes[1:] == [f"going on from 1 parts in {checkpoint}"]
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "whole.parquet", "out.parquet"}


def test_a_full_disk(rows: list[Row], small: Path, back_map: Path, tmp_path: Path) -> None:
    """One line says so; nothing is half-written, and what is done is kept."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows * 20, row_group_size=40)
    command = [
        sys.executable, "-m", "xtok", "project", str(path), str(small / "small-digits"),
        str(small / "small-byte-level"), "--map", str(back_map), "-o", "out.parquet",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be written: " in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("hint: ") == 1
    assert not (tmp_path / "out.parquet").exists()
    assert not [*tmp_path.rglob("*.tmp")]


def test_two_files_on_a_cluster(
    rows: list[Row], small: Path, byte_level: Tokenizer, digits: Tokenizer, back_map: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    from xtok.projecting.ray import TokenizerSource

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    teachers.write_neutral(tmp_path / "a.parquet", rows[:4])
    teachers.write_lines(tmp_path / "b.jsonl", [teachers.vllm_answer(r) for r in rows[4:]])
    paths = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    run = partial(xtok.project, paths, xtok.pair(digits, byte_level), back_map=back_map)
    local = run(tmp_path / "local.parquet")
    sources = [TokenizerSource(model=str(small / f"small-{n}")) for n in ("digits", "byte-level")]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        there = run(tmp_path / "there.parquet", sources=sources)
        with pytest.raises(XtokError, match="is another tokenizer on the node"):
            run(tmp_path / "no.parquet", sources=sources[1:] * 2)
    finally:
        ray.shutdown()
    assert (there.targets, there.mean_rest) == (local.targets, local.mean_rest)
    written = [(tmp_path / f"{name}.parquet").read_bytes() for name in ("local", "there")]
    assert written[0] == written[1]
    table = pyarrow.parquet.read_table(tmp_path / "local.parquet")
    assert table["id"].to_pylist() == [row["id"] for row in rows]


# What reads the output


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_trl_reads_the_lines(byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path) -> None:
    """Of one tokenizer and equal logits nothing is left to learn; a row further there is.

    `VLLMClient` asks a server of this machine, and `ServerDistillationTrainer` computes its loss.
    """
    pytest.importorskip("trl")
    from peer_checks import caches, trl

    equal = caches.sample(byte_level, byte_level, TEXTS[0], "vllm", tmp_path)
    assert trl.served_loss(equal, 0) == pytest.approx(0, abs=1e-6)
    assert trl.served_loss(equal, 1) > 1
    other = caches.sample(digits, byte_level, TEXTS[0], "vllm", tmp_path)
    expected = caches.expected(other, caches.tail_kl)
    assert expected > 1
    assert trl.served_loss(other, 0) == pytest.approx(expected, rel=1e-5)
