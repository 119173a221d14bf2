"""The cross-entropy of a map over chunks of text, averaged as P-KL does it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import PairCounts, PairEncoder, Side, Starts, pair_edges, pair_keys
from xtok.counting.smoothing import EPSILON
from xtok.maps.edges import Edges, heaviest


class Rows(NamedTuple):
    """A map's rows for a kernel: entries of row s are `bounds[s]` to `bounds[s + 1]`."""

    bounds: NDArray[np.int64]
    teacher_ids: NDArray[np.int32]
    weights: NDArray[np.float64]
    width: int

    @staticmethod
    def of(edges: Edges, shape: tuple[int, int]) -> Rows:
        """Return the rows of edges that are in a map's order."""
        entries = np.bincount(edges.student_ids, minlength=shape[0])
        bounds = np.concatenate([[0], np.cumsum(entries)]).astype(np.int64)
        ids, weights = edges.teacher_ids.astype(np.int32), edges.weights.astype(np.float64)
        return Rows(bounds, ids, weights, shape[1])

    def losses(
        self, student: Side, teacher: Side, starts: Starts
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the sum of each document's chunk losses, and the number of its chunks."""
        from xtok.counting.kernels import chunk_losses

        losses = np.zeros(len(starts.num_starts))
        chunks = np.zeros(len(starts.num_starts), np.int64)
        chunk_losses(
            *student, *teacher, starts.s_starts, starts.t_starts, starts.num_starts,
            starts.complete, self.bounds, self.teacher_ids, self.weights,
            EPSILON, EPSILON / self.width, losses, chunks,
        )  # fmt: skip
        return losses, chunks


class EncodedText:
    """Documents as ids of both sides, kept in memory: about two bytes per byte of text."""

    def __init__(self, encoder: PairEncoder, shape: tuple[int, int]) -> None:
        self.encoder, self.shape = encoder, shape
        self._batches: list[tuple[Side, Side]] = []

    def add(self, student: Side, teacher: Side) -> None:
        """Keep a batch of documents."""
        self._batches.append((student, teacher))

    def hindsight_losses(self, chosen: NDArray[np.bool_], top_k: int) -> NDArray[np.float64]:
        """Return each chosen document's chunk losses under the map counted on these documents.

        Counted within chunks, and cut to `top_k`. That is near the optimum, which has no closed
        form: a map can come out slightly below it.
        """
        counts = PairCounts()
        batches = list(self._of(chosen))
        for batch in batches:
            keys, amounts, _ = pair_keys(*batch, "chunk")
            counts.add(keys, amounts)
        rows = Rows.of(heaviest(pair_edges(*counts.arrays()), top_k), self.shape)
        return np.concatenate([rows.losses(*batch)[0] for batch in batches])

    def _of(self, chosen: NDArray[np.bool_]) -> list[tuple[Side, Side, Starts]]:
        batches, first = [], 0
        for student, teacher in self._batches:
            after = first + len(student.bounds) - 1
            use = chosen[first:after]
            sides = student.of(use), teacher.of(use)
            batches.append((*sides, self.encoder.starts(*sides)))
            first = after
        return batches
