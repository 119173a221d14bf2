"""Three rows of chunks with random logits and targets, as inputs of ALM."""

from __future__ import annotations

import torch
from loss_inputs import alignment
from torch import Tensor

# Chunk 0 of row 0 is at position 0, which may predict the middle of a chunk; row 2 has no chunk.
IDS = (
    torch.tensor([[0, 1, 1, 2, 2, -1], [-1, 0, 1, 1, 3, -1], [-1] * 6]),
    torch.tensor([[0, 1, 2, 2, 2], [-1, 0, 0, 1, 3], [-1] * 5]),
)
ALIGNED = alignment(*IDS)
VALID = torch.as_tensor(ALIGNED.pair_valid)
V_S, V_T = 10, 13


def sides(seed: int = 0) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return logits of both sides, and the predicted ids of positions; −100 outside of chunks."""
    generator = torch.Generator().manual_seed(seed)
    logits, targets = [], []
    for ids, width in zip(IDS, (V_S, V_T), strict=True):
        shape = (*ids.shape, width)
        logits.append(torch.randn(shape, generator=generator, dtype=torch.float64) * 2)
        drawn = torch.randint(0, width, ids.shape, generator=generator)
        targets.append(torch.where(ids < 0, -100, drawn))
    return logits[0].requires_grad_(), logits[1], (targets[0], targets[1])
