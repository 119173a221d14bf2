"""Fit a linear map from the student's input embeddings to the teacher's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from xtok._lib.progress import Progress
from xtok._lib.threads import one_thread_each
from xtok.building.embeddings.input_layer import input_layer
from xtok.building.embeddings.similarity import Vectors
from xtok.building.embeddings.sources import require_embedding_rows, require_finite
from xtok.errors import EmbeddingError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.checkpoint import checkpoint_of
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, Ids

if TYPE_CHECKING:
    import torch


_HELD_OUT = 10  # every tenth anchor is held out
_MIN_ANCHORS = 20
_RIDGE = 0.01  # ridge penalty, relative to the mean variance


def lacking_weights(pair: Pair, *, offline: bool) -> str:
    """Return a message about a model without safetensors weights, or ""."""
    for side, tokenizer in zip(SIDES, pair.tokenizers, strict=True):
        name = f"the {side} {tokenizer.vocabulary.model_id}"
        model = checkpoint_of(tokenizer, offline)
        try:
            has_weights = model is not None and model.has_weights()
        except EmbeddingError as error:  # there is no network or no access
            return f"the weights of {name} are unknown ({error.message})"
        if has_weights is None:
            return f"the weights of {name} are not in the local cache"
        if not has_weights:
            return f"{name} has no safetensors weights"
    return ""


def fitted_embeddings(
    pair: Pair, row_ids: Ids, column_ids: Ids, *, offline: bool, progress: Progress
) -> tuple[Vectors, Vectors, dict[str, float]]:
    """Return the vectors of both models in the teacher's space, and statistics of the fit.

    The fit is a ridge regression on the centred vectors of equal tokens, the *anchors*. Every tenth
    anchor is held out to measure the error.
    """
    import torch

    x, y = (
        _own_embeddings(tokenizer, ids, offline)
        for tokenizer, ids in zip(pair.tokenizers, (row_ids, column_ids), strict=True)
    )
    anchors = _anchors(pair, row_ids, column_ids)  # indices into x and y
    held_out = np.arange(len(anchors[0])) % _HELD_OUT == _HELD_OUT - 1
    fit, test = ([anchor_ids[chosen] for anchor_ids in anchors] for chosen in (~held_out, held_out))
    x_mean = x[fit[0]].mean(axis=0, dtype=np.float64).astype(np.float32)
    y_mean = y[fit[1]].mean(axis=0, dtype=np.float64).astype(np.float32)
    x, y = x - x_mean, y - y_mean
    with one_thread_each() as pool, progress("fitting", len(fit[0])) as advance:
        # Solve (XᵀX + penalty) · right = XᵀY for the anchors of the fit. The matrix `right`,
        # [d_student, d_teacher], then converts all student vectors, in blocks.
        xx = _product(x[fit[0]], x[fit[0]], pool)
        xy = _product(x[fit[0]], y[fit[1]], pool)
        penalty = _RIDGE * float(xx.diagonal().mean()) * torch.eye(len(xx)).double()
        right = torch.linalg.solve(xx + penalty, xy).float()
        blocks = [torch.from_numpy(x[start : start + 4096]) for start in range(0, len(x), 4096)]
        parts = pool.map(lambda block: torch.mm(block, right), blocks)
        mapped = torch.cat(list(parts)).numpy()
        advance(len(fit[0]))
    projected, truth = mapped[test[0]].astype(np.float64), y[test[1]].astype(np.float64)
    lengths = np.linalg.norm(projected, axis=1) * np.linalg.norm(truth, axis=1)
    cosines = (projected * truth).sum(axis=1) / np.maximum(lengths, 1e-30)
    error = np.square(projected - truth).sum() / max(np.square(truth).sum(), 1e-30)
    return mapped, y, {
        "anchors fitted on": len(fit[0]),
        "anchors held out": len(test[0]),
        "mean cosine of held-out anchors": float(cosines.mean()),
        "relative squared error of held-out anchors": float(error),
    }  # fmt: skip


def _own_embeddings(tokenizer: Tokenizer, ids: Ids, offline: bool) -> Vectors:
    model_id, model = tokenizer.vocabulary.model_id, checkpoint_of(tokenizer, offline)
    if model is None:
        raise EmbeddingError(
            f"{model_id} is a tokenizer file without embeddings",
            hint="use the model's folder or repo id, or choose a different {option}",
            parameter="embedding_model",
        )
    name, matrix = input_layer(model)
    require_embedding_rows(tokenizer, len(matrix), name)
    vectors: Vectors = matrix[ids]
    require_finite(vectors, ids, tokenizer.table, model_id)
    return vectors


def _anchors(pair: Pair, row_ids: Ids, column_ids: Ids) -> tuple[Ids, Ids]:
    indices = np.flatnonzero(pair.equal_bytes[row_ids] >= 0)
    if len(indices) < _MIN_ANCHORS:
        raise EmbeddingError(
            f"only {len(indices)} tokens are equal on both sides, but fitting one model's "
            f"embeddings to the other's requires at least {_MIN_ANCHORS}",
            hint="give spelling, sentence:MODEL or input:MODEL with {option}",
            parameter="embedding_model",
        )
    return indices, np.searchsorted(column_ids, pair.equal_bytes[row_ids[indices]])


def _product(x: Vectors, y: Vectors, pool: ThreadPoolExecutor) -> torch.Tensor:
    import torch

    def work(start: int) -> torch.Tensor:
        left, right = (torch.from_numpy(v[start : start + 8192]).double() for v in (x, y))
        return left.T @ right

    total = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    starts = range(0, len(x), 8192)
    for first in range(0, len(starts), 4):  # four at a time, to save memory
        for part in pool.map(work, starts[first : first + 4]):
            total += part
    return total
