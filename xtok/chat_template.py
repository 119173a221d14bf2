"""Chat templates, rendered once and in a sandbox, with the origin of every character kept.

A template may trim what it is given, cut a `</think>` part out of it, repeat it or drop it, and its
conditions look at the very text. So nothing is added to a message to find it again. Messages are
strings that remember where their characters come from through what a template does to strings, and
loops over messages leave marks of length zero; the text is the one that any other renderer gives.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType, CodeType
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from xtok.errors import XtokError

Message = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the template knows."""

Path = tuple[str | int, ...]


class Run(NamedTuple):
    """Characters `start` to `end` of a text that come from one string of one message.

    `path` leads to the string within the message: `("content",)`, or `("content", 0, "text")`.
    `offset` is where in that string the run begins; -1 for what was derived from it, as JSON is.
    """

    start: int
    end: int
    message: int
    path: Path
    offset: int


class Mark(NamedTuple):
    """A place in a text, of length zero.

    `enter` and `leave` stand around what the body of a loop (a number from 1 on) writes for a
    message; the others stand around a part of the template, and have neither loop nor message.
    """

    position: int
    kind: str
    loop: int = 0
    message: int = -1


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A conversation as text, and which message each part of it comes from.

    Attributes:
        text: what the template gives.
        runs: the characters that come from messages, in the text's order.
        turns: per message, the stretch of text that a loop over the messages wrote for it; None
            where none did.
        generation_prompt: the text after the last message that asks for an answer.
        generated: stretches within `{% generation %}` of a training template.
    """

    text: str
    runs: tuple[Run, ...]
    turns: tuple[tuple[int, int] | None, ...]
    generation_prompt: str
    generated: tuple[tuple[int, int], ...]


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    source: str = "the chat template",
) -> Rendering:
    """Render messages by a Jinja chat template, as `apply_chat_template` of transformers does.

    Args:
        template: the Jinja source.
        messages: the conversation; not changed.
        tools: JSON schemas of the tools; an empty list is passed on as None.
        add_generation_prompt: end with what asks the model for an answer.
        variables: what else the template reads: `bos_token`, `enable_thinking`, ….
        source: what to call the template in an error.

    Raises:
        XtokError: if a message has no role, or the template is no Jinja, or raises; then with its
            own error, and the message that it raised at.
    """
    check_messages(messages)
    compiled = _compile(template, source)
    current: list[int] = []

    def mark(kind: str, loop: int = 0, value: object = None) -> str:
        if kind == "enter":
            if not isinstance(value, _Object) or value._path:  # a loop over something else
                return ""
            current[:] = [value._message]
            return _Text("", (), (Mark(0, kind, loop, value._message),))
        return _Text("", (), (Mark(0, kind, loop),))

    context = {
        **(variables or {}),
        "messages": [_tracked(message, i, ()) for i, message in enumerate(messages)],
        "tools": tools or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        _MARK: mark,
    }
    try:
        rendered = compiled.render(context)
    # Jinja's own errors, and what Python raises for a template that adds None to a string.
    except (
        *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        raise _raised(source, error, messages, current[0] if current else None) from error
    return _rendering(rendered, len(messages), add_generation_prompt)


def check_messages(messages: Sequence[Message]) -> None:
    """Check that messages are objects with a role.

    Raises:
        XtokError: naming the one that is not.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise XtokError(
                f"message {i} is no message: it has no role",
                hint='a message is an object such as {"role": "user", "content": "Hello"}',
            )


def _raised(
    source: str, error: Exception, messages: Sequence[Message], current: int | None
) -> XtokError:
    where = ""
    if current is not None:
        message = json.dumps(messages[current], ensure_ascii=False, default=str)
        shown = message if len(message) <= 120 else f"{message[:119]}…"
        where = f" at message {current}, {shown}"
    return XtokError(
        f"{source} raises{where}: {error}",
        hint="change the messages to what the template takes, or give another with --chat-template",
    )


def _rendering(rendered: str, count: int, add_generation_prompt: bool) -> Rendering:
    text = rendered if isinstance(rendered, _Text) else _Text(rendered)
    plain = str.__str__(text)
    prompts = _between(text._marks, "prompt", "prompted") if add_generation_prompt else []
    end_of_turns = prompts[-1][0] if prompts else len(plain)
    turns: list[tuple[int, int] | None] = [None] * count
    last = 0
    opened: list[Mark] = []
    for mark in text._marks:
        # Whatever is open of the same loop ends here; `continue` and `break` leave no other trace.
        while mark.loop and any(o.loop == mark.loop for o in opened):
            turn = opened.pop()
            start, end = turn.position, min(mark.position, end_of_turns)
            known = turns[turn.message] or (0, 0)
            if end - start > known[1] - known[0]:  # loops that look and write nothing do not count
                turns[turn.message] = (start, end)
            last = max(last, mark.position)
        if mark.kind == "enter":
            opened.append(mark)
    asked = plain[slice(*prompts[-1])] if prompts else plain[last:]
    return Rendering(
        text=plain,
        runs=text._runs,
        turns=tuple(turns),
        generation_prompt=asked,
        generated=tuple(_between(text._marks, "generation", "generated")),
    )


def _between(marks: Iterable[Mark], start: str, end: str) -> list[tuple[int, int]]:
    """Return the stretches between a mark of one kind and the next of another."""
    found: list[tuple[int, int]] = []
    position = -1
    for mark in marks:
        if mark.kind == start:
            position = mark.position
        elif mark.kind == end:
            found.append((position, mark.position))
    return found


# Strings that remember where they come from


class _Text(str):
    """A string with the runs of its characters that come from messages, and with marks."""

    __slots__ = ("_marks", "_runs")
    _runs: tuple[Run, ...]
    _marks: tuple[Mark, ...]

    def __new__(
        cls, text: str = "", runs: tuple[Run, ...] = (), marks: tuple[Mark, ...] = ()
    ) -> _Text:
        self = super().__new__(cls, text)
        self._runs, self._marks = runs, marks
        return self

    def _cut(self, start: int, end: int) -> _Text:
        """Return characters `start` to `end`, 0 ≤ start ≤ end ≤ length; marks stay behind."""
        runs = tuple(
            Run(
                max(r.start, start) - start,
                min(r.end, end) - start,
                r.message,
                r.path,
                r.offset if r.offset < 0 else r.offset + max(0, start - r.start),
            )
            for r in self._runs
            if r.start < end and r.end > start
        )
        return _Text(str.__getitem__(self, slice(start, end)), runs)

    def _consecutive(self, parts: Iterable[str], gap: int) -> list[str]:
        """Cut out parts of this text that follow one another, each `gap` after the last."""
        found: list[str] = []
        start = 0
        for part in parts:
            found.append(self._cut(start, start + len(part)))
            start += len(part) + gap
        return found

    def _in_order(self, parts: Iterable[str]) -> list[str]:
        """Cut out parts that are separated by characters which no part has."""
        found: list[str] = []
        start = 0
        for part in parts:
            start = self.find(part, start)
            found.append(self._cut(start, start + len(part)))
            start += len(part)
        return found

    def _same_length(self, text: str) -> str:
        return _Text(text, self._runs) if len(text) == len(self) else text

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return _concatenate((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _concatenate((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._cut(start, max(start, stop)) if step == 1 else text
        place = range(len(self))[key]
        return self._cut(place, place + 1)

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = super().split(sep, maxsplit)
        return self._in_order(parts) if sep is None else self._consecutive(parts, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = super().rsplit(sep, maxsplit)
        return self._in_order(parts) if sep is None else self._consecutive(parts, len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._in_order(super().splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._consecutive(super().partition(sep), 0)
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._consecutive(super().rpartition(sep), 0)
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        return _join_with(new, self.split(old, count))

    def join(self, parts: Iterable[str], /) -> str:
        return _join_with(self, parts)

    def lower(self) -> str:
        return self._same_length(super().lower())

    def upper(self) -> str:
        return self._same_length(super().upper())

    def capitalize(self) -> str:
        return self._same_length(super().capitalize())

    def title(self) -> str:
        return self._same_length(super().title())


def _concatenate(parts: Iterable[Any]) -> str:
    """Join parts as `"".join(map(str, parts))` does."""
    texts = [str(part) for part in parts]
    if not any(isinstance(text, _Text) for text in texts):
        return "".join(texts)
    runs: list[Run] = []
    marks: list[Mark] = []
    length = 0
    for text in texts:
        if isinstance(text, _Text):
            runs += [r._replace(start=r.start + length, end=r.end + length) for r in text._runs]
            marks += [m._replace(position=m.position + length) for m in text._marks]
        length += len(text)
    return _Text("".join(texts), tuple(runs), tuple(marks))


def _join_with(separator: str, parts: Iterable[Any]) -> str:
    joined: list[Any] = []
    for part in parts:
        joined += [separator, part]
    return _concatenate(joined[1:])


class _Object(dict[str, Any]):
    """A message, or an object within one, that knows where it comes from.

    Attributes have underscores, which the sandbox refuses, so that they hide no key.
    """

    __slots__ = ("_message", "_path")
    _message: int
    _path: Path


class _Items(list[Any]):
    """A list within a message, likewise."""

    __slots__ = ("_message", "_path")
    _message: int
    _path: Path


for _kind in (_Text, _Object, _Items):  # what Jinja's errors call them
    _kind.__name__, _kind.__module__ = _kind.__mro__[1].__name__, "builtins"


def _tracked(value: Any, message: int, path: Path) -> Any:
    """Return a copy of a message's value, plain JSON types only, whose strings are `_Text`."""
    if isinstance(value, str):
        text = str.__str__(value)
        return _Text(text, (Run(0, len(text), message, path, 0),) if text else ())
    if value is None or isinstance(value, (bool, int, float)):
        return value
    copy: _Object | _Items
    if isinstance(value, Mapping):
        copy = _Object({k: _tracked(v, message, (*path, k)) for k, v in value.items()})
    elif isinstance(value, (list, tuple)):
        copy = _Items(_tracked(v, message, (*path, i)) for i, v in enumerate(value))
    else:  # an image or an array, say: templates ask only whether it is there
        return f"<{type(value).__name__}>"
    copy._message, copy._path = message, path
    return copy


# Jinja, as transformers sets it up (utils/chat_template_utils.py), with origins kept

_MARK = "xtok_mark"


class _Generation(Extension):
    """The `{% generation %}` block of training templates."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = _mark("generation", line), _mark("generated", line)
        return nodes.Scope([start, *body, end], lineno=line)


class _Marking(NodeTransformer):
    """Put marks around the body of each loop, and around what asks for an answer."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return [node]
        self._loops += 1
        loop = nodes.Const(self._loops)
        enter = _mark("enter", node.lineno, loop, nodes.Name(node.target.name, "load"))
        node.body = [enter, *node.body, _mark("leave", node.lineno, loop)]
        return [node, _mark("leave", node.lineno, loop)]

    def visit_If(self, node: nodes.If) -> nodes.Node:
        self.generic_visit(node)
        names = [node.test, *node.test.find_all(nodes.Name)]
        if any(isinstance(n, nodes.Name) and n.name == "add_generation_prompt" for n in names):
            start, end = _mark("prompt", node.lineno), _mark("prompted", node.lineno)
            node.body = [start, *node.body, end]
        return node


def _mark(kind: str, line: int, *arguments: nodes.Expr) -> nodes.Output:
    call = nodes.Call(nodes.Name(_MARK, "load"), [nodes.Const(kind), *arguments], [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line)
    return output


class _KeepingCode(CodeGenerator):
    """Code that joins with `environment.concat` where Jinja has a plain `"".join` for `~`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _KeepingCode
    concat = staticmethod(_concatenate)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Let `", ".join(...)` of a plain string keep what it joins."""
        if (
            isinstance(function, BuiltinMethodType)
            and function.__name__ == "join"
            and type(function.__self__) is str
        ):
            return _join_with(function.__self__, *args)
        return super().call(context, function, *args, **kwargs)


@functools.lru_cache(maxsize=32)
def _compile(template: str, source: str) -> jinja2.Template:
    environment = _environment()
    try:
        tree = environment.parse(template)
        _Marking().visit(tree)
        tree.set_environment(environment)
        code: CodeType = environment.compile(tree)
    except jinja2.TemplateSyntaxError as error:
        raise XtokError(
            f"{source} is not a Jinja template: line {error.lineno}: {error.message}",
            hint="mend it, or give another with --chat-template",
        ) from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@functools.lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, where Jinja's own filter escapes HTML; it comes from its value."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    origins: Sequence[tuple[int, Path]] = ()
    if isinstance(value, (_Object, _Items)):
        origins = [(value._message, value._path)]
    elif isinstance(value, _Text):
        origins = [(run.message, run.path) for run in value._runs[:1]]
    return _Text(text, tuple(Run(0, len(text), m, p, -1) for m, p in origins))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    get: Callable[[Any], Any] = make_attrgetter(environment, attribute) if attribute else _same
    return _join_with(d, map(get, value))


def _same(value: Any) -> Any:
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
