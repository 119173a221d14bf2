"""Rules of trainer libraries: router losses, modes, shared parameters, batches, processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from tiny_models import logged, tiny_model, weights_of
from torch.utils.data import DataLoader, IterableDataset
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

from xtok import DistillationCollator, XtokError
from xtok.training.collator import prepare
from xtok.training.trainers.transformers import XTokTrainer

TEXTS = ["The keeper lit 201 lamps.", "Fog.", "High water at 6:12, low water at 12:40.", "Light"]
ROWS = [{"text": text} for text in TEXTS]
WIDTH = 256


def trainer(folder: Path, student: Any, teacher: Any, rows: Any = ROWS, **options: Any) -> Any:
    """Return a trainer of bytes, for a step with all rows."""
    settings: dict[str, Any] = {
        "max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd",
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "max_grad_norm": 0.0, "disable_tqdm": True,
    }  # fmt: skip
    ours = {name: options.pop(name) for name in ("hidden_states", "audit") if name in options}
    return XTokTrainer(
        student, TrainingArguments(output_dir=str(folder), **(settings | options)),
        DistillationCollator("bytes", "bytes"), teachers=teacher, loss="same-tokenizer",
        train_dataset=rows, eval_dataset=rows, **ours,
    )  # fmt: skip


def experts(**options: Any) -> Any:
    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=WIDTH, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, output_router_logits=True, router_aux_loss_coef=0.5, **options,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("hidden_states", [None, False])
def test_the_loss_of_a_router_is_added(tmp_path: Path, hidden_states: bool | None) -> None:
    run = trainer(tmp_path, experts(), tiny_model(WIDTH, seed=1), hidden_states=hidden_states)
    batch = prepare(run.data_collator(ROWS))
    with torch.no_grad():
        own = experts()(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    run.train()
    parts = [logged(run, name)[0] for name in ("cross_entropy", "distillation", "router")]
    assert parts[2] == pytest.approx(0.5 * float(own.aux_loss), rel=1e-5)
    assert parts[0] + parts[2] == pytest.approx(float(own.loss), rel=1e-5)
    assert logged(run)[0] == pytest.approx(sum(parts), rel=1e-5)


def test_shared_parameters_train_and_settings_of_the_caller_stay(tmp_path: Path) -> None:
    student, teacher = tiny_model(WIDTH, seed=0), tiny_model(WIDTH, seed=1, layers=2).train()
    student.model.embed_tokens = teacher.model.embed_tokens
    frozen = teacher.model.norm.weight.requires_grad_(False)
    before, flags = weights_of(student), [p.requires_grad for p in teacher.parameters()]
    with pytest.warns(UserWarning, match="the teacher shares 1 of"):
        trainer(tmp_path, student, teacher).train()
    assert all(not torch.equal(p, before[name]) for name, p in student.named_parameters())
    assert [p.requires_grad for p in teacher.parameters()] == flags
    assert not frozen.requires_grad
    assert all(module.training for module in teacher.modules())


def test_a_student_may_be_its_own_teacher(tmp_path: Path) -> None:
    model = tiny_model(WIDTH, seed=0)
    run = trainer(tmp_path, model, model)
    with pytest.warns(UserWarning, match="12 of the student's 12"):
        run.train()
    assert logged(run, "distillation")[0] == pytest.approx(0, abs=1e-6)
    assert logged(run, "cross_entropy")[0] > 1


def test_evaluation_before_training_is_in_the_trainer_s_precision(tmp_path: Path) -> None:
    def evaluated(**options: Any) -> float:
        student, teacher = (tiny_model(WIDTH, seed=n, sharp=0.2) for n in (0, 1))
        return float(trainer(tmp_path, student, teacher, **options).evaluate()["eval_loss"])

    student, teacher = (tiny_model(WIDTH, seed=n, sharp=0.2).eval() for n in (0, 1))
    batch = prepare(DistillationCollator("bytes", "bytes")(ROWS))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sides = (student, batch), (teacher, batch["teachers"][0])
        rows = [m(s["input_ids"], s["attention_mask"]).logits.float() for m, s in sides]
    targets = batch["targets"]
    ours, theirs = (torch.log_softmax(logits[targets >= 0], -1) for logits in rows)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    expected = float(kl - ours.gather(1, targets[targets >= 0][:, None]).mean())
    assert evaluated(bf16=True) == pytest.approx(expected, rel=1e-4)
    assert evaluated() != pytest.approx(expected, rel=1e-4)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def test_each_process_reads_its_rows_of_an_iterable_dataset(tmp_path: Path) -> None:
    student, teacher = (tiny_model(WIDTH, seed=n) for n in (0, 1))
    run = trainer(tmp_path, student, teacher, Streamed())
    config = run.accelerator.dataloader_config
    loader = DataLoader(Streamed(), batch_size=2, collate_fn=run.data_collator)
    loaders = [
        prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=config.dispatch_batches
        )
        for rank in range(2)
    ]
    ids = [[batch["input_ids"].tolist() for batch in rank_batches] for rank_batches in loaders]
    expected = [run.data_collator(rows)["input_ids"].tolist() for rows in (ROWS[:2], ROWS[2:])]
    assert ids == [[rows] for rows in expected]
    with pytest.raises(XtokError, match="dispatch_batches"):
        trainer(tmp_path, student, teacher, accelerator_config={"dispatch_batches": True})


def test_several_processes_need_the_same_number_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With even_batches=False, DDP waits for processes that have no last batch."""
    student, teacher = (tiny_model(WIDTH, seed=n) for n in (0, 1))
    uneven: dict[str, Any] = {"accelerator_config": {"even_batches": False}}
    trainer(tmp_path, student, teacher, **uneven)  # one process
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    trainer(tmp_path, student, teacher)
    trainer(tmp_path, student, teacher, **uneven, dataloader_drop_last=True)
    with pytest.raises(XtokError, match="even_batches"):
        trainer(tmp_path, student, teacher, **uneven)


def test_logs_after_the_end_of_a_stream(tmp_path: Path) -> None:
    """`Trainer` requests the batches of `max_steps` in each epoch, also after the last one."""
    student, teacher = (tiny_model(WIDTH, seed=n, sharp=0.2) for n in (0, 1))
    run = trainer(
        tmp_path, student, teacher, Streamed(), max_steps=4, per_device_train_batch_size=2
    )
    run.train()
    own, distillation = logged(run, "cross_entropy"), logged(run, "distillation")
    sums = [sum(parts) for parts in zip(own, distillation, strict=True)]
    assert sums == pytest.approx(logged(run), rel=1e-5)
    assert logged(run, "coverage") == [1, 1, 1, 1]


def test_the_first_batch_is_audited_once_and_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []
    for audit in (True, False):
        student = tiny_model(WIDTH, seed=0, dropout=0.3)
        run = trainer(tmp_path, student, tiny_model(WIDTH, seed=1), max_steps=3, audit=audit)
        run.train()
        logs.append(logged(run))
        assert capsys.readouterr().err.count("first batch: loss 5.5") == audit
    assert logs[0] == logs[1]
