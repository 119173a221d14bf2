"""Text as `evaluate` sees it: pairs at shared token boundaries, and losses over chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import (
    EncodedTexts,
    PairCounts,
    PairEncoder,
    SharedBoundaries,
    batches,
    boundary_keys,
    pair_edges,
    pair_keys,
)
from xtok.counting.smoothing import EPSILON
from xtok.counting.texts import ShardReader, shards
from xtok.maps.edges import Edges, heaviest
from xtok.progress import TextProgress
from xtok.tokenizers import Tokenizer


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
        self, student: EncodedTexts, teacher: EncodedTexts, starts: SharedBoundaries
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
        self._batches: list[tuple[EncodedTexts, EncodedTexts]] = []

    def add(self, student: EncodedTexts, teacher: EncodedTexts) -> None:
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

    def _of(
        self, chosen: NDArray[np.bool_]
    ) -> list[tuple[EncodedTexts, EncodedTexts, SharedBoundaries]]:
        batches, first = [], 0
        for student, teacher in self._batches:
            after = first + len(student.bounds) - 1
            use = chosen[first:after]
            sides = student.of(use), teacher.of(use)
            batches.append((*sides, self.encoder.boundaries(*sides)))
            first = after
        return batches


class SeenText(NamedTuple):
    """Pairs per document, and chunk losses per map and document."""

    groups: list[str]  # one per document
    keys: NDArray[np.int64]  # [pairs], all different
    documents: NDArray[np.int32]  # [entries]
    places: NDArray[np.int64]  # [entries], in keys
    counts: NDArray[np.int64]  # [entries]
    chunk_losses: NDArray[np.float64]  # [maps, then recipes by top_k; documents]
    num_chunks: NDArray[np.int64]  # [documents]
    num_bytes: int
    lost_bytes: int
    differing: int
    encoded: EncodedText


def read_text(
    maps: Sequence[Edges],
    shape: tuple[int, int],
    paths: Sequence[Path],
    student: Tokenizer,
    teacher: Tokenizer,
    field: str,
    group_by: str | None,
    progress: TextProgress,
) -> SeenText:
    """Read text once, for all maps; documents are grouped by file, or by a field's value."""
    rows = [Rows.of(edges, shape) for edges in maps]
    groups: list[str] = []
    parts: list[tuple[NDArray[np.int64], ...]] = []
    chunk_losses: list[NDArray[np.float64]] = []
    chunks: list[NDArray[np.int64]] = []
    num_bytes = lost = differing = 0
    total = sum(path.stat().st_size for path in paths)
    files = Counter(path.name for path in paths)
    with PairEncoder(student, teacher) as encoder, progress("measuring", total) as advance:
        encoded = EncodedText(encoder, shape)
        for path in paths:
            name = path.name if files[path.name] == 1 else str(path)
            for shard in shards(path, field):
                consumed = 0
                reader = ShardReader(replace(shard, group_by=group_by))
                for batch in batches(reader):
                    groups += reader.take_groups() if group_by else [name] * len(batch)
                    sides = encoder.encode(batch)
                    starts = encoder.boundaries(*sides)
                    parts.append(_pairs_per_document(*sides, starts, len(groups) - len(batch)))
                    encoded.add(*sides)
                    per_map = [r.losses(*sides, starts) for r in rows]
                    chunk_losses.append(np.stack([loss for loss, _ in per_map]))
                    chunks.append(per_map[0][1])
                    size, behind = starts.bytes_of(batch)
                    num_bytes, lost = num_bytes + size, lost + behind
                    differing += starts.num_differing
                    advance(reader.consumed - consumed, len(sides[0].ids))
                    consumed = reader.consumed
                advance(shard.size - consumed, 0)
    empty = np.zeros(0, np.int64)
    documents, keys, counts = (
        np.concatenate([part[n] for part in parts]) if parts else empty for n in range(3)
    )
    unique, places = np.unique(keys, return_inverse=True)
    return SeenText(
        groups,
        unique,
        documents.astype(np.int32),
        places,
        counts,
        np.concatenate(chunk_losses, axis=1) if chunk_losses else np.zeros((len(maps), 0)),
        np.concatenate(chunks) if chunks else empty,
        num_bytes,
        lost,
        differing,
        encoded,
    )


def _pairs_per_document(
    student: EncodedTexts, teacher: EncodedTexts, starts: SharedBoundaries, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return document, pair and count of each different pair of each document."""
    keys = boundary_keys(student, teacher, starts)
    documents = np.repeat(np.arange(len(starts.num_starts)), starts.num_starts)
    order = np.lexsort((keys, documents))
    keys, documents = keys[order], documents[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (documents[1:] != documents[:-1])
    places = np.flatnonzero(new)
    counts = np.diff(np.append(places, len(keys)))
    return documents[places] + first, keys[places], counts
