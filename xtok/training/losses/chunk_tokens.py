"""The text's own tokens in chunks: the ids that positions predict, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.chunks import Chunks
from xtok.training.losses.logits import Positions

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

    def at(self, places: Tensor | slice) -> Positions:
        """Return the positions of the tokens at some places."""
        return self.positions[0][places], self.positions[1][places]

    def only(self, chunks: Tensor, total: int) -> ChunkTokens:
        """Return the tokens of some chunks, rising, which are `total`."""
        sizes = self.sizes[chunks]
        ends, numbers = sizes.cumsum(0), torch.arange(len(chunks), device=chunks.device)
        number = numbers.repeat_interleave(sizes, output_size=total)
        shift = (self.starts[chunks] - ends + sizes)[number]
        places = torch.arange(total, device=chunks.device) + shift
        return ChunkTokens(self.at(places), number, self.ids[places], ends - sizes, sizes)


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
            f"the {side}'s targets have shape {list(targets.shape)}, expected "
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


def both_tokens(
    chunks: Chunks, targets: Sequence[Tensor | None] = (None, None), widths: Sequence[int] = (0, 0)
) -> tuple[ChunkTokens, ChunkTokens]:
    """Return both sides' tokens in chunks."""
    ours, theirs = (
        tokens_in(side, numbers, sizes, count, of_side, width)
        for side, numbers, sizes, count, of_side, width in zip(
            ("student", "teacher"), chunks[:2], chunks[2:4], chunks.positions, targets, widths,
            strict=True,
        )
    )  # fmt: skip
    return ours, theirs


def check_ids(side: str, ids: Tensor, wrong: Tensor, width: int) -> None:
    """Raise a `ValueError` that names the first of the wrong ids."""
    if bool(wrong.any()):
        raise ValueError(
            f"the {side}'s targets in a chunk have {int(ids[wrong][0])}, which is not in "
            f"0..{width - 1}"
        )
