"""What the teacher's side of a row reads: what the student reads, or more than that.

Only the answers are on both sides. A rendering for a teacher counts their messages as the student's
conversation does, and all others apart, so whoever aligns two renderings sees the answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xtok._lib.parsing import json_problem, parse_json
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.leaves import is_spoken, is_trained_on
from xtok.conversation.rendering import Conversation
from xtok.conversation.templates import Message, is_missing, plain_messages
from xtok.errors import XtokError

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

TEACHER_FIELDS = ("teacher_context", "teacher_messages")
"""The fields of a row that hold it: beside `text`, and beside `messages`."""
_SAME = "give both sides the same answers, in one order; everything else may differ"
_HINT = "give {}, or a list with one for each teacher, null for one that reads the student's"
_WHAT = {"teacher_messages": "messages", "teacher_context": "a text"}


class SideText(NamedTuple):
    """A text as one side reads it, behind a context that the other does not have."""

    text: str
    context: str = ""


class SideChat(NamedTuple):
    """A conversation as one side reads it."""

    chat: ChatRecord
    # For each answer of both sides: its number in these messages, to that in the student's. None
    # where the student reads the same.
    answers: Mapping[int, int] | None = None

    def render(
        self,
        tokenizer: Tokenizer,
        template: str | Path | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Conversation:
        """Render it, as `conversation.render` does; runs have the student's messages' numbers.

        Raises:
            XtokError: as `conversation.render` does.
        """
        shown = self.chat.render(tokenizer, template, add_generation_prompt=add_generation_prompt)
        return shown if self.answers is None else renumbered(shown, self.answers)


def renumbered(shown: Conversation, numbers: Mapping[int, int]) -> Conversation:
    """Return a rendering in which messages have other numbers; those without one have some < 0."""
    runs = [run._replace(message=numbers.get(run.message, -2 - run.message)) for run in shown.runs]
    return replace(shown, runs=tuple(runs))


def for_each_teacher(value: Any, num_teachers: int | None, name: str, place: object) -> list[Any]:
    """Return what a field of a row gives each teacher to read; None where that is the student's.

    A value that is not a list of one for each is that of all teachers.

    Args:
        value: of the field; messages may be JSON, as data sets have them.
        num_teachers: how many there are; as many as the value has, if None.
        name: of the field.
        place: of the row, for errors.

    Raises:
        XtokError: if there are too few or too many, or the field is something else.
    """
    if isinstance(value, str) and name == "teacher_messages":
        try:
            parsed = parse_json(value)
            value = parsed if isinstance(parsed, list | dict) else value
        except json.JSONDecodeError:
            pass  # plain text
        except ValueError as error:
            raise _error(place, name, f"its {name}: {json_problem(error)}") from error
    value = value.tolist() if hasattr(value, "tolist") else value
    is_each = isinstance(value, list | tuple) and (
        name == "teacher_context" or any(_is_conversation(one) for one in value)
    )
    each = list(value) if is_each else [value] * (1 if num_teachers is None else num_teachers)
    if num_teachers == 0:
        return []
    if num_teachers not in (None, len(each)):
        problem = f"{name} is for {len(each)} teachers, and there are {num_teachers}"
        raise _error(place, name, problem)
    if name == "teacher_context" and not all(isinstance(one, str | None) for one in each):
        raise _error(place, name, f"{name} is no text")
    return each


def _is_conversation(value: Any) -> bool:
    """Whether an item of a list is a whole conversation, or None; not one of its messages."""
    is_record = isinstance(value, Mapping) and "messages" in value
    return value is None or isinstance(value, str | list | tuple) or is_record


def teachers_chats(chat: ChatRecord, num_teachers: int | None) -> list[SideChat]:
    """Return a row's conversation as each teacher reads it; for as many as it has, if None.

    Raises:
        XtokError: if its `teacher_messages` are none, or have other answers than its `messages`.
    """
    given = for_each_teacher(chat.teacher_messages, num_teachers, "teacher_messages", chat.place)
    return [SideChat(chat) if one is None else teachers_chat(chat, one) for one in given]


def teachers_chat(chat: ChatRecord, given: Any, name: str = "teacher_messages") -> SideChat:
    """Return the conversation of a field as a teacher reads it, beside a row's own.

    Raises:
        XtokError: if it is none, or has other answers.
    """
    return teacher_differs(chat, substituted(chat, given, name), ("messages", name))


def substituted(chat: ChatRecord, given: Any, name: str) -> ChatRecord:
    """Return a conversation that one side reads in place of a row's own.

    Args:
        chat: the row's.
        given: messages, or an object with `messages` and maybe `tools`, `documents` and
            `chat_template_kwargs`; what it lacks of these is the row's.
        name: of the field that has it, for errors.

    Raises:
        XtokError: if it is none.
    """
    fields = given if isinstance(given, Mapping) else {"messages": given}
    variables = {key: value for key, value in chat.variables.items() if key not in fields}
    inherited = {"tools": chat.tools, "chat_template_kwargs": variables}
    return chat_record(inherited | dict(fields), f"{chat.place}: {name}")


def teacher_differs(student: ChatRecord, teacher: ChatRecord, names: tuple[str, str]) -> SideChat:
    """Return what the teacher reads of a row of which the student reads another conversation.

    Args:
        student: what the student reads.
        teacher: what the teacher reads. Its last answers must be the student's.
        names: of both fields, for errors.

    Raises:
        XtokError: if answers differ; names the row, the turn, and the first byte that differs.
    """
    both = [(one.messages, one.tools, one.variables) for one in (student, teacher)]
    if both[0] == both[1]:
        return SideChat(teacher)
    plain = _plain(teacher)
    numbers = dict(_same_answers(_plain(student), plain, student.place, names))
    messages = [
        message | {"weight": 0} if message["role"] == "assistant" and i not in numbers else message
        for i, message in enumerate(plain)
    ]
    return SideChat(teacher._replace(messages=messages), numbers)


def _plain(record: ChatRecord) -> list[dict[str, Any]]:
    try:
        return plain_messages(record.messages)
    except XtokError as error:
        error.at(record.place)
        raise


def _same_answers(
    ours: Sequence[Message], theirs: Sequence[Message], place: object, names: tuple[str, str]
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of each answer, the teacher's first; its last ones are the row's."""
    sides = [_answers(messages) for messages in (ours, theirs)]
    num_ours, num_theirs = map(len, sides)
    if num_ours > num_theirs:
        problem = f"{names[0]} have {num_ours} answers, and {names[1]} have {num_theirs}"
        raise XtokError(f"{place}: {problem}", hint=_SAME)
    for own, other in zip(sides[0], sides[1][num_theirs - num_ours :], strict=True):
        spoken = ours[own], theirs[other]
        for key in dict.fromkeys(key for message in spoken for key in message):
            texts = [_text_of(message.get(key)) for message in spoken]
            if is_spoken(key) and texts[0] != texts[1]:
                differs = enumerate(zip(*texts, strict=False))
                byte = next((i for i, (a, b) in differs if a != b), min(map(len, texts)))
                raise XtokError(
                    f"{place}: the {key} of message {own} of {names[0]}, an answer, is not that of "
                    f"message {other} of {names[1]}: they differ from byte {byte} on",
                    hint=_SAME,
                )
        yield other, own


def _answers(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the messages that are answers, and targets."""
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and is_trained_on(message, i)
    ]


def _text_of(value: Any) -> bytes:
    """Return the text of a part of a message, to compare it; b"" for none."""
    if is_missing(value):
        return b""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and "text" in part for part in value
    ):
        value = "".join(part["text"] for part in value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "surrogatepass")


def prompt_of(given: Any) -> SideChat:
    """Return the conversation before an answer: up to its last one, if it ends with that.

    Raises:
        XtokError: if it is none.
    """
    chat = chat_record(given, "the teacher's prompt")
    messages = _plain(chat)
    end = len(messages) - (messages[-1]["role"] == "assistant")
    return SideChat(chat._replace(messages=messages[:end]))


def _error(place: object, name: str, problem: str) -> XtokError:
    return XtokError(f"{place}: {problem}", hint=_HINT.format(_WHAT[name]))


def require_used(fields: Mapping[str, Any], place: object, beside: str) -> None:
    """Raise an error for a field of `TEACHER_FIELDS` that does not belong to what it is beside.

    Args:
        fields: of a row.
        place: of the row, for errors.
        beside: what the row has: `text`, `messages`, or the teacher's `input_ids`.

    Raises:
        XtokError: if one is there.
    """
    own = {"text": "teacher_context", "messages": "teacher_messages"}.get(beside)
    for unused in TEACHER_FIELDS:
        if unused != own and not is_missing(fields.get(unused)):
            raise XtokError(
                f"{place}: it has {unused} beside {beside}, and nothing reads that",
                hint=f"give {own} instead" if own else "give the ids of all that the teacher read",
            )
