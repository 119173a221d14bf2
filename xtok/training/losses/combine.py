"""Same-tokenizer teachers, several teachers, and the sum with the cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    divergence,
    largest_columns,
    log_probabilities,
    no_chunks,
    require_finite,
)
from xtok.training.losses.config import CombineConfig, SameTokenizerConfig
from xtok.training.sparse import work_dtype


def same_tokenizer_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    config: SameTokenizerConfig | None = None,
) -> Tensor:
    """Return the KL on k tokens, position by position, to a teacher of the same tokenizer.

    K are the k tokens with the largest maximum teacher logit in the microbatch; both sides' softmax
    at temperature τ is taken within K (Hinton et al., arXiv 1503.02531; the selection is that of
    NeMo-RL's teachers without a map):

        loss = τ² · mean over positions of Σ_{j∈K} r_j (log r_j − log s_j)

    Args:
        student_logits: `[B, T, V]`; computed in float32 under any autocast (float64 if they are).
        teacher_logits: `[B, T, V]`; columns beyond the narrower side's width are ignored.
        mask: `[B, T]`, 0 where a position does not count: padding, and the last one, which
            predicts nothing.
        config: the options; the defaults if None.

    Returns:
        A scalar; 0 with a gradient of zeros where no position counts.

    Raises:
        ValueError: for shapes that do not fit, and logits of NaN or +∞.
    """
    config = config or SameTokenizerConfig()
    if not student_logits.shape[:-1] == teacher_logits.shape[:-1] == mask.shape:
        raise ValueError(
            f"student's logits {list(student_logits.shape)}, teacher's "
            f"{list(teacher_logits.shape)} and mask {list(mask.shape)} do not fit"
        )
    inside = mask != 0
    if not bool(inside.any()):
        return no_chunks(student_logits)
    with torch.autocast(student_logits.device.type, enabled=False):
        width = min(student_logits.shape[-1], teacher_logits.shape[-1])
        teacher = teacher_logits.detach()[..., :width]
        columns = largest_columns(teacher, config.top_k)
        dtype = work_dtype(student_logits, teacher_logits)
        log_s, log_r = (
            log_probabilities(
                logits[inside].index_select(-1, columns).to(dtype), config.temperature
            )
            for logits in (student_logits, teacher)
        )
        loss = divergence(log_s, log_r, reverse=config.reverse_kl)
        loss = loss * (config.temperature**2 / len(log_r))
    return require_finite(loss, student_logits, teacher_logits)


def select_teacher(
    teacher_logits: Sequence[Tensor], teacher_labels: Sequence[Tensor], *, per_token: bool = False
) -> int:
    """Return the index of the teacher that finds the batch's text likeliest, the first of equals.

    All of them read the same text, so their total −log p is compared. A mean over tokens, which
    NeMo-RL compares, favours the tokenizer with the shorter tokens.

    Args:
        teacher_logits: `[B, T, V]` each.
        teacher_labels: int64 `[B, T]` each, the ids that the positions predict; -100 where a
            position does not count.
        per_token: compare the mean over tokens.
    """
    scores = []
    with torch.no_grad():
        for logits, labels in zip(teacher_logits, teacher_labels, strict=True):
            inside = labels >= 0
            rows = logits[inside].to(work_dtype(logits))
            reduction = "mean" if per_token else "sum"
            score = torch.nn.functional.cross_entropy(rows, labels[inside], reduction=reduction)
            scores.append(float(score))
    return min(range(len(scores)), key=scores.__getitem__)


def sum_teachers(losses: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return Σ weight · loss over the teachers; each weight is 1 if None.

    Raises:
        ValueError: for weights that do not fit.
    """
    total = losses[0] * 0
    for loss, weight in zip(losses, _weights(weights, len(losses)), strict=True):
        total = total + loss * weight
    return total


def combine(
    distillation: Tensor,
    cross_entropy: Tensor,
    config: CombineConfig | None = None,
    *,
    whole: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the sum of a distillation loss d and the student's own cross-entropy c.

    loss = w_d · d + w_c · c, or, with dynamic scaling (X-Token, arXiv 2605.21699, eq. 7),

        loss = sg(|c| / |d|) · d + c

    where sg lets no gradient through, and the factor is 1 where d is 0.

    Args:
        distillation: d.
        cross_entropy: c.
        config: the weights; the defaults if None.
        whole: d and c of the whole step, for the factor, where these are a batch's shares of them.
    """
    config = config or CombineConfig()
    if not config.dynamic_scaling:
        weighted = config.distillation_weight * distillation
        return weighted + config.cross_entropy_weight * cross_entropy
    d, c = (part.detach().abs() for part in whole or (distillation, cross_entropy))
    return torch.where(d > 0, c / d.clamp(min=1e-30), 1.0) * distillation + cross_entropy


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count or any(weight < 0 for weight in shares):
        raise ValueError(f"{shares} are not {count} weights of 0 or above, one per teacher")
    return shares
