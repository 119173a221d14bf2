"""`xtok project`: files in, a file out; killed runs, clusters, and readers of the output."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet
import pytest
import stored_teachers as teachers
from checks import fails, works
from conftest import Cli
from stored_teachers import TEXTS, Row

import xtok
from xtok.config import CacheFormat, ProjectConfig
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.teachers import project
from xtok.tokenizers import Tokenizer, pairs
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable


@pytest.mark.usefixtures("cache_file")
def test_project_prints_the_path_and_a_report(
    cli: Cli, models: list[str], back_map: Path, tmp_path: Path
) -> None:
    """The path is on stdout, the report on stderr; without a map, the file is the same."""
    command = "project", "a.parquet", *models, "-k", "8", "-o"
    result = cli(*command, "out.parquet")
    assert (result.returncode, result.stdout) == (0, "out.parquet\n"), result.stderr
    assert "note: 6 documents; 224 of 227 student tokens have a target (98.7%), " in result.stderr
    assert "not counting the first tokens of 6 texts; mean rest: 14.0%\n" in result.stderr
    assert "note: the teacher needs 1.571 bits per byte for this text\n" in result.stderr
    about = pyarrow.parquet.read_schema(tmp_path / "out.parquet").metadata
    expected = {b"k": b"8", b"format_version": b"1", b"temperature": b"1.0", b"convention": b"T"}
    assert (expected | {b"tokenizer": b"small-digits"}).items() <= about.items()
    result = cli(*command, "same.parquet", "--map", back_map, "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["documents"], data["student_tokens"]) == (6, 233)
    assert data["paths"] == ["same.parquet"]
    assert (tmp_path / "same.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "out.parquet", "same.parquet"}


def test_bytes_and_roles_are_matched_once(
    cache_file: Path, byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    matched: list[tuple[str, bool]] = []

    def counted(name: str) -> Callable[..., object]:
        match: Callable[..., object] = getattr(pairs, name)

        def count(student: TokenTable, teacher: TokenTable) -> object:
            matched.append((name, student is digits.table))
            return match(student, teacher)

        return count

    for name in ("match_bytes", "match_roles"):
        monkeypatch.setattr(pairs, name, counted(name))
    fresh = xtok.load_pair(digits, byte_level)
    xtok.project(cache_file, fresh, tmp_path / "out.parquet", back_map=back_map)
    assert sorted(matched) == sorted(set(matched))
    assert ("match_roles", False) in matched


def test_errors_name_the_wrong_argument(
    cli: Cli, models: list[str], cache_file: Path, tmp_path: Path
) -> None:
    def fail(message: str, hint: str, *args: str) -> None:
        fails(cli("project", *args), message, hint)

    nobody = "no-model", "no-model", "-o", "out.parquet"
    fail("none-*.parquet", "'cache/*.parquet'", "none-*.parquet", *nobody)
    fail("out.jsonl", "out.parquet", "a.parquet", *models, "-o", "out.jsonl")
    fail("a.parquet is an input", "", "a.parquet", *models, "-o", "a.parquet")
    swapped = "a.parquet", *models[::-1], "-o", "out.parquet"
    problem = "its ids match the student, small-byte-level, but not the teacher, small-digits"
    fail(problem, "the student first", *swapped)
    pyarrow.parquet.write_table(
        pyarrow.parquet.read_table(cache_file).drop_columns(["text"]), cache_file
    )
    fail(problem, "the student first", *swapped)
    nothing = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(cache_file).slice(0, 0), nothing)
    fail("no rows", "", "empty.parquet", *models, "-o", "out.parquet")
    nothing.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.usefixtures("cache_file")
def test_maps_of_another_direction(cli: Cli, small: Path, tmp_path: Path) -> None:
    """The error names the map, and its hint the option."""
    (tmp_path / "models").symlink_to(small)
    student, teacher = "models/small-digits", "models/small-byte-level"
    works(cli("build", student, teacher, "-o", "forth.safetensors", "-q"))
    command = "project", "a.parquet", student, teacher, "-o", "out.parquet", "--map"
    hint = "for --map, build a map from the teacher (rows) to the student (columns)"
    fails(cli(*command, "forth.safetensors"), "forth.safetensors: ", hint)
    works(cli("build", teacher, student, "-o", "back.safetensors", "-q"))
    slots = ProjectionMap.load(tmp_path / "back.safetensors").scale_slot
    assert slots is not None
    result = works(cli(*command, "back.safetensors"))  # the help announces this note
    assert f"note: back.safetensors: ignoring its {slots.sum():,} scale slots\n" in result.stderr


@pytest.mark.usefixtures("cache_file")
def test_the_map_is_built_once(cli: Cli, models: list[str], tmp_path: Path) -> None:
    """The map is cached; if the cache is not writable, a note reports it."""
    cache = tmp_path / "cache"
    command = "project", "a.parquet", *models, "-o"

    def projected(name: str, folder: str) -> str:
        return works(cli(*command, name, env={"XTOK_CACHE_DIR": folder})).stderr

    assert "is kept" not in projected("a1.parquet", str(cache))
    [kept] = (cache / "maps").iterdir()
    assert f"note: {kept} exists, and is kept\n" in projected("a2.parquet", str(cache))
    (tmp_path / "file").touch()
    for folder in ("/proc/nowhere", str(tmp_path / "file")):
        said = projected("a3.parquet", folder)
        assert f"is not cached: the cache folder {folder} is not writable" in said
        assert "XTOK_CACHE_DIR" in said
    assert len({(tmp_path / f"a{n}.parquet").read_bytes() for n in (1, 2, 3)}) == 1


def test_columns_that_json_lacks(
    cli: Cli, models: list[str], cache_file: Path, tmp_path: Path
) -> None:
    """Unsupported columns are detected before a map is built or a part is made."""
    table = pyarrow.parquet.read_table(cache_file)
    for value in (datetime.date(2026, 1, 2), Decimal("1.5"), b"\xff", [{"at": datetime.time(1)}]):
        column = pyarrow.array([value] * len(table))
        pyarrow.parquet.write_table(table.append_column("when", column), cache_file)
        kind = pyarrow.parquet.read_schema(cache_file).field("when").type
        result = cli("project", "a.parquet", *models, "-o", "out.jsonl", "--to", "vllm", "-q")
        fails(result, f"a.parquet: the column 'when' has the type {kind}")
        works(cli("project", "a.parquet", *models, "-o", "out.parquet"))
        column_written = pyarrow.parquet.read_table(tmp_path / "out.parquet")["when"]
        assert column_written.to_pylist() == [value] * len(table)
        (tmp_path / "out.parquet").unlink()
        assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.usefixtures("cache_file")
def test_columns_of_two_types(
    cli: Cli, models: list[str], stored: list[Row], tmp_path: Path
) -> None:
    teachers.write_neutral(tmp_path / "b.parquet", [{**row, "id": 1} for row in stored])
    result = cli("project", "*.parquet", *models, "-o", "out/out.parquet", "-q")
    fails(result, "different types")
    assert not (tmp_path / "out").exists()


def test_names_that_are_not_utf8(
    cache_file: Path, back: Pair, back_map: Path, tmp_path: Path
) -> None:
    path = cache_file.rename(tmp_path / os.fsdecode(b"\xff.parquet"))
    outputs = {}
    kinds: dict[CacheFormat, bytes] = {"neutral": b"\xfe.parquet", "vllm": b"\xfe.jsonl"}
    for to, name in kinds.items():
        outputs[to] = tmp_path / os.fsdecode(name)
        projected = xtok.project(path, back, outputs[to], ProjectConfig(to=to), back_map=back_map)
        assert projected.paths == (str(outputs[to]),)
    with outputs["neutral"].open("rb") as file:
        assert pyarrow.parquet.read_metadata(file).num_rows == 6
    assert outputs["vllm"].read_bytes().count(b"\n") == 6


@pytest.mark.parametrize("to", ["axolotl", "distillkit"])
def test_row_groups_of_bounded_size(
    to: CacheFormat, stored: list[Row], back: Pair, back_map: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows are padded to `top_k` in little memory; the values are the same."""
    path = teachers.write_neutral(tmp_path / "a.parquet", stored, row_group_size=6)
    config = ProjectConfig(top_k=16, to=to)
    paths = tmp_path / "one.parquet", tmp_path / "some.parquet"
    xtok.project(path, back, paths[0], config, back_map=back_map)
    monkeypatch.setattr(project, "CANDIDATES_PER_GROUP", 1000)  # a text has about 40 tokens
    xtok.project(path, back, paths[1], config, back_map=back_map)
    assert [pyarrow.parquet.read_metadata(path).num_row_groups for path in paths] == [1, 3]
    single, some = map(pyarrow.parquet.read_table, paths)
    assert single.equals(some)
    monkeypatch.setattr(project, "MAX_LIST_LENGTH", 500)
    with pytest.raises(XtokError, match="47 tokens"):
        xtok.project(path, back, paths[1], config, back_map=back_map)


# Readers of the output


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_trl_reads_the_lines(byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path) -> None:
    """With one tokenizer and equal logits the loss is 0; with shifted rows it is not.

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
