"""`alm` equals a plain implementation and manual values; gradients; log-probabilities."""

from __future__ import annotations

from math import log
from typing import Any

import naive_losses
import pytest
import torch
from alm_inputs import ALIGNED, IDS, VALID, sides
from loss_inputs import alignment
from naive_losses import value_and_gradient

from xtok.training.losses import ALMConfig, alm


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_loss_matches_the_reference(temperature: float, reverse: bool) -> None:
    student, teacher, targets = sides()
    config = ALMConfig(temperature=temperature, reverse_kl=reverse)
    ours = value_and_gradient(alm(student, teacher, targets, ALIGNED, config), student)
    plain = naive_losses.alm(
        student, teacher, targets, IDS, VALID, temperature=temperature, reverse=reverse
    )
    assert float(plain.detach()) > 0.01
    torch.testing.assert_close(ours, value_and_gradient(plain, student), rtol=1e-7, atol=1e-9)


def test_values_by_hand() -> None:
    """The student has 1/4 · 1/2, the teacher 1/2: the KL of (1/2, 1/2) from (1/8, 7/8)."""
    student = torch.tensor([[[0.0] * 4, [0.0, 0.0, -torch.inf, -torch.inf], [9.0] * 4]])
    teacher = torch.tensor([[[3.0, 3.0], [7.0, 0.0]]])
    targets = torch.tensor([[2, 1, 0]]), torch.tensor([[1, 0]])
    aligned = alignment([[1, 1, -1]], [[1, -1]])
    forward = float(alm(student, teacher, targets, aligned))
    assert forward == pytest.approx(log(4) / 2 + log(4 / 7) / 2, abs=1e-5)
    reverse = float(alm(student, teacher, targets, aligned, ALMConfig(reverse_kl=True)))
    assert reverse == pytest.approx(log(1 / 4) / 8 + 7 / 8 * log(7 / 4), abs=1e-5)
    large = float(alm(student.double(), teacher, targets, aligned, ALMConfig(temperature=1e4)))
    assert large == pytest.approx(log(2) * log(1 / 3) - log(2) + log(8), abs=3e-2)


def test_equal_likelihoods_have_zero_loss_for_any_chunks() -> None:
    """Two tokens with probability 1/2 equal one token with 1/4, so the gradient is zero."""
    student, teacher = torch.zeros(1, 2, 2, requires_grad=True), torch.zeros(1, 1, 4)
    targets = torch.tensor([[0, 1]]), torch.tensor([[3]])
    loss = alm(student, teacher, targets, alignment([[1, 1]], [[1]]))
    value, gradient = value_and_gradient(loss, student)
    assert float(value) == pytest.approx(0, abs=1e-7)
    torch.testing.assert_close(gradient, torch.zeros(1, 2, 2), atol=1e-6, rtol=0)


def test_stored_log_probabilities_replace_the_teachers_logits() -> None:
    student, teacher, targets = sides(2)
    expected = alm(student, teacher, targets, ALIGNED)
    inside = targets[1] >= 0
    logprobs = teacher.log_softmax(-1).gather(2, targets[1].clamp(min=0)[..., None])[..., 0]
    stored = torch.where(inside, logprobs, torch.nan)  # caches contain no values for prompts
    nothing = torch.full_like(targets[1], -100)
    loss = alm(student, None, (targets[0], nothing), ALIGNED, teacher_logprobs=stored)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_logits": None}, "teacher_logprobs .*missing"),
        ({"teacher_logprobs": torch.zeros(3, 4)}, r"teacher.* \[3, 4, 1\]"),
        ({"teacher_logprobs": torch.full((3, 5), torch.nan)}, "teacher_logprobs .*nan at"),
        ({"teacher_logprobs": torch.full((3, 5), 0.5)}, "teacher_logprobs .*0.5 at"),
    ],
)
def test_error_names_the_invalid_input_of_alm(change: dict[str, Any], message: str) -> None:
    student, teacher, targets = sides()
    logits: dict[str, Any] = {"student_logits": student, "teacher_logits": teacher}
    logits |= {"targets": targets} | change
    if "teacher_logprobs" in change:
        logits["teacher_logits"] = None
    with pytest.raises(ValueError, match=message):
        alm(alignment=ALIGNED, **logits)
