"""Event maps: the links, numbering, and the loss."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import fits_80_columns, mutant, not_none, printed_json, within, works
from conftest import Cli, Load
from loss_inputs import alignment
from make_maps import vocabulary
from make_tokenizers import token
from safetensors import safe_open
from torch import Tensor

import xtok
from xtok.building.events import events, find_components, number_events
from xtok.cli.tables.quality import print_evaluation
from xtok.errors import MapFileError
from xtok.inspection.evaluate import evaluate
from xtok.inspection.verify import verify
from xtok.maps.events import EventMap
from xtok.maps.file import to_safetensors
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.classes import class_label
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES
from xtok.training.losses import ChunkLossConfig, EventIndex, event_index, event_kl


def groups(event_map: EventMap) -> list[tuple[list[int], list[int]]]:
    """The student and teacher ids of each event."""
    return [
        (
            np.flatnonzero(event_map.student_event == e).tolist(),
            np.flatnonzero(event_map.teacher_event == e).tolist(),
        )
        for e in range(event_map.num_events)
    ]


def test_a_tokenizer_with_itself_has_an_event_for_each_token(byte_level: Tokenizer) -> None:
    result = events(byte_level, byte_level)
    for student, teacher in groups(result):
        assert student == teacher
        tokens = {byte_level.table[i] for i in student}
        assert len(tokens) == 1 or result.student_event[student[0]] == result.rest


@pytest.fixture(scope="module")
def by_bytes(digits: Tokenizer, byte_level: Tokenizer) -> EventMap:
    event_map: EventMap = events(digits, byte_level)
    return event_map


def test_linked_tokens_share_an_event(
    digits: Tokenizer, byte_level: Tokenizer, by_bytes: EventMap
) -> None:
    links = by_bytes.student_link
    number, word = (token(digits, text) for text in (b"201", b" the"))
    assert byte_level.table[int(links[number])] == b"2"  # the first piece
    assert by_bytes.student_event[number] == by_bytes.teacher_event[links[number]]
    assert byte_level.table[int(links[word])] == b" the"
    assert set(by_bytes.student_event[links < 0].tolist()) <= {by_bytes.rest}


def test_events_are_numbered_by_their_lowest_token(by_bytes: EventMap) -> None:
    first = [student[0] for student, _ in groups(by_bytes)]
    assert first == sorted(first)


def test_unlinked_tokens_share_the_last_event() -> None:
    # Students 0 to 3, teachers 4 to 6: 0 matches 4, 1 matches 5, and 2, 3 and 6 have no match.
    joined = find_components(np.array([0, 1, -1, -1]), np.array([0, 1, -1]))
    assert joined.tolist() == [0, 1, 2, 3, 0, 1, 6]
    labels, rest = number_events(joined, 4)
    assert (labels.tolist(), rest) == ([0, 1, 2, 2, 0, 1, 2], 2)
    # Without teacher 6, unmatched tokens join the last event, so that each event has both sides.
    labels, rest = number_events(joined[:6], 4)
    assert (labels.tolist(), rest) == ([0, 1, 1, 1, 0, 1], 1)


def small_index() -> tuple[EventIndex, Tensor, Tensor]:
    """Event 0 has 3 and 2 tokens, event 1 has 2 and 2, events 2 and 3 have one on each side."""
    fields: dict[str, Any] = {}
    one_hot = []
    for side, event in (("student", [0, 1, 2, 0, 1, 0, 3]), ("teacher", [2, 1, 0, 3, 0, 1])):
        fields[side] = vocabulary(len(event))
        fields[f"{side}_event"] = np.array(event, np.int32)
        fields[f"{side}_link"] = np.full(len(event), -1, np.int32)
        one_hot.append(torch.nn.functional.one_hot(torch.tensor(event), 4).double())
    return event_index(EventMap(**fields, rest=None)), one_hot[0], one_hot[1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_event_kl_is_its_formula(reverse: bool, temperature: float) -> None:
    index, student_tokens, teacher_tokens = small_index()
    generator = torch.Generator().manual_seed(0)
    student = torch.randn((2, 5, 8), dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn((2, 6, 6), dtype=torch.float64, generator=generator)
    aligned = alignment(
        [[0, 1, 1, 2, -1], [1, 1, 2, 3, 3]], [[0, 1, 2, 2, 2, -1], [1, 2, 2, 3, -1, -1]]
    )
    # Position 0 may predict the middle of row 0's chunk 0. The first positions of the others:
    indices = [(0, 1, 0, 1), (0, 3, 0, 2), (1, 0, 1, 0), (1, 2, 1, 1), (1, 3, 1, 3)]
    config = ChunkLossConfig(temperature=temperature, reverse_kl=reverse)
    loss = event_kl(student, teacher, index, aligned, config)
    terms = []
    for row, i, other, j in indices:
        s = torch.softmax(student[row, i, :7] / temperature, -1) @ student_tokens
        r = torch.softmax(teacher[other, j] / temperature, -1) @ teacher_tokens
        p, q = (s, r) if reverse else (r, s)
        terms.append((p * (p.log() - q.log())).sum())
    expected = torch.stack(terms).mean() * temperature**2
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = (torch.autograd.grad(3 * x, student) for x in (loss, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("low", [-50.0, -100.0, -1e4, torch.finfo(torch.float32).min])
def test_an_improbable_event_of_several_tokens_counts(low: float) -> None:
    """Its loss equals the loss of a single token, although float32 sums are 0 below exp(-87)."""
    index, student_tokens, _ = small_index()
    teacher = torch.zeros(1, 1, 6)
    aligned = alignment([[1]], [[1]])
    logits = torch.zeros(1, 1, 7)
    logits[..., student_tokens[:, 1] > 0] = low
    exact = logits.double().requires_grad_()
    ours, theirs = logits.clone().requires_grad_(), torch.tensor([2.0, 2.0, 1.0, 1.0]).double() / 6
    loss = event_kl(ours, teacher, index, aligned)
    events_of = torch.stack([exact.log_softmax(-1)[0, 0, student_tokens[:, e] > 0].logsumexp(0)
                             for e in range(4)])  # fmt: skip
    expected = (theirs * (theirs.log() - events_of)).sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    loss.backward()
    share = float(not_none(ours.grad)[0, 0, student_tokens[:, 1] > 0].sum())
    assert share == pytest.approx(-2 / 6, abs=1e-4)


@pytest.mark.real
def test_llama_3_and_qwen_need_no_text(load_real: Load) -> None:
    student, teacher = load_real("llama3.tiktoken"), load_real("qwen.tiktoken")
    result = events(student, teacher)
    event = {t: int(result.student_event[i]) for t, i in student.table.canonical_ids().items()}
    theirs = {t: int(result.teacher_event[i]) for t, i in teacher.table.canonical_ids().items()}
    assert event[b"201"] == event[b"2"] == theirs[b"2"] != event[b"3"]
    assert event[b" the"] == theirs[b" the"]
    assert result.num_events == 109_570
    assert event_index(result).widths == (128_256, 151_669)


FILES: list[Any] = [
    (xtok.events, "events", "event link"), (xtok.spellings, "spellings", "pieces counts")
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "parts"), FILES)
def test_event_maps_are_deterministic_and_survive_their_file(
    to_pieces: Pair, tmp_path: Path, make: Any, kind: str, parts: str
) -> None:
    result, again = (make(*to_pieces.tokenizers) for _ in range(2))
    path = tmp_path / "a.safetensors"
    result.save(path)
    assert path.read_bytes() == to_safetensors(again)
    loaded = type(result).load(path)
    assert (loaded.history, loaded.reports) == (result.history, ())
    for name in [f"{side}_{part}" for side in SIDES for part in parts.split()]:
        assert (getattr(loaded, name) == getattr(result, name)).all()
    assert getattr(loaded, "rest", None) == getattr(result, "rest", None)
    assert not_none(loaded.student.table).sha256() == to_pieces.tables[0].sha256()
    [step] = result.history
    assert sorted(step) == ["options", "stage", "xtok_version"]
    with safe_open(path, framework="np") as file:
        metadata = json.loads(file.metadata()["xtok"])
    assert (metadata["kind"], metadata["format_version"]) == (kind, 1)


def test_the_commands_read_event_maps(cli: Cli, small: Path, corpus: Path) -> None:
    pair = [str(small / "small.model"), str(small / "small-byte-level")]
    assert works(cli("events", *pair, "-o", "e.safetensors")).stdout == "e.safetensors\n"
    assert cli("verify", "e.safetensors", "-s", pair[1]).returncode == 3
    line = ["evaluate", "e.safetensors", "-s", pair[0], "-t", pair[1], "--text", corpus]
    assert fits_80_columns(works(cli(*line)).stdout)
    [measure] = printed_json(cli(*line, "--json"))["event_measures"]
    assert 0 < measure["leak"] <= 0.1 < measure["shared_leak"]


def test_two_event_maps_are_measured_side_by_side(
    sentencepiece: Tokenizer, byte_level: Tokenizer, corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pair, by_bytes = xtok.load_pair(sentencepiece, byte_level), events(sentencepiece, byte_level)
    nothing = [np.zeros_like(event) for event in (by_bytes.student_event, by_bytes.teacher_event)]
    merged = replace(by_bytes, student_event=nothing[0], teacher_event=nothing[1], rest=0)
    evaluation = evaluate(pair, [by_bytes, merged], corpus, names=["bytes", "one"])
    leaks = {m.name: m.leak for m in evaluation.event_measures}
    assert leaks["one"] == 0 < leaks["bytes"] < evaluation.event_measures[0].shared_leak
    assert evaluation.measures == ()
    measures_by_class = {(c.name, class_label(c.token_class)): c for c in evaluation.classes}
    assert len(measures_by_class) == len(evaluation.classes)
    total = sum(c.starts * c.loss for c in evaluation.classes if c.name == "bytes")
    assert total / evaluation.event_measures[0].starts == pytest.approx(leaks["bytes"])
    assert {row.name for row in evaluation.worst_rows} == {"bytes"}
    assert any(weight == 0 for row in evaluation.worst_rows for *_, weight in row.wanted)
    assert len(evaluation.notes) == 1  # little text
    print_evaluation(evaluation)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    classes = {class_label(c.token_class) for c in evaluation.classes}
    listed = [[cell.strip() for cell in row] for row in rows if row[0].strip() in classes]
    assert len(listed) == len(classes)
    for name, starts, shared, *shown in listed:
        by_bytes_row, merged_row = measures_by_class["bytes", name], measures_by_class["one", name]
        assert (starts, shared) == (f"{by_bytes_row.starts:,}", f"{by_bytes_row.reference:.2%}")
        assert shown == [f"{by_bytes_row.loss:.2%}", f"{merged_row.loss:.2%}"]


def test_mutants_of_event_maps(pair: Pair, tmp_path: Path) -> None:
    """A mutant loads and works, or raises an error of one line; `verify` reports damage."""
    path = tmp_path / "e.safetensors"
    events(*pair.tokenizers).save(path)
    data, chance = path.read_bytes(), random.Random(7)
    end = 8 + int.from_bytes(data[:8], "little")
    for number in range(400):
        cut = end if number % 2 else len(data)
        path.write_bytes(mutant(data[:cut], chance) + data[cut:])
        with within(10), contextlib.suppress(MapFileError):
            failed = set(verify(path).failed)
            try:
                EventMap.load(path)
                # A later version may define an unknown role.
                assert failed <= {"student roles", "teacher roles"}, number
            except MapFileError:
                assert failed, number


def test_options_that_event_maps_refuse(cli: Cli, models: list[str]) -> None:
    sides = ["-s", models[0], "-t", models[1]]
    works(cli("events", *models, "-o", "e.safetensors", "--quiet"))
    works(cli("build", *models, "-o", "m.safetensors", "--quiet"))
    for words, message in (
        (["inspect", "e.safetensors", "--worst", "3"], "an event map has no rows"),
        (["report", "e.safetensors"], "hint: use xtok verify or xtok inspect for this file"),
        (["sort-cut", "e.safetensors", "-k", "2"], "is an event map"),
        (["events", *models, "-o", "e.pt"], "does not end in .safetensors"),
        (["evaluate", "e.safetensors", "m.safetensors", *sides, "--text", "e"], "no file"),
    ):
        result = cli(*words)
        assert result.returncode in (1, 2), words
        assert message in " ".join(result.stderr.split()).replace("│ ", ""), (words, result.stderr)
