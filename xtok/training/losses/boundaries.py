"""Comparisons of next-token distributions: chunk starts, a KL and a teacher's candidates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import checked
from xtok.predictions.topk import TopK
from xtok.training.losses.logits import Positions


def first_positions(numbers: Tensor, total: int) -> Positions:
    """Return the first position of each chunk, from the chunk numbers `[B, T]`."""
    flat = numbers.flatten()
    first = torch.full((total + 1,), len(flat), device=flat.device)
    places = torch.arange(len(flat), device=flat.device)
    first = first.scatter_reduce(0, flat, places, "amin")[:-1]
    return first // numbers.shape[1], first % numbers.shape[1]


def kl(log_p: Tensor, p: Tensor, log_t: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of KL(t ‖ p) over n positions, and its gradient to the logits of p.

    With `reverse`, this is KL(p ‖ t). `log_t`, `[n, V]`, is overwritten.
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

    Unused places get the id `width` and −∞. Invalid or repeated ids get NaN, without a fetch from
    the device; `check_candidates` reports them.
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
    """Raise a `ValueError` if the candidates at n positions are invalid."""
    ids, logprobs, rest = (x.cpu().double().numpy() for x in (top_ids, top_logprobs, rest_logprob))
    kept = (ids != -1) & ~np.isneginf(logprobs)
    nothing = np.full(len(ids), np.nan)
    rest[np.isnan(rest)] = np.inf
    starts, each = offsets_of(kept.sum(1)), np.arange(len(ids) + 1)
    none = np.full(len(ids), -1)
    of_positions = ids[kept].astype(np.int64), logprobs[kept]
    checked(
        TopK(none, each, starts, *of_positions, rest, nothing), width,
        begins=False, is_projected=True,
    )  # fmt: skip
