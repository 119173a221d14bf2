"""The student's cross-entropy, and its weighted sum with a distillation loss."""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.training.losses.config import CombineConfig
from xtok.training.losses.logits import AnyLogits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Plan, PlanPart, Rows, one_pass
from xtok.training.sparse import work_dtype


def cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Tensor:
    """Return the mean −log p of the targets, computed in blocks to save memory.

    `targets`, int64 `[B, T]`, are the predicted ids; values below 0 are not targets. `backward` can
    run only once, as for `event_kl`.

    Returns:
        A scalar. If there are no targets, the loss is 0, with zero gradients.

    Raises:
        ValueError: if shapes do not match, a target is not below the logits' width, or logits are
            NaN or +∞.
    """
    return one_pass(student_logits, [plan_cross_entropy(student_logits, targets)])[0]


def plan_cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Plan:
    """Return the plan with which `one_pass` computes `cross_entropy`."""
    student = as_logits(student_logits)
    width = student.shape[-1]
    if targets.shape != student.shape[:-1]:
        raise ValueError(
            f"targets are {list(targets.shape)}, but the logits are {list(student.shape)}"
        )
    [positions] = (targets.flatten() >= 0).nonzero(as_tuple=True)
    target_ids = targets.flatten()[positions]
    ids = target_ids.clamp(max=width - 1)[:, None]

    def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        log_p, target = block.log_probabilities(width), ids[rows.indices]
        is_wrong = (target_ids[rows.indices] >= width).any()
        losses = -log_p.gather(1, target).sum(dtype=torch.float64)
        grad = block.probabilities(width).clone()
        grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
        return losses.masked_fill(is_wrong, torch.nan), grad

    def check() -> None:
        if bool((target_ids >= width).any()):
            raise ValueError(
                f"the targets contain id {int(target_ids.max())}, expected ids below {width}"
            )

    return Plan([PlanPart(positions, compare)], len(ids), work_dtype(student), check=check)


def combine(
    distillation: Tensor, cross_entropy: Tensor, config: CombineConfig | None = None
) -> Tensor:
    """Return the weighted sum of a distillation loss d and the student's own cross-entropy c.

    loss = w_d · d + w_c · c, or with dynamic scaling (X-Token, arXiv 2605.21699, eq. 7)

        loss = sg(|c| / |d|) · d + c

    where sg stops the gradient. If d is 0, the factor of d is 1.
    """
    weights = loss_weights(config or CombineConfig(), distillation, cross_entropy)
    return weights[0] * distillation + weights[1] * cross_entropy


def loss_weights(
    config: CombineConfig, distillation: Tensor, cross_entropy: Tensor
) -> tuple[Tensor | float, float]:
    """Return the weights of the distillation loss and the cross-entropy."""
    if not config.dynamic_scaling:
        return config.distillation_weight, config.cross_entropy_weight
    d, c = distillation.detach().abs(), cross_entropy.detach().abs()
    return torch.where(d > 0, c / d.clamp(min=1e-30), 1.0), 1.0
