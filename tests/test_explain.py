"""Why a row is as it is, from the map alone and by real segmentation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Cli
from rich.cells import cell_len
from test_stages import byte_ranks

import xtok
from xtok.config import BuildConfig
from xtok.errors import XtokError
from xtok.inspection.explain import explain
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer

Pair = tuple[Tokenizer, Tokenizer]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    student = byte_ranks(tmp_path / "student.tiktoken", "20", "201", "ab", " ,", "\x1b[31m")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "ab", "abc", width=260, digits=1)
    return student, teacher


@pytest.fixture
def projection(pair: Pair) -> ProjectionMap:
    return xtok.build(*pair, BuildConfig(canonicalization="relaxed"))


def test_a_row_of_pieces(projection: ProjectionMap, pair: Pair) -> None:
    [row] = explain(projection, [257], student_model=pair[0], teacher_model=pair[1])
    assert (row.token, row.bytes, row.type, row.token_class) == (
        "201", "32 30 31", "normal", "3 digits"
    )  # fmt: skip
    assert (row.kind, row.why) == (
        "pieces",
        "no teacher token has these bytes: spelled in pieces, both ways",
    )
    assert row.forward is not None
    assert [(p.token, p.place, round(p.weight, 4)) for p in row.forward] == [
        ("2", 0, 0.9009), ("0", 1, 0.0901), ("1", 2, 0.009)
    ]  # fmt: skip
    assert (row.reverse, row.reverse_count) == ((), 0)
    assert [(e.token, e.relation) for e in row.entries] == [
        ("2", "its beginning"),
        ("0", "a part of it"),
        ("1", "a part of it"),
        ("(unused)", "scale slot: stands for nothing"),
    ]
    assert row.stages == (
        "multitoken: pieces forward: 3; teacher tokens in reverse: 0; "
        "at most 32 entries, the slot included",
        "reapply-exact: left as it was: no equal bytes",
        "sort-cut: at most 4 entries",
    )


def test_an_exact_row_tells_what_was_lost(projection: ProjectionMap, pair: Pair) -> None:
    [row] = explain(projection, [258], student_model=pair[0], teacher_model=pair[1])
    assert (row.kind, row.why) == ("exact", "exact: teacher id 256 has the same bytes")
    assert row.reverse is not None
    assert [(p.token, round(p.weight, 4)) for p in row.reverse] == [("ab", 1.0), ("abc", 0.9091)]
    assert row.stages[1] == "reapply-exact: matched to the token of equal bytes"


def test_from_the_map_alone(projection: ProjectionMap) -> None:
    [relaxed] = explain(projection, [259])
    assert (relaxed.kind, relaxed.forward, relaxed.reverse) == ("relaxed", None, None)
    assert relaxed.entries[0].relation == "the same relaxed form"
    [plain] = explain(replace(projection, history=()), [258])
    assert plain.stages == ()


def test_soft_rows_name_longer_tokens(pair: Pair) -> None:
    soft = xtok.build(*pair, BuildConfig(exact_match=False, scale_trick=False))
    [row] = explain(soft, [258])
    assert row.why == "teacher id 256 has the same bytes, but the row is not exact"
    assert [(e.token, e.relation) for e in row.entries] == [
        ("ab", "the same bytes"),
        ("abc", "longer, begins with it"),
    ]


def test_counted_weights_are_not_those_of_pieces(pair: Pair) -> None:
    counted = xtok.build(*pair, BuildConfig.for_loss("p-kl"))
    [row] = explain(counted, [258], student_model=pair[0], teacher_model=pair[1])
    assert (row.kind, row.why) == (
        "counted",
        "counted on text, given or synthetic, and not exact",
    )
    assert row.forward is not None
    assert [(p.token, p.weight) for p in row.forward] == [("ab", 0)]
    assert row.reverse is None
    assert row.stages == (
        "multitoken: counted on synthetic text, target both; at most 32 entries",
        "sort-cut: at most 8 entries",
    )


def test_special_tokens(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    projection = xtok.build(byte_level, sentencepiece)
    bos = byte_level.table.roles["bos"][0]
    unused = len(byte_level.table) - 1
    role, empty = explain(projection, [bos, unused])
    assert (role.kind, role.bytes, role.roles[0]) == ("role", "", "bos")
    assert role.entries[0].relation == "role bos"
    assert (empty.kind, empty.why) == ("empty", "the tokenizer does not use this id")
    off = xtok.build(byte_level, sentencepiece, BuildConfig(special_tokens="off"))
    [alone] = explain(off, [bos])
    assert alone.why.startswith("a special token: ")


def test_models_of_another_pair_are_refused(projection: ProjectionMap, pair: Pair) -> None:
    with pytest.raises(XtokError, match=r"student of the map \(student\.tiktoken\) has other"):
        explain(projection, [257], student_model=pair[1])


def test_history_that_says_nothing_is_no_trouble(projection: ProjectionMap, pair: Pair) -> None:
    odd = ({"stage": "multitoken", "options": {"max_pieces": -5}}, {"stage": "x", "options": {}})
    [row] = explain(replace(projection, history=odd), [257], teacher_model=pair[1])
    assert row.stages[1] == "x: done"
    assert row.forward is not None
    assert round(row.forward[0].weight, 4) == 0.9009


def test_explain_on_the_command_line(cli: Cli, projection: ProjectionMap, tmp_path: Path) -> None:
    projection.save(tmp_path / "m.safetensors")
    done = cli("explain", "m.safetensors", "\\x1b[31m")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "'\\x1b[31m'" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    both = cli("explain", "m.safetensors", "ab", "--id", "257", "--json")
    assert [row["student_id"] for row in json.loads(both.stdout)] == [258, 257]
    nothing = cli("explain", "m.safetensors")
    assert (nothing.returncode, "give a token, or --id" in nothing.stderr) == (2, True)
    unknown = cli("explain", "m.safetensors", "nothing like it")
    assert (unknown.returncode, unknown.stderr.startswith("error: the student has no")) == (1, True)
    beyond = cli("explain", "m.safetensors", "--id", "9999")
    assert beyond.returncode == 1
    other = cli("explain", "m.safetensors", "ab", "--student-model", "bytes")
    assert (other.returncode, "has other tokens than bytes" in other.stderr) == (1, True)


def test_a_map_without_tokens_needs_both_models(cli: Cli, small: Path, tmp_path: Path) -> None:
    import torch

    pt = {"indices": torch.tensor([[97, -1]] * 98), "likelihoods": torch.tensor([[1.0, 0.0]] * 98)}
    torch.save(pt, tmp_path / "m.pt")
    options = ["--teacher-vocab-size", "256"]
    alone = cli("explain", "m.pt", *options, "--id", "97")
    assert alone.returncode == 1
    assert "give both models, the student's with --student-model" in alone.stderr
    models = ["--student-model", "null:98", "--teacher-model", "bytes"]
    both = cli("explain", "m.pt", *options, "--id", "97", *models)
    assert both.returncode == 0, both.stderr
    assert "special token" in both.stdout
    classes = cli("inspect", "m.pt", *options, "--classes")
    assert "note: the map carries no tokens, so no classes" in classes.stderr


def test_right_to_left_and_wide_tokens(cli: Cli, tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "של", "\u202eab", "灯塔站", "x" * 5000)
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "של", "灯", "x" * 7000)
    xtok.build(student, teacher).save(tmp_path / "m.safetensors")
    models = ["--student-model", tmp_path / "student.tiktoken"]
    for token_id in range(256, 260):
        done = cli("explain", "m.safetensors", "--id", str(token_id))
        assert done.returncode == 0, done.stderr
        assert "\u202e" not in done.stdout
        assert len(done.stdout) < 8000
        assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80
    assert cli("explain", "m.safetensors", "灯塔站", *models).returncode == 1  # no pattern
