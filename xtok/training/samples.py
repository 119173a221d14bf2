"""Convert a sample to a row of ids for each side, and align the rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.aligner import FlatAlignment, TokenAligner
from xtok.alignment.chats import align_rendered
from xtok.conversation import Conversation, to_json_types
from xtok.conversation.files import ChatRecord, read_row, unread_notes
from xtok.conversation.teacher_side import SideText, check_fields, teacher_chats, teacher_values
from xtok.predictions.checked import PREDICTS_FIRST, exceeds, realized_logprobs
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import TokenTable, TokenType
from xtok.training.rows import checked_columns, read_flags, read_ids

Sample: TypeAlias = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]

Part: TypeAlias = tuple[list[int], bool]
"""Token ids, and whether the tokens are targets."""


class SampleRow(NamedTuple):
    """The row of one model for a sample: ids, target flags, and the conversation or text.

    A row consists of `num_before` control tokens, the bos token of the text itself (if any),
    `num_alone` tokens that only the teacher reads, and the tokens that both models read.
    """

    ids: NDArray[np.int64]  # [T]
    is_target: NDArray[np.bool_]  # [T]
    conversation: Conversation | None = None
    text: str | None = None
    num_before: int = 0
    own_bos: int = 0  # 1 if the text itself begins with a bos token
    num_alone: int = 0
    ends: NDArray[np.int64] = np.zeros(0, np.int64)  # end positions of the target ranges

    @property
    def alone_start(self) -> int:
        """First position of the tokens that only the teacher reads."""
        return self.num_before + self.own_bos

    def insert_context(self, context: Sequence[int] | NDArray[Any]) -> SampleRow:
        """Return the row with additional tokens that only the teacher reads."""
        start, size = self.alone_start, len(context)
        return self._replace(
            ids=np.insert(self.ids, start, context),
            is_target=np.insert(self.is_target, start, [False] * size),
            num_alone=self.num_alone + size,
            ends=self.ends + size * (self.ends > start),
        )

    def after_bos(self, table: TokenTable) -> SampleRow:
        """Return a copy with `num_before` 1 if the row begins with a declared bos token, else 0."""
        is_bos = np.isin(self.ids[:1], table.roles.get("bos", ()))
        return self._replace(num_before=int(is_bos.sum()))

    def without_prompt(self) -> SampleRow:
        """Return the row with its prompt, which only the teacher reads, counted in `num_alone`."""
        targets = np.flatnonzero(self.is_target)
        first = int(targets[0]) if len(targets) else len(self.ids)
        return self._replace(num_alone=max(0, first - self.num_before))

    def keep(self, end: int | None) -> NDArray[np.int64]:
        """Return the positions that remain after truncation to a maximum length, int64.

        Tokens that only the teacher reads are cut first, from the left. Then the row is cut from
        the right.
        """
        excess = min(max(0, len(self.ids) - (end or len(self.ids))), self.num_alone)
        excluded = slice(self.alone_start, self.alone_start + excess)
        return np.delete(np.arange(len(self.ids)), excluded)[:end]


def read_sample(sample: Sample, location: str, num_teachers: int) -> list[SideText | ChatRecord]:
    """Return one text or conversation per model: the student's first, then each teacher's."""
    sample = to_json_types(sample)  # also converts message objects
    fields: Mapping[str, Any] = sample if isinstance(sample, Mapping) else {}
    text = read_row(sample, location)
    check_fields(fields, location, "text" if isinstance(text, str) else "messages")
    if isinstance(text, str):
        for note in unread_notes(fields, ("text", "teacher_context"), "texts"):
            warnings.warn(note, stacklevel=4)
        name = "teacher_context"
        contexts = teacher_values(fields.get(name), num_teachers, name, location)
        return [SideText(text), *(SideText(text, context or "") for context in contexts)]
    return [text, *teacher_chats(text, num_teachers)]


def read_scored_row(row: Mapping[str, Any]) -> tuple[SampleRow, NDArray[np.float32]]:
    """Return the ids and targets of a sample, and its log-probabilities (NaN if unknown)."""
    ids = read_ids(row["input_ids"], "input_ids")
    columns = checked_columns(row, ("realized_logprob", "loss_mask"))
    if "realized_logprob" not in columns:
        raise ValueError("input_ids need realized_logprob: add it, or pass text or messages")
    realized = np.array(columns["realized_logprob"], np.float32)  # None becomes NaN
    realized = realized_logprobs(realized, np.arange(len(ids))[:1])
    if not np.isnan(realized[:1]).all():
        raise ValueError(f"realized_logprob has a value for the first token, but {PREDICTS_FIRST}")
    if (wrong := exceeds(realized, 0)).any():
        raise ValueError(f"realized_logprob contains {realized[wrong][0]:.4g}, expected at most 0")
    is_target = read_flags(columns, "loss_mask", len(ids))
    is_target[1:] &= ~np.isnan(realized[1:])
    return SampleRow(ids, is_target), realized


def split_parts(ids: NDArray[Any], is_target: NDArray[np.bool_]) -> list[Part]:
    """Split a row at the positions where targets begin or end."""
    starts = np.flatnonzero(np.diff(is_target, prepend=~is_target[:1]))
    bounds = pairwise([*starts, len(ids)])
    return [(ids[start:end].tolist(), bool(is_target[start])) for start, end in bounds]


def join_parts(parts: Sequence[Part]) -> SampleRow:
    """Concatenate parts to a row."""
    ids = np.array([i for part, _ in parts for i in part], np.int64)
    is_target = np.array([flag for part, flag in parts for _ in part], np.bool_)
    ends = np.cumsum([len(part) for part, _ in parts], dtype=np.int64)
    return SampleRow(ids, is_target, ends=ends[[flag for _, flag in parts]])


def align_rows(
    aligner: TokenAligner,
    tokenizers: tuple[Tokenizer, Tokenizer],
    rows: tuple[SampleRow, SampleRow],
    end: int | None,
) -> FlatAlignment:
    """Align two whole rows, truncate both to `end`, and keep the chunks that consist of targets."""
    student, teacher = rows
    if student.conversation is None or teacher.conversation is None:
        teacher_only = teacher.alone_start + np.arange(teacher.num_alone)
        shared = teacher._replace(ids=np.delete(teacher.ids, teacher_only))
        alignment = _align_texts(aligner, tokenizers, (student, shared))
        chunk = np.insert(alignment.teacher_chunk_id, teacher.alone_start, [-1] * len(teacher_only))
        alignment = replace(alignment, teacher_chunk_id=chunk)
    else:
        alignment = align_rendered(aligner, student.conversation, teacher.conversation)
    return _cut_alignment(alignment, rows, (end, end))


def _align_texts(
    aligner: TokenAligner, sides: tuple[Tokenizer, Tokenizer], rows: tuple[SampleRow, SampleRow]
) -> FlatAlignment:
    """Align two rows by bytes, or by offsets in the text if a row contains unknown tokens."""
    student, teacher = rows
    by_spans = aligner.prefers_spans(student.ids, teacher.ids)
    if student.text is None or not (by_spans or aligner.is_lossy):
        return aligner.align_document(student.ids, teacher.ids)
    for tokenizer, row in zip(sides, rows, strict=True):
        inner = row.ids[row.num_before :]
        if tokenizer.table.lengths[inner].sum() < len(student.text.encode()):
            name = tokenizer.vocabulary.model_id
            note = f"{name} cannot represent a part of the text, so no chunk contains this part"
            warnings.warn(note, stacklevel=5)
    if not by_spans:
        return aligner.align_document(student.ids, teacher.ids)
    offsets = [_byte_offsets(*side_row) for side_row in zip(sides, rows, strict=True)]
    return aligner.align_spans((student.ids, offsets[0]), (teacher.ids, offsets[1]))


def _byte_offsets(tokenizer: Tokenizer, row: SampleRow) -> NDArray[np.int64]:
    encoding = tokenizer.encode(row.text or "")
    offsets_before = np.arange(-row.num_before, 0)
    num_after = len(row.ids) - row.num_before - len(encoding.ids)
    offsets_after = encoding.bounds[-1] + 1 + np.arange(num_after)
    return np.concatenate([offsets_before, encoding.bounds, offsets_after])


def covered_bytes(tokenizer: Tokenizer, row: SampleRow) -> NDArray[np.int64]:
    """Return the number of text bytes that each token of a row covers, int64 `[T]`.

    Control tokens cover 0 bytes. A space that the tokenizer adds before the text is not counted.
    """
    if row.conversation is not None:
        sizes = np.diff(row.conversation.bounds)
    else:
        shared = np.delete(np.arange(len(row.ids)), row.alone_start + np.arange(row.num_alone))
        inner, sizes = tokenizer.encode(row.text or ""), np.zeros(len(row.ids), np.int64)
        sizes[shared[row.num_before :][: len(inner.ids)]] = np.diff(inner.bounds)
    sizes[tokenizer.table.types[row.ids] == TokenType.CONTROL] = 0
    return sizes


def align_targets(
    aligner: TokenAligner, student: SampleRow, teacher: SampleRow, end: int | None
) -> FlatAlignment:
    """Align each range of targets. Unknown tokens and tokens without text are excluded.

    The teacher's row is truncated to `end`.
    """
    rows, targets = (student, teacher), []
    for symbols, row in zip((aligner.student, aligner.teacher), rows, strict=True):
        is_left_out = symbols.stands_for_nothing[row.ids] | np.isin(row.ids, symbols.unknown_ids)
        positions = np.flatnonzero(row.is_target & ~is_left_out)
        targets.append((positions, np.append(0, np.searchsorted(positions, row.ends))))
    (s_positions, s_bounds), (t_positions, t_bounds) = targets
    s_ids, t_ids = student.ids[s_positions], teacher.ids[t_positions]
    aligned = aligner.align_ids(s_ids, s_bounds, t_ids, t_bounds)
    chunk_ids = aligned.numbers(np.diff(s_bounds), np.diff(t_bounds))
    chunks = []
    for row, (positions_there, _), side_ids in zip(rows, targets, chunk_ids, strict=True):
        chunk = np.full(len(row.ids), -1, np.int32)
        chunk[positions_there] = np.where(side_ids < len(aligned.is_correct), side_ids, -1)
        chunks.append(chunk)
    total = np.array([len(aligned.is_correct)])
    alignment = FlatAlignment(chunks[0], chunks[1], total, aligned.is_correct)
    return _cut_alignment(alignment, rows, (None, end))


def _cut_alignment(
    alignment: FlatAlignment, rows: tuple[SampleRow, SampleRow], ends: tuple[int | None, int | None]
) -> FlatAlignment:
    ids = alignment.student_chunk_id, alignment.teacher_chunk_id
    sides = [(row, chunk, row.keep(end)) for row, chunk, end in zip(rows, ids, ends, strict=True)]
    is_kept = np.ones(len(alignment.is_correct) + 1, np.bool_)
    for row, chunk, positions in sides:
        is_kept[chunk[~row.is_target]] = False
        is_kept[np.delete(chunk, positions)] = False
    is_kept[-1] = False  # the last flag belongs to tokens outside chunks (−1)
    new_ids = np.where(is_kept, np.cumsum(is_kept) - 1, -1).astype(np.int32)
    chunks = [new_ids[chunk[positions]] for _, chunk, positions in sides]
    is_correct = alignment.is_correct[is_kept[:-1]]
    return FlatAlignment(chunks[0], chunks[1], np.array([len(is_correct)]), is_correct)
