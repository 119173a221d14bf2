"""Convert ids back to a conversation, and verify the conversation by rendering it again."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parsing import parse_json
from xtok._lib.ragged import offsets_of
from xtok.conversation._tracking import Run
from xtok.conversation.rendering import Conversation, Renderer, Targets
from xtok.conversation.templates import REASONING_KEYS, Rendering
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import byte_offsets

_CONTROL = 256  # first symbol for control tokens; lower symbols are bytes
_ANY_CONTROL = re.compile(r"[^\x00-\xff]")
_MAX_STEPS = 10_000


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadBack:
    """A conversation that was parsed from ids. `render` writes the text of the ids again."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    conversation: Conversation  # contains only the given ids, even if the rendering is longer

    def render(self, tokenizer: Tokenizer, template: str | Path | None) -> Conversation:
        """Render the conversation with another tokenizer, like `conversation.render`."""
        has_prompt = self.add_generation_prompt
        renderer = Renderer(tokenizer, template, self.variables, self.tools, has_prompt)
        return renderer.conversation(self.messages)


class _UnclearError(Exception):
    """Raised if an argument of a call could be a string or JSON."""


class _Slot(NamedTuple):
    """A position between the template's texts that contains one value of the conversation."""

    role: str
    path: tuple[str, ...]  # path of the value in the message; `#` is a list index
    is_json: bool = False


_START, _END, _PROMPT = (_Slot(name, ()) for name in ("start", "end", "prompt"))
_UNREAD = _Slot("unread", (), is_json=True)  # tools in the template's own format
_KEY, _VALUE = "?", "="  # key and value of an argument, if the arguments are not one JSON object
_NAME = re.compile(r"[\w./:-]+")
_MARKS = re.compile(r"(?P<key>zkey\d)|(?P<tool>ztool\d)")


class _Piece(NamedTuple):
    """A text that the template writes, and the slot that follows the text."""

    symbols: str
    slot: _Slot  # slot after the text
    is_next: bool  # whether the slot belongs to the next message
    is_item: bool  # whether the slot belongs to the next list item of the same message


_Steps: TypeAlias = tuple[tuple[_Piece, Any], ...]
"""The pieces of a text, each with the value of the slot after the piece."""


def read_back(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ReadBack | None:
    """Find the conversation that renders to the given ids. Return None if the result is uncertain.

    xtok renders small sample conversations to find the texts that the template writes between
    messages. The ids are split at the texts between messages:

        ids         <s>[user] Hi<end>[assistant] Yes<end>
        template    <s>[user] ..<end>[assistant] ...<end>
        messages              Hi                 Yes

    xtok renders the resulting messages again. The rendering must have the same control tokens and
    bytes as the ids. Other tokens can differ, because a model can write the same text with other
    tokens.

    The last message can be truncated, and the ids can end with a generation prompt. The template's
    default system message is not returned. A system message inside a user message stays part of the
    user message. For `template` and `variables`, see `render`. If `variables` lacks
    `enable_thinking`, xtok also tries the value False.
    """
    return next(readings(tokenizer, ids, template=template, variables=variables), None)


def readings(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Iterator[ReadBack]:
    """Yield the conversations that render to the given ids. Complete conversations come first.

    An empty thought belongs to the answer or, if `enable_thinking` is False, to the generation
    prompt. For each value of `enable_thinking`, there is at most one complete conversation.
    """
    renderer = Renderer(tokenizer, template, variables or {})
    renderers = [renderer]
    if "enable_thinking" in renderer.source() and "enable_thinking" not in renderer.variables:
        variables_without = {**renderer.variables, "enable_thinking": False}
        renderers.append(replace(renderer, variables=variables_without))
    id_array = np.array(ids, np.int32)
    text = _symbols(tokenizer, id_array)[0]
    truncated = []
    for renderer in renderers:
        verify, cut = partial(_verify, renderer, id_array, text), list[_Steps]()
        truncated.append((verify, cut))
        key = json.dumps(renderer.variables, sort_keys=True, default=str), date.today()
        for steps, is_whole in _split(_find_pieces(tokenizer, template, *key), text):
            if not is_whole:
                cut.append(steps)
            elif conversation := verify(steps, is_whole):
                yield conversation
                break
    for verify, cut in truncated:
        yield from islice(filter(None, (verify(steps, is_whole=False) for steps in cut)), 1)


# Convert ids to a string with one character per byte or control token


def _symbols(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> tuple[str, NDArray[np.int64]]:
    """Return the symbols of ids, and the offset of each id in the symbols (`[T + 1]`, int64)."""
    table = tokenizer.table
    tokens, names = table.tokens(), table.control_names
    parts = [chr(_CONTROL + i) if i in names else tokens[i].decode("latin-1") for i in ids.tolist()]
    return "".join(parts), offsets_of([*map(len, parts)])


def _decode_symbols(symbols: str) -> str | None:
    with suppress(UnicodeError):
        return symbols.encode("latin-1").decode()
    return None


# Find the template's texts by rendering small sample conversations


def _call(count: int, **fields: Any) -> dict[str, Any]:
    function = {"name": "name", "arguments": {"zkey0": "words", "zkey1": "words"}}
    calls = [{"id": f"call0000{n}", "type": "function", "function": function} for n in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def _tool(index: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    function = {"name": f"ztool{index}", "description": "words", "parameters": parameters}
    return {"type": "function", "function": function}


def _sample_conversations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    ask, answer = ({"role": role, "content": "words"} for role in ("user", "assistant"))
    thought = {**answer, "reasoning_content": "words"}
    call, two_calls = _call(1), _call(2)
    text_call, thought_call = _call(1, content="words"), _call(1, reasoning_content="words")
    result = {"role": "tool", "name": "name", "tool_call_id": "call00000", "content": "words"}
    samples = [
        [ask], [ask, answer], [ask, answer, ask], [ask, answer, ask, answer], [ask, thought],
        [ask, thought, ask], [ask, thought, ask, thought], [ask, answer, ask, thought],
        [ask, call], [ask, thought_call], [ask, text_call], [ask, two_calls], [ask, call, result],
        [ask, two_calls, result, result], [ask, text_call, result], [ask, thought_call, result],
        [ask, call, result, answer], [ask, two_calls, result, result, answer],
        [ask, text_call, result, answer], [ask, thought_call, result, thought],
        [ask, call, result, call, result, answer],
        [ask, thought_call, result, thought_call, result, thought],
        [ask, call, result, answer, ask, answer], [ask, answer, ask, call, result, answer],
    ]  # fmt: skip
    for sample in samples:
        is_short, calls = len(sample) < 4, any("tool_calls" in message for message in sample)
        for start in ([], [{"role": "system", "content": "words"}])[: 1 + is_short]:
            for count in (0, 1, 2, 3) if sample == [ask] else (0, 2) if calls or is_short else (0,):
                yield [*start, *sample], [_tool(index) for index in range(count)]


@functools.lru_cache(maxsize=16)
def _find_pieces(
    tokenizer: Tokenizer, template: str | Path | None, variables: str, day: date
) -> dict[_Slot, list[_Piece]]:
    """Return the template texts that can follow each slot, the longest text first.

    `day` is part of the cache's key, because templates can write the date.
    """
    by_slot: dict[_Slot, dict[_Piece, None]] = defaultdict(dict)
    renderer = Renderer(tokenizer, template, json.loads(variables))
    [ask], _ = next(_sample_conversations())
    takes_text = False
    with suppress(XtokError):
        takes_text = any("content" in run.path for run in renderer.render([ask]).runs)
    parts = [{"type": "text", "text": "words"}]
    for messages, tools in _sample_conversations():
        if not takes_text:
            messages = [{**message, "content": parts} for message in messages]
        for has_prompt in (False, True) if messages[-1]["role"] in ("user", "tool") else (False,):
            with suppress(XtokError):  # some templates reject tools or system messages
                variant = replace(renderer, tools=tools, add_generation_prompt=has_prompt)
                for slot, piece in _rendering_pieces(variant, messages):
                    by_slot[slot][piece] = None
    return {slot: sorted(pieces, key=lambda p: -len(p.symbols)) for slot, pieces in by_slot.items()}


def _rendering_pieces(
    renderer: Renderer, messages: Sequence[dict[str, Any]]
) -> Iterator[tuple[_Slot, _Piece]]:
    """Yield each text between two values of a rendering, with the slot that precedes the text.

        text     <s>[user] words<end>[assistant] words<end>
        pieces   <s>[user]      <end>[assistant]      <end>

    A value is a message's content, or a part of a call.
    """
    rendering = renderer.render(messages)
    text, offset_of = _text_symbols(renderer.tokenizer, rendering.text)
    before, num_seen, end = _START, 0, 0
    previous: tuple[int, ...] = ()
    first = int(messages[0]["role"] == "system")
    for run in sorted(_rendered_values(rendering)):
        role = "tools" if run.message < 0 else messages[run.message]["role"]
        path = tuple("#" if isinstance(x, int) else x for x in run.path)
        slot = _Slot(role, path, is_json=run.offset < 0)
        num_ahead = 0 if role in ("system", "tools") else run.message - first + 1 - num_seen
        indices = tuple(x for x in run.path if isinstance(x, int))
        if num_ahead in (0, 1):
            piece = _Piece("", slot, num_ahead == 1, indices != previous and not num_ahead)
            yield from _gap_pieces(text, end, offset_of(run.start), before, piece)
        before, previous, end = slot, indices, offset_of(run.end)
        num_seen += num_ahead
    last = _PROMPT if renderer.add_generation_prompt else _END
    yield from _gap_pieces(text, end, len(text), before, _Piece("", last, False, previous != ()))


def _text_symbols(tokenizer: Tokenizer, text: str) -> tuple[str, Callable[[int], int]]:
    """Return a text's symbols, and a function that converts a text offset to a symbol offset.

    The function returns -1 inside a control token.
    """
    ids, bounds, _ = tokenizer.encode(text)
    symbols, starts = _symbols(tokenizer, ids)
    byte_of = byte_offsets(text)

    def offset_of(char: int) -> int:
        byte = int(byte_of[char])
        i = int(np.searchsorted(bounds, byte, side="right")) - 1
        if byte == bounds[i]:
            return int(starts[i])
        is_text = bounds[i + 1] - bounds[i] <= starts[i + 1] - starts[i]
        return int(starts[i + 1] - (bounds[i + 1] - byte)) if is_text else -1

    return symbols, offset_of


def _gap_pieces(
    text: str, start: int, end: int, before: _Slot, piece: _Piece
) -> Iterator[tuple[_Slot, _Piece]]:
    """Yield the text between two values as a piece, unless splits at this text are ambiguous.

    A text that ends a message must contain a control token. The text before the name of a sample's
    tool or argument is also a piece.
    """
    if min(start, end) < 0:
        return
    symbols = text[start:end]
    if mark := _MARKS.search(symbols):
        yield before, _Piece(symbols[: mark.start()], _UNREAD, False, False)
    ends_message = (piece.is_next or piece.slot in (_END, _PROMPT)) and not before.is_json
    if before == _START or (symbols and (not ends_message or _ANY_CONTROL.search(symbols))):
        yield before, piece._replace(symbols=symbols)


def _rendered_values(rendering: Rendering) -> Iterator[Run]:
    """Yield the range of each value in a rendering, with the path of the value's slot."""
    runs = [run for run in rendering.runs if run.path[:1] != ("role",)]
    for run in runs:
        path = REASONING_KEYS[:1] if run.path[0] in REASONING_KEYS else run.path
        path = (*path[:-1], _VALUE) if path[-2:-1] == ("arguments",) else path
        yield run._replace(path=path)
    yield from _rendered_keys(rendering.text, runs)
    for run in rendering.input_runs:  # all tools, one tool or its function, as JSON
        if run.offset < 0 and run.path[2:] in ((), ("function",)):
            yield run._replace(path=run.path[1:])


def _rendered_keys(text: str, runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the range of each argument's key, if the template writes arguments one by one."""
    starts = [run.start for run in runs]
    for mark in _MARKS.finditer(text):
        index = bisect_right(starts, mark.start())
        is_value = index and mark.start() < runs[index - 1].end
        if mark["key"] and not is_value and runs[index:] and "arguments" in runs[index].path:
            path = (*runs[index].path[:-1], _KEY)
            yield Run(mark.start(), mark.end(), runs[index].message, path, 0)


# Split the ids into pieces


def _split(pieces: Mapping[_Slot, Sequence[_Piece]], text: str) -> Iterator[tuple[_Steps, bool]]:
    """Yield possible splits of a text into pieces, and whether each split is complete.

    A split is incomplete if the text ends inside a message. The search is depth-first.
    """
    candidates = [piece for piece in pieces.get(_START, ()) if text.startswith(piece.symbols)]
    longest = [piece for piece in candidates if piece.symbols == candidates[0].symbols]
    stack: list[tuple[_Piece, int, _Steps]] = [(p, len(p.symbols), ()) for p in reversed(longest)]
    for _ in range(_MAX_STEPS):
        if not stack:
            return
        piece, start, before = stack.pop()
        if piece.slot in (_END, _PROMPT):
            if start == len(text):
                yield (*before, (piece, None)), True
            continue
        control = _ANY_CONTROL.search(text, start)
        limit = control.start() if control else len(text)
        next_steps = [*_next_steps(text, start, limit, piece.slot, pieces.get(piece.slot, ()))]
        stack += _best_steps(next_steps, text, piece, before)
        if not next_steps and not piece.slot.is_json:
            for end in _truncation_stops(text, start, limit, pieces.get(piece.slot, ())):
                yield (*before, (piece, _decode_symbols(text[start:end]))), False


def _best_steps(
    candidates: Sequence[tuple[int, _Piece, Any]], text: str, piece: _Piece, before: _Steps
) -> Iterator[tuple[_Piece, int, _Steps]]:
    """Yield the best next steps, in the order in which to try the steps.

    The step to the piece that starts first comes before the step to the end of the text. If
    several pieces start first, only the longest piece is used. With other pieces, an unsupported
    call could become an answer.
    """
    best = min(((end, -len(following.symbols)) for end, following, _ in candidates), default=None)
    final_steps = []
    for end, following, value in candidates:
        step = following, end + len(following.symbols), (*before, (piece, value))
        if following.slot in (_END, _PROMPT):
            final_steps += [step] if step[1] == len(text) else []
        elif (end, -len(following.symbols)) == best:
            yield step
    yield from final_steps


def _next_steps(
    text: str, start: int, limit: int, slot: _Slot, pieces: Sequence[_Piece]
) -> Iterator[tuple[int, _Piece, Any]]:
    """Yield the pieces that can follow a slot, each with its position and the slot's value."""
    for piece in pieces:
        if slot.is_json:
            value, end = _decode_json(text, start, limit)
        else:
            end = text.find(piece.symbols, start)
            value = _decode_symbols(text[start:end]) if 0 <= end <= limit else None
        if slot.path[-1:] in (("name",), (_KEY,)) and not _NAME.fullmatch(str(value)):
            continue
        if value is not None and text.startswith(piece.symbols, end):
            yield end, piece, value


def _truncation_stops(text: str, start: int, limit: int, pieces: Sequence[_Piece]) -> Iterator[int]:
    """Yield the positions where the last message can end if the text stops inside a piece.

    For example, sampled text lacks the line break after the end of a turn.
    """
    for piece in pieces:
        control = _ANY_CONTROL.search(piece.symbols)
        if control and limit < len(text):
            stop = limit - control.start()
            if stop >= start and piece.symbols.startswith(text[stop:]):
                yield stop
    if limit == len(text) and any(_ANY_CONTROL.search(piece.symbols) for piece in pieces):
        yield limit


def _decode_json(text: str, start: int, limit: int) -> tuple[Any, int]:
    words = _decode_symbols(text[start:limit])
    with suppress(ValueError):
        value, end = json.JSONDecoder().raw_decode(words or "")
        return value, start + len((words or "")[:end].encode())
    return None, start


def _build_conversation(steps: _Steps) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Return the messages and tools of a split, and whether a generation prompt follows."""
    system: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for piece, value in steps:
        role, path, _ = piece.slot
        if role == "tools":
            function = {"type": "function", "function": value}
            tools += value if not path else [function if path[1:] else value]
        elif role == "system":
            system.append({"role": role})
            _store(system[0], path, value, is_item=True)
        elif path:
            if piece.is_next:
                messages.append({"role": role, "content": ""})
            if path[-1] == _VALUE:
                call = messages[-1]["tool_calls"][-1]["function"]
                value = _parse_argument(value, tools, call["name"], [*call["arguments"]][-1])
            _store(messages[-1], path, value, is_item=piece.is_item)
    return system + messages, tools, steps[-1][0].slot == _PROMPT


def _parse_argument(value: str, tools: Sequence[dict[str, Any]], name: str, key: str) -> Any:
    """Parse an argument as JSON, unless the tool's schema declares the argument as a string."""
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


def _store(message: dict[str, Any], path: Sequence[str], value: Any, *, is_item: bool) -> None:
    """Store a value at a path in a message.

    In the path, `#` is the last item of a list, or a new item if `is_item` is True.
    """
    if len(path) == 1:
        message[path[0]] = value
        return
    name, _, *inner = path
    items = message[name] = message.get(name) or []
    if is_item or not items:
        items.append({"type": "text"} if name == "content" else {"type": "function"})
    container = items[-1]
    for key in inner[:-1]:
        container = container.setdefault(key, {})
    last = inner[-1]
    container[value if last == _KEY else [*container][-1] if last == _VALUE else last] = value


def _verify(
    renderer: Renderer, ids: NDArray[np.int32], text: str, steps: _Steps, is_whole: bool
) -> ReadBack | None:
    """Render the conversation of a split. Return None if the rendering differs from the ids."""
    tokenizer, size = renderer.tokenizer, len(ids)
    try:
        messages, tools, has_prompt = _build_conversation(steps)
        renderer = replace(renderer, tools=tools or None, add_generation_prompt=has_prompt)
        rendering = renderer.render(messages)
        new_ids, bounds, _ = tokenizer.encode(rendering.text)
    except (_UnclearError, XtokError):
        return None
    symbols, starts = _symbols(tokenizer, new_ids)
    if not symbols.startswith(text) or (is_whole and symbols != text):
        return None
    if not np.array_equal(new_ids[:size], ids):
        # The bytes are the same, but the tokens differ.
        new_ids = np.concatenate([ids, new_ids[np.searchsorted(starts, len(text)) :]])
        spelled = [tokenizer.table.named_tokens[i] for i in new_ids.tolist()]
        if b"".join(spelled) != rendering.text.encode():
            return None
        bounds = offsets_of([*map(len, spelled)])
    conversation = Targets(renderer, messages, rendering, (new_ids, bounds)).conversation()
    return ReadBack(
        messages=messages,
        tools=tools or None,
        variables=dict(renderer.variables),
        add_generation_prompt=has_prompt,
        conversation=conversation.first(size),
    )
