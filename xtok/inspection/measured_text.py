"""Maps on text, for `evaluate`: pairs at shared token boundaries, and losses over chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import MultitokenConfig, SortCutConfig
from xtok.counting.counts import require_starts
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
from xtok.maps.file import AnyMap
from xtok.maps.projection_map import ProjectionMap
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.exact import reapply_exact
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.vocab.pair import Pair


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


class MeasuredText:
    """Maps of a pair on text: pairs of tokens per document, and chunk losses per document and map.

    An entry says that a document has a pair, and how often.

    Args:
        maps: by name, all with these vocabularies; the text is read once for all.
        paths: of the text.
        pair: of the maps, with its tokenizers.
        field: as `evaluate` takes it, and so the others.
        group_by: a field or column by whose values documents are grouped; by file if None.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read, or has no shared token boundary.
    """

    def __init__(
        self,
        maps: Mapping[str, AnyMap],
        paths: Sequence[Path],
        pair: Pair,
        *,
        field: str = "text",
        group_by: str | None = None,
        progress: Progress = silent,
        text_progress: TextProgress = silent_texts,
    ) -> None:
        self.maps, self.paths, self.pair = maps, paths, pair
        self.shape = pair.shape
        self.recipes = _recipes(maps, pair, progress)  # by `top_k`
        self.encoder = TextEncoder(*pair.tokenizers)
        self.batches: list[tuple[EncodedTexts, EncodedTexts]] = []  # two bytes per byte of text
        self.groups: list[str] = []  # one per document
        self.num_bytes = self.differing = 0  # differing: documents that the two sides spell so
        self.lost_bytes = 0  # behind a first difference between the two sides
        edges: dict[str | int, Edges] = {
            name: one.edges for name, one in maps.items() if isinstance(one, ProjectionMap)
        }
        rows = {key: Rows.of(one, self.shape[0]) for key, one in (edges | self.recipes).items()}
        no_ids = np.zeros(0, np.int64)  # so that there are arrays to concatenate
        parts = [(no_ids, no_ids, no_ids, np.zeros((0, len(rows))), no_ids)]
        shards = find_shards(paths, field, group_by)
        total = sum(shard.size for shard in shards)
        with self.encoder as encoder, text_progress("measuring", total) as advance:
            for batch in encoder.read(shards, advance):
                sides = batch.sides[0], batch.sides[1]
                starts = encoder.boundaries(*sides)
                pairs = _pairs_per_document(*sides, starts, len(self.groups))
                losses = np.zeros((len(batch.texts), len(rows)))
                chunks = np.zeros(len(batch.texts), np.int64)
                for column, of_map in enumerate(rows.values()):
                    losses[:, column], chunks = losses_of_chunks(
                        of_map, self.shape[1], *sides, starts
                    )
                parts.append((*pairs, losses, chunks))
                self.batches.append(sides)
                self.groups += batch.groups
                num_bytes, lost_bytes = starts.bytes_of(batch.texts)
                self.num_bytes += num_bytes
                self.lost_bytes += lost_bytes
                self.differing += starts.num_differing
        # Of each entry: its document, in rising order, its pair, its count; then of each document.
        self.documents, keys, self.counts, chunk_losses, self.num_chunks = map(
            np.concatenate, zip(*parts, strict=True)
        )
        self.keys, self.places = np.unique(keys, return_inverse=True)  # all pairs; of each entry
        require_starts(len(self.keys), len(self.groups), self.num_bytes, "measured")
        # Of documents; by the name of a map, or the `top_k` of a recipe.
        self.chunk_losses = dict(zip(rows, chunk_losses.T, strict=True))

    @property
    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The student's and the teacher's token of each pair."""
        return self.keys >> 32, self.keys & 0xFFFFFFFF

    def amounts(self, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return how often each pair occurs in the chosen documents, or in all, float64."""
        counts = self.counts if chosen is None else self.counts * chosen[self.documents]
        return np.bincount(self.places, counts, len(self.keys)).astype(np.float64)

    def per_document(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Add up a value of each pair over all places in each document, float64 `[documents]`."""
        weighted = self.counts * values[self.places]
        return np.bincount(self.documents, weighted, len(self.groups)).astype(np.float64)

    @cached_property
    def token_counts(self) -> TextCounts:
        """How often tokens and pairs occur in all text."""
        tokens = [np.zeros(width, np.int64) for width in self.shape]
        for sides in self.batches:
            for count, side in zip(tokens, sides, strict=True):
                count += np.bincount(side.ids, minlength=len(count))
        return TextCounts(
            files=tuple(path.name for path in self.paths),
            num_bytes=self.num_bytes,
            num_documents=len(self.groups),
            tokens=tuple(tokens),
            keys=self.keys,
            amounts=self.amounts().astype(np.int64),
        )

    def hindsight_losses(self, chosen: NDArray[np.bool_], top_k: int) -> NDArray[np.float64]:
        """Return each document's chunk losses under the map counted on the chosen ones.

        Counted within chunks, with one EM step, and cut to `top_k`. That is near the optimum, which
        has no closed form: a map can come out slightly below it. Documents not chosen have 0.
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

        rows, losses = counted(counted(None)), np.zeros(len(chosen))
        losses[chosen] = np.concatenate(
            [losses_of_chunks(rows, self.shape[1], *batch)[0] for batch in batches]
        )
        return losses


def _recipes(maps: Mapping[str, AnyMap], pair: Pair, progress: Progress) -> dict[int, Edges]:
    """Return X-Token's recipe without a slot, cut to each number of entries that maps have."""
    cuts = sorted({one.top_k for one in maps.values() if isinstance(one, ProjectionMap)})
    if not cuts:
        return {}
    whole = multitoken(pair, config=MultitokenConfig(scale_trick=False), progress=progress)
    exact = reapply_exact(whole, student_model=pair)
    return {k: sort_cut(exact, SortCutConfig(top_k=k)).edges for k in cuts}


def _pairs_per_document(
    student: EncodedTexts, teacher: EncodedTexts, starts: SharedBoundaries, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return document, pair and count of each different pair of each document, in this order."""
    documents = np.repeat(np.arange(len(starts.num_starts)), starts.num_starts)
    keys, places = np.unique(boundary_keys(student, teacher, starts), return_inverse=True)
    entries, counts = np.unique(documents * len(keys) + places, return_counts=True)
    documents, places = np.divmod(entries, max(1, len(keys)))
    return documents + first, keys[places], counts
