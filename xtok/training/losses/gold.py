"""Losses on both vocabularies as they are: gold and H-KL, on exact pairs and sorted values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.training.losses.chunk_tokens import both_tokens
from xtok.training.losses.chunks import Chunks, number_chunks, require_fit, require_type
from xtok.training.losses.config import GoldConfig
from xtok.training.losses.in_chunks import Chunked, chunk_part, mean_over, to_values
from xtok.training.losses.logits import AnyLogits, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan, one_pass, sides_of
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
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
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
    kind = config.exact_token_match_only, False
    chunks = number_chunks(alignment, kind, sample_mask, student_logits.device)
    return one_pass(
        student_logits, [plan_gold(student_logits, teacher_logits, pairs, chunks, config)]
    )[0]


def plan_gold(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    pairs: ExactPairs,
    chunks: Chunks,
    config: GoldConfig,
) -> Plan:
    """Return what `gold` compares, chunk by chunk."""
    require_type(pairs, ExactPairs, "exact_pairs(projection)")
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    (width, of_teacher), dtype = pairs.widths, work_dtype(student, teacher)
    require_fit(chunks, (student, teacher), pairs.widths)
    if not chunks.total:
        return Plan((), 0, dtype)
    ours, theirs = both_tokens(chunks)

    def compare(block: LogitBlock, inside: Chunked) -> tuple[Tensor, Tensor]:
        log_p = block.log_probabilities(width, config.temperature)
        log_q = log_probabilities(inside.teacher_logits[:, :of_teacher], config.temperature)
        log_r = mean_over(inside.theirs, log_q)
        with torch.enable_grad():
            log_s = mean_over(inside.ours, log_p).requires_grad_()
            lost = _divergence(log_s, log_r, pairs, config)
            (to_means,) = torch.autograd.grad(lost, log_s)
        back = to_values(inside.ours, to_means)
        p = block.probabilities(width, config.temperature)
        return lost.detach(), back.addcmul_(p, back.sum(1, keepdim=True), value=-1)

    part = chunk_part(ours, theirs, compare, teacher, 2 * of_teacher)
    sides = sides_of((student, teacher), (ours.positions, theirs.positions), pairs.widths)
    return Plan([part], chunks.total, dtype, config.temperature, sides)


def _divergence(log_s: Tensor, log_r: Tensor, pairs: ExactPairs, config: GoldConfig) -> Tensor:
    """Return the sum of losses of c chunks with these mean log-probabilities, `[c, V]`."""
    towards, away = log_r[:, pairs.teacher_ids], log_s[:, pairs.student_ids]
    if config.reverse_kl:
        towards, away = away, towards
    others = log_s[:, pairs.other_student_ids].exp(), log_r[:, pairs.other_teacher_ids].exp()
    length = min(others[0].shape[1], others[1].shape[1], config.uncommon_topk)
    largest = [side.topk(length, dim=1).values for side in others]
    return (towards.exp() * (towards - away)).sum() + (largest[0] - largest[1]).abs().sum()
