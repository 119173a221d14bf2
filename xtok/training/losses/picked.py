"""The text's own tokens in chunks, and log-probabilities of single tokens with their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.boundaries import ROUNDING, Positions
from xtok.training.losses.chunks import FLOOR
from xtok.training.sparse import block_length

Targets = tuple[Tensor, Tensor]
"""The ids that positions predict, the student's int64 `[B, T_s]` and the teacher's `[B, T_t]`."""


class Tokens(NamedTuple):
    """The n tokens of one side that are in chunks, chunk after chunk; int64 tensors."""

    positions: Positions  # [n], what predicts them
    chunk: Tensor  # [n], the number of each one's chunk, rising
    ids: Tensor  # [n]
    starts: Tensor  # [N], the place of each chunk's first token
    sizes: Tensor  # [N], at least 1

    def last(self, chunks: Tensor) -> Tensor:
        """Return the places of some chunks' last tokens."""
        return self.starts[chunks] + self.sizes[chunks] - 1

    def at(self, places: Tensor) -> Positions:
        """Return the positions of the tokens at some places."""
        return self.positions[0][places], self.positions[1][places]


def tokens_in(side: str, numbers: Tensor, total: int, targets: Tensor | None, width: int) -> Tokens:
    """Return one side's tokens in chunks.

    Args:
        side: what errors call it.
        numbers: int64 `[B, T]`, the number of each position's chunk, `total` for none.
        total: how many chunks there are.
        targets: `[B, T]`, the ids that the positions predict; None where nobody needs them.
        width: how many ids there are.

    Raises:
        ValueError: if the targets do not fit, or are no ids in a chunk.
    """
    batch, places = (numbers < total).nonzero(as_tuple=True)
    chunk = numbers[batch, places]
    sizes = torch.bincount(chunk, minlength=total)
    starts = sizes.cumsum(0) - sizes
    if targets is None:
        return Tokens((batch, places), chunk, torch.zeros_like(chunk), starts, sizes)
    if targets.shape != numbers.shape:
        raise ValueError(
            f"the {side}'s targets are {list(targets.shape)}, and do not fit its positions "
            f"{list(numbers.shape)}, [B, T]"
        )
    ids = targets[batch, places].long()
    wrong = (ids < 0) | (ids >= width)
    if bool(wrong.any()):
        raise ValueError(
            f"the {side}'s targets in a chunk have {int(ids[wrong][0])}, which is not in "
            f"0..{width - 1}"
        )
    return Tokens((batch, places), chunk, ids, starts, sizes)


def stored_logprobs(logprobs: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
    """Return a teacher's log-probabilities of the text at some positions, `[n]`.

    Raises:
        ValueError: for those that are missing, or of probabilities above 1.
    """
    own = logprobs[positions].to(dtype)
    wrong = ~(own <= ROUNDING) | torch.isneginf(own)
    if bool(wrong.any()):
        culprit = float(own[wrong][0])
        raise ValueError(f"teacher_logprobs have {culprit:.4g} at a position that is compared")
    return own.clamp(max=0)


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
    ids: Tensor,
    place: Tensor | None = None,
    *,
    width: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> Picked:
    """Return the log-probabilities of tokens at positions; the arguments are those of `Picked`.

    Without `place` there is one token at each position.
    """
    if place is None:
        place = torch.arange(len(ids), device=ids.device)
    log_sums = torch.empty(len(positions[0]), dtype=dtype, device=logits.device)
    for part, rows in _blocks(logits, positions, width):
        log_sums[part] = logits[rows][:, :width].to(dtype).div_(temperature).logsumexp(1)
    batch, places = positions
    values = logits[batch[place], places[place], ids].to(dtype).div_(temperature)
    logprobs = (values - log_sums[place]).masked_fill_(torch.isneginf(values), FLOOR)
    return Picked(positions, place, ids, width, temperature, log_sums, logprobs)


def _blocks(logits: Tensor, positions: Positions, width: int) -> Iterator[tuple[slice, Positions]]:
    step = block_length(logits, width)
    for start in range(0, len(positions[0]), step):
        part = slice(start, min(start + step, len(positions[0])))
        yield part, (positions[0][part], positions[1][part])
