"""For a teacher equal to the student, each loss compares equal predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

import xtok
from xtok import losses
from xtok.tokenizers import Tokenizer
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.objective import make_objective
from xtok.training.running import logits_of

PROMPT, ANSWER = "How many steps are there?", " There are 201."


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_is_0_for_equal_models_and_texts(digits: Tokenizer, side: str) -> None:
    """The batch is padded on either side, and the student may write another spelling."""
    bytes_of = [digits.table.canonical_ids()[bytes([byte])] for byte in ANSWER.encode()]
    begin = list(digits.table.roles["bos"][:1])
    whole, first, other = (digits.encode(x).ids.tolist() for x in (PROMPT + ANSWER, PROMPT, "Why?"))
    rows = [[*begin, *whole], [*begin, *other, *bytes_of]]
    prompts = [1 + len(first), 1 + len(other)]
    width = max(map(len, rows)) + 1
    ids, mask = torch.zeros((2, 2, width), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (row_ids, start) in enumerate(zip(rows, prompts, strict=True)):
        offset = width - len(row_ids) if side == "left" else 0
        ids[row, offset : offset + len(row_ids)] = torch.tensor(row_ids)
        mask[row, offset : offset + len(row_ids)] = 1
        labels[row, offset + start : offset + len(row_ids)] = torch.tensor(row_ids[start:])
    batch = prepare(DistillationCollator(digits, digits).from_student_ids(ids, mask, labels))
    [teacher] = batch["teachers"]
    model = tiny_model(len(digits.table), seed=0, sharp=0.5).eval()
    loss = losses.make_loss("same-tokenizer")
    assert loss.count(batch, teacher) == int((labels >= 0).sum())
    inputs = logits_of(model, batch), logits_of(model, teacher), batch, teacher
    assert float(loss(*inputs).detach()) == pytest.approx(0, abs=1e-6)


def test_two_templates_truncated_at_the_same_length(digits: Tokenizer) -> None:
    """Only text that remains on both sides is compared."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROMPT * 3}]
    collate = DistillationCollator(
        digits, digits, student_template="chatml", teacher_templates=["plain"], max_length=40
    )
    batch = prepare(collate([chat]))
    [side] = batch["teachers"]
    loss = losses.make_loss("same-tokenizer")
    pairs = losses.count_chunks(side["shifted"], starts_only=True)
    assert 0 < loss.count(batch, side) == pairs < int((batch["targets"] >= 0).sum())
    # Logits of the next token are equal only at the same position of the text.
    student, teacher = (
        torch.nn.functional.one_hot(inputs["targets"].clamp(min=0), len(digits.table)).float() * 9
        for inputs in (batch, side)
    )
    assert float(loss(student, teacher, batch, side)) == pytest.approx(0, abs=1e-6)


def test_padding_predicts_no_target(digits: Tokenizer) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    collate = DistillationCollator(digits, digits)
    batch = prepare(collate.from_student_ids(ids, (ids > 0).long(), ids.where(ids > 0, -100)))
    assert batch["targets"].tolist() == [[-100, -100, 6, 7, -100]]


def test_chunks_are_counted_again_after_a_change(digits: Tokenizer, byte_level: Tokenizer) -> None:
    batch = prepare(DistillationCollator(digits, byte_level)([PROMPT]))
    aligned: Any = batch["teachers"][0]["shifted"]
    before = losses.count_chunks(aligned)
    aligned.pair_valid = aligned.pair_valid & (aligned.pair_valid.cumsum(1) == 1)
    assert losses.count_chunks(aligned) == 1 < before


def test_other_tokenizers_are_refused(digits: Tokenizer, byte_level: Tokenizer) -> None:
    wide = xtok.load_tokenizer("bytes", vocab_size=300)
    make_objective([xtok.load_pair("bytes", wide)], "same-tokenizer")
    with pytest.raises(xtok.XtokError, match="needs equal tokenizers"):
        make_objective([xtok.load_pair(digits, byte_level)], "same-tokenizer")
