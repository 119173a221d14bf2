"""Chunks on tensors: their positions, checked; means over them; what all losses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xtok.alignment.aligner import ShiftedAlignment
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.sparse import check_width, work_dtype

EPSILON = 1e-10
"""Added to a chunk's size and inside logarithms, as NeMo-RL does, whose values we match."""

_KEPT: WeakKeyDictionary[ShiftedAlignment, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


class Chunks(NamedTuple):
    """The N chunks that a loss is the mean of, numbered through the batch."""

    student: Tensor  # int64 [B, T_s], the number of each position's chunk; N where it has none
    teacher: Tensor  # int64 [B, T_t]
    student_sizes: Tensor  # int64 [N], positions per chunk, at least 1
    teacher_sizes: Tensor  # int64 [N]
    total: int  # N
    positions: tuple[int, int]  # how many of each side's are in chunks


def count_chunks(
    alignment: Any, *, exact_token_match_only: bool = False, starts_only: bool = False
) -> int:
    """Return how many chunks a loss over a shifted alignment is the mean of.

    A sum over several batches needs it: Σ count · loss / Σ count is the loss of all in one batch.
    `starts_only` leaves out the chunks whose first token nothing predicts, as `event_kl`
    does.
    """
    return number_chunks(alignment, exact_token_match_only, starts_only).total


def require_type(given: Any, kind: type, how: str) -> None:
    """Raise a `ValueError` that says how to make what a loss takes, if something else is given."""
    if not isinstance(given, kind):
        is_file = isinstance(given, str | PathLike)
        what = f"the path {str(given)!r}" if is_file else type(given).__name__
        raise ValueError(f"{what} is given where {kind.__name__} is due: give {how}")


def require_shifted(alignment: Any) -> None:
    """Raise a `ValueError` for the alignment of the tokens themselves."""
    require_type(alignment, ShiftedAlignment, "xtok.shift_to_predictions(alignment)")


def number_chunks(
    alignment: Any,
    exactly: bool = False,
    starts_only: bool = False,
    mask: Tensor | None = None,
    device: torch.device | None = None,
) -> Chunks:
    """Number the chunks that count: valid, with a predicting position on both sides.

    `mask`, `[B]`, is 0 where a row does not count.
    """
    require_shifted(alignment)
    device = device or torch.as_tensor(alignment.pair_valid).device
    key = exactly, starts_only, device
    chunks: Chunks = kept_with(
        alignment, key, (mask,), lambda: _numbered(alignment, exactly, starts_only, mask, device)
    )
    return chunks


def kept_with(
    alignment: ShiftedAlignment, key: Any, made_of: Sequence[Any], make: Callable[[], Any]
) -> Any:
    """Return what `make` returns, kept while an alignment lives and `made_of` are the same objects.

    So a step counts its chunks once: what counts them, and the loss, take the same objects, which
    must not change in place meanwhile. An alignment with another tensor is another one.
    """
    made_of = *made_of, *vars(alignment).values()
    kept = _KEPT.setdefault(alignment, {})
    objects, made = kept.get(key, ((None,) * len(made_of), None))
    if made is None or any(old is not new for old, new in zip(objects, made_of, strict=True)):
        made = make()
        kept[key] = made_of, made
    return made


def _numbered(
    alignment: Any, exactly: bool, starts_only: bool, mask: Tensor | None, device: Any
) -> Chunks:
    valid = torch.as_tensor(alignment.pair_valid, device=device).clone()
    device = valid.device
    if exactly:
        valid &= torch.as_tensor(alignment.pair_is_correct, device=device)
    if starts_only:
        valid &= torch.as_tensor(alignment.has_start, device=device)
    if mask is not None:
        valid &= (mask != 0).to(device)[:, None]
    sides, sizes = [], []
    for side in ("student", "teacher"):
        ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"), device=device)
        counts = torch.zeros((len(ids), valid.shape[1] + 1), dtype=torch.int64, device=device)
        sizes.append(counts.scatter_add_(1, ids + 1, torch.ones_like(ids))[:, 1:])
        sides.append(ids)
        valid &= sizes[-1] > 0
    total, *positions = torch.stack([valid.sum(), *((n * valid).sum() for n in sizes)]).tolist()
    number = torch.where(valid, valid.flatten().cumsum(0).view(valid.shape) - 1, total)
    padded = torch.nn.functional.pad(number, (1, 0), value=total)  # place 0 is for "no chunk"
    student, teacher = (padded.gather(1, ids + 1) for ids in sides)
    of_student, of_teacher = (
        number.new_zeros(total + 1).scatter_(0, number.flatten(), size.flatten())[:total]
        for size in sizes
    )
    return Chunks(student, teacher, of_student, of_teacher, total, (positions[0], positions[1]))


def chunks_of(
    alignment: Any,
    student: Any,
    teacher: Any,
    widths: tuple[int, int],
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    *,
    starts_only: bool = False,
) -> Chunks:
    """Return the chunks that count, of logits that are checked.

    Chunk ids are checked where that fetches nothing, on a CPU.

    Raises:
        XtokError: if logits are narrower than their side of `widths`.
        ValueError: for shapes that do not fit, chunk ids that fall within a row.
    """
    require_shifted(alignment)
    pairs = torch.as_tensor(alignment.pair_valid).shape
    of_rows = pairs[:1]
    mask = None if sample_mask is None else torch.as_tensor(sample_mask)
    if mask is not None and mask.shape != of_rows:
        raise ValueError(f"sample_mask is {list(mask.shape)}, and must be {list(of_rows)}")
    for side, logits, width in zip(("student", "teacher"), (student, teacher), widths, strict=True):
        check_width(side, logits.shape[-1], width)
        ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"))
        if logits.ndim != 3 or ids.shape != logits.shape[:2] or ids.shape[:1] != of_rows:
            raise ValueError(
                f"{side}_chunk_id is {list(ids.shape)} and pair_valid {list(pairs)}, which do not "
                f"fit the {side}'s logits {list(logits.shape)}, [B, T, V]"
            )
        if ids.device.type == "cpu":
            _check_monotone(side, ids, pairs[1])
    return number_chunks(
        alignment, config.exact_token_match_only, starts_only, mask, student.device
    )


def loss_over_chunks(
    compare: Callable[[Chunks], Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor,
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    widths: tuple[int, int],
) -> Tensor:
    """Return `compare` of the chunks that count, for a loss on whole logits.

    It runs without autocast, and is 0 with a gradient of zeros where no chunk counts.

    Raises:
        ValueError: as `chunks_of`, and for logits that are not finite.
    """
    chunks = chunks_of(alignment, student_logits, teacher_logits, widths, config, sample_mask)
    if not chunks.total:
        return no_chunks(student_logits)
    dtype = work_dtype(student_logits, teacher_logits)
    sizes = chunks.student_sizes.to(dtype), chunks.teacher_sizes.to(dtype)
    with torch.autocast(student_logits.device.type, enabled=False):
        loss = compare(chunks._replace(student_sizes=sizes[0], teacher_sizes=sizes[1]))
    return require_finite(loss, student_logits, teacher_logits)


def _check_monotone(side: str, ids: Tensor, num_chunks: int) -> None:
    """Raise unless the ids of a row never fall, −1 left out, and are all in −1..C−1."""
    if not ids.numel():
        return
    for wrong, problem in (
        ((ids < -1) | (ids >= num_chunks), f"not in -1..{num_chunks - 1}"),
        ((ids >= 0) & (ids < ids.cummax(1).values), "less than one before it"),
    ):
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{side}_chunk_id[{row}, {place}] is {int(ids[row, place])}, {problem}; chunk ids "
                "never fall within a row"
            )


def divergence(log_s: Tensor, log_r: Tensor, *, reverse: bool) -> Tensor:
    """Return the sum of r (log r − log s), or reversed, of s (log s − log r)."""
    if reverse:
        log_s, log_r = log_r, log_s
    return (log_r.exp() * (log_r - log_s)).sum()


def no_chunks(student_logits: Tensor) -> Tensor:
    """Return 0 with a gradient of zeros, even for logits that are not finite."""
    zeros = torch.zeros_like(student_logits)
    return torch.where(zeros == 0, zeros, student_logits).sum(dtype=work_dtype(student_logits))


def require_finite(loss: Tensor, *logits: Tensor) -> Tensor:
    """Return the loss if it is finite; `logits` are the student's, and maybe the teacher's.

    Raises:
        ValueError: naming the logits at fault: NaN or +∞; −∞ is allowed.
    """
    if bool(torch.isfinite(loss)):
        return loss
    for side, values in zip(("student", "teacher"), logits, strict=False):
        wrong = torch.isnan(values) | torch.isposinf(values)
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise ValueError(f"the {side}'s logits are {values[tuple(place)].item()} at {place}")
    raise ValueError("a position of a chunk has no finite logit, so the loss is not finite")


def top_columns(largest: Tensor, top_k: int | None) -> Tensor:
    """Return the ids of the k columns with the largest logits, rising, int64 `[k]`."""
    if top_k is None or top_k >= len(largest):
        return torch.arange(len(largest), device=largest.device)
    return largest.topk(top_k).indices.sort().values
