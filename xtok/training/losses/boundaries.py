"""Losses at shared token boundaries: positions of both sides that predict from the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

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
        (rows, places), teacher = (
            _first_positions(ids, chunks.total) for ids in (chunks.student, chunks.teacher)
        )
        dtype, width = work_dtype(student_logits, teacher_logits), widths[0]
        grad = None
        if student_logits.requires_grad and torch.is_grad_enabled():
            grad = torch.zeros_like(student_logits, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=torch.float64, device=student_logits.device)
        step = block_length(student_logits, max(widths))
        for start in range(0, chunks.total, step):
            part = slice(start, start + step)
            with torch.no_grad():
                picked = student_logits[rows[part], places[part]][:, :width].to(dtype)
                log_p = log_probabilities(picked, config.temperature)
                lost, back = compare(log_p, (teacher[0][part], teacher[1][part]))
                total += lost
                if grad is not None:
                    grad[rows[part], places[part], :width] = back.to(grad.dtype)
        loss = (total * (config.temperature**2 / chunks.total)).to(dtype)
        if grad is None:
            return loss
        scale = config.temperature / chunks.total
        with_gradient: Tensor = _WithGradient.apply(student_logits, loss, grad, scale)  # type: ignore[no-untyped-call]
        return with_gradient

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


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient to the logits is known but for a factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, grad: Tensor, scale: float) -> Tensor:
        ctx.grad, ctx.scale = grad, scale
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("the loss keeps its gradient for one backward; compute it again")
        return grad.mul_((grad_loss * ctx.scale).to(grad.dtype)), None, None, None
