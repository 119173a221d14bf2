"""The contract of all losses: empty, extreme, invalid, padded and rounded inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import csd_inputs
import numpy as np
import pytest
import torch
from conftest import SetNumber
from csd_inputs import V_S, V_T, csd_batch
from loss_inputs import event_index_of
from make_maps import random_map
from naive_losses import check_gradient, value_and_gradient
from torch import Tensor

from xtok import XtokError
from xtok.alignment.aligner import ShiftedAlignment
from xtok.loss_names import LOSS_INFO, LossName
from xtok.maps.records import RowKind
from xtok.training import losses
from xtok.training.batches import SideBatch, StoredTopK
from xtok.training.losses import HiddenLogits
from xtok.training.losses.registry import LOSSES, make_loss
from xtok.training.module import ProjectionModule

pytestmark = pytest.mark.filterwarnings("ignore:this map is not made for P-KL")

OPTIONS: dict[LossName, list[dict[str, Any]]] = {
    "p-kl": [{}, {"reverse_kl": True, "temperature": 2.0}, {"top_k": 4}],
    "event-kl": [{}, {"reverse_kl": True, "temperature": 2.5}],
    "csd": csd_inputs.OPTIONS,
    "alm": [
        {"temperature": t, "reverse_kl": reverse}
        for t in (0.01, 1.0, 2.0, 1e4) for reverse in (False, True)
    ],
    "gold": [{}, {"reverse_kl": True, "temperature": 2.0}, {"uncommon_topk": 2}],
    "h-kl": [{}, {"reverse_kl": True}],
    "same-tokenizer": [{}, {"reverse_kl": True, "temperature": 2.0}, {"top_k": 4}],
    "topk-kl": [{}],
}  # fmt: skip
CASES = [(name, options) for name in LOSSES for options in OPTIONS[name]]
WITH_MAP = [name for name, spec in LOSSES.items() if spec.map]
WITH_TARGETS = ["csd", "alm"]
each_case = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name} {options}" for name, options in CASES]
)

_, _, TARGETS, ALIGNED = csd_batch(csd_inputs.ROWS)  # row 1 has no chunk
INSIDE = torch.as_tensor(ALIGNED.student_chunk_id) >= 0
COMPARED = (2, 1)  # the first position of a chunk, on both sides, and of a valid stored row


def projection() -> ProjectionModule:
    """Return a map with one exact row, and six pairs above the threshold of H-KL."""
    m = random_map(V_S, V_T, seed=1)
    kinds = np.where(m.entries_per_row == 1, RowKind.EXACT, RowKind.MIXED)
    return ProjectionModule(replace(m, row_kind=kinds.astype(np.uint8)))


MAPS = {
    None: None,
    "map": projection(),
    "events": event_index_of(V_S, V_T),
    "spellings": csd_inputs.INDEX,
}


def stored_rows() -> StoredTopK:
    """Return three candidates for each token that a position in a chunk predicts."""
    generator = torch.Generator().manual_seed(7)
    best = torch.randn(*INSIDE.shape, V_S, generator=generator).log_softmax(-1).topk(3)
    rest = torch.log1p(-best.values.exp().sum(-1))
    return StoredTopK(
        top_ids=best.indices, top_logprobs=best.values, rest_logprob=rest, valid=INSIDE.roll(1, 1)
    )


STORED = stored_rows()


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    student, teacher, _, _ = csd_batch(csd_inputs.ROWS)
    return student.detach().to(dtype).requires_grad_(), teacher.to(dtype)


def mean(
    name: LossName, options: dict[str, Any], student: Any, teacher: Any,
    aligned: ShiftedAlignment[Tensor] = ALIGNED, targets: tuple[Tensor, Tensor] = TARGETS,
    stored: StoredTopK = STORED,
) -> Tensor:  # fmt: skip
    """Return the mean of a loss over the batch, for these inputs in place of the usual ones."""
    spec = LOSSES[name]
    config = spec.config(**options) if spec.config else None
    loss = make_loss(name, map=MAPS[LOSS_INFO[name].map], config=config)
    side: SideBatch = {"targets": targets[1], "shifted": aligned, "stored": stored}
    return loss(student, None if spec.is_stored else teacher, {"targets": targets[0]}, side)


# Values and gradients


@each_case
def test_gradients_equal_finite_differences(name: LossName, options: dict[str, Any]) -> None:
    student, teacher = logits()
    check_gradient(lambda x: mean(name, options, x, teacher), student)


@each_case
def test_blocks_and_strides_do_not_change_the_loss(
    name: LossName, options: dict[str, Any], set_block: SetNumber
) -> None:
    student, teacher = logits()
    expected = value_and_gradient(3 * mean(name, options, student, teacher), student)
    set_block(20)
    actual = value_and_gradient(3 * mean(name, options, student, teacher), student)
    torch.testing.assert_close(actual, expected)
    length = student.shape[1]
    long = torch.cat([student, student], 1).detach().requires_grad_()
    strided = 3 * mean(name, options, long[:, :length], teacher.mT.contiguous().mT)
    value, gradient = value_and_gradient(strided, long)
    torch.testing.assert_close((value, gradient[:, :length]), expected)
    assert not gradient[:, length:].any()


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mixed_dtypes_are_computed_in_the_wider(
    name: LossName, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """This also applies under autocast; the minimum precision is float32."""
    student, teacher = logits()
    low, other = student.detach().to(dtype).requires_grad_(), teacher.to(dtype)
    for ours, theirs in ((low, teacher), (student, other), (low, other)):
        exact = ours.detach().double().requires_grad_()
        expected = value_and_gradient(mean(name, options, exact, theirs.double()), exact)
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean(name, options, ours, theirs)
        is_low = ours is low and (theirs is other or LOSSES[name].is_stored)
        assert loss.dtype == (torch.float32 if is_low else torch.float64)
        value, gradient = value_and_gradient(loss, ours)
        torch.testing.assert_close(value.double(), expected[0], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected[1].to(ours.dtype), rtol=1e-2, atol=1e-5)


@each_case
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e30])
def test_extreme_and_masked_logits_are_finite(
    name: LossName, options: dict[str, Any], scale: float
) -> None:
    """Masked logits (−∞) get no gradient, also at a target."""
    student, teacher = (side.detach() * scale for side in logits(torch.float32))
    assert bool((TARGETS[0] == 1).any())
    student[..., [1, 4]] = teacher[..., 2] = -torch.inf
    student.requires_grad_()
    value, gradient = value_and_gradient(mean(name, options, student, teacher), student)
    assert bool(torch.isfinite(value) & torch.isfinite(gradient).all())
    assert not gradient[..., [1, 4]].any()
    assert scale > 1 or bool(gradient.any())


# Values that are ignored


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [(0, 7, 5), (2, 0, 5), (2, 7, 0)])
def test_empty_batches_are_zero(name: LossName, sizes: tuple[int, int, int]) -> None:
    rows, ours, theirs = sizes
    student = torch.randn(rows, ours, V_S, requires_grad=True)
    every = torch.ones(rows, 4).bool()
    targets = torch.zeros(rows, ours).long(), torch.zeros(rows, theirs).long()
    aligned = replace(
        ALIGNED, pair_valid=every, pair_is_correct=every, has_start=every,
        student_chunk_id=targets[0], teacher_chunk_id=targets[1],
    )  # fmt: skip
    stored = StoredTopK(**{field: x[:rows, :ours] * 0 for field, x in vars(STORED).items()})
    loss = mean(name, {}, student, torch.randn(rows, theirs, V_T), aligned, targets, stored)
    value, gradient = value_and_gradient(loss, student)
    assert float(value) == 0.0
    assert gradient.shape == student.shape


@pytest.mark.parametrize("name", LOSSES)
def test_no_valid_chunk_is_zero_with_a_gradient_of_zeros(name: LossName) -> None:
    """No position predicts the first token of a row, so a stored row for it is not compared."""
    student, teacher = logits()
    broken = torch.full_like(student, torch.nan).requires_grad_()
    nothing = replace(ALIGNED, pair_valid=torch.zeros_like(torch.as_tensor(ALIGNED.pair_valid)))
    first = replace(STORED, valid=(torch.arange(INSIDE.shape[1]) == 0).expand_as(INSIDE))
    loss = mean(name, {}, broken, teacher, nothing, stored=first)
    value, gradient = value_and_gradient(loss, broken)
    assert float(value) == 0.0
    assert torch.equal(gradient, torch.zeros_like(student))


@each_case
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_positions_outside_of_chunks_are_ignored(
    name: LossName, options: dict[str, Any], wrong: float
) -> None:
    """The logits of padding may be invalid."""
    student, teacher = logits()
    outside = ~INSIDE, torch.as_tensor(ALIGNED.teacher_chunk_id) < 0
    teacher[outside[1]] = 0.0  # top-k reads all valid positions; 0 is not the largest logit
    expected = value_and_gradient(mean(name, options, student, teacher), student)
    broken, broken_teacher = student.detach().clone(), teacher.clone()
    broken[outside[0]] = broken_teacher[outside[1]] = wrong
    broken.requires_grad_()
    actual = value_and_gradient(mean(name, options, broken, broken_teacher), broken)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", WITH_MAP)
def test_columns_beyond_the_map_are_ignored(name: LossName) -> None:
    student, teacher = logits()
    wide = torch.nn.functional.pad(student.detach(), (0, 2), value=50.0).requires_grad_()
    wide_teacher = torch.nn.functional.pad(teacher, (0, 3), value=50.0)
    expected = value_and_gradient(mean(name, {}, student, teacher), student)
    value, gradient = value_and_gradient(mean(name, {}, wide, wide_teacher), wide)
    torch.testing.assert_close((value, gradient[..., :V_S]), expected)
    assert not gradient[..., V_S:].any()


@pytest.mark.parametrize("name", LOSSES)
def test_an_alignment_may_consist_of_lists(name: LossName) -> None:
    lists: Any = {field: value.tolist() for field, value in vars(ALIGNED).items()}
    loss = mean(name, {}, *logits(), ShiftedAlignment(**lists))
    torch.testing.assert_close(loss, mean(name, {}, *logits()))


@pytest.mark.parametrize("name", ["p-kl", "event-kl", "csd", "alm", "gold"])
def test_a_sample_mask_excludes_rows(name: LossName) -> None:
    """Compare the loss's function with a batch that has no chunk in the excluded row."""
    function: Callable[..., Tensor] = getattr(losses, name.replace("-", "_"))
    device_map: Any = MAPS[LOSS_INFO[name].map]
    if name == "gold":
        device_map = losses.exact_pairs(device_map.map)
    student, teacher = logits()
    args = [*([] if device_map is None else [device_map]),
            *([TARGETS] if name in WITH_TARGETS else []), ALIGNED]  # fmt: skip
    masked = function(student, teacher, *args, sample_mask=torch.tensor([0, 1, 1]))
    valid = torch.as_tensor(ALIGNED.pair_valid) & torch.tensor([[False], [True], [True]])
    torch.testing.assert_close(
        masked, mean(name, {}, student, teacher, replace(ALIGNED, pair_valid=valid))
    )
    assert not value_and_gradient(masked, student)[1][0].any()
    for mask in ([0, 1, 0], [0, 0, 0]):
        loss = function(student, teacher, *args, sample_mask=torch.tensor(mask))
        value, gradient = value_and_gradient(loss, student)
        assert float(value) == 0
        assert not gradient.any()


# Invalid input


def sides_of(name: LossName) -> Iterator[str]:
    yield "student"
    if not LOSSES[name].is_stored:
        yield "teacher"


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [(name, options, side) for name, options in CASES for side in sides_of(name)],
)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["logits", "hidden"])
def test_error_names_invalid_logits(
    name: LossName, options: dict[str, Any], side: str, wrong: float, is_hidden: bool
) -> None:
    number, what = ["student", "teacher"].index(side), "hidden states" if is_hidden else "logits"
    sides: list[Any] = [x.detach().clone() for x in logits()]
    sides[number][COMPARED] = wrong
    if is_hidden:  # an identity matrix as the head
        sides[number] = HiddenLogits(sides[number], torch.eye(sides[number].shape[2]).double())
    index = re.escape(f"[{COMPARED[0]}, {COMPARED[1]}, 0]")
    with pytest.raises(ValueError, match=f"{side}'s {what} .*{wrong} at {index}"):
        mean(name, options, *sides)


@pytest.mark.parametrize("name", WITH_MAP)
def test_narrow_logits_are_refused(name: LossName) -> None:
    student, teacher = logits()
    with pytest.raises(XtokError, match="student's logits"):
        mean(name, {}, student[..., :-1], teacher)
    with pytest.raises(XtokError, match=rf"teacher's logits .*\b{V_T - 1}\b"):
        mean(name, {}, student, teacher[..., :-1])


@pytest.mark.parametrize("name", WITH_TARGETS)
def test_error_names_invalid_targets(name: LossName) -> None:
    """The ids of the logits' padding are invalid targets, too."""
    own, other = TARGETS
    short, padding = own[:, :-1], own.where(own != 1, V_S)
    beyond, masked = other.where(other < 0, V_T), torch.full_like(own, -100)
    for targets, message in (
        ((short, other), rf"student.* \[3, {short.shape[1]}\]"),
        ((padding, other), f"student.* {V_S}, "),
        ((own, beyond), f"teacher.* {V_T}, "),
        ((masked, other), "student.* -100, "),
    ):
        with pytest.raises(ValueError, match=message):
            mean(name, {}, *logits(), targets=targets)
