"""ALM: how likely both models find each chunk of the text, compared as two binary events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunk_tokens import Targets, both_tokens, check_ids
from xtok.training.losses.chunks import Chunks, number_chunks, require_fit
from xtok.training.losses.config import ALMConfig
from xtok.training.losses.in_chunks import (
    Chunked,
    check_stored,
    chunk_part,
    picked,
    stored_logprobs,
    to_logits,
)
from xtok.training.losses.logits import AnyLogits, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan, one_pass, sides_of
from xtok.training.sparse import work_dtype

MARGIN = 1e-6
"""Subtracted from logarithms of likelihoods, as tokenkit does, so that none is of a certainty."""


def alm(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits | None,
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
        student_logits: `[B, T_s, V]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are).
        teacher_logits: `[B, T_t, V]`, either; no gradient. None with `teacher_logprobs`.
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
    kind = config.exact_token_match_only, True
    chunks = number_chunks(alignment, kind, sample_mask, student_logits.device)
    plan = plan_alm(student_logits, teacher_logits, chunks, config, targets, teacher_logprobs)
    return one_pass(student_logits, [plan])[0]


def plan_alm(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits | None,
    chunks: Chunks,
    config: ALMConfig,
    targets: Targets,
    teacher_logprobs: Tensor | None = None,
) -> Plan:
    """Return what `alm` compares, chunk by chunk."""
    if teacher_logits is None and teacher_logprobs is None:
        raise ValueError("give teacher_logits, or teacher_logprobs")
    stored = None if teacher_logits is not None else torch.as_tensor(teacher_logprobs)
    student = as_logits(student_logits)
    teacher = as_logits(teacher_logits if stored is None else stored[..., None])
    widths, dtype = (student.shape[2], teacher.shape[2]), work_dtype(student, teacher)
    require_fit(chunks, (student, teacher), (0, 0))
    if not chunks.total:
        return Plan((), 0, dtype)
    of_teacher = targets[1] if stored is None else None
    ours, theirs = both_tokens(chunks, (targets[0], of_teacher), widths)

    def compare(block: LogitBlock, inside: Chunked) -> tuple[Tensor, Tensor]:
        (of_ours, ids, *_), (of_theirs, their_ids, _, at) = inside.ours, inside.theirs
        rows = torch.arange(len(ids), device=ids.device)
        of_student = picked(block.log_probabilities(widths[0]), rows, ids)
        if stored is None:
            log_q = log_probabilities(inside.teacher_logits, 1.0)
            of_teacher = picked(log_q, torch.arange(len(log_q), device=ids.device), their_ids)
        else:
            of_teacher = stored_logprobs(stored, at, dtype)
        a, b = (of_student.new_zeros(inside.num_chunks) for _ in range(2))
        a.index_add_(0, of_ours, of_student)
        b.index_add_(0, of_theirs, of_teacher)
        with torch.enable_grad():
            a.requires_grad_()
            log_x, log_y = (side / config.temperature - MARGIN for side in (a, b))
            if config.reverse_kl:
                log_x, log_y = log_y, log_x
            lost = _binary_kl(log_x, log_y).sum() * config.temperature
            (to_a,) = torch.autograd.grad(lost, a)
        tokens = rows, ids, of_student, to_a[of_ours]
        return lost.detach(), to_logits(block.probabilities(widths[0]), [tokens])

    def explain() -> None:
        for side, tokens, width in (("student", ours, widths[0]), ("teacher", theirs, widths[1])):
            check_ids(side, tokens.ids, tokens.ids < 0, width)
        if stored is not None:
            check_stored(stored, theirs.positions)

    read = teacher if stored is None else None
    part = chunk_part(ours, theirs, compare, read, widths[1])
    sides = sides_of((student, teacher), (ours.positions, theirs.positions), widths)
    return Plan([part], chunks.total, dtype, sides=sides[: 1 + (stored is None)], explain=explain)


def _binary_kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    """Return y log(y / x) + (1 − y) log((1 − y) / (1 − x)) for x and y below 1."""
    rest = -log_y.expm1() * (_log1mexp(log_y) - _log1mexp(log_x))
    return log_y.exp() * (log_y - log_x) + rest


def _log1mexp(log_p: Tensor) -> Tensor:
    """Return log(1 − exp(log_p)) for log_p < 0, with all its digits."""
    near_one = log_p > -0.6931
    return torch.where(near_one, (-log_p.expm1()).log(), (-log_p.exp()).log1p())
