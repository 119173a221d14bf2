"""teacher_to_student_kl beside its formula; a server's top-k; bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from make import alignment, vocabulary
from naive_losses import same_in_bfloat16, value_and_gradient
from torch import Tensor

from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.training.losses import ChunkLossConfig, teacher_to_student_kl
from xtok.training.module import ProjectionModule

WEIGHTS = np.zeros((6, 7), np.float32)  # the teacher's tokens to the student's
WEIGHTS[0, 0] = WEIGHTS[2, 6] = WEIGHTS[4, 4] = 1
WEIGHTS[1, [1, 2]] = 0.75, 0.25
WEIGHTS[3, [0, 3]] = 0.5  # row 5 is empty: its mass has no counterpart
ALIGNED = alignment(
    [[0, 1, 1, 2, -1], [1, 1, 2, 3, 3]], [[0, 1, 2, 2, 2, -1], [1, 2, 2, 3, -1, -1]]
)
# Row 0, chunk 0: position 0 may predict the middle of a chunk. The others' first positions:
PLACES = [(0, 1, 0, 1), (0, 3, 0, 2), (1, 0, 1, 0), (1, 2, 1, 1), (1, 3, 1, 3)]


def module_of(weights: np.ndarray[Any, np.dtype[np.float32]]) -> ProjectionModule:
    rows, columns = np.nonzero(weights)
    kinds = np.where(weights.any(1), RowKind.COUNTED, RowKind.EMPTY).astype(np.uint8)
    values = weights[rows, columns]
    order = np.lexsort((columns, -values, rows))
    return ProjectionModule(
        ProjectionMap(
            student=vocabulary(weights.shape[0]),
            teacher=vocabulary(weights.shape[1]),
            student_ids=rows[order].astype(np.int32),
            teacher_ids=columns[order].astype(np.int32),
            weights=values[order],
            row_kind=kinds,
            scale_slot=None,
            method="estimate",
            top_k=2,
        )
    )


def logits(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The student's logits, one column wider than the map, and the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn((2, 5, 8), dtype=torch.float64, generator=generator)
    return student, torch.randn((2, 6, 6), dtype=torch.float64, generator=generator)


def expected(student: Tensor, r: Tensor, temperature: float = 1.0) -> Tensor:
    """The loss from the teacher's probabilities `[B, T_t, 6]`, position by position."""
    terms = []
    for row, i, other, j in PLACES:
        q = r[other, j] @ torch.from_numpy(WEIGHTS).double()
        m, log_p = q.sum(), torch.log_softmax(student[row, i, :7] / temperature, -1)
        inside = q > 0
        terms.append((q[inside] * ((q / m).log() - log_p)[inside]).sum())
    return torch.stack(terms).mean() * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_it_is_its_formula(temperature: float) -> None:
    student, teacher = logits()
    student.requires_grad_()
    config = ChunkLossConfig(temperature=temperature)
    loss = teacher_to_student_kl(student, teacher, module_of(WEIGHTS), ALIGNED, config)
    plain = expected(student, torch.softmax(teacher / temperature, -1), temperature)
    torch.testing.assert_close(loss, plain)
    (ours,), (theirs,) = (torch.autograd.grad(3 * x, student) for x in (loss, plain))
    torch.testing.assert_close(ours, theirs)


def test_a_servers_top_k_in_any_order_and_padded() -> None:
    student, teacher = logits(1)
    log_r = torch.log_softmax(teacher, -1)
    best = log_r.topk(3)
    kept = torch.zeros_like(log_r).scatter(-1, best.indices, best.values.exp())
    module, plain = module_of(WEIGHTS), expected(student, kept)
    for order in ([0, 1, 2], [2, 0, 1]):
        ids, logprobs = best.indices[..., order], best.values[..., order]
        padding = torch.full((2, 6, 1), -1), torch.full((2, 6, 1), float("nan")).double()
        loss = teacher_to_student_kl(
            student, None, module, ALIGNED,
            top_ids=torch.cat([ids, padding[0]], -1),
            top_logprobs=torch.cat([logprobs, padding[1]], -1),
        )  # fmt: skip
        torch.testing.assert_close(loss, plain)
    everything = torch.arange(6).expand(2, 6, 6)
    whole = teacher_to_student_kl(
        student, None, module, ALIGNED, top_ids=everything, top_logprobs=log_r
    )
    torch.testing.assert_close(whole, teacher_to_student_kl(student, teacher, module, ALIGNED))


def test_masked_tokens_have_no_gradient() -> None:
    student, teacher = logits(3)
    student[..., [1, 4]] = -torch.inf
    student.requires_grad_()
    loss = teacher_to_student_kl(student, teacher, module_of(WEIGHTS), ALIGNED)
    value, gradient = value_and_gradient(loss, student)
    assert not gradient[..., [1, 4]].any()
    assert bool(torch.isfinite(value) & gradient.any())


def test_in_bfloat16() -> None:
    student, teacher = (side.bfloat16() for side in logits(2))
    student.requires_grad_()
    loss = teacher_to_student_kl(student, teacher, module_of(WEIGHTS), ALIGNED)
    exact = student.detach().double().requires_grad_()
    plain = expected(exact, torch.softmax(teacher.double(), -1))
    same_in_bfloat16(loss, student, plain, exact, 8e-3)  # rounded twice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_ids": [[[0, 6]]]}, "top_ids have 6, which is not in 0..5, nor -1"),
        ({"top_ids": [[[2, 2]]]}, "top_ids have 2 twice at one position"),
        ({"top_logprobs": [[[-0.1, -0.1]]]}, r"top_logprobs sum to a probability of 1\.81"),
        ({"top_logprobs": [[[-0.1, float("nan")]]]}, "top_logprobs are NaN"),
        ({"top_ids": [[[0, 1, 2]]]}, "top_ids and top_logprobs of the same shape"),
        ({"top_ids": None}, "give teacher_logits, or top_ids and top_logprobs"),
        ({"config": ChunkLossConfig(temperature=2)}, "top_logprobs have temperature 1"),
        ({"config": ChunkLossConfig(reverse_kl=True)}, "has no reverse KL"),
    ],
)
def test_bad_top_k(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"top_ids": [[[0, 1]]], "top_logprobs": [[[-1.0, -2.0]]]}
    given: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in (good | change).items()
    }
    aligned = alignment([[1]], [[1]])
    with pytest.raises(ValueError, match=message):
        teacher_to_student_kl(torch.zeros(1, 1, 7), None, module_of(WEIGHTS), aligned, **given)


def test_bad_maps() -> None:
    student, teacher = logits()
    learnable = ProjectionModule(module_of(WEIGHTS).map, learnable=True)
    with pytest.raises(ValueError, match="no gradient for a learnable map"):
        teacher_to_student_kl(student, teacher, learnable, ALIGNED)
    wrong_way = module_of(WEIGHTS.T / WEIGHTS.sum(0).clip(1e-9)[:, None])
    with pytest.raises(XtokError, match="teacher's logits"):
        teacher_to_student_kl(student, teacher, wrong_way, ALIGNED)
