"""Chat templates, rendered once and in a sandbox, with the origin of every character kept.

A template may trim what it is given, cut a `</think>` part out of it, repeat it or drop it, and its
conditions look at the very text. So nothing is added to a message to find it again. Messages are
strings that remember where their characters come from through what a template does to strings, and
loops over messages leave marks of length zero; the text is the one that any other renderer gives.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from inspect import isfunction, ismethod
from itertools import groupby
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from xtok._lib.parsing import parse_json_field
from xtok.conversation._tracking import (
    Mark,
    Path,
    Run,
    TrackedItems,
    TrackedObject,
    TrackedText,
    concatenate,
    is_within,
    join_with,
    plain,
    tracked,
)
from xtok.errors import XtokError
from xtok.tokenizers.display import quoted

Message = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the template knows."""

_NESTING = (Mapping, list, tuple)
_MAX_DEPTH = 100


class Rendering(NamedTuple):
    """A conversation as text, and which message each part of it comes from."""

    text: str
    runs: tuple[Run, ...]  # the characters that come from messages, in order
    beside: tuple[Run, ...]  # those that come from `tools` and `documents`
    turns: tuple[tuple[int, int] | None, ...]  # what a loop over the messages wrote for each
    generation_prompt: str  # the text after the last message that asks for an answer
    # Within `{% generation %}` of a training template; None if the template has no such block.
    generated: tuple[tuple[int, int], ...] | None
    is_dated: bool  # whether the template asked for the date


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
        messages: the conversation, checked; not changed.
        tools: JSON schemas of the tools; an empty list is passed on as None.
        add_generation_prompt: end with what asks the model for an answer.
        variables: what else the template reads: `bos_token`, `enable_thinking`, ….
        source: what to call the template in an error.

    Raises:
        XtokError: if the template is not Jinja or raises (with its own error, and the message at
            which it did). Also if the text has half of a surrogate pair, which JSON can hold and
            UTF-8 cannot.
    """
    variables = dict(variables or {})
    documents = variables.pop("documents", None)
    dates: list[str] = []

    def strftime_now(form: str) -> str:
        dates.append(datetime.now().strftime(form))
        return dates[-1]

    compiled, is_training = _compile(template, source)
    context = compiled.new_context(
        {
            "strftime_now": strftime_now,
            **variables,
            "messages": [_as_given(tracked(message, i, ())) for i, message in enumerate(messages)],
            "tools": tracked(tools, -1, ("tools",)) or None,
            "documents": tracked(documents, -1, ("documents",)),
            "add_generation_prompt": add_generation_prompt,
        }
    )
    assert isinstance(context, _Context)
    try:
        rendered = concatenate(compiled.root_render_func(context))
    # Jinja's own errors, and whatever Python raises, as for a template that adds None to a string.
    except Exception as error:
        place = context.message
        where = f" at message {place}, the {messages[place]['role']}'s" if place >= 0 else ""
        raise XtokError(
            f"{source} raises{where}: {str(error) or type(error).__name__}",
            hint="change the messages to what the template takes, or give another with {option}",
            parameter="template",
        ) from error
    text = rendered if isinstance(rendered, TrackedText) else TrackedText(rendered)
    _require_utf8(text, source)
    found = _rendering(text, len(messages), add_generation_prompt, is_dated=bool(dates))
    return found if is_training else found._replace(generated=None)


@functools.lru_cache(maxsize=32)
def names_beside_date(template: str) -> tuple[str, ...]:
    """Return the variables that a template asks for in a condition around today's date."""
    names: dict[str, None] = {}
    for condition in _environment().parse(template).find_all((nodes.If, nodes.CondExpr)):
        if "strftime_now" in [name.name for name in condition.find_all(nodes.Name)]:
            tests = condition.find_all(nodes.Test)
            asked = (test.node for test in tests if test.name == "defined")
            names |= {node.name: None for node in asked if isinstance(node, nodes.Name)}
    return tuple(names)


@functools.lru_cache(maxsize=32)
def names_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


def has_generation(template: str) -> bool:
    """Whether a template has `{% generation %}` blocks, which mark what the assistant wrote."""
    return _compile(template, "the chat template")[1]


def constants(template: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the constants that a template sets at its top under some names."""
    return {
        node.target.name: node.node.as_const()
        for node in _environment().parse(template).body
        if isinstance(node, nodes.Assign)
        and isinstance(node.target, nodes.Name)
        and isinstance(node.node, nodes.Expr)
        and node.target.name in names
    }


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as dicts, as Transformers makes them of objects.

    Keys that are null, or NaN as in pandas' rows, are left out, as OpenAI's `"content": null`
    next to tool calls; values within others, such as arguments of a call, stay null.

    Raises:
        XtokError: naming the one that has no role, an array of texts, or is nested without end.
    """
    given = [
        message if isinstance(message, Mapping) else plain(message)
        for message in getattr(messages, "messages", messages)
    ]
    _check_messages(given)
    return [
        {key: value for key, value in plain(message).items() if not is_missing(value)}
        for message in given
    ]


def _check_messages(messages: Sequence[Any]) -> None:
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.isprintable():
            raise XtokError(
                f"message {i} has no role",
                hint='a message is an object such as {"role": "user", "content": "Hello"}',
            )
        level: list[Any] = [message]
        for _ in range(_MAX_DEPTH):
            inside = (one.values() if isinstance(one, Mapping) else one for one in level)
            values = [value for values in inside for value in values]
            if any(isinstance(v, np.ndarray) and v.dtype.kind in "OUS" for v in values):
                raise XtokError(
                    f"message {i}, the {role}'s, has an array where JSON has a list",
                    hint="make lists of them, as array.tolist() does, or read rows with "
                    "pyarrow's to_pylist()",
                )
            level = [value for value in values if isinstance(value, _NESTING)]
            if not level:
                break
        else:
            raise XtokError(
                f"message {i} is nested more than {_MAX_DEPTH} deep",
                hint="give its content as text, or as a list of parts",
            )


def _as_given(message: TrackedObject) -> TrackedObject:
    """Give reasoning all the names that templates read it by, as Transformers does."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        message.clear()
        message.update(given)
    return message


def plain_tools(tools: Any) -> list[Any] | None:
    """Return tools as a list of schemas: of schemas, of their JSON, or of functions.

    Raises:
        XtokError: for what is none of these.
    """
    if is_missing(tools):
        return None
    if isinstance(tools, str):  # as data sets have them, whose schemas differ
        tools = parse_json_field(tools, "the tools", _TOOLS_HINT)
    if not isinstance(tools, (list, tuple)):
        raise _no_tools(tools)
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Any) -> Any:
    if isinstance(tool, str):
        tool = parse_json_field(tool, "a tool", _TOOLS_HINT)
    if isfunction(tool) or ismethod(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool := plain(tool), dict):
        raise _no_tools(tool)
    return tool


_TOOLS_HINT = 'write them as [{"type": "function", "function": {"name": …}}, …]'


def _no_tools(value: Any) -> XtokError:
    return XtokError(
        f"the tools are not a list of JSON schemas: one is {quoted(repr(value)[:40])}",
        hint=_TOOLS_HINT,
    )


def is_missing(value: Any) -> bool:
    """Whether a message's value stands for none: null, or the NaN of pandas."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _require_utf8(text: TrackedText, source: str) -> None:
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        at = [r.message for r in text._runs if r.start <= error.start < r.end and r.message >= 0]
        culprit = f"message {at[0]}" if at else source
        raise XtokError(
            f"{culprit} has {text[error.start]!a}, half of a surrogate pair, which is not text",
            hint="write the whole pair, or the character itself",
        ) from error


def _rendering(
    text: TrackedText, count: int, add_generation_prompt: bool, *, is_dated: bool
) -> Rendering:
    plain = str.__str__(text)
    prompts = _between(text._marks, "prompt", "prompted") if add_generation_prompt else []
    end_of_turns = prompts[-1][0] if prompts else len(plain)
    turns: list[tuple[int, int] | None] = [None] * count
    last = 0
    opened: list[Mark] = []
    open_of = Counter[int]()  # how many of each loop
    unnamed: list[tuple[int, int]] = []  # what the loops over something else wrote each time
    for mark in text._marks:
        # Whatever is open of the same loop ends here; `continue` and `break` leave no other trace.
        while mark.loop and open_of[mark.loop]:
            turn = opened.pop()
            open_of[turn.loop] -= 1
            start, end = turn.position, min(mark.position, end_of_turns)
            last = max(last, mark.position)
            if turn.message < 0:
                unnamed.append((start, end))
                continue
            known = turns[turn.message] or (0, 0)
            if end - start > known[1] - known[0]:  # loops that look and write nothing do not count
                turns[turn.message] = (start, end)
        if mark.kind == "enter":
            opened.append(mark)
            open_of[mark.loop] += 1
    runs = tuple(run for run in text._runs if run.message >= 0)
    _add_turns(turns, runs, unnamed)
    last = max(last, *(run.end for run in runs[-1:]), 0)
    prompt = plain[slice(*prompts[-1])] if prompts else plain[last:]
    return Rendering(
        text=plain,
        runs=runs,
        beside=tuple(run for run in text._runs if run.message < 0),
        turns=tuple(turns),
        generation_prompt=prompt,
        generated=tuple(_between(text._marks, "generation", "generated")),
        is_dated=is_dated,
    )


def _add_turns(
    turns: list[tuple[int, int] | None], runs: Sequence[Run], written: Sequence[tuple[int, int]]
) -> None:
    """Find turns in what loops over numbers, or over groups of messages, wrote each time.

    The last message that is written there ends with it; alone, it begins with it, too.
    """
    starts = [run.start for run in runs]
    ways: dict[int, list[tuple[int, int, tuple[int, int]]]] = {}
    for start, end in written:
        inside = runs[bisect_left(starts, start) : bisect_left(starts, end)]
        messages = [index for index, _ in groupby(run.message for run in inside)]
        if messages and all(turns[index] is None for index in messages):
            first = next(run.start for run in inside if run.message == messages[-1])
            turn = (start if len(messages) == 1 else first, end)
            ways.setdefault(messages[-1], []).append((len(messages), start - end, turn))
    for index, found in ways.items():
        turns[index] = min(found)[2]


def _between(marks: Iterable[Mark], start: str, end: str) -> list[tuple[int, int]]:
    """Return the stretches between a mark of one kind and the next of another."""
    stretches: list[tuple[int, int]] = []
    position = -1
    for mark in marks:
        if mark.kind == start:
            position = mark.position
        elif mark.kind == end:
            stretches.append((position, mark.position))
    return stretches


# Jinja, as transformers sets it up (utils/chat_template_utils.py), with origins kept


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
        self._loops += 1
        loop = nodes.Const(self._loops)
        target: nodes.Expr = nodes.Const(None)  # a tuple is not a message
        if isinstance(node.target, nodes.Name):
            target = nodes.Name(node.target.name, "load")
        enter = _mark("enter", node.lineno, loop, target)
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
    """Return a call of `_Sandbox.mark`, which has no name that a template could write."""
    mark = nodes.EnvironmentAttribute("mark")
    call = nodes.Call(mark, [nodes.Const(kind), *arguments], [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line)
    return output


class _Context(Context):
    message = -1  # the one that a loop is at


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
    context_class = _Context
    concat = staticmethod(concatenate)

    @staticmethod
    @jinja2.pass_context
    def mark(context: _Context, kind: str, loop: int = 0, value: object = None) -> str:
        """Return a mark as a text of length zero."""
        message = -1
        if kind == "enter":
            if is_within(value):  # a loop over parts of a message, or over tools
                return ""
            if isinstance(value, TrackedObject):
                context.message = message = value._message
        return TrackedText("", (), (Mark(0, kind, loop, message),))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Let `", ".join(...)` keep the origins of its parts."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join" and len(args) == 1:
            args = (list(args[0]),)
            if all(isinstance(part, str) for part in args[0]):
                return join_with(owner, args[0])
        return super().call(context, function, *args, **kwargs)


@functools.lru_cache(maxsize=32)
def _compile(template: str, source: str) -> tuple[jinja2.Template, bool]:
    """Return a compiled template, and whether it has a `{% generation %}` block."""
    environment = _environment()
    try:
        tree = environment.parse(template)
        _Marking().visit(tree)
        tree.set_environment(environment)
        code: CodeType = environment.compile(tree)
    # Jinja's own, and what Python raises for the code that Jinja makes of a template: a SyntaxError
    # for a `break` outside a loop or for blocks nested too deeply, and those of constants.
    except Exception as error:
        problem = str(error.msg if isinstance(error, SyntaxError) else error)
        if isinstance(error, jinja2.TemplateSyntaxError):
            problem = f"line {error.lineno}: {error.message}"
        raise XtokError(
            f"{source} is not a Jinja template: {problem or type(error).__name__}",
            hint="fix it, or give another with {option}",
            parameter="template",
        ) from error
    compiled = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    calls = [c for c in tree.find_all(nodes.Call) if isinstance(c.node, nodes.EnvironmentAttribute)]
    return compiled, any(call.args[0].as_const() == "generation" for call in calls)


@functools.lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
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
    if isinstance(value, (TrackedObject, TrackedItems)):
        origins = [(value._message, value._path)]
    elif isinstance(value, TrackedText):
        origins = [(run.message, run.path) for run in value._runs[:1]]
    return TrackedText(text, tuple(Run(0, len(text), m, p, -1) for m, p in origins))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    get = make_attrgetter(environment, attribute) if attribute else None
    return join_with(d, value if get is None else map(get, value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
