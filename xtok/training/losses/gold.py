"""Gold and H-KL: compare exact pairs by KL, and remaining tokens by sorted probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.training.losses.chunks import BothLogits, ChunkRows, chunk_loss, chunk_part, require_type
from xtok.training.losses.config import GoldConfig
from xtok.training.losses.logits import AnyLogits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan
from xtok.training.rows import to_device


class ExactPairs(NamedTuple):
    """P pairs of tokens, and the remaining tokens of each vocabulary, as int64 tensors."""

    student_ids: Tensor  # [P], ascending
    teacher_ids: Tensor  # [P], the paired teacher tokens; each id at most once
    other_student_ids: Tensor  # ascending
    other_teacher_ids: Tensor  # ascending

    def to(self, device: torch.device | str) -> ExactPairs:
        """Return the pairs on a device."""
        return to_device(self, device)

    @property
    def widths(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        paired = len(self.student_ids)
        return paired + len(self.other_student_ids), paired + len(self.other_teacher_ids)


def exact_pairs(projection: ProjectionMap, *, threshold: float | None = None) -> ExactPairs:
    """Return the pairs that `gold` compares, like NeMo-RL's `build_exact_token_map`.

    Without a threshold, a row of the map forms a pair if the row has a single entry, with weight 1,
    and both tokens have equal bytes or the same role. If several rows have the same teacher token,
    only the row with the lowest student id forms a pair.

    With a threshold (0.6 for H-KL), a row forms a pair if its largest weight, excluding scale
    slots, is at least the threshold. If several rows have the same teacher token, only the row with
    the largest weight forms a pair. Ties use the lowest student id.
    """
    first = np.flatnonzero(np.diff(projection.student_ids, prepend=-1))
    student_ids, teacher_ids = projection.student_ids[first], projection.teacher_ids[first]
    weights = projection.weights[first]
    if threshold is None:
        kinds = projection.row_kind[student_ids]
        is_pair = (projection.entries_per_row[student_ids] == 1) & (weights == 1)
        is_pair &= np.isin(kinds, [RowKind.EXACT, RowKind.ROLE])
        order = np.lexsort((student_ids, teacher_ids))
    else:
        is_pair = (weights >= np.float32(threshold)) & ~projection.is_slot[first]
        order = np.lexsort((student_ids, -weights, teacher_ids))
    order = order[is_pair[order]]
    is_first = np.diff(teacher_ids[order], prepend=-1) != 0  # first row of each teacher token
    order = np.sort(order[is_first])
    sides = [side_ids[order].astype(np.int64) for side_ids in (student_ids, teacher_ids)]
    rests = [np.delete(np.arange(n), ids) for ids, n in zip(sides, projection.shape, strict=True)]
    return ExactPairs(*map(torch.from_numpy, (*sides, *rests)))


def gold(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    pairs: ExactPairs,
    alignment: Any,
    config: GoldConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return NeMo-RL's gold loss: KL on exact pairs, and L1 of sorted probabilities elsewhere.

    The loss combines GOLD (TRL's General Online Logit Distillation) and ULD (Boizard et al., arXiv
    2402.12030). Let log s and log r be the student's and the teacher's log-softmax at temperature
    τ, averaged over a chunk's positions. P is the set of pairs. s↓ and r↓ are the `uncommon_topk`
    largest probabilities of tokens without a pair, in descending order. Then

        loss = τ² · mean over chunks of
               Σ_{(i,j)∈P} r_j (log r_j − log s_i)  +  Σ_n |s↓_n − r↓_n|

    `reverse_kl` changes the first sum to Σ s_i (log s_i − log r_j). The loss may be below 0,
    because the probabilities of the pairs do not sum to 1. `pairs` is `exact_pairs(map)`, on the
    logits' device. With pairs from `exact_pairs(map, threshold=0.6)`, this is the H-KL loss of
    X-Token (arXiv 2605.21699). See `p_kl` for the other arguments.
    """
    plan, logits = partial(plan_gold, pairs=pairs), (student_logits, teacher_logits)
    return chunk_loss(plan, logits, alignment, config or GoldConfig(), sample_mask)


def plan_gold(sides: BothLogits, pairs: ExactPairs, config: GoldConfig) -> Plan:
    """Return the plan with which `one_pass` computes `gold`."""
    require_type(pairs, ExactPairs, "exact_pairs(projection)")
    width, teacher_width = pairs.widths
    student, teacher = sides.tokens(pairs.widths)

    def compare(block: LogitBlock, chunks: ChunkRows) -> tuple[Tensor, Tensor]:
        log_p = block.log_probabilities(width, config.temperature)
        log_q = log_probabilities(chunks.teacher_logits[:, :teacher_width], config.temperature)
        log_r = chunks.teacher.means(log_q)
        with torch.enable_grad():
            log_s = chunks.student.means(log_p).requires_grad_()
            loss = _divergence(log_s, log_r, pairs, config)
            (mean_grad,) = torch.autograd.grad(loss, log_s)
        grad = chunks.student.value_gradient(mean_grad)
        p = block.probabilities(width, config.temperature)
        return loss.detach(), grad.addcmul_(p, grad.sum(1, keepdim=True), value=-1)

    part = chunk_part(student, teacher, compare, sides.teacher, 2 * teacher_width)
    return Plan([part], sides.chunks.total, sides.dtype, config.temperature)


def _divergence(log_s: Tensor, log_r: Tensor, pairs: ExactPairs, config: GoldConfig) -> Tensor:
    towards, away = log_r[:, pairs.teacher_ids], log_s[:, pairs.student_ids]
    if config.reverse_kl:
        towards, away = away, towards
    others = log_s[:, pairs.other_student_ids].exp(), log_r[:, pairs.other_teacher_ids].exp()
    length = min(others[0].shape[1], others[1].shape[1], config.uncommon_topk)
    largest = [p.topk(length, dim=1).values for p in others]
    return (towards.exp() * (towards - away)).sum() + (largest[0] - largest[1]).abs().sum()
