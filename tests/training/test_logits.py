"""Losses from hidden states and a head equal losses from logits, with all gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import alm_inputs
import csd_inputs
import numpy as np
import pytest
import torch
from conftest import SetNumber
from loss_inputs import alignment, event_index_of
from make_maps import random_map
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtok.training import losses
from xtok.training.losses import (
    ALMConfig,
    ChunkLossConfig,
    CSDConfig,
    EventIndex,
    ExactPairs,
    GoldConfig,
    HiddenLogits,
    PKLConfig,
    SameTokenizerConfig,
)
from xtok.training.losses.chunks import both_tokens, number_chunks, wrap_logits
from xtok.training.losses.config import ChunkFilter
from xtok.training.losses.cross_entropy import plan_cross_entropy
from xtok.training.losses.event_kl import plan_event_kl
from xtok.training.losses.one_pass import one_pass
from xtok.training.losses.registry import make_loss
from xtok.training.module import ProjectionModule

D = 5
HEADS: list[dict[str, Any]] = [{}, {"bias": True, "scale": 0.3, "softcap": 4.0}]
MASKS = [None, torch.tensor([1, 0, 1])]


def head(
    shape: tuple[int, ...], *, dtype: torch.dtype, bias: bool = False, seed: int = 0, **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """Return hidden states, a weight and maybe a bias that require gradients, and other options."""
    rows, length, width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, length, D), (width, D), *([(width,)] if bias else [])]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in tensors], options


def whole_logits(tensors: list[Tensor], scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Return the logits as a model computes them."""
    logits = tensors[0] @ tensors[1].t()
    logits = (logits + tensors[2] if len(tensors) > 2 else logits) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


Loss = Callable[[Any, Any], Tensor]


def bound(loss: Callable[..., Tensor], *args: Any, **options: Any) -> Loss:
    """Return a loss as a function of both sides' logits."""
    return lambda s, q: loss(s, q, *args, **options)


def cases() -> dict[str, tuple[Loss, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Each loss with its options, as a function of both sides' logits, and their shapes."""
    steps: dict[str, Any] = {}
    ids, targets = alm_inputs.IDS, alm_inputs.sides()[2]
    shapes = (*ids[0].shape, alm_inputs.V_S), (*ids[1].shape, alm_inputs.V_T)
    aligned, index = alignment(*ids), event_index_of(alm_inputs.V_S, alm_inputs.V_T)
    for reverse, t, mask in product((False, True), (1.0, 2.5), MASKS):
        more = f"reverse={reverse} temperature={t} mask={mask is not None}"
        kl, alm_batch = (
            kind(reverse_kl=reverse, temperature=t) for kind in (ChunkLossConfig, ALMConfig)
        )
        events = bound(losses.event_kl, index, aligned, kl, sample_mask=mask)
        steps[f"event_kl {more}"] = events, shapes
        steps[f"alm {more}"] = (
            bound(losses.alm, targets, aligned, alm_batch, sample_mask=mask),
            shapes,
        )
    _, _, csd_targets, csd_alignment = csd_inputs.csd_batch(csd_inputs.ROWS)
    csd_widths = csd_inputs.V_S, csd_inputs.V_T
    csd_shapes = [(*x.shape, v) for x, v in zip(csd_targets, csd_widths, strict=True)]
    for options, mask in product(csd_inputs.OPTIONS, MASKS):
        csd = CSDConfig(**options)
        loss = bound(
            losses.csd, csd_inputs.INDEX, csd_targets, csd_alignment, csd, sample_mask=mask
        )
        steps[f"csd {options} mask={mask is not None}"] = loss, csd_shapes
    module = ProjectionModule(random_map(alm_inputs.V_S, alm_inputs.V_T))
    pairs = ExactPairs(
        *(
            torch.tensor(x)
            for x in ([0, 2, 5], [3, 1, 0], [1, 3, 4, 6, 7, 8, 9], [2, *range(4, 13)])
        )
    )
    for reverse, k, mask in product((False, True), (None, 5), MASKS):
        more = f"reverse={reverse} k={k} mask={mask is not None}"
        p_kl_config = PKLConfig(reverse_kl=reverse, temperature=2.5, top_k=k)
        gold_config = GoldConfig(reverse_kl=reverse, temperature=2.5, uncommon_topk=k or 8192)
        p_kl = bound(losses.p_kl, module, aligned, p_kl_config, sample_mask=mask)
        steps[f"p_kl {more}"] = p_kl, shapes
        steps[f"gold {more}"] = (
            bound(losses.gold, pairs, aligned, gold_config, sample_mask=mask),
            shapes,
        )
    same = (2, 5, 9), (2, 5, 11)
    inside = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0]])
    for reverse, t, k in product((False, True), (1.0, 2.5), (None, 4)):
        config = SameTokenizerConfig(reverse_kl=reverse, temperature=t, top_k=k)
        name = f"same_tokenizer_kl reverse={reverse} temperature={t} top_k={k}"
        steps[name] = bound(losses.same_tokenizer_kl, inside, config), same
    own = torch.tensor([[1, 8, -100, 3, -100], [-100, 0, 2, 2, 5]])
    steps["cross_entropy"] = (lambda s, q: losses.cross_entropy(s, own)), same
    top = torch.tensor([[[1, 2]] * 5, [[0, 8]] * 5])
    logprobs, rest = torch.tensor([[[-1.0, -2.0]] * 5] * 2), torch.full((2, 5), -1.0)
    steps["topk_kl"] = (lambda s, q: losses.topk_kl(s, top, logprobs, rest, inside)), same
    return steps


CASES = cases()


def value_and_gradients(loss: Loss, sides: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    value = 3 * loss(*sides)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize(
    ("head_options", "dtype", "limit"),
    [(HEADS[0], torch.float32, 1e-6), (HEADS[1], torch.float64, 1e-12)],
    ids=["plain", "all"],
)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_give_the_values_and_gradients_of_logits(
    name: str, head_options: dict[str, Any], dtype: torch.dtype, limit: float,
    monkeypatch: pytest.MonkeyPatch, set_block: SetNumber,
) -> None:  # fmt: skip
    """Compare each side and both sides, in one block and in blocks of two positions.

    A head may be read once for three such blocks.
    """
    loss, shapes = CASES[name]
    student, options = head(shapes[0], dtype=dtype, **head_options)
    teacher, _ = head(shapes[1], dtype=dtype, seed=1, **head_options)
    logits = [whole_logits(tensors, **options) for tensors in (student, teacher)]
    expected = value_and_gradients(loss, logits, student)
    from_logits = value_and_gradients(loss, logits, [logits[0]])
    hidden = (
        HiddenLogits(*student, **options),
        HiddenLogits(*(x.detach() for x in teacher), **options),
    )
    two = 2 * max(shapes[0][2], shapes[1][2])
    for at_once, block in ((2**25, 2**22), (two, two), (3 * two, two)):
        set_block(at_once)
        monkeypatch.setattr("xtok.training.sparse.CACHED_BLOCK_NUMBERS", block)
        for sides in ((hidden[0], logits[1]), hidden):
            actual = value_and_gradients(loss, sides, student)
            torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)
        actual = value_and_gradients(loss, (logits[0], hidden[1]), [logits[0]])
        torch.testing.assert_close(actual, from_logits, rtol=limit, atol=limit)


LARGE = (2, 24, 300), (2, 30, 400)


def large(seed: int = 3) -> tuple[Any, EventIndex]:
    """An alignment of chunks of one to three tokens on either side, and events."""
    random = np.random.default_rng(seed)
    ids = [
        np.stack(
            [np.repeat(np.arange(99), random.integers(1, 4, 99))[:length] for _ in range(rows)]
        )
        for rows, length, _ in LARGE
    ]
    return alignment(*ids), event_index_of(LARGE[0][2], LARGE[1][2])


@pytest.mark.parametrize("reverse", [False, True])
def test_hidden_states_in_bfloat16_are_as_exact_as_logits(reverse: bool) -> None:
    aligned, index = large()
    config = ChunkLossConfig(reverse_kl=reverse)
    inputs = torch.randint(0, LARGE[0][2], LARGE[0][:2], generator=torch.Generator().manual_seed(0))

    def loss(s: Any, q: Any) -> Tensor:
        return losses.event_kl(s, q, index, aligned, config) + losses.cross_entropy(s, inputs)

    low = [head(shape, dtype=torch.bfloat16, bias=True, seed=n)[0] for n, shape in enumerate(LARGE)]
    exact = [[x.detach().double().requires_grad_() for x in side] for side in low]
    expected = value_and_gradients(loss, [whole_logits(side) for side in exact], exact[0])
    from_logits = value_and_gradients(loss, [whole_logits(side) for side in low], low[0])
    from_hidden = value_and_gradients(loss, [HiddenLogits(*side) for side in low], low[0])
    for hidden_value, other, right in zip(from_hidden, from_logits, expected, strict=True):
        assert hidden_value.dtype == other.dtype
        assert float((hidden_value - right).norm()) <= 1.02 * float((other - right).norm())


def own_loss(student: Any, _: Any, targets: Tensor) -> Tensor:
    return losses.cross_entropy(student, targets)


@pytest.mark.parametrize(
    ("kind", "limit"), [("event_kl", 1.05), ("p_kl", 1.05), ("alm", 1.05), ("cross_entropy", 1.3)]
)
def test_gradients_in_bfloat16_are_as_exact_as_those_of_logits(kind: str, limit: float) -> None:
    """Eight batches, because the rounding of a single product affects the cross-entropy."""
    module, squares = ProjectionModule(random_map(LARGE[0][2], LARGE[1][2])), torch.zeros(2, 2)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        targets = [torch.randint(0, v, (rows, n), generator=generator) for rows, n, v in LARGE]
        aligned, index = large(seed)
        kinds: dict[str, Loss] = {
            "event_kl": bound(losses.event_kl, index, aligned),
            "p_kl": bound(losses.p_kl, module, aligned),
            "alm": bound(losses.alm, targets, aligned),
            "cross_entropy": partial(own_loss, targets=targets[0]),
        }
        low = [
            head(shape, dtype=torch.bfloat16, seed=10 * seed + n)[0]
            for n, shape in enumerate(LARGE)
        ]
        exact = [[x.detach().double().requires_grad_() for x in side] for side in low]
        sides_of_logits = [whole_logits(side) for side in exact]
        right = value_and_gradients(kinds[kind], sides_of_logits, exact[0])[1:]
        ways: list[list[Any]] = [[HiddenLogits(*x) for x in low], [whole_logits(x) for x in low]]
        for number, sides in enumerate(ways):
            gradients = value_and_gradients(kinds[kind], sides, low[0])[1:]
            squares[number] += torch.tensor(
                [
                    float((x - y).norm() / y.norm()) ** 2
                    for x, y in zip(gradients, right, strict=True)
                ]
            )
    assert float((squares[0] / squares[1]).sqrt().max()) <= limit


def test_several_teachers_and_the_cross_entropy_share_a_pass() -> None:
    """Each loss has a weight, and all losses share each block of the student's logits."""
    aligned, index = large()
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, LARGE[0][2], LARGE[0][:2], generator=generator)
    inputs[0, 5:9] = -100
    ours, options = head(LARGE[0], dtype=torch.float64, softcap=5.0)
    teacher = whole_logits(head(LARGE[1], dtype=torch.float64, seed=1)[0]).detach()
    config = ChunkLossConfig(temperature=2.0)
    weights: list[Any] = [0.5, 2.0, torch.tensor(0.25)]

    class Counted(HiddenLogits):
        made = 0

        def at(self, positions: Any, dtype: Any = None) -> Tensor:
            self.made += len(positions)
            return super().at(positions, dtype)

    chunks = number_chunks(aligned, ChunkFilter(starts_only=True))
    results = []
    for student in (whole_logits(ours, **options), Counted(*ours, **options)):
        both = wrap_logits(student, teacher, chunks)
        total, parts = one_pass(
            student,
            [
                plan_cross_entropy(student, inputs),
                plan_event_kl(both, index, config=config),
                plan_event_kl(both, index, config=ChunkLossConfig()),
            ],
            weights,
        )
        if isinstance(student, Counted):
            chunks = number_chunks(aligned, ChunkFilter(starts_only=True))
            compared = inputs >= 0
            starting, _ = both_tokens(chunks)
            compared.view(-1)[starting.positions[starting.starts]] = True
            assert student.made == int(compared.sum())
        single = [
            losses.cross_entropy(student, inputs),
            losses.event_kl(student, teacher, index, aligned, config),
            losses.event_kl(student, teacher, index, aligned),
        ]
        expected = sum(w * x for w, x in zip(weights, single, strict=True))
        torch.testing.assert_close(parts, [x.detach() for x in single])
        results.append([total.detach(), *torch.autograd.grad(total, ours, retain_graph=True)])
        results.append([expected.detach(), *torch.autograd.grad(expected, ours)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize(
    "name", [n for n in CASES if n.startswith(("event", "csd", "alm", "p_kl", "gold"))][::5]
)
def test_no_temporary_tensor_is_as_large_as_logits(name: str, set_block: SetNumber) -> None:
    """Run forward and backward with blocks of one position."""
    loss, shapes = CASES[name]
    sides = [
        HiddenLogits(*head(shape, dtype=torch.float32, seed=n)[0]) for n, shape in enumerate(shapes)
    ]
    set_block(1)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        loss(*sides).backward()
    assert largest.numbers < max(torch.Size(shape).numel() for shape in shapes)


def test_logits_of_some_positions_are_freed_before_the_next_are_computed(
    set_block: SetNumber,
) -> None:
    """Otherwise, a step needs memory for two blocks of logits at once."""
    aligned, index = large()
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    class Watched(HiddenLogits):
        def at(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            counts.append(sum(logits() is not None for logits in alive))
            logits = super().at(positions, dtype)
            alive.append(weakref.ref(logits))
            return logits

    student, teacher = (
        Watched(*head(shape, dtype=torch.float32, seed=n)[0]) for n, shape in enumerate(LARGE)
    )
    set_block(4 * LARGE[1][2])
    losses.event_kl(student, teacher, index, aligned).backward()
    assert len(counts) > 8
    assert set(counts) == {0, 1}  # only the student's block, while the teacher's block is computed


def test_gradients_exist_only_where_required() -> None:
    aligned, index = large()
    teacher = HiddenLogits(*head(LARGE[1], dtype=torch.float32, seed=1)[0])
    hidden, weight = head(LARGE[0], dtype=torch.float32)[0]
    loss = losses.event_kl(HiddenLogits(hidden.detach(), weight), teacher, index, aligned)
    loss.backward()
    assert weight.grad is not None
    assert teacher.weight.grad is None
    with pytest.raises(RuntimeError, match="run only once"):
        loss.backward()
    with torch.no_grad():
        assert not losses.event_kl(HiddenLogits(hidden, weight), teacher, index, aligned).grad_fn
    nothing = torch.full(LARGE[0][:2], -100)
    zero = losses.cross_entropy(HiddenLogits(hidden, weight), nothing)
    value, *gradients = value_and_gradients(lambda s, q: zero, (None, None), [hidden, weight])
    assert float(value) == 0
    assert not any(bool(gradient.any()) for gradient in gradients)


def test_the_product_is_in_the_type_of_the_autocast_that_made_it() -> None:
    hidden, weight = (x.detach() for x in head(LARGE[0], dtype=torch.float32)[0])
    plain = HiddenLogits(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        cast = HiddenLogits(hidden, weight)
        assert plain.at(torch.tensor([0])).dtype == torch.float32
        model = torch.nn.functional.linear(hidden, weight)
    positions = torch.tensor([0, LARGE[0][1] + 3, LARGE[0][1] + 9])
    assert (plain.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(cast.at(positions), model[[0, 1, 1], [0, 3, 9]].float())
    assert not torch.equal(cast.at(positions), plain.at(positions))


def test_a_factor_outside_of_the_loss_is_not_rounded() -> None:
    """In bfloat16, 0.3 is 0.30078."""
    own = torch.randint(0, LARGE[0][2], LARGE[0][:2], generator=torch.Generator().manual_seed(0))
    tensors = [x.detach() for x in head(LARGE[0], dtype=torch.bfloat16)[0]]
    logits = whole_logits(tensors)
    for inputs in (tensors, [logits]):
        inputs = [x.clone().requires_grad_() for x in inputs]
        gradients = [
            torch.autograd.grad(
                losses.cross_entropy(HiddenLogits(*inputs) if len(inputs) > 1 else inputs[0], own)
                * factor, inputs,
            )
            for factor in (0.3, 1.0)
        ]  # fmt: skip
        for scaled, plain in zip(*gradients, strict=True):
            ratio = scaled.double().abs().sum() / plain.double().abs().sum()
            assert float(ratio) == pytest.approx(0.3, rel=3e-4)


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    inputs = torch.randint(0, LARGE[0][2], LARGE[0][:2], generator=torch.Generator().manual_seed(0))
    hidden, weight = head(LARGE[0], dtype=torch.float32)[0]
    loss = losses.cross_entropy(HiddenLogits(hidden, weight), inputs)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    assert torch.autograd.grad(loss, hidden)[0].any()


def test_a_value_in_float32_has_all_its_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = 1, 64, 32_000
    logits = [torch.randn(shape, generator=generator).mul_(3) for _ in range(2)]
    mask = torch.ones(shape[:2])
    for reverse in (False, True):
        config = SameTokenizerConfig(reverse_kl=reverse)
        value, exact = (
            float(losses.same_tokenizer_kl(logits[0].to(dtype), logits[1].to(dtype), mask, config))
            for dtype in (torch.float32, torch.float64)
        )
        assert value == pytest.approx(exact, rel=2e-6)  # 1.2e-6 in one thread


def test_error_for_nan_names_the_compared_side() -> None:
    """The error does not name the student's padding if the teacher's logits are NaN."""
    aligned, index = large()
    sides = [head(shape, dtype=torch.float32, seed=n)[0] for n, shape in enumerate(LARGE)]
    own = [[x.detach().clone() for x in side] for side in sides]
    chunks = number_chunks(aligned, ChunkFilter(starts_only=True))
    student, teacher = (
        [divmod(position, shape[1]) for position in side.positions[side.starts].tolist()]
        for side, shape in zip(both_tokens(chunks), LARGE, strict=True)
    )
    row, position = next((0, n) for n in range(LARGE[0][1]) if (0, n) not in student)
    own[0][0][row, position] = torch.nan
    value = losses.event_kl(HiddenLogits(*own[0]), HiddenLogits(*own[1]), index, aligned)
    assert bool(torch.isfinite(value))
    row, position = teacher[1]
    own[1][0][row, position] = torch.nan
    with pytest.raises(ValueError, match=rf"teacher.*\[{row}, {position}, 0\]"):
        losses.event_kl(HiddenLogits(*own[0]), HiddenLogits(*own[1]), index, aligned)


def test_seventy_losses_share_a_pass() -> None:
    """Each loss shares some positions with other losses, but not all."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 40, 11, generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.rand(70, 2, 40, generator=generator) < 0.3
    targets = torch.randint(0, 11, (70, 2, 40), generator=generator).where(chosen, -100)
    plans = [plan_cross_entropy(student, plan_targets) for plan_targets in targets]
    total, parts = one_pass(student, plans, [1.0] * 70)
    expected = [
        torch.nn.functional.cross_entropy(student.flatten(0, 1), plan_targets.flatten())
        for plan_targets in targets
    ]
    torch.testing.assert_close(torch.stack(parts), torch.stack(expected).detach())
    (gradient,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(gradient, torch.autograd.grad(sum(expected), student)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3)}, r"hidden is \[2, 3\]"),
        ({"weight": torch.zeros(7, 4)}, r"weight \[7, 4\]"),
        ({"bias": torch.zeros(6)}, r"bias is \[6\]"),
        ({"softcap": 0}, "softcap is 0"),
    ],
)
def test_invalid_hidden_logits_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HiddenLogits(**{"hidden": torch.zeros(2, 3, 5), "weight": torch.zeros(7, 5), **change})


def test_errors_name_nan_hidden_states_and_invalid_targets() -> None:
    aligned, index = large()
    tensors, teacher = (head(shape, dtype=torch.float32)[0] for shape in LARGE)
    for number, what in enumerate(("hidden states", "weight")):
        broken = [x.detach().clone() for x in tensors]
        broken[number][0] = torch.nan
        with pytest.raises(ValueError, match=f"student's {what} .*nan"):
            losses.event_kl(HiddenLogits(*broken), HiddenLogits(*teacher), index, aligned)
        with pytest.raises(ValueError, match=f"student's {what} .*nan"):
            losses.cross_entropy(HiddenLogits(*broken), torch.zeros(LARGE[0][:2]).long())
    student = HiddenLogits(*tensors)
    with pytest.raises(ValueError, match="the targets contain id 300"):
        losses.cross_entropy(student, torch.full(LARGE[0][:2], 300))
    with pytest.raises(ValueError, match="but the logits are"):
        losses.cross_entropy(student, torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match="logits are list"):
        losses.cross_entropy([1], torch.zeros(2, 3).long())  # type: ignore[arg-type]


def test_losses_of_the_registry_that_accept_hidden_states() -> None:
    assert make_loss("alm").takes_hidden
    own = losses.CustomLoss(lambda s, t, batch, side: 2 * s.sum())
    assert not own.takes_hidden
    logits = torch.ones(1, 2, 3, requires_grad=True)
    total, [mean] = one_pass(logits, [own.plan(logits, None, {}, {})], [0.5])
    assert (float(total.detach()), float(mean)) == (6, 12)
    total.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[1.0] * 3] * 2]
