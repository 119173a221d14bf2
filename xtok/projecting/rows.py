"""A text in the tokens of both sides, for files and `serve`; documents in the student's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.chats import shared_span, written_alike
from xtok.alignment.retokenize import Retokenizer
from xtok.conversation import NO_END_OF_TURN, Conversation, read_back, render
from xtok.conversation.files import ChatRecord, chat_record, without_none
from xtok.conversation.templates import check_messages
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.pairs import Pair
from xtok.predictions.topk import Documents, cache_error, chosen_rows
from xtok.projecting.project import Projector
from xtok.ragged import bounds_of

_OTHER_TEXT = "leave out its text and messages: then the ids tell the text"


Templates = tuple[str | Path | None, str | Path | None]
"""The student's and the teacher's, as `conversation.render` takes them."""


class StudentSequence(NamedTuple):
    """A text in the student's tokens and in the teacher's."""

    ids: NDArray[np.int32]  # [S], the student's
    plain: NDArray[np.int32]  # [P], the same with tokens that the teacher lacks as their text
    begins: NDArray[np.int64]  # [S + 1], where each token's part of `plain` begins
    teacher_ids: NDArray[np.int32]  # [T]
    spans: list[tuple[slice, slice]]  # of `plain` and of the teacher's ids, that spell the same
    mask: NDArray[np.bool_] | None = None  # [S], what the assistant wrote; None: no conversation

    @classmethod
    def of(
        cls,
        ids: NDArray[np.int32],
        teacher_ids: NDArray[np.int32],
        spans: list[tuple[slice, slice]],
        mask: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Return a sequence of tokens that the teacher reads as they are."""
        return cls(ids, ids, np.arange(len(ids) + 1), teacher_ids, spans, mask)


def of_conversation(
    pair: Pair,
    ids: Sequence[int],
    given: Literal[0, 1],
    templates: Templates,
    *,
    ends_too: bool,
) -> StudentSequence | None:
    """Return the conversation that one side's ids surely are of, as both sides' templates have it.

    None if they are of none, or the other side's template leaves out or changes what the assistant
    wrote. Behind the last words that both have, one that breaks off goes no further on the other
    side.

    Args:
        pair: the student and the teacher, with their tokenizers.
        ids: of a side, perhaps broken off.
        given: whose they are: 0 for the student's, 1 for the teacher's.
        templates: of both.
        ends_too: whether the other side must have the ends of the assistant's turns as well.

    Raises:
        XtokError: if the side whose ids these are has no template.
    """
    told = read_back(pair.tokenizers[given], ids, template=templates[given])
    if told is None:
        return None
    own = told.conversation
    try:
        other = told.render(pair.tokenizers[1 - given], templates[1 - given])
    except XtokError:  # a template that refuses a role, or tools
        return None
    ours, theirs = (own, other) if given == 0 else (other, own)
    spans = written_alike(ours, theirs, pair.equal_roles)
    is_shared = np.zeros(len(own.ids), np.bool_)
    for both in spans:
        is_shared[both[given]] = True
        student, teacher = (
            b"".join(table[i] for i in side.ids[span].tolist())
            for table, side, span in zip(pair.tables, (ours, theirs), both, strict=True)
        )
        if student != teacher:
            return None
    needed = own.assistant_mask
    if not ends_too:
        needed = needed & (pair.tables[given].lengths[own.ids] > 0)
    if not spans or (needed & ~is_shared).any():
        return None
    last = spans[-1]
    our_end, their_end = len(ours.ids), len(theirs.ids)
    if given == 0 and last[0].stop == our_end:  # the teacher is asked for no more
        their_end = last[1].stop
    if given == 1 and own.bounds[-1] < len(own.text.encode()):  # it breaks off
        our_end = last[0].stop
    mask = ours.assistant_mask[:our_end]
    return StudentSequence.of(ours.ids[:our_end], theirs.ids[:their_end], spans, mask)


def notes_on(
    rows: Documents, pair: Pair, student_template: str | Path | None,
    teacher_template: str | Path | None,
) -> Iterator[str]:  # fmt: skip
    """Say what to know of rows before all are projected; they are checked, and of the teacher.

    That is texts without the BOS token that the teacher's library begins them with, and what
    `render` says of the first conversation, the teacher's end of a turn aside.
    """
    teacher, topk = pair.tokenizers[1], rows.topk
    firsts = topk.token_ids[topk.bounds[:-1][np.diff(topk.bounds) > 0]]
    without = int((firsts != teacher.bos_id).sum())
    if teacher.bos_id is not None and without:
        name = teacher.special_token_names["bos_token"]
        yield (
            f"{without:,} of the first {len(firsts):,} rows do not begin with {name} (id "
            f"{teacher.bos_id}), as texts do by {pair.teacher.model_id}'s library: many models "
            "predict badly without it"
        )
    for chat in filter(None, _chats(rows)):
        ours, theirs = _rendered(chat, pair, (student_template, teacher_template))
        yield from dict.fromkeys([*ours.notes, *_on_date(theirs)])
        break


def _chats(rows: Documents) -> list[ChatRecord | None]:
    """Return the rows' conversations, None for those without."""
    names = "messages", "tools", "chat_template_kwargs"
    columns = zip(*map(rows.values, names), strict=True)
    return [
        None if fields[0] is None
        else chat_record(without_none(dict(zip(names, fields, strict=True))), place)
        for place, fields in zip(rows.places, columns, strict=True)
    ]  # fmt: skip


def _rendered(
    chat: ChatRecord, pair: Pair, templates: Sequence[str | Path | None]
) -> list[Conversation]:
    """Render a conversation on both sides."""
    try:
        check_messages(chat.messages)
        return [
            render(
                tokenizer,
                chat.messages,
                tools=chat.tools,
                variables=chat.variables,
                add_generation_prompt=chat.messages[-1]["role"] != "assistant",
                template=template,
            )
            for tokenizer, template in zip(pair.tokenizers, templates, strict=True)
        ]
    except XtokError as error:
        error.at(chat.place)
        raise


def _on_date(chat: Conversation) -> list[str]:
    return [note for note in chat.notes if note != NO_END_OF_TURN]


class RowProjector:
    """Turns a teacher's stored rows into a student's.

    A row's `messages` are rendered by the student's own template, its `text` is encoded by the
    student's own library. Of a row without either, the ids are read back as a conversation, if both
    have a template; else they are bytes.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: from the teacher (rows) to the student (columns).
        top_k: the most candidates of a row.
        student_template: of conversations, as `conversation.render` takes it.
        teacher_template: the same for the teacher's side.
        num_threads: one per available core if None.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        *,
        top_k: int,
        student_template: str | Path | None = None,
        teacher_template: str | Path | None = None,
        num_threads: int | None = None,
    ) -> None:
        (self.student, self.teacher), self.top_k = pair.tokenizers, top_k
        self._pair = pair
        self._templates = student_template, teacher_template
        self._projector = Projector(pair, back_map, num_threads)
        self._retold = Retokenizer(pair.reversed)
        self._roles = pair.reversed.equal_roles
        names = {i: name.encode() for i, name in self.teacher.table.control_names.items()}
        self._control = np.isin(np.arange(len(self.teacher.table)), list(names))
        self._spelled = [names.get(i, token) for i, token in enumerate(self.teacher.table.tokens())]

    def __call__(self, rows: Documents) -> Documents:
        """Project rows that are checked.

        Raises:
            XtokError: if a row's ids do not spell its text, or its messages cannot be rendered.
        """
        topk = rows.topk
        told = list(self._told(rows))
        bounds = bounds_of([len(one.ids) for one in told])
        token_ids = np.concatenate([*(one.ids for one in told), np.zeros(0, np.int32)])
        spans = [one.spans for one in told]
        projected, row_of = self._projector.project_spans(
            topk, token_ids, bounds, spans, self.top_k
        )
        row_of[
            bounds[:-1][np.diff(bounds) > 0]
        ] = -1  # no student has logits before its first token
        masks = None
        if rows.loss_mask is not None or any(one.mask is not None for one in told):
            masks = np.concatenate([*self._masks(rows, told), np.zeros(0, np.bool_)])
        return rows._replace(
            topk=chosen_rows(projected, row_of, token_ids, bounds), loss_mask=masks
        )

    def _told(self, rows: Documents) -> Iterator[StudentSequence]:
        """Return each row's text in the student's tokens."""
        topk, bounds = rows.topk, rows.topk.bounds.tolist()
        ids = [topk.token_ids[a:b] for a, b in pairwise(bounds)]
        texts, chats = rows.values("text"), _chats(rows)
        spans = {
            i: self._text_in(ids[i], text, rows.places[i])
            for i, text in enumerate(texts)
            if chats[i] is None and text is not None
        }
        by_text = {i: found for i, found in spans.items() if found is not None}
        rest = [i for i, chat in enumerate(chats) if chat is None and i not in by_text]
        read = {i: found for i in rest if (found := self._read_back(ids[i])) is not None}
        by_ids = [i for i in rest if i not in read]
        encoded = self.student.encode_batch([texts[i] for i in by_text])
        retold = self._retold([ids[i].tolist() for i in by_ids])
        told = {
            i: self._of_text(ids[i], own, *found)
            for (i, found), own in zip(by_text.items(), encoded, strict=True)
        }
        for i, own in zip(by_ids, retold, strict=True):
            whole = (slice(0, len(own)), slice(0, len(ids[i])))
            told[i] = StudentSequence.of(np.array(own, np.int32), ids[i], [whole])
        told |= read
        for i, chat in enumerate(chats):
            yield told[i] if chat is None else self._of_chat(ids[i], chat)

    def _text_in(
        self, ids: NDArray[np.int32], text: str, place: object
    ) -> tuple[slice, int] | None:
        """Return which ids are the text, control tokens around it aside, and the bytes before it.

        None if it has control tokens, by their names: then the ids tell more than the text.

        Raises:
            XtokError: if the ids do not spell the text, and the teacher's library gives others.
        """
        data, spelled = text.encode(), [self._spelled[i] for i in ids.tolist()]
        ends, whole = bounds_of([*map(len, spelled)]), b"".join(spelled)
        inner = self._inner(ids)
        for begin, start in enumerate(ends[: inner.start + 1].tolist()):
            for space in (0, 1):  # some libraries put one before a text
                stop = start + space + len(data)
                if whole[start:stop] == b" " * space + data:
                    end = int(np.searchsorted(ends, stop))
                    if ends[end] == stop and end >= inner.stop:
                        has_control = self._control[ids[begin:end]].any()
                        return None if has_control else (slice(begin, end), space)
        [own] = self.teacher.encode_batch([text])  # by a library that changes the text
        for begin in range(inner.start + 1):
            span = slice(begin, begin + len(own))
            if ids[span].tolist() == own and self._control[ids[span.stop :]].all():
                return span, 0
        text_of_ids = b"".join(spelled[inner])
        both = enumerate(zip(text_of_ids, data, strict=False))
        differs = next((i for i, (a, b) in both if a != b), min(len(text_of_ids), len(data)))
        raise cache_error(
            place,
            f"its ids do not spell its text: they differ from byte {differs} on",
            f"give the teacher whose ids these are, or {_OTHER_TEXT}",
        )

    def _inner(self, ids: NDArray[np.int32]) -> slice:
        """Return where ids are, without the control tokens around them."""
        text = np.flatnonzero(~self._control[ids])
        return slice(int(text[0]), int(text[-1]) + 1) if len(text) else slice(len(ids), 0)

    def _of_text(
        self, ids: NDArray[np.int32], own: Sequence[int], span: slice, start: int
    ) -> StudentSequence:
        """Put the counterparts of the control tokens around a text around the student's ids."""
        around = [
            [self._roles[i] for i in part.tolist() if i in self._roles]
            for part in (ids[: span.start], ids[span.stop :])
        ]
        before, behind = around
        ours = np.array([*before, *own, *behind], np.int32)
        whole = slice(0, len(ours)), slice(0, len(ids))
        if not start:
            return StudentSequence.of(ours, ids, [whole])
        spans = shared_span(
            bounds_of(self.student.table.lengths[ours]),
            bounds_of(self.teacher.table.lengths[ids]) - start,
        )
        return StudentSequence.of(ours, ids, [spans] if spans else [])

    def _of_chat(self, ids: NDArray[np.int32], chat: ChatRecord) -> StudentSequence:
        """Render a conversation on both sides; the teacher's ids may be cut off."""
        ours, theirs = _rendered(chat, self._pair, self._templates)
        if not np.array_equal(ids, theirs.ids[: len(ids)]):
            hints = [f"give the teacher whose ids these are, or {_OTHER_TEXT}", *_on_date(theirs)]
            raise cache_error(
                chat.place,
                "its ids are not those of its messages by the teacher's template",
                "; ".join(hints),
            )
        theirs = replace(
            theirs,
            ids=ids,
            bounds=theirs.bounds[: len(ids) + 1],
            assistant_mask=theirs.assistant_mask[: len(ids)],
        )
        spans = written_alike(ours, theirs, self._pair.equal_roles)
        return StudentSequence.of(ours.ids, ids, spans, ours.assistant_mask)

    def _read_back(self, ids: NDArray[np.int32]) -> StudentSequence | None:
        """Render the conversation that ids are of by the student's template, if both have one."""
        if not self._control[ids].any():
            return None
        with suppress(XtokError):  # no template
            return of_conversation(self._pair, ids.tolist(), 1, self._templates, ends_too=False)
        return None

    def _masks(
        self, rows: Documents, told: Sequence[StudentSequence]
    ) -> Iterator[NDArray[np.bool_]]:
        """Return which of the student's tokens are targets, as the teacher's at their bytes are."""
        bounds = rows.topk.bounds.tolist()
        for one, begin, end in zip(told, bounds[:-1], bounds[1:], strict=True):
            mask = np.ones(len(one.ids), np.bool_)
            if one.mask is not None:
                mask = one.mask
            elif rows.loss_mask is not None and end > begin:
                ids, of_teacher = rows.topk.token_ids[begin:end], rows.loss_mask[begin:end]
                ours, theirs = (
                    np.cumsum(table.lengths[of]) - table.lengths[of]
                    for table, of in ((self.student.table, one.ids), (self.teacher.table, ids))
                )
                # A control token has no bytes, and so begins where the next token does.
                of_text = np.searchsorted(theirs, ours, side="right") - 1
                of_control = np.searchsorted(theirs, ours, side="left").clip(0, len(ids) - 1)
                has_bytes = self.student.table.lengths[one.ids] > 0
                mask = of_teacher[np.where(has_bytes, of_text, of_control)]
            yield mask
