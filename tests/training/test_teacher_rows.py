"""A teacher's stored predictions of its own tokens, as losses take them in place of its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_teachers
import torch
from torch import Tensor

from xtok import DistillationCollator, XtokError, losses
from xtok.pairs import Pair
from xtok.stages.spellings import spellings_of_pair
from xtok.training.collator import prepare
from xtok.training.losses import LossName, make_loss
from xtok.training.told import teacher_rows

TEXTS = ["The keeper lit 201 lamps, día tras día.", "High water at 6:12.", "Fog"]


@pytest.fixture(scope="module")
def collator(pair: Pair) -> DistillationCollator:
    return DistillationCollator(*pair.reversed.tokenizers)


def rows_of(side: dict[str, Any], log_q: Tensor, k: int | None) -> list[dict[str, Any]]:
    """What a cache has of each row: with `k` candidates, else the tokens' own values alone."""
    rows = []
    for ids, mask, log_p in zip(side["input_ids"], side["attention_mask"], log_q, strict=True):
        own = ids[mask != 0]
        before = log_p[: len(own) - 1]
        realized = [None, *before.gather(1, own[1:, None])[:, 0].tolist()]
        row: dict[str, Any] = {"input_ids": own.tolist(), "realized_logprob": realized}
        if k is not None:
            best = before.topk(k)
            row |= {
                "topk_ids": [[], *best.indices.tolist()],
                "topk_logprobs": [[], *best.values.tolist()],
            }
        rows.append(row)
    return rows


@pytest.mark.parametrize(("loss", "k"), [("alm", None), ("csd", -1)])
def test_rows_of_a_cache_are_as_good_as_its_logits(
    collator: DistillationCollator, pair: Pair, loss: LossName, k: int | None
) -> None:
    """With all candidates csd is that of the logits; the student's tokens are the same."""
    index = losses.spelling_index(spellings_of_pair(pair.reversed)) if loss == "csd" else None
    function = make_loss(loss, module=index)
    batch = prepare(collator(TEXTS))
    [side] = batch["teachers"]
    torch.manual_seed(0)
    widths = pair.reversed.shape
    student = torch.randn(*batch["input_ids"].shape, widths[0])
    teacher = 2 * torch.randn(*side["input_ids"].shape, widths[1])
    rows = rows_of(side, teacher.log_softmax(-1), widths[1] if k else None)
    stored = prepare(collator(rows))
    [told] = stored["teachers"]
    assert torch.equal(stored["input_ids"], batch["input_ids"])
    assert torch.equal(stored["targets"], batch["targets"])
    assert function.count(stored, told) == function.count(batch, side) > 10
    expected = function(student, teacher, batch, side)
    torch.testing.assert_close(function(student, None, stored, told), expected)
    if k:
        rows = [{**row, "realized_logprob": None} for row in rows]  # a server's: among the others
        stored = prepare(collator(rows))
        [told] = stored["teachers"]
        torch.testing.assert_close(function(student, None, stored, told), expected)


def test_masked_tokens_and_tokens_without_a_prediction(collator: DistillationCollator) -> None:
    [teacher] = collator.teachers
    ids = teacher.segment(b"High water at 6:12.")
    row = {"input_ids": ids, "realized_logprob": [None] + [-0.5] * (len(ids) - 1)}
    masked = {**row, "loss_mask": [n > 3 for n in range(len(ids))]}
    unknown = {**row, "realized_logprob": [None] * 4 + [-0.5] * (len(ids) - 4)}
    whole, first, second = (prepare(collator([x])) for x in (row, masked, unknown))
    counts = [
        make_loss("alm").count(batch, batch["teachers"][0]) for batch in (whole, first, second)
    ]
    assert counts[0] > counts[1] == counts[2] > 0
    logits = torch.zeros(1, first["input_ids"].shape[1], collator.student.vocabulary.vocab_size)
    assert float(make_loss("alm")(logits, None, first, first["teachers"][0])) > 0


def test_a_trainer_without_a_teacher(collator: DistillationCollator, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tiny_models import logged, tiny_model
    from transformers import TrainingArguments

    from xtok.integrations.transformers import DistillationTrainer

    rows = []
    for text in TEXTS[:2]:
        ids = collator.teachers[0].segment(text.encode())
        rows.append({"input_ids": ids, "realized_logprob": [None] + [-0.7] * (len(ids) - 1)})
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=0.01,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    student = tiny_model(collator.student.vocabulary.vocab_size, seed=0)
    one = DistillationTrainer(student, arguments, collator, loss="alm", train_dataset=rows)
    one.train()
    falling = logged(one, "distillation")
    assert len(falling) == 4
    assert falling[-1] < falling[0] - 0.1


@pytest.mark.parametrize("source", ["vllm", "sglang", "neutral"])
@pytest.mark.parametrize("loss", ["alm", "csd"])
def test_answers_of_servers(
    collator: DistillationCollator, pair: Pair, tmp_path: Path, source: str, loss: LossName
) -> None:
    """Lines of answers, and Parquet, give what the same rows as lists do."""
    [teacher] = collator.teachers
    made = stored_teachers.rows_of(teacher, TEXTS)
    path = tmp_path / "answers.jsonl"
    if source == "neutral":
        stored_teachers.write_neutral(path, made)
    else:
        answer = getattr(stored_teachers, f"{source}_answer")
        stored_teachers.write_lines(path, [answer(row) for row in made])
    rows = list(teacher_rows(path, teacher))
    index = losses.spelling_index(spellings_of_pair(pair.reversed)) if loss == "csd" else None
    function = make_loss(loss, module=index)
    found, expected = (prepare(collator(each)) for each in (rows, made))
    logits = torch.randn(*found["input_ids"].shape, collator.student.vocabulary.vocab_size)
    values = [float(function(logits, None, b, b["teachers"][0])) for b in (found, expected)]
    assert values[1] > 0
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert function.count(found, found["teachers"][0]) > 10


def test_a_cache_that_is_not_the_teachers_own(
    collator: DistillationCollator, tmp_path: Path
) -> None:
    [teacher] = collator.teachers
    rows = stored_teachers.rows_of(teacher, TEXTS)
    path = tmp_path / "c.parquet"
    for row in rows:
        row["topk_logprobs"] = [
            (np.array(x) - np.logaddexp.reduce(x)).tolist() if x else x
            for x in row["topk_logprobs"]
        ]
    with pytest.raises(XtokError, match="sum to 1 over the candidates"):
        next(teacher_rows(stored_teachers.write_neutral(path, rows, row_group_size=6), teacher))
    masked = [
        {**row, "loss_mask": [n > 5 for n in range(len(row["input_ids"]))]} for row in rows[:1]
    ]
    masked[0] |= stored_teachers.rows_of(teacher, TEXTS)[0]
    [row] = teacher_rows(stored_teachers.write_neutral(path, masked), teacher)
    assert row["loss_mask"].tolist() == masked[0]["loss_mask"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"realized_logprob": [-1.0]}, "realized_logprob has 1 rows for 2 input_ids"),
        ({"topk_ids": [[], [1]], "topk_logprobs": [[], []]}, "different numbers of candidates"),
        (
            {"topk_ids": [[4], []], "topk_logprobs": [[-1.0], []]},
            "topk_ids begin with candidates for the first token, .* not of the next",
        ),
        ({"realized_logprob": [-1.0, -1.0]}, "realized_logprob begins with a value .* of the next"),
        ({"realized_logprob": [None, 0.5]}, "realized_logprob has 0.5, and is at most 0"),
    ],
)
def test_bad_rows(collator: DistillationCollator, change: dict[str, Any], message: str) -> None:
    row = {"input_ids": [3, 4], "realized_logprob": [None, -1.0]}
    collator([row])
    with pytest.raises(ValueError, match=message):
        collator([row | change])


def test_no_teacher_at_all(collator: DistillationCollator) -> None:
    batch = prepare(collator(["Fog."]))
    logits = torch.zeros(1, batch["input_ids"].shape[1], collator.student.vocabulary.vocab_size)
    with pytest.raises(XtokError, match="there is no teacher, and no prediction of one"):
        make_loss("alm")(logits, None, batch, batch["teachers"][0])
