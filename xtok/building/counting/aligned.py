"""The chunks of documents: text that both sides spell with the same bytes, cut at shared tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.tokenizers.display import escape, quoted
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable

_CONTEXT = 16  # bytes before a difference that are shown, and of it on each side


class Difference(NamedTuple):
    """A place where the two sides spell a text differently, with what stands before it; escaped."""

    group: str  # of the document
    student: str
    teacher: str


class AlignedTexts(NamedTuple):
    """Documents of two sides, and their chunks: those that `xtok align` finds correct.

    Where the sides spell text differently, they go on behind the difference; what lies between is
    in no chunk.
    """

    student: FlatIds
    teacher: FlatIds
    # int64 [4, chunks]: the first token and the end in the student's ids, then in the teacher's
    spans: NDArray[np.int64]
    documents: NDArray[np.int64]  # [chunks], rising
    differs: NDArray[np.bool_]  # [documents], those with tokens outside of chunks

    @property
    def keys(self) -> NDArray[np.int64]:
        """The pair of tokens that each chunk begins with, int64; see `counts`."""
        keys: NDArray[np.int64] = self.student.ids[self.spans[0]].astype(np.int64) << 32
        keys |= self.teacher.ids[self.spans[2]]
        return keys

    def bytes_outside(self, sizes: NDArray[np.int64], table: TokenTable) -> NDArray[np.int64]:
        """Return how many bytes of each document are in no chunk, int64 `[documents]`.

        At least 1 of a document that differs: a side may spell it with more bytes than it has.

        Args:
            sizes: the documents' bytes, int64.
            table: the student's.
        """
        if not self.differs.any():
            return np.zeros(len(sizes), np.int64)
        ends = offsets_of(table.lengths[self.student.ids])
        of_chunks = ends[self.spans[1]] - ends[self.spans[0]]
        within = np.bincount(self.documents, of_chunks, len(sizes)).astype(np.int64)
        return np.where(self.differs, (sizes - within).clip(1), 0)

    def first_difference(self, tables: Sequence[TokenTable], groups: Sequence[str]) -> Difference:
        """Show where the first document that differs does so first."""
        document = int(self.differs.argmax())
        spans = self.spans[:, self.documents == document]
        # Of each side, where what lies before, between and behind its chunks begins and ends.
        sides = []
        for side, of_side in ((self.student, spans[:2]), (self.teacher, spans[2:])):
            start, stop = side.bounds[document : document + 2]
            sides.append((side.ids, np.append(start, of_side[1]), np.append(of_side[0], stop)))
        at = int(np.any([begins < ends for _, begins, ends in sides], axis=0).argmax())
        shown = []
        for table, (ids, begins, ends) in zip(tables, sides, strict=True):
            before = _spelled(table, ids[begins[0] : begins[at]][-_CONTEXT:])[-_CONTEXT:]
            differing = _spelled(table, ids[begins[at] : ends[at]][:_CONTEXT])[:_CONTEXT]
            shown.append(quoted(escape(_whole(before) + differing)))
        return Difference(groups[document], *shown)


def _spelled(table: TokenTable, ids: NDArray[np.int32]) -> bytes:
    return b"".join(table[i] for i in ids.tolist())


def _whole(data: bytes) -> bytes:
    """Return bytes without the part of a character that they begin with."""
    return data.lstrip(bytes(range(0x80, 0xC0)))


class TextAligner:
    """Finds the chunks of documents in both sides' ids.

    Args:
        pair: in the form of its tokenizers' own bytes.
    """

    def __init__(self, pair: Pair) -> None:
        self.tables = pair.tables
        self.aligner = TokenAligner(pair)

    def align(self, student: FlatIds, teacher: FlatIds) -> AlignedTexts:
        """Align documents; a chunk with a token without bytes, such as an unknown one, is none."""
        from xtok.building.counting.kernels import chunk_spans

        alignment = self.aligner.align_sequences(student, teacher)
        num_chunks, is_chunk = alignment.num_chunks, alignment.is_correct
        spans = np.empty((4, len(is_chunk)), np.int64)
        sides = (student, alignment.student_chunk_id), (teacher, alignment.teacher_chunk_id)
        for (side, chunk_ids), table, (starts, ends) in zip(
            sides, self.tables, (spans[:2], spans[2:]), strict=True
        ):
            chunk_spans(*side, chunk_ids, num_chunks, table.lengths, starts, ends, is_chunk)
        documents = np.repeat(np.arange(len(num_chunks)), num_chunks)
        differs = np.zeros(len(num_chunks), np.bool_)
        differs[documents[~is_chunk]] = True
        for side, chunk_ids in sides:
            outside = np.flatnonzero(chunk_ids < 0)
            differs[np.searchsorted(side.bounds, outside, "right") - 1] = True
        if not is_chunk.all():
            spans, documents = spans[:, is_chunk], documents[is_chunk]
        return AlignedTexts(student, teacher, spans, documents, differs)
