"""`topk_kl` equals a plain implementation, the full KL, and TRL's loss; stored rows."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from naive_losses import value_and_gradient
from torch import Tensor

from xtok.training.losses import topk_kl

B, T, V = 2, 5, 9
VALID = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]]).bool()


def plain_topk_kl(
    student: Tensor, ids: Tensor, logprobs: Tensor, rest: Tensor, valid: Tensor
) -> Tensor:
    """Compare token i of a row with the logits at i − 1, one candidate at a time."""
    losses = []
    for row, token in valid.nonzero().tolist():
        if token == 0:
            continue
        q = torch.softmax(student[row, token - 1].double(), -1)
        loss, left = q.sum() * 0, torch.ones(len(q), dtype=torch.bool)
        for number, log_p in zip(ids[row, token].tolist(), logprobs[row, token], strict=True):
            if log_p > -torch.inf:
                loss = loss + log_p.exp() * (log_p - q[number].log())
                left[number] = False
        if rest[row, token] > -torch.inf:
            loss = loss + rest[row, token].exp() * (rest[row, token] - q[left].sum().log())
        losses.append(loss)
    return torch.stack(losses).mean()


def stored(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stored top-k of predictions `[B, T, V]`: row i of token i, padded by one."""
    best = log_p.topk(k)
    rest = torch.log1p(-best.values.exp().sum(-1).clamp(max=1))
    ids = torch.nn.functional.pad(best.indices, (0, 1))
    logprobs = torch.nn.functional.pad(best.values, (0, 1), value=-torch.inf)
    return ids.roll(1, 1), logprobs.roll(1, 1), rest.roll(1, 1)


def predictions(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, V, dtype=torch.float64, generator=generator) * scale


@pytest.mark.parametrize("k", [1, 3, V])
def test_loss_and_gradients_match_the_reference(k: int) -> None:
    student = predictions(0).requires_grad_()
    ids, logprobs, rest = stored(torch.log_softmax(predictions(1, 2), -1), k)
    # a shorter row, and a row without a rest
    logprobs[1, 2, 0], rest[0, 2] = -torch.inf, -torch.inf
    if k == V:
        rest[:] = -torch.inf
    targets = ids.int(), logprobs, rest, VALID
    loss, plain = topk_kl(student, *targets), plain_topk_kl(student, *targets)
    torch.testing.assert_close(loss, plain)
    (ours,), (theirs,) = (torch.autograd.grad(3 * x, student) for x in (loss, plain))
    torch.testing.assert_close(ours, theirs)


def test_with_all_tokens_the_loss_is_the_full_kl() -> None:
    student, log_p = predictions(0), torch.log_softmax(predictions(1), -1)
    ids, logprobs, rest = stored(log_p, V)
    log_q = torch.log_softmax(student, -1)
    full = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1][VALID[:, 1:]].mean()
    loss = topk_kl(student, ids, logprobs, torch.full_like(rest, -torch.inf), VALID)
    torch.testing.assert_close(loss, full)
    for k in (1, 4):  # by the data processing inequality
        assert 0 < float(topk_kl(student, *stored(log_p, k), VALID)) < float(full)


def test_rest_of_the_student_is_exact_to_float32() -> None:
    """In float32, 1 − Σ q_k is 0 here; the rest of the student is e^-30, the teacher's e^-2."""
    student = torch.tensor([[[30.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    rest = torch.tensor([[0.0, -2.0]])
    logprobs = torch.log1p(-rest.exp())[..., None]
    loss = topk_kl(student, torch.zeros(1, 2, 1).int(), logprobs, rest, torch.ones(1, 2))
    p = float(torch.exp(rest[0, 1]))
    assert float(loss.detach()) == pytest.approx((1 - p) * float(logprobs[0, 1, 0]) + p * (-2 + 30))
    gradient = value_and_gradient(loss, student)[1]
    torch.testing.assert_close(gradient[0, 0], torch.tensor([p, -p]))


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("k", [2, V])
def test_extremes_are_finite(scale: float, k: int) -> None:
    """Masked and huge logits; candidates with all mass, no mass, or nearly all mass."""
    student = (predictions(2) * scale).float()
    student[..., 4] = -torch.inf
    student.requires_grad_()
    ids, logprobs, rest = (x.clone() for x in stored(predictions(3).log_softmax(-1).float(), k))
    logprobs[0, 1], rest[0, 1] = -torch.inf, 0.0
    logprobs[0, 2, 0], logprobs[0, 2, 1:], rest[0, 2] = 0.0, -torch.inf, -torch.inf
    rest[1, 1] = -16.0
    loss = topk_kl(student, ids, logprobs, rest, VALID)
    value, gradient = value_and_gradient(loss, student)
    assert bool(torch.isfinite(value) & torch.isfinite(gradient).all())
    assert not gradient[..., 4].any()
    assert not gradient[:, -1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_ids": [[[0, 0], [0, 9]]]}, "the id 9 "),
        ({"top_ids": [[[0, 0], [2, 2]]]}, "the candidate 2 "),
        ({"top_logprobs": [[[0, 0], [-0.1, -0.1]]]}, r" 1\.859"),
        ({"rest_logprob": [[0.0, -0.5]]}, r" 1\.11"),
        ({"rest_logprob": [[0.0, torch.nan]]}, "of the rest is"),
        ({"valid": [[1]]}, r"\[1, 1\]\], .* \[1, 2, 9\]"),
    ],
)
def test_topk_kl_rejects_invalid_tensors(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "student_logits": torch.zeros(1, 2, 9), "top_ids": [[[0, 0], [0, 1]]],
        "top_logprobs": [[[0.0, 0.0], [-1.0, -2.0]]], "rest_logprob": [[0.0, -3.0]],
        "valid": [[1, 1]],
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        topk_kl(**{name: torch.as_tensor(value) for name, value in (good | change).items()})


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning")
def test_loss_matches_trl_with_a_served_teacher() -> None:
    """TRL reads rows at the predicting positions, and computes the rest as 1 − Σ p."""
    pytest.importorskip("trl.experimental.server_distillation")
    from trl.experimental.server_distillation.server_distillation_trainer import (
        ServerDistillationTrainer as Trainer,
    )

    reduce = Trainer._reduce_divergence_loss
    settings = SimpleNamespace(loss_add_tail=True, _reduce_divergence_loss=reduce)

    def trls(student: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
        labels = torch.where(VALID, 1, -100)[:, 1:]
        rows = {"topk_logprobs": logprobs[:, 1:], "topk_token_ids": ids[:, 1:]}
        log_q = torch.log_softmax(student, -1)[:, :-1]
        loss: Tensor = Trainer._compute_server_forward_kl_loss(settings, rows, log_q, labels)
        return loss

    student, log_p = predictions(6), torch.log_softmax(predictions(7), -1)
    ids, logprobs, rest = stored(log_p, 3)
    for mine in (student, log_p, log_p.roll(1, 1)):
        ours = topk_kl(mine, ids, logprobs, rest, VALID)
        torch.testing.assert_close(ours, trls(mine, ids, logprobs))
        assert (abs(float(ours)) < 1e-12) == (mine is log_p)
