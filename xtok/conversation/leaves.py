"""Every leaf of a conversation is accounted for: what a template leaves out is an error or a note.

A leaf is a string, a number or a part that was given: of a message's content, calls and reasoning,
of the tools and documents. The rendering knows which characters come from which leaf. On a leaf
without any (a number, or a string whose origin a filter lost) the text must depend: rendered again
with another value there, it is another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from xtok.conversation._tracking import Path
from xtok.conversation.templates import Message, Rendering, is_missing
from xtok.errors import XtokError
from xtok.tokenizers.display import printable, quoted

ASIDE = frozenset([
    "annotations", "category", "created", "created_at", "dataset", "date", "extra", "finish_reason",
    "id", "idx", "index", "info", "lang", "language", "license", "meta", "metadata", "model",
    "score", "source", "split", "subset", "timestamp", "topic", "type", "url", "uuid", "version",
])  # fmt: skip
"""Keys of rows and messages that name their kind and origin, and change no text."""
WEIGHTS = ("weight", "loss_mask", "train")
"""Keys of a message that include it in training, by 1, or exclude it, by 0."""
_SPOKEN = re.compile(
    r"content|tool_calls|function_call|"
    r"(\w+_)?(reason(ing)?|thinking|thoughts?)(_(content|details|process|steps|text|trace))?"
)
_STRUCTURE = ("type", "id", "index", "doc_id")
_UNUSED = 730_000_000  # numbers from here on stand in no conversation
_TAG = re.compile(r"<[^<>]*>|\[[A-Z_/]+\]")

Inputs = Mapping[str, Any]
"""What is rendered: `messages`, `tools`, `documents`."""
Render = Callable[[Inputs], Rendering]


def is_spoken(key: str) -> bool:
    """Whether a key of a message has what its role wrote."""
    return _SPOKEN.fullmatch(key) is not None and key not in ASIDE


def unread_note(key: str, what: str) -> str:
    """Return the note on a key that neither xtok nor a template reads."""
    return f"nobody reads the key {quoted(printable(key))} of {what}: it has no effect"


def is_trained_on(message: Message, index: int) -> bool:
    """Whether a message's own weights let it be a target.

    Raises:
        XtokError: if one is neither 0 nor 1.
    """
    values = [(name, message[name]) for name in WEIGHTS if not is_missing(message.get(name))]
    for name, value in values:
        if value not in (0, 1):
            raise XtokError(
                f"message {index}, the {message['role']}'s, has the {name} {str(value)[:20]!r}",
                hint="give 1 to train on it, or 0",
            )
    return all(value for _, value in values)


def unread_leaves(
    render: Render, inputs: Inputs, rendering: Rendering, first: int = 0
) -> Iterator[str]:
    """Yield notes on what is left out on purpose, and on keys that nobody reads.

    A template leaves out on purpose what it writes as long as no later message follows, as Qwen 3
    does with thoughts; what it cuts out at a tag, as DeepSeek's do at `</think>`; and of a tool
    or a document that it writes, what is not in its own form.

    Args:
        render: the template, for other values.
        inputs: what was rendered.
        rendering: what became of it.
        first: the message from which on they count.

    Raises:
        XtokError: for anything else that is left out; names the message and the key.
    """
    whole = _Written(render, inputs, rendering)
    leaves_of = {
        index: [
            leaf
            for key, value in message.items()
            if is_spoken(key)
            for leaf in _leaves(value, ("messages", index, key))
        ]
        for index, message in [*enumerate(inputs["messages"])][first:]
    }
    whole.try_all([leaf for leaves in leaves_of.values() for leaf in leaves])
    earlier: set[tuple[Any, ...]] = set()
    for index, leaves in leaves_of.items():
        yield from _of_message(whole, index, leaves, earlier)
    for name in ("tools", "documents"):
        for index in range(len(inputs[name] or ())):
            yield from _of_one_beside(whole, name, index)
    yield from _unread(whole, inputs["messages"])
    yield from _results(whole, inputs["messages"])


def _of_message(
    whole: _Written, index: int, leaves: Sequence[_Leaf], earlier: set[tuple[Any, ...]]
) -> Iterator[str]:
    """Yield notes on what a message lacks; `earlier` are kinds of leaves that only the last has."""
    message, is_last = whole.inputs["messages"][index], index + 1 == len(whole.inputs["messages"])
    kinds = {}
    for leaf in leaves:
        names = tuple(name for name in leaf.path if isinstance(name, str))
        kinds[leaf.path] = (message["role"], frozenset(message), *names)
    lost = [(leaf, part) for leaf in leaves if (part := whole.lost(leaf))]
    is_known = all(kinds[leaf.path] in earlier for leaf, _ in lost)
    before = None if is_last or is_known else whole.up_to(index)
    for leaf, part in lost:
        if before is not None and not before.lost(leaf):
            earlier.add(kinds[leaf.path])
        if kinds[leaf.path] in earlier and not is_last:
            yield f"the template leaves out {leaf.path[2]} of earlier messages"
        elif isinstance(leaf.value, str) and (tag := _TAG.search(part)):
            name = printable(tag[0])
            if part.lstrip().startswith(tag[0]):
                yield f"the template leaves out what is marked with {name}"
            else:
                yield f"the template cuts a message's {leaf.path[2]} at {name}, and leaves out text"
        else:
            raise _dropped(f"message {index}, the {message['role']}'s: ", leaf, part)


def _of_one_beside(whole: _Written, name: str, index: int) -> Iterator[str]:
    leaves = [*_leaves(whole.inputs[name][index], (name, index))]
    by_key: dict[str, list[_Leaf]] = defaultdict(list)
    for leaf in leaves:
        if not whole.has_trace(leaf):
            by_key[next(x for x in leaf.path[::-1] if isinstance(x, str))].append(leaf)
    lost = {key: group for key, group in by_key.items() if not whole.depends_on(group)}
    if lost and sum(map(len, lost.values())) == len(leaves):
        raise _dropped("", leaves[0], str(leaves[0].value))
    for key in lost:
        yield f"the template leaves out the key {quoted(printable(key))} of {name}"


def _unread(whole: _Written, messages: Sequence[Message]) -> Iterator[str]:
    """Yield notes on the keys of messages that neither the template nor xtok reads."""
    keys = {
        key: None
        for index, message in enumerate(messages)
        for key in message
        if key not in ("role", *WEIGHTS, *ASIDE)
        and not is_spoken(key)
        and not (key in ("name", "tool_call_id") and message["role"] == "tool")  # its call has it
        and ("messages", index, key) not in whole.tops
    }
    if keys and whole.depends_without(keys):
        keys = {key: None for key in keys if not whole.depends_without([key])}
    for key in keys:
        yield unread_note(key, "messages")


def _results(whole: _Written, messages: Sequence[Message]) -> Iterator[str]:
    """Yield notes on tool results without a call, and on those in another order than their calls.

    Most templates write results one after another, without ids.
    """
    calls: list[Any] = []  # their ids
    results: dict[int, int] = {}  # message to call
    for index, message in enumerate(messages):
        if isinstance(message.get("tool_calls"), list):
            calls += [call.get("id") for call in message["tool_calls"] if isinstance(call, Mapping)]
        call_id = message.get("tool_call_id")
        if message["role"] != "tool" or is_missing(call_id):
            continue
        if call_id in calls:
            results[index] = len(calls) - 1 - calls[::-1].index(call_id)
        elif calls and None not in calls:
            yield f"message {index}: no call before it has the id {quoted(printable(str(call_id)))}"
    in_order = sorted(results, key=lambda index: results[index])
    if in_order != [*results] and not _shows_calls(whole, messages, in_order):
        yield "tool results are in another order than their calls, and the text does not show it"


def _shows_calls(whole: _Written, messages: Sequence[Message], in_order: Sequence[int]) -> bool:
    """Whether the text shows which call each result belongs to, by the ids or by the names."""
    names = {index: messages[index].get("name") for index in in_order}
    leaves = [_Leaf(("messages", index, "name"), name) for index, name in names.items()]
    if len({*names.values()}) == len(names) and all(map(whole.has_trace, leaves)):
        return True
    inputs = whole.inputs
    for index, other in zip(sorted(in_order), in_order, strict=True):
        path = ("messages", index, "tool_call_id")
        inputs = _with(inputs, path, messages[other]["tool_call_id"])
    return whole.depends(inputs)


def _dropped(place: str, leaf: _Leaf, part: str) -> XtokError:
    what = f"its {leaf.name}" if place else leaf.name
    if isinstance(leaf.value, str) and part != leaf.value:
        what = f"the part {quoted(printable(part.strip()))} of {what}"
    return XtokError(
        f"{place}the template drops {what}",
        hint="give a template that writes it, with {option}, or leave it out",
        parameter="template",
    )


class _Leaf(NamedTuple):
    path: Path  # from the conversation on: ("messages", 2, "content"), ("tools", 0, "name")
    value: Any

    @property
    def name(self) -> str:
        """What an error calls it, as `tool_calls[0].function.name`."""
        path = self.path[2 * (self.path[0] == "messages") :]
        return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")

    @property
    def place(self) -> str:
        return f"message {self.path[1]}: {self.name}" if self.path[0] == "messages" else self.name


def _leaves(value: Any, path: Path) -> Iterator[_Leaf]:
    """Yield what is in a value; a part of a content that is not text is one leaf."""
    if isinstance(value, Mapping):
        if path[2:3] == ("content",) and len(path) == 4:
            if "text" not in value:
                yield _Leaf(path, value)
                return
            value = {k: v for k, v in value.items() if k == "text" or is_spoken(k)}
        for key, item in value.items():
            if key not in _STRUCTURE or "arguments" in path:
                yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i))
    elif not isinstance(value, (str, bool, int, float, type(None))):
        raise XtokError(
            f"{_Leaf(path, value).place} is a {type(value).__name__}, which JSON does not have",
            hint="give text, numbers, lists and objects",
        )
    elif not (value is None or (isinstance(value, str) and not value.strip())):
        yield _Leaf(path, value)


class _Written:
    """What a rendering has of the leaves that it was given."""

    def __init__(self, render: Render, inputs: Inputs, rendering: Rendering) -> None:
        self.inputs, self._render, self._text = inputs, render, rendering.text
        self._places: dict[Path, list[tuple[int, int]]] = defaultdict(list)
        for run in (*rendering.runs, *rendering.beside):
            path = run.path if run.message < 0 else ("messages", run.message, *run.path)
            self._places[path].append((run.offset, run.end - run.start))
        self.tops = {path[:3] for path in self._places}
        self._is_written: dict[Path, bool] = {}  # of leaves without a trace

    def up_to(self, index: int) -> _Written | None:
        """Return the same of the messages up to one; None if they alone cannot be rendered."""
        until = {**self.inputs, "messages": self.inputs["messages"][: index + 1]}
        with suppress(XtokError):
            return _Written(self._render, until, self._render(until))
        return None

    def try_all(self, leaves: Sequence[_Leaf]) -> None:
        """Find out at once of leaves without a trace whether the text has them or depends on them.

        All get values that are nowhere else, and the text has them or not. If it does not depend
        on all of the others together, it depends on none of them. What is left is asked one by one.
        """
        silent = [leaf for leaf in leaves if not self.has_trace(leaf)]
        if len(silent) < 2:
            return
        marked, marks = self.inputs, {}
        for n, leaf in enumerate(silent):
            if isinstance(leaf.value, (str, int, float)):
                number = _UNUSED + n
                is_text = isinstance(leaf.value, str)
                marked = _with(marked, leaf.path, f"{leaf.value}{number}" if is_text else number)
                marks[leaf.path] = str(number)
        with suppress(XtokError):
            text = self._render(marked).text
            self._is_written = {path: True for path, mark in marks.items() if mark in text}
        others = [leaf for leaf in silent if leaf.path not in self._is_written]
        if others and not self.depends_on(others):
            self._is_written |= {leaf.path: False for leaf in others}

    def has_trace(self, leaf: _Leaf) -> bool:
        """Whether some of the text comes from a leaf, or from what it is in, or what is in it."""
        return self._is_within(leaf.path) or any(
            p[: len(leaf.path)] == leaf.path for p in self._places
        )

    def _is_within(self, path: Path) -> bool:
        """Whether something that a leaf is in is written whole, as JSON."""
        return any(path[:n] in self._places for n in range(1, len(path)))

    def lost(self, leaf: _Leaf) -> str:
        """Return the first part of a leaf that the text does not have, nor depend on; or ""."""
        if not self.has_trace(leaf):
            is_written = self._is_written.get(leaf.path)
            is_written = self.depends_on([leaf]) if is_written is None else is_written
            return "" if is_written else str(leaf.value)
        places = sorted(self._places.get(leaf.path, ()))
        if not places or places[0][0] < 0 or self._is_within(leaf.path):
            return ""
        end, value = 0, str(leaf.value)
        for offset, size in [*places, (len(value), 0)]:
            part = value[end:offset]
            if part.strip() and not self._has_part(leaf, end, part):
                return part
            end = max(end, offset + size)
        return ""

    def _has_part(self, leaf: _Leaf, start: int, part: str) -> bool:
        """Whether a part is written in another way: a tag as such, others so that they count."""
        if not _TAG.sub("", part).strip() and part.strip() in self._text:
            return True
        rest = leaf.value[:start] + leaf.value[start + len(part) :]
        return self.depends(_with(self.inputs, leaf.path, rest))

    def depends_on(self, leaves: Sequence[_Leaf]) -> bool:
        """Whether the text is another if all of these leaves are."""
        inputs = self.inputs
        for leaf in reversed(leaves):  # parts that are left out have others behind them
            inputs = _with(inputs, leaf.path, _altered(leaf.value))
        return self.depends(inputs)

    def depends_without(self, keys: Iterable[str]) -> bool:
        """Whether the text is another if messages lack some keys."""
        messages = [{k: v for k, v in m.items() if k not in keys} for m in self.inputs["messages"]]
        return self.depends({**self.inputs, "messages": messages})

    def depends(self, inputs: Inputs) -> bool:
        try:
            return self._render(inputs).text != self._text
        except XtokError:  # the template looks at it
            return True


def _altered(value: Any) -> Any:
    """Return another value of the same kind; None for a part, which is left out."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else None


def _with(value: Any, path: Path, leaf: Any) -> Any:
    """Return a copy of a value with another leaf, or without it for None."""
    if not path:
        return leaf
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], leaf)
    if copy[path[0]] is None:
        del copy[path[0]]
    return copy
