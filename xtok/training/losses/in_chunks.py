"""What a loss compares chunk by chunk: each block of positions has whole chunks of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.predictions.checked import STORED_ROUNDING
from xtok.training.losses.chunk_tokens import ChunkTokens
from xtok.training.losses.chunks import EPSILON
from xtok.training.losses.logits import FLOOR, Logits, Positions
from xtok.training.losses.one_pass import LogitBlock, Part, Read, Rows


class BlockTokens(NamedTuple):
    """One side's n tokens in c whole chunks of a block, chunk after chunk; int64 tensors."""

    chunk: Tensor  # [n], the number in 0..c − 1 of each one's chunk
    ids: Tensor  # [n]
    sizes: Tensor  # [c], of the chunks
    positions: Positions  # [n]


class Chunked(NamedTuple):
    """What a block has of chunks: their tokens on both sides, the student's as its rows."""

    chunks: slice  # c of all
    ours: BlockTokens
    theirs: BlockTokens
    teacher_logits: Tensor  # [n, V] at their tokens; [0] where they are stored
    others: Sequence[slice]  # of `others`, those in these chunks

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return len(self.ours.sizes)


CompareChunks: TypeAlias = Callable[[LogitBlock, Chunked], tuple[Tensor, Tensor]]
TokenGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some tokens rows of a block, ids, log-probabilities, and the gradient to these."""


def chunk_part(
    ours: ChunkTokens,
    theirs: ChunkTokens,
    compare: CompareChunks,
    teacher: Logits | None,
    width: int,
    others: Sequence[Tensor] = (),
) -> Part:
    """Return what is compared in N chunks.

    Args:
        ours: the student's tokens in them.
        theirs: the teacher's.
        compare: takes both sides' logits at the tokens of some chunks.
        teacher: the teacher's logits; None where they are stored.
        width: of what is compared of them.
        others: int64, rising: the chunks of what else is compared.
    """

    def of_rows(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        chunks, teacher, *more = rows.entries
        sides = _in_block(ours, chunks, rows.numbers), _in_block(theirs, chunks, teacher)
        return compare(block, Chunked(chunks, *sides, rows.teacher_logits, more))

    places = [ours.starts, *(ours.starts[chunk] for chunk in (theirs.chunk, *others))]
    size = width * len(theirs.chunk) // max(1, len(ours.chunk)) + 1
    read = None if teacher is None else Read(teacher, theirs.positions, of_place=1)
    return Part(ours.positions, of_rows, read, size, places, ours.chunk)


def _in_block(tokens: ChunkTokens, chunks: slice, which: Tensor | slice) -> BlockTokens:
    number = tokens.chunk[which] - chunks.start
    return BlockTokens(number, tokens.ids[which], tokens.sizes[chunks], tokens.at(which))


def mean_over(tokens: BlockTokens, values: Tensor) -> Tensor:
    """Return the means of `[n, k]` values over each chunk, `[c, k]`."""
    sums = values.new_zeros(len(tokens.sizes), values.shape[1])
    sums.index_add_(0, tokens.chunk, values)
    return sums.div_(tokens.sizes.to(values.dtype)[:, None] + EPSILON)


def to_values(tokens: BlockTokens, to_means: Tensor) -> Tensor:
    """Return the gradient to the values, `[n, k]`, from that to their means, `[c, k]`."""
    return (to_means / (tokens.sizes.to(to_means.dtype)[:, None] + EPSILON))[tokens.chunk]


def picked(log_p: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities of tokens, `[e]`, NaN where there is none, by an id of −1."""
    return log_p[rows, ids].masked_fill_(ids < 0, torch.nan)


def to_logits(p: Tensor, tokens: Sequence[TokenGradients]) -> Tensor:
    """Return the gradient to logits, `[m, V]`, from that to log-probabilities of some tokens.

    There is none to those that are masked with −∞.
    """
    back, sums = torch.zeros_like(p), p.new_zeros(len(p))
    for rows, ids, logprobs, gradient in tokens:
        unmasked = gradient.masked_fill(logprobs == FLOOR, 0)
        back.index_put_((rows, ids), unmasked, accumulate=True)
        sums.index_add_(0, rows, unmasked)
    return back.addcmul_(p, sums[:, None], value=-1)


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
