"""Exact pairs of a map: the tokens of both vocabularies that count as the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xtok.maps.projection_map import ProjectionMap, RowKind


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
