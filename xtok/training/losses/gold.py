"""Losses on both vocabularies as they are: gold and H-KL, on exact pairs and sorted values."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from xtok.training.losses.chunks import (
    Chunks,
    chunk_means,
    divergence,
    log_probabilities,
    loss_over_chunks,
)
from xtok.training.losses.config import GoldConfig
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
    With the pairs of heavy weights, `exact_pairs(map, threshold=0.6)`, this is the H-KL loss of
    X-Token (arXiv 2605.21699).
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


def _sorted_distance(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Return the sum of |s↓ − r↓| over the largest probabilities that both sides have."""
    length = min(student.shape[1], teacher.shape[1], top_k)
    largest = [side.topk(length, dim=1).values for side in (student, teacher)]
    return (largest[0] - largest[1]).abs().sum()
