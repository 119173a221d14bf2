"""P-KL: the student's probabilities projected by a map, against the teacher's, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunk_tokens import both_tokens
from xtok.training.losses.chunks import (
    EPSILON,
    Chunks,
    number_chunks,
    require_fit,
    require_type,
    top_columns,
)
from xtok.training.losses.config import PKLConfig
from xtok.training.losses.in_chunks import Chunked, chunk_part, mean_over, to_values
from xtok.training.losses.logits import AnyLogits, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan, one_pass, sides_of
from xtok.training.module import ProjectionModule
from xtok.training.sparse import entry_gradient, multiply, restrict, sparse_pair, work_dtype


def p_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    module: ProjectionModule,
    alignment: Any,
    config: PKLConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the P-KL loss of X-Token (arXiv 2605.21699) as NeMo-RL computes it.

    With p the student's softmax at temperature τ, W the map, K the k teacher tokens with the
    largest maximum logit in the microbatch, and C a chunk with positions C_s and C_t:

        a_j = (1/|C_s|) Σ_{t∈C_s} Σ_v p_t(v) W[v, j]      q = a / Σ_{j∈K} a_j
        log r_j = (1/|C_t|) Σ_{t∈C_t} log softmax_K(z_t / τ)_j
        loss = τ² · mean over chunks of Σ_{j∈K} r_j (log r_j − log q_j)

    Reversed, Σ q (log q − log r). 1e-10 is added to sizes, sums, and q before its logarithm.

    Args:
        student_logits: `[B, T_s, V_s]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are). Columns beyond the map's width are ignored.
        teacher_logits: `[B, T_t, V_t]`, either; no gradient.
        module: the map; a learnable one gets gradients too.
        alignment: an `AlignmentBatch` with the chunk ids of the *predicted* tokens, from
            `xtok.shift_to_predictions`.
        config: the options; the defaults if None.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a zero gradient if no chunk is valid.

    Raises:
        XtokError: if logits are narrower than the map.
        ValueError: if shapes do not fit, chunk ids decrease, or logits are NaN or +∞.
    """
    config = config or PKLConfig()
    kind = config.exact_token_match_only, False
    chunks = number_chunks(alignment, kind, sample_mask, student_logits.device)
    return one_pass(
        student_logits, [plan_p_kl(student_logits, teacher_logits, module, chunks, config)]
    )[0]


def plan_p_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    module: ProjectionModule,
    chunks: Chunks,
    config: PKLConfig,
) -> Plan:
    """Return what `p_kl` compares, chunk by chunk."""
    require_type(module, ProjectionModule, "xtok.ProjectionModule(projection)")
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    (width, of_teacher), dtype = module.shape, work_dtype(student, teacher)
    require_fit(chunks, (student, teacher), module.shape)
    if not chunks.total:
        return Plan((), 0, dtype)
    ours, theirs = both_tokens(chunks)
    temperature, columns, compared = config.temperature, torch.arange(of_teacher), teacher
    if config.top_k is not None and config.top_k < of_teacher:
        columns = top_columns(teacher.largest()[:of_teacher], config.top_k)
        compared = teacher.only(columns)
    entries = restrict(module.student_ids, module.offsets, columns.to(student.device))
    weights = module.entry_weights()[entries.picked]
    forward, backward = sparse_pair(entries, weights.detach().to(dtype))
    to_weights = torch.zeros_like(weights, dtype=dtype) if weights.requires_grad else None

    def compare(block: LogitBlock, inside: Chunked) -> tuple[Tensor, Tensor]:
        p = block.probabilities(width, temperature)
        used = p.index_select(1, entries.used)
        projected = mean_over(inside.ours, multiply(forward, used.t()).t())
        logits = inside.teacher_logits[:, : len(columns)]
        log_r = mean_over(inside.theirs, log_probabilities(logits, temperature))
        lost, to_means = _compare(projected, log_r, reverse=config.reverse_kl)
        back = to_values(inside.ours, to_means).t().contiguous()
        to_probs = multiply(backward, back).t()
        mean = (used * to_probs).sum(1, keepdim=True)
        if to_weights is not None:
            to_weights.add_(entry_gradient(entries, used.t().contiguous(), back))
        return lost, (p * -mean).index_add_(1, entries.used, used.mul_(to_probs))

    part = chunk_part(ours, theirs, compare, compared, max(len(columns), len(entries.used)))
    sides = sides_of((student, teacher), (ours.positions, theirs.positions), module.shape)
    learned = [] if to_weights is None else [(weights, to_weights)]
    return Plan([part], chunks.total, dtype, temperature, sides, learned=learned)


def _compare(projected: Tensor, log_r: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of losses of c chunks, and its gradient to what is projected, `[c, k]`."""
    sums = projected.sum(1, keepdim=True) + EPSILON
    q = projected / sums
    log_q = (q + EPSILON).log()
    if reverse:
        difference = log_q - log_r
        lost = ((q + EPSILON) * difference).sum()
        to_q = difference.add_(1)
    else:
        r = log_r.exp()
        lost = (r * (log_r - log_q)).sum()
        to_q = r.div_(q + EPSILON).neg_()
    to_q -= (to_q * q).sum(1, keepdim=True)
    return lost, to_q.div_(sums)
