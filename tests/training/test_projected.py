"""A running teacher, projected along the path, equals its stored, projected predictions."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from checks import not_none
from projected import ProjectedTeacher
from stored_teachers import write_neutral
from torch import Tensor

import xtok
from xtok.config import BACK_MAP, ProjectConfig
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.training.batches import Batch, SideBatch, StoredTopK
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses import topk_kl
from xtok.training.objective import make_objective
from xtok.training.topk_collator import TopKCollator

TEXTS = ["There were 1234 of them in 2024, or so.", "Äpfel? 12.50", "the other words of the text"]


def logits_for(side: SideBatch, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(*side["input_ids"].shape, width, generator=generator)


def inputs_of(
    student: Tokenizer, teacher: Tokenizer, top_k: int
) -> tuple[ProjectedTeacher, Batch, Tensor]:
    """Return the projector, a batch, and the teacher's logits on the batch."""
    back_map = xtok.build(teacher, student, BACK_MAP)
    projected_teacher = ProjectedTeacher(
        xtok.load_pair(student, teacher), back_map, top_k=top_k, num_threads=1
    )
    batch = prepare(DistillationCollator(student, teacher, bos=False)(TEXTS))
    return projected_teacher, batch, logits_for(batch["teachers"][0], len(teacher.table))


def candidates(stored: StoredTopK, width: int) -> Tensor:
    """Return the probability of each of a student's tokens as a candidate, `[B, T, V]`."""
    none = torch.zeros(*stored.valid.shape, width)
    return none.scatter_add(-1, stored.top_ids, stored.top_logprobs.exp())


@pytest.mark.parametrize("top_k", [8, 4096])
def test_loss_is_0_for_equal_logits_of_the_same_tokenizer(
    byte_level: Tokenizer, top_k: int
) -> None:
    projected_teacher, batch, logits = inputs_of(byte_level, byte_level, top_k)
    logits[..., 70] = -torch.inf  # a masked token is never a candidate
    side = batch["teachers"][0]
    assert float(projected_teacher.loss(logits, logits, batch, side)) == pytest.approx(0, abs=1e-6)
    assert float(projected_teacher.loss(logits.roll(1, 1), logits, batch, side)) > 1


@pytest.mark.parametrize("top_k", [8, 300])
def test_logits_give_the_loss_of_stored_and_projected_rows(
    tmp_path: Path, byte_level: Tokenizer, digits: Tokenizer, top_k: int
) -> None:
    """The file contains the best candidates, the rest, and the text's own tokens."""
    projected_teacher, batch, logits = inputs_of(digits, byte_level, top_k)
    side = batch["teachers"][0]
    rows = []
    for text, ids, mask, log_p in zip(
        TEXTS, side["input_ids"], side["attention_mask"], logits.log_softmax(-1), strict=True
    ):
        own = ids[mask != 0]
        before = log_p[: len(own) - 1]
        best = before.topk(min(top_k, before.shape[1]))
        rest = before.scatter(1, best.indices, -torch.inf).logsumexp(1)
        realized = before.gather(1, own[1:, None])[:, 0]
        rows.append({
            "text": text, "input_ids": own.tolist(), "topk_ids": [[], *best.indices.tolist()],
            "topk_logprobs": [[], *best.values.tolist()], "rest_logprob": [None, *rest.tolist()],
            "realized_logprob": [None, *realized.tolist()],
        })  # fmt: skip
    cache, out = write_neutral(tmp_path / "teacher.parquet", rows), tmp_path / "student.parquet"
    back_map = xtok.build(byte_level, digits, BACK_MAP)
    xtok.project(
        cache,
        xtok.load_pair(digits, byte_level),
        out,
        ProjectConfig(top_k=top_k),
        back_map=back_map,
    )
    stored = TopKCollator()(pyarrow.parquet.read_table(out).to_pylist())
    [expected] = (side["stored"] for side in stored["teachers"])
    assert torch.equal(stored["input_ids"][stored["attention_mask"] != 0],
                       batch["input_ids"][batch["attention_mask"] != 0])  # fmt: skip
    projection = projected_teacher(logits, batch, side)
    predicted = expected.valid
    shares = [candidates(projected, len(digits.table)) for projected in (projection, expected)]
    torch.testing.assert_close(*shares, rtol=1e-4, atol=1e-7)
    rests = [projected.rest_logprob[predicted].exp() for projected in (projection, expected)]
    torch.testing.assert_close(*rests, rtol=1e-4, atol=1e-6)
    # Rows without a prediction have all probability in the rest; each target counts.
    assert torch.equal(projection.valid, batch["labels"] != -100)
    assert not projection.rest_logprob[projection.valid & ~predicted].any()
    student = logits_for(batch, len(digits.table), seed=1)
    sums = [
        float(topk_kl(student, **vars(x))) * int(x.valid[:, 1:].sum())
        for x in (projection, expected)
    ]
    assert sums[0] == pytest.approx(sums[1])


def test_only_the_student_has_a_gradient(byte_level: Tokenizer, digits: Tokenizer) -> None:
    projected_teacher, batch, logits = inputs_of(digits, byte_level, 8)
    student = logits_for(batch, len(digits.table), seed=1).requires_grad_()
    projected_teacher.loss(student, logits.requires_grad_(), batch, batch["teachers"][0]).backward()
    assert logits.grad is None
    assert bool(not_none(student.grad)[:, 0].any())


def test_the_loss_of_a_batch_is_the_sum_over_its_rows(
    byte_level: Tokenizer, digits: Tokenizer
) -> None:
    """The objective works with any padding, and divides by the total of all batches."""
    projected_teacher, batch, logits = inputs_of(digits, byte_level, 8)
    side, student = batch["teachers"][0], logits_for(batch, len(digits.table), seed=1)
    collate = DistillationCollator(digits, byte_level, bos=False)
    objective = make_objective(collate.pairs, projected_teacher.loss)
    whole, totals = objective.terms(student, [logits], batch), objective.count(batch)
    assert totals.tolist() == [int((batch["labels"][:, 1:] >= 0).sum())] * 2
    parts = []
    for i, text in enumerate(TEXTS):
        single = prepare(collate([text]))
        sizes = single["input_ids"].shape[1], single["teachers"][0]["input_ids"].shape[1]
        mine, teacher = student[i : i + 1, : sizes[0]], logits[i : i + 1, : sizes[1]]
        parts.append(objective.terms(mine, [teacher], single, totals).distillation)
    assert float(sum(parts)) == pytest.approx(float(whole.distillation))
    moved: Batch = {**batch}
    for name in ("input_ids", "attention_mask", "labels"):
        moved[name] = batch[name].clone()
        moved[name][1] = moved[name][1].roll(int((batch["attention_mask"][1] == 0).sum()))
    projection, left = (
        projected_teacher(logits, batch, side),
        projected_teacher(logits, moved, side),
    )
    for mask, projected in ((batch, projection), (moved, left)):
        assert not projected.valid[mask["attention_mask"] == 0].any()
    for name in vars(projection):
        kept = [
            vars(projected)[name][mask["attention_mask"] != 0]
            for mask, projected in ((batch, projection), (moved, left))
        ]
        assert torch.equal(*kept)


def test_logits_have_the_teachers_width(byte_level: Tokenizer, digits: Tokenizer) -> None:
    projected_teacher, batch, logits = inputs_of(digits, byte_level, 8)
    side = batch["teachers"][0]
    wider = torch.nn.functional.pad(logits, (0, 3), value=50.0)
    projection, expected = (
        projected_teacher(wider, batch, side),
        projected_teacher(logits, batch, side),
    )
    assert torch.equal(projection.top_logprobs, expected.top_logprobs)
    with pytest.raises(XtokError, match="teacher's logits") as raised:
        projected_teacher(logits[..., :-1], batch, side)
    assert raised.value.parameter == "vocab_size"
