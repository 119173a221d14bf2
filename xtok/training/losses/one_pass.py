"""Compute several losses in one pass over the student's positions, block by block.

Each loss returns a plan. `one_pass` runs all plans on shared blocks of the student's logits, and
adds up the gradients of all plans.
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
    as_logits,
    log_probabilities,
)
from xtok.training.sparse import block_length, work_dtype


class LogitBlock:
    """The student's logits at m positions, `[m, V]`, with cached results for all losses.

    Comparisons must not modify the logits or the cached results.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._log_probs: dict[tuple[int, float], Tensor] = {}
        self._probs: dict[tuple[int, float], Tensor] = {}

    def log_probabilities(self, width: int, temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities of the first `width` tokens, `[m, width]`."""
        key = width, temperature
        if key not in self._log_probs:
            self._log_probs[key] = log_probabilities(self.logits[:, :width], temperature)
        return self._log_probs[key]

    def probabilities(self, width: int, temperature: float = 1.0) -> Tensor:
        """Return the probabilities of the first `width` tokens, `[m, width]`."""
        key = width, temperature
        if key not in self._probs:
            self._probs[key] = self.log_probabilities(width, temperature).exp()
        return self._probs[key]


class Rows(NamedTuple):
    """The positions and entries of one part of a plan in one block."""

    indices: Tensor  # int64 [m], ascending, indices into the part's n positions
    entries: Sequence[slice]  # range of the block in each of `entry_positions`
    teacher_logits: Tensor  # [m or number of entries, V]; [0] if the part reads no teacher


Compare: TypeAlias = Callable[[LogitBlock, Rows], tuple[Tensor | float, Tensor]]
"""Returns the sum of the losses at some positions, and the gradient of this sum with respect to
logits / τ. If the gradient has fewer columns than the logits, the remaining gradient is 0. The
caller overwrites the gradient."""


class Read(NamedTuple):
    """The teacher positions that a part reads: one per student position, or one per entry."""

    logits: Logits
    positions: Tensor  # int64
    per_entry: int | None = None  # index in `entry_positions`; None: one per student position

    def at(self, rows: Rows) -> Tensor:
        """Return the teacher's positions for the rows of a block."""
        indices = rows.indices if self.per_entry is None else rows.entries[self.per_entry]
        return self.positions[indices]


class PlanPart(NamedTuple):
    """One part of a plan: a comparison at n positions of the student.

    An example with two rows of T = 4 positions. Row 0 has one chunk, which consists of two student
    tokens and the teacher token a. Row 1 has a chunk with the teacher tokens b and c, and a chunk
    with d. Each teacher token is an entry at its chunk's first student position:

        positions        0  1  4  6     row · 4 + t
        index            0  1  2  3     in `positions`
        chunk            0  0  1  2
        entries          a     bc d     entry_positions = [[0, 2, 2, 3]]

    The part reads the teacher once per entry: `Read(logits, positions of a b c d, per_entry=0)`. A
    block with the positions 4 and 6 passes `Rows` with the indices [2, 3], the range 1:4 of the
    entries, and the teacher's logits at b, c and d.
    """

    positions: Tensor  # int64 [n], row · T + t; distinct
    compare: Compare
    teacher: Read | None = None
    width: int = 0  # width of the teacher's logits, for the size of blocks
    entry_positions: Sequence[Tensor] = ()  # int64 [e], ascending, indices in `positions`
    chunk: Tensor | None = None  # int64 [n], ascending; a block contains whole chunks


class Plan(NamedTuple):
    """The comparisons of a loss. The loss is τ² · (sum of all terms) / `num_terms`."""

    parts: Sequence[PlanPart]
    num_terms: int  # without terms, the loss is 0
    dtype: torch.dtype
    temperature: float = 1.0
    check: Callable[[], None] = lambda: None  # raises an error for invalid input
    # Other tensors that require gradients, and their accumulated gradients.
    gradients: Sequence[tuple[Tensor, Tensor]] = ()
    value: Tensor | float = 0.0  # added to the sum of the terms

    @property
    def scale(self) -> float:
        """Factor that converts the sum of all terms to the loss."""
        return self.temperature**2 / max(1, self.num_terms)


def one_pass(
    student: AnyLogits, plans: Sequence[Plan], weights: Sequence[float | Tensor] = (1.0,)
) -> tuple[Tensor, list[Tensor]]:
    """Return the scalar Σ weight · loss, and the losses as scalars without gradients.

    The gradient is computed together with the losses. `backward` consumes this gradient, so
    `backward` can run only once.

    Raises:
        ValueError: if a loss is not finite; the message names the invalid input.
    """
    logits = as_logits(student)
    # A plan that has `gradients`, but no parts, needs no gradient of the logits.
    compares = any(plan.parts or not plan.gradients for plan in plans)
    gradients_of: Gradients = logits.gradients() if compares else (None,) * len(logits.inputs)
    dtype = work_dtype(*plans)
    weights = [w.double() if isinstance(w, Tensor) else w for w in weights]
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        sums = _compare(logits, plans, weights, gradients_of, dtype)
        losses = [total * plan.scale for plan, total in zip(plans, sums, strict=True)]
        _require_finite(losses, plans, logits)
        total = torch.stack([x * w for x, w in zip(losses, weights, strict=True)]).sum()
    inputs, gradients = [*logits.inputs], [*gradients_of]
    for plan, weight in zip(plans, weights, strict=True):
        for tensor, gradient in plan.gradients:
            inputs.append(tensor)
            gradients.append(gradient.mul_(weight * plan.scale))
    loss: Tensor = total.to(dtype)
    if any(gradient is not None for gradient in gradients):
        loss = _WithGradient.apply(loss, gradients, *inputs)  # type: ignore[no-untyped-call]
    return loss, [x.to(dtype) for x in losses]


# A part of a plan, the factor of the part's gradient, and the plan's accumulated loss.
_Term: TypeAlias = tuple[PlanPart, Tensor | float, Tensor]


def _compare(
    logits: Logits,
    plans: Sequence[Plan],
    weights: Sequence[float | Tensor],
    gradients: Gradients,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the sum of each plan's terms, and add the gradients of the sums to `gradients`."""
    sums = [torch.zeros((), dtype=torch.float64, device=logits.device) + p.value for p in plans]
    terms: list[_Term] = [
        (part, weight * (plan.scale / plan.temperature), total)
        for plan, weight, total in zip(plans, weights, sums, strict=True)
        for part in plan.parts
        if len(part.positions)
    ]
    for positions, blocks in _blocks(logits, [part for part, _, _ in terms]):
        _compare_at(logits, terms, positions, blocks, gradients, dtype)
    return sums


def _compare_at(
    logits: Logits,
    terms: Sequence[_Term],
    positions: Tensor,
    blocks: Sequence[Block],
    gradients: Gradients,
    dtype: torch.dtype,
) -> None:
    """Run the comparisons at some positions. The logits are freed when this function returns."""
    values, grad = logits.at(positions, dtype), None
    has_gradient = any(x is not None for x in gradients)
    for span, in_block in _with_teachers([part for part, _, _ in terms], blocks, dtype):
        grad = _compare_block(values[span], terms, in_block, has_gradient=has_gradient)
        if grad is not None:
            grad = logits.before_cap(values[span], grad)
            if len(blocks) > 1:
                values[span].copy_(grad)
    if grad is not None:
        logits.add_gradient(gradients, positions, grad if len(blocks) == 1 else values)


def _compare_block(
    logits: Tensor, terms: Sequence[_Term], in_block: Sequence[InBlock], *, has_gradient: bool
) -> Tensor | None:
    block, grad = LogitBlock(logits), None
    for part_index, rows, indices in in_block:
        part, factor, total = terms[part_index]
        part_block = block if indices is None else LogitBlock(logits[indices])
        loss, block_grad = part.compare(part_block, rows)
        total += loss
        if has_gradient:
            grad = _add(grad, block_grad.mul_(factor), logits, indices)
    return grad


def _add(total: Tensor | None, grad: Tensor, logits: Tensor, indices: Tensor | None) -> Tensor:
    if total is None and grad.shape == logits.shape:
        return grad
    total = torch.zeros_like(logits) if total is None else total
    if indices is None:
        total[:, : grad.shape[1]] += grad
    else:
        total[:, : grad.shape[1]].index_add_(0, indices, grad)
    return total


InBlock: TypeAlias = tuple[int, Rows, Tensor | None]
"""A part's number, its rows, and the rows' indices in the block (None for all)."""

Block: TypeAlias = tuple[slice, list[InBlock]]
"""A slice of a group of positions, and the parts that compare the positions of the slice."""


def _with_teachers(
    parts: Sequence[PlanPart], blocks: Sequence[Block], dtype: torch.dtype
) -> Iterator[Block]:
    """Yield the blocks with the teacher's logits, which are computed for all blocks at once."""
    logits: dict[int, Iterator[Tensor]] = {}
    for index, part in enumerate(parts):
        if read := part.teacher:
            at = [read.at(rows) for _, block in blocks for n, rows, _ in block if n == index]
            sizes = [*map(len, at)]
            logits[index] = iter(read.logits.at(torch.cat(at), dtype).split(sizes) if at else ())
    for span, in_block in blocks:
        with_logits = [
            (n, rows._replace(teacher_logits=next(logits[n])) if n in logits else rows, indices)
            for n, rows, indices in in_block
        ]
        yield span, with_logits


def _blocks(logits: Logits, parts: Sequence[PlanPart]) -> Iterator[tuple[Tensor, list[Block]]]:
    """Yield groups of positions, and the blocks of each group.

    One matrix product computes the logits of a group, because each product reads the whole head.
    Comparisons use smaller blocks, which fit into a CPU's cache. This reduces the time of a step to
    77 % (event KL of 512 tokens, 49,152 × 262,144 ids, one core).
    """
    if not parts:
        return
    step, max_positions = _block_lengths(logits, parts)
    order, bounds, ordered = _order(parts, logits.shape[0] * logits.shape[1], step)
    slices = _slices(parts, ordered, bounds)
    group_start, blocks = bounds[0], list[Block]()
    for start, end in pairwise(bounds):
        if blocks and end - group_start > max_positions:
            yield order[group_start:start], blocks
            group_start, blocks = start, []
        in_block: list[InBlock] = []
        for index, (ranks, indices) in enumerate(ordered):
            first, last, *entries = next(slices)
            if last > first:
                local = None if last - first == end - start else ranks[first:last] - start
                ends = zip(entries[::2], entries[1::2], strict=True)
                rows = Rows(indices[first:last], [slice(*e) for e in ends], ranks.new_empty(0))
                in_block.append((index, rows, local))
        blocks.append((slice(start - group_start, end - group_start), in_block))
    yield order[group_start:], blocks


def _block_lengths(logits: Logits, parts: Sequence[PlanPart]) -> tuple[int, int]:
    """Return the maximum number of positions in a block, and the maximum number in a group."""
    width = max(logits.shape[2], *(part.width for part in parts))
    step = block_length(logits, width, cached=True)
    sources = [logits, *(part.teacher.logits for part in parts if part.teacher)]
    has_heads = any(isinstance(source, HiddenLogits) for source in sources)
    return step, block_length(logits, width) if has_heads else step


def _order(
    parts: Sequence[PlanPart], size: int, step: int
) -> tuple[Tensor, list[int], list[tuple[Tensor, Tensor]]]:
    """Return the positions sorted by block, the blocks' bounds, and each part's indices.

    Unused positions come first. A part's indices are two tensors: the ascending indices of its
    positions in this order, and the corresponding indices within the part.

    Each position has a code, which identifies the parts that compare this position. All positions
    of a block have the same code, so no part needs a mask. An example with two parts and blocks of
    two positions:

        position   0   1   2   3   4   5
        part 0     x   x       x            adds 2 to the code
        part 1         x   x   x            adds 1
        code       2   3   1   3   0   0
        order      4   5 | 2 | 0 | 1   3    the bounds are 2, 3, 4, 6

    A block contains whole chunks. All positions in chunks get the largest code. `joined` is above 0
    where a chunk continues, so that no block ends there.
    """
    first, device = parts[0].positions, parts[0].positions.device
    if len(parts) == 1 and parts[0].chunk is None:
        indices = torch.arange(len(first), device=device)
        return first, [*range(0, len(first), step), len(first)], [(indices, indices)]
    code, joined = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
    for index, part in enumerate(parts):
        code *= 2
        code[part.positions] += 1
        if index % 32 == 31:  # renumber codes so that the codes fit into 64 bits
            code = torch.where(code > 0, torch.unique(code, return_inverse=True)[1] + 1, 0)
    for positions, *_, chunk in parts:
        if chunk is not None:
            goes_on = (chunk[1:] == chunk[:-1]).long()
            joined.index_add_(0, positions[:-1], goes_on).index_add_(0, positions[1:], -goes_on)
            code[positions] = torch.iinfo(code.dtype).max
    order = code.argsort(stable=True)
    code, is_joined = code[order], joined.cumsum(0)[order] > 0
    is_last = torch.nn.functional.pad(code[1:] != code[:-1], (0, 1), value=True)
    # This is the only transfer from the device.
    ends, cuts, unused = torch.stack([is_last, ~is_joined, code == 0]).cpu().numpy()
    bounds, allowed = [int(unused.sum())], np.flatnonzero(cuts | ends) + 1
    for end in np.flatnonzero(ends) + 1:
        while bounds[-1] < end:
            furthest = np.searchsorted(allowed, bounds[-1] + step, side="right") - 1
            nearest = np.searchsorted(allowed, bounds[-1], side="right")
            bounds.append(min(int(end), int(allowed[max(furthest, nearest)])))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(size, device=device)
    return order, bounds, [rank[part.positions].sort() for part in parts]


def _slices(
    parts: Sequence[PlanPart], ordered: Sequence[tuple[Tensor, Tensor]], bounds: Sequence[int]
) -> Iterator[list[int]]:
    if len(parts) == 1 and not parts[0].entry_positions:
        yield from ([start, end] for start, end in pairwise(bounds))
        return
    columns = []
    for part, (ranks, indices) in zip(parts, ordered, strict=True):
        edges = torch.searchsorted(ranks, torch.tensor(bounds, device=ranks.device))
        columns += [edges[:-1], edges[1:]]
        first, last = indices[columns[-2].clamp(max=len(ranks) - 1)], indices[columns[-1] - 1]
        for entries in part.entry_positions:
            columns += [torch.searchsorted(entries, first), torch.searchsorted(entries, last + 1)]
    for block in torch.stack(columns, 1).tolist():
        bounds_left = iter(block)
        for part in parts:
            yield [*islice(bounds_left, 2 + 2 * len(part.entry_positions))]


class _WithGradient(torch.autograd.Function):
    """Makes a loss differentiable: `backward` returns the gradients that were computed before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Any, *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the caller set create_graph=True
            raise RuntimeError(
                "this gradient cannot be differentiated again: remove create_graph=True, or apply "
                "gradient penalties to a PyTorch loss"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward can run only once per loss; compute the loss again")
        scaled = [
            None if gradient is None else _scale(gradient, grad_loss).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    dtype = work_dtype(gradient)
    if gradient.dtype == dtype:
        return gradient.mul_(factor.to(dtype))
    for part in gradient.view(-1).split(2**22):
        part.copy_(part.to(dtype).mul_(factor))
    return gradient


def _require_finite(losses: Sequence[Tensor], plans: Sequence[Plan], student: Logits) -> None:
    are_finite = torch.isfinite(torch.stack([*losses])).tolist()
    wrong = [plan for plan, fine in zip(plans, are_finite, strict=True) if plan.parts and not fine]
    for plan in wrong:
        plan.check()
    for part in chain.from_iterable(plan.parts for plan in wrong):
        sides = [("student", student, part.positions)]
        if part.teacher:
            sides.append(("teacher", part.teacher.logits, part.teacher.positions))
        for name, logits, positions in sides:
            if problem := logits.find_invalid(positions):
                raise ValueError(f"the {name}'s {problem}")
    if wrong:
        raise ValueError("the loss is not finite: all logits of a compared position are -inf")
