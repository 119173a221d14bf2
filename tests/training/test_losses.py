"""The losses: NeMo-RL's own values, reference implementations, learned maps, and bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from typing import Any

import naive_losses
import numpy as np
import pytest
import torch
from conftest import SetNumber
from loss_inputs import alignment, nemo_values
from make_maps import GOOD, random_map
from naive_losses import check_gradient, value_and_gradient
from torch import Tensor

from xtok import ProjectionMap
from xtok.maps.records import RowKind
from xtok.training.losses import (
    ChunkLossConfig,
    CombineConfig,
    CSDConfig,
    ExactPairs,
    GoldConfig,
    PKLConfig,
    SameTokenizerConfig,
    combine,
    exact_pairs,
    gold,
    make_loss,
    p_kl,
    same_tokenizer_kl,
)
from xtok.training.module import ProjectionModule
from xtok.training.objective import Objective

ROWS = [[0, 0, 1, 2, 2, 2, -1], [-1, 0, 1, 1, 3, 3, -1]]
COLUMNS = [[0, 1, 1, -1, 2], [0, 0, 1, 2, -1]]
ALIGNED = alignment(ROWS, COLUMNS)
VALID = torch.as_tensor(ALIGNED.pair_valid)
IDS = (torch.tensor(ROWS), torch.tensor(COLUMNS))
PAIRS = [(0, 3), (2, 1), (5, 0), (8, 12)]


def logits(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(2, 7, 10, generator=generator, dtype=torch.float64) * 2
    teacher = torch.randn(2, 5, 13, generator=generator, dtype=torch.float64) * 2
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def dense(m: ProjectionMap) -> Tensor:
    matrix = torch.zeros(m.shape, dtype=torch.float64)
    matrix[m.student_ids.tolist(), m.teacher_ids.tolist()] = torch.from_numpy(m.weights).double()
    return matrix


def made_pairs(pairs: list[tuple[int, int]], widths: tuple[int, int]) -> ExactPairs:
    sides = [torch.tensor([pair[side] for pair in pairs]) for side in (0, 1)]
    rests = [
        torch.tensor([i for i in range(width) if i not in ids.tolist()])
        for ids, width in zip(sides, widths, strict=True)
    ]
    return ExactPairs(sides[0], sides[1], rests[0], rests[1])


# NeMo-RL's own values

CASES: dict[str, Any] = {
    "p_kl": PKLConfig(top_k=None),
    "p_kl_topk12": PKLConfig(top_k=12),
    "p_kl_reverse_t2": PKLConfig(reverse_kl=True, temperature=2),
    "p_kl_exact_only": PKLConfig(exact_token_match_only=True),
    "gold": GoldConfig(),
    "gold_reverse_t2": GoldConfig(reverse_kl=True, temperature=2),
    "gold_unc5": GoldConfig(uncommon_topk=5),
    "h_kl": GoldConfig(),
    "h_kl_t2": GoldConfig(temperature=2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_values_and_gradients_of_nemo_rl(case: str, seed: int) -> None:
    data = nemo_values(f"losses_seed{seed}")
    student = torch.from_numpy(data["student_logits"]).requires_grad_()
    teacher = torch.from_numpy(data["teacher_logits"])
    aligned = alignment(
        *(data[f"{side}_chunk_id"] for side in ("student", "teacher")),
        *(data[f"pair_{what}"] for what in ("valid", "is_correct")),
    )
    m = nemo_map(data["projection_indices"], data["projection_weights"], teacher.shape[-1])
    inputs: Any = aligned, CASES[case]
    mask = torch.from_numpy(data["sample_mask"])
    if case.startswith("p_kl"):
        loss = p_kl(student, teacher, ProjectionModule(m), *inputs, sample_mask=mask)
    else:
        pairs = exact_pairs(m) if case.startswith("gold") else exact_pairs(m, threshold=0.6)
        loss = gold(student, teacher, pairs, *inputs, sample_mask=mask)
    value, gradient = value_and_gradient(loss, student)
    assert abs(float(value) - float(data[f"{case}__loss"])) < 1e-5
    assert np.abs(gradient.numpy() - data[f"{case}__grad"]).max() < 1e-5
    assert np.abs(data[f"{case}__grad"]).max() > 0.01


def nemo_map(indices: Any, weights: Any, width: int) -> ProjectionMap:
    rows, columns = np.nonzero(indices >= 0)
    strict = (weights.max(1) == 1) & (indices[:, 1] == -1)
    return replace(
        GOOD,
        student=replace(GOOD.student, vocab_size=len(indices)),
        teacher=replace(GOOD.teacher, vocab_size=width),
        student_ids=rows.astype(np.int32),
        teacher_ids=indices[rows, columns].astype(np.int32),
        weights=weights[rows, columns],
        row_kind=np.where(strict, RowKind.EXACT, RowKind.MIXED).astype(np.uint8),
        top_k=indices.shape[1],
    )


# Reference implementations


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("reverse", [False, True])
def test_p_kl_equals_the_reference(top_k: int | None, temperature: float, reverse: bool) -> None:
    student, teacher = logits()
    m, t = random_map(10, 13), temperature
    config = PKLConfig(top_k=top_k, temperature=t, reverse_kl=reverse)
    loss = p_kl(student, teacher, ProjectionModule(m), ALIGNED, config)
    options: Any = {"top_k": top_k, "temperature": t, "reverse": reverse}
    assert_equal_losses(
        loss, naive_losses.p_kl(student, teacher, dense(m), IDS, VALID, **options), student
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_gold_equals_the_reference(reverse: bool) -> None:
    student, teacher = logits()
    config = GoldConfig(uncommon_topk=4, temperature=1.5, reverse_kl=reverse)
    loss = gold(student, teacher, made_pairs(PAIRS, (10, 13)), ALIGNED, config)
    options: Any = {"uncommon_topk": 4, "temperature": 1.5, "reverse": reverse}
    assert_equal_losses(
        loss, naive_losses.gold(student, teacher, PAIRS, IDS, VALID, **options), student
    )


def assert_equal_losses(loss: Tensor, plain: Tensor, student: Tensor) -> None:
    """Compare values and gradients."""
    actual, expected = (value_and_gradient(x, student) for x in (loss, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


# Gradients of a learned map


def test_p_kl_gradients_to_logits_and_to_a_learned_map() -> None:
    student, teacher = logits()
    module = ProjectionModule(random_map(10, 13), learnable=True).double()
    assert module.logits is not None
    kept = module.entry_weights

    def loss(student: Tensor, weights: Tensor) -> Tensor:
        module.entry_weights = lambda: weights  # type: ignore[method-assign]
        return p_kl(student, teacher, module, ALIGNED, PKLConfig(top_k=6))

    weights = kept().detach().double().requires_grad_()
    check_gradient(lambda x: loss(x, weights.detach()), student)
    check_gradient(lambda x: loss(student.detach(), x), weights, step=1e-5)


def test_blocks_do_not_change_the_gradient_of_a_learned_map(set_block: SetNumber) -> None:
    student, teacher = logits()
    module = ProjectionModule(random_map(10, 13), learnable=True)
    config = PKLConfig(top_k=6, temperature=2)
    expected = p_kl(student, teacher, module, ALIGNED, config)
    assert module.logits is not None
    (whole,) = torch.autograd.grad(expected, module.logits)
    set_block(20)
    in_blocks = p_kl(student, teacher, module, ALIGNED, config)
    torch.testing.assert_close(torch.autograd.grad(in_blocks, module.logits)[0], whole)


# Invalid alignments and masks


@pytest.mark.parametrize(
    ("student_ids", "teacher_ids", "message"),
    [
        ([[0, 2, 1]], [[0, 1]], r"student_chunk_id\[0, 2\] is 1"),
        ([[1, -1, 0]], [[0, 1]], r"student_chunk_id\[0, 2\] is 0"),
        ([[0, 1, 2]], [[2, 0]], r"teacher_chunk_id\[0, 1\] is 0"),
        ([[0, 1, 3]], [[0, 1]], r"student_chunk_id\[0, 2\] is 3"),
        ([[-2, 0, 1]], [[0, 1]], r"student_chunk_id\[0, 0\] is -2"),
        ([[0, 1]], [[0, 1]], r"student_chunk_id is \[1, 2\]"),
    ],
)
def test_bad_chunk_ids(student_ids: Any, teacher_ids: Any, message: str) -> None:
    aligned = alignment(student_ids, teacher_ids, np.ones((1, 3), bool))
    with pytest.raises(ValueError, match=message):
        p_kl(torch.zeros(1, 3, 4), torch.zeros(1, 2, 6), ProjectionModule(GOOD), aligned)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 7)])
def test_a_sample_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    student, teacher = logits()
    module = ProjectionModule(random_map(10, 13))
    message = re.escape(f"sample_mask is {list(shape)}")
    with pytest.raises(ValueError, match=message):
        p_kl(student, teacher, module, ALIGNED, sample_mask=torch.ones(shape))


# Exact pairs


def map_of(teacher_ids: list[int], weights: list[float], **fields: Any) -> ProjectionMap:
    """A map of one entry a row."""
    ids, values = np.array(teacher_ids, np.int32), np.array(weights, np.float32)
    changes: Any = {
        "student_ids": np.arange(4, dtype=np.int32),
        "teacher_ids": ids,
        "weights": values,
    }
    return replace(GOOD, **changes, **fields)


def test_gold_pairs_are_the_exact_rows() -> None:
    pairs = exact_pairs(map_of([5, 2, 5, 1], [1] * 4, row_kind=np.array([1, 2, 1, 3], np.uint8)))
    # Row 1 consists of pieces, and row 0 already uses token 5, so row 2 has no pair.
    assert pairs.student_ids.tolist() == [0, 3]
    assert pairs.teacher_ids.tolist() == [5, 1]
    assert pairs.other_student_ids.tolist() == [1, 2]
    assert pairs.other_teacher_ids.tolist() == [0, 2, 3, 4]
    assert pairs.widths == (4, 6)


def test_a_threshold_selects_the_heaviest_pair_of_each_token() -> None:
    pairs = exact_pairs(GOOD, threshold=0.6)
    assert (pairs.student_ids.tolist(), pairs.teacher_ids.tolist()) == ([0, 2], [3, 5])
    contested = map_of([5, 5, 5, 1], [0.7, 0.9, 0.9, 0.6])
    # the pair with the largest weight; of equal weights, the lowest id
    pairs = exact_pairs(contested, threshold=0.6)
    assert (pairs.student_ids.tolist(), pairs.teacher_ids.tolist()) == ([1, 3], [5, 1])
    slots = replace(contested, scale_slot=np.ones(4, np.uint8))
    assert exact_pairs(slots, threshold=0.6).student_ids.tolist() == []


# Same tokenizer, several teachers, cross-entropy


def test_same_tokenizer_kl() -> None:
    student = torch.tensor([[[0.0, 0.0, 5.0], [1.0, 2.0, 3.0]]], requires_grad=True)
    teacher = torch.tensor([[[log(3), 0.0, -9.0, 7.0], [0.0, 0.0, 0.0, 7.0]]])
    mask = torch.tensor([[1, 0]])
    config = SameTokenizerConfig(top_k=2, temperature=1)
    value, gradient = value_and_gradient(same_tokenizer_kl(student, teacher, mask, config), student)
    assert float(value) == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)
    expected = torch.tensor([[[-0.25, 0.25, 0], [0, 0, 0]]])
    torch.testing.assert_close(gradient, expected)
    reverse = replace(config, reverse_kl=True)
    reversed_kl = same_tokenizer_kl(student, teacher, mask, reverse)
    assert float(reversed_kl.detach()) == pytest.approx(
        0.5 * log(0.5 / 0.75) + 0.5 * log(2), abs=1e-6
    )
    with pytest.raises(ValueError, match=r"mask \[1, 3\] differ"):
        same_tokenizer_kl(student, teacher, torch.ones(1, 3))


def test_weights_of_several_teachers() -> None:
    both = [make_loss("alm")] * 2
    assert Objective(losses=both).weight_by_teacher == [1.0, 1.0]
    assert Objective(losses=both, teacher_weights=[0.5, 0]).weight_by_teacher == [0.5, 0]
    with pytest.raises(ValueError, match="1 teacher_weights for 2"):
        Objective(losses=both, teacher_weights=[1.0])
    for weight, expected in (
        (-1.0, "at least 0"), (float("nan"), "at least 0"),
        (float("inf"), "at least 0"), ("1", "a number"),
    ):  # fmt: skip
        given: Any = [1.0, weight]
        with pytest.raises(ValueError, match=f"weight is .*{expected}"):
            Objective(losses=both, teacher_weights=given)


def test_combining_with_cross_entropy() -> None:
    d = torch.tensor(4.0, requires_grad=True)
    c = torch.tensor(2.0, requires_grad=True)
    weighted = CombineConfig(distillation_weight=0.5, cross_entropy_weight=3)
    assert float(combine(d, c, weighted).detach()) == 8.0
    loss = combine(d, c, replace(weighted, dynamic_scaling=True))
    loss.backward()
    assert float(loss.detach()) == 4.0
    assert (d.grad, c.grad) == (torch.tensor(0.5), torch.tensor(1.0))
    nothing = combine(d * 0, c, CombineConfig(dynamic_scaling=True))
    assert float(nothing.detach()) == 2.0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (ChunkLossConfig, {"temperature": 0}, "temperature is 0"),
        (ChunkLossConfig, {"temperature": "1"}, "temperature is '1'"),
        (ChunkLossConfig, {"reverse_kl": "no"}, "reverse_kl is 'no'"),
        (PKLConfig, {"top_k": 0}, "top_k is 0"),
        (PKLConfig, {"temperature": float("nan")}, "temperature is nan"),
        (GoldConfig, {"uncommon_topk": -1}, "uncommon_topk is -1"),
        (SameTokenizerConfig, {"temperature": -1}, "temperature is -1"),
        (CombineConfig, {"distillation_weight": -1}, "distillation_weight is -1"),
        (CSDConfig, {"beta": -1}, "beta is -1"),
        (CSDConfig, {"alpha": float("nan")}, "alpha is nan"),
        (CSDConfig, {"jsd_beta": 1}, "jsd_beta is 1,"),
        (CSDConfig, {"jsd_beta": "a"}, "jsd_beta is 'a'"),
        (CSDConfig, {"jsd_beta": True}, "jsd_beta is True"),
        (CSDConfig, {"jsd_beta": 0.5, "reverse_kl": True}, "reverse_kl"),
    ],
)
def test_invalid_configurations_are_errors(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
