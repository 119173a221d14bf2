"""P-KL: project the student's probabilities, and compare the result with the teacher's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    EPSILON,
    BothLogits,
    ChunkRows,
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
    """Return the P-KL loss of X-Token (arXiv 2605.21699), with the same result as NeMo-RL.

    Let p be the student's softmax at temperature τ, and W the map. A chunk C has the student's
    positions C_s and the teacher's positions C_t. K contains the k teacher tokens with the largest
    logits in the microbatch. Then

        a_j = (1/|C_s|) Σ_{t∈C_s} Σ_v p_t(v) W[v, j]      q = a / Σ_{j∈K} a_j
        log r_j = (1/|C_t|) Σ_{t∈C_t} log softmax_K(z_t / τ)_j
        loss = τ² · mean over chunks of Σ_{j∈K} r_j (log r_j − log q_j)

    `reverse_kl` computes Σ q (log q − log r). The value 1e-10 is added to chunk sizes, to the sum
    of a, and to q. A learnable `module` also receives gradients. Unlike `event_kl`, this loss
    includes chunks without a predicted first token. See `event_kl` for the other arguments, the
    result and the errors.

    If the student's probabilities are uniform and the teacher is certain of `i`, the loss is log
    256:

    >>> import torch
    >>> batch = xtok.training.prepare(xtok.DistillationCollator("bytes", "bytes")(["hi"]))
    >>> [side_batch] = batch["teachers"]
    >>> module = xtok.ProjectionModule(xtok.build("bytes", "bytes"))
    >>> student, teacher = torch.zeros(2, 1, 2, 256)  # two tensors `[B, T, V]`
    >>> teacher[0, 0, ord("i")] = 100  # position 0 predicts token 1
    >>> xtok.losses.p_kl(student, teacher, module, side_batch["shifted"])
    tensor(5.5452)
    """
    plan, logits = partial(plan_p_kl, module=module), (student_logits, teacher_logits)
    return chunk_loss(plan, logits, alignment, config or PKLConfig(), sample_mask)


def plan_p_kl(sides: BothLogits, module: ProjectionModule, config: PKLConfig) -> Plan:
    """Return the plan with which `one_pass` computes `p_kl`."""
    require_type(module, ProjectionModule, "xtok.ProjectionModule(projection)")
    (width, teacher_width), compared, temperature = module.shape, sides.teacher, config.temperature
    student, teacher = sides.tokens(module.shape)
    columns = torch.arange(teacher_width)
    if config.top_k is not None and config.top_k < teacher_width:
        columns = top_columns(compared, teacher.positions, teacher_width, config.top_k)
        compared = compared.select(columns)
    # The map has m entries in these k columns, sorted by column. `starts`, [k]: the first entry of
    # each column. `used_ids`, [R]: the student tokens of the entries, ascending. `rows`, [m]: the
    # index of each entry's student token in `used_ids`.
    columns = columns.to(sides.student.device)
    starts_in_map = module.offsets[columns]
    counts = module.offsets[columns + 1] - starts_in_map
    _, entries = ranges(starts_in_map, counts, int(counts.sum()))
    starts = counts.cumsum(0) - counts
    used_ids, rows = torch.unique(module.student_ids[entries], return_inverse=True)
    weights = module.entry_weights()[entries]
    entry_weights = weights.detach().to(sides.dtype).requires_grad_(weights.requires_grad)
    weight_grad = torch.zeros_like(entry_weights) if weights.requires_grad else None

    def compare(block: LogitBlock, chunks: ChunkRows) -> tuple[Tensor, Tensor]:
        p = block.probabilities(width, temperature)
        p_used = p.index_select(1, used_ids)
        teacher_logits = chunks.teacher_logits[:, : len(columns)]
        log_r = chunks.teacher.means(log_probabilities(teacher_logits, temperature))
        with torch.enable_grad():
            means = chunks.student.means(p_used).requires_grad_()
            projected = project_sparse(means, rows, starts, entry_weights)
            loss = _divergence(projected, log_r, reverse=config.reverse_kl)
            inputs = [means] if weight_grad is None else [means, entry_weights]
            mean_grad, *entry_grads = torch.autograd.grad(loss, inputs)
        if weight_grad is not None:
            weight_grad.add_(entry_grads[0])
        grad = chunks.student.value_gradient(mean_grad).mul_(p_used)
        mean = grad.sum(1, keepdim=True)
        return loss.detach(), (p * -mean).index_add_(1, used_ids, grad)

    part = chunk_part(student, teacher, compare, compared, max(len(columns), len(used_ids)))
    gradients = [] if weight_grad is None else [(weights, weight_grad)]
    return Plan([part], sides.chunks.total, sides.dtype, temperature, gradients=gradients)


def _divergence(projected: Tensor, log_r: Tensor, *, reverse: bool) -> Tensor:
    q = projected / (projected.sum(1, keepdim=True) + EPSILON) + EPSILON
    if reverse:
        return (q * (q.log() - log_r)).sum()
    return (log_r.exp() * (log_r - q.log())).sum()
