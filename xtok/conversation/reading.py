"""Ids read back as the conversation that a chat template makes them of; proved, never guessed."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parsing import parse_json
from xtok.conversation.formats import PromptFormat
from xtok.conversation.rendering import (
    Conversation,
    RenderOptions,
    encoded,
    find_template,
    render,
    rendered,
)
from xtok.conversation.templates import Rendering
from xtok.errors import XtokError
from xtok.tokenizers.table import byte_offsets

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_CONTROL = 256  # the first symbol that is a control token; those below are bytes
_ANY_CONTROL = re.compile(r"[^\x00-\xff]")
_MOST_STEPS = 10_000
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadBack:
    """A conversation that ids are of, with the arguments that `render` makes these ids of."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    conversation: Conversation  # with the ids that were given, which may be its first ones only

    def render(self, tokenizer: Tokenizer, template: str | Path | None) -> Conversation:
        """Render it by another tokenizer's template; raises as `render` does."""
        return render(
            tokenizer,
            self.messages,
            tools=self.tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            template=template,
        )


class _UnclearError(Exception):
    """An argument of a call may be a string, or the value of its JSON."""


class _Slot(NamedTuple):
    """What the template does not write itself: a string of a message, or JSON of one."""

    role: str
    path: tuple[str, ...]  # within a message; `#` is a place in a list
    is_json: bool = False


_START, _END, _ASKED = (_Slot(name, ()) for name in ("start", "end", "asked"))
_UNREAD = _Slot("unread", (), is_json=True)  # tools in a form of the template's own
_KEY, _VALUE = "?", "="  # of arguments that are written one by one
_NAME = re.compile(r"[\w./:-]+")
_MARKS = re.compile(r"(?P<key>zkey\d)|(?P<tool>ztool\d)")


class _Piece(NamedTuple):
    """What the template writes between two slots."""

    symbols: str
    slot: _Slot  # behind it
    is_next: bool  # whether that begins another message
    is_item: bool  # or another item of a list of the same one


class _ReadSlot(NamedTuple):
    """A slot that is read, and those before."""

    piece: _Piece
    value: Any
    before: _ReadSlot | None


def read_back(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ReadBack | None:
    """Return the conversation that a chat template makes these ids of; None if it is not certain.

    Renderings of other conversations show what the template writes between the words of the roles.
    The ids are cut there, and what comes out is rendered again: only if that gives the same control
    tokens with the same bytes between them is it the answer. How bytes are cut into tokens may
    differ, as it does in what a model samples:

        ids         <s>[user] Hi<end>[assistant] Yes<end>
        template    <s>[user] ..<end>[assistant] ...<end>
        words                 Hi                 Yes

    The last message may be cut off, and the ids may end with what asks for an answer.

    What the template itself adds, such as a system message of its own, is not a message. A system
    message that the template writes into the user's is part of that.

    Args:
        tokenizer: any one.
        ids: of a whole conversation, from its beginning on.
        template: as in `render`.
        variables: what else the template reads. Without `enable_thinking`, False is tried, too.

    Raises:
        XtokError: if there is no template.
    """
    source = find_template(tokenizer, template)
    if isinstance(source, PromptFormat):
        source = source.template
    tries = [dict(variables or {})]
    if "enable_thinking" in source and "enable_thinking" not in tries[0]:
        tries.append({**tries[0], "enable_thinking": False})
    read = np.array(ids, np.int32)
    text = _symbols(tokenizer, read)[0]
    cut_off = None
    for chosen in tries:
        key = json.dumps(chosen, sort_keys=True, default=str), date.today()
        options = RenderOptions(template=template, variables=chosen)
        for last, is_whole in _readings(_pieces(tokenizer, template, *key), text):
            if cut_off is not None and not is_whole:
                continue
            with suppress(_UnclearError):
                proved = _proved(tokenizer, read, text, _conversation_of(last), options, is_whole)
                if proved is not None and is_whole:
                    return proved
                cut_off = cut_off or proved
    return cut_off


# Ids as text in which control tokens are not names


def _symbols(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> tuple[str, NDArray[np.int64]]:
    """Return a character for each byte and each control token, and where each id begins."""
    table = tokenizer.table
    tokens, names = table.tokens(), table.control_names
    parts = [chr(_CONTROL + i) if i in names else tokens[i].decode("latin-1") for i in ids.tolist()]
    return "".join(parts), np.array([0, *accumulate(map(len, parts))])


def _words(symbols: str) -> str | None:
    """Return symbols as text; None if they are none."""
    with suppress(UnicodeError):
        return symbols.encode("latin-1").decode()
    return None


# What a template writes, from renderings of small conversations


def _call(count: int, **more: Any) -> dict[str, Any]:
    """Return an assistant's message with calls; ids as Mistral wants them."""
    function = {"name": "name", "arguments": {"zkey0": "words", "zkey1": "words"}}
    calls = [{"id": f"call0000{n}", "type": "function", "function": function} for n in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _tool(number: int) -> dict[str, Any]:
    about = {"type": "object", "properties": {"key": {"type": "string"}}}
    function = {"name": f"ztool{number}", "description": "words", "parameters": about}
    return {"type": "function", "function": function}


def _conversations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield conversations with tools in which all that is read back follows all that it may."""
    ask, answer = ({"role": role, "content": "words"} for role in ("user", "assistant"))
    think = {**answer, "reasoning_content": "words"}
    first, both = _call(1), _call(2)
    spoken, thought = _call(1, content="words"), _call(1, reasoning_content="words")
    reply = {"role": "tool", "name": "name", "tool_call_id": "call00000", "content": "words"}
    bodies = [
        [ask], [ask, answer], [ask, answer, ask], [ask, answer, ask, answer], [ask, think],
        [ask, think, ask], [ask, think, ask, think], [ask, answer, ask, think],
        [ask, first], [ask, thought], [ask, spoken], [ask, both],
        [ask, first, reply], [ask, both, reply, reply], [ask, spoken, reply], [ask, thought, reply],
        [ask, first, reply, answer], [ask, both, reply, reply, answer],
        [ask, spoken, reply, answer], [ask, thought, reply, think],
        [ask, first, reply, first, reply, answer], [ask, thought, reply, thought, reply, think],
        [ask, first, reply, answer, ask, answer], [ask, answer, ask, first, reply, answer],
    ]  # fmt: skip
    for body in bodies:
        is_short, calls = len(body) < 4, any("tool_calls" in message for message in body)
        for start in ([], [{"role": "system", "content": "words"}])[: 1 + is_short]:
            for count in (0, 1, 2, 3) if body == [ask] else (0, 2) if calls or is_short else (0,):
                yield [*start, *body], [_tool(number) for number in range(count)]


@functools.lru_cache(maxsize=16)
def _pieces(
    tokenizer: Tokenizer, template: str | Path | None, variables: str, day: date
) -> dict[_Slot, list[_Piece]]:
    """Return what a template writes behind each slot, the longest first, on a day."""
    behind: dict[_Slot, dict[_Piece, None]] = {}
    options = RenderOptions(template=template, variables=json.loads(variables))
    [ask], _ = next(_conversations())
    takes_text = False
    with suppress(XtokError):
        takes_text = any("content" in run.path for run in rendered(tokenizer, [ask], options).runs)
    parts = [{"type": "text", "text": "words"}]
    for conversation, tools in _conversations():
        messages = conversation
        if not takes_text:
            messages = [{**message, "content": parts} for message in messages]
        for asks in (False, True) if messages[-1]["role"] in ("user", "tool") else (False,):
            with suppress(XtokError):  # a template may not take tools, or a system message
                chosen = replace(options, tools=tools, add_generation_prompt=asks)
                for slot, piece in _pieces_of_rendering(tokenizer, messages, chosen):
                    behind.setdefault(slot, {})[piece] = None
    return {slot: sorted(found, key=lambda p: -len(p.symbols)) for slot, found in behind.items()}


def _pieces_of_rendering(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: RenderOptions
) -> Iterator[tuple[_Slot, _Piece]]:
    """Yield the pieces of one rendering, and the slots before them."""
    rendering = rendered(tokenizer, messages, options)
    ids, bounds, _ = tokenizer.encode(rendering.text)
    text, begins = _symbols(tokenizer, ids)
    byte_of = byte_offsets(rendering.text)

    def place(char: int) -> int:
        """Return where a character is among the symbols; −1 within a control token."""
        byte = int(byte_of[char])
        i = int(np.searchsorted(bounds, byte, side="right")) - 1
        if byte == bounds[i]:
            return int(begins[i])
        is_text = bounds[i + 1] - bounds[i] <= begins[i + 1] - begins[i]
        return int(begins[i + 1] - (bounds[i + 1] - byte)) if is_text else -1

    before, number, end = _START, 0, 0
    item: tuple[int, ...] = ()
    first = int(messages[0]["role"] == "system")
    end_slot = _ASKED if options.add_generation_prompt else _END
    stretches = sorted(_written(rendering, options.tools or ()))
    for start, stop, message, path, is_json in [*stretches, (len(text), 0, -1, (), False)]:
        is_end = not stop
        role = end_slot.role if is_end else "tools" if message < 0 else messages[message]["role"]
        slot = _Slot(role, tuple("#" if isinstance(x, int) else str(x) for x in path), is_json)
        items = tuple(x for x in path if isinstance(x, int))
        is_apart = role in ("system", "tools") or is_end
        ahead = 0 if is_apart else message - first + 1 - number
        begin = len(text) if is_end else place(start)
        if ahead in (0, 1) and min(end, begin) >= 0:
            symbols = text[end:begin]
            if mark := _MARKS.search(symbols):
                yield before, _Piece(symbols[: mark.start()], _UNREAD, False, False)
            crosses = (ahead or is_end) and not before.is_json
            if before == _START or (symbols and (not crosses or _ANY_CONTROL.search(symbols))):
                yield before, _Piece(symbols, slot, ahead == 1, items != item and not ahead)
        before, item, end = slot, items, -1 if is_end else place(stop)
        number += ahead


def _written(
    rendering: Rendering, tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, int, int, tuple[str | int, ...], bool]]:
    """Yield each slot: its characters, its message (−1 for tools), its path, whether it is JSON."""
    runs = [run for run in rendering.runs if run.path[:1] != ("role",)]
    starts = [run.start for run in runs]
    for run in runs:
        path = _THOUGHTS[:1] if run.path[0] in _THOUGHTS else run.path
        path = (*path[:-1], _VALUE) if path[-2:-1] == ("arguments",) else path
        yield run.start, run.end, run.message, path, run.offset < 0
    for mark in _MARKS.finditer(rendering.text):
        place = bisect_right(starts, mark.start())
        within = place and mark.start() < runs[place - 1].end
        if mark["key"] and not within and runs[place:] and "arguments" in runs[place].path:
            path = (*runs[place].path[:-1], _KEY)
            yield mark.start(), mark.end(), runs[place].message, path, False
    known: list[tuple[Any, tuple[str | int, ...]]] = [(list(tools), ())] if tools else []
    for i, tool in enumerate(tools):
        known += [(tool, (i,)), (tool["function"], (i, "function"))]
    end = 0
    for brace in re.finditer(r"[\[{]", rendering.text if tools else ""):
        with suppress(ValueError):
            value, stop = json.JSONDecoder().raw_decode(rendering.text, brace.start())
            paths = [path for one, path in known if one == value and brace.start() >= end]
            if paths:
                yield brace.start(), stop, -1, paths[0], True
                end = stop


# Ids read by these pieces


def _readings(
    pieces: Mapping[_Slot, Sequence[_Piece]], text: str
) -> Iterator[tuple[_ReadSlot | None, bool]]:
    """Yield the ways to read a text, and whether it is all that the template writes."""
    begins = [piece for piece in pieces.get(_START, ()) if text.startswith(piece.symbols)]
    todo: list[tuple[_Piece, int, _ReadSlot | None]] = [
        (piece, len(piece.symbols), None)
        for piece in reversed(begins)
        if piece.symbols == begins[0].symbols
    ]
    for _ in range(_MOST_STEPS):
        if not todo:
            return
        piece, start, before = todo.pop()
        if piece.slot in (_END, _ASKED):
            if start == len(text):
                yield _ReadSlot(piece, None, before), True
            continue
        control = _ANY_CONTROL.search(text, start)
        limit = control.start() if control else len(text)
        ways = [*_ways_on(text, start, limit, piece.slot, pieces.get(piece.slot, ()))]
        todo += _best_ways(ways, text, piece, before)
        if not ways and not piece.slot.is_json:
            for stop in _cut(text, start, limit, pieces.get(piece.slot, ())):
                yield _ReadSlot(piece, _words(text[start:stop]), before), False


def _best_ways(
    ways: Sequence[tuple[int, _Piece, Any]], text: str, piece: _Piece, before: _ReadSlot | None
) -> Iterator[tuple[_Piece, int, _ReadSlot]]:
    """Yield the ways to go on, the best last: one that ends the text, or the next piece.

    Of several pieces only the longest counts: else, for one, a call of which something is not known
    would be read as an answer.
    """
    best = min(((stop, -len(following.symbols)) for stop, following, _ in ways), default=None)
    ending = []
    for stop, following, value in ways:
        way = following, stop + len(following.symbols), _ReadSlot(piece, value, before)
        if following.slot in (_END, _ASKED):
            ending += [way] if way[1] == len(text) else []
        elif (stop, -len(following.symbols)) == best:
            yield way
    yield from ending


def _ways_on(
    text: str, start: int, limit: int, slot: _Slot, behind: Sequence[_Piece]
) -> Iterator[tuple[int, _Piece, Any]]:
    """Yield where the words of a slot may end, the piece that follows, and the words."""
    for piece in behind:
        if slot.is_json:
            value, stop = _json(text, start, limit)
        else:
            stop = text.find(piece.symbols, start)
            value = _words(text[start:stop]) if 0 <= stop <= limit else None
        if slot.path[-1:] in (("name",), (_KEY,)) and not _NAME.fullmatch(str(value)):
            continue
        if value is not None and text.startswith(piece.symbols, stop):
            yield stop, piece, value


def _cut(text: str, start: int, limit: int, behind: Sequence[_Piece]) -> Iterator[int]:
    """Yield where the words may end of a text that breaks off within what follows them, or before.

    As without the line break behind the end of a turn, which no model writes.
    """
    for piece in behind:
        control = _ANY_CONTROL.search(piece.symbols)
        if control and limit < len(text):
            stop = limit - control.start()
            if stop >= start and piece.symbols.startswith(text[stop:]):
                yield stop
    if limit == len(text) and any(_ANY_CONTROL.search(piece.symbols) for piece in behind):
        yield limit


def _json(text: str, start: int, limit: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, and its end; None if there is none."""
    words = _words(text[start:limit])
    with suppress(ValueError):
        value, stop = json.JSONDecoder().raw_decode(words or "")
        return value, start + len((words or "")[:stop].encode())
    return None, start


def _conversation_of(
    last: _ReadSlot | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Return the messages and tools of a reading, and whether it asks for an answer."""
    steps = []
    while last is not None:
        steps.append(last)
        last = last.before
    system: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for piece, value, _ in reversed(steps):
        role, path, _ = piece.slot
        if role == "tools":
            function = {"type": "function", "function": value}
            tools += value if not path else [function if path[1:] else value]
        elif role == "system":
            system.append({"role": role})
            _put(system[0], path, value, is_item=True)
        elif path:
            if piece.is_next:
                messages.append({"role": role, "content": ""})
            if path[-1] == _VALUE:
                call = messages[-1]["tool_calls"][-1]["function"]
                value = _typed(value, tools, call["name"], [*call["arguments"]][-1])
            _put(messages[-1], path, value, is_item=piece.is_item)
    return system + messages, tools, bool(steps) and steps[0].piece.slot == _ASKED


def _typed(value: str, tools: Sequence[dict[str, Any]], name: str, key: str) -> Any:
    """Return an argument that may be text or JSON as what the tool takes.

    Raises:
        _UnclearError: if it is both, and no tool decides.
    """
    parsed: Any = value
    with suppress(ValueError):
        parsed = parse_json(value)
    for tool in tools:
        with suppress(KeyError, TypeError):
            if tool["function"]["name"] == name:
                kind = tool["function"]["parameters"]["properties"][key]["type"]
                return value if kind == "string" else parsed
    if parsed != value:
        raise _UnclearError
    return value


def _put(message: dict[str, Any], path: Sequence[str], value: Any, *, is_item: bool) -> None:
    """Put a value where a path leads in a message; `#` is the last of a list, or a new one."""
    if len(path) == 1:
        message[path[0]] = value
        return
    name, _, *inner = path
    items = message[name] = message.get(name) or []
    if is_item or not items:
        items.append({"type": "text"} if name == "content" else {"type": "function"})
    place = items[-1]
    for key in inner[:-1]:
        place = place.setdefault(key, {})
    last = inner[-1]
    place[value if last == _KEY else [*place][-1] if last == _VALUE else last] = value


def _proved(
    tokenizer: Tokenizer,
    ids: NDArray[np.int32],
    text: str,
    reading: tuple[list[dict[str, Any]], list[dict[str, Any]], bool],
    options: RenderOptions,
    is_whole: bool,
) -> ReadBack | None:
    """Return a reading if it renders as the ids, or as what begins with them if it is cut off."""
    messages, tools, asks = reading
    options = replace(options, tools=tools or None, add_generation_prompt=asks)
    try:
        chat = encoded(tokenizer, messages, options)
    except XtokError:
        return None
    again, begins = _symbols(tokenizer, chat.ids)
    size = len(ids)
    if not again.startswith(text) or (is_whole and again != text):
        return None
    if not np.array_equal(chat.ids[:size], ids):
        # Other tokens of the same bytes.
        rest = chat.ids[np.searchsorted(begins, len(text)) :]
        every = np.concatenate([ids, rest])
        names, tokens = tokenizer.table.control_names, tokenizer.table.tokens()
        spelled = [names[i].encode() if i in names else tokens[i] for i in every.tolist()]
        if b"".join(spelled) != chat.text.encode():
            return None
        bounds = np.array([0, *accumulate(map(len, spelled))])
        chat = encoded(tokenizer, messages, options, (every, bounds))
    return ReadBack(
        messages=messages,
        tools=tools or None,
        variables=dict(options.variables or {}),
        add_generation_prompt=asks,
        conversation=replace(
            chat,
            ids=chat.ids[:size],
            bounds=chat.bounds[: size + 1],
            assistant_mask=chat.assistant_mask[:size],
        ),
    )
