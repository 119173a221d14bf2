"""On a simulated GPU: the CPU's results, one device per operation, and few waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from checks import not_none
from loss_inputs import loss_map
from pretended_gpu import GPU, on_cpu, pretended_gpu

import xtok
from xtok import DistillationCollator, ProjectionModule
from xtok.building.embeddings.similarity import largest_cosines
from xtok.loss_names import LossName
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import Batch
from xtok.training.collator import prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.registry import LOSSES, make_loss
from xtok.training.objective import make_objective
from xtok.training.topk_collator import TopKCollator

TEXTS = [
    "There are 201 lighthouses on this coast.", "Der Leuchtturm steht auf dem letzten Felsen.",
    "for x in range(1234):\n    print(x)  # naïve 日本語",
]  # fmt: skip

FETCHES: dict[LossName, int] = {
    "p-kl": 7, "event-kl": 2, "csd": 6, "alm": 3, "gold": 7, "h-kl": 7, "same-tokenizer": 2,
    "topk-kl": 2,
}  # fmt: skip
"""How often a step may wait for the GPU: a batch's preparation, a loss and its gradient."""


def same_on_gpu(step: Callable[[torch.device | str], list[torch.Tensor]], most: int) -> None:
    """Check that a step gives the CPU's tensors on a GPU, with this number of waits."""
    expected = step("cpu")
    with pretended_gpu() as fetches:
        actual = step(GPU)
    assert sum(fetches.values()) <= most, fetches
    for on_device, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(on_cpu(on_device), value)


"""How often a step may wait for the GPU: a batch's preparation, a loss and its gradient."""


def test_the_pretended_gpu_rejects_cpu_tensors_and_counts_fetches() -> None:
    with pretended_gpu() as fetches:
        ours = torch.arange(6.0, device=GPU).view(2, 3)
        assert ours.device == GPU
        assert torch.tensor([1], device=GPU).device == GPU
        with pytest.raises(RuntimeError, match="two devices"):
            ours + torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            torch.ones(3)[ours.long()]
        with pytest.raises(RuntimeError, match="numpy"):
            ours.numpy()
        assert not fetches
        # a CPU scalar does not count as a second device
        ours[:, 1:].mul_(2).add_(torch.tensor(1.0))
        ours.repeat_interleave(2, output_size=12)
        assert not fetches
        assert float(ours.sum()) == 31
        assert bool((ours > 1).any())
        assert ours.tolist() == ours.cpu().tolist() == [[0, 3, 5], [3, 9, 11]]
        _ = ours[ours > 1], ours[torch.tensor([0])], ours.nonzero(), torch.unique(ours)
        ours.flatten().repeat_interleave(torch.ones(6, dtype=torch.int64, device=GPU))
    assert sum(fetches.values()) == 9


def batch_of(name: LossName, pair: Pair) -> Batch:
    """Return a batch as a data loader returns it."""
    if not LOSSES[name].is_stored:
        return DistillationCollator(*pair.tokenizers)(TEXTS)
    ids = [pair.tokenizers[0].encode(text).ids.tolist() for text in TEXTS]
    return TopKCollator()([
        {
            "input_ids": row,
            "topk_ids": [[], *([i, i + 1] for i in row[1:])],
            "topk_logprobs": [[], *([np.log(0.6), np.log(0.3)] for _ in row[1:])],
            "rest_logprob": [None, *(np.log(0.1) for _ in row[1:])],
        }
        for row in ids
    ])  # fmt: skip


def logits_of(batch: Batch, pair: Pair, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return random logits of both sides, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    [side] = batch["teachers"]
    shapes = [(*batch["input_ids"].shape, pair.shape[0])]
    if "input_ids" in side:
        shapes.append((*side["input_ids"].shape, pair.shape[1]))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_a_gpu_equal_the_cpu(name: LossName, dtype: torch.dtype, pair: Pair) -> None:
    if name == "same-tokenizer":
        pair = xtok.load_pair(*pair.tokenizers[:1] * 2)
    artefact = loss_map(name, pair)
    batch = batch_of(name, pair)

    def step(device: torch.device | str) -> list[torch.Tensor]:
        student, *teacher = (logits.to(device) for logits in logits_of(batch, pair, dtype))
        student = student.detach().requires_grad_()
        loss = make_loss(name, map=artefact if artefact is None else artefact.to(device))
        prepared = prepare(batch, device)
        value = loss(student, teacher[0] if teacher else None, prepared, prepared["teachers"][0])
        value.backward()
        return [value.detach(), not_none(student.grad)]

    same_on_gpu(step, FETCHES[name])


@pytest.mark.parametrize("dynamic_scaling", [False, True])
def test_the_objective_of_two_teachers(pair: Pair, dynamic_scaling: bool) -> None:
    student, teacher = pair.tokenizers
    batch = DistillationCollator(student, [teacher, student])(TEXTS)
    artefact, generator = xtok.events(student, teacher), torch.Generator().manual_seed(0)
    sides, widths = [batch, *batch["teachers"]], [*pair.shape, pair.shape[0]]
    logits = [
        torch.randn(*side["input_ids"].shape, width, generator=generator)
        for side, width in zip(sides, widths, strict=True)
    ]

    def step(device: torch.device | str) -> list[torch.Tensor]:
        objective = make_objective(
            [pair, xtok.load_pair(student, student)],
            ["event-kl", "same-tokenizer"],
            [artefact, None],
            teacher_weights=[1, 0.5],
            combine=CombineConfig(cross_entropy_weight=0.5, dynamic_scaling=dynamic_scaling),
            device=device,
        )
        ours, *theirs = (side_logits.to(device) for side_logits in logits)
        ours = ours.detach().requires_grad_()
        prepared = prepare(batch, device)
        count = objective.count(prepared)
        terms = objective.terms(ours, theirs, prepared, count * 2)
        terms.loss.backward()
        return [count, *(term.detach() for term in terms), not_none(ours.grad)]

    # The waits fetch the counts of targets and their positions; dynamic scaling makes two passes.
    same_on_gpu(step, 11 if dynamic_scaling else 7)


@pytest.mark.parametrize("learnable", [False, True])
def test_a_map_as_a_module(map_to_digits: ProjectionMap, learnable: bool) -> None:
    probs = torch.randn(2, 5, map_to_digits.shape[0]).softmax(-1)

    def step(device: torch.device | str) -> list[torch.Tensor]:
        module = ProjectionModule(map_to_digits, learnable=learnable).to(device)
        student = probs.to(device).detach().requires_grad_()
        projected = module(student)
        projected.square().sum().backward()
        learned = [not_none(not_none(module.logits).grad)] if learnable else []
        return [projected.detach(), not_none(student.grad), *learned]

    same_on_gpu(step, 2)  # the number of entries in the columns, and their rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cosines_on_a_gpu_equal_the_cpu(dtype: str) -> None:
    generator = np.random.default_rng(0)
    students, teachers = (
        generator.standard_normal((size, 8)).astype(np.float32) for size in (700, 2500)
    )

    def top(device: str) -> Sequence[Any]:
        with ThreadPoolExecutor(1) as pool:
            config = xtok.GenerateConfig(
                top_k=4,
                transform="softmax",
                device=device,
                dtype=dtype,  # type: ignore[arg-type]
            )
            return largest_cosines(
                students, teachers, config, pool=pool, advance=lambda _: None,
                weigh=lambda tile, largest: (tile - largest).exp(),
            )  # fmt: skip

    expected = top("cpu")
    with pretended_gpu():
        actual = top(str(GPU))
    for on_device, value in zip(actual, expected, strict=True):
        np.testing.assert_allclose(on_device, value, rtol=1e-6)
