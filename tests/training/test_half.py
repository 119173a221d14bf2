"""float16: a gradient waits in float32 for the factor of a GradScaler, as in PyTorch's own loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xtok.training.losses import HiddenLogits
from xtok.training.objective import make_objective

SCALE, BATCHES = 2.0**15, 64  # of a GradScaler; of an optimizer's step


@pytest.mark.parametrize("kind", ["hidden", "logits"])
def test_gradients_are_as_exact_as_pytorchs(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    h0, w0 = (torch.randn(shape, generator=generator) for shape in ((1, 128, 32), (4000, 32)))
    targets = (h0 @ w0.t()).argmax(-1)  # a student that is right nearly everywhere
    targets[:, ::5] = torch.randint(0, 4000, targets[:, ::5].shape, generator=generator)
    total = BATCHES * targets.numel()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).double().flatten(0, 1)
        summed = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return summed / total

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = HiddenLogits(hidden, weight) if kind == "hidden" else hidden @ weight.t()
        batch = {"targets": targets, "teachers": []}
        return make_objective([], [], None).terms(logits, [], batch, torch.tensor([total])).loss

    def gradients(loss_of: object, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (h0, w0)]
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            loss = loss_of(*inputs)  # type: ignore[operator]
        return [x / SCALE for x in torch.autograd.grad(loss * SCALE, inputs)]

    exact = gradients(plain, torch.float64)
    errors = [
        [float((x - y).norm() / y.norm()) for x, y in zip(gradients(of), exact, strict=True)]
        for of in (plain, ours)
    ]
    for of_plain, of_ours in zip(*errors, strict=True):
        assert of_ours < 1.5 * of_plain < 0.02
