"""`PairText`: the counts of a text for a pair of tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok._lib.shards import Paths, SourceFile, shards, source_of
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.building.counting.aligned import AlignedTexts, Difference, align_texts
from xtok.building.counting.counts import (
    ChunkCounts,
    Counts,
    DistinctChunks,
    MapRows,
    Pairs,
    Tally,
    pair_edges,
    sum_pairs,
)
from xtok.building.counting.encode import TextEncoder
from xtok.building.counting.kernels import chunk_losses
from xtok.building.counting.smoothing import EPSILON
from xtok.config import Target
from xtok.conversation.texts import TextBatch, find_texts, read_batches, short_text_notes
from xtok.errors import XtokError
from xtok.maps.edges import Edges, heaviest
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import plural
from xtok.tokenizers.pairs import Pair

HELD_OUT = 16  # one in 16 documents is held out to choose alpha


@dataclass
class TextTotals:
    """Totals of a text."""

    documents: int = 0
    held_out: int = 0  # documents held out to choose alpha
    differing: int = 0  # documents in which the two sides have different bytes
    num_bytes: int = 0
    lost_bytes: int = 0  # bytes that are not counted, because the two sides differ
    student_tokens: int = 0
    teacher_tokens: int = 0
    starts: int = 0  # shared token boundaries
    skipped_chunks: int = 0  # chunks that are too long to count


@dataclass(frozen=True)
class LeftOut:
    """Text that is not counted, because the two sides have different bytes."""

    num_bytes: int
    share: float  # share of the text
    documents: int  # number of documents that contain such text
    first: Difference

    @property
    def reason(self) -> str:
        """The note without the number of bytes at its start."""
        share = f"{self.share:.2%}" if self.share >= 0.00005 else "under 0.01%"
        return (
            f"byte{'' if self.num_bytes == 1 else 's'} of text left out ({share}, in "
            f"{plural(self.documents, 'document')}) because the two sides differ, first in "
            f"{self.first.group}: {self.first.student} for the student, {self.first.teacher} for "
            "the teacher"
        )

    @property
    def sentence(self) -> str:
        """The note that every command prints after reading text."""
        return f"{self.num_bytes:,} {self.reason}"


@dataclass(frozen=True, kw_only=True)
class CountPlan:
    """The optional counts to collect. Totals and tokens are always counted."""

    target: Target = "start"  # pairs to count; see `BuildConfig`
    hold_out: bool = False  # count one in `HELD_OUT` documents separately, chosen by a hash
    per_document: bool = False  # count each document's chunks; needs as much memory as the text


@dataclass(frozen=True, eq=False)
class PerDocument:
    """The chunks of each document. Each entry counts one distinct chunk in one document."""

    groups: tuple[str, ...]  # [documents], file names
    documents: NDArray[np.int32]  # [entries]
    chunk_indices: NDArray[np.int32]  # [entries], index of the chunk in `chunks`
    counts: NDArray[np.int32]  # [entries]
    chunks: DistinctChunks  # distinct chunks, with their counts in the whole text

    @cached_property
    def num_chunks(self) -> NDArray[np.float64]:
        """Number of chunks of each document, float64 `[documents]`."""
        return self.over_chunks(np.ones(len(self.chunks.widths)))

    @property
    def keys(self) -> NDArray[np.int64]:
        """Pairs at shared token boundaries, int64, ascending."""
        return self._pairs[0]

    @cached_property
    def _pairs(self) -> Pairs:
        return np.unique(self.chunks.keys, return_inverse=True)

    def amounts(self, in_group: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the count of each pair in the chosen documents, float64 `[pairs]`."""
        keys, pair_chunks = self._pairs
        return np.bincount(pair_chunks, self._chunk_counts(in_group), len(keys)).astype(np.float64)

    def per_document(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum of the pairs' values over all shared token boundaries of each document."""
        return self.over_chunks(values[self._pairs[1]])

    def over_chunks(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum of the chunks' values over all chunks of each document."""
        weights = self.counts * values[self.chunk_indices]
        return np.bincount(self.documents, weights, len(self.groups)).astype(np.float64)

    def chunk_losses(self, edges: Edges, shape: tuple[int, int]) -> NDArray[np.float64]:
        """Return the loss of each distinct chunk for a map, float64 `[chunks]`."""
        losses = np.zeros(len(self.chunks.widths))
        rows = MapRows.of(edges, shape[0])
        chunk_losses(self.chunks, rows, EPSILON, EPSILON / shape[1], losses)
        return losses

    def _chunk_counts(self, in_group: NDArray[np.bool_]) -> NDArray[np.int64]:
        amounts = self.counts * in_group[self.documents]
        return np.bincount(self.chunk_indices, amounts, len(self.chunks.widths)).astype(np.int64)

    def hindsight(self, in_group: NDArray[np.bool_], top_k: int, num_rows: int) -> Edges:
        """Return a nearly optimal map for the chosen documents, cut to `top_k`.

        The map is counted on the documents in `in_group`, bool `[documents]`, with one EM step.
        """
        chunks = self.chunks.recount(self._chunk_counts(in_group))
        first = heaviest(pair_edges(*chunks.pairs()), top_k)
        return heaviest(pair_edges(*chunks.pairs(MapRows.of(first, num_rows))), top_k)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairText:
    """The counts of a text for a pair of tokenizers."""

    sources: tuple[SourceFile, ...]  # the input files
    totals: TextTotals
    tokens: tuple[NDArray[np.int64], ...]  # count of each token, `[V]`, for each tokenizer
    counts: Counts
    held_out: Counts  # counts of the held-out documents
    per_document: PerDocument | None = None
    first_difference: Difference | None = None  # first difference between the two sides, if any

    @staticmethod
    def read(
        pair: Pair,
        texts: Paths,
        plan: CountPlan = CountPlan(),
        *,
        field: str = "text",
        progress: Progress = silent,
    ) -> PairText:
        """Read and count texts in one pass; see `build` for `texts` and `field`.

        With a single tokenizer in the pair, only tokens are counted.
        """
        tokenizers = pair_tokenizers(pair)
        files = find_texts(texts)
        parts = [shard for path in files for shard in shards(path)]
        size = sum(shard.size for shard in parts)
        counter = TextCounter(pair, plan)
        with TextEncoder(*tokenizers) as encoder, progress("counting", size) as advance:
            for batch, sides in encoder.read(read_batches(parts, field), size, advance):
                counter.add(batch, sides)
        text = counter.result(tuple(map(source_of, files)))
        if len(tokenizers) > 1 and not text.totals.starts:
            documents = plural(text.totals.documents, "document")
            raise XtokError(
                f"the text contains no shared token boundary ({documents}, "
                f"{text.totals.num_bytes:,} bytes)",
                hint="use non-empty text that both tokenizers can spell; xtok align shows the "
                "tokens of both",
            )
        return text

    @property
    def left_out(self) -> LeftOut | None:
        """The text that is not counted; None if all text is counted."""
        totals, first = self.totals, self.first_difference
        share = totals.lost_bytes / max(1, totals.num_bytes)
        return first and LeftOut(totals.lost_bytes, share, totals.differing, first)

    @property
    def notes(self) -> list[str]:
        """Notes about a short text, and about text that was not counted."""
        left_out = [] if self.left_out is None else [self.left_out.sentence]
        return [*short_text_notes(self.totals.num_bytes), *left_out]

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs at shared token boundaries (ascending) and their counts for the target `start`."""
        return sum_pairs([(part.keys, part.counts) for part in (self.counts, self.held_out)])


def pair_tokenizers(pair: Pair) -> list[Tokenizer]:
    """Return the one or two tokenizers of a pair."""
    sides = pair.student_tokenizer, pair.teacher_tokenizer
    return [tokenizer for tokenizer in sides if tokenizer is not None]


class TextCounter:
    """Accumulates the counts of a text."""

    def __init__(self, pair: Pair, plan: CountPlan) -> None:
        self.plan, self.totals = plan, TextTotals()
        self.tokens = [np.zeros(len(t.table), np.int64) for t in pair_tokenizers(pair)]
        self._pair = pair
        self._aligner = TokenAligner(pair) if len(self.tokens) == 2 else None
        self._first_difference: Difference | None = None
        self.counts, self.held_out = Tally(plan.target), Tally(plan.target)
        self._documents = DocumentCounter() if plan.per_document else None

    def add(self, batch: TextBatch, sides: Sequence[FlatIds]) -> None:
        """Count a batch of documents; `sides` contains the ids from each tokenizer."""
        for count, texts in zip(self.tokens, sides, strict=True):
            count += np.bincount(texts.ids, minlength=len(count))
        if self._aligner is None:
            return
        aligned = align_texts(self._aligner, *sides)
        if self._documents is not None:
            self._documents.add(aligned, batch.group)
        tables = self._pair.tables
        if self._first_difference is None and aligned.differs.any():
            self._first_difference = aligned.first_difference(tables, batch.group)
        is_held = self._is_held_out(batch.texts)
        chosen = is_held[aligned.documents]
        skipped = self.counts.add(aligned, ~chosen) + self.held_out.add(aligned, chosen)
        sizes = np.array([len(text.encode()) for text in batch.texts], np.int64)
        totals = self.totals
        totals.documents += len(batch.texts)
        totals.held_out += int(is_held.sum())
        totals.differing += int(aligned.differs.sum())
        totals.num_bytes += int(sizes.sum())
        totals.lost_bytes += int(aligned.bytes_outside(sizes, tables[0]).sum())
        totals.student_tokens += len(aligned.student.ids)
        totals.teacher_tokens += len(aligned.teacher.ids)
        totals.starts += len(aligned.documents)
        totals.skipped_chunks += skipped

    def _is_held_out(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        is_held = np.zeros(len(texts), np.bool_)
        for index, text in enumerate(texts if self.plan.hold_out else ()):
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_held[index] = int.from_bytes(digest, "little") % HELD_OUT == 0
        return is_held

    def result(self, sources: tuple[SourceFile, ...]) -> PairText:
        """Return all counts."""
        return PairText(
            sources=sources,
            totals=self.totals,
            tokens=tuple(self.tokens),
            counts=self.counts.counts(),
            held_out=self.held_out.counts(),
            per_document=self._documents.result() if self._documents else None,
            first_difference=self._first_difference,
        )


class DocumentCounter:
    """Accumulates the counts of each document's chunks."""

    def __init__(self) -> None:
        self._groups: list[str] = []
        self._chunks = ChunkCounts()
        self._entries = [np.zeros((3, 0), np.int32)]

    def add(self, aligned: AlignedTexts, group: str) -> None:
        """Add aligned documents of one file."""
        chunk_indices = self._chunks.add(aligned.spans, aligned.student.ids, aligned.teacher.ids)
        size = len(self._chunks)
        entries, counts = np.unique(aligned.documents * size + chunk_indices, return_counts=True)
        documents, chunk_indices = np.divmod(entries, max(1, size))
        self._entries.append(
            np.stack([documents + len(self._groups), chunk_indices, counts]).astype(np.int32)
        )
        self._groups += [group] * len(aligned.differs)

    def result(self) -> PerDocument:
        """Return the counts of all documents."""
        documents, chunk_indices, counts = np.concatenate(self._entries, axis=1)
        chunks = self._chunks.chunks()
        return PerDocument(tuple(self._groups), documents, chunk_indices, counts, chunks)
