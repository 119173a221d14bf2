"""`XTokGOLDTrainer`: runs of TRL's GOLD with random models on a CPU, on and off policy."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_families import CHAT
from tiny_models import logged, tiny_model, weights_of

import xtok
from xtok import ProjectionModule, TokenAligner, XtokError, losses
from xtok.alignment.aligner import shift_to_predictions
from xtok.tokenizers import load_tokenizer
from xtok.training.batches import Batch
from xtok.training.running import run

pytestmark = [
    # occurs at random
    pytest.mark.filterwarnings("ignore:first batch. the teacher needs:UserWarning"),
    pytest.mark.filterwarnings("ignore:this map is not made for P-KL:UserWarning"),
    # Warnings of TRL 1.16 and transformers 5.
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL is not installed (Python 3.11 or newer): pip install -e '.[trl]'",
    ),
]

ROWS = [
    {"prompt": "The keeper", "completion": " lit 201 lamps — día tras día — and slept."},
    {"prompt": "High water: ", "completion": "at 6:12."},
    {"prompt": "Fog", "completion": "."},
    {"prompt": "Low water is", "completion": " at 12:40, and the boat comes on Friday."},
]


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable TRL's telemetry."""
    monkeypatch.setenv("CI", "1")


@pytest.fixture
def gold() -> Any:
    return importlib.import_module("xtok.training.trainers.trl")


Make = Callable[..., Any]


@pytest.fixture
def make_trainer(gold: Any, small: Path, tmp_path: Path) -> Make:
    """Return a trainer of two models with their tokenizers, and a map between them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    def make(
        student: Path | str = "small-digits", teacher: Path | str = "small-byte-level",
        rows: Any = ROWS, *, loss: Any = "p-kl", template: str | None = None,
        chat_template: str | None = None, at: str = "run", model: Any = tiny_model, **options: Any,
    ) -> Any:  # fmt: skip
        folders = [str(small / folder) for folder in (student, teacher)]
        sides = [load_tokenizer(folder) for folder in folders]
        widths = [side.vocabulary.vocab_size for side in sides]
        tokenizer = AutoTokenizer.from_pretrained(folders[0])
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        settings: dict[str, Any] = {
            "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.01, "lmbda": 0.5,
            "max_completion_length": 8, "max_length": 64, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
            "disable_tqdm": True, "seed": 1, "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant", "output_dir": str(tmp_path / at),
            "teacher_tokenizer_name_or_path": folders[1],
        }  # fmt: skip
        dataset = Dataset.from_list(rows)
        make = xtok.build if loss != "csd" else xtok.spellings
        return gold.XTokGOLDTrainer(
            model(widths[0], seed=0),
            tiny_model(widths[1], seed=1, sharp=0.5),
            gold.GOLDConfig(**(settings | options)),
            loss=loss,
            map=make(sides[0], sides[1]) if loss != "alm" else None,
            teacher_template=template,
            train_dataset=dataset,
            eval_dataset=dataset,
            processing_class=tokenizer,
        )

    return make


def first_batch(trainer: Any) -> dict[str, Any]:
    """Return a batch as GOLD passes it to `compute_loss` off policy."""
    batch: dict[str, Any] = next(iter(trainer.get_eval_dataloader()))
    return batch


# GOLD itself cannot align small-hf, because it is a SentencePiece model.
PAIRS = [
    ("small-digits", "small-byte-level", "p-kl"), ("small-hf", "small-byte-level", "gold"),
    ("small-digits", "small-hf", "h-kl"), ("small-hf", "small-digits", "alm"),
    ("small-hf", "small-byte-level", "csd"),
]  # fmt: skip


@pytest.mark.parametrize(("student", "teacher", "loss"), PAIRS)
def test_training_on_policy_and_off_policy(
    make_trainer: Make, student: str, teacher: str, loss: str
) -> None:
    trainer = make_trainer(student, teacher, loss=loss, max_steps=5, gradient_accumulation_steps=2)
    calls = watch(trainer)
    trainer.train()
    assert len(logged(trainer)) == 5
    assert np.isfinite(logged(trainer)).all()
    made_of = zip(logged(trainer, "cross_entropy"), logged(trainer, "distillation"), strict=True)
    weights = trainer.args.uld_crossentropy_weight, trainer.args.uld_distillation_weight
    totals = [weights[0] * own + weights[1] * kd for own, kd in made_of]
    assert totals == pytest.approx(logged(trainer), abs=1e-3)
    assert logged(trainer, "on_policy_loss")
    assert logged(trainer, "off_policy_loss")
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert len(calls) == 10
    for batch in calls:
        all_is_aligned(trainer, batch)


def all_is_aligned(trainer: Any, batch: Batch) -> None:
    """Check that chunks of completions have equal bytes, for any author of the completion.

    Random models also write control tokens, and ids beyond their tokenizers.
    """
    [side] = batch["teachers"]
    aligned, collate = side["alignment"], trainer.distillation_collator
    table, paired = collate.student.table, collate.aligners[0].student.paired_controls
    counts = [bool(n) or i in paired for i, n in enumerate(table.lengths.tolist())]
    labels = batch["labels"]
    expected = (labels >= 0) & torch.tensor(counts)[labels.clamp(min=0)]
    assert torch.equal(aligned.student_chunk_id >= 0, expected)
    assert torch.equal(aligned.teacher_chunk_id >= 0, side["labels"] >= 0)
    assert bool(aligned.pair_is_correct[aligned.pair_valid].all())
    assert int(aligned.pair_valid.sum()) > 2


def watch(trainer: Any) -> list[Batch]:
    """Return a list that collects every training batch."""
    seen: list[Batch] = []
    fill = trainer._fill_buffer

    def watched(*args: Any) -> None:
        fill(*args)
        seen.extend(inputs["_xtok"] for inputs in trainer._buffered_inputs)

    trainer._fill_buffer = watched
    return seen


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("student", ["small-digits", "small-hf"])
def test_the_loss_equals_that_of_the_functions(
    make_trainer: Make, small: Path, student: str
) -> None:
    trainer = make_trainer(student, temperature=1.0, uld_student_temperature=2.0,
                  uld_teacher_temperature=2.0, uld_distillation_weight=0.5,
                  uld_crossentropy_weight=0.25)  # fmt: skip
    inputs = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model, inputs)
    ours, theirs = (load_tokenizer(str(small / name)) for name in (student, "small-byte-level"))
    rows, masks = [], []
    roles = theirs.table.roles
    for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
        prompt, completion = (
            b"".join(
                ours.table[i]
                for i, label in zip(ids, labels, strict=True)
                if (label >= 0) is wanted
            )
            for wanted in (False, True)
        )
        assert labels[-1] == ours.table.roles["eos"][0]  # which GOLD appends
        first = [roles["bos"][0], *theirs.segment(prompt)]
        last = [*theirs.segment(completion), roles["eos"][0]]
        rows.append([*first, *last])
        masks.append([0] * len(first) + [1] * len(last))
    teacher_ids, attended = padded(rows), padded([[1] * len(row) for row in rows])
    alignment = TokenAligner(xtok.load_pair(ours, theirs)).align(
        inputs["input_ids"], teacher_ids, student_attention_mask=inputs["labels"] != -100,
        teacher_attention_mask=padded(masks),
    )  # fmt: skip
    alignment = replace(  # prompts predict the first token of an answer
        alignment, student_kept=inputs["attention_mask"] != 0, teacher_kept=attended != 0
    )
    with torch.no_grad():
        student_logits = trainer.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        teacher_logits = trainer.teacher_model(
            input_ids=teacher_ids, attention_mask=attended
        ).logits
    module, config = ProjectionModule(xtok.build(ours, theirs)), losses.PKLConfig(temperature=2)
    shifted = shift_to_predictions(alignment)
    kd = losses.p_kl(student_logits, teacher_logits, module, shifted, config)
    targets = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    own = torch.nn.functional.cross_entropy(student_logits.flatten(0, 1), targets.flatten())
    assert float(loss.detach()) == pytest.approx(float(0.5 * kd + 0.25 * own), rel=1e-5)


def test_padding_does_not_change_the_positions_of_a_row(make_trainer: Make) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def learned_positions(width: int, *, seed: int) -> Any:
        torch.manual_seed(seed)
        sizes: Any = {"n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=width, bos_token_id=None, eos_token_id=None, **sizes)
        )

    trainer = make_trainer(model=learned_positions)
    batch = first_batch(trainer)
    [row] = (batch["attention_mask"][:, 0] == 0).nonzero()[0].tolist()
    keep = batch["attention_mask"][row] != 0
    ids, mask = (batch[name][row, keep][None] for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        beside = run(trainer.model.eval(), trainer.prepared(batch)).logits[row, keep]
        expected = run(trainer.model, {"input_ids": ids, "attention_mask": mask}).logits[0]
    torch.testing.assert_close(beside, expected)


def test_the_coefficient_of_a_router_s_loss(make_trainer: Make) -> None:
    """TRL's option takes precedence over the configuration."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def experts(width: int, *, seed: int) -> Any:
        torch.manual_seed(seed)
        sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
        return MixtralForCausalLM(
            MixtralConfig(vocab_size=width, router_aux_loss_coef=0.5, **sizes, **heads)
        )

    router_losses = []
    for coefficient in (2.0, 5.0, 0.0):
        trainer = make_trainer(
            model=experts, lmbda=0.0, max_steps=1, router_aux_loss_coef=coefficient
        )
        trainer.train()
        router_losses.append(logged(trainer, "router"))
    assert router_losses[1][0] == pytest.approx(2.5 * router_losses[0][0], rel=1e-6)
    assert not router_losses[2]


def test_a_resumed_run_logs_the_same_values(make_trainer: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 5, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "lr_scheduler_type": "linear", "rows": ROWS * 5,
    }  # fmt: skip
    whole = make_trainer(at="whole", **options)
    whole.train()
    assert 0 < len(logged(whole, "on_policy_loss")) + len(logged(whole, "off_policy_loss")) <= 10
    resumed = make_trainer(at="again", **options)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "on_policy_loss") == logged(whole, "on_policy_loss")
    first, second = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_accumulation_is_exact(make_trainer: Make) -> None:
    """Rows have 2 to 24 targets, so the mean of two means would differ from the mean."""
    runs = []
    for batch_size, steps in ((4, 1), (1, 4)):
        trainer = make_trainer(lmbda=0.0, max_steps=1, optim="sgd", learning_rate=1.0,
                      per_device_train_batch_size=batch_size, uld_crossentropy_weight=1.0,
                      gradient_accumulation_steps=steps)  # fmt: skip
        start = weights_of(trainer.model)
        trainer.train()
        end = weights_of(trainer.model)
        runs.append((logged(trainer)[0], {name: end[name] - start[name] for name in start}))
    (loss, whole), (other_loss, other) = runs
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name, step in whole.items():
        torch.testing.assert_close(other[name], step, rtol=1e-4, atol=1e-6)


def test_losses_on_and_off_policy_are_means(make_trainer: Make) -> None:
    """A completion of the student has 8 targets; a completion of the dataset has up to 24."""
    trainer = make_trainer(
        max_steps=1, gradient_accumulation_steps=2, uld_crossentropy_weight=1.0,
        uld_distillation_weight=0.0, learning_rate=0.0,
    )  # fmt: skip
    seen = watch(trainer)
    trainer.train()
    means = []
    for batch in seen:
        with torch.no_grad():
            logits, targets = run(trainer.model, batch).logits, batch["targets"]
        is_target = targets >= 0
        means.append(
            float(torch.nn.functional.cross_entropy(logits[is_target], targets[is_target]))
        )
    own = [logged(trainer, f"{name}_policy_loss")[0] for name in ("on", "off")]
    assert sorted(own) == pytest.approx(sorted(means), abs=1e-3)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "rows", [[{"messages": CHAT}], [{"prompt": CHAT[:1], "completion": CHAT[1:]}]]
)
def test_a_teacher_reads_conversations_by_its_own_template(
    make_trainer: Make, small: Path, rows: Any
) -> None:
    template = "{{ mood }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    rows = [row | {"chat_template_kwargs": {"mood": "glad "}} for row in rows]
    trainer = make_trainer(
        rows=rows * 2, lmbda=0.5, template=template, chat_template=CHATML, max_steps=4
    )
    calls = watch(trainer)
    trainer.train()
    assert logged(trainer, "on_policy_loss")
    assert logged(trainer, "off_policy_loss")
    teacher = load_tokenizer(str(small / "small-byte-level"))
    student = load_tokenizer(str(small / "small-digits"))
    prompt = teacher.segment(b"glad [user] How many steps?\n[assistant] ")
    for batch in calls:
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            text = b"".join(student.table[i] for i in row.tolist())
            assert text.startswith(b"user\nHow many steps?")
            assert int((labels >= 0).sum()) > 1
        for ids in batch["teachers"][0]["input_ids"].tolist():
            text = b"".join(teacher.table[i] for i in ids)
            assert text.startswith(b"glad [user] How many steps?\n[assistant] ")
            assert ids[: len(prompt) - 1] == prompt[:-1]


SYSTEM = {"role": "system", "content": "The tower has 201 steps."}
CHATS_FOR_THE_TEACHER: list[Any] = [
    {"messages": CHAT, "teacher_messages": [SYSTEM, *CHAT]},
    {"messages": CHAT, "teacher_prompt": [SYSTEM, CHAT[0]]},
    {"prompt": CHAT[:1], "completion": CHAT[1:], "teacher_messages": [SYSTEM, *CHAT]},
    {"messages": CHAT, "teacher_prompt": "201 steps."},
    {"prompt": "How many?", "completion": " 201.", "teacher_prompt": "201 steps."},
    {"prompt": "How many?", "completion": " 201.", "teacher_context": "201 steps. "},
]


@pytest.mark.parametrize("row", CHATS_FOR_THE_TEACHER)
def test_a_teacher_reads_more_than_the_student(make_trainer: Make, small: Path, row: Any) -> None:
    """On policy and off policy, the teacher's ids are its own prompt and the student's answer."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    trainer = make_trainer(rows=[row] * 2, template=template, chat_template=CHATML, max_steps=2)
    calls = watch(trainer)
    trainer.train()
    teacher = load_tokenizer(str(small / "small-byte-level"))
    prompt = "[system] The tower has 201 steps.\n[user] How many steps?\n[assistant] "
    if row.get("teacher_prompt") == "201 steps.":
        prompt = "[user] 201 steps.\n[assistant] " if "messages" in row else "201 steps."
    if "teacher_context" in row:
        prompt = "201 steps. How many?"
    for batch in calls:
        [side] = batch["teachers"]
        assert not any(b"tower" in text for text in texts_of(trainer, batch["input_ids"]))
        for ids, labels in zip(side["input_ids"].tolist(), side["labels"].tolist(), strict=True):
            before = ids[: next(i for i, label in enumerate(labels) if label >= 0)]
            assert b"".join(teacher.table[i] for i in before) == prompt.encode()
        assert int(side["shifted"].pair_valid.sum()) > 0


def texts_of(trainer: Any, rows: torch.Tensor) -> list[bytes]:
    table = trainer.distillation_collator.student.table
    return [b"".join(table[i] for i in row) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"messages": CHAT, "teacher_messages": [CHAT[0], {**CHAT[1], "content": ""}]}, "byte"),
        ({"messages": CHAT, "teacher_messages": CHAT, "teacher_prompt": CHAT}, "both"),
        ({"messages": CHAT, "teacher_context": "x"}, "no effect"),
    ],
)  # fmt: skip
def test_error_names_the_fields_of_the_teacher(make_trainer: Make, row: Any, word: str) -> None:
    trainer = make_trainer(rows=[row] * 2, chat_template=CHATML, template=CHATML)
    with pytest.raises(XtokError, match=rf"row 0: .*{word}"):
        first_batch(trainer)


# Bad input


def test_other_versions_of_trl(gold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.13.0", "1.17.0", "2.0.0"):
        monkeypatch.setattr(sys.modules["trl"], "__version__", version)
        with pytest.raises(XtokError, match=f"TRL {version}"):
            gold.gold_classes()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(XtokError, match=r"trl>=1\.14,<1\.17"):
        gold.gold_classes()


def test_invalid_arguments_are_refused(gold: Any, make_trainer: Make) -> None:
    with pytest.raises(XtokError, match="temperature"):
        make_trainer(uld_student_temperature=2)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        make_trainer(label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"^args is None"):
        gold.XTokGOLDTrainer("a", "b")
    trainer = make_trainer(loss="gold")
    inputs = first_batch(trainer)
    trainer.objective = None
    with pytest.raises(ValueError, match=r"^student id 5000 "):
        trainer.compute_loss(trainer.model, {**inputs, "input_ids": inputs["input_ids"] * 0 + 5000})


# The example


def test_the_example_script_trains_and_resumes(small: Path, tmp_path: Path, gold: Any) -> None:
    example = importlib.import_module("trl_gold")
    for name, source, seed in (("student", "small-hf", 0), ("teacher", "small-byte-level", 1)):
        side = load_tokenizer(str(small / source))
        shutil.copytree(small / source, tmp_path / name)
        tiny_model(side.vocabulary.vocab_size, seed=seed).save_pretrained(tmp_path / name)
    xtok.events(tmp_path / "student", tmp_path / "teacher").save(tmp_path / "map.safetensors")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    options = [
        f"--student={tmp_path / 'student'}", f"--teacher={tmp_path / 'teacher'}",
        f"--map={tmp_path / 'map.safetensors'}", f"--dataset={tmp_path / 'rows.jsonl'}",
        f"--output_dir={tmp_path / 'run'}", "--report_to=none", "--use_cpu", "--bf16=false",
        "--max_completion_length=8", "--max_length=64", "--per_device_train_batch_size=2",
        "--logging_steps=1", "--save_strategy=steps", "--save_steps=1", "--disable_tqdm=true",
    ]  # fmt: skip
    assert len(logged(example.main([*options, "--max_steps=1"]))) == 1
    assert len(logged(example.main([*options, "--max_steps=3"]))) == 3  # the first run is resumed
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.usefixtures("gold")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--loss=event-kl", "--loss event-kl requires an event map: give it as --map"),
        ("--loss=kl", "--loss: loss is 'kl', expected one of "),
        ("--loss=alm", "--student /no/model: "),
        ("--learning_rate=x", "argument --learning_rate"),
    ],
)
def test_a_bad_option_of_the_example_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    example = importlib.import_module("trl_gold")
    models = ["--student=/no/model", "--teacher=/no/model", "--dataset=no.jsonl"]
    with pytest.raises(SystemExit) as error:
        example.main([*models, f"--output_dir={tmp_path}", "--bf16=false", "--use_cpu", option])
    assert error.value.code == 2
    assert f": error: {message}" in capsys.readouterr().err


# Real tokenizers


def sentencepiece_folder(path: str, folder: Path) -> Path:
    """Return a folder like Mistral's repos, with only a tokenizer.model."""
    folder.mkdir()
    shutil.copy(path, folder / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.real
@pytest.mark.parametrize(
    ("student", "teacher"), [("claude-2", "deepseek-v3"), ("mistral-v1.model", "claude-2")]
)
def test_real_tokenizers_train_on_policy(
    make_trainer: Make, real: Any, tmp_path: Path, student: str, teacher: str
) -> None:
    folders = []
    for name in (student, teacher):
        path = real(name)
        is_model = name.endswith(".model")
        folders.append(sentencepiece_folder(path, tmp_path / name) if is_model else path)
    trainer = make_trainer(*folders)
    calls = watch(trainer)
    trainer.train()
    assert logged(trainer, "on_policy_loss")
    assert logged(trainer, "off_policy_loss")
    for batch in calls:
        all_is_aligned(trainer, batch)
