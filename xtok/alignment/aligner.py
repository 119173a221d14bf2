"""Align two tokenizations of one text by bytes, in the smallest possible chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from xtok._lib.kernels import in_python
from xtok.alignment.kernels import CONTROL, FIRST_UNKNOWN, Walk, align_documents, align_rest
from xtok.alignment.sequences import FlatIds, Sequences, SymbolTable, filled, like
from xtok.config import MAX_COMB_LEN
from xtok.tokenizers.table import SIDES, TokenTable, TokenType

if TYPE_CHECKING:
    import torch

    from xtok.tokenizers.pairs import Pair

    Array: TypeAlias = NDArray[Any] | torch.Tensor
    IdsLike: TypeAlias = Sequence[int] | NDArray[Any]
    BoundedIds: TypeAlias = tuple[NDArray[Any], NDArray[np.int64]]

ArrayT = TypeVar("ArrayT", "NDArray[Any]", "torch.Tensor")
"""The type of an alignment's arrays."""

PYTHON_TOKENS = 600
"""Number of tokens that an aligner aligns in Python before the aligner loads the kernels.

Loading the kernels takes seconds.
"""


@dataclass(eq=False)
class AlignmentBatch(Generic[ArrayT]):
    """The alignment of a student batch with a teacher batch, with NeMo-RL's field names.

    A chunk is the text between two successive shared boundaries. A shared boundary is a byte
    position at which a token of each side ends. In the field names, `pair` means chunk. The fields
    are NumPy arrays, or torch tensors if the ids are tensors.
    """

    pair_valid: ArrayT  # [B, max_pairs], bool, whether the chunk exists
    # [B, max_pairs], bool, whether both sides have equal bytes, or are special tokens with the same
    # role
    pair_is_correct: ArrayT
    # [B, T_s] and [B, T_t], bool, whether the token's chunk is correct and has one token per side
    student_exact_partition_mask: ArrayT
    teacher_exact_partition_mask: ArrayT
    # [B, T_s] and [B, T_t], int64, chunk number of each token, −1 outside chunks
    student_chunk_id: ArrayT
    teacher_chunk_id: ArrayT
    num_chunks: ArrayT  # [B], int64, number of chunks


@dataclass(eq=False)
class PaddedAlignment(AlignmentBatch[ArrayT]):
    """An alignment of token positions, with masks for padding."""

    student_kept: ArrayT  # [B, T_s], bool, False at padding
    teacher_kept: ArrayT  # [B, T_t], bool, False at padding


@dataclass(eq=False)
class ShiftedAlignment(AlignmentBatch[ArrayT]):
    """An alignment for losses: the chunk at each position belongs to the predicted token."""

    has_start: ArrayT  # [B, max_pairs], bool, whether both sides predict the chunk's first token


@dataclass(frozen=True, eq=False)
class FlatAlignment:
    """The alignment of many documents as flat arrays. Chunk numbers start at 0 in each document."""

    student_chunk_id: NDArray[np.int32]  # [student tokens], chunk number or −1
    teacher_chunk_id: NDArray[np.int32]  # [teacher tokens], chunk number or −1
    num_chunks: NDArray[np.int64]  # [documents], number of chunks
    is_correct: NDArray[np.bool_]  # [chunks of all documents], whether both sides are equal

    @classmethod
    def joined(cls, alignments: Sequence[FlatAlignment]) -> FlatAlignment:
        """Concatenate several alignments."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(x, name) for x in alignments]) for name in names))

    def numbers(
        self, student_lengths: NDArray[np.int64], teacher_lengths: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Return the chunk number of each token, for both sides.

        The chunks are numbered across all documents. The number of a token outside all chunks is
        the total number of chunks.
        """
        first = np.cumsum(self.num_chunks) - self.num_chunks
        sides = (self.student_chunk_id, student_lengths), (self.teacher_chunk_id, teacher_lengths)
        return [
            np.where(chunk < 0, len(self.is_correct), np.repeat(first, lengths) + chunk)
            for chunk, lengths in sides
        ]

    def padded(
        self, student_kept: NDArray[np.bool_], teacher_kept: NDArray[np.bool_]
    ) -> PaddedAlignment[NDArray[Any]]:
        """Return the alignment as padded NumPy arrays. Both masks are False at padding."""
        max_pairs = max(1, int(self.num_chunks.max(initial=0)))  # NeMo-RL's losses require 1
        valid = np.arange(max_pairs) < self.num_chunks[:, None]
        student, teacher = self.numbers(student_kept.sum(axis=1), teacher_kept.sum(axis=1))
        is_single = np.append(self.is_correct, False)
        for chunk_ids in (student, teacher):
            is_single[:-1] &= np.bincount(chunk_ids, minlength=len(is_single))[:-1] == 1
        return PaddedAlignment(
            pair_valid=valid,
            pair_is_correct=filled(valid, self.is_correct, False),
            student_exact_partition_mask=filled(student_kept, is_single[student], False),
            teacher_exact_partition_mask=filled(teacher_kept, is_single[teacher], False),
            student_chunk_id=filled(student_kept, self.student_chunk_id.astype(np.int64), -1),
            teacher_chunk_id=filled(teacher_kept, self.teacher_chunk_id.astype(np.int64), -1),
            num_chunks=self.num_chunks,
            student_kept=student_kept,
            teacher_kept=teacher_kept,
        )


@dataclass(frozen=True)
class AlignedPair:
    """One chunk with ids and spans, for display and checks."""

    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    student_tokens: tuple[int, int]  # start and end (exclusive)
    teacher_tokens: tuple[int, int]
    student_bytes: tuple[int, int]  # byte span in the student's text
    teacher_bytes: tuple[int, int]  # byte span in the teacher's text
    is_correct: bool  # both sides have equal bytes, or are special tokens with the same role


def _symbols(
    roles: Mapping[int, int], tables: tuple[TokenTable, TokenTable]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return a symbol for each control token. Counterparts have the same symbol.

    The first bos tokens of both sides also have the same symbol, and so have the first eos tokens.
    This holds even if such an eos token also ends turns and therefore has a different counterpart.
    """
    teacher_symbols = {t: CONTROL + n for n, t in enumerate(sorted(set(roles.values())))}
    if len(teacher_symbols) > FIRST_UNKNOWN - CONTROL:
        raise ValueError(
            f"{len(teacher_symbols)} control tokens have a counterpart, expected at most "
            f"{FIRST_UNKNOWN - CONTROL}"
        )
    student_symbols = {s: teacher_symbols[t] for s, t in roles.items()}
    for role in ("bos", "eos"):
        s, t = (next(iter(table.roles.get(role, ())), -1) for table in tables)
        if s in student_symbols and t >= 0:
            same = {teacher_symbols.get(t): student_symbols[s]}
            student_symbols = {i: same.get(symbol, symbol) for i, symbol in student_symbols.items()}
            teacher_symbols = {i: same.get(symbol, symbol) for i, symbol in teacher_symbols.items()}
            teacher_symbols[t] = student_symbols[s]
    return student_symbols, teacher_symbols


class TokenAligner:
    """Aligns token ids of a student and a teacher without decoding the ids.

    A chunk ends at a shared boundary, which is a byte position at which a student token and a
    teacher token end. If the bytes differ (because of normalizers, prefix spaces, or special tokens
    without a counterpart), a banded Needleman-Wunsch algorithm aligns the tokens between the
    nearest shared boundaries. Tokens that cannot be aligned belong to no chunk. An aligner can be
    pickled.

    >>> aligner = xtok.TokenAligner(xtok.load_pair("bytes", "bytes"))
    >>> aligner.pairs([110, 195, 169], [110, 195, 169])[0].student_bytes
    (0, 1)

    Args:
        pair: the student and the teacher.
        max_comb_len: maximum number of tokens per side of a chunk, 1 to 64. The limit applies only
            where the bytes of the two sides differ.

    Raises:
        XtokError: if the student's or the teacher's token table is missing.
        ValueError: if `max_comb_len` is out of range.
    """

    def __init__(self, pair: Pair, max_comb_len: int = 4) -> None:
        if not 1 <= max_comb_len <= MAX_COMB_LEN:
            raise ValueError(f"max_comb_len is {max_comb_len}, expected 1 to {MAX_COMB_LEN}")
        student_types, teacher_types = (table.types for table in pair.tables)
        # Two unknown tokens are not counterparts: each vocabulary lacks different characters, so
        # the tokens can stand for different text.
        roles = {
            s: t
            for s, t in pair.equal_roles.items()
            if pair.is_same or TokenType.UNKNOWN not in (student_types[s], teacher_types[t])
        }
        student, teacher = _symbols(roles, pair.tables)
        self.student = SymbolTable("student", pair.tables[0], student, FIRST_UNKNOWN)
        self.teacher = SymbolTable("teacher", pair.tables[1], teacher, FIRST_UNKNOWN + 1)
        # If a library drops text, all later offsets are shifted, so `align_spans` cannot be used.
        tokenizers = (pair.student_tokenizer, pair.teacher_tokenizer)
        self.is_lossy = any(t is not None and t.drops_text for t in tokenizers)
        self.max_comb_len = max_comb_len
        self.python_tokens_left = PYTHON_TOKENS
        self._exact = pair.equal_bytes.astype(np.int32)
        self._exact[list(roles)] = list(roles.values())

    def align(
        self,
        student_ids: ArrayT,
        teacher_ids: Array,
        *,
        student_attention_mask: Array | None = None,
        teacher_attention_mask: Array | None = None,
    ) -> PaddedAlignment[ArrayT]:
        """Align a batch of token ids.

        Args:
            student_ids: integers `[B, T_s]`, NumPy or torch.
            teacher_ids: integers `[B, T_t]`.
            student_attention_mask: `[B, T_s]`, 0 at padding. By default, pad tokens are padding. If
                the pad token is also the eos token, the first eos token at the end of a row is not
                padding.
            teacher_attention_mask: `[B, T_t]`.

        Raises:
            ValueError: if shapes differ, or an id is invalid or has no text.
        """
        student = Sequences(self.student, student_ids, student_attention_mask)
        teacher = Sequences(self.teacher, teacher_ids, teacher_attention_mask)
        for sequences in (student, teacher):
            if sequences.is_list or sequences.kept.ndim != 2:
                raise ValueError(f"{sequences.side}_ids must be a padded batch [B, T]")
        batch = self.align_sequences(student, teacher).padded(student.kept, teacher.kept)
        arrays = {name: like(array, student_ids) for name, array in vars(batch).items()}
        return PaddedAlignment(**arrays)

    def align_sequences(
        self, student: Sequences | FlatIds, teacher: Sequences | FlatIds
    ) -> FlatAlignment:
        """Align checked sequences. Raises a `ValueError` if the numbers of sequences differ."""
        num_rows = len(student.bounds) - 1
        if num_rows != len(teacher.bounds) - 1:
            raise ValueError(
                f"{num_rows} student sequences, but {len(teacher.bounds) - 1} teacher sequences"
            )
        s, t = self.student.with_ids(student), self.teacher.with_ids(teacher)
        chunks = Walk(
            student=np.full(len(s.ids), -1, np.int32),
            teacher=np.full(len(t.ids), -1, np.int32),
            correct=np.zeros(len(s.ids), np.bool_),
            total=np.zeros(num_rows, np.int64),
            differs=np.empty((num_rows, 2), np.int64),
        )
        self.python_tokens_left -= len(s.ids) + len(t.ids)
        walk, walk_on = align_documents, align_rest
        if self.python_tokens_left >= 0:
            walk, walk_on = in_python(walk), in_python(walk_on)
        walk(s, t, self._exact, chunks)
        if (chunks.differs[:, 0] >= 0).any():
            walk_on(s, t, self.max_comb_len, self.is_lossy, chunks)
        ends = np.repeat(s.bounds[:-1] + chunks.total, np.diff(s.bounds))
        has_chunk = np.arange(len(s.ids)) < ends
        return FlatAlignment(
            chunks.student, chunks.teacher, chunks.total, chunks.correct[has_chunk]
        )

    def prefers_spans(self, student_ids: NDArray[Any], teacher_ids: NDArray[Any]) -> bool:
        """Whether the given ids contain unknown tokens that `align_spans` can locate."""
        sides = ((self.student, student_ids), (self.teacher, teacher_ids))
        has_unknown = any(bool(np.isin(ids, table.unknown_ids).any()) for table, ids in sides)
        return has_unknown and not self.is_lossy

    def align_spans(self, student: BoundedIds, teacher: BoundedIds) -> FlatAlignment:
        """Align one document that contains unknown tokens, by byte offsets in its text.

        A chunk is a range between two shared boundaries that has the same bytes on both sides. Each
        argument contains ids and their byte offsets in the text, int64 `[T + 1]`.
        """
        shared = np.intersect1d(student[1], teacher[1])
        s_parts, s_index = _segments(self.student, *student, shared)
        t_parts, t_index = _segments(self.teacher, *teacher, shared)
        same = np.array([a == b != b"" for a, b in zip(s_parts, t_parts, strict=True)], np.bool_)
        chunk_ids = np.append(np.where(same, np.cumsum(same) - 1, -1), -1).astype(np.int32)
        total = int(same.sum())
        is_correct = np.ones(total, np.bool_)
        return FlatAlignment(chunk_ids[s_index], chunk_ids[t_index], np.array([total]), is_correct)

    def align_ids(
        self,
        student_ids: IdsLike,
        student_offsets: IdsLike,
        teacher_ids: IdsLike,
        teacher_offsets: IdsLike,
    ) -> FlatAlignment:
        """Align many documents as flat arrays.

        Document d is `student_ids[student_offsets[d]:student_offsets[d + 1]]`, without padding.

        Raises:
            ValueError: if offsets are invalid, or for the same reasons as `align`.
        """
        return self.align_sequences(
            self.student.flat(student_ids, student_offsets),
            self.teacher.flat(teacher_ids, teacher_offsets),
        )

    def align_document(self, student_ids: IdsLike, teacher_ids: IdsLike) -> FlatAlignment:
        """Align one document."""
        return self.align_ids(
            student_ids, [0, len(student_ids)], teacher_ids, [0, len(teacher_ids)]
        )

    def pairs(
        self, student_ids: IdsLike, teacher_ids: IdsLike, alignment: FlatAlignment | None = None
    ) -> list[AlignedPair]:
        """Return the chunks of one document with token spans and byte spans."""
        alignment = alignment or self.align_document(student_ids, teacher_ids)
        count = len(alignment.is_correct)
        student = _spans(self.student.table, student_ids, alignment.student_chunk_id, count)
        teacher = _spans(self.teacher.table, teacher_ids, alignment.teacher_chunk_id, count)
        chunks = zip(student, teacher, alignment.is_correct.tolist(), strict=True)
        return [AlignedPair(s[0], t[0], s[1], t[1], s[2], t[2], same) for s, t, same in chunks]


def _segments(
    table: SymbolTable, ids: NDArray[Any], bounds: NDArray[np.int64], shared: NDArray[np.int64]
) -> tuple[list[bytes], NDArray[np.int64]]:
    """Split the symbols of one side at shared boundaries, and return each token's segment.

    The segment is −1 if a token has no symbols, or lies before the first or after the last shared
    boundary.
    """
    starts, ends = table.offsets[ids], table.offsets[ids + 1]
    symbols = [table.symbols[a:b].tobytes() for a, b in zip(starts, ends, strict=True)]
    cuts = np.searchsorted(bounds[:-1], shared).tolist()
    segment = np.searchsorted(shared, bounds[:-1], side="right") - 1
    segment[(starts == ends) | (segment == len(shared) - 1)] = -1
    return [b"".join(symbols[a:b]) for a, b in pairwise(cuts)], segment


def _spans(
    table: TokenTable, ids: IdsLike, chunk: NDArray[np.int32], count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]]:
    """Yield the ids, the token span and the byte span of each chunk."""
    row = np.asarray(ids, np.int64)
    ends = np.cumsum(table.lengths[row]).tolist()
    positions = np.flatnonzero(chunk >= 0)
    cuts = np.searchsorted(chunk[positions], np.arange(count + 1)).tolist()
    for start, end in pairwise(cuts):
        members = positions[start:end].tolist()
        first, last = members[0], members[-1]
        byte_start = ends[first - 1] if first else 0
        yield tuple(row[members].tolist()), (first, last + 1), (byte_start, ends[last])


@dataclass(frozen=True, kw_only=True)
class TextAlignment:
    """Two tokenizations of one text, and their alignment."""

    student: str  # the model id
    teacher: str
    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    student_tokens: tuple[str, ...]  # escaped
    teacher_tokens: tuple[str, ...]
    pairs: tuple[AlignedPair, ...]
    num_correct: int
    num_one_to_one: int  # correct chunks with one token on each side
    student_unaligned: int  # tokens outside chunks
    teacher_unaligned: int


class Chunk(NamedTuple):
    """A chunk with ids and escaped tokens, or a single token outside all chunks."""

    # `same` (one token per side), `split` (several tokens on a side), `different` (unequal bytes),
    # or `alone` (outside chunks)
    kind: str
    student: Sequence[tuple[int, str]]
    teacher: Sequence[tuple[int, str]]


def chunks(alignment: TextAlignment) -> Iterator[Chunk]:
    """Yield chunks of an alignment, and tokens outside chunks, in the order of the text."""
    student = list(zip(alignment.student_ids, alignment.student_tokens, strict=True))
    teacher = list(zip(alignment.teacher_ids, alignment.teacher_tokens, strict=True))
    s_done = t_done = 0

    def alone(s_end: int, t_end: int) -> Iterator[Chunk]:
        yield from (Chunk("alone", [token], []) for token in student[s_done:s_end])
        yield from (Chunk("alone", [], [token]) for token in teacher[t_done:t_end])

    for pair in alignment.pairs:
        yield from alone(pair.student_tokens[0], pair.teacher_tokens[0])
        is_same = len(pair.student_ids) == len(pair.teacher_ids) == 1
        kind = "different" if not pair.is_correct else "same" if is_same else "split"
        yield Chunk(
            kind, student[slice(*pair.student_tokens)], teacher[slice(*pair.teacher_tokens)]
        )
        s_done, t_done = pair.student_tokens[1], pair.teacher_tokens[1]
    yield from alone(len(student), len(teacher))


def describe_alignment(
    aligner: TokenAligner,
    pair: Pair,
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    *,
    alignment: FlatAlignment | None = None,
) -> TextAlignment:
    """Describe the alignment of two rows of ids. Without `alignment`, align the rows first."""
    pairs = tuple(aligner.pairs(student_ids, teacher_ids, alignment))
    correct = [p for p in pairs if p.is_correct]
    return TextAlignment(
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        student_ids=tuple(student_ids),
        teacher_ids=tuple(teacher_ids),
        student_tokens=tuple(map(aligner.student.table.name, student_ids)),
        teacher_tokens=tuple(map(aligner.teacher.table.name, teacher_ids)),
        pairs=pairs,
        num_correct=len(correct),
        num_one_to_one=sum(len(p.student_ids) == len(p.teacher_ids) == 1 for p in correct),
        student_unaligned=len(student_ids) - sum(len(p.student_ids) for p in pairs),
        teacher_unaligned=len(teacher_ids) - sum(len(p.teacher_ids) for p in pairs),
    )


def shift_to_predictions(batch: AlignmentBatch[ArrayT]) -> ShiftedAlignment[ArrayT]:
    """Shift an alignment from tokens to the positions that predict the tokens, as losses require.

    Position i receives the chunk of token i + 1. The last position and padding predict no token. A
    chunk becomes invalid if no student position, or no teacher position, predicts any of its
    tokens.

    >>> aligner = xtok.TokenAligner(xtok.load_pair("bytes", "bytes"))
    >>> batch = aligner.align(np.array([[104, 105]]), np.array([[104, 105]]))
    >>> batch.student_chunk_id.tolist(), xtok.shift_to_predictions(batch).student_chunk_id.tolist()
    ([[0, 1]], [[1, -1]])

    Raises:
        ValueError: if the alignment is already shifted.
    """
    if isinstance(batch, ShiftedAlignment):
        raise ValueError("the alignment is already shifted")
    valid, has_start = deepcopy(batch.pair_valid), deepcopy(batch.pair_valid)
    shifted: dict[str, ArrayT] = {}
    for side in SIDES:
        ids: ArrayT = getattr(batch, f"{side}_chunk_id")
        predicts: ArrayT = getattr(batch, f"{side}_kept", ids == ids)
        mask = _shift(getattr(batch, f"{side}_exact_partition_mask"), False)
        moved = _shift(ids, -1)
        moved[~predicts] = -1
        shifted |= {f"{side}_chunk_id": moved, f"{side}_exact_partition_mask": mask & predicts}
        # Find the tokens that no position predicts, and the chunks that have only such tokens.
        unpredicted = ids >= 0
        unpredicted[:, 1:] &= ~predicts[:, :-1]
        rows, positions = _nonzero(unpredicted)
        chunks = ids[rows, positions]
        has_start[rows, chunks] = False
        is_gone = (moved[rows] != chunks[:, None]).all(1)
        valid[rows[is_gone], chunks[is_gone]] = False
    kept = {n: getattr(batch, n) for n in ("pair_is_correct", "num_chunks")}
    return ShiftedAlignment(pair_valid=valid, has_start=has_start & valid, **kept, **shifted)


def _shift(array: ArrayT, fill: int) -> ArrayT:
    shifted = deepcopy(array)
    shifted[:, :-1] = array[:, 1:]
    shifted[:, -1:] = fill
    return shifted


def _nonzero(array: ArrayT) -> tuple[ArrayT, ...]:
    return array.nonzero() if isinstance(array, np.ndarray) else array.nonzero(as_tuple=True)
