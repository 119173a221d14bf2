"""The text's own tokens in chunks, and log-probabilities of single tokens with their gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.boundaries import ROUNDING
from xtok.training.losses.hidden import FLOOR, Logits, Positions, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Rows
from xtok.training.sparse import block_length

Targets = tuple[Tensor, Tensor]
"""The ids that positions predict, the student's int64 `[B, T_s]` and the teacher's `[B, T_t]`."""


def places_of(mask: Tensor, count: int) -> Tensor:
    """Return where a mask `[n]` is true, which is `count` times: what `nonzero` has to fetch."""
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


class ChunkTokens(NamedTuple):
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


def tokens_in(
    side: str, numbers: Tensor, sizes: Tensor, count: int, targets: Tensor | None, width: int
) -> ChunkTokens:
    """Return one side's tokens in chunks.

    Ids are checked where that fetches nothing, on a CPU. Elsewhere a wrong one is −1, whose
    log-probability is NaN.

    Args:
        side: what errors call it.
        numbers: int64 `[B, T]`, the number of each position's chunk, N for none.
        sizes: int64 `[N]`, of the chunks.
        count: how many positions are in chunks.
        targets: `[B, T]`, the ids that the positions predict; None where nobody needs them.
        width: how many ids there are.

    Raises:
        ValueError: if the targets do not fit, or are not ids in a chunk.
    """
    if targets is not None and targets.shape != numbers.shape:
        raise ValueError(
            f"the {side}'s targets are {list(targets.shape)}, and do not fit its positions "
            f"{list(numbers.shape)}, [B, T]"
        )
    flat, starts = numbers.flatten(), sizes.cumsum(0) - sizes
    order = flat.argsort(stable=True)[:count]
    positions, chunk = (order // numbers.shape[1], order % numbers.shape[1]), flat[order]
    if targets is None:
        return ChunkTokens(positions, chunk, torch.zeros_like(chunk), starts, sizes)
    ids = targets.flatten()[order].long()
    wrong = (ids < 0) | (ids >= width)
    if ids.device.type == "cpu":
        check_ids(side, ids, wrong, width)
    return ChunkTokens(positions, chunk, ids.masked_fill(wrong, -1), starts, sizes)


def check_ids(side: str, ids: Tensor, wrong: Tensor, width: int) -> None:
    """Raise a `ValueError` that names the first of the wrong ids."""
    if bool(wrong.any()):
        raise ValueError(
            f"the {side}'s targets in a chunk have {int(ids[wrong][0])}, which is not in "
            f"0..{width - 1}"
        )


def stored_logprobs(logprobs: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
    """Return a teacher's log-probabilities of the text at some positions, `[n]`.

    NaN is what is missing, or is of a probability above 1: `check_stored` tells which.
    """
    own = logprobs[positions].to(dtype)
    return own.clamp(max=0).masked_fill(_is_wrong(own), torch.nan)


def check_stored(logprobs: Tensor, positions: Positions) -> None:
    """Raise a `ValueError` for log-probabilities that are missing, or of probabilities above 1."""
    own = logprobs[positions].float()
    wrong = _is_wrong(own)
    if bool(wrong.any()):
        culprit = float(own[wrong][0])
        raise ValueError(f"teacher_logprobs have {culprit:.4g} at a position that is compared")


def _is_wrong(own: Tensor) -> Tensor:
    return ~(own <= ROUNDING) | torch.isneginf(own)


class Entries(NamedTuple):
    """Tokens at n positions, several or none at each: e in all."""

    positions: Positions  # [n], each once
    place: Tensor  # int64 [e], which of the positions a token is at, rising
    ids: Tensor  # int64 [e]


@torch.no_grad()
def gather_logprobs(
    logits: Logits, at: Entries, width: int, dtype: torch.dtype, temperature: float = 1.0
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
    at: Entries, logprobs: Tensor, to_logprobs: Tensor, width: int, temperature: float = 1.0
) -> Part:
    """Return what hands the gradient to `gather_logprobs`, `[e]`, on to the student's logits."""
    to_logprobs = to_logprobs.masked_fill(logprobs == FLOOR, 0)

    def compare(block: LogitBlock, rows: Rows) -> tuple[float, Tensor]:
        row, is_there = rows.entries_at(at.place)
        own = to_logprobs[rows.entries] * is_there
        p = block.probabilities(width, temperature)
        sums = p.new_zeros(len(p)).index_add_(0, row, own)
        back = p * -sums[:, None]
        return 0.0, back.index_put_((row, at.ids[rows.entries]), own, accumulate=True)

    return Part(at.positions, compare, place=at.place, only_gradient=True)
