"""Products of a sparse map with probabilities, with both gradients, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.errors import XtokError

BLOCK_NUMBERS = 2**25
"""Numbers in a temporary tensor: 128 MiB in float32. Each block of hidden states reads the whole
head: 2**24 took 1.2 times as long, and 2**26 0.9 (event KL, 512 tokens, 128,256 × 262,208 ids)."""

CACHED_BLOCK_NUMBERS = 2**22
"""The same for CPU work that is fastest in the cache: comparisons and sparse products."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def project_token_likelihoods(
    student_probs: Tensor,
    student_ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    columns: Tensor | None = None,
) -> Tensor:
    """Multiply probabilities by a sparse map stored by column.

    out[..., j] = Σ_s student_probs[..., s] · W[s, columns[j]]

    `torch.sparse.mm` (PyTorch 2.13) would make a dense gradient to the weights, and
    `torch.compile` cannot trace sparse tensors.

    Args:
        student_probs: `[..., V_s]`.
        student_ids: int64 `[nnz]`, sorted by the teacher's id.
        offsets: int64 `[V_teacher + 1]`, the start of each teacher id's entries.
        weights: `[nnz]`.
        columns: int64 `[k]`, distinct teacher ids; default: all.

    Returns:
        float32 `[..., V_teacher]` or `[..., k]` (float64 for float64), with both gradients.
    """
    flat = student_probs.reshape(-1, student_probs.shape[-1])
    restricted = restrict(student_ids, offsets, columns)
    projected: Tensor = _Project.apply(flat, weights[restricted.picked], restricted)  # type: ignore[no-untyped-call]
    return projected.reshape(*student_probs.shape[:-1], projected.shape[-1])


def check_width(side: str, logits_width: int, map_width: int) -> None:
    """Raise an `XtokError` if logits are narrower than the map."""
    if logits_width < map_width:
        raise XtokError(
            f"the {side}'s logits are {logits_width} wide, expected at least {map_width} "
            "(the map's width)",
            hint=f"use a map for this {side}, or build it {logits_width} wide with {{option}}",
            parameter="vocab_size",
        )


def check_columns(columns: Tensor, width: int) -> None:
    """Raise a `ValueError` unless `columns` is int64 `[k]`; on a CPU, check the values too."""
    if columns.ndim != 1 or columns.dtype != torch.int64:
        raise ValueError(f"columns are {columns.dtype} {list(columns.shape)}, expected int64 [k]")
    if columns.device.type == "cpu" and not torch.compiler.is_compiling():
        inside = not len(columns) or bool(columns.min() >= 0 and columns.max() < width)
        if not inside or len(columns.unique()) != len(columns):
            raise ValueError(f"columns must be distinct ids in 0..{width - 1}")


def places_of(mask: Tensor, count: int) -> Tensor:
    """Return the `count` places where a mask `[n]` is true, without a fetch as in `nonzero`."""
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def ranges(starts: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the numbers and the places of n joined ranges, int64 `[total]` each."""
    device = starts.device
    numbers = torch.arange(len(starts), device=device).repeat_interleave(counts, output_size=total)
    shift = starts - counts.cumsum(0) + counts
    return numbers, torch.arange(total, device=device) + shift[numbers]


class Restricted(NamedTuple):
    """A map restricted to k columns, as local indices; m entries, int64 each."""

    used: Tensor  # [R], the student ids with an entry, rising
    rows: Tensor  # [m], each entry's place in `used`
    columns: Tensor  # [m], each entry's place among the k columns, rising
    picked: Tensor  # [m], each entry's place among all entries
    num_columns: int  # k


def restrict(student_ids: Tensor, offsets: Tensor, columns: Tensor | None) -> Restricted:
    """Restrict a map to some columns (default: all)."""
    device = student_ids.device
    if columns is None:
        columns = torch.arange(len(offsets) - 1, device=device)
    starts = offsets[columns]
    counts = offsets[columns + 1] - starts
    local, picked = ranges(starts, counts, int(counts.sum()))
    used, rows = torch.unique(student_ids[picked], return_inverse=True)
    return Restricted(used, rows, local, picked, len(columns))


def sparse_pair(restricted: Restricted, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the restricted map as sparse matrices `[k, R]` and `[R, k]`."""
    size = (restricted.num_columns, len(restricted.used))
    by_row = torch.argsort(restricted.rows, stable=True)
    return (
        _sparse(restricted.columns, restricted.rows, weights, size),
        _sparse(restricted.rows[by_row], restricted.columns[by_row], weights[by_row], size[::-1]),
    )


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    # Products only require of a coalesced tensor that entries are sorted by row.
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]), values, size, is_coalesced=True, check_invariants=False
    )


def multiply(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return a sparse matrix times `[..., b]`, in their dtype under any autocast."""
    with torch.autocast(matrix.device.type, enabled=False):
        product: Tensor = torch.sparse.mm(matrix, columns.contiguous())
        return product


def block_length(like: Any, width: int, *, cached: bool = False) -> int:
    """Return the number of rows of a width that a temporary tensor may have."""
    in_cache = cached and like.device.type == "cpu"
    size = min(BLOCK_NUMBERS, CACHED_BLOCK_NUMBERS) if in_cache else BLOCK_NUMBERS
    return max(1, size // max(width, 1))


def work_dtype(*tensors: Any) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    return torch.float64 if torch.float64 in [t.dtype for t in tensors] else torch.float32


def require_first_order() -> None:
    """Raise a `RuntimeError` in a `backward` with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this gradient cannot be differentiated again: remove create_graph=True, or apply "
            "gradient penalties to a PyTorch loss"
        )


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, weights: Tensor, restricted: Restricted) -> Tensor:
        dtype = work_dtype(probs)
        matrix, ctx.matrix = sparse_pair(restricted, weights.to(dtype))
        ctx.save_for_backward(probs)
        ctx.restricted, ctx.weights_dtype = restricted, weights.dtype
        out = probs.new_empty((len(probs), restricted.num_columns), dtype=dtype)
        for block in _blocks(probs, restricted):
            part = probs[block].index_select(1, restricted.used).to(dtype)
            out[block] = multiply(matrix, part.t()).t()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        require_first_order()
        (probs,) = ctx.saved_tensors
        dtype, restricted = work_dtype(probs), ctx.restricted
        grad_probs = torch.zeros_like(probs)
        grad_entries = torch.zeros(len(restricted.picked), dtype=dtype, device=probs.device)
        for block in _blocks(probs, restricted):
            back = grad[block].to(dtype).t().contiguous()
            grad_probs[block, restricted.used] = multiply(ctx.matrix, back).t().to(probs.dtype)
            if ctx.needs_input_grad[1]:
                part = probs[block].index_select(1, restricted.used).to(dtype).t().contiguous()
                grad_entries += entry_gradient(restricted, part, back)
        to_weights = grad_entries.to(ctx.weights_dtype) if ctx.needs_input_grad[1] else None
        return grad_probs, to_weights, None


def _blocks(probs: Tensor, restricted: Restricted) -> Iterator[slice]:
    step = block_length(probs, max(restricted.num_columns, len(restricted.used)), cached=True)
    for start in range(0, len(probs), step):
        yield slice(start, start + step)


def entry_gradient(restricted: Restricted, probs: Tensor, grad: Tensor) -> Tensor:
    """Return Σ_b probs[row, b] · grad[column, b] for each entry; `[R, b]`, `[k, b]` into `[m]`."""
    total = torch.empty(len(restricted.rows), dtype=probs.dtype, device=probs.device)
    step = block_length(probs, probs.shape[1], cached=True)
    for start in range(0, len(total), step):
        part = slice(start, start + step)
        total[part] = (probs[restricted.rows[part]] * grad[restricted.columns[part]]).sum(1)
    return total
