"""What `evaluate` measures in text: pairs at shared token boundaries, and losses over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import (
    EncodedTexts,
    Rows,
    SharedBoundaries,
    Tally,
    TextEncoder,
    boundary_keys,
    pair_edges,
)
from xtok.counting.smoothing import EPSILON
from xtok.counting.texts import find_shards
from xtok.inspection.pair_facts import TextCounts
from xtok.maps.edges import Edges, heaviest
from xtok.progress import TextProgress
from xtok.tokenizers import Tokenizer


def losses_of_chunks(
    rows: Rows, width: int, student: EncodedTexts, teacher: EncodedTexts, starts: SharedBoundaries
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the sum of each document's chunk losses, and the number of its chunks."""
    from xtok.counting.kernels import chunk_losses

    losses = np.zeros(len(starts.num_starts))
    chunks = np.zeros(len(starts.num_starts), np.int64)
    chunk_losses(
        *student, *teacher, starts.s_starts, starts.t_starts, starts.num_starts, starts.complete,
        *rows, EPSILON, EPSILON / width, losses, chunks,
    )  # fmt: skip
    return losses, chunks


@dataclass(frozen=True)
class MeasuredText:
    """Pairs per document, and chunk losses per document and map.

    An entry says that a document has a pair, and how often.
    """

    groups: list[str]  # one per document
    keys: NDArray[np.int64]  # [pairs], all different, in rising order
    documents: NDArray[np.int32]  # [entries], sorted
    places: NDArray[np.int64]  # [entries], in keys
    counts: NDArray[np.int64]  # [entries]
    chunk_losses: NDArray[np.float64]  # [documents, maps]
    num_chunks: NDArray[np.int64]  # [documents]
    num_bytes: int
    lost_bytes: int  # those behind a first difference between the two sides
    differing: int  # documents that the two sides spell differently
    encoder: TextEncoder
    batches: list[tuple[EncodedTexts, EncodedTexts]]  # about two bytes per byte of text
    shape: tuple[int, int]

    def amounts(self, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return how often each pair occurs in the chosen documents, or in all, float64."""
        counts = self.counts if chosen is None else self.counts * chosen[self.documents]
        return np.bincount(self.places, counts, len(self.keys)).astype(np.float64)

    def token_counts(self, paths: Sequence[Path]) -> TextCounts:
        """Return how often tokens occur in all text, which is in these files."""
        tokens = [np.zeros(width, np.int64) for width in self.shape]
        for sides in self.batches:
            for count, side in zip(tokens, sides, strict=True):
                count += np.bincount(side.ids, minlength=len(count))
        return TextCounts(
            files=tuple(path.name for path in paths),
            num_bytes=self.num_bytes,
            num_documents=len(self.groups),
            tokens=tuple(tokens),
            keys=self.keys,
            amounts=self.amounts().astype(np.int64),
        )

    def hindsight_losses(self, chosen: NDArray[np.bool_], top_k: int) -> NDArray[np.float64]:
        """Return each chosen document's chunk losses under the map counted on these documents.

        Counted within chunks, with one EM step, and cut to `top_k`. That is near the optimum, which
        has no closed form: a map can come out slightly below it.
        """
        batches, first, tally = [], 0, Tally("chunk")
        for student, teacher in self.batches:
            after = first + len(student.bounds) - 1
            sides = student.of(chosen[first:after]), teacher.of(chosen[first:after])
            batches.append((*sides, self.encoder.boundaries(*sides)))
            tally.add(*batches[-1])
            first = after
        counts = tally.counts()

        def counted(given: Rows | None) -> Rows:
            return Rows.of(heaviest(pair_edges(*counts.pairs(given)), top_k), self.shape[0])

        rows = counted(counted(None))
        return np.concatenate([losses_of_chunks(rows, self.shape[1], *b)[0] for b in batches])


def measure_text(
    maps: Sequence[Edges],
    shape: tuple[int, int],
    paths: Sequence[Path],
    student: Tokenizer,
    teacher: Tokenizer,
    field: str,
    group_by: str | None,
    progress: TextProgress,
) -> MeasuredText:
    """Read text once, for all maps; documents are grouped by file, or by a field's value."""
    rows = [Rows.of(edges, shape[0]) for edges in maps]
    groups: list[str] = []
    encoded: list[tuple[EncodedTexts, EncodedTexts]] = []
    no_ids = np.zeros(0, np.int64)  # so that there are arrays to concatenate
    parts = [(no_ids, no_ids, no_ids, np.zeros((0, len(maps))), no_ids)]
    num_bytes = lost = differing = 0
    shards = find_shards(paths, field, group_by)
    total = sum(shard.size for shard in shards)
    with TextEncoder(student, teacher) as encoder, progress("measuring", total) as advance:
        for batch in encoder.read(shards, advance):
            sides = batch.sides[0], batch.sides[1]
            starts = encoder.boundaries(*sides)
            pairs = _pairs_per_document(*sides, starts, len(groups))
            losses = np.zeros((len(batch.texts), len(rows)))
            chunks = np.zeros(len(batch.texts), np.int64)
            for column, of_map in enumerate(rows):
                losses[:, column], chunks = losses_of_chunks(of_map, shape[1], *sides, starts)
            parts.append((*pairs, losses, chunks))
            encoded.append(sides)
            groups += batch.groups
            size, behind = starts.bytes_of(batch.texts)
            num_bytes, lost = num_bytes + size, lost + behind
            differing += starts.num_differing
    documents, keys, counts, chunk_losses, num_chunks = map(
        np.concatenate, zip(*parts, strict=True)
    )
    unique, places = np.unique(keys, return_inverse=True)
    return MeasuredText(
        groups=groups,
        keys=unique,
        documents=documents.astype(np.int32),
        places=places,
        counts=counts,
        chunk_losses=chunk_losses,
        num_chunks=num_chunks,
        num_bytes=num_bytes,
        lost_bytes=lost,
        differing=differing,
        encoder=encoder,
        batches=encoded,
        shape=shape,
    )


def _pairs_per_document(
    student: EncodedTexts, teacher: EncodedTexts, starts: SharedBoundaries, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return document, pair and count of each different pair of each document, in this order."""
    keys = boundary_keys(student, teacher, starts)
    documents = np.repeat(np.arange(len(starts.num_starts)), starts.num_starts)
    order = np.lexsort((keys, documents))
    keys, documents = keys[order], documents[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (documents[1:] != documents[:-1])
    places = np.flatnonzero(new)
    counts = np.diff(np.append(places, len(keys)))
    return documents[places] + first, keys[places], counts
