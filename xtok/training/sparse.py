"""Multiply probabilities by a sparse map, and choose the sizes of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from xtok.errors import XtokError

BLOCK_NUMBERS = 2**25
"""Maximum number of values in a temporary tensor (128 MiB in float32). With smaller blocks, the
head is read more often. The loss takes 1.2 times as long with 2**24 values, and 0.9 times as long
with 2**26 values (event KL, 512 tokens, 128,256 × 262,208 ids)."""

CACHED_BLOCK_NUMBERS = 2**22
"""Maximum number of values in a temporary tensor for comparisons on a CPU. Tensors that fit into
the CPU's cache are fastest."""


def project_sparse(probs: Tensor, student_ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Multiply probabilities by a sparse map, stored by column. Both factors receive gradients.

    out[b, j] = Σ_i probs[b, student_ids[i]] · weights[i], for all entries i of column j

    `torch.sparse.mm` (PyTorch 2.13) would allocate a dense gradient for the weights, so this
    function computes each column as an `embedding_bag` over student tokens.

    Args:
        probs: `[b, V]`.
        student_ids: int64 `[m]`, sorted by column.
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
            f"the {side}'s logits have width {logits_width}, expected at least {map_width} "
            "(the map's width)",
            hint=f"use a map for the {side}, or build a map with width {logits_width}: {{option}}",
            parameter="vocab_size",
        )


def true_indices(mask: Tensor, count: int) -> Tensor:
    """Return the `count` true indices of a mask `[n]`. Unlike `nonzero`, this needs no transfer."""
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def ranges(starts: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Concatenate n ranges of indices. Return each index's range number, and the indices.

    Range i consists of `counts[i]` indices, from `starts[i]`. Both results are int64 `[total]`.
    """
    device = starts.device
    owners = torch.arange(len(starts), device=device).repeat_interleave(counts, output_size=total)
    shift = starts - counts.cumsum(0) + counts
    return owners, torch.arange(total, device=device) + shift[owners]


def block_length(like: Any, width: int, *, cached: bool = False) -> int:
    """Return the maximum number of rows in a temporary tensor of this width."""
    in_cache = cached and like.device.type == "cpu"
    size = min(BLOCK_NUMBERS, CACHED_BLOCK_NUMBERS) if in_cache else BLOCK_NUMBERS
    return max(1, size // max(width, 1))


def work_dtype(*tensors: Any) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    return torch.float64 if torch.float64 in [t.dtype for t in tensors] else torch.float32
