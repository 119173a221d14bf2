"""Align two tokenizations of one text as finely as possible, by bytes, from ids alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.nemo import METHODS, NemoChat
from xtok.maps.pair import require_same_tokens
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer, from_transformers
from xtok.vocab.roles import match_roles
from xtok.vocab.table import TokenTable, TokenType, match_bytes

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = NDArray[Any] | torch.Tensor


@dataclass
class AlignmentBatch:
    """Which tokens of two batches belong together, with the fields that NeMo-RL's trainers read.

    A chunk is a stretch of text between two neighbouring shared token boundaries. Chunk k of a row
    is its pair k. All are NumPy arrays, or torch tensors where tensors were given.

    Attributes:
        pair_valid: bool `[B, max_pairs]`, True where a row has this chunk.
        pair_is_correct: bool `[B, max_pairs]`, True where both sides of the chunk have equal bytes
            or are special tokens of one role.
        student_exact_partition_mask: bool `[B, T_s]`, True for the one student token of a correct
            chunk of one token on each side.
        teacher_exact_partition_mask: bool `[B, T_t]`, likewise.
        student_chunk_id: int64 `[B, T_s]`, the chunk of each token itself, or −1.
        teacher_chunk_id: int64 `[B, T_t]`, likewise.
        num_chunks: int64 `[B]`.
    """

    pair_valid: Array
    pair_is_correct: Array
    student_exact_partition_mask: Array
    teacher_exact_partition_mask: Array
    student_chunk_id: Array
    teacher_chunk_id: Array
    num_chunks: Array


@dataclass(frozen=True, eq=False)
class FlatAlignment:
    """The alignment of many documents on flat arrays; each document's chunks are numbered from 0.

    Attributes:
        student_chunk_id: int32 `[student tokens]`, the chunk of each token, or −1.
        teacher_chunk_id: int32 `[teacher tokens]`, likewise.
        num_chunks: int64 `[documents]`.
        is_correct: bool `[all chunks]`, document after document.
    """

    student_chunk_id: NDArray[np.int32]
    teacher_chunk_id: NDArray[np.int32]
    num_chunks: NDArray[np.int64]
    is_correct: NDArray[np.bool_]


@dataclass(frozen=True)
class AlignedPair:
    """One chunk, to show or to check.

    Attributes:
        student_ids: the student's token ids.
        teacher_ids: the teacher's.
        student_tokens: positions of the first token and after the last one.
        teacher_tokens: likewise.
        student_bytes: the span in the student's text, in bytes.
        teacher_bytes: the span in the teacher's text.
        is_correct: whether both sides have equal bytes, or are special tokens of one role.
    """

    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    student_tokens: tuple[int, int]
    teacher_tokens: tuple[int, int]
    student_bytes: tuple[int, int]
    teacher_bytes: tuple[int, int]
    is_correct: bool


class TokenAligner(NemoChat):
    """Aligns token ids of a student and a teacher on one text; nothing is decoded again.

    Both sides' bytes are walked together: a chunk ends wherever a token ends on both. Where the
    sides do not spell the same bytes (normalizers, prefix spaces, special tokens without a
    counterpart, other text), the tokens between the nearest shared boundaries are aligned by a
    banded Needleman-Wunsch. Tokens without a counterpart, such as a tail that truncation left on
    one side, are in no chunk. The aligner holds arrays only: it can be pickled, used in forked and
    spawned workers, and starts no threads unless `align_ids` is asked to.

    Args:
        student_tokenizer: an xtok `Tokenizer`, a fast Hugging Face tokenizer, or a `TokenTable`;
            None takes the table of the map.
        teacher_tokenizer: likewise.
        projection_matrix_path: a map of this pair, whose tables are used and checked against the
            given tokenizers.
        max_comb_len: the most tokens on a side that may match as one where the sides differ; ≥ 1.
        alignment_method: for NeMo-RL's chat collators. `same_tokenizer_identity` makes ids that
            differ an error in its chat methods; all methods align by bytes.

    Raises:
        XtokError: if the map is of other tokenizers, or carries none where they are needed.
        ValueError: if there is neither a tokenizer nor a map, `max_comb_len` is less than 1, or
            the method is unknown.
    """

    def __init__(
        self,
        student_tokenizer: Any = None,
        teacher_tokenizer: Any = None,
        projection_matrix_path: str | PathLike[str] | None = None,
        max_comb_len: int = 4,
        *,
        alignment_method: str = METHODS[0],
    ) -> None:
        from xtok.alignment.kernels import CONTROL

        if max_comb_len < 1:
            raise ValueError(f"max_comb_len is {max_comb_len}, and must be at least 1")
        if alignment_method not in METHODS:
            raise ValueError(f"alignment_method is {alignment_method!r}: {' or '.join(METHODS)}")
        self.alignment_method = alignment_method
        projection = projection_matrix_path and ProjectionMap.load(projection_matrix_path)
        rows, columns = (
            _table(side, tokenizer, getattr(projection, side).table if projection else None)
            for side, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer))
        )
        names = columns.control_names
        roles = {s: t for s, t in match_roles(rows, columns).items() if t in names}
        symbols = {t: CONTROL + n for n, t in enumerate(sorted(set(roles.values())))}
        if len(symbols) > 2**16 - CONTROL:
            raise ValueError(f"{len(symbols)} control tokens with a counterpart are too many")
        self.student = SymbolTable("student", rows, {s: symbols[t] for s, t in roles.items()})
        self.teacher = SymbolTable("teacher", columns, symbols)
        self.max_comb_len = max_comb_len
        self._exact = np.full(len(rows) + 1, -1, np.int32)  # the last for padding
        for s, t in (match_bytes(rows, columns) | roles).items():
            self._exact[s] = t

    @cached_property
    def student_id_of(self) -> NDArray[np.int32]:
        """The student's id of the same bytes or role as each teacher id, int32 `[V_t]`, or −1."""
        rows, columns = self.student.table, self.teacher.table
        ids = np.full(len(columns), -1, np.int32)
        pairs = match_bytes(columns, rows)
        for s, t in match_roles(rows, columns).items():
            if t in columns.control_names:
                pairs.setdefault(t, s)
        ids[list(pairs)] = list(pairs.values())
        return ids

    def align(
        self,
        student_ids: Array,
        teacher_ids: Array,
        *,
        student_attention_mask: Array | None = None,
        teacher_attention_mask: Array | None = None,
        student_offsets: Any = None,
        teacher_offsets: Any = None,
    ) -> AlignmentBatch:
        """Align a batch of rows of token ids.

        Args:
            student_ids: integers `[B, T_s]`, NumPy or torch.
            teacher_ids: integers `[B, T_t]`.
            student_attention_mask: `[B, T_s]`, 0 where a token is padding. Without it, tokens of
                the pad role are. If the end of text pads as well, so are all but the first of them
                at a row's end, and all at its beginning.
            teacher_attention_mask: `[B, T_t]`, likewise.
            student_offsets: not needed; NeMo-RL's open pull requests pass character offsets.
            teacher_offsets: likewise.

        Raises:
            ValueError: for shapes that do not fit, ids that the vocabulary does not have, and ids
                that stand for nothing.
        """
        del student_offsets, teacher_offsets
        s_ids = self.student.rows(student_ids, student_attention_mask)
        t_ids = self.teacher.rows(teacher_ids, teacher_attention_mask)
        if len(s_ids) != len(t_ids):
            raise ValueError(f"{len(s_ids)} rows of student ids, {len(t_ids)} of teacher ids")
        (batch, s_len), t_len = s_ids.shape, t_ids.shape[1]
        bounds = np.arange(batch + 1)
        s_chunk, t_chunk, s_exact, t_exact, correct, num_chunks = self._align(
            s_ids.ravel(), bounds * s_len, t_ids.ravel(), bounds * t_len
        )
        max_pairs = max(1, int(num_chunks.max(initial=0)))  # NeMo-RL's losses need a chunk
        is_correct = np.zeros((batch, max_pairs), np.bool_)
        is_correct[:, :s_len] = correct.reshape(batch, s_len)[:, :max_pairs]
        result = AlignmentBatch(
            pair_valid=np.arange(max_pairs) < num_chunks[:, None],
            pair_is_correct=is_correct,
            student_exact_partition_mask=s_exact.reshape(batch, s_len),
            teacher_exact_partition_mask=t_exact.reshape(batch, t_len),
            student_chunk_id=s_chunk.reshape(batch, s_len).astype(np.int64),
            teacher_chunk_id=t_chunk.reshape(batch, t_len).astype(np.int64),
            num_chunks=num_chunks,
        )
        return result if isinstance(student_ids, np.ndarray) else _to_torch(result, student_ids)

    def align_ids(
        self,
        student_ids: NDArray[Any],
        student_offsets: NDArray[Any],
        teacher_ids: NDArray[Any],
        teacher_offsets: NDArray[Any],
        *,
        num_threads: int = 1,
    ) -> FlatAlignment:
        """Align many documents on flat arrays.

        Args:
            student_ids: integers `[student tokens]`, document after document, without padding.
            student_offsets: integers `[documents + 1]`; document d is
                `student_ids[student_offsets[d]:student_offsets[d + 1]]`.
            teacher_ids: integers `[teacher tokens]`.
            teacher_offsets: integers `[documents + 1]`.
            num_threads: threads that share the documents; the result does not depend on it.

        Raises:
            ValueError: as `align`, and for offsets that do not fit.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, and must be at least 1")
        s_ids, s_bounds = self.student.flat(student_ids, student_offsets)
        t_ids, t_bounds = self.teacher.flat(teacher_ids, teacher_offsets)
        if len(s_bounds) != len(t_bounds):
            raise ValueError(
                f"{len(s_bounds) - 1} student documents, {len(t_bounds) - 1} teacher documents"
            )
        s_chunk, t_chunk, _, _, correct, num_chunks = self._align(
            s_ids, s_bounds, t_ids, t_bounds, num_threads
        )
        place = np.arange(len(s_ids)) - np.repeat(s_bounds[:-1], np.diff(s_bounds))
        has_chunk = place < np.repeat(num_chunks, np.diff(s_bounds))
        return FlatAlignment(s_chunk, t_chunk, num_chunks, correct[has_chunk])

    def align_document(
        self, student_ids: Sequence[int] | NDArray[Any], teacher_ids: Sequence[int] | NDArray[Any]
    ) -> FlatAlignment:
        """Align one document.

        Raises:
            ValueError: as `align`.
        """
        s_ids, t_ids = (np.asarray(ids, np.int64) for ids in (student_ids, teacher_ids))
        return self.align_ids(s_ids, np.array([0, len(s_ids)]), t_ids, np.array([0, len(t_ids)]))

    def pairs(
        self,
        student_ids: Sequence[int] | NDArray[Any],
        teacher_ids: Sequence[int] | NDArray[Any],
        alignment: FlatAlignment | None = None,
    ) -> list[AlignedPair]:
        """Return the chunks of one document with token and byte spans, in order.

        Args:
            student_ids: the document's ids.
            teacher_ids: likewise.
            alignment: of this document; None aligns it.

        Raises:
            ValueError: as `align`.
        """
        alignment = alignment or self.align_document(student_ids, teacher_ids)
        count = len(alignment.is_correct)
        student = _spans(self.student.table, student_ids, alignment.student_chunk_id, count)
        teacher = _spans(self.teacher.table, teacher_ids, alignment.teacher_chunk_id, count)
        return [
            AlignedPair(s[0], t[0], s[1], t[1], s[2], t[2], is_correct)
            for s, t, is_correct in zip(
                student, teacher, alignment.is_correct.tolist(), strict=True
            )
        ]

    def _align(
        self,
        s_ids: NDArray[np.int32],
        s_bounds: NDArray[np.int64],
        t_ids: NDArray[np.int32],
        t_bounds: NDArray[np.int64],
        num_threads: int = 1,
    ) -> tuple[NDArray[Any], ...]:
        from xtok.alignment.kernels import align_documents

        chunks = [np.full(len(ids), -1, np.int32) for ids in (s_ids, t_ids)]
        masks = [np.zeros(len(ids), np.bool_) for ids in (s_ids, t_ids, s_ids)]
        num_chunks = np.zeros(len(s_bounds) - 1, np.int64)
        max_comb_len = min(self.max_comb_len, len(s_ids) + len(t_ids))  # fits into an int64

        def run(first: int, last: int) -> None:
            align_documents(
                s_ids, s_bounds[first : last + 1], self.student.symbols, self.student.offsets,
                t_ids, t_bounds[first : last + 1], self.teacher.symbols, self.teacher.offsets,
                self._exact, max_comb_len, *chunks, *masks, num_chunks[first:last],
            )  # fmt: skip

        if num_threads == 1:
            run(0, len(num_chunks))
        else:
            # Blocks of about as many tokens each; the kernel releases the GIL.
            goals = np.linspace(0, len(s_ids), 4 * num_threads + 1)
            cuts = np.unique(np.searchsorted(s_bounds, goals).clip(0, len(num_chunks))).tolist()
            cuts = sorted({0, *cuts, len(num_chunks)})
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(run, cuts, cuts[1:]))
        return (*chunks, *masks, num_chunks)


Span = tuple[int, int]


def _spans(
    table: TokenTable, ids: Sequence[int] | NDArray[Any], chunk: NDArray[np.int32], count: int
) -> Iterator[tuple[tuple[int, ...], Span, Span]]:
    """Return the ids, the token span and the byte span of each chunk; chunk ids never fall."""
    row = np.asarray(ids, np.int64)
    ends = np.cumsum(table.lengths[row]).tolist()
    places = np.flatnonzero(chunk >= 0)
    cuts = np.searchsorted(chunk[places], np.arange(count + 1)).tolist()
    for start, stop in pairwise(cuts):
        members = places[start:stop].tolist()
        first, last = members[0], members[-1]
        begin = ends[first - 1] if first else 0
        yield tuple(row[members].tolist()), (first, last + 1), (begin, ends[last])


@dataclass(frozen=True, kw_only=True)
class TextAlignment:
    """Two tokenizations of one text, and how they fit together.

    Attributes:
        student: model id of the student.
        teacher: model id of the teacher.
        student_tokens: the student's tokens, escaped.
        teacher_tokens: likewise.
        pairs: the chunks.
        num_correct: correct chunks.
        num_one_to_one: correct chunks of one token on each side.
        student_unaligned: student tokens in no chunk.
        teacher_unaligned: teacher tokens in no chunk.
    """

    student: str
    teacher: str
    student_tokens: tuple[str, ...]
    teacher_tokens: tuple[str, ...]
    pairs: tuple[AlignedPair, ...]
    num_correct: int
    num_one_to_one: int
    student_unaligned: int
    teacher_unaligned: int


def align(
    student: Tokenizer, teacher: Tokenizer, text: bytes, *, max_comb_len: int = 4
) -> TextAlignment:
    """Segment one text with both tokenizers, as in the middle of a longer one, and align it.

    Raises:
        TokenizerError: if a vocabulary cannot spell the text.
    """
    aligner = TokenAligner(student, teacher, max_comb_len=max_comb_len)
    return describe_alignment(
        aligner, student, teacher, student.segment(text), teacher.segment(text)
    )


def describe_alignment(
    aligner: TokenAligner,
    student: Tokenizer,
    teacher: Tokenizer,
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    *,
    alignment: FlatAlignment | None = None,
) -> TextAlignment:
    """Describe the alignment of two rows of ids; None aligns them."""
    pairs = tuple(aligner.pairs(student_ids, teacher_ids, alignment))
    correct = [pair for pair in pairs if pair.is_correct]
    return TextAlignment(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        student_tokens=tuple(map(aligner.student.table.name, student_ids)),
        teacher_tokens=tuple(map(aligner.teacher.table.name, teacher_ids)),
        pairs=pairs,
        num_correct=len(correct),
        num_one_to_one=sum(len(p.student_ids) == len(p.teacher_ids) == 1 for p in correct),
        student_unaligned=len(student_ids) - sum(len(p.student_ids) for p in pairs),
        teacher_unaligned=len(teacher_ids) - sum(len(p.teacher_ids) for p in pairs),
    )


def shift_to_predictions(batch: AlignmentBatch) -> AlignmentBatch:
    """Return the alignment of the positions that predict the tokens, as losses take it.

    Position i predicts token i + 1, so it takes that token's chunk; the last position predicts
    nothing. A chunk without a predicting position on one side (a first token) is no longer valid.
    """
    shifted: dict[str, Any] = {
        f"{side}_{name}": _shift(getattr(batch, f"{side}_{name}"), fill)
        for side in ("student", "teacher")
        for name, fill in (("chunk_id", -1), ("exact_partition_mask", False))
    }
    valid: Any = batch.pair_valid
    if valid.shape[1]:
        # Only chunk 0 can hold a row's first token, and lose its last predicting position.
        valid = valid.copy() if isinstance(valid, np.ndarray) else valid.clone()
        for side in ("student", "teacher"):
            valid[:, 0] &= (shifted[f"{side}_chunk_id"] == 0).any(1)
    return replace(batch, pair_valid=valid, **shifted)


def _shift(array: Any, fill: Any) -> Any:
    shifted = array.copy() if isinstance(array, np.ndarray) else array.clone()
    shifted[:, :-1] = array[:, 1:]
    shifted[:, -1:] = fill
    return shifted


class SymbolTable:
    """One side's table as the kernels take it, and the checks on ids.

    Args:
        side: `student` or `teacher`, for messages.
        table: the vocabulary.
        control: symbols of the control ids that have a counterpart on the other side.
    """

    def __init__(self, side: str, table: TokenTable, control: dict[int, int]) -> None:
        self.side, self.table = side, table
        self.paired_controls = frozenset(control)
        special = np.isin(table.types, [TokenType.CONTROL, TokenType.UNKNOWN])
        self._unused = np.append((table.lengths == 0) & ~special, False)
        pads = set(table.roles.get("pad", ()))
        text_ends = {i for role in ("bos", "eos", "turn_end") for i in table.roles.get(role, ())}
        self._pads = sorted(pads - text_ends)
        self._ending_pads = sorted(pads & text_ends)
        # The symbols of all ids, as the kernels say, and of one more that stands for padding.
        ids = np.array(sorted(control), np.int64)
        lengths = np.append(table.lengths, 0)
        lengths[ids] = 1
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.symbols = np.empty(int(self.offsets[-1]), np.uint16)
        is_text = np.ones(len(self.symbols), np.bool_)
        is_text[self.offsets[ids]] = False
        self.symbols[is_text] = table.data
        self.symbols[self.offsets[ids]] = [control[i] for i in ids.tolist()]

    def rows(self, token_ids: Any, mask: Any) -> NDArray[np.int32]:
        """Return int32 `[B, T]` with padding replaced by the id V."""
        ids = to_array(token_ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{self.side}_ids are {ids.dtype} of shape {list(ids.shape)}, not integers [B, T]"
            )
        keep = ~self.padding(ids) if mask is None else to_array(mask) != 0
        if keep.shape != ids.shape:
            raise ValueError(
                f"{self.side}_attention_mask is of shape {list(keep.shape)}, "
                f"{self.side}_ids of {list(ids.shape)}"
            )
        # Padding may be any id, even one outside the vocabulary.
        ids = np.where(keep, ids, len(self.table))
        self._check(ids, width=len(self.table) + 1)
        return ids.astype(np.int32)

    def flat(self, token_ids: Any, bounds: Any) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return ids as int32 `[tokens]` and offsets as int64 `[documents + 1]`."""
        ids, offsets = to_array(token_ids), to_array(bounds)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{self.side}_ids are not a flat array of integers")
        valid = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype.kind in "iu"
        valid = valid and offsets[0] == 0 and offsets[-1] == len(ids)
        if not valid or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{self.side}_offsets do not rise from 0 to the number of ids, {len(ids)}"
            )
        self._check(ids, width=len(self.table), bounds=offsets)
        return ids.astype(np.int32, copy=False), offsets.astype(np.int64, copy=False)

    def _check(self, ids: NDArray[Any], *, width: int, bounds: NDArray[Any] | None = None) -> None:
        wrong = (ids < 0) | (ids >= width)
        problem = f"is not in 0..{len(self.table) - 1}"
        if not wrong.any():
            wrong, problem = self._unused[ids], "stands for nothing: an id without bytes"
        if wrong.any():
            place = np.argwhere(wrong)[0]
            token_id = int(ids[tuple(place)])
            if bounds is not None and len(bounds) > 2:
                row = np.searchsorted(bounds, place, side="right") - 1
                place = np.concatenate([row, place - bounds[row]])
            raise ValueError(f"{self.side} id {token_id} at {place.tolist()} {problem}")

    def padding(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Tell which ids `[B, T]` are padding, as far as that can be told without a mask."""
        padding = np.isin(ids, self._pads)
        if self._ending_pads:
            ends = np.isin(ids, self._ending_pads)
            leading = np.logical_and.accumulate(ends, axis=1)
            trailing = np.logical_and.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
            padding |= leading & ~leading.all(axis=1, keepdims=True)
            padding[:, 1:] |= trailing[:, 1:] & trailing[:, :-1]
        return padding


def _table(side: str, tokenizer: Any, of_map: TokenTable | None) -> TokenTable:
    if tokenizer is None:
        if of_map is None:
            raise ValueError(
                f"there is neither a {side} tokenizer nor a map that carries its tokens"
            )
        return of_map
    if isinstance(tokenizer, TokenTable):
        table = tokenizer
    elif isinstance(tokenizer, Tokenizer):
        table = tokenizer.table
    else:
        table = from_transformers(tokenizer).table
    if of_map is None:
        return table
    require_same_tokens(side, of_map, table, what="the map", other=f"the {side} tokenizer")
    return of_map


def to_array(values: Any) -> NDArray[Any]:
    """Return what a caller gave, a tensor of any device or a list too, as an array."""
    array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    return array if array.size else array.astype(np.int64)  # an empty list has no type of its own


def _to_torch(batch: AlignmentBatch, like: Any) -> AlignmentBatch:
    import torch

    device = getattr(like, "device", None)
    return AlignmentBatch(
        **{
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
            for name, array in vars(batch).items()
        }
    )
