"""Files of conversations: JSON, JSON lines and Parquet, plain or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xtok._lib.lines import LinePlace, decode, json_lines, no_json, too_long
from xtok._lib.opening import decompressed, parquet_file, reading
from xtok._lib.shards import Shard
from xtok.conversation.leaves import ASIDE, unread_note
from xtok.conversation.rendering import Conversation, render
from xtok.conversation.templates import is_missing
from xtok.errors import XtokError
from xtok.tokenizers.display import listed

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

MAX_BYTES = 1 << 30
"""A longer line, or file of JSON that is not of lines, is an error."""

_HINT = 'write a conversation as [{"role": "user", "content": "…"}, …], '
_HINT += 'or {"messages": […], "tools": […]}'


class ChatRecord(NamedTuple):
    """A conversation of a file, as `conversation.render` takes it."""

    place: object  # the file, and the line or row of it, as errors name them
    messages: list[Any]  # at least one; not checked
    tools: list[Any]
    variables: dict[str, Any]
    notes: tuple[str, ...] = ()  # on keys of it that nobody reads
    teacher_messages: Any = None  # the same as teachers read it; see `teacher_side`

    def render(
        self,
        tokenizer: Tokenizer,
        template: str | Path | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Conversation:
        """Render it, as `conversation.render` does, with its own notes before the others.

        Raises:
            XtokError: as `conversation.render` does.
        """
        shown = render(
            tokenizer,
            self.messages,
            tools=self.tools,
            add_generation_prompt=add_generation_prompt,
            template=template,
            variables=self.variables,
        )
        return replace(shown, notes=(*self.notes, *shown.notes))


def read_conversations(path: Path) -> Iterator[ChatRecord]:
    """Read the conversations of a file one after another, the first one at once.

    A conversation is a list of messages, or an object with `messages`, and `tools`, `documents`, a
    `system` text and `chat_template_kwargs` if there are any. A file is Parquet with columns of
    these names; JSON lines with one on each line; or JSON, one conversation or a list of them. The
    content decides between JSON and JSON lines, except that .jsonl and .ndjson are always lines.

    Raises:
        XtokError: if the file cannot be read or has no conversation, and for what is none, with the
            line or the row.
    """
    records = _records(path)
    if (first := next(records, None)) is None:
        raise _error(str(path), "it has no conversations")
    return chain([first], records)


def _records(path: Path) -> Iterator[ChatRecord]:
    with reading(path):
        if path.suffix.lower() == ".parquet":
            yield from _parquet_rows(path)
            return
        if not {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
            with path.open("rb") as raw:
                data = decompressed(raw, path).read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise too_long(path, MAX_BYTES)
            if data.strip():
                document, is_all = _parsed(data, path)
                if is_all:
                    yield from _of_document(document, path)
                    return
        for line in json_lines(Shard(path, "jsonl"), max_bytes=MAX_BYTES, hint=_HINT):
            yield chat_record(line.value, line.place)


def _parsed(data: bytes, path: Path) -> tuple[Any, bool]:
    """Return the first JSON value of a file, and whether nothing follows."""
    text = decode(LinePlace(path, 0), data)
    try:
        value, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError) as error:
        raise _error(f"{path}, line {getattr(error, 'lineno', 1)}", no_json(error)) from error
    return value, not text[end:].strip()


def _of_document(value: Any, path: Path) -> Iterator[ChatRecord]:
    """Return the conversations of a JSON document: itself, or a list of them."""
    if isinstance(value, list) and any(
        isinstance(one, list) or (isinstance(one, dict) and "messages" in one) for one in value
    ):
        for i, one in enumerate(value):
            yield chat_record(one, f"{path}, conversation {i}")
    else:
        yield chat_record(value, str(path))


def _parquet_rows(path: Path) -> Iterator[ChatRecord]:
    file = parquet_file(path)
    names = file.schema_arrow.names
    if "messages" not in names:
        raise _error(str(path), f"there is no column 'messages', but: {listed(names, 8)}")
    read = {*_FIELDS, "teacher_messages"}
    unread = dict.fromkeys((name for name in names if name not in read), True)
    columns = [name for name in names if name in read]
    batches = file.iter_batches(columns=columns, batch_size=256, use_threads=False)
    rows = (row for batch in batches for row in batch.to_pylist())
    for i, row in enumerate(rows):
        yield chat_record(unread | without_missing(row), f"{path}, row {i}")


def without_missing(value: Any) -> Any:
    """Drop the fields that Parquet gives a message only because others have them."""
    if isinstance(value, dict):
        return {name: without_missing(item) for name, item in value.items() if item is not None}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


_FIELDS = {
    "messages": list,
    "tools": list,
    "documents": list,
    "system": str,
    "chat_template_kwargs": dict,
}
_KINDS = {list: "a list", dict: "an object", str: "a text"}


def chat_record(value: Any, place: object) -> ChatRecord:
    """Return what one conversation of a file is; see `read_conversations`.

    Raises:
        XtokError: if it is none, with its place.
    """
    fields = value if isinstance(value, dict) else {"messages": value}
    if "messages" not in fields:
        raise _error(place, f"no messages, but: {listed(fields, 8) or 'nothing'}")
    parts: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        parts[name] = kind() if is_missing(fields.get(name)) else fields[name]
        if isinstance(parts[name], str) and kind is not str:  # as data sets have tools
            with suppress(ValueError, RecursionError):
                parts[name] = json.loads(parts[name])
        if not isinstance(parts[name], kind):
            raise _error(place, f"its {name} are not {_KINDS[kind]}")
    messages, variables = parts["messages"], parts["chat_template_kwargs"]
    if not messages:
        raise _error(place, "it has no messages")
    if parts["system"].strip():
        messages = [{"role": "system", "content": parts["system"]}, *messages]
    for name in {"documents"} & variables.keys() if parts["documents"] else ():
        raise _error(place, f"it has {name} twice, once among its chat_template_kwargs")
    if parts["documents"]:
        variables = {**variables, "documents": parts["documents"]}
    return ChatRecord(
        place=place,
        messages=messages,
        tools=parts["tools"],
        variables=variables,
        notes=unread_notes(fields, (*_FIELDS, "teacher_messages"), "conversations"),
        teacher_messages=fields.get("teacher_messages"),
    )


def unread_notes(fields: Mapping[str, Any], read: Iterable[str], what: str) -> tuple[str, ...]:
    """Return notes on the fields of a row that nobody reads."""
    read = {*read, *ASIDE}
    unread = (k for k, value in fields.items() if k not in read and not is_missing(value))
    return tuple(unread_note(key, what) for key in unread)


def _error(place: object, problem: str) -> XtokError:
    return XtokError(f"{place}: {problem}", hint=_HINT)
