"""Several teachers, and the sum with the cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xtok.training.losses.config import CombineConfig
from xtok.training.sparse import work_dtype


def select_teacher(
    teacher_logits: Sequence[Tensor], teacher_labels: Sequence[Tensor], *, per_token: bool = False
) -> int:
    """Return the index of the teacher that finds the batch's text likeliest, the first of equals.

    All of them read the same text, so their total −log p is compared. A mean over tokens, which
    NeMo-RL compares, favours the tokenizer with the shorter tokens.

    Args:
        teacher_logits: `[B, T, V]` each.
        teacher_labels: int64 `[B, T]` each, the ids that the positions predict; -100 where a
            position does not count.
        per_token: compare the mean over tokens.

    Raises:
        ValueError: for a teacher without a position that counts.
    """
    scores: list[float] = []
    with torch.no_grad():
        for logits, labels in zip(teacher_logits, teacher_labels, strict=True):
            inside = labels >= 0
            if not bool(inside.any()):
                raise ValueError(f"teacher {len(scores)} has no position that counts")
            rows = logits[inside].to(work_dtype(logits))
            reduction = "mean" if per_token else "sum"
            score = torch.nn.functional.cross_entropy(rows, labels[inside], reduction=reduction)
            scores.append(float(score))
    return min(range(len(scores)), key=scores.__getitem__)


def sum_teachers(losses: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return Σ weight · loss over the teachers; each weight is 1 if None.

    Raises:
        ValueError: for weights that do not fit.
    """
    total = losses[0] * 0
    for loss, weight in zip(losses, teacher_weights(weights, len(losses)), strict=True):
        total = total + loss * weight
    return total


def combine(
    distillation: Tensor, cross_entropy: Tensor, config: CombineConfig | None = None
) -> Tensor:
    """Return the sum of a distillation loss d and the student's own cross-entropy c.

    loss = w_d · d + w_c · c, or, with dynamic scaling (X-Token, arXiv 2605.21699, eq. 7),

        loss = sg(|c| / |d|) · d + c

    where sg lets no gradient through, and the factor is 1 where d is 0.
    """
    of_distillation, of_own = weights_of(config or CombineConfig(), distillation, cross_entropy)
    return of_distillation * distillation + of_own * cross_entropy


def weights_of(
    config: CombineConfig, distillation: Tensor, cross_entropy: Tensor
) -> tuple[Tensor | float, float]:
    """Return the weights of distillation and cross-entropy, where they have these values."""
    if not config.dynamic_scaling:
        return config.distillation_weight, config.cross_entropy_weight
    d, c = distillation.detach().abs(), cross_entropy.detach().abs()
    return torch.where(d > 0, c / d.clamp(min=1e-30), 1.0), 1.0


def teacher_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return a weight for each teacher; each is 1 if None.

    Raises:
        ValueError: for weights that do not fit.
    """
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count or not all(weight >= 0 for weight in shares):
        raise ValueError(f"{shares} are not {count} weights of 0 or above, one per teacher")
    return shares
