"""Chunks on tensors: numbered through a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.alignment.aligner import ShiftedAlignment
from xtok.training.losses.logits import Logits
from xtok.training.sparse import check_width, places_of

EPSILON = 1e-10
"""Added to a chunk's size and inside logarithms, to match the values of NeMo-RL."""


class Chunks(NamedTuple):
    """The N chunks of a loss, numbered through the batch."""

    student: Tensor  # int64 [B, T_s], the number of each position's chunk; N outside chunks
    teacher: Tensor  # int64 [B, T_t]
    student_sizes: Tensor  # int64 [N], positions per chunk, at least 1
    teacher_sizes: Tensor  # int64 [N]
    total: int  # N
    positions: tuple[int, int]  # positions of each side in chunks


ChunkKind: TypeAlias = tuple[bool, bool]
"""Whether a loss uses only chunks with `pair_is_correct`, and only those with a predicted start."""


def count_chunks(
    alignment: Any, *, exact_token_match_only: bool = False, starts_only: bool = False
) -> int:
    """Return the number of chunks that a loss averages over, for a shifted alignment.

    Use it to average several batches: Σ count · loss / Σ count. Set `starts_only` for losses that
    skip chunks without a predicted first token, such as `event_kl`.
    """
    return number_chunks(alignment, (exact_token_match_only, starts_only)).total


@dataclass(eq=False)
class NumberedAlignment(ShiftedAlignment):
    """A shifted alignment with its chunks numbered once for all losses."""

    chunks: dict[ChunkKind, Chunks] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds: list[ChunkKind] = [*product((False, True), (False, True))]
        self.chunks = {kind: number_chunks(self, kind) for kind in kinds}


def chunks_in(
    side: Mapping[str, Any], kind: ChunkKind, device: torch.device | None = None
) -> Chunks:
    """Return the chunks of a teacher's part of a prepared batch."""
    aligned = side["shifted"]
    if isinstance(aligned, NumberedAlignment):
        return aligned.chunks[kind]
    return number_chunks(aligned, kind, device=device)


def require_type(value: Any, kind: type, how: str) -> None:
    """Raise a `ValueError` with the fix if a loss receives an argument of another type."""
    if not isinstance(value, kind):
        is_file = isinstance(value, str | PathLike)
        description = f"the path {str(value)!r}" if is_file else type(value).__name__
        raise ValueError(f"{description} is not of type {kind.__name__}: give {how}")


def number_chunks(
    alignment: Any,
    kind: ChunkKind = (False, False),
    mask: Any = None,
    device: torch.device | None = None,
) -> Chunks:
    """Number the valid chunks of a shifted alignment that have positions on both sides.

    Chunk ids are checked only on a CPU. `mask`, `[B]`, is 0 for rows that do not count.

    Raises:
        ValueError: if shapes do not fit, or chunk ids decrease within a row.
    """
    require_type(alignment, ShiftedAlignment, "xtok.shift_to_predictions(alignment)")
    valid = torch.as_tensor(alignment.pair_valid, device=device).clone()
    device = valid.device
    for name, is_required in zip(("pair_is_correct", "has_start"), kind, strict=True):
        if is_required:
            valid &= torch.as_tensor(getattr(alignment, name), device=device)
    if mask is not None:
        mask = torch.as_tensor(mask, device=device)
        if mask.shape != valid.shape[:1]:
            raise ValueError(f"sample_mask is {list(mask.shape)}, expected [{len(valid)}]")
        valid &= (mask != 0)[:, None]
    sides, sizes = [], []
    for side in ("student", "teacher"):
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
    number = torch.where(valid, valid.flatten().cumsum(0).view(valid.shape) - 1, total)
    # Place 0 is for positions outside chunks.
    padded = torch.nn.functional.pad(number, (1, 0), value=total)
    student, teacher = (padded.gather(1, ids + 1) for ids in sides)
    places = places_of(valid.flatten(), total)
    of_student, of_teacher = (size.flatten()[places] for size in sizes)
    return Chunks(student, teacher, of_student, of_teacher, total, (positions[0], positions[1]))


def require_fit(chunks: Chunks, both: tuple[Logits, Logits], widths: tuple[int, int]) -> None:
    """Check that the logits fit the chunks.

    Raises:
        XtokError: if logits are narrower than `widths`.
        ValueError: if their batch or length does not fit.
    """
    for side, logits, width, numbers in zip(
        ("student", "teacher"), both, widths, chunks[:2], strict=True
    ):
        check_width(side, logits.shape[-1], width)
        if logits.ndim != 3 or numbers.shape != logits.shape[:2]:
            raise ValueError(
                f"{side}_chunk_id is {list(numbers.shape)}, but the {side}'s logits are "
                f"{list(logits.shape)}, [B, T, V]"
            )


def _check_monotone(side: str, ids: Tensor, num_chunks: int) -> None:
    if not ids.numel():
        return
    for wrong, problem in (
        ((ids < -1) | (ids >= num_chunks), f"not in -1..{num_chunks - 1}"),
        ((ids >= 0) & (ids < ids.cummax(1).values), "below an earlier one"),
    ):
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{side}_chunk_id[{row}, {place}] is {int(ids[row, place])}, {problem}; chunk ids "
                "must not decrease within a row"
            )


def top_columns(largest: Tensor, top_k: int | None) -> Tensor:
    """Return the ids of the k columns with the largest logits, rising, int64 `[k]`."""
    if top_k is None or top_k >= len(largest):
        return torch.arange(len(largest), device=largest.device)
    return largest.topk(top_k).indices.sort().values
