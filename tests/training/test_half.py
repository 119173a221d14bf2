"""In float16, gradients equal the gradients of whole logits for any factor of a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loss_inputs import alignment, event_index_of
from torch import Tensor

from xtok.training.batches import Batch
from xtok.training.losses import HiddenLogits, cross_entropy, event_kl
from xtok.training.objective import make_objective

SCALE, BATCHES = 2.0**15, 64  # of a GradScaler; of an optimizer's step


@pytest.mark.parametrize("kind", ["hidden", "logits"])
def test_gradients_are_as_exact_as_pytorchs(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    h0, w0 = (torch.randn(shape, generator=generator) for shape in ((1, 128, 32), (4000, 32)))
    targets = (h0 @ w0.t()).argmax(-1)  # the student is right at most positions
    targets[:, ::5] = torch.randint(0, 4000, targets[:, ::5].shape, generator=generator)
    total = BATCHES * targets.numel()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).double().flatten(0, 1)
        summed = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return summed / total

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = HiddenLogits(hidden, weight) if kind == "hidden" else hidden @ weight.t()
        batch: Batch = {"targets": targets, "teachers": []}
        return make_objective([], [], None).terms(logits, [], batch, torch.tensor([total])).loss

    def gradients(loss_of: object, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (h0, w0)]
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            loss = loss_of(*inputs)  # type: ignore[operator]
        return [x / SCALE for x in torch.autograd.grad(loss * SCALE, inputs)]

    exact = gradients(plain, torch.float64)
    errors = [
        [float((x - y).norm() / y.norm()) for x, y in zip(gradients(function), exact, strict=True)]
        for function in (plain, ours)
    ]
    for plain_error, our_error in zip(*errors, strict=True):
        assert our_error < 1.5 * plain_error < 0.02


@pytest.mark.parametrize("power", [0, 12, 24])
def test_float16_training_with_hidden_states_follows_whole_logits(power: int) -> None:
    """One token is right at most positions, and one hidden state is large: a sum of 100,000."""
    generator = torch.Generator().manual_seed(power)
    count, width = 4096, 50
    hidden = torch.randn(1, count, 8, generator=generator)
    hidden[..., 0] = 30.0
    targets = torch.randint(0, width, (1, count), generator=generator)
    targets[:, : int(0.9 * count)] = 5
    start = torch.randn(width, 8, generator=generator) * 0.01
    updates = []
    for kind in ("hidden", "logits"):
        states, weight = hidden.clone().requires_grad_(), torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                in_blocks = HiddenLogits(states, weight)
                logits = (
                    in_blocks if kind == "hidden" else torch.nn.functional.linear(states, weight)
                )
                loss = cross_entropy(logits, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        updates.append(float((weight.detach() - start).abs().max()))
    assert updates[0] > max(0.01, 0.9 * updates[1])


def random_case(seed: int) -> Callable[[bool], tuple[Tensor, ...]]:
    """Return the gradients of a random loss as a function: through a head, or through whole logits.

    The loss, the shapes, the sizes of logits and heads, and the factor of a GradScaler, up to 2^24,
    are random.
    """
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, d = int(random.integers(1, 3)), int(random.integers(2, 17))
    widths, lengths = random.integers(8, 300, 2).tolist(), random.integers(4, 60, 2).tolist()
    ids = [
        np.stack([np.repeat(np.arange(n), random.integers(1, 4, n))[:n] for _ in range(rows)])
        for n in lengths
    ]
    aligned, index = alignment(*ids), event_index_of(*widths)
    states, weight, teacher = (
        torch.randn(shape, generator=generator) * 10 ** random.uniform(*powers)
        for shape, powers in [
            ((rows, lengths[0], d), (-2, 4)), ((widths[0], d), (-5, 1)),
            ((rows, lengths[1], widths[1]), (-1, 1)),
        ]
    )  # fmt: skip
    targets = torch.randint(0, widths[0], (rows, lengths[0]), generator=generator)
    targets *= int(random.integers(2))  # in half of the cases, one token at all positions
    scale, softcap = [1.0, 0.0625, 8.0][random.integers(3)], [None, 30.0][random.integers(2)]
    dtype = [torch.float16, torch.float32][random.integers(2)]
    factor = 2.0 ** int(random.integers(0, 25))

    def gradients(is_hidden: bool) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (states, weight)]
        with torch.autocast("cpu", torch.float16):
            if is_hidden:
                logits: Any = HiddenLogits(*inputs, scale=scale, softcap=softcap)
            else:
                logits = torch.nn.functional.linear(*inputs) * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = cross_entropy(logits, targets) + event_kl(logits, teacher, index, aligned)
        return torch.autograd.grad(loss * factor, inputs)

    return gradients


def test_hidden_states_have_finite_gradients_if_whole_logits_have() -> None:
    trained = 0
    for seed in range(200):
        gradients = random_case(seed)
        try:
            expected = gradients(False)
        except ValueError:  # logits are infinite
            continue
        if all(bool(torch.isfinite(x).all()) for x in expected):
            trained += 1
            for gradient, other in zip(gradients(True), expected, strict=True):
                assert torch.isfinite(gradient).all(), seed
                assert float(gradient.float().norm()) >= 0.9 * float(other.float().norm()), seed
    assert 120 < trained < 180
