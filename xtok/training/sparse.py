"""Products of a sparse map with probabilities, and the sizes of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from xtok.errors import XtokError

BLOCK_NUMBERS = 2**25
"""Numbers in a temporary tensor: 128 MiB in float32. Each block of hidden states reads the whole
head: 2**24 took 1.2 times as long, and 2**26 0.9 (event KL, 512 tokens, 128,256 × 262,208 ids)."""

CACHED_BLOCK_NUMBERS = 2**22
"""The same for comparisons on a CPU, which are fastest in the cache."""


def project_sparse(probs: Tensor, student_ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Multiply probabilities by a sparse map stored by column, with both gradients.

    out[b, j] = Σ_i probs[b, student_ids[i]] · weights[i], over the entries i of column j

    A column is a bag of student tokens. `torch.sparse.mm` (PyTorch 2.13) would make a dense
    gradient to the weights.

    Args:
        probs: `[b, V]`.
        student_ids: int64 `[m]`, by column.
        starts: int64 `[k]`, the start of each column's entries.
        weights: `[m]`, in the dtype of `probs`.
    """
    with torch.autocast(probs.device.type, enabled=False):
        return embedding_bag(
            student_ids, probs.t().contiguous(), starts, mode="sum", per_sample_weights=weights
        ).t()


def check_width(side: str, logits_width: int, map_width: int) -> None:
    """Raise an `XtokError` if logits are narrower than the map."""
    if logits_width < map_width:
        raise XtokError(
            f"the {side}'s logits are {logits_width} wide, expected at least {map_width} "
            "(the map's width)",
            hint=f"use a map for this {side}, or build it {logits_width} wide with {{option}}",
            parameter="vocab_size",
        )


def true_indices(mask: Tensor, count: int) -> Tensor:
    """Return the `count` indices where a mask `[n]` is true, without a fetch as in `nonzero`."""
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def ranges(starts: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the numbers and the indices of n joined ranges, int64 `[total]` each."""
    device = starts.device
    numbers = torch.arange(len(starts), device=device).repeat_interleave(counts, output_size=total)
    shift = starts - counts.cumsum(0) + counts
    return numbers, torch.arange(total, device=device) + shift[numbers]


def block_length(like: Any, width: int, *, cached: bool = False) -> int:
    """Return the number of rows of a width that a temporary tensor may have."""
    in_cache = cached and like.device.type == "cpu"
    size = min(BLOCK_NUMBERS, CACHED_BLOCK_NUMBERS) if in_cache else BLOCK_NUMBERS
    return max(1, size // max(width, 1))


def work_dtype(*tensors: Any) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    return torch.float64 if torch.float64 in [t.dtype for t in tensors] else torch.float32
