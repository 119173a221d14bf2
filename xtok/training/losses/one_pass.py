"""One pass over the student's positions: every block of its logits is made once, for all losses.

A loss plans: at which positions of the student it compares what. `one_pass` runs plans, of one loss
or of several with the cross-entropy, and all their gradients go into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok.training.losses.logits import (
    AnyLogits,
    Gradients,
    Logits,
    Positions,
    as_logits,
    log_probabilities,
)
from xtok.training.sparse import block_length


class LogitBlock:
    """The student's logits at some positions, `[m, V]`, and what comparisons share of them.

    All leave them as they are.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._made: dict[tuple[int, float], Tensor] = {}
        self._exp: dict[tuple[int, float], Tensor] = {}

    def log_probabilities(self, width: int, temperature: float = 1.0) -> Tensor:
        """Return those of the first tokens, `[m, width]`, at a temperature."""
        key = width, temperature
        if key not in self._made:
            self._made[key] = log_probabilities(self.logits[:, :width], temperature)
        return self._made[key]

    def probabilities(self, width: int, temperature: float = 1.0) -> Tensor:
        """Return those of the first tokens, `[m, width]`, at a temperature."""
        key = width, temperature
        if key not in self._exp:
            self._exp[key] = self.log_probabilities(width, temperature).exp()
        return self._exp[key]


class Rows(NamedTuple):
    """Which of a part's n positions are in a block."""

    numbers: Tensor  # int64 [m], rising
    entries: slice  # of the part's, those that may be at one of them

    def entries_at(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of the block that each entry is at, any if none, and whether it is."""
        place = place[self.entries]
        at = torch.searchsorted(self.numbers, place).clamp_(max=len(self.numbers) - 1)
        return at, self.numbers[at] == place


Compare: TypeAlias = Callable[[LogitBlock, Rows], tuple[Tensor | float, Tensor]]
"""Returns the sum of losses at some positions, and its gradient to the first columns of the
student's logits over τ, which is overwritten."""


class Part(NamedTuple):
    """What a loss compares at n positions of the student."""

    positions: Positions  # each once
    compare: Compare
    width: int = 0  # of the teacher's side, for the size of blocks
    place: Tensor | None = None  # int64 [e], rising: of entries, which of the positions each is at
    only_gradient: bool = False  # whether its losses are known, so that only a gradient needs it


class Plan(NamedTuple):
    """A loss as what it compares: τ² times a mean over `num_terms`."""

    parts: Sequence[Part]
    num_terms: int  # 0 where nothing is compared; the loss is 0 then
    dtype: torch.dtype
    temperature: float = 1.0
    known: Tensor | float = 0.0  # the part of the sum of losses that needs no pass
    teacher: Logits | None = None
    explain: Callable[[], None] = lambda: None  # raises an error for what made a loss NaN


def one_pass(
    student: AnyLogits, plans: Sequence[Plan], weights: Sequence[float | Tensor] = (1.0,)
) -> tuple[Tensor, list[Tensor]]:
    """Return Σ weight · loss, and each loss without a gradient; all are scalars.

    The gradient is computed with the losses, and used up by `backward`, which can run once. It is
    the one large allocation where the student's logits are a tensor.

    Args:
        student: its logits, `[B, T, V]`.
        plans: of the losses.
        weights: one for each; numbers, or tensors without a dimension.

    Raises:
        ValueError: if a loss is not finite, naming the logits or what else is at fault.
    """
    logits = as_logits(student)
    to = logits.gradients()
    dtype = torch.float64 if torch.float64 in [p.dtype for p in plans] else torch.float32
    weights = [w.double() if isinstance(w, Tensor) else w for w in weights]
    has_gradient = any(x is not None for x in to)
    parts, factors, owners = [], [], []
    for number, (plan, weight) in enumerate(zip(plans, weights, strict=True)):
        kept = [part for part in plan.parts if has_gradient or not part.only_gradient]
        parts += kept
        factors += [weight * (plan.temperature / max(1, plan.num_terms))] * len(kept)
        owners += [number] * len(kept)
    sums = [torch.zeros((), dtype=torch.float64, device=logits.device) + p.known for p in plans]
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for positions, rows in _blocks(logits, parts):
            block, back = LogitBlock(logits.at(positions, dtype)), None
            for part, rows_of_part in rows:
                lost, to_block = parts[part].compare(block, rows_of_part)
                sums[owners[part]] += lost
                if has_gradient:
                    back = _sum(back, to_block.mul_(factors[part]), block.logits)
            if back is not None:
                if logits.may_be_masked:
                    back.masked_fill_(torch.isneginf(block.logits), 0)
                logits.add(to, positions, block.logits, back)
        losses = [
            total * (plan.temperature**2 / max(1, plan.num_terms))
            for total, plan in zip(sums, plans, strict=True)
        ]
        _require_finite(losses, logits, plans)
        total = torch.stack([x * w for x, w in zip(losses, weights, strict=True)]).sum()
    return with_gradient(logits, total.to(dtype), to), [x.to(dtype) for x in losses]


def _sum(back: Tensor | None, more: Tensor, logits: Tensor) -> Tensor:
    """Add the gradient to the first columns to that to all of them."""
    if back is None and more.shape == logits.shape:
        return more
    back = torch.zeros_like(logits) if back is None else back
    back[:, : more.shape[1]] += more
    return back


def _blocks(
    logits: Logits, parts: Sequence[Part]
) -> Iterator[tuple[Positions, list[tuple[int, Rows]]]]:
    """Yield blocks of positions, and the parts that compare there; each position comes once."""
    if not parts:
        return
    step = block_length(logits, max(logits.shape[2], *(part.width for part in parts)))
    flat = [rows * logits.shape[1] + places for rows, places in (part.positions for part in parts)]
    size = logits.shape[0] * logits.shape[1]
    blocks = [
        (places, [(n, _numbers(flat[n], places, size)) for n in members])
        for members, group in _groups(flat, size)
        for places in group.split(step)
    ]
    entries = iter(_entries(parts, blocks))
    for places, of_parts in blocks:
        rows = [(n, Rows(numbers, next(entries))) for n, numbers in of_parts]
        yield (places // logits.shape[1], places % logits.shape[1]), rows


def _groups(flat: Sequence[Tensor], size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the positions that the same parts compare at, rising."""
    if len(flat) == 1:
        yield [0], flat[0]
        return
    code = torch.zeros(size, dtype=torch.int64, device=flat[0].device)
    for bit, places in enumerate(flat):
        code[places] += 1 << bit
    codes = torch.arange(1 << len(flat), device=code.device)
    order = code.argsort(stable=True)
    bounds = torch.searchsorted(code[order], codes).tolist()
    for number, (start, stop) in enumerate(zip(bounds, [*bounds[1:], size], strict=True)):
        if number and stop > start:
            yield [n for n in range(len(flat)) if number >> n & 1], order[start:stop]


def _numbers(flat: Tensor, places: Tensor, size: int) -> Tensor:
    """Return which of a part's positions some places are."""
    number = torch.empty(size, dtype=torch.int64, device=flat.device)
    number[flat] = torch.arange(len(flat), device=flat.device)
    return number[places]


def _entries(parts: Sequence[Part], blocks: Sequence[tuple[Any, Any]]) -> list[slice]:
    """Return the entries of the parts that each block may have, in their order."""
    ends, places = [], [part.place for part in parts]
    for _, of_parts in blocks:
        for n, numbers in of_parts:
            place = places[n]
            if place is not None:
                ends.append(torch.searchsorted(place, torch.stack([numbers[0], numbers[-1] + 1])))
    found = iter(torch.stack(ends).tolist() if ends else [])
    return [
        slice(0, 0) if places[n] is None else slice(*next(found))
        for _, of_parts in blocks for n, _ in of_parts
    ]  # fmt: skip


def with_gradient(logits: Logits, loss: Tensor, gradients: Gradients) -> Tensor:
    """Return a loss whose gradients to the inputs of logits are known."""
    if all(one is None for one in gradients):
        return loss
    connected: Tensor = _WithGradient.apply(loss, gradients, *logits.inputs)  # type: ignore[no-untyped-call]
    return connected


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Gradients, *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss keeps its gradient for one backward; compute it again")
        scaled = [
            None if one is None else one.mul_(grad_loss.to(one.dtype)).to(dtype)
            for one, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled


def _require_finite(losses: Sequence[Tensor], student: Logits, plans: Sequence[Plan]) -> None:
    """Raise a `ValueError` unless all losses are finite."""
    if bool(torch.isfinite(torch.stack(list(losses))).all()):
        return
    for plan in plans:
        plan.explain()
    for side, logits in [("student", student), *(("teacher", plan.teacher) for plan in plans)]:
        if logits is not None and (culprit := logits.culprit()):
            raise ValueError(f"the {side}'s {culprit}")
    raise ValueError("a position that is compared has no finite logit, so the loss is not finite")
