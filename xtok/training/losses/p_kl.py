"""P-KL: the student's projected probabilities, compared with the teacher's by chunk."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    EPSILON,
    Chunked,
    ChunkedLogits,
    chunk_loss,
    chunk_part,
    require_type,
)
from xtok.training.losses.config import PKLConfig
from xtok.training.losses.logits import AnyLogits, log_probabilities, top_columns
from xtok.training.losses.one_pass import LogitBlock, Plan
from xtok.training.module import ProjectionModule
from xtok.training.sparse import project_sparse, ranges


def p_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    module: ProjectionModule,
    alignment: Any,
    config: PKLConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the P-KL loss of X-Token (arXiv 2605.21699) as in NeMo-RL.

    With p the student's softmax at temperature τ, W the map, K the k teacher tokens with the
    largest maximum logit in the microbatch, and C a chunk with positions C_s and C_t:

        a_j = (1/|C_s|) Σ_{t∈C_s} Σ_v p_t(v) W[v, j]      q = a / Σ_{j∈K} a_j
        log r_j = (1/|C_t|) Σ_{t∈C_t} log softmax_K(z_t / τ)_j
        loss = τ² · mean over chunks of Σ_{j∈K} r_j (log r_j − log q_j)

    `reverse_kl` computes Σ q (log q − log r). 1e-10 is added to sizes, sums, and q before its
    logarithm. A learnable `module` gets gradients too. Chunks at position 0 count. See `event_kl`
    for the other arguments, the result and the errors.
    """
    plan, both = partial(plan_p_kl, module=module), (student_logits, teacher_logits)
    return chunk_loss(plan, both, alignment, config or PKLConfig(), sample_mask)


def plan_p_kl(both: ChunkedLogits, module: ProjectionModule, config: PKLConfig) -> Plan:
    """Plan `p_kl` for one pass."""
    require_type(module, ProjectionModule, "xtok.ProjectionModule(projection)")
    (width, teacher_width), compared, temperature = module.shape, both.teacher, config.temperature
    ours, theirs = both.tokens(module.shape)
    columns = torch.arange(teacher_width)
    if config.top_k is not None and config.top_k < teacher_width:
        columns = top_columns(compared, theirs.positions, teacher_width, config.top_k)
        compared = compared.only(columns)
    # The map's m entries in these k columns, by column: their starts, [k], the R student tokens
    # that they use, rising, and the index of each entry's token among these, [m].
    columns = columns.to(both.student.device)
    first = module.offsets[columns]
    counts = module.offsets[columns + 1] - first
    _, entries = ranges(first, counts, int(counts.sum()))
    starts = counts.cumsum(0) - counts
    used, rows = torch.unique(module.student_ids[entries], return_inverse=True)
    weights = module.entry_weights()[entries]
    of_entries = weights.detach().to(both.dtype).requires_grad_(weights.requires_grad)
    to_weights = torch.zeros_like(of_entries) if weights.requires_grad else None

    def compare(block: LogitBlock, inside: Chunked) -> tuple[Tensor, Tensor]:
        p = block.probabilities(width, temperature)
        p_used = p.index_select(1, used)
        logits = inside.teacher_logits[:, : len(columns)]
        log_r = inside.theirs.means(log_probabilities(logits, temperature))
        with torch.enable_grad():
            means = inside.ours.means(p_used).requires_grad_()
            projected = project_sparse(means, rows, starts, of_entries)
            lost = _divergence(projected, log_r, reverse=config.reverse_kl)
            inputs = [means] if to_weights is None else [means, of_entries]
            to_means, *to_entries = torch.autograd.grad(lost, inputs)
        if to_weights is not None:
            to_weights.add_(to_entries[0])
        back = inside.ours.to_values(to_means).mul_(p_used)
        mean = back.sum(1, keepdim=True)
        return lost.detach(), (p * -mean).index_add_(1, used, back)

    part = chunk_part(ours, theirs, compare, compared, max(len(columns), len(used)))
    learned = [] if to_weights is None else [(weights, to_weights)]
    return Plan([part], both.chunks.total, both.dtype, temperature, learned=learned)


def _divergence(projected: Tensor, log_r: Tensor, *, reverse: bool) -> Tensor:
    """Return the sum of losses of c chunks, from mean projected probabilities `[c, k]`."""
    q = projected / (projected.sum(1, keepdim=True) + EPSILON) + EPSILON
    if reverse:
        return (q * (q.log() - log_r)).sum()
    return (log_r.exp() * (log_r - q.log())).sum()
