"""Top-k KL: compare the student's predictions with a teacher's stored top-k predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import checked_projected, exceeds
from xtok.predictions.topk import TopK
from xtok.training.batches import StoredTopK
from xtok.training.losses.logits import FLOOR, AnyLogits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Plan, PlanPart, Rows, one_pass
from xtok.training.sparse import work_dtype


def topk_kl(
    student_logits: AnyLogits,
    top_ids: Tensor,
    top_logprobs: Tensor,
    rest_logprob: Tensor,
    valid: Tensor,
) -> Tensor:
    """Return the KL between stored top-k predictions and the student's predictions.

    Stored row i predicts token i, like row i in the responses of inference servers. The loss
    compares row i with the logits at position i − 1. All tokens without a stored probability form
    one event, the rest. Let p be the stored probabilities of K tokens at temperature 1, and q the
    student's softmax. Then

        loss = mean over valid tokens of
               Σ_{k∈K} p_k (log p_k − log q_k) + p_rest (log p_rest − log q_rest)

    with q_rest = 1 − Σ_{k∈K} q_k. The loss is at most the KL over all tokens (data processing
    inequality). `backward` can run only once.

    Args:
        student_logits: `[B, T, V]`, a tensor or `HiddenLogits`.
        top_ids: int64 or int32 `[B, T, K]`, distinct at each position.
        top_logprobs: `[B, T, K]`, natural logarithms; −∞ or an id of −1 marks an unused entry.
        rest_logprob: `[B, T]`, log p_rest; −∞ if the candidates' probabilities sum to 1.
        valid: `[B, T]`, 0 for tokens to exclude; the first token of a row is always excluded.

    Returns:
        A scalar. If no token is valid, the loss is 0, with zero gradients.

    Raises:
        ValueError: if shapes do not match, ids are repeated or not below the student's width,
            probabilities are NaN or sum to more than 1, or logits are NaN or +∞.
    """
    stored = StoredTopK(
        top_ids=top_ids, top_logprobs=top_logprobs, rest_logprob=rest_logprob, valid=valid
    )
    return one_pass(student_logits, [plan_topk_kl(student_logits, stored)])[0]


def plan_topk_kl(student_logits: AnyLogits, stored: StoredTopK) -> Plan:
    """Return the plan with which `one_pass` computes `topk_kl`."""
    student = as_logits(student_logits)
    shapes = [list(x.shape) for x in vars(stored).values()]
    rows, width = list(student.shape[:2]), student.shape[-1]
    if shapes != [[*rows, *shapes[0][2:3]]] * 2 + [rows] * 2 or len(shapes[0]) != 3:
        raise ValueError(
            f"top_ids, top_logprobs, rest_logprob and valid have the shapes {shapes}, but the "
            f"student's logits have the shape {list(student.shape)}, [B, T, V]"
        )
    is_counted = stored.valid != 0
    is_counted[:, :1] = False
    [tokens] = is_counted.flatten().nonzero(as_tuple=True)
    dtype = work_dtype(student)
    top_ids, top_logprobs, rest_logprob, _ = (x.flatten(0, 1) for x in vars(stored).values())

    def gather_stored(indices: Tensor) -> list[Tensor]:
        return [x[tokens[indices]] for x in (top_ids, top_logprobs, rest_logprob)]

    def compare(block: LogitBlock, entries: Rows) -> tuple[Tensor, Tensor]:
        log_q = block.log_probabilities(width)
        top, logprobs, rests = gather_stored(entries.indices)
        ids, log_p = _candidates(top, logprobs.to(dtype), width)
        log_rest = rests.to(dtype)
        p, p_rest = log_p.exp(), log_rest.exp()
        # q_rest is a sum over the other tokens, because a small 1 − Σ q_k is inaccurate. Column
        # `width` belongs to unused entries.
        log_others = torch.nn.functional.pad(log_q, (0, 1))
        candidate_logprobs = log_others.gather(1, ids)
        log_others[:, width] = -torch.inf
        log_q_rest = log_others.scatter_(1, ids, -torch.inf).logsumexp(1)
        is_empty = torch.isneginf(log_q_rest)
        log_q_rest = log_q_rest.masked_fill(is_empty, FLOOR)
        loss = torch.where(p > 0, p * (log_p - candidate_logprobs), 0).sum()
        loss = loss + torch.where(p_rest > 0, p_rest * (log_rest - log_q_rest), 0).sum()
        mass = p.sum(1) + p_rest.masked_fill(is_empty, 0)
        grad = block.probabilities(width) * mass[:, None]
        grad.scatter_add_(1, ids.clamp(max=width - 1), -p)
        grad -= log_others[:, :width].sub_(log_q_rest[:, None]).exp_().mul_(p_rest[:, None])
        total = p.sum(1) + p_rest
        is_wrong = exceeds(total, 1) | total.isnan()
        return loss.masked_fill(is_wrong.any(), torch.nan), grad

    def check() -> None:
        _check_candidates(gather_stored(torch.arange(len(tokens), device=tokens.device)), width)

    return Plan([PlanPart(tokens - 1, compare)], len(tokens), dtype, check=check)


def _candidates(top_ids: Tensor, top_logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the candidates at n positions: int64 ids and log-probabilities, `[n, K]`.

    Unused entries get the id `width` and the log-probability −∞. Invalid or repeated ids get the
    log-probability NaN, because raising an error here would require a transfer from the device.
    `_check_candidates` reports such ids.
    """
    is_none = (top_ids < 0) | torch.isneginf(top_logprobs)
    ids = top_ids.long().masked_fill(is_none, width)
    sorted_ids, order = ids.sort(1)
    is_twice = torch.zeros_like(is_none)
    is_twice[:, 1:] = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] < width)
    is_wrong = (top_ids < -1) | (top_ids >= width) | is_none.scatter(1, order, is_twice)
    logprobs = top_logprobs.masked_fill(is_none, -torch.inf).masked_fill(is_wrong, torch.nan)
    return ids.clamp(max=width), logprobs


def _check_candidates(stored: Sequence[Tensor], width: int) -> None:
    ids, logprobs, rest = (x.cpu().double().numpy() for x in stored)
    used = (ids != -1) & ~np.isneginf(logprobs)
    rest[np.isnan(rest)] = np.inf
    topk = TopK(
        token_ids=np.full(len(ids), -1), bounds=np.arange(len(ids) + 1),
        starts=offsets_of(used.sum(1)), ids=ids[used].astype(np.int64), logprobs=logprobs[used],
        rest_logprob=rest, realized_logprob=np.full(len(ids), np.nan),
    )  # fmt: skip
    checked_projected(topk, width, begins=False)
