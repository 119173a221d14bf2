"""The study runs to its end with tiny models, and resumes."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distill
import numpy as np
import prune
import pytest
import study
import study_data
import study_policy
import torch
from tiny_models import save_model

import xtok
from xtok.building.build import build
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses import CombineConfig, cross_entropy
from xtok.training.objective import Objective
from xtok.training.running import logits_of

TEXTS = Path(__file__).with_name("small_corpus")
KINDS = {"de": "german", "held": "french", "en": "english"}


@pytest.fixture
def options(tmp_path: Path, small: Path) -> list[str]:
    """Options of a short study: a student of three layers, a teacher of one, a text of each."""
    arguments = []
    for name, language in KINDS.items():
        text = (TEXTS / f"{language}.txt").read_text(encoding="utf-8")
        lines = json.dumps({"text": text}).encode() + b"\n"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    for option, name in zip(("texts", "held-out", "forgotten"), KINDS, strict=True):
        arguments.append(f"--{option}={tmp_path / name}.jsonl.gz")
    models = (("own-teacher", "small-digits", 3), ("teacher", "small-byte-level", 1))
    for option, name, layers in models:
        tokenizer = xtok.load_tokenizer(str(small / name))
        folder = tmp_path / option
        save_model(folder, tokenizer, small / name, seed=0, sharp=0.1, layers=layers)
        arguments.append(f"--{option}={folder}")
    return [*arguments, "--seeds=1", "--steps=4", "--batch-size=1", "--passes=2", "--rates", "5e-3"]


class Here:
    """A pool that runs each call at once in this process, with one thread of PyTorch."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def apply_async(self, function: Any, args: Any) -> SimpleNamespace:
        sent = ForkingPickler.dumps((function, args))  # as to another process
        function, args = ForkingPickler.loads(sent)
        function(*args)
        return SimpleNamespace(get=lambda: None)


def study_with(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=Here))
    study.main(options)


@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
@pytest.mark.usefixtures("few_synthetic_texts")
def test_every_student_is_trained_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    work, teacher = tmp_path / "study", str(tmp_path / "teacher")
    options += ["2e-3", "--settings=scarce", f"--student={tmp_path / 'own-teacher'}"]
    study_with(monkeypatch, *options, f"--work={work}")
    table = capsys.readouterr().out
    results = study.results(work)
    runs = list(dict.fromkeys(study.plan(["scarce"], 1, (5e-3, 2e-3))))
    assert sorted(run for run, _ in results) == sorted([*study.ITSELF_AFTER, study.ITS_OWN, *runs])
    assert len(runs) == 6 + 3 + 1 + 3 + 3 + 3
    for row in (
        "topk-kl | path-64 | 1 | 1", "topk-kl | path-64 | 0.3 | 1", "gold | for-gold | 1 | 1",
        "same-tokenizer | own | 1 | 1", "label-smoothing | none | 0.1 | 1", "ce | written | 1 | 1",
    ):  # fmt: skip
        assert table.count(f"\n| {row} | 1 |") == 1
    by_tokens, by_events = (
        dict(results)[study.run_of("scarce", row, 0, 5e-3)] for row in (study.CE, study.EVENTS)
    )
    saved, read_bytes = 0.0, 0
    for group in (0, 2):  # the held-out texts, and the texts for the choice of the learning rate
        saved += sum(by_tokens["bits"][-1][group]) - sum(by_events["bits"][-1][group])
        read_bytes += sum(by_tokens["bytes"][group])
    [shown] = [
        line.split(" | ") for line in table.splitlines() if "| event-kl | bytes | 1 " in line
    ]
    assert shown[17] == f"{saved / read_bytes:.3f}"
    study.report(results, "topk-kl", "map-64")
    against = capsys.readouterr().out
    assert "| topk-kl | map-64 | 1 | 1 | 1 | " in against
    assert "| 0.000 | 0.000 to 0.000 |" in against
    single = dict(results)[runs[0]]
    assert single["steps"] == [0, 1, 2, 3, 4]
    [held_rows] = study_data.rows_of(tmp_path / "held.jsonl.gz", 0, 20, one_each=True)
    held, before = held_rows["text"], held_rows["teacher_context"]
    document = (TEXTS / "french.txt").read_text(encoding="utf-8")
    assert len(before) > 300
    assert (before + held)[-len(held) - 300 :] in document
    assert single["bytes"][0] == [len(held.encode())]
    asked = dict(results)[study.ITSELF]
    assert asked["bits"][0][0] == [pytest.approx(bits_alone(teacher, held), rel=1e-4)]
    informed = dict(results)[study.ITSELF._replace(reads=300)]
    assert informed["bits"][0][0] == [
        pytest.approx(bits_alone(teacher, held, before[-300:]), rel=1e-4)
    ]
    assert f"the teacher none: {asked['bits'][0][0][0] / len(held.encode()):.3f}, " in table
    # Untrained, the student is the teacher with its own tokenizer.
    own = dict(results)[study.ITS_OWN]
    assert own["bits"][0][0] == pytest.approx(single["bits"][0][0])
    written = distill.read_texts([work / "scarce.0" / "written.jsonl"])
    read = distill.read_texts([work / "scarce.0" / "texts.jsonl"])
    assert len(written) == len(read) == 2
    for ours, theirs in zip(read, written, strict=True):
        assert theirs["text"].startswith(study_data.beginning(ours["text"]))
        assert theirs["text"] != ours["text"]
    lines_before = (work / "results.jsonl").read_bytes()
    (work / "results.jsonl").write_bytes(lines_before[: lines_before.rindex(b"\n", 0, -1) + 1])
    study_with(monkeypatch, *options, f"--work={work}")
    assert dict(study.results(work)).keys() == dict(results).keys()


def test_losses_are_compared_at_their_best_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """The last texts choose the best learning rate; the first texts are compared."""

    def line(held_out: float, to_choose_by: float) -> dict[str, Any]:
        return {"steps": [8], "bits": [[[held_out], [1.0], [to_choose_by]]], "bytes": [[10]] * 3}

    lines = {
        study.run_of("healing", row, 0, rate): line(held_out, to_choose_by)
        for row, rate, held_out, to_choose_by in (
            (study.CE, 2e-3, 20.0, 31.0), (study.CE, 1e-3, 22.0, 30.0),
            (study.EVENTS, 2e-3, 17.0, 28.0), (study.EVENTS, 1e-3, 16.0, 29.0),
            (study.CSD, 2e-3, 10.0, 10.0),
        )
    }  # fmt: skip
    study.report_rates(lines, "ce", "none")
    assert capsys.readouterr().out == (
        "event-kl bytes 1 8 steps at its best rate 0.002: 0.500 (0.500 to 0.500) better than "
        "ce none at its best rate 0.001 (seed 0)\n"
    )


@pytest.mark.parametrize(
    ("setting", "asked", "written"),
    [("healing", None, 7), ("healing", 3, 3), ("plenty", None, 2), ("scarce", None, 1)],
)
def test_as_many_texts_are_drawn_as_are_read(
    tmp_path: Path, setting: str, asked: int | None, written: int
) -> None:
    corpus = tmp_path / "corpus.jsonl.gz"
    corpus.write_bytes(gzip.compress(json.dumps({"text": "a line\n" * 1000}).encode()))
    args = argparse.Namespace(
        work=tmp_path, texts=corpus, steps=2, batch_size=1, passes=2, count=asked
    )
    run = study.run_of(setting, study.CE, 0, 1e-3)
    study_data.prepare_seed(args, [run])
    assert len(study_data.texts_read(args, run)) == written


@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
@pytest.mark.usefixtures("few_synthetic_texts")
def test_a_pruned_student_is_healed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    whole, cut = tmp_path / "own-teacher", tmp_path / "pruned"
    prune.main([str(whole), str(cut), "--layers", "0", "2"])
    assert "pruned: 2 of 3 layers, " in capsys.readouterr().out
    weights, left = map(saved_weights, (whole, cut))
    assert len(left) == len(weights) - sum(name.startswith("model.layers.1.") for name in weights)
    for name, tensor in left.items():
        assert tensor.equal(weights[name.replace("layers.1.", "layers.2.")])
    work = tmp_path / "study"
    options += ["--settings=healing", f"--student={cut}", "--steps=2", f"--work={work}", "--save"]
    picture = tmp_path / "curves.svg"
    study_with(monkeypatch, *options, f"--plot={picture}")
    results = dict(study.results(work))
    runs = set(study.plan(["healing"], 1, (5e-3,)))
    longest = max(runs, key=lambda run: run.length)
    assert results[longest]["steps"][-1] == round(2 * 3.6)
    assert all(0 <= line["words"][0] <= line["words"][1] for line in results.values())
    assert results.keys() == {*study.ITSELF_AFTER, study.ITS_OWN, *runs}
    kept = [study.run_of("healing", row, 0, 5e-3) for row in (study.CE, study.EVENTS)]
    [first, second] = (saved_weights(work / "students" / "-".join(map(str, run))) for run in kept)
    assert first.keys() == second.keys() == left.keys()
    assert not first["model.norm.weight"].equal(second["model.norm.weight"])
    curves = picture.read_text(encoding="utf-8")
    for row in (study.CE, *study.LONGER):
        steps = results[study.run_of("healing", row, 0, 5e-3)]["steps"][-1]
        assert f"<!-- {row.loss}, {steps} steps -->" in curves
    assert results[kept[0]]["teacher_seconds"] == 0 < results[kept[1]]["teacher_seconds"]
    [own] = [
        line for line in capsys.readouterr().out.splitlines() if "| same-tokenizer | own |" in line
    ]
    assert own.split(" | ")[11] == "1.00 (1.00 to 1.00)"
    single, without = (
        study.totals(results[study.run_of("healing", row, 0, 5e-3)])
        for row in (study.CE, study.EVENTS._replace(text=0.0))
    )
    assert single[-1] < single[0]
    assert single[-1] != without[-1]


def test_a_damaged_map_has_moved_rows(back: Pair) -> None:
    projection = build(back)
    worse = study_data.damaged(projection, 0.1)
    worse.check()
    moved = [
        row
        for row in set(projection.student_ids.tolist())
        if not all(map(np.array_equal, projection.row(row), worse.row(row)))
    ]
    assert len(moved) == round(0.1 * len(set(projection.student_ids.tolist())))
    assert sorted(projection.weights.tolist()) == sorted(worse.weights.tolist())


def test_exchanged_events_have_the_same_sizes(back: Pair) -> None:
    event_map = xtok.events(back)
    worse = study_data.exchanged(event_map)
    worse.check()
    assert np.array_equal(worse.student_event, event_map.student_event)
    sizes, worse_sizes = (
        np.sort(np.bincount(x.teacher_event)).tolist() for x in (event_map, worse)
    )
    assert sizes == worse_sizes
    assert (worse.teacher_event != event_map.teacher_event).mean() > 0.5


def test_chunks_of_whole_words_begin_with_a_space(models: list[str], back: Pair) -> None:
    collate = DistillationCollator(*back.tokenizers, bos=False)
    batch = prepare(collate(["The unbelievable Donaudampfschiff sinks", "a b"]))
    [side] = batch["teachers"]
    teacher = study_data.Teacher(
        argparse.Namespace(student=models[0], teacher=models[1]),
        study_data.Run("healing", "ce", "none", 1.0, 1.0, 0, 1e-3),
    )
    words = teacher.of_words(batch)["shifted"]
    row_words = []
    for row, ids in enumerate(batch["targets"]):
        chunks = words.student_chunk_id[row]
        valid = words.pair_valid[row].nonzero()[:, 0].tolist()
        row_words.append([b"".join(back.tables[0][i] for i in ids[chunks == k].tolist())
                      for k in valid])  # fmt: skip
        same = side["shifted"]
        assert torch.equal(chunks >= 0, same.student_chunk_id[row] >= 0)
    assert row_words == [[b" unbelievable", b" Donaudampfschiff", b" sinks"], [b" b"]]


def test_strict_chunks_have_a_single_token_on_both_sides(back: Pair) -> None:
    collate = DistillationCollator(*back.tokenizers, bos=False)
    batch = prepare(collate(["The unbelievable Donaudampfschiff sinks 1234"]))
    [side] = batch["teachers"]
    strict, whole = study_data.one_to_one(batch)["shifted"], side["shifted"]
    sizes = [
        torch.bincount(ids[0][ids[0] >= 0], minlength=whole.pair_valid.shape[1])
        for ids in (whole.student_chunk_id, whole.teacher_chunk_id)
    ]
    is_single = (sizes[0] == 1) & (sizes[1] == 1)
    assert torch.equal(strict.pair_valid[0], whole.pair_valid[0] & is_single)
    assert 0 < strict.pair_valid.sum() < whole.pair_valid.sum()


@pytest.mark.usefixtures("few_synthetic_texts")
def test_on_policy_the_teacher_reads_the_text_of_the_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    student, teacher = (str(tmp_path / name) for name in ("own-teacher", "teacher"))
    options += ["--settings=policy", f"--student={student}"]
    text = (TEXTS / "german.txt").read_text(encoding="utf-8") * 4
    (tmp_path / "de.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": text}).encode()))
    monkeypatch.setattr(study_data, "READ", {"policy": 2})
    study_with(monkeypatch, *options, f"--work={tmp_path}")
    results = dict(study.results(tmp_path))
    runs = [study.run_of("policy", row, 0, 5e-3) for row in (study.CE, study.EVENTS, *study.WRITES)]
    assert results.keys() == {*study.ITSELF_AFTER, study.ITS_OWN, *runs}
    ends = {tuple(results[run]["bits"][-1][0]) for run in runs}
    assert len(ends) == len(runs)
    args = argparse.Namespace(
        texts=tmp_path / "de.jsonl.gz", work=tmp_path, student=student, teacher=teacher,
        device="cpu", autocast=False,
    )  # fmt: skip
    texts = study_data.texts_read(args, runs[0])
    assert texts == [{"text": text} for text in study_data.texts_of(args.texts, 0, 6)[2:]]

    collate = study_data.collator(args)
    ours, theirs = study_data.sides(student, teacher).tokenizers
    model = distill.load_model(student, ours)
    policy = study_policy.OnPolicy(args, runs[2], model, texts)
    beginnings = [study_data.beginning(row["text"]) for row in texts[:2]]
    torch.manual_seed(0)
    batch = policy.written([beginnings[0], beginnings[1][:20]])
    said, side = policy.said(batch, [0, 1])
    begin = list(theirs.table.roles.get("bos", ())[:1])
    for row, text in enumerate((beginnings[0], beginnings[1][:20])):
        text_ids = ours.encode(text).ids.tolist()
        ids, wanted = (
            batch[x][row][batch["attention_mask"][row] > 0] for x in ("input_ids", "labels")
        )
        assert ids[: len(text_ids)].tolist() == text_ids
        assert wanted[: len(text_ids)].eq(-100).all()
        assert torch.equal(ids[len(text_ids) :], wanted[len(text_ids) :])
        assert 0 < len(ids) - len(text_ids) <= study_policy.NEW_TOKENS
        read = side["input_ids"][row][side["attention_mask"][row] > 0]
        assert read[: len(begin)].tolist() == begin
        written = read[len(begin) :]
        assert b"".join(theirs.table[i] for i in written) == b"".join(ours.table[i] for i in ids)
        logits = policy.teacher(read[None]).logits[0]
        torch.testing.assert_close(said[row, : len(read)], logits, rtol=1e-4, atol=1e-4)

    whole = prepare(collate(texts[:2]))
    logits = logits_of(model, whole)
    torch.manual_seed(1)
    loss = policy.loss(logits, whole, [0, 1])
    torch.manual_seed(1)
    batch = policy.written(beginnings)
    objective = Objective(losses=policy.losses, combine=CombineConfig(cross_entropy_weight=0.0))
    terms = objective.terms(logits_of(model, batch), [policy.said(batch, [])[0]], batch)
    own = cross_entropy(logits, whole["targets"])
    torch.testing.assert_close(loss, own + terms.loss)
    assert terms.loss > 0


def test_a_word_is_found_if_each_of_its_tokens_is_the_most_probable(digits: Tokenizer) -> None:
    collate = DistillationCollator(digits, digits, bos=False)
    text = "The unbelievable Donaudampfschiff sinks"
    ids = digits.encode_batch([text])[0]
    words = [i for i, token in enumerate(ids) if digits.table[token].startswith(b" ")]

    class Model(torch.nn.Module):
        """A model that predicts all tokens of the text except one."""

        def __init__(self, wrong: int | None) -> None:
            super().__init__()
            self.none, self.wrong = torch.nn.Parameter(torch.zeros(1)), wrong

        def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
            logits = torch.zeros(1, len(ids), len(digits.table))
            for position, token in enumerate(ids[1:]):
                logits[0, position, token] = -1.0 if position + 1 == self.wrong else 1.0
            return SimpleNamespace(logits=logits)

    assert study.words_found(Model(None), [text], collate) == (3, 3)
    assert study.words_found(Model(words[1]), [text], collate) == (2, 3)
    assert study.words_found(Model(words[2] - 1), [text], collate) == (2, 3)


def test_the_other_direction_uses_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        study_with(monkeypatch, *options, f"--work={tmp_path}", "--settings", "healing", "reversed")
    runs = list(study.plan(["reversed"], 3))
    assert {run.artefact for run in runs if run.loss == "topk-kl"} == {
        "path-64", "map-64", "first-64",
    }  # fmt: skip
    assert len(runs) == len(set(runs)) == 8 * 3 + 2


def saved_weights(folder: Path) -> Any:
    """Return the weights of a folder that Transformers loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def bits_alone(folder: str, text: str, before: str = "") -> float:
    """Return the bits of a text after its first token, the model asked directly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    begin += tokenizer.encode(before, add_special_tokens=False)
    ids = begin + tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    return float(-logprobs[len(begin) :].sum()) / math.log(2)


def test_the_candidates_of_a_batch_belong_to_its_texts() -> None:
    rows = [
        {"top_ids": torch.tensor([[0, 0], [3, 4]]), "top_logprobs": torch.zeros(2, 2),
         "rest_logprob": torch.tensor([0.0, -1.0])},
        {"top_ids": torch.tensor([[0], [5], [6]]), "top_logprobs": torch.ones(3, 1),
         "rest_logprob": torch.tensor([0.0, -2.0, -3.0])},
    ]  # fmt: skip
    valid = torch.tensor([[True, True, False], [True, True, True]])
    batch = study_data.padded(rows, valid)
    assert batch.top_ids.tolist() == [[[0, 0], [3, 4], [0, 0]], [[0, 0], [5, 0], [6, 0]]]
    assert batch.top_logprobs[1].tolist() == [[1, -torch.inf]] * 3
    assert batch.rest_logprob.tolist() == [[0, -1, -torch.inf], [0, -2, -3]]
