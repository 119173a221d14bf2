"""What losses share that compare next tokens: where chunks begin, a KL, a teacher's candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.training.losses.logits import Positions

BFLOAT16_ROUNDING = 1e-3
"""How far above 1 the probabilities of a position may sum: what bfloat16 servers round to."""


def first_positions(numbers: Tensor, total: int) -> Positions:
    """Return where `total` chunks begin in the batch, by the chunks of positions `[B, T]`."""
    flat = numbers.flatten()
    first = torch.full((total + 1,), len(flat), device=flat.device)
    places = torch.arange(len(flat), device=flat.device)
    first = first.scatter_reduce(0, flat, places, "amin")[:-1]
    return first // numbers.shape[1], first % numbers.shape[1]


def kl(log_p: Tensor, p: Tensor, log_t: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of KL(t ‖ p) over n positions, and its gradient to the logits of p.

    Reversed, of KL(p ‖ t). `log_t`, `[n, V]`, is overwritten.
    """
    if reverse:
        difference = log_t.neg_().add_(log_p)
        means = (p * difference).sum(1, keepdim=True)
        return means.sum(dtype=torch.float64), difference.sub_(means).mul_(p)
    t = log_t.exp()
    lost = log_t.sub_(log_p).mul_(t).sum(1).sum(dtype=torch.float64)
    return lost, t.neg_().add_(p)


def candidates(top_ids: Tensor, top_logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the candidates at n positions: int64 ids and log-probabilities, `[n, K]`.

    What is not a candidate, by an id of −1 or a log-probability of −∞, has the id `width` and −∞.
    An id that is beyond the width, or twice at a position, makes its log-probability NaN:
    `check_candidates` tells which, after the losses are known. Nothing is fetched from a device.
    """
    is_none = (top_ids < 0) | torch.isneginf(top_logprobs)
    ids = top_ids.long().masked_fill(is_none, width)
    sorted_ids, order = ids.sort(1)
    is_twice = torch.zeros_like(is_none)
    is_twice[:, 1:] = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] < width)
    wrong = (top_ids < -1) | (top_ids >= width) | is_none.scatter(1, order, is_twice)
    logprobs = top_logprobs.masked_fill(is_none, -torch.inf).masked_fill(wrong, torch.nan)
    return ids.clamp(max=width), logprobs


def check_candidates(
    top_ids: Tensor, top_logprobs: Tensor, rest_logprob: Tensor, width: int
) -> None:
    """Raise a `ValueError` for candidates at n positions that are wrong, and name them.

    Ids beyond the width or twice at a position, and probabilities that, with the rest, are NaN or
    sum to more than 1.
    """
    wrong = (top_ids < -1) | (top_ids >= width)
    if bool(wrong.any()):
        culprit = int(top_ids[wrong][0])
        raise ValueError(f"top_ids have {culprit}, which is not in 0..{width - 1}, nor -1 for none")
    ids = top_ids.long().masked_fill((top_ids < 0) | torch.isneginf(top_logprobs), width)
    order = ids.sort(1).values
    twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] < width)
    if bool(twice.any()):
        raise ValueError(f"top_ids have {int(order[:, 1:][twice][0])} twice at one position")
    logprobs = top_logprobs.masked_fill(ids == width, -torch.inf)
    of_candidates = logprobs.exp().sum(1)
    for sums in (of_candidates, of_candidates + rest_logprob.exp()):
        if bool(torch.isnan(sums).any()):
            raise ValueError("top_logprobs are NaN at a position that is compared")
        if len(sums) and float(sums.max()) > 1 + BFLOAT16_ROUNDING:
            raise ValueError(f"top_logprobs sum to a probability of {float(sums.max()):.4g}")
