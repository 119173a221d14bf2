"""Align two renderings of one conversation: message by message, on what the roles wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.aligner import FlatAlignment, TextAlignment, TokenAligner, describe_alignment
from xtok.conversation import Conversation
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.teacher_side import SideChat, teachers_chats
from xtok.conversation.templates import Message
from xtok.errors import naming_template
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import byte_offsets


class ChatAlignment(NamedTuple):
    """Two renderings of one conversation, and which of their tokens belong together."""

    student: Conversation
    teacher: Conversation
    alignment: FlatAlignment  # of one document, chunk ids of the tokens themselves


class _Stretch(NamedTuple):
    """Tokens [start, end) that come from one string of one message."""

    key: tuple[Any, ...]
    start: int
    end: int
    places: NDArray[np.int64]  # where its tokens begin in that string, and the last one ends
    offset: int  # of its first character in the string; −1 if a part was cut out or rewritten


def align_chat(
    aligner: TokenAligner,
    pair: Pair,
    chat: ChatRecord | Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    student_template: str | Path | None = None,
    teacher_template: str | Path | None = None,
) -> ChatAlignment:
    """Render a conversation once on each side, by its own template, and align the two.

    What the roles wrote (contents, reasoning, tool calls) is aligned string by string, so that
    differences between the templates cannot shift it. Of the templates' own tokens, control tokens
    of one role between the same strings belong together, as the ends of turns do; the rest is in no
    chunk. A string that one side's template drops or moves is in none either. Of a conversation
    that the teacher reads otherwise (`teacher_messages`), only the answers are aligned.

    Args:
        aligner: of this pair.
        pair: the student and the teacher, with their tokenizers.
        chat: of a file; or messages, dicts with `role` and `content`, and whatever else the
            templates read.
        tools: JSON schemas of the tools, beside messages.
        variables: what else both templates read, beside messages.
        student_template: as in `conversation.render`; the tokenizer's own by default.
        teacher_template: the same for the teacher's side.

    Raises:
        XtokError: if there is no template, it raises, or the teacher reads other answers.
    """
    if not isinstance(chat, ChatRecord):
        fields = {"messages": list(chat), "tools": list(tools or ())}
        chat = chat_record(fields | {"chat_template_kwargs": dict(variables or {})}, "it")
    sides = (SideChat(chat), *teachers_chats(chat, 1))
    with naming_template("student_template"):
        ours = sides[0].render(pair.tokenizers[0], student_template)
    with naming_template("teacher_template"):
        theirs = sides[1].render(pair.tokenizers[1], teacher_template)
    alignment = align_rendered(aligner, ours, theirs)
    return ChatAlignment(student=ours, teacher=theirs, alignment=alignment)


def align_rendered(
    aligner: TokenAligner, student: Conversation, teacher: Conversation
) -> FlatAlignment:
    """Align two renderings of one conversation, as `align_chat` does."""
    sides = (student, teacher)
    controls = (aligner.student.paired_controls, aligner.teacher.paired_controls)
    chunks = [np.full(len(side.ids), -1, np.int32) for side in sides]
    correct: list[bool] = []

    def align(
        positions: Sequence[Sequence[int]], strings: tuple[_Stretch, _Stretch] | None = None
    ) -> None:
        """Align the tokens at some positions of both sides, and number their chunks on.

        They may be those of one string of a message.
        """
        places = [np.array(p, np.int64) for p in positions]
        ids = [s.ids[p] for s, p in zip(sides, places, strict=True)]
        if strings and _is_same_text(*strings) and aligner.prefers_spans(*ids):
            bounds = [s.places[-len(p) - 1 :] for p, s in zip(places, strings, strict=True)]
            aligned = aligner.align_spans(ids[0], bounds[0], ids[1], bounds[1])
        else:
            aligned = aligner.align_document(*ids)
        numbers = (aligned.student_chunk_id, aligned.teacher_chunk_id)
        for chunk, place, number in zip(chunks, places, numbers, strict=True):
            chunk[place] = np.where(number >= 0, number + len(correct), -1)
        correct.extend(aligned.is_correct.tolist())

    done = [0, 0]
    for pair in (*_in_common(*map(_written, sides)), None):
        ends = [len(side.ids) for side in sides] if pair is None else [s.start for s in pair]
        align(
            [
                [i for i in range(first, end) if int(side.ids[i]) in paired]
                for first, end, side, paired in zip(done, ends, sides, controls, strict=True)
            ]
        )
        if pair is not None:
            align([range(max(d, s.start), s.end) for d, s in zip(done, pair, strict=True)], pair)
            done = [s.end for s in pair]
    return FlatAlignment(
        chunks[0], chunks[1], np.array([len(correct)]), np.array(correct, np.bool_)
    )


def _is_same_text(student: _Stretch, teacher: _Stretch) -> bool:
    """Whether both sides write a string from one character on, so that places of it are known."""
    return student.offset == teacher.offset >= 0


def written_alike(
    student: Conversation, teacher: Conversation, roles: Mapping[int, int]
) -> list[tuple[slice, slice]]:
    """Return the tokens of both sides that come from the same string of a message, in order.

    They begin and end at bytes where tokens of both sides do; where a template changed the string,
    they are all of it. A control token behind a string, which ends a turn on both sides, goes with
    it.

    Args:
        student: a rendering by the student's template.
        teacher: that of the same messages by the teacher's.
        roles: for each special token of the student, the teacher's of the same role.
    """
    alike = []
    texts = [side.text.encode() for side in (student, teacher)]
    for ours, theirs in _in_common(_written(student), _written(teacher)):
        wholes = slice(0, ours.end - ours.start), slice(0, theirs.end - theirs.start)
        spans = shared_span(ours.places, theirs.places)
        own, other = (
            text[side.bounds[string.start + span.start] : side.bounds[string.start + span.stop]]
            for text, side, string, span in zip(
                texts, (student, teacher), (ours, theirs), spans or wholes, strict=True
            )
        )
        if spans and own != other:  # a template cut a part out, or changed it
            spans = wholes
        if spans:
            our_end, their_end = ours.start + spans[0].stop, theirs.start + spans[1].stop
            behind, of_teacher = student.ids[our_end:][:1], teacher.ids[their_end:][:1]
            more = len(behind) > 0 and [roles.get(int(behind[0]))] == of_teacher.tolist()
            alike.append(
                (
                    slice(ours.start + spans[0].start, our_end + more),
                    slice(theirs.start + spans[1].start, their_end + more),
                )
            )
    return alike


def shared_span(
    student: NDArray[np.int64], teacher: NDArray[np.int64]
) -> tuple[slice, slice] | None:
    """Return the tokens from the first to the last byte at which tokens of both sides begin.

    The arguments are the bytes at which tokens begin, and the last one ends.
    """
    _, ours, theirs = np.intersect1d(student, teacher, return_indices=True)
    if len(ours) < 2:
        return None
    return slice(int(ours[0]), int(ours[-1])), slice(int(theirs[0]), int(theirs[-1]))


def describe_chat(
    pair: Pair,
    chat: ChatRecord,
    templates: tuple[str | None, str | None] = (None, None),
    max_comb_len: int = 4,
) -> tuple[TextAlignment, list[str]]:
    """Align a conversation, and describe the result as `align` describes a text.

    Args:
        pair: the student and the teacher, with their tokenizers.
        chat: a conversation of a file.
        templates: chat templates of both sides; None is the tokenizer's own.
        max_comb_len: as in `TokenAligner`.

    Returns:
        the description, and the notes on the conversation and its renderings.
    """
    aligner = TokenAligner(pair, max_comb_len)
    ours, theirs, alignment = align_chat(
        aligner, pair, chat, student_template=templates[0], teacher_template=templates[1]
    )
    ids = ours.ids.tolist(), theirs.ids.tolist()
    notes = dict.fromkeys((*chat.notes, *ours.notes, *theirs.notes))
    return describe_alignment(aligner, pair, *ids, alignment=alignment), [*notes]


def _written(conversation: Conversation) -> list[_Stretch]:
    """Return the stretches of tokens that come from the messages' strings, in the text's order.

    A string that is rendered twice counts where it stands first.
    """
    byte_of, bounds = byte_offsets(conversation.text), conversation.bounds
    # Places are 4 × the character + the byte within it, because what a template cut away is known
    # in characters alone.
    character = np.searchsorted(byte_of, bounds, side="right") - 1
    places = 4 * character + bounds - byte_of[character]
    # Start, end, offset of the last run and of the first, and whether offsets rise as places do.
    spans: dict[tuple[Any, ...], list[int]] = {}
    for run in conversation.runs:
        key = (run.message, *run.path)
        if run.path[:1] == ("role",):
            continue
        if key not in spans:
            spans[key] = [run.start, run.end, run.offset, run.offset, run.offset >= 0]
        elif run.offset > spans[key][2]:  # further on in the same string: a part was cut out
            begin, _, _, offset, is_linear = spans[key]
            is_linear = is_linear and run.start - begin == run.offset - offset
            spans[key] = [begin, run.end, run.offset, offset, is_linear]
    stretches = []
    for key, (start, end, _, offset, is_linear) in sorted(
        spans.items(), key=lambda item: item[1][0]
    ):
        first = int(np.searchsorted(bounds[1:], byte_of[start], side="right"))
        last = int(np.searchsorted(bounds[:-1], byte_of[end], side="left"))
        if first < last:
            within = places[first : last + 1] - 4 * (start - max(0, offset))
            stretches.append(_Stretch(key, first, last, within, offset if is_linear else -1))
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
