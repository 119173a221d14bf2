"""Losses at shared token boundaries: positions of both sides that predict from the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.training.losses.chunks import Chunks, log_probabilities, loss_over_chunks
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.module import block_length, work_dtype

Rows: TypeAlias = tuple[Tensor, Tensor]
"""Positions in a batch, int64 `[n]` both: of the batch's rows, and within them."""

Compare: TypeAlias = Callable[[Tensor, Rows], tuple[Tensor, Tensor]]
"""Takes the student's log-probabilities `[n, V_student]` at some positions, and the teacher's
positions. Returns the sum of their losses, and its gradient to the student's logits over τ."""


def boundary_loss(
    compare: Compare,
    student_logits: Tensor,
    teacher_logits: Tensor,
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    widths: tuple[int, int],
) -> Tensor:
    """Return τ² times the mean of a comparison over all positions where both sides begin a chunk.

    Chunks whose first token nothing predicts do not count. Positions are compared in blocks; the
    gradient, in the student's dtype, is computed with the loss, and used up by `backward`, which
    can run once.

    Raises:
        XtokError: if logits are narrower than their side of `widths`.
        ValueError: for shapes that do not fit, chunk ids that fall, and logits of NaN or +∞.
    """

    def over_chunks(chunks: Chunks) -> Tensor:
        sides = [_first_positions(ids, chunks.total) for ids in (chunks.student, chunks.teacher)]
        dtype = work_dtype(student_logits, teacher_logits)
        job = _Job(compare, sides[0], sides[1], widths, config.temperature, dtype)
        loss: Tensor = _BoundaryLoss.apply(student_logits, job)  # type: ignore[no-untyped-call]
        return loss

    return loss_over_chunks(
        over_chunks, student_logits, teacher_logits, alignment, config, sample_mask, widths,
        starts_only=True,
    )  # fmt: skip


def _first_positions(numbers: Tensor, total: int) -> Rows:
    """Return where each chunk begins in the batch."""
    flat = numbers.flatten()
    first = torch.full((total + 1,), len(flat), device=flat.device)
    places = torch.arange(len(flat), device=flat.device)
    first = first.scatter_reduce(0, flat, places, "amin")[:-1]
    return first // numbers.shape[1], first % numbers.shape[1]


class _Job(NamedTuple):
    """What is compared with the student's logits, and where."""

    compare: Compare
    student: Rows
    teacher: Rows
    widths: tuple[int, int]
    temperature: float
    dtype: torch.dtype


class _BoundaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: _Job) -> Tensor:
        grad = None
        if ctx.needs_input_grad[0]:
            grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        num, width = len(job.student[0]), job.widths[0]
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        step = block_length(logits, max(job.widths))
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, num, step):
                (row, place), theirs = (
                    (side[0][start : start + step], side[1][start : start + step])
                    for side in (job.student, job.teacher)
                )
                picked = logits[row, place][:, :width].to(job.dtype)
                lost, back = job.compare(log_probabilities(picked, job.temperature), theirs)
                total += lost
                if grad is not None:
                    grad[row, place, :width] = back.to(grad.dtype)
        ctx.grad, ctx.scale = grad, job.temperature / num
        return (total * (job.temperature**2 / num)).to(job.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, None]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("the loss keeps its gradient for one backward; compute it again")
        return grad.mul_((grad_loss * ctx.scale).to(grad.dtype)), None
