"""The student's own cross-entropy, one block of positions at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.training.losses.logits import AnyLogits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Rows, one_pass
from xtok.training.sparse import work_dtype


def cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, −log p, in the memory of one block.

    `targets`, int64 `[B, T]`, are the predicted ids; below 0 for no target. As with `event_kl`,
    `backward` can run once.

    Returns:
        A scalar; 0 with zero gradients if there is no target.

    Raises:
        ValueError: if shapes do not fit, a target is beyond the width, or logits are NaN or +∞.
    """
    return one_pass(student_logits, [plan_cross_entropy(student_logits, targets)])[0]


def plan_cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Plan:
    """Plan `cross_entropy` for one pass."""
    student = as_logits(student_logits)
    width = student.shape[-1]
    if targets.shape != student.shape[:-1]:
        raise ValueError(
            f"targets are {list(targets.shape)}, but the logits are {list(student.shape)}"
        )
    [positions] = (targets.flatten() >= 0).nonzero(as_tuple=True)
    of_positions = targets.flatten()[positions]
    ids = of_positions.clamp(max=width - 1)[:, None]

    def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        log_p, target = block.log_probabilities(width), ids[rows.numbers]
        is_wrong = (of_positions[rows.numbers] >= width).any()
        lost = -log_p.gather(1, target).sum(dtype=torch.float64)
        back = block.probabilities(width).clone()
        back.scatter_add_(1, target, torch.full_like(target, -1, dtype=back.dtype))
        return lost.masked_fill(is_wrong, torch.nan), back

    def explain() -> None:
        if bool((of_positions >= width).any()):
            raise ValueError(
                f"the targets contain id {int(of_positions.max())}, expected ids below {width}"
            )

    return Plan([Part(positions, compare)], len(ids), work_dtype(student), explain=explain)
