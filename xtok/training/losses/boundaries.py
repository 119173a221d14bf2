"""Losses at shared token boundaries: positions of both sides that predict from the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from xtok.training.losses.chunks import Chunks, log_probabilities, loss_over_chunks
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.sparse import block_length, work_dtype

Positions: TypeAlias = tuple[Tensor, Tensor]
"""Positions in a batch, int64 `[n]` both: of the batch's rows, and within them."""

Compare: TypeAlias = Callable[[Tensor, Positions], tuple[Tensor, Tensor]]
"""Takes the student's log-probabilities `[n, V_student]` at some positions, and the teacher's
positions. Returns the sum of their losses, and its gradient to the student's logits over τ."""

ROUNDING = 1e-3
"""How far above 1 the probabilities of a position may sum: what bfloat16 servers round to."""


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

    Chunks whose first token nothing predicts do not count. Memory is that of `loss_at`.

    Raises:
        XtokError: if logits are narrower than their side of `widths`.
        ValueError: for shapes that do not fit, chunk ids that fall, and logits of NaN or +∞.
    """

    def over_chunks(chunks: Chunks) -> Tensor:
        ours, theirs = (
            _first_positions(ids, chunks.total) for ids in (chunks.student, chunks.teacher)
        )
        dtype = work_dtype(student_logits, teacher_logits)
        return loss_at(ours, theirs, compare, student_logits, widths, dtype, config.temperature)

    return loss_over_chunks(
        over_chunks, student_logits, teacher_logits, alignment, config, sample_mask, widths,
        starts_only=True,
    )  # fmt: skip


def loss_at(
    ours: Positions,
    theirs: Positions,
    compare: Compare,
    student_logits: Tensor,
    widths: tuple[int, int],
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> Tensor:
    """Return τ² times the mean of a comparison over n positions, at least 1.

    They are compared in blocks; the gradient, in the student's dtype, is computed with the loss,
    and used up by `backward`, which can run once.
    """
    count, grad = len(ours[0]), gradient_for(student_logits)
    total = add_at(ours, theirs, compare, student_logits, grad, widths, dtype, temperature)
    loss = (total * (temperature**2 / count)).to(dtype)
    return with_gradient(student_logits, loss, grad, temperature / count)


def add_at(
    ours: Positions,
    theirs: Positions,
    compare: Compare,
    student_logits: Tensor,
    grad: Tensor | None,
    widths: tuple[int, int],
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> Tensor:
    """Return the sum of a comparison over n positions, a float64 scalar; write its gradient."""
    total = torch.zeros((), dtype=torch.float64, device=student_logits.device)
    count, step, width = len(ours[0]), block_length(student_logits, max(widths)), widths[0]
    for start in range(0, count, step):
        rows, others = (
            (batch[start : start + step], places[start : start + step])
            for batch, places in (ours, theirs)
        )
        with torch.no_grad():
            picked = student_logits[rows][:, :width].to(dtype)
            lost, back = compare(log_probabilities(picked, temperature), others)
            total += lost
            if grad is not None:
                back.masked_fill_(torch.isneginf(picked), 0)
                grad[..., :width][rows] = back.to(grad.dtype)
    return total


def gradient_for(student_logits: Tensor) -> Tensor | None:
    """Return zeros for the gradient to the student's logits, or None where none is wanted."""
    if not (student_logits.requires_grad and torch.is_grad_enabled()):
        return None
    return torch.zeros_like(student_logits, memory_format=torch.contiguous_format)


def with_gradient(
    student_logits: Tensor, loss: Tensor, grad: Tensor | None, scale: float
) -> Tensor:
    """Return a loss whose gradient to the student's logits is `scale · grad`."""
    if grad is None:
        return loss
    connected: Tensor = _WithGradient.apply(student_logits, loss, grad, scale)  # type: ignore[no-untyped-call]
    return connected


def _first_positions(numbers: Tensor, total: int) -> Positions:
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


def candidates(top_ids: Tensor, top_logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the candidates at n positions, checked: int64 ids and log-probabilities, `[n, K]`.

    What is no candidate, by an id of −1 or a log-probability of −∞, has the id `width` and −∞.

    Raises:
        ValueError: for ids beyond the width or twice at a position, and sums as in `check_sums`.
    """
    wrong = (top_ids < -1) | (top_ids >= width)
    if bool(wrong.any()):
        culprit = int(top_ids[wrong][0])
        raise ValueError(f"top_ids have {culprit}, which is not in 0..{width - 1}, nor -1 for none")
    is_none = (top_ids < 0) | torch.isneginf(top_logprobs)
    ids = top_ids.long().masked_fill(is_none, width)
    order = ids.sort(1).values
    twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] < width)
    if bool(twice.any()):
        raise ValueError(f"top_ids have {int(order[:, 1:][twice][0])} twice at one position")
    logprobs = top_logprobs.masked_fill(is_none, -torch.inf)
    check_sums(logprobs.exp().sum(1))
    return ids, logprobs


def check_sums(sums: Tensor) -> None:
    """Raise a `ValueError` unless the probabilities of all positions are numbers, of at most 1."""
    if bool(torch.isnan(sums).any()):
        raise ValueError("top_logprobs are NaN at a position that is compared")
    if len(sums) and float(sums.max()) > 1 + ROUNDING:
        raise ValueError(f"top_logprobs sum to a probability of {float(sums.max()):.4g}")
