"""`alm` with a teacher's log-probabilities of the text instead of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from xtok import DistillationCollator, XtokError
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import SideBatch
from xtok.training.collator import prepare
from xtok.training.losses import make_loss

TEXTS = ["The keeper lit 201 lamps, día tras día.", "High water at 6:12.", "Fog"]


@pytest.fixture(scope="module")
def collator(pair: Pair) -> DistillationCollator:
    return DistillationCollator(*pair.reversed.tokenizers)


def stored_rows(side: SideBatch, log_q: Tensor) -> list[dict[str, Any]]:
    """Return the columns of a cache for each row."""
    rows = []
    for ids, mask, log_p in zip(side["input_ids"], side["attention_mask"], log_q, strict=True):
        own = ids[mask != 0]
        realized = log_p[: len(own) - 1].gather(1, own[1:, None])[:, 0].tolist()
        rows.append({"input_ids": own.tolist(), "realized_logprob": [None, *realized]})
    return rows


def test_stored_rows_give_the_loss_of_logits(collator: DistillationCollator, pair: Pair) -> None:
    """The student's tokens are the same."""
    function = make_loss("alm")
    batch = prepare(collator(TEXTS))
    [side] = batch["teachers"]
    torch.manual_seed(0)
    widths = pair.reversed.shape
    student = torch.randn(*batch["input_ids"].shape, widths[0])
    teacher = 2 * torch.randn(*side["input_ids"].shape, widths[1])
    stored = prepare(collator(stored_rows(side, teacher.log_softmax(-1))))
    [stored_side] = stored["teachers"]
    assert torch.equal(stored["input_ids"], batch["input_ids"])
    assert torch.equal(stored["targets"], batch["targets"])
    assert function.count(stored, stored_side) == function.count(batch, side) > 10
    expected = function(student, teacher, batch, side)
    torch.testing.assert_close(function(student, None, stored, stored_side), expected)


def test_masked_tokens_and_tokens_without_a_prediction(collator: DistillationCollator) -> None:
    [teacher] = collator.teachers
    ids = teacher.segment(b"High water at 6:12.")
    row = {"input_ids": ids, "realized_logprob": [None] + [-0.5] * (len(ids) - 1)}
    masked = {**row, "loss_mask": [n > 3 for n in range(len(ids))]}
    labelled = {**row, "labels": [i if n > 3 else -100 for n, i in enumerate(ids)]}
    unknown = {**row, "realized_logprob": [None] * 4 + [-0.5] * (len(ids) - 4)}
    batches = [prepare(collator([x])) for x in (row, masked, unknown, labelled)]
    counts = [make_loss("alm").count(batch, batch["teachers"][0]) for batch in batches]
    assert counts[0] > counts[1] == counts[2] == counts[3] > 0
    first = batches[1]
    logits = torch.zeros(1, first["input_ids"].shape[1], collator.student.vocabulary.vocab_size)
    assert float(make_loss("alm")(logits, None, first, first["teachers"][0])) > 0


def test_a_trainer_without_a_teacher(collator: DistillationCollator, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tiny_models import logged, tiny_model
    from transformers import TrainingArguments

    from xtok.training.trainers.transformers import XTokTrainer

    rows = []
    for text in TEXTS[:2]:
        ids = collator.teachers[0].segment(text.encode())
        rows.append({"input_ids": ids, "realized_logprob": [None] + [-0.7] * (len(ids) - 1)})
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=0.01,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    student = tiny_model(collator.student.vocabulary.vocab_size, seed=0)
    trainer = XTokTrainer(student, arguments, collator, loss="alm", train_dataset=rows)
    trainer.train()
    falling = logged(trainer, "distillation")
    assert len(falling) == 4
    assert falling[-1] < falling[0] - 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"realized_logprob": [-1.0]}, "realized_logprob has 1 values"),
        ({"realized_logprob": [-1.0, -1.0]}, "the first token"),
        ({"realized_logprob": [None, 0.5]}, "realized_logprob contains 0.5"),
    ],
)
def test_error_names_invalid_log_probabilities(
    collator: DistillationCollator, change: dict[str, Any], message: str
) -> None:
    row = {"input_ids": [3, 4], "realized_logprob": [None, -1.0]}
    collator([row])
    with pytest.raises(ValueError, match=message):
        collator([row | change])


def test_no_teacher_at_all(collator: DistillationCollator) -> None:
    batch = prepare(collator(["Fog."]))
    logits = torch.zeros(1, batch["input_ids"].shape[1], collator.student.vocabulary.vocab_size)
    with pytest.raises(XtokError, match="predictions are missing"):
        make_loss("alm")(logits, None, batch, batch["teachers"][0])
