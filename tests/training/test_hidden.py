"""Losses from hidden states and a head beside those from logits: value and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import test_alm
import test_csd
import torch
from make import alignment
from torch import Tensor

from xtok.training import losses
from xtok.training.losses import (
    ALMConfig,
    ChunkLossConfig,
    CSDConfig,
    EventIndex,
    HiddenLogits,
    SameTokenizerConfig,
)

D = 5
HEADS: list[dict[str, Any]] = [{}, {"bias": True, "scale": 0.3, "softcap": 4.0}]
MASKS = [None, torch.tensor([1, 0, 1])]


def head(
    shape: tuple[int, ...], *, dtype: torch.dtype, bias: bool = False, seed: int = 0, **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """Hidden states, a weight and maybe a bias that want a gradient, and the other options."""
    rows, places, width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, places, D), (width, D), *([(width,)] if bias else [])]
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in made], options


def whole(tensors: list[Tensor], scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """The logits as a model has them."""
    logits = tensors[0] @ tensors[1].t()
    logits = (logits + tensors[2] if len(tensors) > 2 else logits) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


Loss = Callable[[Any, Any], Tensor]


def event_index_of(width: int, columns: int) -> EventIndex:
    """Events of one token and of several on each side."""

    from xtok.training.losses.event_kl import event_index

    class Events:
        num_events = 4
        student_event = torch.arange(width).numpy() % 4
        teacher_event = torch.arange(columns).numpy() % 4
        shape = (width, columns)

    Events.student_event[:4], Events.teacher_event[:4] = range(4), range(4)
    return event_index(Events)  # type: ignore[arg-type]


def cases() -> dict[str, tuple[Loss, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Each loss with its options, as a function of both sides' logits, and their shapes."""
    made: dict[str, Any] = {}
    ids, targets = test_alm.IDS, test_alm.sides()[2]
    shapes = (*ids[0].shape, test_alm.V_S), (*ids[1].shape, test_alm.V_T)
    aligned, index = alignment(*ids), event_index_of(test_alm.V_S, test_alm.V_T)
    for reverse, t, mask in product((False, True), (1.0, 2.5), MASKS):
        more = f"reverse={reverse} temperature={t} mask={mask is not None}"
        kl = ChunkLossConfig(reverse_kl=reverse, temperature=t)
        made[f"event_kl {more}"] = (
            (lambda s, q, c=kl, m=mask: losses.event_kl(s, q, index, aligned, c, sample_mask=m)),
            shapes,
        )
        of_alm = ALMConfig(reverse_kl=reverse, temperature=t)
        made[f"alm {more}"] = (
            (lambda s, q, c=of_alm, m=mask: losses.alm(s, q, targets, aligned, c, sample_mask=m)),
            shapes,
        )
    _, _, of_csd, of_chunks = test_csd.batch(test_csd.ROWS)
    csd_shapes = tuple(
        (*x.shape, v) for x, v in zip(of_csd, (test_csd.V_S, test_csd.V_T), strict=True)
    )
    for options, mask in product(test_csd.OPTIONS, MASKS):
        made[f"csd {options} mask={mask is not None}"] = (
            (
                lambda s, q, o=options, m=mask: losses.csd(
                    s, q, test_csd.INDEX, of_csd, of_chunks, CSDConfig(**o), sample_mask=m
                )
            ),
            csd_shapes,
        )
    same = (2, 5, 9), (2, 5, 11)
    inside = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0]])
    for reverse, t, k in product((False, True), (1.0, 2.5), (None, 4)):
        config = SameTokenizerConfig(reverse_kl=reverse, temperature=t, top_k=k)
        made[f"same_tokenizer_kl reverse={reverse} temperature={t} top_k={k}"] = (
            (lambda s, q, c=config: losses.same_tokenizer_kl(s, q, inside, c)),
            same,
        )
    own = torch.tensor([[1, 8, -100, 3, -100], [-100, 0, 2, 2, 5]])
    made["cross_entropy"] = (lambda s, q: losses.cross_entropy(s, own)), same
    top = torch.tensor([[[1, 2]] * 5, [[0, 8]] * 5])
    logprobs = torch.tensor([[[-1.0, -2.0]] * 5] * 2)
    rest = torch.full((2, 5), -1.0)
    made["topk_kl"] = (lambda s, q: losses.topk_kl(s, top, logprobs, rest, inside)), same
    return made


CASES = cases()


def value_and_gradients(loss: Loss, sides: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    value = 3 * loss(*sides)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize("of_head", HEADS, ids=["plain", "all"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_hidden_states_are_as_good_as_logits(
    name: str, of_head: dict[str, Any], dtype: torch.dtype, limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On either side and on both, in one block and in blocks of two positions."""
    loss, shapes = CASES[name]
    ours, options = head(shapes[0], dtype=dtype, **of_head)
    theirs, _ = head(shapes[1], dtype=dtype, seed=1, **of_head)
    logits = [whole(tensors, **options) for tensors in (ours, theirs)]
    expected = value_and_gradients(loss, logits, ours)
    hidden = HiddenLogits(*ours, **options), HiddenLogits(*(x.detach() for x in theirs), **options)
    for block in (None, 2 * max(shapes[0][2], shapes[1][2])):
        if block is not None:
            monkeypatch.setattr("xtok.training.sparse._BLOCK", block)
        for sides in ((hidden[0], logits[1]), hidden):
            found = value_and_gradients(loss, sides, ours)
            torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
        found = value_and_gradients(loss, (logits[0], hidden[1]), [logits[0]])
        of_logits = value_and_gradients(loss, logits, [logits[0]])
        torch.testing.assert_close(found, of_logits, rtol=limit, atol=limit)
