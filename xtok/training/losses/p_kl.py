"""P-KL: the student's probabilities projected by a map, against the teacher's, chunk by chunk.

Neither a `[B, T, V_teacher]` tensor nor one of probabilities `[B, T, V_student]` is ever made: the
work is done in blocks of positions, and the gradient is the only large allocation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from xtok._lib.threads import one_thread_each
from xtok.training.losses.chunks import EPSILON, Chunks, loss_over_chunks, require_type, top_columns
from xtok.training.losses.config import PKLConfig
from xtok.training.losses.logits import log_probabilities, require_whole
from xtok.training.module import ProjectionModule
from xtok.training.sparse import (
    Restricted,
    block_length,
    entry_gradient,
    multiply,
    restrict,
    sparse_pair,
    work_dtype,
)

Result = TypeVar("Result")


def p_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
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
        student_logits: `[B, T_s, V_s]`, any floating type; computed in float32 under any autocast
            (in float64 if they are). Columns beyond the map's width are ignored.
        teacher_logits: `[B, T_t, V_t]`; no gradient goes to them.
        module: the map; a learnable one gets gradients too.
        alignment: an `AlignmentBatch` with the chunk ids of the *predicted* tokens, from
            `xtok.shift_to_predictions`.
        config: the options; the defaults if None.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk is valid.

    Raises:
        XtokError: if logits are narrower than the map.
        ValueError: for shapes that do not fit, chunk ids that fall, and logits of NaN or +∞.
    """
    config = config or PKLConfig()
    require_whole("p_kl", student_logits, teacher_logits)
    require_type(module, ProjectionModule, "xtok.ProjectionModule(projection)")
    num_rows, num_columns = module.shape

    def compare(chunks: Chunks) -> Tensor:
        target_logits = teacher_logits.detach()[..., :num_columns]
        largest = target_logits.amax((0, 1)) if config.top_k else target_logits[0, 0]
        columns = top_columns(largest, config.top_k)
        entries = restrict(module.student_ids, module.offsets, columns)
        weights = module.entry_weights()[entries.picked]
        job = _PKLInputs(target_logits, columns, entries, chunks, num_rows, config)
        loss: Tensor = _PKL.apply(student_logits, weights, job)  # type: ignore[no-untyped-call]
        return loss

    return loss_over_chunks(
        compare, student_logits, teacher_logits, alignment, config, sample_mask, module.shape
    )


class _PKLInputs(NamedTuple):
    """What forward and backward need besides the student's logits and the weights."""

    teacher_logits: Tensor
    columns: Tensor
    entries: Restricted
    chunks: Chunks
    width: int
    config: PKLConfig


class _PKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, job: _PKLInputs) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            dtype = work_dtype(logits, job.teacher_logits)
            matrices = sparse_pair(job.entries, weights.detach().to(dtype))
            projected = _projected_chunks(logits, matrices[0], job)
            target = _teacher_chunks(job, dtype)
            loss = _compare(projected, target, job.config)
        ctx.save_for_backward(logits, projected)
        ctx.job, ctx.matrix, ctx.weights_dtype = job, matrices[1], weights.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        logits, grad_chunks = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            scale = grad_loss.to(grad_chunks.dtype) / (ctx.job.chunks.student_sizes + EPSILON)
            grad_logits, grad_weights = _differentiate(
                logits,
                grad_chunks * scale[:, None],
                ctx.matrix,
                ctx.job,
                learnable=ctx.needs_input_grad[1],
            )
        to_weights = grad_weights.to(ctx.weights_dtype) if ctx.needs_input_grad[1] else None
        return grad_logits if ctx.needs_input_grad[0] else None, to_weights, None


Block = tuple[int, slice]
"""A block of positions of one row of a batch."""


def _blocks(logits: Tensor, width: int) -> list[Block]:
    """Cut `[B, T, V]` into blocks of positions, of which `width` numbers each are computed."""
    step = max(1, block_length(logits, width, cached=True) // _num_threads(logits))
    starts = range(0, logits.shape[1], step)
    return [(row, slice(start, start + step)) for row in range(len(logits)) for start in starts]


def _num_threads(like: Tensor) -> int:
    return torch.get_num_threads() if like.device.type == "cpu" else 1


def _each(work: Callable[[Any], Result], parts: Sequence[Any], like: Tensor) -> Iterator[Result]:
    """Work on parts without gradients, and yield the results in order.

    On a CPU one thread computes a part alone. Threads that share every small step wait for one
    another at each step, which on a busy machine costs many times the work itself.
    """

    def one(part: Any) -> Result:
        with torch.no_grad():
            return work(part)

    if len(parts) == 1 or _num_threads(like) == 1:
        yield from map(one, parts)
    else:
        with one_thread_each() as pool:
            yield from pool.map(one, parts)


def _projected_chunks(logits: Tensor, matrix: Tensor, job: _PKLInputs) -> Tensor:
    """Return the chunks' mean projected probabilities, `[N, k]`."""

    def project(block: Block) -> Tensor:
        probs = _softmax(logits[block], job, matrix.dtype).index_select(1, job.entries.used)
        return multiply(matrix, probs.t()).t()

    chunks = job.chunks
    return _means(project, logits, job.width, job, chunks.student, chunks.student_sizes)


def _teacher_chunks(job: _PKLInputs, dtype: torch.dtype) -> Tensor:
    """Return the chunks' mean log-probabilities within the k columns, `[N, k]`."""
    chunks, logits = job.chunks, job.teacher_logits

    def pick(block: Block) -> Tensor:
        picked = logits[block].index_select(1, job.columns).to(dtype)
        return log_probabilities(picked, job.config.temperature)

    return _means(pick, logits, len(job.columns), job, chunks.teacher, chunks.teacher_sizes)


def _means(
    values: Callable[[Block], Tensor],
    logits: Tensor,
    width: int,
    job: _PKLInputs,
    chunk: Tensor,
    sizes: Tensor,
) -> Tensor:
    """Return the means over the positions of each chunk of `[positions, k]` values, `[N, k]`."""
    blocks = _blocks(logits, width)
    shape = (len(sizes) + 1, len(job.columns))
    total = torch.zeros(shape, dtype=sizes.dtype, device=logits.device)
    for block, part in zip(blocks, _each(values, blocks, logits), strict=True):
        total.index_add_(0, chunk[block], part)
    return total[:-1].div_(sizes[:, None] + EPSILON)


def _softmax(rows: Tensor, job: _PKLInputs, dtype: torch.dtype) -> Tensor:
    return torch.softmax(rows[:, : job.width].to(dtype) / job.config.temperature, -1)


def _compare(projected: Tensor, target: Tensor, config: PKLConfig) -> Tensor:
    """Return the loss; `projected`, `[N, k]`, is overwritten with its gradient, in blocks."""
    scale = config.temperature**2 / len(projected)
    losses = projected.new_empty(len(projected))
    step = max(
        1, block_length(projected, 4 * projected.shape[1], cached=True) // _num_threads(projected)
    )

    def compare(part: slice) -> None:
        sums = projected[part].sum(1, keepdim=True) + EPSILON
        q, log_r = projected[part] / sums, target[part]
        log_q = (q + EPSILON).log()
        if config.reverse_kl:
            difference = log_q - log_r
            losses[part] = ((q + EPSILON) * difference).sum(1)
            to_q = difference.add_(1)
        else:
            r = log_r.exp()
            losses[part] = (r * (log_r - log_q)).sum(1)
            to_q = r.div_(q + EPSILON).neg_()
        to_q -= (to_q * q).sum(1, keepdim=True)
        projected[part] = to_q.div_(sums).mul_(scale)

    parts = [slice(start, start + step) for start in range(0, len(projected), step)]
    deque(_each(compare, parts, projected), maxlen=0)
    return losses.sum() * scale


def _differentiate(
    logits: Tensor, grad_chunks: Tensor, matrix: Tensor, job: _PKLInputs, *, learnable: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients to the logits and to the entries, from that to the chunks' sums."""
    chunks, entries = job.chunks, job.entries
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if grad.shape[-1] > job.width:
        grad[..., job.width :] = 0

    def differentiate(block: Block) -> Tensor | None:
        ids = chunks.student[block]
        back = grad_chunks[ids.clamp(max=chunks.total - 1)].t().contiguous()
        probs = _softmax(logits[block], job, matrix.dtype)
        used = probs.index_select(1, entries.used)
        to_probs = multiply(matrix, back).t()
        mean = (used * to_probs).sum(1, keepdim=True)
        target = grad[block][:, : job.width]
        torch.mul(probs, -mean, out=target)
        target[:, entries.used] = (used * (to_probs - mean)).to(target.dtype)
        target /= job.config.temperature
        outside = (ids == chunks.total)[:, None]
        if bool(outside.any()):
            target.masked_fill_(outside, 0)
        if not learnable:
            return None
        part = used.masked_fill(outside, 0).t().contiguous()
        return entry_gradient(entries, part, back)

    grad_entries = torch.zeros(len(entries.rows), dtype=matrix.dtype, device=logits.device)
    for part in _each(differentiate, _blocks(logits, job.width), logits):
        if part is not None:
            grad_entries += part
    return grad, grad_entries
