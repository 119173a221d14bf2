"""Losses on both vocabularies as they are: gold and H-KL on exact pairs, ULD on sorted values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    Chunks,
    checked,
    chunk_means,
    find_chunks,
    log_probabilities,
    no_chunks,
    rows_in_chunks,
)
from xtok.training.losses.config import GoldConfig, ULDConfig
from xtok.training.losses.pairs import ExactPairs
from xtok.training.module import work_dtype


def gold(
    student_logits: Tensor,
    teacher_logits: Tensor,
    pairs: ExactPairs,
    alignment: Any,
    config: GoldConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the gold loss of NeMo-RL: KL on the exact pairs, sorted L1 on the rest.

    It is the hybrid of GOLD (TRL's General Online Logit Distillation) and ULD (Boizard et al.,
    arXiv 2402.12030) on chunks. With log s and log r the means over a chunk's positions of the
    student's and the teacher's log-softmax over all their tokens at temperature τ, P the pairs,
    and ↓ the largest values in falling order, at most `uncommon_topk`:

        loss = τ² · mean over chunks of
               Σ_{(i,j)∈P} r_j (log r_j − log s_i)  +  Σ_n |s↓_n − r↓_n| over what is not in P

    Reversed, the first sum is Σ s_i (log s_i − log r_j). The pairs alone are no distribution, so
    the first sum, and with it the loss, may be below 0.

    Args:
        student_logits: `[B, T_s, V_s]`, any floating type; computed in float32 under any autocast
            (in float64 if they are). Columns beyond the pairs' width take no part.
        teacher_logits: `[B, T_t, V_t]`; no gradient goes to them.
        pairs: `exact_pairs(map)`, on the logits' device.
        alignment: an `AlignmentBatch` whose chunk ids are those of the *predicted* tokens, as
            `xtok.shift_to_predictions` gives them.
        config: see there.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk is valid.

    Raises:
        XtokError: if logits are narrower than the pairs' vocabularies.
        ValueError: for shapes that do not fit, chunk ids that fall, and logits of NaN or +∞.
    """
    config = config or GoldConfig()
    with torch.autocast(student_logits.device.type, enabled=False):
        chunks = find_chunks(
            student_logits, teacher_logits, alignment, config, sample_mask, pairs.widths
        )
        if chunks.total == 0:
            return no_chunks(student_logits)
        both = (student_logits, teacher_logits.detach())
        log_s, log_r = _mean_log_probabilities(both, pairs, chunks, config)
        first, second = log_s[:, pairs.student_ids], log_r[:, pairs.teacher_ids]
        if config.reverse_kl:
            first, second = second, first
        divergence = (second.exp() * (second - first)).sum()
        distance = _sorted_distance(
            log_s[:, pairs.other_student_ids].exp(),
            log_r[:, pairs.other_teacher_ids].exp(),
            config.uncommon_topk,
        )
        loss = (divergence + distance) * (config.temperature**2 / chunks.total)
    return checked(loss, student_logits, teacher_logits)


def h_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    pairs: ExactPairs,
    alignment: Any,
    config: GoldConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the H-KL loss of X-Token (arXiv 2605.21699): `gold` on the pairs of heavy weights.

    Args:
        student_logits: as in `gold`, like the others.
        teacher_logits: see there.
        pairs: `exact_pairs(map, threshold=0.6)`.
        alignment: see `gold`.
        config: see there.
        sample_mask: see there.
    """
    return gold(student_logits, teacher_logits, pairs, alignment, config, sample_mask=sample_mask)


def uld(
    student_logits: Tensor,
    teacher_logits: Tensor,
    alignment: Any = None,
    config: ULDConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the universal logit distillation loss of Boizard et al. (arXiv 2402.12030).

    It needs no map. With ↓ the probabilities in falling order, the shorter side filled up with 0:

        loss = mean over pairs of positions of Σ_n |p↓_n − q↓_n|

    With an alignment, p and q are the means of a chunk's probabilities on both sides. Without, the
    paper's own pairing: position i of the student with position i of the teacher, as far as both
    go; where tokenizations differ, these soon speak of different text.

    Args:
        student_logits: `[B, T_s, V_s]`, any floating type; computed in float32 under any autocast
            (in float64 if they are).
        teacher_logits: `[B, T_t, V_t]`; no gradient goes to them.
        alignment: as in `gold`; or None.
        config: see there.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where there is no pair.

    Raises:
        ValueError: as `gold`.
    """
    config = config or ULDConfig()
    if alignment is None:
        alignment = _by_position(student_logits, teacher_logits)
    with torch.autocast(student_logits.device.type, enabled=False):
        chunks = find_chunks(student_logits, teacher_logits, alignment, config, sample_mask)
        if chunks.total == 0:
            return no_chunks(student_logits)
        sides = []
        for logits, chunk, sizes in (
            (student_logits, chunks.student, chunks.student_sizes),
            (teacher_logits.detach(), chunks.teacher, chunks.teacher_sizes),
        ):
            rows, inside = rows_in_chunks(logits, chunk, chunks.total, logits.shape[-1])
            probs = torch.softmax(rows / config.temperature, -1)
            sides.append(chunk_means(probs, inside, sizes))
        width = max(side.shape[1] for side in sides)
        padded = [torch.nn.functional.pad(s, (0, width - s.shape[1])) for s in sides]
        loss = _sorted_distance(padded[0], padded[1], config.top_k or width) / chunks.total
    return checked(loss, student_logits, teacher_logits)


class _Positions:
    """Position i of one side and of the other as chunk i."""

    def __init__(self, batch: int, lengths: tuple[int, int], device: torch.device) -> None:
        shared = min(lengths)
        ids = [torch.arange(length, device=device) for length in lengths]
        both = [torch.where(i < shared, i, -1).expand(batch, -1) for i in ids]
        self.student_chunk_id, self.teacher_chunk_id = both
        self.pair_valid = torch.ones((batch, shared), dtype=torch.bool, device=device)
        self.pair_is_correct = self.pair_valid


def _by_position(student_logits: Tensor, teacher_logits: Tensor) -> _Positions:
    lengths = (student_logits.shape[1], teacher_logits.shape[1])
    return _Positions(len(student_logits), lengths, student_logits.device)


def _mean_log_probabilities(
    both: tuple[Tensor, Tensor], pairs: ExactPairs, chunks: Chunks, config: GoldConfig
) -> tuple[Tensor, Tensor]:
    """Return the chunks' means of the log-softmax on both sides, `[N, V]` each."""
    means = []
    for logits, chunk, sizes, width in (
        (both[0], chunks.student, chunks.student_sizes, pairs.widths[0]),
        (both[1], chunks.teacher, chunks.teacher_sizes, pairs.widths[1]),
    ):
        rows, inside = rows_in_chunks(logits, chunk, chunks.total, width)
        means.append(chunk_means(log_probabilities(rows, config.temperature), inside, sizes))
    dtype = work_dtype(*means)
    return means[0].to(dtype), means[1].to(dtype)


def _sorted_distance(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Return the sum of |s↓ − r↓| over the largest probabilities that both sides have."""
    length = min(student.shape[1], teacher.shape[1], top_k)
    largest = [side.topk(length, dim=1).values for side in (student, teacher)]
    return (largest[0] - largest[1]).abs().sum()
