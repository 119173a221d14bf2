"""Losses on both vocabularies as they are: gold and H-KL on exact pairs, ULD on sorted values."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    Chunks,
    chunk_means,
    divergence,
    log_probabilities,
    loss_over_chunks,
)
from xtok.training.losses.config import GoldConfig, ULDConfig
from xtok.training.losses.pairs import ExactPairs


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

    `pairs` are `exact_pairs(map)`, on the logits' device; logits beyond their widths are ignored.
    The other arguments, the result and the errors are those of `p_kl`.
    """
    config = config or GoldConfig()
    transform = partial(log_probabilities, temperature=config.temperature)

    def compare(chunks: Chunks) -> Tensor:
        log_s, log_r = chunk_means(chunks, student_logits, teacher_logits, pairs.widths, transform)
        loss = divergence(
            log_s[:, pairs.student_ids], log_r[:, pairs.teacher_ids], reverse=config.reverse_kl
        )
        loss = loss + _sorted_distance(
            log_s[:, pairs.other_student_ids].exp(),
            log_r[:, pairs.other_teacher_ids].exp(),
            config.uncommon_topk,
        )
        return loss * (config.temperature**2 / chunks.total)

    return loss_over_chunks(
        compare, student_logits, teacher_logits, alignment, config, sample_mask, pairs.widths
    )


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

    `pairs` are `exact_pairs(map, threshold=0.6)`; the rest is as in `gold`.
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
    go; where tokenizations differ, these soon come from different text.

    The arguments, the result and the errors are those of `p_kl`.
    """
    config = config or ULDConfig()
    if alignment is None:
        alignment = _by_position(student_logits, teacher_logits)
    widths = (student_logits.shape[-1], teacher_logits.shape[-1])

    def transform(logits: Tensor) -> Tensor:
        return torch.softmax(logits / config.temperature, -1)

    def compare(chunks: Chunks) -> Tensor:
        means = chunk_means(chunks, student_logits, teacher_logits, widths, transform)
        width = max(widths)
        p, q = (torch.nn.functional.pad(mean, (0, width - mean.shape[1])) for mean in means)
        return _sorted_distance(p, q, config.top_k or width) / chunks.total

    return loss_over_chunks(compare, student_logits, teacher_logits, alignment, config, sample_mask)


def _by_position(student_logits: Tensor, teacher_logits: Tensor) -> SimpleNamespace:
    """Return an alignment whose chunk i is position i of both sides."""
    batch, device = len(student_logits), student_logits.device
    lengths = student_logits.shape[1], teacher_logits.shape[1]
    positions = [torch.arange(length, device=device) for length in lengths]
    ids = [torch.where(i < min(lengths), i, -1).expand(batch, -1) for i in positions]
    valid = torch.ones((batch, min(lengths)), dtype=torch.bool, device=device)
    return SimpleNamespace(
        student_chunk_id=ids[0], teacher_chunk_id=ids[1], pair_valid=valid, pair_is_correct=valid
    )


def _sorted_distance(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Return the sum of |s↓ − r↓| over the largest probabilities that both sides have."""
    length = min(student.shape[1], teacher.shape[1], top_k)
    largest = [side.topk(length, dim=1).values for side in (student, teacher)]
    return (largest[0] - largest[1]).abs().sum()
