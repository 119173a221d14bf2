"""Convert rows of a cache: encode their texts for the student, and project the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import num_common, offsets_of
from xtok.alignment.chats import shared_string_spans
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.rendering import NO_END_OF_TURN, Conversation
from xtok.conversation.teacher_side import match_answers, replace_messages
from xtok.conversation.templates import message_dicts
from xtok.errors import at_location
from xtok.predictions.topk import document_starts
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.teachers.translator import SharedText, Templates, Translator
from xtok.tokenizers.pairs import Pair

_MOST_CHATS = 100  # maximum number of conversations that `notes_on` renders
_WITHOUT_TEXT_HINT = "remove the columns text and messages, so that xtok decodes the ids"


def project_documents(translator: Translator, rows: Documents, top_k: int) -> Documents:
    """Convert checked rows of a teacher to rows of the student.

    The student's template renders `messages`, and the student's library encodes `text`. For the
    student, `student_messages` replaces `messages`, and `student_text` replaces `text`. If a row
    has no messages and no text, its ids are decoded as a conversation or as bytes.
    """
    texts = _shared_texts(translator, rows)
    topk = translator.project(texts, rows.topk, top_k)
    mask = None
    if rows.loss_mask is not None or any(text.mask is not None for text in texts):
        masks = (np.ones(len(t.ids), np.bool_) if t.mask is None else t.mask for t in texts)
        mask = np.concatenate([*masks, np.zeros(0, np.bool_)])
        if rows.loss_mask is not None:
            _narrow(
                mask, topk.bounds, translator.teacher_positions(texts, rows.topk), rows.loss_mask
            )
    return rows._replace(topk=topk, loss_mask=mask)


def _shared_texts(translator: Translator, rows: Documents) -> list[SharedText]:
    ids = [rows.topk.token_ids[a:b] for a, b in pairwise(rows.topk.bounds.tolist())]
    whole, parts = rows.values("text"), rows.values("student_text")
    texts, spans = dict[int, SharedText](), dict[int, slice]()
    columns = zip(rows.locations, _chats(rows), whole, parts, strict=True)
    for i, (location, chat, text, part) in enumerate(columns):
        if part is not None:
            _check_student_text(part, text, location)
        if chat is not None:
            texts[i] = _by_chat(translator, ids[i], chat)
        elif text is not None and (span := _text_in(translator, ids[i], text, location)):
            spans[i] = span
        if part is not None and i not in spans:
            other = "messages" if chat else "control tokens in its text"
            problem = f"student_text is not supported together with {other}"
            raise cache_error(location, problem, "remove student_text")
    student_texts = [whole[i] if parts[i] is None else parts[i] for i in spans]
    encoded = translator.student.encode_batch(student_texts)
    for (i, span), student_ids in zip(spans.items(), encoded, strict=True):
        texts[i] = _by_text(translator.pair, ids[i], student_ids, span, is_end=parts[i] is not None)
    rest = [i for i in range(len(ids)) if i not in texts]
    texts.update(zip(rest, translator.from_teacher_ids([ids[i] for i in rest]), strict=True))
    return [texts[i] for i in range(len(ids))]


def _text_in(
    translator: Translator, ids: NDArray[np.int32], text: str, location: object
) -> slice | None:
    """Return the slice of ids that spell the text, without surrounding control tokens.

    Return None if control tokens are inside the text.
    """
    table, data = translator.teacher.table, text.encode()
    is_control, spelled = table.is_control[ids], [table.named_tokens[i] for i in ids.tolist()]
    ends = offsets_of([*map(len, spelled)])
    indices = np.flatnonzero(~is_control)
    inner = slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(len(ids), 0)
    for start, byte in enumerate(ends[: inner.start + 1].tolist()):
        for expected in (data, b" " + data):  # some libraries add a space before the text
            end = int(np.searchsorted(ends, byte + len(expected)))
            if end >= inner.stop and b"".join(spelled[start:end]) == expected:
                return None if is_control[start:end].any() else slice(start, end)
    [encoded] = translator.teacher.encode_batch([text])  # the library can normalize the text
    for start in range(inner.start + 1):
        span = slice(start, start + len(encoded))
        if ids[span].tolist() == encoded and is_control[span.stop :].all():
            return span
    same = num_common(b"".join(spelled[inner]), data)
    problem = f"its ids do not spell its text; the first difference is at byte {same}"
    hint = f"pass the teacher that made the ids, or {_WITHOUT_TEXT_HINT}"
    raise cache_error(location, problem, hint)


def _by_text(
    pair: Pair, ids: NDArray[np.int32], student_ids: Sequence[int], span: slice, *, is_end: bool
) -> SharedText:
    """Align a text, after adding the teacher's surrounding control tokens to the student's ids.

    If the student reads only the end of the text (`is_end`), the alignment starts at the first byte
    where tokens of both sides start.
    """
    roles = pair.reversed.equal_roles
    before, after = (
        [roles[i] for i in part.tolist() if i in roles]
        for part in (ids[: span.start], ids[span.stop :])
    )
    # Keep only one bos token, even if the teacher's ids contain two.
    bos = pair.tables[0].roles.get("bos", ())
    before = [i for n, i in enumerate(before) if i not in bos or i not in before[:n]]
    student = np.array([*before, *student_ids, *after], np.int32)
    if not is_end:
        return SharedText.of(student, ids)
    student_bounds, teacher_bounds = (
        offsets_of(table.lengths[np.array(part, np.int32)])
        for table, part in zip(pair.tables, (student_ids, ids[span]), strict=True)
    )
    more = teacher_bounds[-1] - student_bounds[-1]
    shared = np.intersect1d(student_bounds, teacher_bounds - more)
    spans = [(slice(0, len(before)), slice(0, span.start))]
    if len(shared):
        first = len(before) + int(np.searchsorted(student_bounds, shared[0]))
        teacher_first = span.start + int(np.searchsorted(teacher_bounds, shared[0] + more))
        spans.append((slice(first, len(student)), slice(teacher_first, len(ids))))
    return SharedText.of(student, ids, spans)


def _by_chat(translator: Translator, ids: NDArray[np.int32], sides: Sides) -> SharedText:
    student, teacher = _render(sides, translator.pair, translator.templates)
    if not np.array_equal(ids, teacher.ids[: len(ids)]):
        hint = f"pass the teacher and the template that made the ids, or {_WITHOUT_TEXT_HINT}"
        problem = "the teacher's template renders the row's messages to different ids"
        raise cache_error(sides[1].location, problem, "; ".join([hint, *_chat_notes(teacher)]))
    spans = shared_string_spans(student, teacher.first(len(ids)), translator.pair.equal_roles)
    return SharedText.of(student.ids, ids, spans, student.assistant_mask)


def _narrow(
    mask: NDArray[np.bool_],
    bounds: NDArray[np.int64],
    positions: NDArray[np.int64],
    is_shared: NDArray[np.bool_],
) -> None:
    """Set the mask to False, in place, for student tokens that the teacher's mask excludes.

    `positions` contains the teacher token in which each student token starts. A student token
    without a teacher token is treated like the preceding token of its turn.
    """
    turns = np.union1d(bounds, np.flatnonzero(np.diff(mask)) + 1)
    for start, end in pairwise(turns.tolist()):
        located = start + np.flatnonzero(positions[start:end] >= 0)
        if len(located) and mask[start]:
            before = np.searchsorted(located, np.arange(start, end), side="right") - 1
            mask[start:end] = is_shared[positions[located[before.clip(0)]]]


def notes_on(rows: Documents, pair: Pair, templates: Templates) -> Iterator[str]:
    """Yield notes about the bos tokens and the rendered conversations of the first rows."""
    teacher, topk = pair.tokenizers[1], rows.topk
    starts = document_starts(topk.bounds)
    firsts = topk.token_ids[starts]
    num_without = int((firsts != teacher.bos_id).sum())
    if teacher.bos_id is not None and num_without:
        name = teacher.special_token_names["bos_token"]
        yield (
            f"{num_without:,} of the first {len(firsts):,} rows do not start with {name} (id "
            f"{teacher.bos_id}), which the library of {pair.teacher.model_id} adds to texts; many "
            "models predict badly without this token"
        )
    second = topk.token_ids[(starts + 1).clip(max=len(topk.token_ids) - 1)]
    if twice := int(((firsts == teacher.bos_id) & (second == teacher.bos_id)).sum()):
        yield (
            f"{twice:,} of the first {len(firsts):,} rows start with the bos token twice; remove "
            "the token from the texts that you send, because the server adds the token"
        )
    chats = islice(filter(None, _chats(rows)), _MOST_CHATS)
    rendered = (_render(sides, pair, templates) for sides in chats)
    notes = ([*student.notes, *_chat_notes(teacher)] for student, teacher in rendered)
    yield from dict.fromkeys(chain.from_iterable(notes))


Sides: TypeAlias = tuple[ChatRecord, ChatRecord]
"""The student's version and the teacher's version of a conversation."""


def _check_student_text(part: str, text: str | None, location: object) -> None:
    if text is not None and text.endswith(part):
        return
    reason = "the row has no text"
    if text is not None:
        own, whole = part.encode()[::-1], text.encode()[::-1]
        reason = f"byte {len(own) - 1 - num_common(own, whole)} of student_text differs"
    problem = f"its student_text is not the end of its text: {reason}"
    raise cache_error(location, problem, "store the end of the teacher's text as student_text")


def _chats(rows: Documents) -> list[Sides | None]:
    names = "messages", "tools", "documents", "system", "chat_template_kwargs"
    columns = map(rows.values, (*names, "student_messages"))
    return [
        _sides(dict(zip(names, fields, strict=True)), own, location)
        for location, *fields, own in zip(rows.locations, *columns, strict=True)
    ]


def _sides(fields: dict[str, Any], own: Any, location: object) -> Sides | None:
    if fields["messages"] is None:
        if own is not None:
            problem = "the row has student_messages, but no messages for the teacher"
            raise cache_error(location, problem, "add messages, or remove student_messages")
        return None
    student = teacher = chat_record(fields, location)
    if own is not None:
        student = replace_messages(teacher, own, "student_messages")
        teacher = match_answers(student, teacher, ("student_messages", "messages"))
    return student, teacher


def _render(sides: Sides, pair: Pair, templates: Templates) -> list[Conversation]:
    chats = []
    with at_location(sides[1].location):
        for chat, tokenizer, template in zip(sides, pair.tokenizers, templates, strict=True):
            asks = message_dicts(chat.messages)[-1]["role"] != "assistant"
            chats.append(chat.render(tokenizer, template, add_generation_prompt=asks))
    return chats


def _chat_notes(chat: Conversation) -> list[str]:
    return [note for note in chat.notes if note != NO_END_OF_TURN]
