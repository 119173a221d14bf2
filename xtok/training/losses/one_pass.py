"""One pass over the student's positions: every block of its logits is made once, for all losses.

A loss plans: at which positions of the student it compares what. `one_pass` runs plans, of one loss
or of several with the cross-entropy, and all their gradients go into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from xtok.training.losses.logits import (
    AnyLogits,
    Gradients,
    HiddenLogits,
    Logits,
    Positions,
    as_logits,
    log_probabilities,
)
from xtok.training.sparse import block_length, require_first_order, work_dtype


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
    """What a part has in a block."""

    numbers: Tensor  # int64 [m], rising: which of the part's n positions
    entries: Sequence[slice]  # for each of `places`, the entries that may be at one of them
    teacher_logits: Tensor  # at what the part reads of the teacher; [0] where it reads nothing

    def entries_at(self, place: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Return the row of the block that each entry is at, any if none, and whether it is."""
        place = place[entries]
        at = torch.searchsorted(self.numbers, place).clamp_(max=len(self.numbers) - 1)
        return at, self.numbers[at] == place


Compare: TypeAlias = Callable[[LogitBlock, Rows], tuple[Tensor | float, Tensor]]
"""Returns the sum of losses at some positions, and its gradient to the first columns of the
student's logits over τ, which is overwritten."""


class Read(NamedTuple):
    """What a part reads of a teacher: the logits at one position for each of its own.

    Or, with `of_place`, for each entry of one of its `places`.
    """

    logits: Logits
    positions: Positions
    of_place: int | None = None

    def at(self, rows: Rows) -> Positions:
        """Return the positions for a block."""
        which = rows.numbers if self.of_place is None else rows.entries[self.of_place]
        return self.positions[0][which], self.positions[1][which]


class Part(NamedTuple):
    """What a loss compares at n positions of the student."""

    positions: Positions  # each once, and rising with `chunk`
    compare: Compare
    teacher: Read | None = None
    width: int = 0  # of the teacher's side, for the size of blocks
    places: Sequence[Tensor] = ()  # int64 [e], rising: at which of the positions entries are
    chunk: Tensor | None = None  # int64 [n], rising: what has one number comes in one block


class ReadLogits(NamedTuple):
    """Which logits a loss reads, for errors that name one of them."""

    name: str
    logits: Logits
    positions: Positions
    width: int


def sides_of(
    both: Sequence[Logits], positions: Sequence[Positions], widths: Sequence[int]
) -> list[ReadLogits]:
    """Return the student's side, and the teacher's if there is one."""
    names = ("student", "teacher")[: len(both)]
    return [ReadLogits(*side) for side in zip(names, both, positions, widths, strict=True)]


class Plan(NamedTuple):
    """A loss as what it compares: τ² times a mean over `num_terms`."""

    parts: Sequence[Part]
    num_terms: int  # 0 where nothing is compared; the loss is 0 then
    dtype: torch.dtype
    temperature: float = 1.0
    sides: Sequence[ReadLogits] = ()
    explain: Callable[[], None] = lambda: None  # raises an error for what made a loss NaN
    # Other tensors that want a gradient, and sums of it, which comparisons add up.
    learned: Sequence[tuple[Tensor, Tensor]] = ()
    by_autograd: Tensor | None = None  # the loss itself, of somebody's who compares whole logits


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
    is_theirs = [plan.by_autograd is not None for plan in plans]
    to: Gradients = (None,) if all(is_theirs) else logits.gradients()
    dtype = torch.float64 if torch.float64 in [p.dtype for p in plans] else torch.float32
    weights = [w.double() if isinstance(w, Tensor) else w for w in weights]
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        sums = _compare(logits, plans, weights, to, dtype)
        scales = [plan.temperature**2 / max(1, plan.num_terms) for plan in plans]
        losses = [
            total * scale if plan.by_autograd is None else plan.by_autograd.detach().double()
            for total, scale, plan in zip(sums, scales, plans, strict=True)
        ]
        _require_finite(losses, plans)
        total = torch.stack([x * w for x, w in zip(losses, weights, strict=True)]).sum()
    inputs, gradients = [*logits.inputs[: len(to)]], [*to]
    connected = []
    for plan, weight, scale in zip(plans, weights, scales, strict=True):
        inputs += [tensor for tensor, _ in plan.learned]
        gradients += [gradient.mul_(weight * scale) for _, gradient in plan.learned]
        if plan.by_autograd is not None:
            own = plan.by_autograd.double() * weight
            connected.append((own - own.detach()).to(dtype))
    result = with_gradient(inputs, total.to(dtype), gradients)
    return sum(connected, result), [x.to(dtype) for x in losses]


class _Term(NamedTuple):
    """A part with the factor of its gradient, and the sum of its plan's losses."""

    part: Part
    factor: Tensor | float
    total: Tensor


def _compare(
    logits: Logits,
    plans: Sequence[Plan],
    weights: Sequence[float | Tensor],
    to: Gradients,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return each plan's sum of losses, and add the gradient of all to that of the logits."""
    sums = [torch.zeros((), dtype=torch.float64, device=logits.device) for _ in plans]
    terms = [
        _Term(part, weight * (plan.temperature / max(1, plan.num_terms)), total)
        for plan, weight, total in zip(plans, weights, sums, strict=True)
        for part in plan.parts
    ]
    for positions, blocks in _blocks(logits, [term.part for term in terms]):
        _compare_at(logits, terms, positions, blocks, to, dtype)
    return sums


def _compare_at(
    logits: Logits,
    terms: Sequence[_Term],
    positions: Positions,
    blocks: Sequence[Block],
    to: Gradients,
    dtype: torch.dtype,
) -> None:
    """Compare at some positions. Their logits are freed before those of others are made."""
    made, back = logits.at(positions, dtype), None
    has_gradient = any(x is not None for x in to)
    for place, in_block in _with_teachers([term.part for term in terms], blocks, dtype):
        block, back = LogitBlock(made[place]), None
        for number, rows, inside in in_block:
            part, factor, total = terms[number]
            of_part = block if inside is None else LogitBlock(block.logits[inside])
            lost, to_block = part.compare(of_part, rows)
            total += lost
            if has_gradient:
                back = _sum(back, to_block.mul_(factor), block.logits, inside)
        if back is not None:
            back = logits.before_cap(block.logits, back)
            if len(blocks) > 1:
                block.logits.copy_(back)
    if back is not None:
        logits.add(to, positions, back if len(blocks) == 1 else made)


def _sum(back: Tensor | None, more: Tensor, logits: Tensor, inside: Tensor | None) -> Tensor:
    """Add the gradient to the first columns of all rows, or of those inside, to that to all."""
    if back is None and more.shape == logits.shape:
        return more
    back = torch.zeros_like(logits) if back is None else back
    if inside is None:
        back[:, : more.shape[1]] += more
    else:
        back[:, : more.shape[1]].index_add_(0, inside, more)
    return back


InBlock: TypeAlias = tuple[int, Rows, Tensor | None]
"""Which part, what it has in a block, and in which of the block's rows; None: in all."""

Block: TypeAlias = tuple[slice, list[InBlock]]
"""Which of the positions that come at once, and the parts that compare there."""


def _with_teachers(
    parts: Sequence[Part], blocks: Sequence[Block], dtype: torch.dtype
) -> Iterator[Block]:
    """Yield blocks with what their parts read of teachers, made for all of them at once."""
    wanted: dict[int, list[Positions]] = {}
    made: dict[int, Iterator[Tensor]] = {}
    for number, rows, _ in chain.from_iterable(in_block for _, in_block in blocks):
        if read := parts[number].teacher:
            wanted.setdefault(number, []).append(read.at(rows))
    for number, read in enumerate(part.teacher for part in parts):
        if read and number in wanted:
            sides = [torch.cat(side) for side in zip(*wanted[number], strict=True)]
            sizes = [len(one[0]) for one in wanted[number]]
            made[number] = iter(read.logits.at((sides[0], sides[1]), dtype).split(sizes))
    for place, in_block in blocks:
        yield place, [
            (number, rows._replace(teacher_logits=next(made[number])), inside)
            if number in made else (number, rows, inside)
            for number, rows, inside in in_block
        ]  # fmt: skip


def _blocks(logits: Logits, parts: Sequence[Part]) -> Iterator[tuple[Positions, list[Block]]]:
    """Yield positions whose logits are made at once, and the blocks in which they are compared.

    Each position comes once. Those that the same parts compare at are in one block, so that a part
    seldom has some of a block's rows alone; and those of a chunk, wherever a part asks for it.

    A product reads a whole head, so it wants many positions; a CPU compares fastest what stays in
    its cache (0.77 of the time: event KL of 512 tokens, 49,152 × 262,144 ids, one core).
    """
    if not parts:
        return
    length, device = logits.shape[1], logits.device
    width = max(logits.shape[2], *(part.width for part in parts))
    step = block_length(logits, width, cached=True)
    reads = [logits, *(part.teacher.logits for part in parts if part.teacher)]
    has_heads = any(isinstance(one, HiddenLogits) for one in reads)
    at_once = block_length(logits, width) if has_heads else step
    flat = [rows * length + places for rows, places in (part.positions for part in parts)]
    if len(parts) == 1 and parts[0].chunk is None:
        [order], bounds = flat, [*range(0, len(flat[0]), step), len(flat[0])]
        of_parts = [(torch.arange(len(order), device=device),) * 2]
    else:
        order, bounds = _order(flat, parts, logits.shape[0] * length, step)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        of_parts = [rank[places].sort() for places in flat]
    slices, nothing = _slices(parts, of_parts, bounds), torch.empty(0, device=device)
    begin, blocks = bounds[0], list[Block]()
    for start, stop in pairwise(bounds):
        if blocks and stop - begin > at_once:
            yield (order[begin:start] // length, order[begin:start] % length), blocks
            begin, blocks = start, []
        in_block: list[InBlock] = []
        for number, (at, numbers) in enumerate(of_parts):
            first, last, *entries = next(slices)
            if last > first:
                inside = None if last - first == stop - start else at[first:last] - start
                ends = zip(entries[::2], entries[1::2], strict=True)
                rows = Rows(numbers[first:last], [slice(*one) for one in ends], nothing)
                in_block.append((number, rows, inside))
        blocks.append((slice(start - begin, stop - begin), in_block))
    yield (order[begin:] // length, order[begin:] % length), blocks


def _order(
    flat: Sequence[Tensor], parts: Sequence[Part], size: int, step: int
) -> tuple[Tensor, list[int]]:
    """Return the places in an order of blocks, those of no part first, and where blocks begin."""
    code, joined = (torch.zeros(size, dtype=torch.int64, device=flat[0].device) for _ in range(2))
    for number, places in enumerate(flat):
        code *= 2
        code[places] += 1
        if number % 32 == 31:  # so that it stays within 64 bits
            code = torch.where(code > 0, torch.unique(code, return_inverse=True)[1] + 1, 0)
    for places, part in zip(flat, parts, strict=True):
        if part.chunk is not None:
            goes_on = (part.chunk[1:] == part.chunk[:-1]).long()
            joined.index_add_(0, places[:-1], goes_on).index_add_(0, places[1:], -goes_on)
            code[places] = torch.iinfo(code.dtype).max
    order = code.argsort(stable=True)
    code, is_joined = code[order], joined.cumsum(0)[order] > 0
    is_last = torch.nn.functional.pad(code[1:] != code[:-1], (0, 1), value=True)
    # The one thing that is fetched.
    ends, cuts, unused = torch.stack([is_last, ~is_joined, code == 0]).cpu().numpy()
    bounds, allowed = [int(unused.sum())], np.flatnonzero(cuts | ends) + 1
    for end in np.flatnonzero(ends) + 1:
        while bounds[-1] < end:
            furthest = np.searchsorted(allowed, bounds[-1] + step, side="right") - 1
            nearest = np.searchsorted(allowed, bounds[-1], side="right")
            bounds.append(min(int(end), int(allowed[max(furthest, nearest)])))
    return order, bounds


def _slices(
    parts: Sequence[Part], ordered: Sequence[tuple[Tensor, Tensor]], bounds: Sequence[int]
) -> Iterator[list[int]]:
    """Yield for each block and part where the part's rows begin and end, and its entries."""
    if len(parts) == 1 and not parts[0].places:
        yield from ([start, stop] for start, stop in pairwise(bounds))
        return
    columns = []
    for part, (at, numbers) in zip(parts, ordered, strict=True):
        edges = torch.searchsorted(at, torch.tensor(bounds, device=at.device))
        columns += [edges[:-1], edges[1:]]
        first, last = numbers[columns[-2].clamp(max=len(at) - 1)], numbers[columns[-1] - 1]
        for place in part.places:
            columns += [torch.searchsorted(place, first), torch.searchsorted(place, last + 1)]
    for block in torch.stack(columns, 1).tolist():
        rest = iter(block)
        for part in parts:
            yield [*islice(rest, 2 + 2 * len(part.places))]


def with_gradient(
    inputs: Sequence[Tensor | None], loss: Tensor, gradients: Sequence[Tensor | None]
) -> Tensor:
    """Return a loss whose gradients to some inputs are known."""
    if all(one is None for one in gradients):
        return loss
    connected: Tensor = _WithGradient.apply(loss, gradients, *inputs)  # type: ignore[no-untyped-call]
    return connected


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Any, *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        require_first_order()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss keeps its gradient for one backward; compute it again")
        scaled = [
            None if one is None else _scaled(one, grad_loss).to(dtype)
            for one, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient in place, by a factor that is not rounded to a half precision."""
    dtype = work_dtype(gradient)
    if gradient.dtype == dtype:
        return gradient.mul_(factor.to(dtype))
    for part in gradient.view(-1).split(2**22):
        part.copy_(part.to(dtype).mul_(factor))
    return gradient


def _require_finite(losses: Sequence[Tensor], plans: Sequence[Plan]) -> None:
    """Raise a `ValueError` unless all losses are finite."""
    is_finite = torch.isfinite(torch.stack(list(losses)))
    if bool(is_finite.all()):
        return
    wrong = [
        plan for plan, fine in zip(plans, is_finite.tolist(), strict=True)
        if not fine and plan.by_autograd is None
    ]  # fmt: skip
    if not wrong:
        return
    for plan in wrong:
        plan.explain()
    for plan in wrong:
        for side in plan.sides:
            if culprit := side.logits.culprit(side.positions, side.width):
                raise ValueError(f"the {side.name}'s {culprit}")
    raise ValueError("a position that is compared has no finite logit, so the loss is not finite")
