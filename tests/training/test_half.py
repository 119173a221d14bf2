"""float16: gradients train as those of whole logits, whatever the factor of a GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xtok.training.losses import HiddenLogits, cross_entropy
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


@pytest.mark.parametrize("power", [0, 12, 24])
def test_what_whole_logits_train_hidden_states_train(power: int) -> None:
    """One token is right nearly everywhere, and one of the states large: a sum of 100,000."""
    generator = torch.Generator().manual_seed(power)
    count, width = 4096, 50
    hidden = torch.randn(1, count, 8, generator=generator)
    hidden[..., 0] = 30.0
    targets = torch.randint(0, width, (1, count), generator=generator)
    targets[:, : int(0.9 * count)] = 5
    start = torch.randn(width, 8, generator=generator) * 0.01
    found = []
    for kind in ("hidden", "logits"):
        states, weight = hidden.clone().requires_grad_(), torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                given = HiddenLogits(states, weight)
                logits = given if kind == "hidden" else torch.nn.functional.linear(states, weight)
                loss = cross_entropy(logits, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(float((weight.detach() - start).abs().max()))
    assert found[0] > max(0.01, 0.9 * found[1])
