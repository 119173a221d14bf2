"""Create the teacher's version of a row, which can have a different prompt.

The student and the teacher have the same answers. In a teacher's rendering, the runs of each answer
have the student's message index, so alignment pairs only the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xtok._lib.parsing import json_problem, parse_json
from xtok._lib.ragged import num_common
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.leaves import answer_indices, is_spoken
from xtok.conversation.templates import Message, is_missing, message_dicts
from xtok.errors import XtokError, at_location

TEACHER_FIELDS = ("teacher_context", "teacher_messages")
"""Fields for the teacher: the first in rows with `text`, the second in rows with `messages`."""
_SAME_HINT = "use the same answers in the same order on both sides; other messages may differ"
_HINT = "use {}, or a list with one item per teacher; null uses the student's value"
_VALUE_NAMES = {"teacher_messages": "messages", "teacher_context": "a text"}


class SideText(NamedTuple):
    """The text of the student or a teacher, and an optional context before the text."""

    text: str
    context: str = ""


def teacher_values(value: Any, num_teachers: int | None, name: str, location: object) -> list[Any]:
    """Return one value of a field for each teacher. None means the student's value.

    A single value applies to all teachers. If `num_teachers` is None, the number of teachers is the
    number of values in the field.
    """
    is_text = name == "teacher_context"
    value = value if is_text else _parse_value(value, name, location)
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and (is_text or any(map(_is_conversation, value))):
        values = list(value)
    else:
        values = [value] * (1 if num_teachers is None else num_teachers)
    if num_teachers == 0:
        return []
    if num_teachers not in (None, len(values)):
        problem = f"{name} has {len(values)} values, expected {num_teachers}, one per teacher"
        raise _error(location, name, problem)
    if is_text and not all(isinstance(item, str | None) for item in values):
        raise _error(location, name, f"{name} is not a text")
    return values


def _parse_value(value: Any, name: str, location: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_json(value)
    except json.JSONDecodeError:  # the value is plain text
        return value
    except ValueError as error:
        raise _error(location, name, f"{name}: {json_problem(error)}") from error
    return parsed if isinstance(parsed, list | dict) else value


def _is_conversation(value: Any) -> bool:
    is_record = isinstance(value, Mapping) and "messages" in value
    return value is None or isinstance(value, str | list | tuple) or is_record


def teacher_chats(chat: ChatRecord, num_teachers: int | None) -> list[ChatRecord]:
    """Return the conversation of each teacher; see `teacher_values` for `num_teachers`."""
    values = teacher_values(chat.teacher_messages, num_teachers, "teacher_messages", chat.location)
    return [chat if value is None else teacher_chat(chat, value) for value in values]


def teacher_chat(chat: ChatRecord, messages: Any, name: str = "teacher_messages") -> ChatRecord:
    """Return the teacher's conversation: the row with other messages, from the field `name`."""
    return match_answers(chat, replace_messages(chat, messages, name), ("messages", name))


def replace_messages(chat: ChatRecord, messages: Any, name: str) -> ChatRecord:
    """Return the row with the messages of the field `name`.

    `messages` can be an object that also replaces `tools`, `documents` and `chat_template_kwargs`.
    """
    fields = messages if isinstance(messages, Mapping) else {"messages": messages}
    variables = {key: value for key, value in chat.variables.items() if key not in fields}
    inherited = {"tools": chat.tools, "chat_template_kwargs": variables}
    return chat_record(inherited | dict(fields), f"{chat.location}: {name}")


def match_answers(student: ChatRecord, teacher: ChatRecord, names: tuple[str, str]) -> ChatRecord:
    """Pair the student's answers with the teacher's last answers, which must be the same.

    The teacher's other answers are not targets.
    """
    inputs = [(record.messages, record.tools, record.variables) for record in (student, teacher)]
    if inputs[0] == inputs[1]:
        return teacher
    turns = _message_dicts(teacher)
    answers = dict(_pair_answers(_message_dicts(student), turns, student.location, names))
    messages = [
        message | {"weight": 0} if message["role"] == "assistant" and i not in answers else message
        for i, message in enumerate(turns)
    ]
    return teacher._replace(messages=messages, answers=answers)


def _message_dicts(record: ChatRecord) -> list[dict[str, Any]]:
    with at_location(record.location):
        return message_dicts(record.messages)


def _pair_answers(
    student: Sequence[Message], teacher: Sequence[Message], location: object, names: tuple[str, str]
) -> Iterator[tuple[int, int]]:
    indices = [answer_indices(messages) for messages in (student, teacher)]
    num_student, num_teacher = map(len, indices)
    if num_student > num_teacher:
        problem = (
            f"{names[0]} contains {num_student} answers, but {names[1]} contains {num_teacher}"
        )
        raise XtokError(f"{location}: {problem}", hint=_SAME_HINT)
    for i, j in zip(indices[0], indices[1][num_teacher - num_student :], strict=True):
        answers = student[i], teacher[j]
        for key in dict.fromkeys(key for message in answers for key in message):
            texts = [_answer_bytes(message.get(key)) for message in answers]
            if is_spoken(key) and texts[0] != texts[1]:
                raise XtokError(
                    f"{location}: the {key} of message {i} in {names[0]} differs from message {j} "
                    f"in {names[1]} at byte {num_common(*texts)}, expected equal answers",
                    hint=_SAME_HINT,
                )
        yield j, i


def _answer_bytes(value: Any) -> bytes:
    if is_missing(value):
        return b""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and "text" in part for part in value
    ):
        value = "".join(part["text"] for part in value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "surrogatepass")


def drop_answer(messages: Any) -> ChatRecord:
    """Remove the last message of a conversation if this message is an answer."""
    chat = chat_record(messages, "the teacher's prompt")
    turns = _message_dicts(chat)
    end = len(turns) - (turns[-1]["role"] == "assistant")
    return chat._replace(messages=turns[:end])


def _error(location: object, name: str, problem: str) -> XtokError:
    return XtokError(f"{location}: {problem}", hint=_HINT.format(_VALUE_NAMES[name]))


def check_fields(fields: Mapping[str, Any], location: object, main: str) -> None:
    """Raise an error if a row has a teacher's field that has no effect together with `main`."""
    own = {"text": "teacher_context", "messages": "teacher_messages"}.get(main)
    for name in TEACHER_FIELDS:
        if name != own and not is_missing(fields.get(name)):
            raise XtokError(
                f"{location}: {name} has no effect together with {main}",
                hint=f"use {own} instead" if own else "include the teacher's context in its ids",
            )
