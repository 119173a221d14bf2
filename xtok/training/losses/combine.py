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
    """
    scores = []
    with torch.no_grad():
        for logits, labels in zip(teacher_logits, teacher_labels, strict=True):
            inside = labels >= 0
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
    for loss, weight in zip(losses, _weights(weights, len(losses)), strict=True):
        total = total + loss * weight
    return total


def combine(
    distillation: Tensor,
    cross_entropy: Tensor,
    config: CombineConfig | None = None,
    *,
    whole: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the sum of a distillation loss d and the student's own cross-entropy c.

    loss = w_d · d + w_c · c, or, with dynamic scaling (X-Token, arXiv 2605.21699, eq. 7),

        loss = sg(|c| / |d|) · d + c

    where sg lets no gradient through, and the factor is 1 where d is 0.

    Args:
        distillation: d.
        cross_entropy: c.
        config: the weights; the defaults if None.
        whole: d and c of the whole step, for the factor, where these are a batch's shares of them.
    """
    config = config or CombineConfig()
    if not config.dynamic_scaling:
        weighted = config.distillation_weight * distillation
        return weighted + config.cross_entropy_weight * cross_entropy
    d, c = (part.detach().abs() for part in whole or (distillation, cross_entropy))
    return torch.where(d > 0, c / d.clamp(min=1e-30), 1.0) * distillation + cross_entropy


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count or any(weight < 0 for weight in shares):
        raise ValueError(f"{shares} are not {count} weights of 0 or above, one per teacher")
    return shares
