"""`XTokTrainer`: a real `transformers.Trainer` with random models on a CPU."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import hf_trainer
import numpy as np
import pytest
import torch
from chat_families import CHAT
from conftest import ROOT
from datasets import Dataset
from forked import Forks
from make_maps import built
from tiny_models import logged, save_model, tiny_model, weights_of
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import xtok
from xtok import DistillationCollator as Collator
from xtok import ProjectionMap, XtokError, losses
from xtok.loss_names import LOSS_INFO
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.training.collator import prepare
from xtok.training.losses import CombineConfig, CustomLoss, LossName, PKLConfig, make_loss
from xtok.training.losses.registry import LOSSES
from xtok.training.module import ProjectionModule
from xtok.training.objective import make_objective
from xtok.training.topk_collator import TopKCollator
from xtok.training.trainers.transformers import XTokTrainer

# Maps of the recipe train well enough here, and are fast to build.
pytestmark = [
    pytest.mark.filterwarnings("ignore:this map is not made for P-KL:UserWarning"),
    pytest.mark.filterwarnings("ignore:first batch. the teacher needs:UserWarning"),  # random
]

# The lengths of rows differ widely, so the mean of means differs from the mean.
ROWS: list[dict[str, Any]] = [
    {"text": "The keeper lit 201 lamps, and wrote the hour down, as every night at 6:12."},
    {"text": "Fog."},
    {"text": "High water at 6:12; low water at 12:40. The boat comes on Friday."},
    {"text": "Light"},
]


@pytest.fixture(scope="module")
def projection(digits: Tokenizer, byte_level: Tokenizer) -> ProjectionMap:
    return built(digits, byte_level)


@pytest.fixture
def collator(digits: Tokenizer, byte_level: Tokenizer) -> Collator:
    return Collator(
        digits, byte_level, student_template="chatml", teacher_templates=["chatml"], max_length=64
    )


def arguments(output: Path, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.01,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "max_grad_norm": 0.0, "disable_tqdm": True, "seed": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(output), **(settings | options))


ONE_ROW = {"per_device_train_batch_size": 1}
Make = Callable[..., Any]


@pytest.fixture
def make_trainer(collator: Collator, projection: ProjectionMap, tmp_path: Path) -> Make:
    """Make a trainer; the default map is the map that its loss requires."""
    widths = [t.vocabulary.vocab_size for t in (collator.student, collator.teachers[0])]

    def make(loss: Any, args: Any = None, rows: Any = ROWS, *, at: str = "", **options: Any) -> Any:
        teacher, collate = tiny_model(widths[1], seed=1, sharp=0.5), cast("Any", collator)
        if loss == "topk-kl":
            teacher, collate, rows = None, TopKCollator(), stored(rows, collator.student)
        if "map" not in options:
            options["map"] = map_of(loss, collator, projection)
        settings = (
            args if isinstance(args, TrainingArguments) else arguments(tmp_path / at, **args or {})
        )
        defaults = {"teachers": teacher, "train_dataset": rows, "loss": loss}
        return XTokTrainer(
            tiny_model(widths[0], seed=0), settings, collate, **{**defaults, **options}
        )

    return make


def stored(rows: Any, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Predictions of a teacher with 0.6 on the text's next token, and 0.3 on another token."""
    texts = [tokenizer.encode(row["text"]).ids.tolist() for row in rows]
    return [
        {
            "input_ids": ids,
            "topk_ids": [[], *([i, i + 1] for i in ids[1:])],
            "topk_logprobs": [[], *([np.log(0.6), np.log(0.3)] for _ in ids[1:])],
            "rest_logprob": [None, *(np.log(0.1) for _ in ids[1:])],
        }
        for ids in texts
    ]


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the optimizer's first step."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.by_name:
            named = kwargs["model"].named_parameters()
            self.by_name = {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_the_loss_equals_that_of_the_functions(
    make_trainer: Make, collator: Collator, projection: ProjectionMap
) -> None:
    trainer = make_trainer("p-kl")
    rows = [ROWS[0], {"messages": CHAT}]
    batch = prepare(collator(rows))
    [side] = batch["teachers"]
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, collator(rows))
        student, teacher = (
            model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
            for model, part in ((trainer.model, batch), (trainer.teachers[0], side))
        )
        own = torch.nn.functional.cross_entropy(student.flatten(0, 1), batch["targets"].flatten())
        kd = losses.p_kl(student, teacher, ProjectionModule(projection), side["shifted"])
    assert float(loss) == pytest.approx(float(own + kd), rel=1e-6)


def map_of(loss: LossName, collator: Collator, projection: Any) -> Any:
    """The map that a loss requires."""
    [teacher] = collator.teachers
    kind = LOSS_INFO[loss].map
    if kind == "events":
        return xtok.events(collator.student, teacher)
    if kind == "spellings":
        return xtok.spellings(collator.pairs[0])
    return projection if kind else None


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "same-tokenizer"])
def test_every_loss_trains(make_trainer: Make, loss: LossName) -> None:
    args = {"max_steps": 12, "per_device_train_batch_size": 4}
    trainer = make_trainer(loss, args, combine=CombineConfig(cross_entropy_weight=0))
    [teacher] = trainer.teachers
    before = weights_of(teacher) if teacher else {}
    trainer.train()
    values = logged(trainer)
    assert len(values) == 12
    assert values[-1] < max(values[0] - 0.005, values[0] / 3)
    assert logged(trainer, "distillation") == pytest.approx(
        values, abs=1e-3
    )  # the total is rounded
    after = weights_of(teacher) if teacher else {}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dynamic_scaling", [False, True])
@pytest.mark.parametrize("loss", ["p-kl", "event-kl", "csd", "alm", "topk-kl"])
def test_accumulated_gradients_equal_those_of_a_large_batch(
    make_trainer: Make, loss: LossName, dynamic_scaling: bool
) -> None:
    runs = []
    for size, steps in ((4, 1), (1, 4)):
        gradients = FirstGradients()
        args = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        combine = CombineConfig(dynamic_scaling=dynamic_scaling)
        trainer = make_trainer(
            loss, args | {"max_steps": 1}, combine=combine, callbacks=[gradients]
        )
        trainer.train()
        runs.append((logged(trainer)[0], gradients.by_name))
    (first, whole), (other_loss, other) = runs
    assert len(whole) == 12
    assert other_loss == pytest.approx(first, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-7)


def test_dynamic_scaling_uses_one_forward_pass(collator: Collator, tmp_path: Path) -> None:
    """With a second forward pass, dropout would change the cross-entropy used for the scale."""
    width = collator.student.vocabulary.vocab_size
    trainer = XTokTrainer(
        tiny_model(width, seed=0, sharp=0.5, dropout=0.5),
        arguments(tmp_path, gradient_accumulation_steps=2, max_steps=2),
        collator,
        teachers=tiny_model(collator.teachers[0].vocabulary.vocab_size, seed=1, sharp=0.5),
        loss="alm",
        combine=CombineConfig(dynamic_scaling=True),
        train_dataset=ROWS,
    )
    trainer.train()
    twice = [2 * own for own in logged(trainer, "cross_entropy")]
    assert logged(trainer) == pytest.approx(twice, rel=1e-5)


def test_a_batch_is_prepared_and_counted_once(make_trainer: Make) -> None:
    """The mean uses the counts that the loss has already fetched."""
    counted: list[Any] = []
    computed: list[Any] = []

    def mean(student: Any, teacher: Any, batch: Any, side: Any) -> torch.Tensor:
        computed.append(side["shifted"])
        return losses.alm(student, teacher, (batch["targets"], side["targets"]), side["shifted"])

    def count(batch: Any, side: Any) -> int:
        counted.append(side["shifted"])
        return losses.count_chunks(side["shifted"], starts_only=True)

    args = {"max_steps": 2, "gradient_accumulation_steps": 2, **ONE_ROW}
    trainer = make_trainer(
        CustomLoss(mean, count), args, map=None, eval_dataset=ROWS[:1], audit=False
    )
    trainer.train()
    assert len(counted) == 4
    trainer.evaluate()
    assert len(counted) == 5
    assert all(chunks is other for chunks, other in zip(computed, counted, strict=True))


def test_bf16_evaluation_and_resuming(
    make_trainer: Make, collator: Collator, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "bf16": True, "max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "linear",
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    chat = {"messages": CHAT}
    held_out = [*ROWS[:3], chat]
    make = partial(make_trainer, "h-kl", options, [*ROWS, chat] * 4, eval_dataset=held_out)
    whole = make(at="whole")
    whole.train()
    evaluated = logged(whole, "eval_loss")
    assert len(evaluated) == 2
    assert evaluated[1] < evaluated[0]
    resumed = make(at="again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name in ("loss", "cross_entropy", "distillation", "coverage"):
        assert logged(resumed, name) == logged(whole, name)
    first, second = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Evaluation is the mean over all targets and chunks, as of one batch with all rows.
    with torch.no_grad():
        expected = float(whole.compute_loss(whole.model_wrapped.eval(), collator(held_out)))
    assert evaluated[1] == pytest.approx(expected, rel=1e-3)
    parts = [logged(whole, f"eval_{name}")[1] for name in ("cross_entropy", "distillation")]
    assert evaluated[1] == pytest.approx(sum(parts), rel=1e-6)
    targets = prepare(collator(held_out))["targets"]
    sizes = collator.student.table.lengths[targets[targets >= 0].numpy()]
    bits = parts[0] * len(sizes) / np.log(2) / sizes.sum()
    assert logged(whole, "eval_bits_per_byte")[1] == pytest.approx(bits, rel=1e-5)
    saved = load_tokenizer(tmp_path / "whole" / "checkpoint-2")
    assert saved.table.sha256() == collator.student.table.sha256()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_and_several_teachers(
    digits: Tokenizer, byte_level: Tokenizer, sentencepiece: Tokenizer, projection: ProjectionMap,
    tmp_path: Path,
) -> None:  # fmt: skip
    collate = Collator(digits, [byte_level, sentencepiece], max_length=64)
    teachers = [
        tiny_model(t.vocabulary.vocab_size, seed=2, sharp=0.5) for t in (byte_level, sentencepiece)
    ]
    trainer = XTokTrainer(
        tiny_model(digits.vocabulary.vocab_size, seed=0),
        arguments(tmp_path, dataloader_num_workers=1, max_steps=2, gradient_accumulation_steps=2),
        collate,
        teachers=teachers,
        loss=["p-kl", "gold"],
        map=[projection, built(digits, sentencepiece)],
        teacher_weights=[0.5, 2],
        train_dataset=ROWS,
    )
    trainer.train()
    assert len(logged(trainer)) == 2


def test_parts_of_the_loss_are_logged(make_trainer: Make) -> None:
    args = {"gradient_accumulation_steps": 3, "max_steps": 4, "logging_steps": 2, **ONE_ROW}
    combine = CombineConfig(distillation_weight=2, cross_entropy_weight=0.5)
    trainer = make_trainer("p-kl", args, combine=combine)
    trainer.teachers[0].eval = lambda: None  # like `DeepSpeedEngine.eval`
    trainer.train()
    own, distillation, coverage = (
        np.array(logged(trainer, name)) for name in ("cross_entropy", "distillation", "coverage")
    )
    assert len(own) == 2
    assert 0.5 * own + 2 * distillation == pytest.approx(logged(trainer), abs=1e-3)
    assert ((coverage > 0.5) & (coverage <= 1)).all()


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_hidden_states_train_as_whole_logits(
    make_trainer: Make, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    values = []
    for hidden_states in (None, False):
        args = {"learning_rate": 1e-3, **options}
        trainer = make_trainer("alm", args, hidden_states=hidden_states, eval_dataset=ROWS[:2])
        widths: list[int] = []
        real = trainer.model.forward

        def forward(*args: Any, real: Any = real, widths: list[int] = widths, **kwargs: Any) -> Any:
            outputs = real(*args, **kwargs)
            widths.append(outputs.logits.shape[1])
            return outputs

        trainer.model.forward = forward
        trainer.train()
        # The first two calls check the head, at three positions, and run the audit.
        assert (set(widths[2:]) == {1}) is (hidden_states is None)
        assert ("in blocks" in capsys.readouterr().err) is (hidden_states is None)
        values.append([*logged(trainer), trainer.evaluate()["eval_loss"]])
        assert trainer.predict(Dataset.from_list(ROWS[:2])).predictions.shape[1] > 1
    assert values[0] == pytest.approx(values[1], rel=1e-2 if "bf16" in options else 1e-4)


def test_heads_are_found_again_if_the_model_is_compiled(
    make_trainer: Make, collator: Collator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first evaluation gets the plain model; a compiled model hides its hidden states."""
    trainer = make_trainer("alm", eval_dataset=ROWS[:2])
    trainer.evaluate()
    assert "in blocks from hidden states: the student" in capsys.readouterr().err
    trainer.compute_loss(torch.compile(trainer.model, backend="eager"), collator(ROWS[:1]))
    assert "torch.compile hides its hidden states" in capsys.readouterr().err


def test_compiled_models_are_audited(
    make_trainer: Make, collator: Collator, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tiny_model(collator.teachers[0].vocabulary.vocab_size, seed=1)
    trainer = make_trainer("alm", teachers=torch.compile(teacher, backend="eager"))
    trainer.compute_loss(torch.compile(trainer.model, backend="eager"), collator(ROWS[:1]))
    assert "no differences from the libraries" in capsys.readouterr().err


def test_a_loss_that_needs_whole_logits(make_trainer: Make) -> None:
    own = CustomLoss(lambda student, *_: student.square().mean())
    with pytest.raises(XtokError, match="whole"):
        make_trainer(own, map=None, hidden_states=True).train()


def test_a_map_of_the_recipe_is_not_for_p_kl(collator: Collator, projection: ProjectionMap) -> None:
    with pytest.warns(UserWarning, match="exact row"):
        losses.make_loss("p-kl", map=ProjectionModule(projection))
    for_p_kl = xtok.build(collator.student, collator.teachers[0], xtok.BuildConfig.for_loss("p-kl"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.make_loss("p-kl", map=ProjectionModule(for_p_kl))
        losses.make_loss("h-kl", map=ProjectionModule(projection))


# The objective


def test_losses_of_microbatches_sum_to_the_batch(
    collator: Collator, projection: ProjectionMap
) -> None:
    torch.manual_seed(0)
    module = ProjectionModule(projection)
    exact = make_loss(
        "p-kl", map=module, config=PKLConfig(top_k=None, temperature=2, reverse_kl=True)
    )
    correct = PKLConfig(exact_token_match_only=True)
    strict = CustomLoss(
        lambda s, t, batch, side: losses.p_kl(s, t, module, side["shifted"], correct),
        lambda batch, side: losses.count_chunks(side["shifted"], exact_token_match_only=True),
    )
    batches = [
        prepare(collator(rows)) for rows in ([*ROWS, {"messages": CHAT}], [ROWS[1]], [ROWS[2]])
    ]
    for loss in (exact, strict):
        make = partial(make_objective, collator.pairs, loss)
        objective = make(combine=CombineConfig(cross_entropy_weight=0.3))
        logits = [
            [
                torch.randn(*part["input_ids"].shape, width, dtype=torch.float64)
                for part, width in zip((batch, batch["teachers"][0]), projection.shape, strict=True)
            ]
            for batch in batches
        ]
        distillation = make(combine=CombineConfig(cross_entropy_weight=0))
        counts = [objective.count(batch).tolist() for batch in batches]
        targets, chunks = map(sum, zip(*counts, strict=True))
        expected = shares = 0.0
        for (s, t), batch, count in zip(logits, batches, counts, strict=True):
            kd = float(distillation.terms(s, [t], batch).loss)
            own = torch.nn.functional.cross_entropy(s.flatten(0, 1), batch["targets"].flatten())
            expected += kd * count[1] / chunks + 0.3 * float(own) * count[0] / targets
            totals = torch.tensor([targets, chunks])
            shares += float(objective.terms(s, [t], batch, totals).loss)
        assert chunks > 20
        assert shares == pytest.approx(expected, rel=1e-6)


def test_invalid_arguments_are_refused(
    make_trainer: Make, collator: Collator, projection: ProjectionMap, sentencepiece: Tokenizer,
    tmp_path: Path,
) -> None:  # fmt: skip
    sides = collator.teachers[0], collator.student
    for loss, given, words in (
        ("p-kl", None, "a projection map"),
        ("p-kl", built(*sides), "swapped"),
        ("event-kl", xtok.events(*sides), "swapped"),
        ("p-kl", built(collator.student, sentencepiece), "other tokens"),
        ("event-kl", projection, "an event map"),
    ):
        with pytest.raises(XtokError, match=words):
            make_trainer(loss, map=given)
    with pytest.raises(ValueError, match=r"^2 losses for 1 teachers$"):
        make_trainer(["gold", "gold"], map=None)
    several = Collator(collator.student, [collator.teachers[0], sentencepiece])
    with pytest.raises(ValueError, match=r"^1 teachers, .* 2$"):
        XTokTrainer(
            tiny_model(9, seed=0), arguments(tmp_path), several, teachers=[None], loss="gold"
        )
    smooth = arguments(tmp_path, label_smoothing_factor=0.3)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        XTokTrainer(tiny_model(9, seed=0), smooth, several, loss="gold")
    without_teachers = Collator(collator.student, [])
    for collate, options in (
        (several, {}),
        (several, {"loss": ["alm", "event-kl"]}),
        (several, {"loss": CustomLoss(lambda *_: torch.zeros(()))}),
        (without_teachers, {"map": projection}),
        (without_teachers, {"teacher_weights": [1]}),
    ):
        with pytest.raises(ValueError, match=r"^teachers is None"):
            XTokTrainer(tiny_model(9, seed=0), arguments(tmp_path), collate, **options)
    with pytest.raises(XtokError, match="needs a model as its teacher") as error:
        XTokTrainer(tiny_model(9, seed=0), arguments(tmp_path), TopKCollator(), map=projection)
    assert "TopKCollator for topk-kl" in error.value.hint
    with pytest.raises(ValueError, match="TopKCollator"):
        XTokTrainer(
            tiny_model(9, seed=0), arguments(tmp_path), TopKCollator(),
            teachers=tiny_model(9, seed=1), loss="topk-kl",
        )  # fmt: skip
    with pytest.raises(ValueError, match="compute_loss_func"):
        make_trainer("alm", compute_loss_func=lambda *_, **__: None)
    split = arguments(tmp_path)
    split._n_gpu = 2  # as if two GPUs were visible to one process
    with pytest.raises(XtokError, match="2 GPUs"):
        make_trainer("p-kl", split)


# Teachers, restarts and checkpoints


def test_a_run_without_teachers_equals_a_collator_without_teachers(
    make_trainer: Make, collator: Collator, tmp_path: Path
) -> None:
    """A run with `teachers=[]` equals a run with a collator without teachers."""
    width = collator.student.vocabulary.vocab_size
    runs = []
    for collate in (collator, Collator(collator.student, [], student_template="chatml")):
        trainer = XTokTrainer(
            tiny_model(width, seed=0), arguments(tmp_path), collate, teachers=[],
            train_dataset=ROWS, eval_dataset=ROWS,
        )  # fmt: skip
        trainer.train()
        values = trainer.evaluate()
        assert "eval_teacher_bits_per_byte" not in values
        runs.append([*logged(trainer), values["eval_loss"], values["eval_bits_per_byte"]])
    assert runs[0] == runs[1]
    assert runs[0][:3] == logged(trainer, "cross_entropy")


def test_evaluations_log_the_teacher_and_explain_the_loss_once(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("alm", eval_dataset=ROWS, audit=False)
    values = [trainer.evaluate() for _ in range(2)]
    assert 3 < values[0]["eval_teacher_bits_per_byte"] < 9
    assert values[0]["eval_loss"] == values[1]["eval_loss"]
    assert capsys.readouterr().err.count("note: eval_loss is the training loss") == 1


def test_bits_per_byte_are_those_of_the_text(
    sentencepiece: Tokenizer, byte_level: Tokenizer, tmp_path: Path
) -> None:
    """A model of equal logits needs log2(V) bits for each token, and no bits for added spaces."""
    tokenizers, text = (sentencepiece, byte_level), "In 2014 there were 201 of them."
    models = [tiny_model(t.vocabulary.vocab_size, seed=0) for t in tokenizers]
    for parameter in (p for model in models for p in model.parameters()):
        torch.nn.init.zeros_(parameter)
    trainer = XTokTrainer(
        models[0], arguments(tmp_path), Collator(*tokenizers), teachers=models[1], loss="alm",
        eval_dataset=[{"text": text}],
    )  # fmt: skip
    values = trainer.evaluate()
    bits = [np.log2(len(t.table)) * len(t.encode(text).ids) / len(text) for t in tokenizers]
    assert values["eval_bits_per_byte"] == pytest.approx(bits[0], rel=1e-5)
    assert values["eval_teacher_bits_per_byte"] == pytest.approx(bits[1], rel=1e-5)


@pytest.mark.parametrize(("loss", "teachers"), [("alm", None), (["alm"], None), ("alm", [None])])
def test_stored_log_probabilities(
    collator: Collator, tmp_path: Path, loss: Any, teachers: Any
) -> None:
    ids = collator.teachers[0].encode("Fog, and high water.").ids.tolist()
    rows = [{"input_ids": ids, "realized_logprob": [None] + [-0.5] * (len(ids) - 1)}]
    width = collator.student.vocabulary.vocab_size
    make = partial(
        XTokTrainer, tiny_model(width, seed=0), arguments(tmp_path), collator,
        train_dataset=rows, eval_dataset=rows, audit=False,
    )  # fmt: skip
    trainer = make(loss=loss, teachers=teachers)
    trainer.train()
    assert logged(trainer, "distillation")[0] > 0
    sizes = collator.teachers[0].table.lengths[ids[1:]]
    bits = 0.5 * (len(ids) - 1) / np.log(2) / sizes.sum()
    assert trainer.evaluate()["eval_teacher_bits_per_byte"] == pytest.approx(bits)
    alone = make(teachers=[])
    alone.train()
    assert logged(alone) == logged(alone, "cross_entropy")


def test_sums_are_reset_when_training_begins(make_trainer: Make) -> None:
    """`auto_find_batch_size` begins again after a batch that does not fit."""
    args = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "logging_steps": 3}
    trainer = make_trainer("alm", args, audit=False)
    real = trainer.model.forward

    def forward(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if len(input_ids) > 3:
            raise RuntimeError("CUDA out of memory.")
        return real(input_ids, *args, **kwargs)

    trainer.model.forward = forward
    trainer.train()
    parts = logged(trainer, "cross_entropy")[0] + logged(trainer, "distillation")[0]
    assert parts == pytest.approx(logged(trainer)[0], rel=1e-3)


def test_teacher_is_loaded_from_a_path(
    teacher_folder: Path, collator: Collator, tmp_path: Path
) -> None:
    trainer = XTokTrainer(
        tiny_model(collator.student.vocabulary.vocab_size, seed=0), arguments(tmp_path), collator,
        teachers=str(teacher_folder), loss="alm", train_dataset=ROWS,
    )  # fmt: skip
    assert {p.dtype for p in trainer.teachers[0].parameters()} == {torch.float32}
    trainer.train()
    assert len(logged(trainer)) == 3


def test_a_checkpoint_has_the_tokenizer_file(small: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small / "small.model")
    collate = Collator(tokenizer, [])
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    XTokTrainer(
        tiny_model(tokenizer.vocabulary.vocab_size, seed=0), arguments(tmp_path, **options),
        collate, train_dataset=ROWS,
    ).train()  # fmt: skip
    saved = load_tokenizer(tmp_path / "checkpoint-1" / "small.model")
    assert saved.table.sha256() == tokenizer.table.sha256()


def test_a_checkpoint_without_a_tokenizer_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Collator("bytes", []).tokenizer.save_pretrained(tmp_path)
    assert "has no tokenizer; use the tokenizer bytes" in capsys.readouterr().err


@pytest.mark.parametrize(("widths", "name"), [((40, 256), "the student"), ((256, 40), "teacher 1")])
def test_ids_beyond_a_model_are_named(widths: tuple[int, int], name: str, tmp_path: Path) -> None:
    student, teacher = (tiny_model(width, seed=n) for n, width in enumerate(widths))
    trainer = XTokTrainer(
        student, arguments(tmp_path), Collator("bytes", "bytes"), teachers=teacher, loss="alm",
        train_dataset=ROWS,
    )  # fmt: skip
    with pytest.raises(XtokError, match=f"^{name}, .* has 40 rows"):
        trainer.train()


def test_a_teacher_with_fewer_positions_than_its_rows_is_named(tmp_path: Path) -> None:
    student, teacher = (tiny_model(256, seed=n) for n in range(2))
    teacher.config.max_position_embeddings = 64
    trainer = XTokTrainer(
        student, arguments(tmp_path, max_steps=2), Collator("bytes", "bytes"), teachers=teacher,
        loss="alm", train_dataset=ROWS, audit=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="^teacher 1, .*64 positions"):
        trainer.train()


def test_weights_that_are_all_0_are_an_error(make_trainer: Make) -> None:
    combine = CombineConfig(distillation_weight=0, cross_entropy_weight=0)
    with pytest.raises(XtokError, match="both 0, so nothing is trained"):
        make_trainer("alm", combine=combine)


# The example


@pytest.fixture(scope="module")
def student_folder(
    tmp_path_factory: pytest.TempPathFactory, small: Path, digits: Tokenizer
) -> Path:
    folder = tmp_path_factory.mktemp("student")
    save_model(folder, digits, small / "small-digits", seed=0, sharp=0.02)
    return folder


@pytest.fixture(scope="module")
def teacher_folder(
    tmp_path_factory: pytest.TempPathFactory, small: Path, byte_level: Tokenizer
) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(folder, byte_level, small / "small-byte-level", seed=1, sharp=0.5)
    return folder


@pytest.fixture(scope="module")
def trainer_options(
    tmp_path_factory: pytest.TempPathFactory, student_folder: Path, teacher_folder: Path,
    projection: ProjectionMap,
) -> list[str]:  # fmt: skip
    folder = tmp_path_factory.mktemp("inputs")
    projection.save(folder / "map.safetensors")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    return [
        f"--student={student_folder}", f"--teacher={teacher_folder}",
        f"--map={folder / 'map.safetensors'}", f"--dataset={folder / 'rows.jsonl'}",
        "--max_length=64", "--report_to=none", "--use_cpu", "--logging_steps=1",
        "--learning_rate=0.01", "--disable_tqdm=true", "--max_grad_norm=0", "--loss=p-kl",
    ]  # fmt: skip


def test_the_example_resumes(trainer_options: list[str], tmp_path: Path) -> None:
    options = [*trainer_options, "--per_device_train_batch_size=2", "--lr_scheduler_type=constant"]
    options += ["--save_strategy=steps", "--save_steps=2"]
    whole = hf_trainer.main([*options, f"--output_dir={tmp_path / 'whole'}", "--max_steps=4"])
    hf_trainer.main([*options, f"--output_dir={tmp_path / 'cut'}", "--max_steps=2"])
    cut = hf_trainer.main([*options, f"--output_dir={tmp_path / 'cut'}", "--max_steps=4"])
    assert logged(cut) == logged(whole)
    saved = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert "model.safetensors" in saved
    assert not xtok.doctor(str(tmp_path / "cut")).failed


def test_the_example_names_the_option_for_a_map(trainer_options: list[str], tmp_path: Path) -> None:
    without = [o for o in trainer_options if not o.startswith("--map")]
    without = [o for o in without if not o.startswith("--loss")]
    with pytest.raises(XtokError, match="event-kl") as error:
        hf_trainer.main([*without, f"--output_dir={tmp_path}"])
    assert hf_trainer.OPTIONS[error.value.parameter] == "--map"


@pytest.mark.filterwarnings("ignore:.*this teacher will probably reduce quality:UserWarning")
def test_the_example_trains_on_chats(trainer_options: list[str], tmp_path: Path) -> None:
    """Each side has its own chat template; an error names the option of the script."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n", encoding="utf-8")
    options = [o for o in trainer_options if not o.startswith("--dataset")]
    options += [f"--dataset={tmp_path / 'chats.jsonl'}", f"--output_dir={tmp_path / 'run'}"]
    options += ["--max_steps=1", "--save_strategy=no"]
    with pytest.raises(XtokError) as error:
        hf_trainer.main(options)
    assert hf_trainer.OPTIONS[error.value.parameter] == "--student_chat_template"
    with pytest.raises(XtokError) as error:
        hf_trainer.main([*options, "--student_chat_template=chatml"])
    assert hf_trainer.OPTIONS[error.value.parameter] == "--teacher_chat_template"
    options += ["--student_chat_template=chatml", "--teacher_chat_template=chatml"]
    assert logged(hf_trainer.main(options), "distillation")[0] > 0


def test_the_example_prints_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hf_trainer.main(["--help"])
    output = capsys.readouterr().out
    assert "--teacher_chat_template" in output
    assert len(output.splitlines()) < 80
    with pytest.raises(SystemExit):
        hf_trainer.main(["--student=a", "--dataset=b", "--output_dir=c", "--bogus"])
    assert capsys.readouterr().err.endswith("error: unknown options: --bogus\n")


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ([], torch.float32),
        (["--bf16"], torch.bfloat16),
        (["--bf16=true"], torch.bfloat16),
        (["--bf16", "False"], torch.float32),
    ],
)
def test_the_example_loads_teachers_in_the_precision_of_training(
    trainer_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    class Made(Exception):
        pass

    def make(*_: Any, teachers: Any, **__: Any) -> Any:
        raise Made(teachers[0].dtype)

    monkeypatch.setattr(hf_trainer, "XTokTrainer", make)
    with pytest.raises(Made) as made:
        hf_trainer.main([*trainer_options, f"--output_dir={tmp_path}", *more])
    assert made.value.args == (dtype,)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--dataset=no.jsonl", "--dataset no.jsonl: the file does not exist"),
        ("--eval_dataset=no.json", "--eval_dataset no.json: the file does not exist"),
        ("--student=/no/model", "--student /no/model: "),
        ("--teacher=/no/model", "--teacher /no/model: "),
        ("--loss=kl", "--loss: loss is 'kl', expected one of "),
        ("--loss=topk-kl", "--loss topk-kl trains on stored predictions: remove --teacher"),
        ("--shard_teachers=true", "--shard_teachers requires torchrun or accelerate launch"),
        ("--max_length=0", "--max_length is 0, expected at least 1"),
        ("--cross_entropy_weight=-1", "cross_entropy_weight is -1.0, expected at least 0"),
        ("--teacher_chat_template=a b", "2 of --teacher_chat_template for 1 of --teacher"),
        ("--eval_strategy=epoch", "--eval_strategy epoch requires --eval_dataset"),
        ("--lr_scheduler_type=no", "argument --lr_scheduler_type"),
        ("--learning_rate=x", "argument --learning_rate"),
        ("--output_dir=/proc/x", "--output_dir: [Errno 2] No such file or directory: '/proc/x'"),
    ],
)
def test_a_bad_option_of_the_example_is_a_usage_error(
    trainer_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str,
    message: str,
) -> None:  # fmt: skip
    name, _, values = option.partition("=")
    kept = [o for o in trainer_options if o.partition("=")[0] != name]
    with pytest.raises(SystemExit) as error:
        hf_trainer.main([*kept, f"--output_dir={tmp_path}", name, *values.split()])
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f": error: {message}" in last


def test_only_errors_for_users_lose_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    error = XtokError("no", hint="use {option}", parameter="teacher_templates")
    monkeypatch.setattr(hf_trainer, "main", lambda: fail(error))
    with pytest.raises(SystemExit) as caught:
        hf_trainer.program()
    assert caught.value.code == "error: no\nhint: use --teacher_chat_template"
    monkeypatch.setattr(hf_trainer, "main", lambda: fail(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        hf_trainer.program()


def test_layers_of_a_sharded_teacher() -> None:
    """GPT-2's layers are not in an attribute `layers`."""
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2)
    for model, count in ((tiny_model(64, seed=0, layers=2), 2), (GPT2LMHeadModel(config), 3)):
        layers = hf_trainer.layers_of(model)
        assert len(layers) == count == model.config.num_hidden_layers
    assert hf_trainer.layers_of(torch.nn.Linear(2, 2)) == []


def test_a_teacher_without_known_layers_cannot_be_sharded(
    trainer_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hf_trainer, "layers_of", lambda _: [])
    with pytest.raises(SystemExit) as error:
        hf_trainer.main([*trainer_options, f"--output_dir={tmp_path}", "--shard_teachers"])
    assert error.value.code == 2
    [teacher] = [o.partition("=")[2] for o in trainer_options if o.startswith("--teacher=")]
    assert f"--shard_teachers: {teacher} (LlamaForCausalLM)" in capsys.readouterr().err


def test_the_example_trains_from_stored_predictions(
    trainer_options: list[str], digits: Tokenizer, tmp_path: Path
) -> None:
    dataset = Dataset.from_list(stored(ROWS, digits))
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_json(tmp_path / "rows.jsonl")
    kept = [
        o
        for o in trainer_options
        if not o.startswith(("--teacher", "--map", "--loss", "--dataset"))
    ]
    losses_by_file = []
    for name in ("rows.parquet", "rows.jsonl"):
        trainer = hf_trainer.main([
            *kept, f"--dataset={tmp_path / name}", "--loss=topk-kl", "--max_steps=4",
            "--save_strategy=no", f"--output_dir={tmp_path / 'run'}",
        ])  # fmt: skip
        losses_by_file.append(logged(trainer, "distillation"))
    assert losses_by_file[0] == losses_by_file[1]
    assert losses_by_file[0][-1] < losses_by_file[0][0]


@pytest.mark.parametrize(
    "more", [["--gradient_accumulation_steps=2"], ["--dynamic_scaling"], ["--loss=alm"]]
)
def test_two_processes_train_like_one_with_twice_the_batch(
    trainer_options: list[str],
    student_folder: Path,
    tmp_path: Path,
    forks: Forks,
    more: list[str],
) -> None:
    kept = [o for o in trainer_options if more != ["--loss=alm"] or not o.startswith("--map")]
    options = [*kept, *more, "--max_steps=3", "--save_strategy=no"]
    # Processes get rows in turn, so accumulation gives each of them the four rows of a step.
    trainer = hf_trainer.main(
        [*options, f"--output_dir={tmp_path / 'one'}", "--per_device_train_batch_size=2"]
    )
    python = str(forks.folder / "python")
    command = [
        python, "-c", "import sys; from torch.distributed.run import main; main(sys.argv[1:])",
        "--standalone", "--nproc-per-node=2", "--no-python", python,
        str(ROOT / "scripts" / "examples" / "hf_trainer.py"), *options,
        f"--output_dir={tmp_path / 'two'}", "--per_device_train_batch_size=1",
    ]  # fmt: skip
    result = subprocess.run(
        [*command, "--ddp_backend=gloo"],
        env=forks.env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    from safetensors.torch import load_file

    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    start = load_file(student_folder / "model.safetensors")
    for name, values in first.items():
        assert not torch.equal(values, start[name])
        torch.testing.assert_close(second[name], values, rtol=1e-3, atol=1e-5)
    assert len(logged(trainer)) == 3
