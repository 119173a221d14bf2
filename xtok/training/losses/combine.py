"""The weights of several teachers, and the sum with the cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xtok.training.losses.config import CombineConfig


def combine(
    distillation: Tensor, cross_entropy: Tensor, config: CombineConfig | None = None
) -> Tensor:
    """Return the sum of a distillation loss d and the student's own cross-entropy c.

    loss = w_d · d + w_c · c, or, with dynamic scaling (X-Token, arXiv 2605.21699, eq. 7),

        loss = sg(|c| / |d|) · d + c

    where sg stops the gradient, and the factor is 1 if d is 0.
    """
    of_distillation, of_own = weights_of(config or CombineConfig(), distillation, cross_entropy)
    return of_distillation * distillation + of_own * cross_entropy


def weights_of(
    config: CombineConfig, distillation: Tensor, cross_entropy: Tensor
) -> tuple[Tensor | float, float]:
    """Return the weights of distillation and cross-entropy for these values."""
    if not config.dynamic_scaling:
        return config.distillation_weight, config.cross_entropy_weight
    d, c = distillation.detach().abs(), cross_entropy.detach().abs()
    return torch.where(d > 0, c / d.clamp(min=1e-30), 1.0), 1.0


def teacher_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return one weight per teacher; 1 each if None.

    Raises:
        ValueError: if their number is wrong, or one is below 0.
    """
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count or not all(weight >= 0 for weight in shares):
        raise ValueError(
            f"the weights are {shares}, expected {count} numbers of at least 0, one per teacher"
        )
    return shares
