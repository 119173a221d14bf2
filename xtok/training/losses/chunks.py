"""Chunks on tensors: their positions, checked; means over them; what all losses share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.config import ChunkLossConfig
from xtok.training.module import check_width, work_dtype

EPSILON = 1e-10
"""Added to a chunk's size and inside logarithms, as NeMo-RL does, whose values we match."""

FLOOR = -23.02585092994046
"""log(1e-10): the log-probability of a token that is masked with −∞."""


class Chunks(NamedTuple):
    """The N chunks that a loss is the mean of, numbered through the batch."""

    student: Tensor  # int64 [B, T_s], the number of each position's chunk; N where it has none
    teacher: Tensor  # int64 [B, T_t]
    student_sizes: Tensor  # [N], positions per chunk, at least 1
    teacher_sizes: Tensor  # [N]
    total: int  # N


def find_chunks(
    student_logits: Tensor,
    teacher_logits: Tensor,
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    widths: tuple[int, int] = (0, 0),
) -> Chunks:
    """Number the chunks that count: valid, with a predicting position on both sides.

    Raises:
        XtokError: if logits are narrower than their side of `widths`.
        ValueError: for shapes that do not fit, or chunk ids that fall within a row.
    """
    device = student_logits.device
    valid = torch.as_tensor(alignment.pair_valid, device=device)
    if config.exact_token_match_only:
        valid = valid & torch.as_tensor(alignment.pair_is_correct, device=device)
    if sample_mask is not None:
        mask = torch.as_tensor(sample_mask, device=device)
        if mask.shape != valid.shape[:1]:
            raise ValueError(
                f"sample_mask is {list(mask.shape)}, and must be {list(valid.shape[:1])}"
            )
        valid = valid & (mask != 0)[:, None]
    sides = []
    for side, logits, width in zip(
        ("student", "teacher"), (student_logits, teacher_logits), widths, strict=True
    ):
        check_width(side, logits.shape[-1], width)
        ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"), device=device)
        if logits.ndim != 3 or ids.shape != logits.shape[:2] or len(ids) != len(valid):
            raise ValueError(
                f"{side}_chunk_id is {list(ids.shape)} and pair_valid {list(valid.shape)}, which "
                f"do not fit the {side}'s logits {list(logits.shape)}, [B, T, V]"
            )
        _check_monotone(side, ids, valid.shape[1])
        sides.append(ids)
    sizes = [_sizes(ids, valid.shape[1]) for ids in sides]
    valid = valid & (sizes[0] > 0) & (sizes[1] > 0)
    count = int(valid.sum())
    number = torch.where(valid, valid.flatten().cumsum(0).view(valid.shape) - 1, count)
    number = torch.nn.functional.pad(number, (1, 0), value=count)  # place 0 is for "no chunk"
    student, teacher = (number.gather(1, ids + 1) for ids in sides)
    dtype = work_dtype(student_logits, teacher_logits)
    of_student, of_teacher = (size[valid].to(dtype) for size in sizes)
    return Chunks(student, teacher, of_student, of_teacher, count)


def count_chunks(alignment: Any, *, exact_token_match_only: bool = False) -> int:
    """Return how many chunks a loss over a shifted alignment is the mean of.

    A sum over several batches needs it: Σ count · loss / Σ count is the loss of all in one batch.
    """
    valid = torch.as_tensor(alignment.pair_valid)
    if exact_token_match_only:
        valid = valid & torch.as_tensor(alignment.pair_is_correct)
    for side in ("student", "teacher"):
        ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"))
        valid = valid & (_sizes(ids, valid.shape[1]) > 0)
    return int(valid.sum())


def loss_over_chunks(
    compare: Callable[[Chunks], Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor,
    alignment: Any,
    config: ChunkLossConfig,
    sample_mask: Tensor | None,
    widths: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return `compare(chunks)`, checked; 0 with a gradient of zeros where no chunk is valid.

    `compare` runs without autocast. Errors are those of `find_chunks` and `checked`.
    """
    with torch.autocast(student_logits.device.type, enabled=False):
        chunks = find_chunks(student_logits, teacher_logits, alignment, config, sample_mask, widths)
        if chunks.total == 0:
            return no_chunks(student_logits)
        loss = compare(chunks)
    return checked(loss, student_logits, teacher_logits)


def _check_monotone(side: str, ids: Tensor, num_chunks: int) -> None:
    """Raise unless the ids of a row never fall, −1 left out, and are all in −1..C−1."""
    if not ids.numel():
        return
    wrong = (ids >= 0) & (ids < ids.cummax(1).values)
    outside = (ids < -1) | (ids >= num_chunks)
    if bool((wrong | outside).any()):
        where = outside if bool(outside.any()) else wrong
        row, place = where.nonzero()[0].tolist()
        problem = (
            f"not in -1..{num_chunks - 1}" if bool(outside.any()) else "less than one before it"
        )
        raise ValueError(
            f"{side}_chunk_id[{row}, {place}] is {int(ids[row, place])}, {problem}; chunk ids "
            "never fall within a row"
        )


def _sizes(ids: Tensor, num_chunks: int) -> Tensor:
    counts = torch.zeros((len(ids), num_chunks + 1), dtype=torch.int64, device=ids.device)
    return counts.scatter_add(1, ids + 1, torch.ones_like(ids))[:, 1:]


def chunk_means(
    chunks: Chunks,
    student_logits: Tensor,
    teacher_logits: Tensor,
    widths: tuple[int, int],
    transform: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return both sides' means over the positions of each chunk, `[N, V]`.

    `transform` maps logits, `[n, V]` in float32 or 64, to what is averaged.
    """
    means = []
    for logits, chunk, sizes, width in (
        (student_logits, chunks.student.flatten(), chunks.student_sizes, widths[0]),
        (teacher_logits.detach(), chunks.teacher.flatten(), chunks.teacher_sizes, widths[1]),
    ):
        inside = chunk < chunks.total
        rows = transform(logits[..., :width].flatten(0, 1)[inside].to(work_dtype(logits)))
        sums = torch.zeros((chunks.total, width), dtype=rows.dtype, device=rows.device)
        means.append(sums.index_add(0, chunk[inside], rows) / (sizes[:, None] + EPSILON))
    dtype = work_dtype(*means)
    return means[0].to(dtype), means[1].to(dtype)


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-softmax over the last dimension, where −∞ counts as `FLOOR`."""
    log_probs = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    if log_probs.numel() and bool(torch.isneginf(log_probs.amin())):
        return log_probs.masked_fill(torch.isneginf(log_probs), FLOOR)
    return log_probs


def divergence(log_s: Tensor, log_r: Tensor, *, reverse: bool) -> Tensor:
    """Return the sum of r (log r − log s), or reversed, of s (log s − log r)."""
    if reverse:
        log_s, log_r = log_r, log_s
    return (log_r.exp() * (log_r - log_s)).sum()


def no_chunks(student_logits: Tensor) -> Tensor:
    """Return 0 with a gradient of zeros, even for logits that are not finite."""
    zeros = torch.zeros_like(student_logits)
    return torch.where(zeros == 0, zeros, student_logits).sum(dtype=work_dtype(student_logits))


def checked(loss: Tensor, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the loss if it is finite.

    Raises:
        ValueError: naming the logits at fault: NaN or +∞; −∞ is allowed.
    """
    if bool(torch.isfinite(loss)):
        return loss
    for side, logits in (("student", student_logits), ("teacher", teacher_logits)):
        wrong = torch.isnan(logits) | torch.isposinf(logits)
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            value = logits[tuple(place)].item()
            raise ValueError(f"the {side}'s logits are {value} at {place}")
    raise ValueError("a position of a chunk has no finite logit, so the loss is not finite")
