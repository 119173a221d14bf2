"""The teacher's version of a row, which can have a different prompt.

Both sides have the same answers. A teacher's rendering numbers them as the student's conversation
does, so alignment compares the answers only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xtok._lib.parsing import json_problem, parse_json
from xtok._lib.ragged import num_common
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.leaves import answers_of, is_spoken
from xtok.conversation.templates import Message, is_missing, message_dicts
from xtok.errors import XtokError, naming_row

TEACHER_FIELDS = ("teacher_context", "teacher_messages")
"""Fields for the teacher in rows with `text` and with `messages`."""
_SAME = "use the same answers in the same order on both sides; the rest may differ"
_HINT = "use {}, or a list with an item per teacher; null stands for the student's"
_WHAT = {"teacher_messages": "messages", "teacher_context": "a text"}


class SideText(NamedTuple):
    """The text of one side, after an optional context."""

    text: str
    context: str = ""


def for_each_teacher(value: Any, num_teachers: int | None, name: str, where: object) -> list[Any]:
    """Return a field's value for each teacher; None stands for the student's text.

    A single value applies to all teachers. By default, their number is the number of values.

    Raises:
        XtokError: if the number of values or a type is wrong; names `where` and `name`.
    """
    is_text = name == "teacher_context"
    value = value if is_text else _parsed(value, name, where)
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and (is_text or any(map(_is_conversation, value))):
        each = list(value)
    else:
        each = [value] * (1 if num_teachers is None else num_teachers)
    if num_teachers == 0:
        return []
    if num_teachers not in (None, len(each)):
        problem = f"{name} has {len(each)} values, expected {num_teachers}, one per teacher"
        raise _error(where, name, problem)
    if is_text and not all(isinstance(item, str | None) for item in each):
        raise _error(where, name, f"{name} is not a text")
    return each


def _parsed(value: Any, name: str, where: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_json(value)
    except json.JSONDecodeError:  # a text
        return value
    except ValueError as error:
        raise _error(where, name, f"its {name}: {json_problem(error)}") from error
    return parsed if isinstance(parsed, list | dict) else value


def _is_conversation(value: Any) -> bool:
    is_record = isinstance(value, Mapping) and "messages" in value
    return value is None or isinstance(value, str | list | tuple) or is_record


def teachers_chats(chat: ChatRecord, num_teachers: int | None) -> list[ChatRecord]:
    """Return the conversation of each teacher; by default, for all teachers of the row."""
    each = for_each_teacher(chat.teacher_messages, num_teachers, "teacher_messages", chat.where)
    return [chat if value is None else teachers_chat(chat, value) for value in each]


def teachers_chat(chat: ChatRecord, messages: Any, name: str = "teacher_messages") -> ChatRecord:
    """Return a teacher's conversation from a field of the row."""
    return teacher_differs(chat, substituted(chat, messages, name), ("messages", name))


def substituted(chat: ChatRecord, messages: Any, name: str) -> ChatRecord:
    """Return the row with other messages; errors name the field `name`.

    `messages` can be an object that replaces `tools`, `documents` and `chat_template_kwargs` too.
    """
    fields = messages if isinstance(messages, Mapping) else {"messages": messages}
    variables = {key: value for key, value in chat.variables.items() if key not in fields}
    inherited = {"tools": chat.tools, "chat_template_kwargs": variables}
    return chat_record(inherited | dict(fields), f"{chat.where}: {name}")


def teacher_differs(student: ChatRecord, teacher: ChatRecord, names: tuple[str, str]) -> ChatRecord:
    """Match the student's answers with the teacher's last answers, and exclude the others.

    Raises:
        XtokError: if answers differ; names the row, the message and the first different byte.
    """
    both = [(record.messages, record.tools, record.variables) for record in (student, teacher)]
    if both[0] == both[1]:
        return teacher
    answered = _message_dicts(teacher)
    numbers = dict(_same_answers(_message_dicts(student), answered, student.where, names))
    messages = [
        message | {"weight": 0} if message["role"] == "assistant" and i not in numbers else message
        for i, message in enumerate(answered)
    ]
    return teacher._replace(messages=messages, answers=numbers)


def _message_dicts(record: ChatRecord) -> list[dict[str, Any]]:
    with naming_row(record.where):
        return message_dicts(record.messages)


def _same_answers(
    ours: Sequence[Message], theirs: Sequence[Message], where: object, names: tuple[str, str]
) -> Iterator[tuple[int, int]]:
    sides = [answers_of(messages) for messages in (ours, theirs)]
    num_ours, num_theirs = map(len, sides)
    if num_ours > num_theirs:
        problem = f"{names[0]} have {num_ours} answers, but {names[1]} have {num_theirs}"
        raise XtokError(f"{where}: {problem}", hint=_SAME)
    for own, other in zip(sides[0], sides[1][num_theirs - num_ours :], strict=True):
        spoken = ours[own], theirs[other]
        for key in dict.fromkeys(key for message in spoken for key in message):
            texts = [_text_of(message.get(key)) for message in spoken]
            if is_spoken(key) and texts[0] != texts[1]:
                raise XtokError(
                    f"{where}: the {key} of message {own} of {names[0]} and of message {other} of "
                    f"{names[1]} differ from byte {num_common(*texts)}, expected equal answers",
                    hint=_SAME,
                )
        yield other, own


def _text_of(value: Any) -> bytes:
    if is_missing(value):
        return b""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and "text" in part for part in value
    ):
        value = "".join(part["text"] for part in value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "surrogatepass")


def prompt_of(messages: Any) -> ChatRecord:
    """Return the conversation without a final answer."""
    chat = chat_record(messages, "the teacher's prompt")
    turns = _message_dicts(chat)
    end = len(turns) - (turns[-1]["role"] == "assistant")
    return chat._replace(messages=turns[:end])


def _error(where: object, name: str, problem: str) -> XtokError:
    return XtokError(f"{where}: {problem}", hint=_HINT.format(_WHAT[name]))


def require_used(fields: Mapping[str, Any], where: object, beside: str) -> None:
    """Check that a row with `beside` (`text`, `messages`, `input_ids`) has no unused field."""
    own = {"text": "teacher_context", "messages": "teacher_messages"}.get(beside)
    for unused in TEACHER_FIELDS:
        if unused != own and not is_missing(fields.get(unused)):
            raise XtokError(
                f"{where}: {unused} is not used together with {beside}",
                hint=f"use {own} instead" if own else "include the teacher's context in its ids",
            )
