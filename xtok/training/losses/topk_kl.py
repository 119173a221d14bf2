"""Top-k KL: a teacher's stored candidates, and one bucket for the remaining tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.predictions.checked import exceeds
from xtok.training.losses.boundaries import candidates, check_candidates
from xtok.training.losses.logits import FLOOR, AnyLogits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Rows, one_pass, sides_of
from xtok.training.sparse import work_dtype


def topk_kl(
    student_logits: AnyLogits,
    top_ids: Tensor,
    top_logprobs: Tensor,
    rest_logprob: Tensor,
    valid: Tensor,
) -> Tensor:
    """Return the KL from stored predictions over the student's tokens, with a bucket for the rest.

    Row i predicts token i, as in servers' responses, and is compared with the logits at i − 1.
    With p the stored probabilities of K tokens at temperature 1, and q the student's softmax:

        loss = mean over valid tokens of
               Σ_{k∈K} p_k (log p_k − log q_k) + p_rest (log p_rest − log q_rest)

    Here q_rest = 1 − Σ_{k∈K} q_k. By the data processing inequality, the loss is at most the KL
    over all tokens. `backward` can run only once.

    Args:
        student_logits: `[B, T, V]`, a tensor or `HiddenLogits`.
        top_ids: int64 or int32 `[B, T, K]`, distinct at each position.
        top_logprobs: `[B, T, K]`, natural logarithms; −∞ or an id of −1 marks an unused place.
        rest_logprob: `[B, T]`, log p_rest; −∞ if the candidates have the whole mass.
        valid: `[B, T]`, 0 for tokens that do not count; a row's first token never counts.

    Returns:
        A scalar; 0 with zero gradients if no token counts.

    Raises:
        ValueError: if shapes do not fit, ids are repeated or beyond the student's width,
            probabilities are NaN or sum to more than 1, or logits are NaN or +∞.
    """
    plan = plan_topk_kl(student_logits, top_ids, top_logprobs, rest_logprob, valid)
    return one_pass(student_logits, [plan])[0]


def plan_topk_kl(
    student_logits: AnyLogits,
    top_ids: Tensor,
    top_logprobs: Tensor,
    rest_logprob: Tensor,
    valid: Tensor,
) -> Plan:
    """Plan `topk_kl` for one pass."""
    student = as_logits(student_logits)
    shapes = [list(x.shape) for x in (top_ids, top_logprobs, rest_logprob, valid)]
    rows, width = list(student.shape[:2]), student.shape[-1]
    if shapes != [[*rows, *top_ids.shape[2:3]]] * 2 + [rows] * 2 or top_ids.ndim != 3:
        raise ValueError(
            f"top_ids, top_logprobs, rest_logprob and valid are {shapes}, but the student's logits "
            f"are {list(student.shape)}, [B, T, V]"
        )
    batch, places = (valid[:, 1:] != 0).nonzero(as_tuple=True)
    dtype = work_dtype(student)

    def of_teacher(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = batch[numbers], places[numbers] + 1
        ids, log_p = candidates(top_ids[tokens], top_logprobs[tokens].to(dtype), width)
        return ids, log_p, rest_logprob[tokens].to(dtype)

    def compare(block: LogitBlock, entries: Rows) -> tuple[Tensor, Tensor]:
        log_q = block.log_probabilities(width)
        ids, log_p, log_rest = of_teacher(entries.numbers)
        p, p_rest = log_p.exp(), log_rest.exp()
        # Sum the student's rest over the other tokens: 1 − Σ q_k is inaccurate if it is small.
        # Column `width` belongs to unused places.
        others = torch.nn.functional.pad(log_q, (0, 1))
        of_candidates = others.gather(1, ids)
        others[:, width] = -torch.inf
        rest = others.scatter_(1, ids, -torch.inf).logsumexp(1)
        is_empty = torch.isneginf(rest)
        rest = rest.masked_fill(is_empty, FLOOR)
        lost = torch.where(p > 0, p * (log_p - of_candidates), 0).sum()
        lost = lost + torch.where(p_rest > 0, p_rest * (log_rest - rest), 0).sum()
        mass = p.sum(1) + p_rest.masked_fill(is_empty, 0)
        back = (block.probabilities(width) * mass[:, None]).scatter_add_(
            1, ids.clamp(max=width - 1), -p
        )
        back -= others[:, :width].sub_(rest[:, None]).exp_().mul_(p_rest[:, None])
        total = p.sum(1) + p_rest
        is_wrong = exceeds(total, 1) | total.isnan()
        return lost.masked_fill(is_wrong.any(), torch.nan), back

    def explain() -> None:
        for numbers in torch.arange(len(batch), device=batch.device).split(1024):
            tokens = batch[numbers], places[numbers] + 1
            check_candidates(top_ids[tokens], top_logprobs[tokens], rest_logprob[tokens], width)

    sides = sides_of([student], [(batch, places)], [width])
    return Plan([Part((batch, places), compare)], len(batch), dtype, sides=sides, explain=explain)
