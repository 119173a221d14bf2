"""A teacher's stored rows: their texts in the student's tokens, and predictions of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok._lib.rows import without_nulls
from xtok.alignment.chats import written_alike
from xtok.conversation import NO_END_OF_TURN, Conversation
from xtok.conversation.files import chat_record
from xtok.conversation.teacher_side import SideChat, substituted, teacher_differs
from xtok.conversation.templates import plain_messages
from xtok.errors import XtokError
from xtok.predictions.topk import firsts_of
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.teachers.translator import SharedText, Templates, Translator
from xtok.tokenizers.pairs import Pair

if TYPE_CHECKING:
    from xtok.alignment.aligner import TokenAligner

_MOST_CHATS = 100  # whose notes are given before all are projected
_OTHER_TEXT_HINT = "leave out its text and messages: then the ids tell the text"


def project_documents(translator: Translator, rows: Documents, top_k: int) -> Documents:
    """Turn a teacher's rows, which are checked, into the student's.

    A row's `messages` are rendered by the student's own template, its `text` is encoded by the
    student's own library. Where the student does not read all of this, `student_messages` and
    `student_text` are what it reads: the same answers, and the end of the text. Of a row without
    either, the ids are read back as a conversation, if both have a template; else they are bytes.

    Raises:
        XtokError: if a row's ids do not spell its text, or its messages cannot be rendered.
    """
    texts = _texts_of(translator, rows)
    topk = translator.project(texts, rows.topk, top_k)
    masks = None
    if rows.loss_mask is not None or any(text.mask is not None for text in texts):
        parts = [np.zeros(0, np.bool_)]
        for one, (begin, end) in zip(texts, pairwise(rows.topk.bounds.tolist()), strict=True):
            mask = np.ones(len(one.ids), np.bool_) if one.mask is None else one.mask
            if rows.loss_mask is not None and end > begin:
                mask = _narrowed(translator.aligner, one, mask, rows.loss_mask[begin:end])
            parts.append(mask)
        masks = np.concatenate(parts)
    return rows._replace(topk=topk, loss_mask=masks)


def _texts_of(translator: Translator, rows: Documents) -> list[SharedText]:
    """Return each row's text in the student's tokens."""
    topk, texts, chats = rows.topk, rows.values("text"), _chats(rows)
    student_texts: list[Any] = _student_texts(rows)
    ids = [topk.token_ids[a:b] for a, b in pairwise(topk.bounds.tolist())]
    spans = {
        i: _text_in(translator, ids[i], text, rows.places[i])
        for i, text in enumerate(texts)
        if chats[i] is None and text is not None
    }
    by_text = {i: span for i, span in spans.items() if span is not None}
    for i, text in enumerate(student_texts):
        if text is not None and i not in by_text:
            what = "messages, too" if chats[i] is not None else "control tokens in its text"
            raise cache_error(
                rows.places[i], f"it has student_text, and {what}", "leave out student_text"
            )
    by_ids = [i for i, chat in enumerate(chats) if chat is None and i not in by_text]
    ours: list[str] = [texts[i] if student_texts[i] is None else student_texts[i] for i in by_text]
    encoded = translator.student.encode_batch(ours)
    shared = dict(zip(by_ids, translator.of_teacher([ids[i] for i in by_ids]), strict=True))
    for (i, span), text, student_ids in zip(by_text.items(), ours, encoded, strict=True):
        before = len(texts[i].encode()) - len(text.encode())
        shared[i] = _of_text(translator.pair, ids[i], student_ids, span, before)
    for i, chat in enumerate(chats):
        if chat is not None:
            shared[i] = _of_chat(translator, ids[i], chat)
    return [shared[i] for i in range(len(ids))]


def _text_in(
    translator: Translator, ids: NDArray[np.int32], text: str, place: object
) -> slice | None:
    """Return which ids are the text, control tokens around it aside.

    None if it has control tokens, by their names: then the ids tell more than the text.

    Raises:
        XtokError: if the ids do not spell the text, and the teacher's library gives others.
    """
    spelled_as, is_control = translator.teacher_spelled, translator.is_control[ids]
    data, spelled = text.encode(), [spelled_as[i] for i in ids.tolist()]
    ends, whole = offsets_of([*map(len, spelled)]), b"".join(spelled)
    of_text = np.flatnonzero(~is_control)  # without the control tokens around them
    inner = slice(int(of_text[0]), int(of_text[-1]) + 1) if len(of_text) else slice(len(ids), 0)
    for begin, start in enumerate(ends[: inner.start + 1].tolist()):
        for space in (0, 1):  # some libraries put one before a text
            stop = start + space + len(data)
            if whole[start:stop] == b" " * space + data:
                end = int(np.searchsorted(ends, stop))
                if ends[end] == stop and end >= inner.stop:
                    has_control = is_control[begin:end].any()
                    return None if has_control else slice(begin, end)
    [encoded] = translator.teacher.encode_batch([text])  # by a library that changes the text
    for begin in range(inner.start + 1):
        span = slice(begin, begin + len(encoded))
        if ids[span].tolist() == encoded and is_control[span.stop :].all():
            return span
    text_of_ids = b"".join(spelled[inner])
    both = enumerate(zip(text_of_ids, data, strict=False))
    differs = next((i for i, (a, b) in both if a != b), min(len(text_of_ids), len(data)))
    raise cache_error(
        place,
        f"its ids do not spell its text: they differ from byte {differs} on",
        f"give the teacher that made these ids, or {_OTHER_TEXT_HINT}",
    )


def _of_text(
    pair: Pair, ids: NDArray[np.int32], student_ids: Sequence[int], span: slice, before: int
) -> SharedText:
    """Put the counterparts of the control tokens around a text around the student's ids.

    Where only the teacher reads its first bytes, or one side's library puts a space before the
    text, both go on from the first byte of the text at which tokens of both begin.
    """
    roles = pair.reversed.equal_roles
    begin, end = (
        [roles[i] for i in part.tolist() if i in roles]
        for part in (ids[: span.start], ids[span.stop :])
    )
    bos = pair.tables[0].roles.get("bos", ())  # once, however often the teacher has read it
    begin = [i for n, i in enumerate(begin) if i not in bos or i not in begin[:n]]
    ours = np.array([*begin, *student_ids, *end], np.int32)
    student, teacher = (
        [table[i] for i in part]
        for table, part in zip(pair.tables, (student_ids, ids[span].tolist()), strict=True)
    )
    own, other = b"".join(student), b"".join(teacher)
    if not before and own not in (b" " + other, other[1:] * (other[:1] == b" ")):
        return SharedText.of(ours, ids)
    our_bounds, their_bounds = (offsets_of([*map(len, tokens)]) for tokens in (student, teacher))
    more = len(other) - len(own)  # on the teacher's side
    if not other.endswith(own.removeprefix(b" ")) and not own.endswith(other):
        more = before  # a library changes the text
    starts = our_bounds if other.endswith(own) else our_bounds[our_bounds > 0]
    shared = np.intersect1d(starts, their_bounds - more)
    if not len(shared):
        return SharedText.of(ours, ids, [(slice(0, len(begin)), slice(0, span.start))])
    first = len(begin) + int(np.searchsorted(our_bounds, shared[0]))
    their_first = span.start + int(np.searchsorted(their_bounds, shared[0] + more))
    around = slice(0, len(begin)), slice(0, span.start)
    return SharedText.of(
        ours, ids, [around, (slice(first, len(ours)), slice(their_first, len(ids)))]
    )


def _of_chat(translator: Translator, ids: NDArray[np.int32], sides: Sides) -> SharedText:
    """Render a conversation on both sides; the teacher's ids may be cut off."""
    ours, theirs = _rendered(sides, translator.pair, translator.templates)
    if not np.array_equal(ids, theirs.ids[: len(ids)]):
        hints = [f"give the teacher that made these ids, or {_OTHER_TEXT_HINT}", *_on_date(theirs)]
        raise cache_error(
            sides[1].chat.place,
            "its ids are not those of its messages by the teacher's template",
            "; ".join(hints),
        )
    theirs = replace(
        theirs,
        ids=ids,
        bounds=theirs.bounds[: len(ids) + 1],
        assistant_mask=theirs.assistant_mask[: len(ids)],
    )
    spans = written_alike(ours, theirs, translator.pair.equal_roles)
    return SharedText.of(ours.ids, ids, spans, ours.assistant_mask)


def _narrowed(
    aligner: TokenAligner, one: SharedText, mask: NDArray[np.bool_], of_teacher: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return a mask without the tokens that begin where the teacher's mask leaves one out.

    In a conversation, what only the student's template writes goes with the words before it in its
    turn, or with the first ones.
    """
    if one.mask is None:
        return of_teacher[_places_in(aligner, one.teacher_ids, one.ids)]
    mask, (is_target, is_known) = mask.copy(), np.zeros((2, len(mask)), np.bool_)
    for ours, theirs in one.spans:
        places = _places_in(aligner, one.teacher_ids[theirs], one.ids[ours])
        is_target[ours], is_known[ours] = of_teacher[theirs][places], True
    turns = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    for start, stop in turns.tolist():
        known = start + np.flatnonzero(is_known[start:stop])
        if len(known):
            before = np.searchsorted(known, np.arange(start, stop), side="right") - 1
            mask[start:stop] = is_target[known[before.clip(0)]]
    return mask


def _places_in(
    aligner: TokenAligner, teacher_ids: NDArray[np.int32], student_ids: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return in which of the teacher's tokens each of the student's begins.

    Bytes are counted from the last chunk that both sides spell alike: a library may put a space
    before a text, or change it. A control token that the teacher lacks begins where the next token
    does.
    """
    if not len(student_ids):
        return np.zeros(0, np.int64)
    alignment = aligner.align_document(student_ids, teacher_ids)
    bounds, firsts = [], []
    for side, ids, chunk in (
        (aligner.student, student_ids, alignment.student_chunk_id),
        (aligner.teacher, teacher_ids, alignment.teacher_chunk_id),
    ):
        bounds.append(offsets_of(np.diff(side.offsets)[ids]))
        within = np.flatnonzero(chunk >= 0)
        _, of_chunk = np.unique(chunk[within], return_index=True)
        first = within[of_chunk][alignment.is_correct]
        firsts.append(bounds[-1][first if len(first) else [0]])
    (ours, theirs), (our_firsts, their_firsts) = bounds, firsts
    has_bytes = np.diff(ours) > 0
    last = (np.searchsorted(our_firsts, ours[:-1], side="right") - 1).clip(0)
    at = ours[:-1] + (their_firsts - our_firsts)[last]
    at = np.minimum(at, np.append(their_firsts[1:], theirs[-1])[last] - has_bytes).clip(0)
    of_text = (np.searchsorted(theirs[:-1], at, side="right") - 1).clip(0)
    of_control = np.searchsorted(theirs[:-1], at, side="left").clip(max=len(teacher_ids) - 1)
    places: NDArray[np.int64] = np.where(has_bytes, of_text, of_control)
    return places


def notes_on(rows: Documents, pair: Pair, templates: Templates) -> Iterator[str]:
    """Say what to know of rows before all are projected; they are checked, and of the teacher.

    That is texts without the BOS token that the teacher's library begins them with, and what
    `render` says of the first conversations, the teacher's ends of turns aside.
    """
    teacher, topk = pair.tokenizers[1], rows.topk
    firsts = topk.token_ids[firsts_of(topk.bounds)]
    without = int((firsts != teacher.bos_id).sum())
    if teacher.bos_id is not None and without:
        name = teacher.special_token_names["bos_token"]
        yield (
            f"{without:,} of the first {len(firsts):,} rows do not begin with {name} (id "
            f"{teacher.bos_id}), as texts do by {pair.teacher.model_id}'s library: many models "
            "predict badly without it"
        )
    starts = firsts_of(topk.bounds)
    second = topk.token_ids[(starts + 1).clip(max=len(topk.token_ids) - 1)]
    if twice := int(((firsts == teacher.bos_id) & (second == teacher.bos_id)).sum()):
        yield (
            f"{twice:,} of the first {len(firsts):,} rows begin with the bos token twice: send the "
            "teacher texts without it, or ids with it once"
        )
    chats = islice(filter(None, _chats(rows)), _MOST_CHATS)
    rendered = (_rendered(sides, pair, templates) for sides in chats)
    notes = ([*ours.notes, *_on_date(theirs)] for ours, theirs in rendered)
    yield from dict.fromkeys(chain.from_iterable(notes))


Sides = tuple[SideChat, SideChat]
"""A conversation as the student reads it, and as the teacher did."""


def _student_texts(rows: Documents) -> list[str | None]:
    """Return what the student reads of each row's text, None for all of it."""
    given = rows.values("student_text")
    for place, own, text in zip(rows.places, given, rows.values("text"), strict=True):
        if own is not None and (text is None or not text.endswith(own)):
            at = "there is no text" if text is None else _differs_at(own.encode(), text.encode())
            raise cache_error(
                place,
                f"its text does not end with its student_text: {at}",
                "give the end of the text that the teacher has read",
            )
    return given


def _differs_at(own: bytes, whole: bytes) -> str:
    """Say which byte of a text is the last that is not at the end of another."""
    pairs = enumerate(zip(own[::-1], whole[::-1], strict=False))
    last = len(own) - 1 - next((i for i, (a, b) in pairs if a != b), min(len(own), len(whole)))
    return f"byte {last} of that differs"


def _chats(rows: Documents) -> list[Sides | None]:
    """Return the rows' conversations, None for those without."""
    names = "messages", "tools", "documents", "system", "chat_template_kwargs"
    columns = zip(*map(rows.values, names), strict=True)
    chats: list[Sides | None] = []
    for place, fields, own in zip(
        rows.places, columns, rows.values("student_messages"), strict=True
    ):
        if fields[0] is None:
            if own is not None:
                problem = "it has student_messages, and no messages that the teacher has read"
                raise cache_error(place, problem, "give messages, or leave out student_messages")
            chats.append(None)
            continue
        chat = chat_record(without_nulls(dict(zip(names, fields, strict=True))), place)
        student, teacher = chat, SideChat(chat)
        if own is not None:
            student = substituted(chat, without_nulls(own), "student_messages")
            teacher = teacher_differs(student, chat, ("student_messages", "messages"))
        chats.append((SideChat(student), teacher))
    return chats


def _rendered(sides: Sides, pair: Pair, templates: Templates) -> list[Conversation]:
    """Render a conversation on both sides."""
    try:
        return [
            side.render(
                tokenizer,
                template,
                add_generation_prompt=plain_messages(side.chat.messages)[-1]["role"] != "assistant",
            )
            for side, tokenizer, template in zip(sides, pair.tokenizers, templates, strict=True)
        ]
    except XtokError as error:
        error.at(sides[1].chat.place)
        raise


def _on_date(chat: Conversation) -> list[str]:
    return [note for note in chat.notes if note != NO_END_OF_TURN]
