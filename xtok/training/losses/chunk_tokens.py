"""The text's own tokens in chunks: the ids that positions predict, ordered by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.chunks import Chunks
from xtok.training.sparse import ranges

Targets = tuple[Tensor, Tensor]
"""The ids that positions predict: int64 `[B, T_s]` of the student, `[B, T_t]` of the teacher."""


class ChunkTokens(NamedTuple):
    """The n tokens of one side that are in chunks, ordered by chunk; int64 tensors."""

    positions: Tensor  # [n], the positions that predict them: row · T + place
    chunk: Tensor  # [n], the number of the chunk, rising
    ids: Tensor  # [n]
    starts: Tensor  # [N], the place of each chunk's first token
    sizes: Tensor  # [N], at least 1

    def last(self, chunks: Tensor) -> Tensor:
        """Return the places of the last tokens of some chunks."""
        return self.starts[chunks] + self.sizes[chunks] - 1

    def only(self, chunks: Tensor, total: int) -> ChunkTokens:
        """Return the `total` tokens of some chunks, given in rising order."""
        sizes = self.sizes[chunks]
        number, places = ranges(self.starts[chunks], sizes, total)
        starts = sizes.cumsum(0) - sizes
        return ChunkTokens(self.positions[places], number, self.ids[places], starts, sizes)


def tokens_in(
    side: str, numbers: Tensor, sizes: Tensor, count: int, targets: Tensor | None, width: int
) -> ChunkTokens:
    """Return the `count` tokens of one side that are in chunks.

    `numbers`, `[B, T]`, is the chunk of each position; N outside chunks. Ids are checked on a CPU.
    Elsewhere, an invalid id becomes −1, and its log-probability NaN.

    Raises:
        ValueError: if the targets' shape does not fit, or a target is not an id.
    """
    if targets is not None and targets.shape != numbers.shape:
        raise ValueError(
            f"the {side}'s targets have shape {list(targets.shape)}, expected "
            f"{list(numbers.shape)}, [B, T]"
        )
    flat, starts = numbers.flatten(), sizes.cumsum(0) - sizes
    positions = flat.argsort(stable=True)[:count]
    chunk = flat[positions]
    if targets is None:
        return ChunkTokens(positions, chunk, torch.zeros_like(chunk), starts, sizes)
    ids = targets.flatten()[positions].long()
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


def check_targets(both: Sequence[ChunkTokens], widths: Sequence[int]) -> None:
    """Raise a `ValueError` for the first invalid id of either side."""
    for side, tokens, width in zip(("student", "teacher"), both, widths, strict=True):
        check_ids(side, tokens.ids, tokens.ids < 0, width)


def check_ids(side: str, ids: Tensor, wrong: Tensor, width: int) -> None:
    """Raise a `ValueError` that names the first invalid id."""
    if bool(wrong.any()):
        raise ValueError(
            f"the {side}'s targets in a chunk contain {int(ids[wrong][0])}, expected 0..{width - 1}"
        )
