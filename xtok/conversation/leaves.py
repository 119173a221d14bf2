"""Find and report the values of a conversation that a template omits.

A leaf is a single value in messages, tools or documents: a string, a number, or an item of a
content list. Tracked characters show which strings are in the text. For other leaves, the
conversation is rendered again with a different value. If the text does not change, the template
omits the leaf.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from xtok.conversation._tracking import KeyPath
from xtok.conversation.templates import Message, Rendering, is_missing
from xtok.errors import ChatTemplateError, XtokError
from xtok.tokenizers.display import printable, quoted

if TYPE_CHECKING:
    from xtok.conversation.rendering import Renderer

METADATA_KEYS = frozenset([
    "annotations", "category", "created", "created_at", "dataset", "date", "extra", "finish_reason",
    "id", "idx", "index", "info", "lang", "language", "license", "meta", "metadata", "model",
    "score", "source", "split", "subset", "timestamp", "topic", "type", "url", "uuid", "version",
])  # fmt: skip
"""Keys that describe a row or a message. If a template omits such a key, there is no note."""
WEIGHT_KEYS = ("weight", "loss_mask", "train")
"""Keys that include a message in training (value 1) or exclude the message (value 0)."""
_SPOKEN = re.compile(
    r"content|tool_calls|function_call|"
    r"(\w+_)?(reason(ing)?|thinking|thoughts?)(_(content|details|process|steps|text|trace))?"
)
_KNOWN_KEYS = {"role", *WEIGHT_KEYS, *METADATA_KEYS}
_RESULT_KEYS = {"name", "tool_call_id", *_KNOWN_KEYS}  # a result repeats its call's name and id
_STRUCTURE_KEYS = ("type", "id", "index", "doc_id")
_FIRST_MARKER = 730_000_000  # first number that is used as a marker
_TAG = re.compile(r"<[^<>]*>|\[[A-Z_/]+\]")

Inputs: TypeAlias = Mapping[str, Any]
"""A mapping with the keys `messages`, `tools` and `documents`."""


def is_spoken(key: str) -> bool:
    """Whether a key of a message contains the author's words: content, calls or reasoning."""
    return _SPOKEN.fullmatch(key) is not None and key not in METADATA_KEYS


def unread_note(key: str, owner: str) -> str:
    """Return a note about a key that neither xtok nor a template uses."""
    return f"the key {quoted(printable(key))} of {owner} is ignored, because nothing uses it"


def answer_indices(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages, except messages with weight 0."""
    turns = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    return [i for i in turns if _is_trained_on(messages[i], i)]


def _is_trained_on(message: Message, index: int) -> bool:
    values = [(name, message[name]) for name in WEIGHT_KEYS if not is_missing(message.get(name))]
    for name, value in values:
        if value not in (0, 1):
            raise XtokError(
                f"message {index} ({message['role']}) has the {name} {str(value)[:20]!r}",
                hint="use 1 to train on the message, or 0 to exclude it",
            )
    return all(value for _, value in values)


def unread_leaves(
    renderer: Renderer, messages: Sequence[Message], rendering: Rendering, first: int = 0
) -> Iterator[str]:
    """Yield notes about unused keys, and about values that the template omits by design.

    Such values are earlier thoughts (Qwen 3), text before a tag such as `</think>` (DeepSeek), and
    some keys of tools and documents. Messages before `first` are not checked.

    Raises:
        XtokError: if the template omits any other value. The error names the message and the key.
    """
    documents = renderer.variables.get("documents")
    inputs: Inputs = {"messages": messages, "tools": renderer.tools, "documents": documents}
    check = _LeafCheck(renderer, inputs, rendering)
    leaves_by_message = {
        i: [*_leaves({key: x for key, x in message.items() if is_spoken(key)}, ("messages", i))]
        for i, message in [*enumerate(messages)][first:]
    }
    check.try_all([leaf for leaves in leaves_by_message.values() for leaf in leaves])
    omitted: dict[tuple[Any, ...], bool] = {}
    for index, leaves in leaves_by_message.items():
        yield from _message_notes(check, index, leaves, omitted)
    for name in ("tools", "documents"):
        for index in range(len(inputs[name] or ())):
            yield from _item_notes(check, name, index)
    yield from _unread_key_notes(check, messages)
    yield from _result_notes(check, messages)


def _message_notes(
    check: _LeafCheck, index: int, leaves: Sequence[_Leaf], omitted: dict[tuple[Any, ...], bool]
) -> Iterator[str]:
    """Yield notes about omitted leaves of one message, or raise an error.

    An omitted leaf is acceptable, and causes a note, in two cases: the lost text contains a tag, or
    the template writes the leaf if the message is the last message. `omitted` records the second
    case for each kind of leaf.
    """
    messages = check.inputs["messages"]
    message, is_last = messages[index], index + 1 == len(messages)
    lost_parts = [(leaf, part) for leaf in leaves if (part := check.lost_part(leaf))]
    known = ((omitted.get(leaf.kind(message)), _TAG.search(part)) for leaf, part in lost_parts)
    is_known = all(is_omitted or (is_omitted is False and tag) for is_omitted, tag in known)
    check_up_to = None if is_last or is_known else check.up_to(index)
    for leaf, part in lost_parts:
        kind = leaf.kind(message)
        if check_up_to is not None:
            omitted[kind] = omitted.get(kind) or not check_up_to.lost_part(leaf)
        if omitted.get(kind) and not is_last:
            yield f"the template omits {leaf.path[2]} of earlier messages"
            continue
        tag = _TAG.search(part) if isinstance(leaf.value, str) else None
        if tag is None:
            raise _dropped_error(f"message {index} ({message['role']}): ", leaf, part)
        if part[: tag.start()].strip():
            place = f"the {leaf.path[2]} of a message"
            yield f"the template omits the text before {printable(tag[0])} in {place}"
        else:
            yield f"the template omits text marked with {printable(tag[0])}"


def _item_notes(check: _LeafCheck, name: str, index: int) -> Iterator[str]:
    """Yield notes about the keys of a tool or document that the template omits."""
    leaves = [*_leaves(check.inputs[name][index], (name, index))]
    by_key: dict[str, list[_Leaf]] = defaultdict(list)
    for leaf in leaves:
        if not check.has_trace(leaf):
            by_key[next(x for x in leaf.path[::-1] if isinstance(x, str))].append(leaf)
    lost_leaves = {key: group for key, group in by_key.items() if not check.depends_on(group)}
    if lost_leaves and sum(map(len, lost_leaves.values())) == len(leaves):
        raise _dropped_error("", leaves[0], str(leaves[0].value))
    for key in lost_leaves:
        yield f"the template omits the key {quoted(printable(key))} of {name}"


def _unread_key_notes(check: _LeafCheck, messages: Sequence[Message]) -> Iterator[str]:
    """Yield notes about message keys that neither xtok nor the template uses."""
    keys = [
        key
        for index, message in enumerate(messages)
        for key in message
        if key not in (_RESULT_KEYS if message["role"] == "tool" else _KNOWN_KEYS)
        and not is_spoken(key)
        and ("messages", index, key) not in check.containers
    ]
    if keys and check.depends_without(keys):
        keys = [key for key in keys if not check.depends_without([key])]
    for key in dict.fromkeys(keys):
        yield unread_note(key, "messages")


def _result_notes(check: _LeafCheck, messages: Sequence[Message]) -> Iterator[str]:
    """Yield notes about tool results that have no call, or are not in the order of the calls.

    The order matters because most templates write results without ids.
    """
    calls: list[Any] = []  # ids of all calls so far
    results: dict[int, int] = {}  # message index of a result → position of its call in `calls`
    for index, message in enumerate(messages):
        if isinstance(message.get("tool_calls"), list):
            calls += [call.get("id") for call in message["tool_calls"] if isinstance(call, Mapping)]
        call_id = message.get("tool_call_id")
        if message["role"] != "tool" or is_missing(call_id):
            continue
        if call_id in calls:
            results[index] = len(calls) - 1 - calls[::-1].index(call_id)
        elif calls and None not in calls:
            yield f"message {index}: no call has the tool_call_id {quoted(printable(str(call_id)))}"
    in_order = sorted(results, key=lambda index: results[index])
    if in_order != [*results] and not _shows_calls(check, messages, in_order):
        yield (
            "tool results are not in the order of the calls, and the text does not show which "
            "result belongs to which call"
        )


def _shows_calls(check: _LeafCheck, messages: Sequence[Message], in_order: Sequence[int]) -> bool:
    """Whether the text shows the call of each tool result, by the result's name or id."""
    names = {index: messages[index].get("name") for index in in_order}
    leaves = [_Leaf(("messages", index, "name"), name) for index, name in names.items()]
    if len({*names.values()}) == len(names) and all(map(check.has_trace, leaves)):
        return True
    inputs = check.inputs
    for index, other in zip(sorted(in_order), in_order, strict=True):
        path = ("messages", index, "tool_call_id")
        inputs = _with_value(inputs, path, messages[other]["tool_call_id"])
    return check.depends(inputs)


def _dropped_error(prefix: str, leaf: _Leaf, part: str) -> ChatTemplateError:
    description = f"its {leaf.name}" if prefix else leaf.name
    if isinstance(leaf.value, str) and part != leaf.value:
        description = f"the part {quoted(printable(part.strip()))} of {description}"
    return ChatTemplateError(
        f"{prefix}the template drops {description}",
        hint="use a template that writes this value ({option}), or remove the value",
    )


class _Leaf(NamedTuple):
    path: KeyPath  # such as ("messages", 2, "content"), ("tools", 0, "name")
    value: Any

    @property
    def name(self) -> str:
        path = self.path[2 * (self.path[0] == "messages") :]
        return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")

    def kind(self, message: Message) -> tuple[Any, ...]:
        """Return a key for the group of leaves that a template treats in the same way."""
        names = (name for name in self.path if isinstance(name, str))
        return (message["role"], frozenset(message), *names)

    @property
    def location(self) -> str:
        return f"message {self.path[1]}: {self.name}" if self.path[0] == "messages" else self.name


def _leaves(value: Any, path: KeyPath) -> Iterator[_Leaf]:
    if _is_content_part(path) and isinstance(value, Mapping) and "text" not in value:
        yield _Leaf(path, value)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in _child_items(value, path):
            yield from _leaves(item, (*path, key))
    elif not isinstance(value, (str, bool, int, float, type(None))):
        raise XtokError(
            f"{_Leaf(path, value).location} is a {type(value).__name__}, which is not a JSON type",
            hint="convert the value to a JSON type, for example with array.tolist()",
        )
    elif value is not None and str(value).strip():
        yield _Leaf(path, value)


def _child_items(value: Any, path: KeyPath) -> Iterable[tuple[str | int, Any]]:
    if not isinstance(value, Mapping):
        return enumerate(value)
    if _is_content_part(path):
        value = {key: item for key, item in value.items() if key == "text" or is_spoken(key)}
    left_out = () if "arguments" in path else _STRUCTURE_KEYS
    return ((key, item) for key, item in value.items() if key not in left_out)


def _is_content_part(path: KeyPath) -> bool:
    """Whether a path leads to an item of the content list of a message."""
    return path[2:3] == ("content",) and len(path) == 4


class _LeafCheck:
    """Checks which leaves of a conversation have an effect on its text."""

    def __init__(self, renderer: Renderer, inputs: Inputs, rendering: Rendering) -> None:
        self.inputs, self._renderer, self._text = inputs, renderer, rendering.text
        self._ranges: dict[KeyPath, list[tuple[int, int]]] = defaultdict(list)
        for run in (*rendering.runs, *rendering.input_runs):
            path = run.path if run.message < 0 else ("messages", run.message, *run.path)
            self._ranges[path].append((run.offset, run.end - run.start))
        self.containers = {path[:n] for path in self._ranges for n in range(1, len(path) + 1)}
        self._is_written: dict[KeyPath, bool] = {}  # leaves without tracked characters
        self._lost_tags: set[tuple[Any, ...]] = set()  # kinds of parts that have no effect

    def _render(self, inputs: Inputs) -> Rendering:
        variables = {**self._renderer.variables, "documents": inputs["documents"]}
        messages, tools = inputs["messages"], inputs["tools"]
        return self._renderer.render(messages, tools=tools, variables=variables)

    def up_to(self, index: int) -> _LeafCheck | None:
        """Return a check of the messages up to `index`, or None if rendering fails."""
        until = {**self.inputs, "messages": self.inputs["messages"][: index + 1]}
        with suppress(XtokError):
            return _LeafCheck(self._renderer, until, self._render(until))
        return None

    def try_all(self, leaves: Sequence[_Leaf]) -> None:
        """Check all leaves that have no tracked characters, with only two renderings.

        The first rendering searches the text for a unique value of each leaf. The second rendering
        changes all leaves that were not found. If the text stays the same, the template does not
        use any of the changed leaves.
        """
        untraced = [leaf for leaf in leaves if not self.has_trace(leaf)]
        if len(untraced) < 2:
            return
        self._is_written = dict.fromkeys(self._marked_paths(untraced), True)
        unmarked = [leaf for leaf in untraced if leaf.path not in self._is_written]
        if unmarked and not self.depends_on(unmarked):
            self._is_written |= {leaf.path: False for leaf in unmarked}

    def _marked_paths(self, leaves: Sequence[_Leaf]) -> Iterator[KeyPath]:
        inputs, marks = self.inputs, {}
        for marker, leaf in enumerate(leaves, start=_FIRST_MARKER):
            if isinstance(leaf.value, (str, int, float)):
                value = f"{leaf.value}{marker}" if isinstance(leaf.value, str) else marker
                inputs, marks[leaf.path] = _with_value(inputs, leaf.path, value), str(marker)
        with suppress(XtokError):
            text = self._render(inputs).text
            yield from (path for path, mark in marks.items() if mark in text)

    def has_trace(self, leaf: _Leaf) -> bool:
        """Whether the text has tracked characters of a leaf, of its container or of its items."""
        return leaf.path in self.containers or self._is_within(leaf.path)

    def _is_within(self, path: KeyPath) -> bool:
        return any(path[:n] in self._ranges for n in range(1, len(path)))

    def lost_part(self, leaf: _Leaf) -> str:
        """Return the first part of a leaf that has no effect on the text, or ""."""
        if not self.has_trace(leaf):
            is_written = self._is_written.get(leaf.path)
            is_written = self.depends_on([leaf]) if is_written is None else is_written
            return "" if is_written else str(leaf.value)
        parts = sorted(self._ranges.get(leaf.path, ()))
        if not parts or parts[0][0] < 0 or self._is_within(leaf.path):
            return ""
        end, value = 0, str(leaf.value)
        for offset, size in [*parts, (len(value), 0)]:
            part = value[end:offset]
            if part.strip() and not self._part_matters(leaf, end, part):
                return part
            end = max(end, offset + size)
        return ""

    def _part_matters(self, leaf: _Leaf, start: int, part: str) -> bool:
        if not _TAG.sub("", part).strip() and part.strip() in self._text:
            return True
        rest = leaf.value[:start] + leaf.value[start + len(part) :]
        check = partial(self.depends, _with_value(self.inputs, leaf.path, rest))
        if not (tags := _TAG.findall(part)) or leaf.path[1] == len(self.inputs["messages"]) - 1:
            return check()
        # If a template drops a text with tags, assume that it drops all texts with these tags. With
        # a rendering for each of 400 thoughts, this check would take 13 s (Qwen 3).
        kind = leaf.kind(self.inputs["messages"][leaf.path[1]])
        key = (kind, leaf.path[2:], *tags, start > 0)
        if key not in self._lost_tags and not check():
            self._lost_tags.add(key)
        return key not in self._lost_tags

    def depends_on(self, leaves: Sequence[_Leaf]) -> bool:
        inputs = self.inputs
        for leaf in reversed(leaves):  # in reverse, because removing a part shifts later parts
            inputs = _with_value(inputs, leaf.path, _alter(leaf.value))
        return self.depends(inputs)

    def depends_without(self, keys: Iterable[str]) -> bool:
        messages = [{k: v for k, v in m.items() if k not in keys} for m in self.inputs["messages"]]
        return self.depends({**self.inputs, "messages": messages})

    def depends(self, inputs: Inputs) -> bool:
        try:
            return self._render(inputs).text != self._text
        except XtokError:  # the template rejects the changed values
            return True


def _alter(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else None


def _with_value(value: Any, path: KeyPath, new: Any) -> Any:
    """Return a copy of nested values with a new value at `path`. None removes the value."""
    if not path:
        return new
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with_value(value[path[0]], path[1:], new)
    if copy[path[0]] is None:
        del copy[path[0]]
    return copy
