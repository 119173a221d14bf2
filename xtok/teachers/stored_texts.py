"""Rows of a cache: their texts in the student's tokens, and the projected predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.chats import written_alike
from xtok.conversation import NO_END_OF_TURN, Conversation
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.teacher_side import substituted, teacher_differs
from xtok.conversation.templates import message_dicts
from xtok.errors import XtokError
from xtok.predictions.topk import firsts_of
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.teachers.translator import SharedText, Templates, Translator
from xtok.tokenizers.pairs import Pair

if TYPE_CHECKING:
    from xtok.alignment.aligner import TokenAligner

_MOST_CHATS = 100  # rendered in advance, for their notes
_WITHOUT_TEXT_HINT = "remove its text and messages, so that the text is decoded from the ids"


def project_documents(translator: Translator, rows: Documents, top_k: int) -> Documents:
    """Convert checked rows of a teacher into rows of the student.

    The student's template renders `messages`, the student's library encodes `text`;
    `student_messages` and `student_text` replace them for a student that reads less. Rows without
    messages and text are decoded from their ids, as conversations or as bytes.

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
    bounds, chats = rows.topk.bounds.tolist(), _chats(rows)
    ids = [rows.topk.token_ids[a:b] for a, b in pairwise(bounds)]
    spans = _text_spans(translator, rows, ids, chats)
    by_ids = [i for i, chat in enumerate(chats) if chat is None and i not in spans]
    shared = dict(zip(by_ids, translator.of_teacher([ids[i] for i in by_ids]), strict=True))
    texts, parts = rows.values("text"), rows.values("student_text")
    student_texts = [texts[i] if parts[i] is None else parts[i] for i in spans]
    encoded = translator.student.encode_batch(student_texts)
    for (i, span), text, student_ids in zip(spans.items(), student_texts, encoded, strict=True):
        before = len(texts[i].encode()) - len(text.encode())
        shared[i] = _of_text(translator.pair, ids[i], student_ids, span, before)
    for i, chat in enumerate(chats):
        if chat is not None:
            shared[i] = _of_chat(translator, ids[i], chat)
    return [shared[i] for i in range(len(ids))]


def _text_spans(
    translator: Translator,
    rows: Documents,
    ids: Sequence[NDArray[np.int32]],
    chats: Sequence[Sides | None],
) -> dict[int, slice]:
    spans = {}
    for i, text in enumerate(rows.values("text")):
        if chats[i] is None and text is not None:
            span = _text_in(translator, ids[i], text, rows.places[i])
            if span is not None:
                spans[i] = span
    for i, part in enumerate(_student_texts(rows)):
        if part is not None and i not in spans:
            other = "messages" if chats[i] is not None else "control tokens in its text"
            problem = f"student_text is not supported together with {other}"
            raise cache_error(rows.places[i], problem, "remove student_text")
    return spans


def _text_in(
    translator: Translator, ids: NDArray[np.int32], text: str, place: object
) -> slice | None:
    """Return the ids of the text, without control tokens around it; None if it contains some.

    Raises:
        XtokError: if the ids do not spell the text, and the teacher's library encodes it otherwise.
    """
    spelled_as, is_control = translator.teacher_spelled, translator.is_control[ids]
    data, spelled = text.encode(), [spelled_as[i] for i in ids.tolist()]
    ends, whole = offsets_of([*map(len, spelled)]), b"".join(spelled)
    of_text = np.flatnonzero(~is_control)
    inner = slice(int(of_text[0]), int(of_text[-1]) + 1) if len(of_text) else slice(len(ids), 0)
    for begin, start in enumerate(ends[: inner.start + 1].tolist()):
        for space in (0, 1):  # some libraries put a space before the text
            stop = start + space + len(data)
            if whole[start:stop] == b" " * space + data:
                end = int(np.searchsorted(ends, stop))
                if ends[end] == stop and end >= inner.stop:
                    has_control = is_control[begin:end].any()
                    return None if has_control else slice(begin, end)
    [encoded] = translator.teacher.encode_batch([text])  # the library may change the text
    for begin in range(inner.start + 1):
        span = slice(begin, begin + len(encoded))
        if ids[span].tolist() == encoded and is_control[span.stop :].all():
            return span
    same = _num_same_bytes(b"".join(spelled[inner]), data)
    raise cache_error(
        place,
        f"its ids do not spell its text: they differ from byte {same} on",
        f"pass the teacher that made these ids, or {_WITHOUT_TEXT_HINT}",
    )


def _num_same_bytes(a: bytes, b: bytes) -> int:
    same = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(same, min(len(a), len(b)))


def _of_text(
    pair: Pair, ids: NDArray[np.int32], student_ids: Sequence[int], span: slice, before: int
) -> SharedText:
    """Align a text, and surround it with the counterparts of the teacher's control tokens.

    If only the teacher reads the first bytes (`before`), or one library puts a space before the
    text, alignment starts at the first byte where tokens of both sides start.
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
    more = len(other) - len(own)  # additional bytes of the teacher
    if not other.endswith(own.removeprefix(b" ")) and not own.endswith(other):
        more = before  # a library changed the text
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
    ours, theirs = _rendered(sides, translator.pair, translator.templates)
    if not np.array_equal(ids, theirs.ids[: len(ids)]):
        hint = f"pass the teacher and the template that made these ids, or {_WITHOUT_TEXT_HINT}"
        problem = "its ids differ from its messages, rendered with the teacher's template"
        raise cache_error(sides[1].place, problem, "; ".join([hint, *_notes_of(theirs)]))
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
    """Remove the student tokens from a mask that start at a token outside the teacher's mask.

    Tokens that only the student's template writes follow the preceding shared token of their turn.
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
    """Return the teacher token at the first byte of each student token.

    Bytes are counted from the last equal chunk, because a library may change the text. A control
    token that the teacher lacks starts where the next token starts.
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
    """Yield notes on the first rows: missing BOS tokens, and notes on rendered conversations."""
    teacher, topk = pair.tokenizers[1], rows.topk
    starts = firsts_of(topk.bounds)
    firsts = topk.token_ids[starts]
    without = int((firsts != teacher.bos_id).sum())
    if teacher.bos_id is not None and without:
        name = teacher.special_token_names["bos_token"]
        yield (
            f"{without:,} of the first {len(firsts):,} rows do not start with {name} (id "
            f"{teacher.bos_id}), which the library of {pair.teacher.model_id} adds to texts; many "
            "models predict badly without it"
        )
    second = topk.token_ids[(starts + 1).clip(max=len(topk.token_ids) - 1)]
    if twice := int(((firsts == teacher.bos_id) & (second == teacher.bos_id)).sum()):
        yield (
            f"{twice:,} of the first {len(firsts):,} rows start with the bos token twice; remove "
            "it from the texts that you send, because the server adds it"
        )
    chats = islice(filter(None, _chats(rows)), _MOST_CHATS)
    rendered = (_rendered(sides, pair, templates) for sides in chats)
    notes = ([*ours.notes, *_notes_of(theirs)] for ours, theirs in rendered)
    yield from dict.fromkeys(chain.from_iterable(notes))


Sides = tuple[ChatRecord, ChatRecord]
"""A conversation in the versions of the student and the teacher."""


def _student_texts(rows: Documents) -> list[str | None]:
    parts = rows.values("student_text")
    for place, part, text in zip(rows.places, parts, rows.values("text"), strict=True):
        if part is not None and (text is None or not text.endswith(part)):
            reason = "the row has no text"
            if text is not None:
                own, whole = part.encode()[::-1], text.encode()[::-1]
                reason = f"byte {len(own) - 1 - _num_same_bytes(own, whole)} differs"
            raise cache_error(
                place,
                f"its student_text is not the end of its text: {reason}",
                "store the end of the teacher's text as student_text",
            )
    return parts


def _chats(rows: Documents) -> list[Sides | None]:
    names = "messages", "tools", "documents", "system", "chat_template_kwargs"
    columns = zip(*map(rows.values, names), strict=True)
    chats: list[Sides | None] = []
    for place, fields, own in zip(
        rows.places, columns, rows.values("student_messages"), strict=True
    ):
        if fields[0] is None:
            if own is not None:
                problem = "it has student_messages, but no messages for the teacher"
                raise cache_error(place, problem, "add messages, or remove student_messages")
            chats.append(None)
            continue
        chat = chat_record(dict(zip(names, fields, strict=True)), place)
        student, teacher = chat, chat
        if own is not None:
            student = substituted(chat, own, "student_messages")
            teacher = teacher_differs(student, chat, ("student_messages", "messages"))
        chats.append((student, teacher))
    return chats


def _rendered(sides: Sides, pair: Pair, templates: Templates) -> list[Conversation]:
    try:
        return [
            side.render(
                tokenizer,
                template,
                add_generation_prompt=message_dicts(side.messages)[-1]["role"] != "assistant",
            )
            for side, tokenizer, template in zip(sides, pair.tokenizers, templates, strict=True)
        ]
    except XtokError as error:
        error.at(sides[1].place)
        raise


def _notes_of(chat: Conversation) -> list[str]:
    return [note for note in chat.notes if note != NO_END_OF_TURN]
