"""Chunks as tensors: numbers and tokens of chunks, and losses that compare chunks.

Chunk numbers continue from one row of the batch to the next. A block never splits a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.alignment.aligner import ShiftedAlignment
from xtok.tokenizers.table import SIDES
from xtok.training.losses.config import ChunkFilter, ChunkLossConfig
from xtok.training.losses.logits import FLOOR, AnyLogits, Logits, as_logits
from xtok.training.losses.one_pass import LogitBlock, Plan, PlanPart, Read, Rows, one_pass
from xtok.training.sparse import check_width, ranges, true_indices, work_dtype

EPSILON = 1e-10
"""Constant that NeMo-RL adds to a chunk's size and inside logarithms."""


class Chunks(NamedTuple):
    """The N chunks that a loss compares, numbered from 0 to N − 1 in the whole batch."""

    student: Tensor  # int64 [B, T_s], number of each position's chunk; N outside chunks
    teacher: Tensor  # int64 [B, T_t]
    student_sizes: Tensor  # int64 [N], positions per chunk, at least 1
    teacher_sizes: Tensor  # int64 [N]
    total: int  # N
    positions: tuple[int, int]  # number of positions in chunks: student, teacher


def count_chunks(
    alignment: Any, *, exact_token_match_only: bool = False, starts_only: bool = False
) -> int:
    """Return the number of chunks of a shifted alignment that contribute to a loss.

    The mean loss of several batches is Σ count · loss / Σ count. Set `starts_only` for losses that
    skip chunks without a predicted first token, such as `event_kl`.
    """
    return number_chunks(alignment, ChunkFilter(exact_token_match_only, starts_only)).total


@dataclass(eq=False)
class NumberedAlignment(ShiftedAlignment[Tensor]):
    """A shifted alignment that numbers its chunks once for all losses."""

    chunks: dict[ChunkFilter, Chunks] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        filters = [ChunkFilter(*flags) for flags in product((False, True), repeat=2)]
        self.chunks = {each: number_chunks(self, each) for each in filters}


def chunks_in(
    aligned: ShiftedAlignment[Tensor], chunk_filter: ChunkFilter, device: torch.device | None = None
) -> Chunks:
    """Return the numbered chunks of a shifted alignment. Number the chunks if necessary."""
    if isinstance(aligned, NumberedAlignment):
        return aligned.chunks[chunk_filter]
    return number_chunks(aligned, chunk_filter, device=device)


def require_type(value: Any, kind: type, how: str) -> None:
    """Raise a `ValueError` if an argument of a loss has the wrong type. `how` describes the fix."""
    if not isinstance(value, kind):
        is_file = isinstance(value, str | PathLike)
        description = f"the path {str(value)!r}" if is_file else type(value).__name__
        raise ValueError(f"{description} is not of type {kind.__name__}: pass {how}")


def number_chunks(
    alignment: Any,
    chunk_filter: ChunkFilter = ChunkFilter(),
    mask: Any = None,
    device: torch.device | None = None,
) -> Chunks:
    """Number the valid chunks of a shifted alignment that have positions on both sides.

    `mask`, `[B]`, is 0 for rows that do not contribute to the loss. Chunk ids are checked only on a
    CPU.
    """
    require_type(alignment, ShiftedAlignment, "xtok.shift_to_predictions(alignment)")
    valid = torch.as_tensor(alignment.pair_valid, device=device).clone()
    device = valid.device
    if chunk_filter.correct_only:
        valid &= torch.as_tensor(alignment.pair_is_correct, device=device)
    if chunk_filter.starts_only:
        valid &= torch.as_tensor(alignment.has_start, device=device)
    if mask is not None:
        mask = torch.as_tensor(mask, device=device)
        if mask.shape != valid.shape[:1]:
            raise ValueError(f"sample_mask is {list(mask.shape)}, expected [{len(valid)}]")
        valid &= (mask != 0)[:, None]
    sides, sizes = [], []
    for side in SIDES:
        ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"))
        if ids.ndim != 2 or len(ids) != len(valid):
            raise ValueError(f"{side}_chunk_id is {list(ids.shape)}, expected [{len(valid)}, T]")
        if ids.device.type == "cpu":
            _check_monotone(side, ids, valid.shape[1])
        ids = ids.to(device)
        counts = torch.zeros((len(ids), valid.shape[1] + 1), dtype=torch.int64, device=device)
        sizes.append(counts.scatter_add_(1, ids + 1, torch.ones_like(ids))[:, 1:])
        sides.append(ids)
        valid &= sizes[-1] > 0
    total, *positions = torch.stack([valid.sum(), *((n * valid).sum() for n in sizes)]).tolist()
    chunk_ids = torch.where(valid, valid.flatten().cumsum(0).view(valid.shape) - 1, total)
    # Column 0 belongs to positions outside chunks.
    padded = torch.nn.functional.pad(chunk_ids, (1, 0), value=total)
    student, teacher = (padded.gather(1, ids + 1) for ids in sides)
    indices = true_indices(valid.flatten(), total)
    sizes = [size.flatten()[indices] for size in sizes]
    return Chunks(student, teacher, sizes[0], sizes[1], total, (positions[0], positions[1]))


def _check_monotone(side: str, ids: Tensor, num_chunks: int) -> None:
    for wrong, problem in (
        ((ids < -1) | (ids >= num_chunks), f"not in -1..{num_chunks - 1}"),
        ((ids >= 0) & (ids < ids.cummax(1).values), "below an earlier chunk id"),
    ):
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{side}_chunk_id[{row}, {position}] is {int(ids[row, position])}, {problem}; "
                "chunk ids must not decrease within a row"
            )


TargetIds: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The predicted ids, int64: `[B, T_s]` for the student and `[B, T_t]` for the teacher."""


class ChunkTokens(NamedTuple):
    """The n tokens of one side that belong to the N chunks, sorted by chunk (int64 tensors)."""

    positions: Tensor  # [n], position that predicts each token: row · T + t
    chunk: Tensor  # [n], number of each token's chunk, ascending
    ids: Tensor  # [n]
    starts: Tensor  # [N], the index of each chunk's first token
    sizes: Tensor  # [N], at least 1

    def last(self, chunks: Tensor) -> Tensor:
        """Return the index of the last token in each of the given chunks."""
        return self.starts[chunks] + self.sizes[chunks] - 1

    def select(self, chunks: Tensor, total: int) -> ChunkTokens:
        """Return the tokens of `chunks`, which is ascending. `total` is the number of tokens."""
        sizes = self.sizes[chunks]
        chunk, indices = ranges(self.starts[chunks], sizes, total)
        starts = sizes.cumsum(0) - sizes
        return ChunkTokens(self.positions[indices], chunk, self.ids[indices], starts, sizes)

    def sums(self, values: Tensor) -> Tensor:
        """Sum the values `[n, …]` of each chunk's tokens. Returns `[N, …]`."""
        sums = values.new_zeros(len(self.sizes), *values.shape[1:])
        return sums.index_add_(0, self.chunk, values)

    def means(self, values: Tensor) -> Tensor:
        """Average the values `[n, k]` of each chunk's tokens. Returns `[N, k]`."""
        return self.sums(values).div_(self.sizes.to(values.dtype)[:, None] + EPSILON)

    def value_gradient(self, mean_grad: Tensor) -> Tensor:
        """Convert a gradient of means, `[N, k]`, to a gradient of the values, `[n, k]`."""
        return (mean_grad / (self.sizes.to(mean_grad.dtype)[:, None] + EPSILON))[self.chunk]


def tokens_in(
    side: str, chunk_ids: Tensor, sizes: Tensor, count: int, targets: Tensor | None, width: int
) -> ChunkTokens:
    """Return the tokens of one side that are in chunks. `count` is the number of these tokens.

    `chunk_ids`, `[B, T]`, contains the chunk number of each position, or N outside chunks. On a
    CPU, an invalid id raises a `ValueError`. On other devices, an invalid id becomes −1, and
    `gather` returns NaN for −1.
    """
    if targets is not None and targets.shape != chunk_ids.shape:
        raise ValueError(
            f"the {side}'s targets have shape {list(targets.shape)}, expected "
            f"{list(chunk_ids.shape)}, [B, T]"
        )
    flat, starts = chunk_ids.flatten(), sizes.cumsum(0) - sizes
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
    """Return the student's and the teacher's tokens that are in chunks."""
    columns = zip(SIDES, chunks[:2], chunks[2:4], chunks.positions, targets, widths, strict=True)
    student, teacher = (tokens_in(*column) for column in columns)
    return student, teacher


def check_targets(sides: Sequence[ChunkTokens], widths: Sequence[int]) -> None:
    """Raise a `ValueError` for the first invalid id of either side."""
    for side, tokens, width in zip(SIDES, sides, widths, strict=True):
        check_ids(side, tokens.ids, tokens.ids < 0, width)


def check_ids(side: str, ids: Tensor, wrong: Tensor, width: int) -> None:
    """Raise a `ValueError` that names the first invalid id."""
    if bool(wrong.any()):
        raise ValueError(
            f"the {side}'s targets in a chunk contain {int(ids[wrong][0])}, expected 0..{width - 1}"
        )


class BothLogits(NamedTuple):
    """Both models' logits, and the chunks to compare."""

    student: Logits
    teacher: Any  # `Logits`; None for stored log-probabilities
    chunks: Chunks
    targets: TargetIds = (None, None)
    teacher_logprobs: Tensor | None = None  # [B, T_t], stored; position t: token t + 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the comparisons."""
        return work_dtype(self.student, self.teacher)

    def tokens(
        self, widths: tuple[int, int], targets: Sequence[Tensor | None] = (None, None)
    ) -> tuple[ChunkTokens, ChunkTokens]:
        """Check the logits' shapes, and return the tokens of both sides that are in chunks."""
        sides = zip(SIDES, self[:2], widths, self.chunks[:2], strict=True)
        for side, logits, width, chunk_ids in sides:
            check_width(side, logits.shape[-1], width)
            if logits.ndim != 3 or chunk_ids.shape != logits.shape[:2]:
                raise ValueError(
                    f"{side}_chunk_id is {list(chunk_ids.shape)}, but the {side}'s logits are "
                    f"{list(logits.shape)}, [B, T, V]"
                )
        return both_tokens(self.chunks, targets, widths)


def wrap_logits(
    student_logits: AnyLogits, teacher_logits: Any, chunks: Chunks, **fields: Any
) -> BothLogits:
    """Wrap both models' logits (None for stored predictions) and their chunks."""
    teacher = None if teacher_logits is None else as_logits(teacher_logits)
    return BothLogits(as_logits(student_logits), teacher, chunks, **fields)


def chunk_loss(
    plan: Callable[..., Plan],
    logits: tuple[AnyLogits, Any],
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    **fields: Any,
) -> Tensor:
    """Compute the loss that `plan` describes, for the chunks of a shifted alignment."""
    chunks = number_chunks(alignment, config.chunk_filter, sample_mask, logits[0].device)
    return one_pass(logits[0], [plan(wrap_logits(*logits, chunks, **fields), config=config)])[0]


class ChunkRows(NamedTuple):
    """The chunks in one block. Row i of the block belongs to the block's ith student token."""

    chunks: slice  # range of c chunk numbers
    student: ChunkTokens  # chunk numbers start at 0 in the block, for both sides
    teacher: ChunkTokens
    teacher_logits: Tensor  # [n, V], one row per teacher token; [0] if stored
    entries: Sequence[slice]  # range of the chunks in each of the part's `entries`


CompareChunks: TypeAlias = Callable[[LogitBlock, ChunkRows], tuple[Tensor, Tensor]]
TokenGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens in a block: rows, ids, log-probabilities, and gradients of the log-probabilities."""


def chunk_part(
    student: ChunkTokens,
    teacher: ChunkTokens,
    compare: CompareChunks,
    teacher_logits: Logits | None,
    width: int,
    entries: Sequence[Tensor] = (),
) -> PlanPart:
    """Return a part of a plan that compares N chunks.

    Each tensor in `entries` contains the chunk number of each additional entry, in ascending order.
    """

    def compare_rows(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        chunks, teacher_range, *entry_ranges = rows.entries
        sides = _in_block(student, chunks, rows.indices), _in_block(teacher, chunks, teacher_range)
        return compare(block, ChunkRows(chunks, *sides, rows.teacher_logits, entry_ranges))

    entry_positions = [student.starts, *(student.starts[c] for c in (teacher.chunk, *entries))]
    size = width * len(teacher.chunk) // max(1, len(student.chunk)) + 1
    read = None if teacher_logits is None else Read(teacher_logits, teacher.positions, per_entry=1)
    return PlanPart(student.positions, compare_rows, read, size, entry_positions, student.chunk)


def _in_block(tokens: ChunkTokens, chunks: slice, indices: Tensor | slice) -> ChunkTokens:
    chunk, sizes = tokens.chunk[indices] - chunks.start, tokens.sizes[chunks]
    starts = sizes.cumsum(0) - sizes
    return ChunkTokens(tokens.positions[indices], chunk, tokens.ids[indices], starts, sizes)


def gather(log_p: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each pair of row and id, `[e]`; NaN for the id −1."""
    return log_p[rows, ids].masked_fill_(ids < 0, torch.nan)


def logit_gradient(p: Tensor, tokens: Sequence[TokenGradients]) -> Tensor:
    """Convert gradients of tokens' log-probabilities to a gradient of the logits, `[m, V]`.

    Logits of −∞ receive no gradient.
    """
    grad, sums = torch.zeros_like(p), p.new_zeros(len(p))
    for rows, ids, logprobs, gradient in tokens:
        unmasked = gradient.masked_fill(logprobs == FLOOR, 0)
        grad.index_put_((rows, ids), unmasked, accumulate=True)
        sums.index_add_(0, rows, unmasked)
    return grad.addcmul_(p, sums[:, None], value=-1)
