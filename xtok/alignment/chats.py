"""Align two renderings of one conversation, string by string."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Note
from xtok.alignment.aligner import FlatAlignment, TextAlignment, TokenAligner, describe_alignment
from xtok.config import ChatTemplates
from xtok.conversation import Conversation, Run
from xtok.conversation.files import ChatRecord, chat_record, read_conversations
from xtok.conversation.teacher_side import teacher_chats
from xtok.errors import XtokError, naming_template
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import byte_offsets

ChatLike: TypeAlias = str | PathLike[str] | list[Any] | dict[str, Any]
"""A conversation: the path of a file that contains it, a list of messages, or a row with
`messages`."""


class ChatAlignment(NamedTuple):
    """Two renderings of one conversation, and their alignment."""

    student: Conversation
    teacher: Conversation
    alignment: FlatAlignment  # alignment of one document


class _String(NamedTuple):
    """The tokens from `start` to `end` (exclusive) of one string in a message."""

    key: tuple[int | str, ...]
    start: int
    end: int
    offsets: NDArray[np.int64]  # [tokens + 1], offset of each token in the string, and the end
    offset: int  # offset of the first character, or −1 if the template changed the string


def align_chat(
    aligner: TokenAligner,
    pair: Pair,
    chat: ChatLike | ChatRecord,
    templates: ChatTemplates | None = None,
) -> ChatAlignment:
    """Render a conversation with both templates and align the results.

    Each string of a message (content, reasoning, tool calls) is aligned separately, so template
    text cannot shift the string. Two control tokens form a chunk if both tokens have the same role
    and are between the same strings. The rest of the template's text does not belong to any chunk.
    If the row has different `teacher_messages`, only the answers are aligned.

    Args:
        aligner: an aligner for `pair`.
        pair: the student and the teacher, with their tokenizers.
        chat: a `ChatRecord`, or a conversation in a form that `align` accepts.
        templates: see `align`.

    Raises:
        XtokError: if a template is missing or fails, or if the teacher's answers differ from the
            student's.
    """
    student = chat if isinstance(chat, ChatRecord) else _only_chat(chat)
    [teacher] = teacher_chats(student, 1)
    templates = ChatTemplates.or_default(templates)
    with naming_template("student_template"):
        student_chat = student.render(pair.tokenizers[0], templates.student_template)
    with naming_template("teacher_template"):
        teacher_chat = teacher.render(pair.tokenizers[1], templates.teacher_template)
    alignment = align_rendered(aligner, student_chat, teacher_chat)
    return ChatAlignment(student=student_chat, teacher=teacher_chat, alignment=alignment)


def align_rendered(
    aligner: TokenAligner, student: Conversation, teacher: Conversation
) -> FlatAlignment:
    """Align two renderings of one conversation; see `align_chat`."""
    ids = (student.ids, teacher.ids)
    controls = [
        np.flatnonzero(np.isin(row, [*table.paired_controls]))
        for row, table in zip(ids, (aligner.student, aligner.teacher), strict=True)
    ]
    # For each side: [T], chunk number of each token in the conversation, or −1
    chunk_ids = [np.full(len(row), -1, np.int32) for row in ids]
    correct: list[bool] = []

    def align(
        positions: list[NDArray[np.int64]], strings: tuple[_String, _String] | None = None
    ) -> None:
        """Align the tokens at `positions`. For tokens in a string, `strings` is that string."""
        parts = [row[p] for row, p in zip(ids, positions, strict=True)]
        is_same_text = strings is not None and strings[0].offset == strings[1].offset >= 0
        if strings and is_same_text and aligner.prefers_spans(*parts):
            bounds = [s.offsets[-len(p) - 1 :] for p, s in zip(positions, strings, strict=True)]
            aligned = aligner.align_spans(*zip(parts, bounds, strict=True))
        else:
            aligned = aligner.align_document(*parts)
        new_ids = (aligned.student_chunk_id, aligned.teacher_chunk_id)
        for side_ids, p, chunk in zip(chunk_ids, positions, new_ids, strict=True):
            side_ids[p] = np.where(chunk >= 0, chunk + len(correct), -1)
        correct.extend(aligned.is_correct.tolist())

    # Align in text order: the control tokens before each string, then the string. A token that
    # belongs to two strings is aligned with the first string.
    ends = [0, 0]
    for strings in _match(_strings(student), _strings(teacher)):
        align(_positions_between(controls, ends, [s.start for s in strings]))
        starts = [max(end, s.start) for end, s in zip(ends, strings, strict=True)]
        ends = [s.end for s in strings]
        align([*map(np.arange, starts, ends)], strings)
    align(_positions_between(controls, ends, list(map(len, ids))))
    total = np.array([len(correct)])
    return FlatAlignment(chunk_ids[0], chunk_ids[1], total, np.array(correct, np.bool_))


def _positions_between(
    positions: list[NDArray[np.int64]], starts: list[int], ends: list[int]
) -> list[NDArray[np.int64]]:
    return [p[(p >= a) & (p < b)] for p, a, b in zip(positions, starts, ends, strict=True)]


def shared_string_spans(
    student: Conversation, teacher: Conversation, roles: Mapping[int, int]
) -> list[tuple[slice, slice]]:
    """Return the student's and the teacher's token range for each string of the messages.

    A range starts and ends at boundaries that both sides share. If a template changed the string,
    the range covers the whole string. The range includes the control token after the string if both
    sides end the turn with this token. `roles` maps the student's special tokens to the teacher's
    special tokens.
    """
    alike = []
    sides = (student, teacher)
    texts = [chat.text.encode() for chat in sides]
    for strings in _match(_strings(student), _strings(teacher)):
        offsets = [string.offsets for string in strings]
        _, *shared = np.intersect1d(offsets[0], offsets[1], return_indices=True)
        if len(shared[0]) < 2:
            continue
        spans = [(s.start + at[0], s.start + at[-1]) for s, at in zip(strings, shared, strict=True)]
        written = [
            text[chat.bounds[start] : chat.bounds[end]]
            for text, chat, (start, end) in zip(texts, sides, spans, strict=True)
        ]
        if written[0] != written[1]:  # a template changed the string
            spans = [(string.start, string.end) for string in strings]
        behind, other = (chat.ids[end:][:1] for chat, (_, end) in zip(sides, spans, strict=True))
        ends_turn = len(behind) > 0 and [roles.get(i) for i in behind.tolist()] == other.tolist()
        own, others = (slice(int(start), int(end) + ends_turn) for start, end in spans)
        alike.append((own, others))
    return alike


def describe_chat(
    aligner: TokenAligner, pair: Pair, chat: ChatLike, templates: ChatTemplates | None, note: Note
) -> TextAlignment:
    """Align a conversation, and describe the result; see `align`."""
    student, teacher, alignment = align_chat(aligner, pair, chat, templates)
    for text in dict.fromkeys((*student.notes, *teacher.notes)):
        note(text)
    ids = student.ids.tolist(), teacher.ids.tolist()
    return describe_alignment(aligner, pair, *ids, alignment=alignment)


def _only_chat(chat: ChatLike) -> ChatRecord:
    if not isinstance(chat, str | PathLike):
        return chat_record(chat, "the conversation")
    record, *others = read_conversations(Path(chat))
    if others:
        hint = "give a file with one conversation"
        raise XtokError(f"{chat} has {1 + len(others)} conversations", hint=hint)
    return record


def _strings(conversation: Conversation) -> list[_String]:
    """Return all strings of the messages in text order. Repetitions of a string are omitted."""
    byte_of, bounds = byte_offsets(conversation.text), conversation.bounds
    # A byte offset is encoded as 4 × character offset + byte within the character, because runs
    # have only character offsets.
    character = np.searchsorted(byte_of, bounds, side="right") - 1
    offsets = 4 * character + bounds - byte_of[character]
    runs_by_key: dict[tuple[int | str, ...], list[Run]] = defaultdict(list)
    for run in conversation.runs:
        runs = runs_by_key[run.message, *run.path]
        if not runs or run.offset > runs[-1].offset:  # otherwise, the template repeats the string
            runs.append(run)
    strings = []
    for key, runs in sorted(runs_by_key.items(), key=lambda item: item[1][0].start):
        start, offset = runs[0].start, runs[0].offset
        is_linear = all(run.start - start == run.offset - offset for run in runs)
        first = int(np.searchsorted(bounds[1:], byte_of[start], side="right"))
        last = int(np.searchsorted(bounds[:-1], byte_of[runs[-1].end], side="left"))
        if first < last and key[1:2] != ("role",):
            inside = offsets[first : last + 1] - 4 * (start - max(0, offset))
            strings.append(_String(key, first, last, inside, offset if is_linear else -1))
    return strings


def _match(student: list[_String], teacher: list[_String]) -> list[tuple[_String, _String]]:
    by_key = {string.key: string for string in teacher}
    pairs: list[tuple[_String, _String]] = []
    ends = (0, 0)
    for own in student:
        other = by_key.get(own.key)
        if other and own.end > ends[0] and other.end > ends[1]:
            pairs.append((own, other))
            ends = (own.end, other.end)
    return pairs
