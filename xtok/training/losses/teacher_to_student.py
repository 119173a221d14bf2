"""Teacher → student KL: the teacher's probabilities through a map onto the student's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.boundaries import Positions, boundary_loss, candidates
from xtok.training.losses.chunks import log_probabilities
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.module import ProjectionModule
from xtok.training.sparse import (
    check_width,
    multiply,
    restrict,
    sparse_pair,
    work_dtype,
)


def teacher_to_student_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    module: ProjectionModule,
    alignment: Any,
    config: ChunkLossConfig | None = None,
    *,
    top_ids: Tensor | None = None,
    top_logprobs: Tensor | None = None,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the KL from the teacher's projected probabilities, where both begin at one byte.

    There q = r W, with the teacher's probabilities r at temperature τ and a map W from the
    *teacher's* tokens to the student's, and p is the student's softmax. Both are over the student's
    vocabulary, so that nothing is projected with a gradient:

        loss = τ² · mean over chunks of Σ_s q_s (log(q_s / m) − log p_s),  m = Σ_s q_s

    The residual 1 − m, what empty rows of W and a server's top-k omit, does not enter the loss;
    with less mass a position weighs less. As positions are those of `event_kl`, so is what
    is said there of the first chunk and of memory. The gradient is m p − q.

    Args:
        student_logits: `[B, T_s, V]`; computed in float32 under any autocast (float64 if they are).
            Columns beyond the map's width are ignored.
        teacher_logits: `[B, T_t, V]`; no gradient. None with `top_ids`.
        module: a map from the teacher to the student: `build` with their roles
            swapped. It is frozen, and on the logits' device.
        alignment: of the predicted tokens, as `xtok.shift_to_predictions` returns it.
        config: the options; the defaults if None. There is no reverse KL: where q is 0 it is
            infinite.
        top_ids: in place of the logits, int64 `[B, T_t, K]`: at t the teacher's candidates for
            token t + 1, in any order, each once; −1, or a log-probability of −∞, for none.
        top_logprobs: float `[B, T_t, K]`, their log-probabilities at temperature 1.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk counts.

    Raises:
        XtokError: if logits are narrower than the map.
        ValueError: for shapes that do not fit, chunk ids that fall, logits of NaN or +∞; ids that
            the teacher does not have or that a position has twice, and log-probabilities that are
            missing or sum to more than 1; and for a reverse KL, a learnable map, or a temperature
            beside `top_ids`.
    """
    config = config or ChunkLossConfig()
    if config.reverse_kl:
        raise ValueError("teacher_to_student_kl has no reverse KL: it is infinite where q is 0")
    if module.learnable:
        raise ValueError("teacher_to_student_kl has no gradient for a learnable map")
    teacher_width, student_width = module.shape
    predictions: Tensor
    probabilities: Callable[[Positions], Tensor]
    if teacher_logits is not None:
        check_width("teacher", teacher_logits.shape[-1], teacher_width)
        predictions = teacher_logits
        dtype = work_dtype(student_logits, predictions)
        probabilities = partial(_softmax, predictions, teacher_width, config.temperature, dtype)
    elif top_ids is None or top_logprobs is None or top_ids.shape != top_logprobs.shape:
        raise ValueError("give teacher_logits, or top_ids and top_logprobs of the same shape")
    elif config.temperature != 1:
        raise ValueError("top_logprobs have temperature 1, and need temperature 1")
    else:
        predictions = top_logprobs
        dtype = work_dtype(student_logits)
        probabilities = partial(_of_candidates, top_ids, predictions, teacher_width, dtype)
    everything = restrict(module.student_ids, module.offsets, None)
    matrix, _ = sparse_pair(everything, module.weights[everything.picked].to(dtype))

    def compare(log_p: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        r = probabilities(positions)
        q = multiply(matrix, r.index_select(1, everything.used).t()).t()
        m = q.sum(1, keepdim=True)
        per_token = torch.xlogy(q, q / m.clamp(min=torch.finfo(dtype).tiny)) - q * log_p
        return per_token.sum(), log_p.exp().mul_(m).sub_(q)

    return boundary_loss(
        compare, student_logits, predictions, alignment, config, sample_mask, (student_width, 0)
    )


def _softmax(
    logits: Tensor, width: int, temperature: float, dtype: torch.dtype, positions: Positions
) -> Tensor:
    """Return the probabilities of logits at some positions, `[n, width]`."""
    return log_probabilities(logits[positions][:, :width].to(dtype), temperature).exp_()


def _of_candidates(
    top_ids: Tensor, top_logprobs: Tensor, width: int, dtype: torch.dtype, positions: Positions
) -> Tensor:
    """Return candidates at some positions as probabilities of all tokens, `[n, width]`."""
    ids, logprobs = candidates(top_ids[positions], top_logprobs[positions].to(dtype), width)
    out = logprobs.new_zeros((len(ids), width + 1))
    return out.scatter_add_(1, ids, logprobs.exp())[:, :width]
