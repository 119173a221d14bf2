"""Log-probabilities of single tokens, and how their gradient gets back to the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xtok._lib.known_logprobs import STORED_ROUNDING
from xtok.training.losses.logits import FLOOR, Logits, Positions, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Rows
from xtok.training.sparse import block_length


def stored_logprobs(logprobs: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
    """Return a teacher's log-probabilities of the text at some positions, `[n]`.

    NaN is what is missing, or is of a probability above 1: `check_stored` tells which.
    """
    values = logprobs[positions].to(dtype)
    return values.clamp(max=0).masked_fill(_is_wrong(values), torch.nan)


def check_stored(logprobs: Tensor, positions: Positions) -> None:
    """Raise a `ValueError` for log-probabilities that are missing, or of probabilities above 1."""
    values = logprobs[positions].float()
    wrong = _is_wrong(values)
    if bool(wrong.any()):
        culprit = float(values[wrong][0])
        raise ValueError(f"teacher_logprobs have {culprit:.4g} at a position that is compared")


def _is_wrong(values: Tensor) -> Tensor:
    return ~(values <= STORED_ROUNDING) | torch.isneginf(values)


class PositionTokens(NamedTuple):
    """Tokens at n positions, several or none at each: e in all."""

    positions: Positions  # [n], each once
    place: Tensor  # int64 [e], which of the positions a token is at, rising
    ids: Tensor  # int64 [e]


@torch.no_grad()
def gather_logprobs(
    logits: Logits, at: PositionTokens, width: int, dtype: torch.dtype, temperature: float = 1.0
) -> Tensor:
    """Return the log-probabilities of tokens among the first `width`, `[e]`, a block at a time.

    They are `FLOOR` where a token is masked with −∞, and NaN where there is none, by an id of −1.
    """
    (batch, places), count = at.positions, len(at.positions[0])
    step = block_length(logits, logits.shape[2])
    starts = torch.arange(0, count + step, step, device=at.place.device)
    bounds = [0, len(at.ids)]
    if count > step:
        bounds = torch.searchsorted(at.place, starts).tolist()
    found = torch.empty(len(at.ids), dtype=dtype, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        for n, start in enumerate(range(0, count, step)):
            block = logits.at((batch[start : start + step], places[start : start + step]), dtype)
            log_p = log_probabilities(block[:, :width], temperature)
            of_block = slice(bounds[n], bounds[n + 1])
            ids = at.ids[of_block]
            values = log_p[at.place[of_block] - start, ids]
            found[of_block] = values.masked_fill_(ids < 0, torch.nan)
    return found


def gradient_part(
    at: PositionTokens, logprobs: Tensor, to_logprobs: Tensor, width: int, temperature: float = 1.0
) -> Part:
    """Return what hands the gradient to `gather_logprobs`, `[e]`, on to the student's logits."""
    to_logprobs = to_logprobs.masked_fill(logprobs == FLOOR, 0)

    def compare(block: LogitBlock, rows: Rows) -> tuple[float, Tensor]:
        [entries] = rows.entries
        row, is_there = rows.entries_at(at.place, entries)
        gradient = to_logprobs[entries] * is_there
        p = block.probabilities(width, temperature)
        sums = p.new_zeros(len(p)).index_add_(0, row, gradient)
        back = p * -sums[:, None]
        return 0.0, back.index_put_((row, at.ids[entries]), gradient, accumulate=True)

    return Part(at.positions, compare, places=[at.place], only_gradient=True)
