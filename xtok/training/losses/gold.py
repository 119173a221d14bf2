"""Losses on both vocabularies as they are: gold and H-KL, on exact pairs and sorted values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.training.losses.chunks import EPSILON, Chunks, divergence, loss_over_chunks, require_type
from xtok.training.losses.config import GoldConfig
from xtok.training.losses.logits import log_probabilities, require_whole
from xtok.training.sparse import work_dtype


class ExactPairs(NamedTuple):
    """Both vocabularies, divided into P pairs and the rest; int64 each."""

    student_ids: Tensor  # [P], rising
    teacher_ids: Tensor  # [P], the counterparts; each teacher id at most once
    other_student_ids: Tensor  # rising
    other_teacher_ids: Tensor  # rising

    def to(self, device: torch.device | str) -> ExactPairs:
        """Return the pairs on a device."""
        return ExactPairs(*(ids.to(device) for ids in self))

    @property
    def widths(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        paired = len(self.student_ids)
        return paired + len(self.other_student_ids), paired + len(self.other_teacher_ids)


def exact_pairs(projection: ProjectionMap, *, threshold: float | None = None) -> ExactPairs:
    """Return the pairs that `gold` compares one to one: strict, or by weight (H-KL).

    Strict: the rows of one entry, of weight 1, of equal bytes or of one role; if several students
    share a teacher token, the lowest id wins. With a threshold: the rows whose largest weight, a
    scale slot aside, reaches it; the heaviest student wins, then the lowest id. These are the rules
    of NeMo-RL's `build_exact_token_map`.

    Args:
        projection: a map; of a learnable `ProjectionModule`, its `to_map()`.
        threshold: 0.6 in NeMo-RL's H-KL; None is the strict rule.
    """
    first = np.flatnonzero(np.diff(projection.student_ids, prepend=-1))
    rows, columns = projection.student_ids[first], projection.teacher_ids[first]
    weights = projection.weights[first]
    if threshold is None:
        kinds = projection.row_kind[rows]
        is_pair = (projection.entries_per_row[rows] == 1) & (weights == 1)
        is_pair &= np.isin(kinds, [RowKind.EXACT, RowKind.ROLE])
        order = np.lexsort((rows, columns))
    else:
        is_pair = (weights >= np.float32(threshold)) & ~projection.is_slot[first]
        order = np.lexsort((rows, -weights, columns))
    order = order[is_pair[order]]
    order = np.sort(order[np.flatnonzero(np.diff(columns[order], prepend=-1))])  # first per column
    sides = [torch.from_numpy(side[order].astype(np.int64)) for side in (rows, columns)]
    rests = []
    for ids, width in zip(sides, projection.shape, strict=True):
        rest = torch.ones(width, dtype=torch.bool)
        rest[ids] = False
        rests.append(rest.nonzero().flatten())
    return ExactPairs(sides[0], sides[1], rests[0], rests[1])


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

    Reversed, the first sum is Σ s_i (log s_i − log r_j). The pairs alone are not a distribution, so
    the first sum, and with it the loss, may be below 0.

    `pairs` are `exact_pairs(map)`, on the logits' device; logits beyond their widths are ignored.
    With the pairs of heavy weights, `exact_pairs(map, threshold=0.6)`, this is the H-KL loss of
    X-Token (arXiv 2605.21699).
    The other arguments, the result and the errors are those of `p_kl`.
    """
    config = config or GoldConfig()
    require_whole("gold", student_logits, teacher_logits)
    require_type(pairs, ExactPairs, "exact_pairs(projection)")

    def compare(chunks: Chunks) -> Tensor:
        means = [
            _mean_log_probabilities(*side, chunks.total, config.temperature)
            for side in (
                (student_logits, chunks.student, chunks.student_sizes, pairs.widths[0]),
                (teacher_logits.detach(), chunks.teacher, chunks.teacher_sizes, pairs.widths[1]),
            )
        ]
        log_s, log_r = (mean.to(work_dtype(*means)) for mean in means)
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


def _mean_log_probabilities(
    logits: Tensor, chunk: Tensor, sizes: Tensor, width: int, total: int, temperature: float
) -> Tensor:
    """Return the means over the positions of each chunk, `[N, width]`."""
    inside = chunk < total
    rows = logits[inside][:, :width]
    log_probs = log_probabilities(rows.to(work_dtype(logits)), temperature)
    sums = torch.zeros((total, width), dtype=log_probs.dtype, device=logits.device)
    return sums.index_add(0, chunk[inside], log_probs) / (sizes[:, None] + EPSILON)


def _sorted_distance(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Return the sum of |s↓ − r↓| over the largest probabilities that both sides have."""
    length = min(student.shape[1], teacher.shape[1], top_k)
    largest = [side.topk(length, dim=1).values for side in (student, teacher)]
    return (largest[0] - largest[1]).abs().sum()
