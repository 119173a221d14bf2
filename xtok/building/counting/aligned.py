"""Align texts, and find chunks: pieces of text with the same bytes in both tokenizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.building.counting.kernels import chunk_spans
from xtok.maps.edges import pair_keys
from xtok.tokenizers.display import escape, quoted
from xtok.tokenizers.table import TokenTable

_CONTEXT = 16  # number of bytes to print before and after a difference


class Difference(NamedTuple):
    """The first difference between the bytes of the two sides, with some preceding text."""

    group: str  # name of the document's file
    student: str
    teacher: str


class AlignedTexts(NamedTuple):
    """The ids of documents from both tokenizers, and the correct chunks (see `xtok align`).

    Text does not belong to a chunk if the bytes of the two sides differ.
    """

    student: FlatIds
    teacher: FlatIds
    # int64 [4, chunks]: start and end in the student's ids, start and end in the teacher's ids
    spans: NDArray[np.int64]
    documents: NDArray[np.int64]  # [chunks], ascending
    differs: NDArray[np.bool_]  # [documents], whether any tokens are outside chunks

    @property
    def keys(self) -> NDArray[np.int64]:
        """The pair of tokens at the start of each chunk, int64 (see `pair_keys`)."""
        return pair_keys(self.student.ids[self.spans[0]], self.teacher.ids[self.spans[2]])

    def bytes_outside(self, sizes: NDArray[np.int64], table: TokenTable) -> NDArray[np.int64]:
        """Return the number of bytes outside chunks in each document, int64 `[documents]`.

        The number is at least 1 if the two sides of the document differ.
        """
        if not self.differs.any():
            return np.zeros(len(sizes), np.int64)
        ends = offsets_of(table.lengths[self.student.ids])
        chunk_bytes = ends[self.spans[1]] - ends[self.spans[0]]
        inside = np.bincount(self.documents, chunk_bytes, len(sizes)).astype(np.int64)
        return np.where(self.differs, (sizes - inside).clip(1), 0)

    def first_difference(self, tables: Sequence[TokenTable], group: str) -> Difference:
        """Return the first difference between the two sides."""
        document = int(self.differs.argmax())
        spans = self.spans[:, self.documents == document]
        # For each side: the ids, and the starts and ends of the ranges between chunks
        sides = []
        for texts, bounds in ((self.student, spans[:2]), (self.teacher, spans[2:])):
            start, end = texts.bounds[document : document + 2]
            sides.append((texts.ids, np.append(start, bounds[1]), np.append(bounds[0], end)))
        index = int(np.any([starts < ends for _, starts, ends in sides], axis=0).argmax())
        excerpts = []
        for table, (ids, starts, ends) in zip(tables, sides, strict=True):
            context = table.spell(ids[starts[0] : starts[index]][-_CONTEXT:])[-_CONTEXT:]
            context = context.lstrip(bytes(range(0x80, 0xC0)))  # without a partial character
            differing = table.spell(ids[starts[index] : ends[index]][:_CONTEXT])[:_CONTEXT]
            excerpts.append(quoted(escape(context + differing)))
        return Difference(group, *excerpts)


def align_texts(aligner: TokenAligner, student: FlatIds, teacher: FlatIds) -> AlignedTexts:
    """Align documents. Exclude chunks that contain a token without bytes.

    The aligner's pair must have the token form `bytes`.
    """
    alignment = aligner.align_sequences(student, teacher)
    num_chunks, is_chunk = alignment.num_chunks, alignment.is_correct
    spans = np.empty((4, len(is_chunk)), np.int64)
    sides = (student, alignment.student_chunk_id), (teacher, alignment.teacher_chunk_id)
    for (texts, chunk_ids), symbols, (starts, ends) in zip(
        sides, (aligner.student, aligner.teacher), (spans[:2], spans[2:]), strict=True
    ):
        lengths = symbols.table.lengths
        chunk_spans(*texts, chunk_ids, num_chunks, lengths, starts, ends, is_chunk)
    documents = np.repeat(np.arange(len(num_chunks)), num_chunks)
    differs = np.zeros(len(num_chunks), np.bool_)
    differs[documents[~is_chunk]] = True
    for texts, chunk_ids in sides:
        outside = np.flatnonzero(chunk_ids < 0)
        differs[np.searchsorted(texts.bounds, outside, "right") - 1] = True
    spans, documents = spans[:, is_chunk], documents[is_chunk]
    return AlignedTexts(student, teacher, spans, documents, differs)
