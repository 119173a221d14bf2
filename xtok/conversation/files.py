"""Read conversations from JSON, JSON Lines and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xtok._lib.parsing import parse_json_field
from xtok._lib.rows import read_rows
from xtok._lib.shards import Shard, format_of
from xtok.conversation.leaves import METADATA_KEYS, unread_note
from xtok.conversation.rendering import Conversation, Renderer
from xtok.conversation.templates import is_missing
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import listed

ROW_HINT = 'give a text, {"text": "…"}, {"messages": […]} or a list of messages'
_HINT = 'write a conversation as [{"role": "user", "content": "…"}, …], '
_HINT += 'or {"messages": […], "tools": […]}'


class ChatRecord(NamedTuple):
    """A conversation from a file, together with the other arguments of `conversation.render`."""

    location: object  # file and line, or file and row, for errors
    messages: list[Any]  # not empty, not validated
    tools: list[Any]
    variables: dict[str, Any]
    notes: tuple[str, ...] = ()  # notes about ignored keys
    teacher_messages: Any = None  # fields for the teacher; see `teacher_side`
    # For a teacher's conversation: index of each shared answer → index of this answer in the
    # student's conversation. None for a student's conversation.
    answers: Mapping[int, int] | None = None

    def render(
        self,
        tokenizer: Tokenizer,
        template: str | Path | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Conversation:
        """Render the conversation with `conversation.render`, and include the record's notes.

        In a teacher's conversation, the runs of answers contain the student's message indices.
        """
        renderer = Renderer(tokenizer, template, self.variables, self.tools, add_generation_prompt)
        conversation = renderer.conversation(self.messages)
        conversation = replace(conversation, notes=(*self.notes, *conversation.notes))
        return conversation if self.answers is None else conversation.renumber(self.answers)


def read_conversations(path: Path) -> Iterator[ChatRecord]:
    """Yield the conversations of a file.

    A conversation is a list of messages, or an object with `messages` and optionally `tools`,
    `documents`, `system` (a string) and `chat_template_kwargs`. The file is JSON (one conversation
    or an array of conversations), JSON Lines, or Parquet with the object's keys as columns. A file
    without the suffix `.jsonl`, `.ndjson` or `.parquet` can be JSON or JSON Lines. The first
    conversation is read before the function returns.

    Raises:
        XtokError: if the file cannot be read or contains no conversation, or if a row is invalid.
    """
    kind = format_of(path)
    kind = "json" if kind == "text" else kind
    columns = (*_FIELDS, "teacher_messages")
    rows = read_rows(Shard(path, kind), hint=_HINT, columns=columns)
    records = (chat_record(row.value, row.location) for row in rows)
    if (first := next(records, None)) is None:
        raise _error(str(path), "the file contains no conversation")
    return chain([first], records)


def read_row(row: Any, location: object) -> str | ChatRecord:
    """Return the text or the conversation in a row. Null and NaN are treated as missing."""
    fields = row if isinstance(row, Mapping) else {}
    text = row if isinstance(row, str) else fields.get("text")
    if isinstance(text, str):
        return text
    if not is_missing(text):
        problem = f"the field 'text' is {type(text).__name__}, not a string"
    elif not isinstance(row, Mapping | Sequence):
        problem = f"{type(row).__name__} is neither a text nor a conversation"
    elif fields and is_missing(fields.get("messages")):
        keys = [key for key, value in fields.items() if not is_missing(value)]
        problem = f"the row has no text and no messages, only: {listed(keys, 8) or 'nothing'}"
    else:
        arrays = {k: list(v) if isinstance(v, np.ndarray) else v for k, v in fields.items()}
        return chat_record(arrays or list(row), location)
    raise XtokError(f"{location}: {problem}", hint=ROW_HINT)


_FIELDS = {
    "messages": list, "tools": list, "documents": list, "system": str, "chat_template_kwargs": dict,
}  # fmt: skip
_TYPE_NAMES = {list: "a list", dict: "an object", str: "a text"}


def chat_record(value: Any, location: object) -> ChatRecord:
    """Parse a conversation with the fields in `read_conversations`."""
    fields = value if isinstance(value, dict) else {"messages": value}
    if "messages" not in fields:
        raise _error(location, f"the row has no messages, only: {listed(fields, 8) or 'nothing'}")
    messages, tools, documents, system, variables = (
        _read_field(fields, name, location) for name in _FIELDS
    )
    if not messages:
        raise _error(location, "the list of messages is empty")
    if system.strip():
        messages = [{"role": "system", "content": system}, *messages]
    if documents and "documents" in variables:
        raise _error(location, "'documents' is given twice: as a field and in chat_template_kwargs")
    if documents:
        variables = {**variables, "documents": documents}
    return ChatRecord(
        location=location,
        messages=messages,
        tools=tools,
        variables=variables,
        notes=unread_notes(fields, (*_FIELDS, "teacher_messages"), "conversations"),
        teacher_messages=fields.get("teacher_messages"),
    )


def _read_field(fields: Mapping[str, Any], name: str, location: object) -> Any:
    kind, value = _FIELDS[name], fields.get(name)
    if isinstance(value, str) and kind is not str:  # many datasets store JSON as strings
        value = parse_json_field(value, f"{location}: the value of {name!r}", _HINT)
    if is_missing(value):
        return kind()
    if not isinstance(value, kind):
        raise _error(location, f"the value of {name!r} is not {_TYPE_NAMES[kind]}")
    return value


def unread_notes(fields: Mapping[str, Any], known: Iterable[str], owner: str) -> tuple[str, ...]:
    """Return a note for each ignored field of a row."""
    known = {*known, *METADATA_KEYS}
    unread = (k for k, value in fields.items() if k not in known and not is_missing(value))
    return tuple(unread_note(key, owner) for key in unread)


def _error(location: object, problem: str) -> XtokError:
    return XtokError(f"{location}: {problem}", hint=_HINT)
