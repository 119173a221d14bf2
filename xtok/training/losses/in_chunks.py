"""Comparisons chunk by chunk: each block of positions contains whole chunks of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.training.losses.chunk_tokens import ChunkTokens, both_tokens
from xtok.training.losses.chunks import EPSILON, Chunks, number_chunks, require_fit
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.losses.logits import FLOOR, AnyLogits, Logits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Read, Rows, one_pass
from xtok.training.sparse import work_dtype


class ChunkedLogits(NamedTuple):
    """Both models' logits, and the chunks to compare."""

    student: Logits
    teacher: Any  # `Logits`; None for stored log-probabilities
    chunks: Chunks

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the comparisons."""
        return work_dtype(self.student, self.teacher)

    def tokens(
        self, widths: tuple[int, int], targets: Sequence[Tensor | None] = (None, None)
    ) -> tuple[ChunkTokens, ChunkTokens]:
        """Return both sides' tokens in the chunks; check the logits' shapes."""
        require_fit(self.chunks, (self.student, self.teacher), widths)
        return both_tokens(self.chunks, targets, widths)


def chunked(student_logits: AnyLogits, teacher_logits: Any, chunks: Chunks) -> ChunkedLogits:
    """Wrap both models' logits; the teacher's are None if stored."""
    teacher = None if teacher_logits is None else as_logits(teacher_logits)
    return ChunkedLogits(as_logits(student_logits), teacher, chunks)


def chunk_loss(
    plan: Callable[..., Plan],
    logits: tuple[AnyLogits, Any],
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
) -> Tensor:
    """Return the loss of a plan over the chunks of a shifted alignment."""
    chunks = number_chunks(alignment, config.kind, sample_mask, logits[0].device)
    return one_pass(logits[0], [plan(chunked(*logits, chunks), config=config)])[0]


class Chunked(NamedTuple):
    """The chunks of a block; the student's tokens are the block's rows."""

    chunks: slice  # c of all
    ours: ChunkTokens  # numbered in the block, as are the teacher's
    theirs: ChunkTokens
    teacher_logits: Tensor  # [n, V] at their tokens; [0] for stored log-probabilities
    others: Sequence[slice]  # the ranges of `others` in these chunks


CompareChunks: TypeAlias = Callable[[LogitBlock, Chunked], tuple[Tensor, Tensor]]
TokenGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some tokens: rows of a block, ids, log-probabilities, and the gradient to these."""


def chunk_part(
    ours: ChunkTokens,
    theirs: ChunkTokens,
    compare: CompareChunks,
    teacher: Logits | None,
    width: int,
    others: Sequence[Tensor] = (),
) -> Part:
    """Return a part that compares N chunks; `others`, rising, are the chunks of further entries."""

    def of_rows(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        chunks, teacher, *more = rows.entries
        sides = _in_block(ours, chunks, rows.numbers), _in_block(theirs, chunks, teacher)
        return compare(block, Chunked(chunks, *sides, rows.teacher_logits, more))

    places = [ours.starts, *(ours.starts[chunk] for chunk in (theirs.chunk, *others))]
    size = width * len(theirs.chunk) // max(1, len(ours.chunk)) + 1
    read = None if teacher is None else Read(teacher, theirs.positions, of_place=1)
    return Part(ours.positions, of_rows, read, size, places, ours.chunk)


def _in_block(tokens: ChunkTokens, chunks: slice, which: Tensor | slice) -> ChunkTokens:
    number, sizes = tokens.chunk[which] - chunks.start, tokens.sizes[chunks]
    starts = sizes.cumsum(0) - sizes
    return ChunkTokens(tokens.positions[which], number, tokens.ids[which], starts, sizes)


def mean_over(tokens: ChunkTokens, values: Tensor) -> Tensor:
    """Return the means of values `[n, k]` over each chunk, `[c, k]`."""
    sums = values.new_zeros(len(tokens.sizes), values.shape[1])
    sums.index_add_(0, tokens.chunk, values)
    return sums.div_(tokens.sizes.to(values.dtype)[:, None] + EPSILON)


def to_values(tokens: ChunkTokens, to_means: Tensor) -> Tensor:
    """Return the gradient to the values, `[n, k]`, from the gradient to their means, `[c, k]`."""
    return (to_means / (tokens.sizes.to(to_means.dtype)[:, None] + EPSILON))[tokens.chunk]


def picked(log_p: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities of tokens, `[e]`; NaN for the id −1."""
    return log_p[rows, ids].masked_fill_(ids < 0, torch.nan)


def to_logits(p: Tensor, tokens: Sequence[TokenGradients]) -> Tensor:
    """Return the gradient to logits, `[m, V]`, from that to log-probabilities of some tokens.

    Logits of −∞ get no gradient.
    """
    back, sums = torch.zeros_like(p), p.new_zeros(len(p))
    for rows, ids, logprobs, gradient in tokens:
        unmasked = gradient.masked_fill(logprobs == FLOOR, 0)
        back.index_put_((rows, ids), unmasked, accumulate=True)
        sums.index_add_(0, rows, unmasked)
    return back.addcmul_(p, sums[:, None], value=-1)
