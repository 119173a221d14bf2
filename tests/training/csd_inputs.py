"""Chunks of every kind with random logits and targets, as inputs of CSD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from loss_inputs import alignment
from make_maps import vocabulary
from naive_losses import Spelled
from torch import Tensor

from xtok.alignment.aligner import ShiftedAlignment
from xtok.maps.spellings import SpellingMap
from xtok.training.losses import spelling_index

# Shared tokens: the student's 0 to 3 and the teacher's 0, 2, 1 and 5; 9 is omitted.
STUDENT: Spelled = [[0], [2], [1], [5], [0, 2], [0, 1], [0, 3], [1, 3, 3], [1, 3, 2], []]
# The teacher's 3 has a single completion, (0, 0); 4 and 6 come after 2.
TEACHER: Spelled = [[0], [2], [1], [0, 0], [2, 3], [3], [2, 9], []]
BOTH = STUDENT, TEACHER
V_S, V_T = len(STUDENT), len(TEACHER)


def spelling_map(student: Spelled, teacher: Spelled) -> SpellingMap:
    flat = [
        np.array([p for pieces in spelled for p in pieces], np.int32)
        for spelled in (student, teacher)
    ]
    counts = [
        np.array([len(pieces) for pieces in spelled], np.int32) for spelled in (student, teacher)
    ]
    return SpellingMap(
        student=vocabulary(len(student)), teacher=vocabulary(len(teacher)),
        student_pieces=flat[0], student_counts=counts[0],
        teacher_pieces=flat[1], teacher_counts=counts[1],
    )  # fmt: skip


INDEX = spelling_index(spelling_map(*BOTH))
Chunk = tuple[list[int], list[int]]
# 1:1; 1:2 with the prefix 0; 2:1 with the prefix 2; 2:2; 1:2 with a prefix that has a single
# completion; 1:3; 1:2 with an unknown prefix; 1:1 without sharing; 3:1 with a prefix of two tokens.
CHUNKS: list[Chunk] = [
    ([1], [2]), ([4], [0, 2]), ([2, 3], [4]), ([5, 6], [3, 3]), ([7], [1, 3, 3]), ([0], [0]),
    ([0, 0], [3]), ([4], [7, 2]), ([9], [7]), ([1, 1, 1], [4]),
]  # fmt: skip


def csd_batch(
    rows: Sequence[Sequence[Chunk]], seed: int = 0, wider: int = 0
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], ShiftedAlignment[Tensor]]:
    """Return the student's logits, the teacher's logits, the targets and the alignment of rows.

    Each row is a list of chunks. It is padded by at least one position.
    """
    targets, ids = [], []
    for side in (0, 1):
        length = 1 + max((sum(len(c[side]) for c in row) for row in rows), default=0)
        of = [[-1] * length for _ in rows]
        to = [[-100] * length for _ in rows]
        for number, row in enumerate(rows):
            flat = [(k, token) for k, chunk in enumerate(row, 1) for token in chunk[side]]
            for index, (k, token) in enumerate(flat):
                of[number][index], to[number][index] = k, token
        targets.append(torch.tensor(to))
        ids.append(torch.tensor(of))
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        2 * torch.randn((*of.shape, v + wider), generator=generator, dtype=torch.float64)
        for of, v in zip(ids, (V_S, V_T), strict=True)
    )
    valid = torch.zeros((len(rows), 2 + max(map(len, rows)))).bool()
    for number, row in enumerate(rows):
        valid[number, 1 : 1 + len(row)] = True
    return (
        student.requires_grad_(),
        teacher,
        (targets[0], targets[1]),
        alignment(ids[0], ids[1], valid),
    )


ROWS = [CHUNKS, [], [([3], [5]), ([6], [0, 3])]]
T_S, T_T = (side.shape[1] for side in csd_batch(ROWS)[2])
OPTIONS: list[dict[str, Any]] = [
    {}, {"reverse_kl": True}, {"jsd_beta": 0.3}, {"beta": 0.25, "temperature": 2.5},
    {"alpha": 0.5, "beta": 2.0}, {"alpha": 1.0, "reverse_kl": True},
    {"alpha": 0.1, "jsd_beta": 0.5, "temperature": 2.0},
]  # fmt: skip
