"""Align two renderings of one conversation: message by message, on what the roles wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.aligner import FlatAlignment, TextAlignment, TokenAligner, describe_alignment
from xtok.conversation import Conversation, byte_offsets, render
from xtok.conversation.templates import Message
from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatAlignment:
    """A conversation as a student and a teacher see it, and which of their tokens belong together.

    Attributes:
        student: the student's rendering, T_s tokens, with the mask of what the assistant wrote.
        teacher: the teacher's, T_t tokens, likewise.
        alignment: chunk ids int32 `[T_s]` and `[T_t]`, of the tokens themselves, as `align_ids`
            gives them for one document.
    """

    student: Conversation
    teacher: Conversation
    alignment: FlatAlignment


class _Stretch(NamedTuple):
    """Tokens [start, end) that come from one string of one message."""

    key: tuple[Any, ...]
    start: int
    end: int


def align_chat(
    aligner: TokenAligner,
    student: Tokenizer,
    teacher: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    student_template: str | Path | None = None,
    teacher_template: str | Path | None = None,
) -> ChatAlignment:
    """Render a conversation once on each side, by its own template, and align the two.

    What the roles wrote (contents, reasoning, tool calls) is aligned string by string, so that no
    difference of the templates can shift it. Of the templates' own tokens, control tokens of one
    role that stand between the same strings belong together, as the ends of turns do; the rest is
    in no chunk. A string that one side's template drops or moves is in none either.

    Args:
        aligner: of the same two tokenizers.
        student: the tokenizer of the student's side.
        teacher: the tokenizer of the teacher's side.
        messages: dicts with `role` and `content`, and what else the templates know.
        tools: JSON schemas of the tools.
        student_template: as in `conversation.render`; the tokenizer's own by default.
        teacher_template: likewise.

    Raises:
        XtokError: if there is no template, or it raises.
    """
    sides = [
        render(tokenizer, messages, tools=tools, template=template)
        for tokenizer, template in ((student, student_template), (teacher, teacher_template))
    ]
    controls = [aligner.student.paired_controls, aligner.teacher.paired_controls]
    stretches = _in_common(*(_written(side) for side in sides))
    chunks = [np.full(len(side.ids), -1, np.int32) for side in sides]
    correct: list[bool] = []
    done = [0, 0]
    for pair in (*stretches, None):
        ends = [len(side.ids) for side in sides] if pair is None else [s.start for s in pair]
        gaps = [
            [i for i in range(first, end) if int(side.ids[i]) in known]
            for first, end, side, known in zip(done, ends, sides, controls, strict=True)
        ]
        _align_positions(aligner, sides, gaps, chunks, correct)
        if pair is not None:
            spans = [list(range(max(d, s.start), s.end)) for d, s in zip(done, pair, strict=True)]
            _align_positions(aligner, sides, spans, chunks, correct)
            done = [s.end for s in pair]
    found = FlatAlignment(
        chunks[0], chunks[1], np.array([len(correct)]), np.array(correct, np.bool_)
    )
    return ChatAlignment(student=sides[0], teacher=sides[1], alignment=found)


def describe_chat(
    aligner: TokenAligner, student: Tokenizer, teacher: Tokenizer, chat: ChatAlignment
) -> TextAlignment:
    """Describe an aligned conversation as `align` describes a text."""
    ids = (chat.student.ids.tolist(), chat.teacher.ids.tolist())
    return describe_alignment(aligner, student, teacher, *ids, alignment=chat.alignment)


def _written(conversation: Conversation) -> list[_Stretch]:
    """Return the stretches of tokens that come from the messages' strings, in the text's order.

    A string that is rendered twice counts where it stands first.
    """
    byte_of = byte_offsets(conversation.text)
    found: dict[tuple[Any, ...], list[int]] = {}
    for run in conversation.runs:
        key = (run.message, *run.path)
        if run.path[:1] == ("role",):
            continue
        if key not in found:
            found[key] = [run.start, run.end, run.offset]
        elif run.offset > found[key][2]:  # further on in the same string: a part was cut out
            found[key][1:] = [run.end, run.offset]
    stretches = []
    for key, (start, end, _) in sorted(found.items(), key=lambda item: item[1][0]):
        first = int(np.searchsorted(conversation.bounds[1:], byte_of[start], side="right"))
        last = int(np.searchsorted(conversation.bounds[:-1], byte_of[end], side="left"))
        if first < last:
            stretches.append(_Stretch(key, first, last))
    return stretches


def _in_common(student: list[_Stretch], teacher: list[_Stretch]) -> list[tuple[_Stretch, _Stretch]]:
    """Pair the stretches of the same strings, as long as they follow one another on both sides."""
    of_key = {stretch.key: stretch for stretch in teacher}
    pairs: list[tuple[_Stretch, _Stretch]] = []
    ends = (0, 0)
    for ours in student:
        theirs = of_key.get(ours.key)
        if theirs and ours.end > ends[0] and theirs.end > ends[1]:
            pairs.append((ours, theirs))
            ends = (ours.end, theirs.end)
    return pairs


def _align_positions(
    aligner: TokenAligner,
    sides: Sequence[Conversation],
    positions: Sequence[Sequence[int]],
    chunks: Sequence[NDArray[np.int32]],
    correct: list[bool],
) -> None:
    """Align the tokens at some positions of both sides, and number the chunks on."""
    places = [np.array(p, np.int64) for p in positions]
    ids = [side.ids[p] for side, p in zip(sides, places, strict=True)]
    bounds = [np.array([0, len(p)]) for p in places]
    found = aligner.align_ids(ids[0], bounds[0], ids[1], bounds[1])
    for chunk, place, new in zip(
        chunks, places, (found.student_chunk_id, found.teacher_chunk_id), strict=True
    ):
        chunk[place] = np.where(new >= 0, new + len(correct), -1)
    correct.extend(found.is_correct.tolist())
