"""`inspect`: the classes and rows of a map, and the differences of two maps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import error_of, fails, fits_80_columns, printed_json, works
from conftest import Cli
from make_tokenizers import byte_ranks
from naive import map_rows

import xtok
from xtok.building.counting.pair_text import PairText
from xtok.cli.tables.inspection import print_inspection
from xtok.config import BuildConfig, InspectConfig, SortCutConfig
from xtok.inspection.compare import compare, compare_maps
from xtok.inspection.describe import ClassCoverage, coverage_by_class
from xtok.inspection.explain import ExplainedRow, explain
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

Sides = tuple[Tokenizer, Tokenizer]


@pytest.fixture(scope="module")
def numbers_pair(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("pair")
    student = byte_ranks(folder / "student.tiktoken", "20", "201", "ab", " ,", "\x1b[31m", "Ж")
    teacher = byte_ranks(folder / "teacher.tiktoken", "ab", "abc", "Ж", "Я", width=262, digits=1)
    return student, teacher


@pytest.fixture(scope="module")
def projection(numbers_pair: Sides) -> ProjectionMap:
    return xtok.build(*numbers_pair, BuildConfig(canonicalization="relaxed"))


@pytest.fixture
def saved(projection: ProjectionMap, tmp_path: Path) -> str:
    projection.save(tmp_path / "m.safetensors")
    return "m.safetensors"


def explained(projection: ProjectionMap, token: int, sides: Sides | None = None) -> ExplainedRow:
    [row] = explain(projection, token, pair=None if sides is None else xtok.load_pair(*sides)).rows
    return row


# Classes


def test_classes_of_a_map(projection: ProjectionMap, numbers_pair: Sides) -> None:
    classes = coverage_by_class(projection, xtok.load_pair(*numbers_pair))
    by_name = {row.token_class: row for row in classes}
    assert by_name["digits_1"] == ClassCoverage(
        token_class="digits_1", rows=10, shared=10, exact=10, empty=0,
        mean_entries=1.0, slot_share=0.0, teacher_ids=10, teacher_unreached=0,
    )  # fmt: skip
    three = by_name["digits_3"]
    assert (three.rows, three.exact, three.mean_entries) == (1, 0, 3.0)
    assert three.slot_share == pytest.approx(1 / 6)
    # No row contains "abc": "ab" and "c" are exact.
    assert (by_name["latin"].teacher_ids, by_name["latin"].teacher_unreached) == (54, 1)
    # only slots contain them
    assert by_name["unused"].teacher_unreached == by_name["unused"].teacher_ids == 2
    assert sum(row.rows for row in classes) == projection.shape[0]
    assert sum(row.teacher_ids for row in classes) == projection.shape[1]


def test_inspect_shows_classes_on_request(cli: Cli, saved: str) -> None:
    output = cli("inspect", saved, "--classes").stdout
    row = next(line for line in output.splitlines() if "3 digits" in line)
    assert row.replace("│", "").split()[2:] == ["1", "0.0%", "3.00", "16.7%", "0", "-"]
    assert fits_80_columns(output)
    assert printed_json(cli("inspect", saved, "--json"))["coverage"] is None


# Explanations of rows


def test_a_row_of_pieces(projection: ProjectionMap, numbers_pair: Sides) -> None:
    row = explained(projection, 257, numbers_pair)
    assert (row.token, row.bytes, row.type, row.token_class, row.kind) == (
        "201", "32 30 31", "normal", "digits_3", "pieces"
    )  # fmt: skip
    assert row.why == "no teacher token has these bytes; spelled in pieces"
    assert row.pieces == ("2", "0", "1")
    assert [(e.token, e.relation) for e in row.entries] == [
        ("2", "its beginning"), ("0", "a part of it"), ("1", "a part of it"), ("(unused)", "slot")
    ]  # fmt: skip


def test_exact_and_relaxed_rows(projection: ProjectionMap, numbers_pair: Sides) -> None:
    """Pieces are listed only if the models are loaded."""
    row = explained(projection, 258, numbers_pair)
    assert (row.kind, row.why) == ("exact", "exact: teacher id 256 has the same bytes")
    relaxed = explained(projection, 259)
    assert (relaxed.kind, relaxed.pieces) == ("relaxed", None)
    assert relaxed.entries[0].relation == "the same relaxed form"
    soft = explained(
        xtok.build(*numbers_pair, BuildConfig(exact_match=False, scale_trick=False)), 258
    )
    assert soft.why == "teacher id 256 has the same bytes, but the row is not exact"
    assert [e.relation for e in soft.entries] == ["the same bytes", "longer, begins with it"]


def test_a_counted_row(numbers_pair: Sides) -> None:
    row = explained(xtok.build(*numbers_pair, for_loss="p-kl"), 257, numbers_pair)
    assert (row.kind, row.why) == ("counted", "counted on text or synthetic text")
    assert [(e.token, round(e.weight or 0, 3)) for e in row.entries] == [
        ("2", 0.667), ("0", 0.167), ("1", 0.167)
    ]  # fmt: skip


def test_rows_of_special_tokens_are_explained_by_role(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    projection = xtok.build(byte_level, sentencepiece)
    bos = byte_level.table.roles["bos"][0]
    role, empty = explain(projection, [bos, len(byte_level.table) - 1]).rows
    assert (role.kind, role.bytes, role.roles[0]) == ("role", "", "bos")
    assert role.entries[0].relation == "role bos"
    assert (empty.kind, empty.why) == ("empty", "the tokenizer does not use this id")
    turn = byte_level.table.roles["turn_start"][0]
    assert explained(projection, turn).why == "a special token without a counterpart (turn_start)"


def test_an_option_in_the_history_is_not_cut(
    cli: Cli, projection: ProjectionMap, tmp_path: Path
) -> None:
    options = {f"{'option' * 3}{i}": 32 for i in range(6)}
    history = ({"stage": "count", "options": options},)
    replace(projection, history=history).save(tmp_path / "m.pt")
    output = works(cli("inspect", "m.pt")).stdout
    assert all(f"{name}=32" in output for name in options)


def test_rows_on_the_command_line(cli: Cli, projection: ProjectionMap, saved: str) -> None:
    result = works(cli("inspect", saved, "\\x1b[31m", "ab"))
    assert "\x1b" not in result.stdout
    assert "'\\x1b[31m'" in result.stdout
    assert "rows by kind" not in result.stdout
    assert fits_80_columns(result.stdout)
    both = printed_json(cli("inspect", saved, "ab", "--id", "257", "--json"))
    assert [row["student_id"] for row in both["rows"]] == [258, 257]
    assert (both["student"], both["rows_matching"]) == ("student.tiktoken", None)
    fails(cli("inspect", saved, "ab", "--student-model", "bytes"), saved)
    for words in (["--worst", "2"], ["--classes"], ["--against", saved]):
        fails(cli("inspect", saved, "ab", *words), "cannot be combined")
    fails(cli("inspect", saved, "ab", "--num-examples", "2"), "", "omit --num-examples")


def test_an_unknown_token_does_not_hide_the_others(
    cli: Cli, projection: ProjectionMap, saved: str
) -> None:
    line = ["inspect", saved, "201", " ,", r"\xe4", "ab", r"\xff\xff", "Ж", "20", "no"]
    result = cli(*line, "--quiet")
    assert result.returncode == 1
    assert all(
        f"│ '{token}' " in result.stdout for token in ("201", " ,", r"\xe4", "ab", "Ж", "20")
    )
    error = "error: student.tiktoken has no token '\\xff\\xff'; student.tiktoken has no token 'no'"
    assert result.stderr.splitlines()[0] == error
    rows = json.loads(cli(*line, "--json", "-q").stdout)["rows"]
    assert [row["token"] for row in rows] == ["201", " ,", r"\xe4", "ab", "Ж", "20"]
    fails(cli("inspect", saved, "no", "nor"), "'no'; student.tiktoken has no token 'nor'")
    tokens = ["ab", "no", "nor"]
    both = "'no'; student.tiktoken has no token 'nor'"
    assert both in error_of(lambda: xtok.inspect(projection, tokens))
    assert both in error_of(lambda: xtok.explain(projection, tokens))


def test_five_tokens_fit_the_screen(cli: Cli, saved: str) -> None:
    output = works(cli("inspect", saved, "201", " ,", "ab", "Ж", "20")).stdout
    assert len(output.splitlines()) <= 25
    assert fits_80_columns(output)
    assert output.count("'201'") == 1
    text = works(cli("inspect", saved, "201")).stdout
    assert "normal; 3 digits" in text
    assert "spelled in pieces" in text
    assert "'2' (its beginning)" in text


def test_a_map_without_tokens(cli: Cli, tmp_path: Path) -> None:
    pt = {"indices": torch.tensor([[97, -1]] * 98), "likelihoods": torch.tensor([[1.0, 0.0]] * 98)}
    torch.save(pt, tmp_path / "m.pt")
    line = ["inspect", "m.pt", "--teacher-vocab-size", "256"]
    row = [*line, "--id", "97"]
    [alone] = printed_json(cli(*row, "--json"))["rows"]
    assert (alone["token"], alone["why"], alone["entries"][0]["teacher_id"]) == (None, "", 97)
    assert "#97" in cli(*row).stdout
    assert "special token" in works(cli(*row, "-s", "null:98", "-t", "bytes")).stdout
    bare, pair = (
        ProjectionMap.load(tmp_path / "m.pt", teacher_vocab_size=256),
        xtok.load_pair("null:98", "bytes"),
    )
    shown: Any = xtok.inspect(bare, config=InspectConfig(classes=True), pair=pair)
    assert shown.coverage
    explanation: Any = xtok.inspect(bare, [97], pair=pair)
    assert explanation.rows[0].entries[0].token == "a"
    fails(cli(*line, "--classes"), "the map has no token table")
    fails(cli(*line, "a"), "the map has no token table")


def test_right_to_left_and_wide_tokens(cli: Cli, tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "של", "\u202eab", "灯塔站", "x" * 5000)
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "של", "灯", "x" * 7000)
    xtok.build(student, teacher).save(tmp_path / "m.safetensors")
    result = works(cli("inspect", "m.safetensors", *(f"--id={i}" for i in range(256, 260))))
    assert "\u202e" not in result.stdout
    assert len(result.stdout) < 16_000
    assert fits_80_columns(result.stdout)
    fails(cli("inspect", "m.safetensors", "灯塔站", "-s", "student.tiktoken"), "split pattern")


@pytest.mark.parametrize(("token", "shown"), [(":cat:", "':cat:'"), ("\\[b]", r"'\\[b]'")])
def test_a_token_in_a_header_is_no_markup(cli: Cli, tmp_path: Path, token: str, shown: str) -> None:
    tokenizer = byte_ranks(tmp_path / "a.tiktoken", token)
    xtok.build(tokenizer, tokenizer).save(tmp_path / "m.safetensors")
    header = works(cli("inspect", "m.safetensors", "--id", "256")).stdout.splitlines()[1]
    assert f"┃ {shown} " in header


# Two maps


@pytest.fixture(scope="module")
def recipe(byte_level: Tokenizer, digits: Tokenizer) -> ProjectionMap:
    return xtok.build(byte_level, digits, BuildConfig(scale_trick=False))


@pytest.fixture(scope="module")
def heaviest(recipe: ProjectionMap) -> ProjectionMap:
    return xtok.sort_cut(recipe, SortCutConfig(top_k=1))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat, and the dog sat on the log; in 2013 there were 201.\n")
    return path


def test_distance_of_rows(recipe: ProjectionMap, heaviest: ProjectionMap) -> None:
    comparison = compare(recipe, heaviest)
    ours, theirs = map_rows(recipe), map_rows(heaviest)
    distances = {}
    for s in ours.keys() | theirs.keys():
        a, b = dict(ours.get(s, [])), dict(theirs.get(s, []))
        distances[s] = sum(abs(a.get(t, 0) - b.get(t, 0)) for t in a.keys() | b.keys()) / 2
    assert comparison.rows == len(distances)
    assert comparison.rows_that_differ == sum(d > 1e-6 for d in distances.values()) > 0
    assert comparison.rows_of_other_top == 0
    mean = sum(distances.values()) / len(distances)
    assert comparison.mean_distance == pytest.approx(mean, abs=1e-6)
    assert comparison.examples[0].distance == pytest.approx(max(distances.values()), abs=1e-6)
    same = compare(recipe, recipe)
    assert same.rows_that_differ == same.mean_distance == 0
    assert same.examples == ()


def test_long_tokens_are_truncated_only_in_the_printed_table(
    recipe: ProjectionMap, capsys: pytest.CaptureFixture[str]
) -> None:
    width = recipe.student.vocab_size
    entries = [TokenEntry(i, TokenType.NORMAL, b"%04d" % i + b"\n" * 100) for i in range(width)]
    table = Decoded(entries).table(width)
    long = replace(recipe, student=replace(recipe.student, table=table))
    comparison = compare(long, xtok.sort_cut(long, SortCutConfig(top_k=1)), num_examples=1)
    [row] = comparison.examples
    assert row.token == f"{row.student_id:04d}" + r"\n" * 100
    print_inspection(comparison)
    lines = capsys.readouterr().out.splitlines()
    shown = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert f"'{row.token[:80]}…(204inall)'#{row.student_id}" in shown.replace(" ", "")


def test_the_distance_is_weighted_by_text(
    byte_level: Tokenizer, recipe: ProjectionMap, heaviest: ProjectionMap, text: Path
) -> None:
    pair = Pair(byte_level.vocabulary, recipe.teacher, byte_level)
    [counts] = PairText.read(pair, [text, text]).tokens
    [ids] = byte_level.library_ids([text.read_text()])
    assert counts.tolist() == [ids.count(i) for i in range(len(byte_level.table))]
    weighted = compare(recipe, heaviest, text, pair=pair)
    assert weighted.mean_distance != compare(recipe, heaviest).mean_distance
    assert all(counts[row.student_id] > 0 for row in weighted.examples)
    nothing = compare_maps(recipe, heaviest, np.zeros_like(counts))
    assert nothing.mean_distance == 0
    with pytest.raises(ValueError, match="student's tokenizer"):
        compare(recipe, heaviest, text)
    assert "has other tokens than bytes" in error_of(
        lambda: compare(recipe, heaviest, text, pair=xtok.load_pair("bytes", "bytes"))
    )


def test_two_maps_on_the_command_line(
    cli: Cli, small: Path, recipe: ProjectionMap, heaviest: ProjectionMap, text: Path
) -> None:
    recipe.save(text.parent / "a.safetensors")
    heaviest.save(text.parent / "b.safetensors")
    line = ["inspect", "a.safetensors", "--against", "b.safetensors"]
    result = works(cli(*line, "--text", "a.txt", "-s", small / "small-byte-level"))
    assert fits_80_columns(result.stdout)
    assert "weighted by the text" in result.stdout
    assert cli(*line, "--text", "a.txt").returncode == 2
    forgotten = cli("inspect", "a.safetensors", "b.safetensors")
    assert (forgotten.returncode, forgotten.stdout) == (2, "")
    assert "use --against b.safetensors" in forgotten.stderr
    comparison = printed_json(cli(*line, "--num-examples", "3", "--json"))
    assert comparison["rows_that_differ"] > 0
    assert len(comparison["examples"]) == 3


# Event maps and spelling maps


def test_inspect_shows_the_tokens_of_an_event(
    cli: Cli, numbers_pair: Sides, tmp_path: Path
) -> None:
    events = xtok.events(*numbers_pair)
    events.save(tmp_path / "e.safetensors")
    table, columns = numbers_pair[0].table, numbers_pair[1].table
    line = "inspect", "e.safetensors"
    overview, output = (works(cli(*line, *words)).stdout for words in ([], ["201", "--id", "7"]))
    assert f"{events.num_events:,}" in overview
    assert "'2'" in output
    assert fits_80_columns(overview + output)
    tokens = printed_json(cli(*line, "201", "--id", "7", "--json"))["rows"]
    assert [token["student_id"] for token in tokens] == [*table.ids_of("201"), 7]
    for token in tokens:
        number = events.student_event[token["student_id"]]
        assert token["event"]["number"] == number
        assert token["event"]["is_rest"] == (number == events.rest)
        for side, own in (("student", table), ("teacher", columns)):
            ids = np.flatnonzero(getattr(events, f"{side}_event") == number)
            assert token["event"][f"{side}_count"] == len(ids)
            assert token["event"][side] == [own.name(i) for i in ids[:10].tolist()]
        assert token["link_id"] == events.student_link[token["student_id"]]
        assert token["link"] == columns.name(token["link_id"])
    described = printed_json(cli(*line, "--json"))
    total = np.bincount(events.student_event) + np.bincount(events.teacher_event)
    if events.rest is not None:
        total[events.rest] = 0
    sizes = [event["student_count"] + event["teacher_count"] for event in described["largest"]]
    assert sizes == sorted(total.tolist(), reverse=True)[:5]
    fails(cli(*line, "no such"), "has no token")
    for words in (["--classes"], ["--kind", "empty"], ["--against", "e.safetensors"]):
        fails(cli(*line, *words), "event map")
    explanation = works(cli(*line, "201")).stdout
    assert f"'201' #{table.ids_of('201')[0]}" in explanation


def test_inspect_shows_how_a_token_is_spelled(
    cli: Cli, numbers_pair: Sides, tmp_path: Path
) -> None:
    spellings = xtok.spellings(*numbers_pair)
    spellings.save(tmp_path / "s.safetensors")
    line = "inspect", "s.safetensors", "201", "--id", "97"
    tokens = printed_json(cli(*line, "--json"))["rows"]
    assert [token["pieces"] for token in tokens] == [["2", "0", "1"], ["a"]]
    assert "'2' '0' '1'" in works(cli(*line)).stdout
    for why, ids in spellings.left_out("student").items():
        for example in ids[:1].tolist():
            assert why in works(cli("inspect", "s.safetensors", f"--id={example}")).stdout
