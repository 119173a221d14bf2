"""The example training script, with random models of a few thousand parameters."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import distill
import pytest
import small_tokenizers
import torch
from tiny_models import tiny_model

import xtok
from xtok import ProjectionMap, XtokError
from xtok.loss_names import LossName
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training.collator import DistillationCollator
from xtok.training.losses.registry import LOSSES

pytestmark = pytest.mark.filterwarnings("ignore:this map is not made for P-KL:UserWarning")

STEPS = 6


@pytest.fixture(scope="module")
def setting(
    tmp_path_factory: pytest.TempPathFactory, small: Path, byte_level: Tokenizer, digits: Tokenizer
) -> list[str]:
    """The options of a student and a teacher, a map, and texts."""
    folder = tmp_path_factory.mktemp("models")
    for name, side, seed in (("student", digits, 0), ("teacher", byte_level, 1)):
        model = tiny_model(side.vocabulary.vocab_size, seed=seed, dropout=0.1)
        model.save_pretrained(folder / name)
    xtok.build(digits, byte_level).save(folder / "map.safetensors")
    (folder / "texts.txt").write_text(small_tokenizers.ENGLISH, encoding="utf-8")
    held_out = [{"text": "The light reaches 201 steps."}, {"text": "High water at 6:12."}]
    lines = "".join(json.dumps(line) + "\n" for line in held_out)
    (folder / "held-out.jsonl").write_text(lines, encoding="utf-8")
    return [
        f"--student={folder / 'student'}", f"--student-tokenizer={small / 'small-digits'}",
        f"--teacher={folder / 'teacher'}", f"--teacher-tokenizer={small / 'small-byte-level'}",
        f"--map={folder / 'map.safetensors'}", f"--texts={folder / 'texts.txt'}",
        f"--held-out={folder / 'held-out.jsonl'}", "--batch-size=2", "--max-length=48",
        "--warmup=2", "--learning-rate=0.01",
    ]  # fmt: skip


def run(setting: list[str], output: Path, *options: str, steps: int = STEPS) -> list[Any]:
    if not any(option.startswith("--loss=") for option in (*setting, *options)):
        options = (*options, "--loss=p-kl")  # the setting's map is a projection map
    distill.main([*setting, f"--output={output}", f"--steps={steps}", *options])
    log = (output / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in log.splitlines()]


def without(setting: list[str], *names: str) -> list[str]:
    return [option for option in setting if not option.startswith(names)]


def weights(output: Path) -> dict[str, torch.Tensor]:
    student: dict[str, torch.Tensor] = torch.load(output / "checkpoint.pt")["student"]
    return student


def test_the_student_is_saved_with_its_tokenizer(
    setting: list[str], digits: Tokenizer, tmp_path: Path
) -> None:
    run(setting, tmp_path / "run", steps=1)
    student = str(tmp_path / "run" / "student")
    assert not xtok.doctor(student).failed
    assert xtok.load_pair(student, digits).is_same


@pytest.mark.parametrize("loss", ["event-kl", "p-kl", "gold", "csd", "alm"])
def test_every_loss_trains(setting: list[str], tmp_path: Path, pair: Pair, loss: LossName) -> None:
    path = tmp_path / "map.safetensors"
    if loss in ("event-kl", "csd"):
        make = xtok.events if loss == "event-kl" else xtok.spellings
        make(pair.reversed).save(path)
        setting = [*without(setting, "--map="), f"--map={path}"]
    if LOSSES[loss].map is None:
        setting = without(setting, "--map=")
    log = run(setting, tmp_path / "run", f"--loss={loss}", "--temperature=2")
    assert [line["step"] for line in log] == list(range(STEPS))
    for line in log:
        # Gold may be negative, because its pairs are not a whole distribution.
        assert line["distillation"] > 0 or loss == "gold"
        assert line["loss"] == pytest.approx(line["distillation"] + line["cross_entropy"], rel=1e-5)
        assert all(math.isfinite(value) for value in line.values())
    assert log[-1]["cross_entropy"] < log[0]["cross_entropy"]


def test_a_run_that_was_interrupted_ends_the_same(setting: list[str], tmp_path: Path) -> None:
    options = ("--save-every=2", "--learn-map", "--seed=3")
    whole = run(setting, tmp_path / "whole", *options)

    class Interrupted(Exception):
        pass

    def fail(step: int, options: Any) -> float:
        if step == 5:  # after the checkpoint of step 3, and after a line of the log
            raise Interrupted
        return rate(step, options)

    rate = distill.learning_rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "learning_rate", fail)
        with pytest.raises(Interrupted):
            run(setting, tmp_path / "cut", *options)
    lines = (tmp_path / "cut" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5
    torch.manual_seed(99)
    resumed = run(setting, tmp_path / "cut", *options)
    assert resumed == whole
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[name], second[name]) for name in first)
    maps = [tmp_path / name / "map-0.safetensors" for name in ("whole", "cut")]
    assert maps[0].read_bytes() == maps[1].read_bytes()
    learned = ProjectionMap.load(maps[0])
    assert learned.history[-1]["stage"] == "learn"
    again = run(setting, tmp_path / "cut", *options)  # the run is already complete
    assert again == whole


def test_cross_entropy_without_distillation_and_dynamic_scaling(
    setting: list[str], tmp_path: Path
) -> None:
    log = run(without(setting, "--teacher", "--map"), tmp_path / "alone", steps=2)
    assert [line["distillation"] for line in log] == [0.0, 0.0]
    log = run(setting, tmp_path / "scaled", "--dynamic-scaling", "--loss=p-kl", steps=2)
    assert all(line["loss"] == pytest.approx(2 * line["cross_entropy"]) for line in log)


def test_hidden_states_train_the_same_as_whole_logits(
    setting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = [*without(setting, "--map="), "--loss=alm"]
    hidden = run(setting, tmp_path / "hidden", steps=3)
    assert "in blocks" in capsys.readouterr().err
    whole = run(setting, tmp_path / "whole", "--logits", steps=3)
    assert "note" not in capsys.readouterr().err
    for ours, theirs in zip(hidden, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_cpu_that_is_slow_in_bfloat16(
    setting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for is_fast in (True, False):
        monkeypatch.setattr(distill, "fast_in_bfloat16", lambda fast=is_fast: fast)
        run(setting, tmp_path / str(is_fast), "--autocast", steps=1)
        assert ("remove --autocast" in capsys.readouterr().err) is not is_fast


def test_losses_of_several_teachers_are_weighted(setting: list[str], tmp_path: Path) -> None:
    teacher = [o for o in setting if o.startswith(("--teacher", "--map"))]
    single = run(setting, tmp_path / "one", steps=1)
    both = [*setting, *teacher]
    weighted = ("--teacher-weight=0.5", "--teacher-weight=2")
    two = run(both, tmp_path / "two", *weighted, steps=1)
    assert two[0]["distillation"] == pytest.approx(2.5 * single[0]["distillation"], rel=1e-5)
    # a file that exists only for the first teacher
    mixed: tuple[str, ...] = ("--loss=p-kl", "--loss=gold", "--top-k=5")
    assert run(both, tmp_path / "mixed", *mixed, steps=1)[0]["distillation"] > 0
    mixed = ("--loss=alm", "--loss=p-kl")  # only the second teacher has a map
    without_map = [*setting, *teacher[:2]]
    assert run(without_map, tmp_path / "one map", *mixed, steps=1)[0]["distillation"] > 0


def test_averaged_logits_of_two_teachers(setting: list[str], small: Path, tmp_path: Path) -> None:
    student = next(o for o in setting if o.startswith("--student=")).removeprefix("--student=")
    same = [f"--teacher={student}", f"--teacher-tokenizer={small / 'small-digits'}"] * 2
    options = ("--teachers=averaged-logits", "--loss=same-tokenizer")
    plain = without(setting, "--teacher", "--map")
    log = run([*plain, *same], tmp_path / "run", *options, steps=2)
    # The student is its own teacher, except for dropout.
    assert log[0]["distillation"] == pytest.approx(0, abs=1e-4)
    assert log[1]["distillation"] > 2 * log[0]["distillation"]


def test_averaged_logits_ignore_teachers_of_weight_0() -> None:
    a, b = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 8.0, 0.0]]])
    assert distill.averaged_logits([a, b], [1, 1]).tolist() == [[[2.0, 5.0]]]
    assert distill.averaged_logits([a, b], [3, 1]).tolist() == [[[1.5, 3.5]]]
    masked = torch.tensor([[[-torch.inf, 4.0]]])
    assert distill.averaged_logits([a, masked], [1, 0]).tolist() == [[[1.0, 2.0]]]
    assert distill.averaged_logits([a, masked], [1, 1]).tolist() == [[[-torch.inf, 3.0]]]
    with pytest.raises(XtokError, match="weights are all 0"):
        distill.averaged_logits([a, b], [0, 0])


def test_bits_per_byte(setting: list[str], digits: Tokenizer, tmp_path: Path) -> None:
    log = run(setting, tmp_path / "run", "--autocast", "--plot", "--measure-every=4")
    assert [line["step"] for line in log if "bits_per_byte" in line] == [3, 5]
    assert (tmp_path / "run" / "log.png").read_bytes()[:4] == b"\x89PNG"
    student = distill.load_model(str(tmp_path / "run" / "student"), digits)
    for parameter in student.parameters():
        torch.nn.init.zeros_(parameter)  # all tokens are equally likely
    text = "The light reaches 201 steps."
    collate = DistillationCollator(digits, [])
    bits = distill.bits_per_byte(student, [text], collate, 1)
    num_tokens = len(digits.segment(text.encode()))
    width = digits.vocabulary.vocab_size
    assert bits == pytest.approx(num_tokens * math.log2(width) / len(text), rel=1e-5)


def test_from_scratch_and_bad_input(setting: list[str], tmp_path: Path, capsys: Any) -> None:
    first = run(setting, tmp_path / "a", "--from-scratch", "--seed=1", steps=1)
    assert first == run(setting, tmp_path / "b", "--from-scratch", "--seed=1", steps=1)
    assert first != run(setting, tmp_path / "c", "--from-scratch", "--seed=2", steps=1)
    with pytest.raises(SystemExit):
        run(without(setting, "--map"), tmp_path / "d")
    message = "--loss p-kl requires a projection map: give it as --map\n"
    assert capsys.readouterr().err.endswith(message)
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    empty = [*without(setting, "--texts"), f"--texts={tmp_path / 'empty.jsonl'}"]
    with pytest.raises(XtokError, match="contain no texts"):
        run(empty, tmp_path / "e")
    mistaken = [o.replace("small-digits", "small-byte-level") for o in setting]
    with pytest.raises(XtokError, match=r"896 rows, .* 1200 ids"):
        run(mistaken, tmp_path / "f", steps=1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--batch-size=0", "argument --batch-size: 0, expected at least 1"),
        ("--steps=-1", "argument --steps: -1, expected at least 0"),
        ("--clip=nan", "argument --clip: nan, expected at least 0"),
        ("--warmup=x", "argument --warmup: invalid int value: 'x'"),
        ("--teacher-weight=-1", "argument --teacher-weight: -1, expected at least 0"),
        ("--top-k=0", "top_k is 0, expected at least 1"),
        ("--device=tpu9", "--device tpu9: "),
        ("--plot=no-run", "--plot no-run: this folder contains no log.jsonl"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(
    setting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str,
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as error:
        run(setting, tmp_path / "run", option)
    assert error.value.code == 2
    assert f": error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_errors_for_users_lose_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    error = XtokError("no", hint="use {option}", parameter="student_template")
    monkeypatch.setattr(distill, "main", lambda: fail(error))
    with pytest.raises(SystemExit) as caught:
        distill.program()
    assert caught.value.code == "error: no\nhint: use --student-chat-template"
    monkeypatch.setattr(distill, "main", lambda: fail(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        distill.program()


def test_a_plot_that_cannot_be_drawn_fails_before_training(
    setting: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    with pytest.raises(SystemExit):
        run(setting, tmp_path / "run", "--plot", steps=1)
    assert not (tmp_path / "run").exists()


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["one\u2028two", "three\x85four"]  # line ends only in Python's splitlines
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\r\n".join(lines) + "\n\n", encoding="utf-8", newline="")
    assert distill.read_texts([path]) == [{"text": text} for text in texts]


@pytest.mark.parametrize("between", ["\n\n", "\r\n\r\n", "\n \t\n", "\n\n\n"])
def test_blank_lines_end_paragraphs(tmp_path: Path, between: str) -> None:
    path, texts = (
        tmp_path / "a.txt",
        ["First line,\nsecond line.", "Fog.", "x" * 70_000, "High\u2028water"],
    )
    path.write_text(between.join(texts) + "\n", encoding="utf-8", newline="")
    assert distill.read_texts([path]) == texts


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Fog."}\n', encoding="utf-8-sig")
    assert distill.read_texts([path]) == [{"text": "Fog."}]


def test_options_that_do_not_fit_the_teachers(
    setting: list[str], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher_options = [o for o in setting if o.startswith(("--teacher=", "--map="))]
    for more, message in (
        (teacher_options[:1], "1 of --teacher-tokenizer for 2 of --teacher"),
        (teacher_options[1:], "2 of --map, but 1 of the losses use a map"),
        (["--teacher-weight=1"] * 3, "3 of --teacher-weight for 1 of --teacher"),
        (["--loss=gold"] * 2, "2 of --loss for 1 of --teacher"),
        (["--loss=alm"], "1 of --map, but 0 of the losses use a map"),
        (["--loss=gold", "--learn-map"], "--learn-map requires --loss p-kl"),
    ):
        with pytest.raises(SystemExit):
            run([*setting, *more], tmp_path / "run")
        assert capsys.readouterr().err.endswith(f"error: {message}\n")
    student = next(o for o in setting if o.startswith("--student=")).removeprefix("--student=")
    other = [f"--teacher={student}", f"--teacher-tokenizer={small / 'small-digits'}"]
    other += [o for o in setting if o.startswith("--map=")]
    with pytest.raises(XtokError, match="one tokenizer"):
        run([*setting, *other], tmp_path / "run", "--teachers=averaged-logits")


@pytest.mark.parametrize("learn", [(), ("--learn-map",)])
def test_maps_and_losses_belong_to_the_tokenizers(
    setting: list[str], pair: Pair, digits: Tokenizer, tmp_path: Path, learn: tuple[str, ...]
) -> None:
    path = tmp_path / "map.safetensors"
    for sides, words in (
        (pair.tokenizers, "swapped"),
        ((digits, "bytes"), "teacher .*other tokens"),
    ):
        xtok.build(*sides).save(path)
        options = [*without(setting, "--map="), f"--map={path}", *learn]
        with pytest.raises(XtokError, match=words):
            run(options, tmp_path / "run", steps=1)
    if not learn:
        with pytest.raises(XtokError, match="needs equal tokenizers"):
            run(without(setting, "--map="), tmp_path / "run", "--loss=same-tokenizer", steps=1)


def test_order_of_texts_depends_on_seed_and_step() -> None:
    options = argparse.Namespace(steps=7, batch_size=3, seed=5)
    whole = list(distill.batches(5, options, 0))
    assert list(distill.batches(5, options, 4)) == whole[4:]
    flat = [i for batch in whole for i in batch]
    assert [sorted(flat[s : s + 5]) for s in (0, 5, 10, 15)] == [[0, 1, 2, 3, 4]] * 4
    assert flat[:5] != flat[5:10]


def test_chats_need_a_template_for_each_side(setting: list[str], tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "How many steps?"},
        {"role": "assistant", "content": "201."},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    chats = [*without(setting, "--texts"), f"--texts={tmp_path / 'chats.jsonl'}"]
    with pytest.raises(XtokError) as error:
        run(chats, tmp_path / "run", steps=1)
    assert error.value.parameter == "student_template"
    templates = ["--student-chat-template=chatml", "--teacher-chat-template=chatml"]
    [line] = run([*chats, *templates], tmp_path / "run", steps=1)
    assert line["distillation"] > 0


def test_event_kl_is_the_default(setting: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        distill.main([*without(setting, "--map"), "--output=run"])
    assert "--loss event-kl requires an event map: give it as --map\n" in capsys.readouterr().err
