"""Log-probabilities of single tokens, picked from logits in blocks, and their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.boundaries import Positions
from xtok.training.losses.chunks import FLOOR
from xtok.training.sparse import block_length


class Picked(NamedTuple):
    """Tokens at n positions of logits, several or none at each: e in all."""

    positions: Positions  # [n], each once
    place: Tensor  # int64 [e], which of the positions a token is at, rising
    ids: Tensor  # int64 [e]
    width: int  # columns of the logits beyond it are ignored
    temperature: float
    log_sums: Tensor  # [n], the log of the softmax's denominator
    logprobs: Tensor  # [e]; `FLOOR` where a token is masked with −∞

    @torch.no_grad()
    def add_gradient(self, grad: Tensor, logits: Tensor, to_logprobs: Tensor) -> None:
        """Add the gradient to the logits over τ, from that to the log-probabilities `[e]`."""
        to_logprobs = to_logprobs.masked_fill(self.logprobs == FLOOR, 0)
        sums = torch.zeros_like(self.log_sums).index_add_(0, self.place, to_logprobs)
        for part, rows in _blocks(logits, self.positions, self.width):
            back = logits[rows][:, : self.width].to(sums.dtype).div_(self.temperature)
            back.sub_(self.log_sums[part, None]).exp_().mul_(-sums[part, None])
            bounds = torch.tensor([part.start, part.stop], device=back.device)
            first, last = torch.searchsorted(self.place, bounds).tolist()
            at = self.place[first:last] - part.start, self.ids[first:last]
            back.index_put_(at, to_logprobs[first:last], accumulate=True)
            grad[..., : self.width][rows] += back.to(grad.dtype)


@torch.no_grad()
def pick(
    logits: Tensor,
    positions: Positions,
    place: Tensor,
    ids: Tensor,
    width: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> Picked:
    """Return the log-probabilities of tokens at positions; the arguments are those of `Picked`."""
    log_sums = torch.empty(len(positions[0]), dtype=dtype, device=logits.device)
    for part, rows in _blocks(logits, positions, width):
        block = logits[rows][:, :width].to(dtype).div_(temperature)
        log_sums[part] = block.logsumexp(1)
    batch, places = positions
    values = logits[batch[place], places[place], ids].to(dtype).div_(temperature)
    logprobs = (values - log_sums[place]).masked_fill_(torch.isneginf(values), FLOOR)
    return Picked(positions, place, ids, width, temperature, log_sums, logprobs)


def _blocks(logits: Tensor, positions: Positions, width: int) -> Iterator[tuple[slice, Positions]]:
    step = block_length(logits, width)
    for start in range(0, len(positions[0]), step):
        part = slice(start, min(start + step, len(positions[0])))
        yield part, (positions[0][part], positions[1][part])
