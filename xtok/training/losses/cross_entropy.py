"""The student's own cross-entropy, a block of positions at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.training.losses.logits import AnyLogits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Rows, one_pass, sides_of
from xtok.training.sparse import work_dtype


def cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, −log p, in the memory of one block.

    With a loss it goes into one pass, and into one gradient, as `one_pass` of the plans of both.
    The gradient is used up by `backward`, as that of `event_kl`.

    Args:
        student_logits: `[B, T, V]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are).
        targets: int64 `[B, T]`, the ids that positions predict; below 0 where there is none.

    Returns:
        A scalar; 0 with a gradient of zeros where there is no target.

    Raises:
        ValueError: for shapes that do not fit, targets beyond the width, and logits of NaN or +∞.
    """
    return one_pass(student_logits, [plan_cross_entropy(student_logits, targets)])[0]


def plan_cross_entropy(student_logits: AnyLogits, targets: Tensor) -> Plan:
    """Return what `cross_entropy` compares where there is a target."""
    student = as_logits(student_logits)
    width = student.shape[-1]
    if targets.shape != student.shape[:-1]:
        raise ValueError(
            f"targets {list(targets.shape)} do not fit the logits {list(student.shape)}, [B, T, V]"
        )
    positions = (targets >= 0).nonzero(as_tuple=True)
    of_positions = targets[positions]
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

    at = positions[0], positions[1]
    parts = [Part(at, compare)] if len(ids) else []
    sides = sides_of([student], [at], [width])
    return Plan(parts, len(ids), work_dtype(student), sides=sides, explain=explain)
