"""ALM: how likely both models find each chunk of the text, compared as two binary events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.boundaries import gradient_for, with_gradient
from xtok.training.losses.chunks import Chunks, loss_over_chunks
from xtok.training.losses.config import ALMConfig
from xtok.training.losses.picked import Targets, pick, stored_logprobs, tokens_in
from xtok.training.sparse import work_dtype

MARGIN = 1e-6
"""Subtracted from logarithms of likelihoods, as tokenkit does, so that none is of a certainty."""


def alm(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    targets: Targets,
    alignment: Any,
    config: ALMConfig | None = None,
    *,
    teacher_logprobs: Tensor | None = None,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the divergence between both models' likelihoods of the text, chunk by chunk.

    Approximate Likelihood Matching (arXiv 2503.20083). A chunk's likelihood is the product over
    its tokens, p_S the student's and p_T the teacher's. With x = p_S^(1/τ), y = p_T^(1/τ):

        loss = τ · mean over chunks of y log(y / x) + (1 − y) log((1 − y) / (1 − x))

    Reversed, x and y change places. tokenkit's binary cross-entropy differs from it by the
    teacher's entropy, which has no gradient, and by the factor τ, which keeps the size of
    gradients: for a large τ the loss tends to |b| log(|b| / |a|) − |b| + |a|, with a = log p_S and
    b = log p_T. It needs no map and no candidates, and nothing of a teacher but log-probabilities
    of the text itself.

    A chunk's likelihood is also that of its boundary: that a token ends there. tokenkit debiases
    this: it leaves out chunks that either tokenizer may well continue, by statistics of the pair
    (`alm_unbiased`), or multiplies by the probability that a space comes next. Both are left out
    here; xtok's chunks are as short as both tokenizations allow.

    The first chunk of a row counts only where its first token is predicted, as in `event_kl`; what
    is said there of memory holds here.

    Args:
        student_logits: `[B, T_s, V]`; computed in float32 under any autocast (float64 if they are).
        teacher_logits: `[B, T_t, V]`; no gradient. None with `teacher_logprobs`.
        targets: the ids that both sides' positions predict, int64 `[B, T_s]` and `[B, T_t]`; any
            outside of chunks. The teacher's are not read with `teacher_logprobs`.
        alignment: of the predicted tokens, as `xtok.shift_to_predictions` returns it.
        config: the options; the defaults if None.
        teacher_logprobs: in place of the logits, `[B, T_t]`: at t the natural log-probability of
            the text's own token t + 1, as caches and servers have it.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk counts.

    Raises:
        ValueError: for shapes that do not fit, chunk ids that fall, targets in a chunk that are no
            ids, logits of NaN or +∞, and log-probabilities that are missing or above 0.
    """
    config = config or ALMConfig()
    if teacher_logits is None and teacher_logprobs is None:
        raise ValueError("give teacher_logits, or teacher_logprobs")
    theirs = teacher_logits
    if theirs is None:
        theirs = torch.as_tensor(teacher_logprobs)[..., None]

    def over_chunks(chunks: Chunks) -> Tensor:
        dtype, widths = (
            work_dtype(student_logits, theirs),
            (student_logits.shape[-1], theirs.shape[-1]),
        )
        ours = tokens_in("student", chunks.student, chunks.total, targets[0], widths[0])
        own = pick(student_logits, ours.positions, ours.ids, width=widths[0], dtype=dtype)
        read = None if teacher_logits is None else targets[1]
        their = tokens_in("teacher", chunks.teacher, chunks.total, read, widths[1])
        logprobs = (
            stored_logprobs(theirs[..., 0], their.positions, dtype)
            if read is None
            else pick(theirs, their.positions, their.ids, width=widths[1], dtype=dtype).logprobs
        )
        a, b = torch.zeros((2, chunks.total), dtype=dtype, device=logprobs.device)
        a.index_add_(0, ours.chunk, own.logprobs)
        b.index_add_(0, their.chunk, logprobs)
        with torch.enable_grad():
            a.requires_grad_()
            log_x, log_y = (side / config.temperature - MARGIN for side in (a, b))
            if config.reverse_kl:
                log_x, log_y = log_y, log_x
            lost = _binary_kl(log_x, log_y).sum() * (config.temperature / chunks.total)
            (to_a,) = torch.autograd.grad(lost, a)
        if (grad := gradient_for(student_logits)) is not None:
            own.add_gradient(grad, student_logits, to_a[ours.chunk])
        return with_gradient(student_logits, lost.detach(), grad, 1.0)

    return loss_over_chunks(
        over_chunks, student_logits, theirs, alignment, config, sample_mask, (0, 0),
        starts_only=True,
    )  # fmt: skip


def _binary_kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    """Return y log(y / x) + (1 − y) log((1 − y) / (1 − x)) for x and y below 1."""
    rest = -log_y.expm1() * (_log1mexp(log_y) - _log1mexp(log_x))
    return log_y.exp() * (log_y - log_x) + rest


def _log1mexp(log_p: Tensor) -> Tensor:
    """Return log(1 − exp(log_p)) for log_p < 0, with all its digits."""
    near_one = log_p > -0.6931
    return torch.where(near_one, (-log_p.expm1()).log(), (-log_p.exp()).log1p())
