"""ALM: compare the two models' likelihoods of each chunk of the text, as binary events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.predictions.checked import exceeds
from xtok.training.losses.chunks import (
    BothLogits,
    ChunkRows,
    TargetIds,
    check_targets,
    chunk_loss,
    chunk_part,
    gather,
    logit_gradient,
)
from xtok.training.losses.config import ALMConfig
from xtok.training.losses.logits import AnyLogits, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan

MARGIN = 1e-6
"""Value that `alm` and tokenkit subtract from log-likelihoods, so that the results are below 0."""


def alm(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits | None,
    targets: TargetIds,
    alignment: Any,
    config: ALMConfig | None = None,
    *,
    teacher_logprobs: Tensor | None = None,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the divergence between both models' likelihoods of the text's chunks.

    The loss is Approximate Likelihood Matching (arXiv 2503.20083). A chunk's likelihoods p_S and
    p_T are the products of its tokens' probabilities. With x = p_S^(1/τ) and y = p_T^(1/τ):

        loss = τ · mean over chunks of y log(y / x) + (1 − y) log((1 − y) / (1 − x))

    `reverse_kl` exchanges x and y. The gradient is τ times the gradient of tokenkit's binary
    cross-entropy. For large τ, the loss approaches |b| log(|b| / |a|) − |b| + |a| with a = log p_S
    and b = log p_T. Unlike tokenkit, this loss has no "debiasing", a correction for chunks that the
    tokenizer could have continued with a longer token.

    `targets` are the predicted ids, int64 `[B, T_s]` and `[B, T_t]`. If `teacher_logits` is None,
    pass `teacher_logprobs`, `[B, T_t]`. Its position t contains the natural log-probability of
    token t + 1. See `event_kl` for the other arguments.

    Raises:
        ValueError: if a target in a chunk is not a valid id, if a log-probability is missing or
            above 0, or for the same reasons as `event_kl`.
    """
    return chunk_loss(
        plan_alm, (student_logits, teacher_logits), alignment, config or ALMConfig(), sample_mask,
        targets=targets, teacher_logprobs=teacher_logprobs,
    )  # fmt: skip


def plan_alm(sides: BothLogits, config: ALMConfig) -> Plan:
    """Return the plan with which `one_pass` computes `alm`."""
    teacher, targets, stored = sides.teacher, sides.targets, None
    if teacher is None:
        if sides.teacher_logprobs is None:
            raise ValueError("teacher_logits or teacher_logprobs are missing")
        # Treat the stored log-probabilities as logits of width 1, so that `sides.tokens` can check
        # their shape. They already belong to the targets, so the teacher's ids are not needed.
        logprobs = torch.as_tensor(sides.teacher_logprobs)
        sides, targets = sides._replace(teacher=as_logits(logprobs[..., None])), (targets[0], None)
        stored = logprobs.flatten()
    widths, dtype = (sides.student.shape[2], sides.teacher.shape[2]), sides.dtype
    student_tokens, teacher_tokens = sides.tokens(widths, targets)

    def compare(block: LogitBlock, chunks: ChunkRows) -> tuple[Tensor, Tensor]:
        ids = chunks.student.ids
        rows = torch.arange(len(ids), device=ids.device)
        student_logprob = gather(block.log_probabilities(widths[0]), rows, ids)
        if stored is None:
            log_q = log_probabilities(chunks.teacher_logits, 1.0)
            teacher_rows = torch.arange(len(log_q), device=ids.device)
            teacher_logprob = gather(log_q, teacher_rows, chunks.teacher.ids)
        else:
            logprobs = stored[chunks.teacher.positions].to(dtype)
            teacher_logprob = logprobs.clamp(max=0).masked_fill(_is_wrong(logprobs), torch.nan)
        # [c], log-probability of each chunk for the student (a) and the teacher (b). A chunk's `a`
        # is the sum over its tokens, so the gradient of `a` is also the gradient of each token's
        # log-probability.
        a, b = chunks.student.sums(student_logprob), chunks.teacher.sums(teacher_logprob)
        with torch.enable_grad():
            a.requires_grad_()
            log_x, log_y = (x / config.temperature - MARGIN for x in (a, b))
            if config.reverse_kl:
                log_x, log_y = log_y, log_x
            loss = _binary_kl(log_x, log_y).sum() * config.temperature
            (grad_a,) = torch.autograd.grad(loss, a)
        tokens = rows, ids, student_logprob, grad_a[chunks.student.chunk]
        return loss.detach(), logit_gradient(block.probabilities(widths[0]), [tokens])

    def check() -> None:
        check_targets((student_tokens, teacher_tokens), widths)
        if stored is not None:
            logprobs = stored[teacher_tokens.positions]
            for value in logprobs[_is_wrong(logprobs)].tolist()[:1]:
                raise ValueError(
                    f"teacher_logprobs contains {value:.4g} at a compared position, expected at "
                    "most 0"
                )

    part = chunk_part(student_tokens, teacher_tokens, compare, teacher, widths[1])
    return Plan([part], sides.chunks.total, dtype, check=check)


def _is_wrong(logprobs: Tensor) -> Tensor:
    too_large: Tensor = exceeds(logprobs, 0)
    return too_large | ~torch.isfinite(logprobs)


def _binary_kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    rest = -log_y.expm1() * (_log1mexp(log_y) - _log1mexp(log_x))
    return log_y.exp() * (log_y - log_x) + rest


def _log1mexp(log_p: Tensor) -> Tensor:
    """Return log(1 − exp(log_p)) for log_p < 0, without cancellation."""
    near_one = log_p > -0.6931
    return torch.where(near_one, (-log_p.expm1()).log(), (-log_p.exp()).log1p())
