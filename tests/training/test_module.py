"""`ProjectionModule`: the same product as a dense one, frozen or learned, in every setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import not_none
from make_maps import GOOD, SLOT, random_map
from torch import Tensor

from xtok import ProjectionModule, XtokError
from xtok.maps.records import RowKind
from xtok.training.sparse import project_sparse

SLOTTED = replace(GOOD, scale_slot=SLOT)
W = torch.tensor(
    [
        [0, 0.25, 0, 0.75, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
        [0.5, 0, 0, 0, 0.5, 0],
    ]
)
PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0]])


def test_the_product_equals_manual_values() -> None:
    projected = ProjectionModule(GOOD)(PROBS)
    assert projected.dtype == torch.float32
    torch.testing.assert_close(
        projected,
        torch.tensor([[0.2, 0.025, 0, 0.075, 0.2, 0.3], [0, 0.0625, 0, 0.1875, 0, 0.5]]),
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_empty_batch_is_projected(shape: tuple[int, ...]) -> None:
    probs = torch.zeros(shape, requires_grad=True)
    projected = ProjectionModule(SLOTTED, learnable=True)(probs)
    assert projected.shape == (*shape[:-1], 6)
    projected.sum().backward()
    assert not_none(probs.grad).shape == shape


def test_gradients_of_the_product_equal_the_dense_ones() -> None:
    m = random_map(9, 11)
    p = ProjectionModule(m)
    probs = torch.rand(2, 3, 9, dtype=torch.float64, requires_grad=True)
    weights = p.weights.double().requires_grad_()

    def project(probs: Tensor, weights: Tensor) -> Tensor:
        flat = project_sparse(probs.flatten(0, 1), p.student_ids, p.offsets[:-1], weights)
        return flat.view(2, 3, -1)

    assert torch.autograd.gradcheck(project, (probs, weights))
    dense = torch.zeros(9, 11, dtype=torch.float64)
    dense[m.student_ids.tolist(), m.teacher_ids.tolist()] = torch.from_numpy(m.weights).double()
    torch.testing.assert_close(project(probs, weights), probs @ dense)


def test_wider_logits_are_padding_and_narrower_logits_are_an_error() -> None:
    module = ProjectionModule(GOOD)
    padded = torch.cat([PROBS, torch.full((2, 3), 0.5)], 1)
    assert torch.equal(module(padded), module(PROBS))
    with pytest.raises(XtokError, match="student's logits"):
        module(PROBS[:, :3])


def test_float32_under_autocast() -> None:
    module = ProjectionModule(SLOTTED, learnable=True)
    with torch.autocast("cpu", torch.bfloat16):
        probs = PROBS.bfloat16().requires_grad_()
        projected = module(probs)
        assert projected.dtype == torch.float32
        projected[:, 5].sum().backward()
    torch.testing.assert_close(projected, PROBS.bfloat16().float() @ W)
    assert not_none(probs.grad).dtype == torch.bfloat16
    torch.testing.assert_close(probs.grad, W[:, 5].bfloat16().expand(2, 4))


def test_a_learnable_projection_starts_with_the_weights_of_the_map() -> None:
    for m in (GOOD, SLOTTED, random_map(40, 30)):
        learned = ProjectionModule(m, learnable=True)
        torch.testing.assert_close(learned.entry_weights(), ProjectionModule(m).entry_weights())
        assert [name for name, _ in learned.named_parameters()] == ["logits"]


def test_the_slot_is_free_and_rows_sum_to_one() -> None:
    learned = ProjectionModule(SLOTTED, learnable=True)
    assert learned.logits is not None
    slot = (learned.student_ids == 0) & learned.is_slot
    assert learned.teacher_ids[slot].tolist() == [1]
    with torch.no_grad():
        learned.logits[slot] = 0.0  # sigmoid: half the row
        learned.logits[(learned.student_ids == 3) & ~learned.is_slot] += 5
    dense = torch.zeros(4, 6)
    dense[learned.student_ids, learned.teacher_ids] = learned.entry_weights().detach()
    expected = W.clone()
    expected[0] = torch.tensor([0, 0.5, 0, 0.5, 0, 0])
    torch.testing.assert_close(dense, expected)  # row 3: one entry beside its slot


def test_a_learned_projection_reaches_its_target_and_becomes_a_map(tmp_path: Path) -> None:
    learned = ProjectionModule(SLOTTED, learnable=True)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.3)
    target = torch.tensor([0, 0.9, 0, 0.1, 0, 0])
    for _ in range(200):
        optimizer.zero_grad()
        (learned(torch.eye(4)[:1]) - target).square().sum().backward()
        optimizer.step()
    projection = learned.to_map()
    projection.check()
    ids, weights = projection.row(0)
    assert ids.tolist() == [3, 1]  # the slot is last, even if it is the lightest
    assert np.allclose(weights, [0.1, 0.9], atol=1e-3)
    assert projection.row_kind.tolist() == [RowKind.MIXED, 0, 2, 2]
    assert projection.history[-1]["stage"] == "learn"
    projection.save(tmp_path / "learned.safetensors")
    again = ProjectionModule(tmp_path / "learned.safetensors")
    torch.testing.assert_close(again(PROBS), learned(PROBS))
    assert ProjectionModule(GOOD).to_map() is GOOD


def test_weights_of_0_are_removed_from_the_map() -> None:
    learned = ProjectionModule(SLOTTED, learnable=True)
    assert learned.logits is not None
    with torch.no_grad():
        learned.logits[learned.is_slot] = -200.0
    projection = learned.to_map()
    projection.check()
    assert projection.row(0)[0].tolist() == [3]
    assert not_none(projection.scale_slot).tolist() == [0, 0, 0, 0]


def test_a_large_slot_leaves_weight_for_the_other_entries(tmp_path: Path) -> None:
    learned = ProjectionModule(SLOTTED, learnable=True)
    assert learned.logits is not None
    with torch.no_grad():
        learned.logits[learned.is_slot] = 18.0
    projection = learned.to_map()
    projection.save(tmp_path / "learned.safetensors")
    assert projection.weights.tolist() == [2**-24, 1 - 2**-24, 1.0, 2**-24, 1 - 2**-24]
    assert not_none(projection.scale_slot).tolist() == SLOT.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_learned_projection_in_half_precision_becomes_a_map(dtype: torch.dtype) -> None:
    projection = ProjectionModule(GOOD, learnable=True).to(dtype).to_map()
    projection.check()
    assert projection.weights.dtype == np.float32
    assert np.allclose(projection.weights, GOOD.weights, atol=2e-3)


def test_a_state_dict_restores_learned_weights() -> None:
    learned = ProjectionModule(SLOTTED, learnable=True)
    assert learned.logits is not None
    with torch.no_grad():
        learned.logits.add_(torch.arange(5.0))
    other = ProjectionModule(SLOTTED, learnable=True)
    other.load_state_dict(learned.state_dict())
    assert torch.equal(other(PROBS), learned(PROBS))
    with pytest.raises(RuntimeError, match="size mismatch"):
        ProjectionModule(random_map(9, 11)).load_state_dict(ProjectionModule(GOOD).state_dict())


def test_to_moves_everything() -> None:
    moved = ProjectionModule(SLOTTED, learnable=True).to("meta")
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}


def test_the_compiled_module_gives_equal_gradients() -> None:
    module = ProjectionModule(SLOTTED, learnable=True)
    compiled = torch.compile(module, backend="aot_eager")
    results = []
    for form in (module, compiled):
        probs = PROBS.clone().requires_grad_()
        projected = form(probs)
        projected.square().sum().backward()
        results.append((projected, probs.grad))
    torch.testing.assert_close(results[0], results[1])
