"""Render chat templates in a sandbox, and track the source of each character.

Templates trim, split and compare the text of messages, so markers in the text would change the
result. Instead, a tracked string keeps its source in all string operations, and loops over messages
add marks that have no characters.
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
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from xtok._lib.parsing import parse_json_field
from xtok.conversation._tracking import (
    Mark,
    Run,
    TrackedObject,
    TrackedText,
    concatenate,
    join_with,
    origin_of,
    to_json_types,
    track,
)
from xtok.errors import ChatTemplateError, XtokError
from xtok.tokenizers.display import quoted

Message: TypeAlias = Mapping[str, Any]
"""A message with `role`, `content` and other keys that the template uses."""

REASONING_KEYS = "reasoning_content", "thinking", "reasoning"
"""Keys of a message that contain the reasoning of an answer, by preference."""

_NESTING = (Mapping, list, tuple)
_MAX_DEPTH = 100


class Rendering(NamedTuple):
    """A rendered conversation, with the source of each part of the text."""

    text: str
    runs: tuple[Run, ...]  # ranges that come from messages, in order
    input_runs: tuple[Run, ...]  # ranges that come from `tools` and `documents`
    turns: tuple[tuple[int, int] | None, ...]  # for each message, its range in the loop's output
    generation_prompt: str  # text after the last message
    # Ranges in `{% generation %}` blocks; None if the template has no blocks.
    generation_blocks: tuple[tuple[int, int], ...] | None
    is_dated: bool  # whether the template uses the date


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    source: str = "the chat template",
) -> Rendering:
    """Render messages like `apply_chat_template` of Transformers.

    `template` is Jinja source. `messages` are from `message_dicts`. `source` is the name of the
    template in errors.
    """
    variables = variables or {}
    dates: list[str] = []

    def strftime_now(form: str) -> str:
        dates.append(datetime.now().strftime(form))
        return dates[-1]

    compiled, is_training = _compile(template, source)
    context = compiled.new_context(
        {
            "strftime_now": strftime_now,
            **variables,
            "messages": [
                _add_reasoning_names(track(message, i, ())) for i, message in enumerate(messages)
            ],
            "tools": track(tools, -1, ("tools",)) or None,
            "documents": track(variables.get("documents"), -1, ("documents",)),
            "add_generation_prompt": add_generation_prompt,
        }
    )
    assert isinstance(context, _Context)
    try:
        rendered = concatenate(compiled.root_render_func(context))
    # Templates can cause any Python exception, for example by adding None to a string.
    except Exception as error:
        index = context.message
        location = f" at message {index} ({messages[index]['role']})" if index >= 0 else ""
        raise ChatTemplateError(
            f"{source} raises an error{location}: {str(error) or type(error).__name__}",
            hint="change the messages, or use another template with {option}",
        ) from error
    text = rendered if isinstance(rendered, TrackedText) else TrackedText(rendered)
    _require_utf8(text, source)
    result = _make_rendering(text, len(messages), add_generation_prompt, is_dated=bool(dates))
    return result if is_training else result._replace(generation_blocks=None)


@functools.lru_cache(maxsize=32)
def date_variables(template: str) -> tuple[str, ...]:
    """Return the variables that can replace today's date in a template."""
    names: dict[str, None] = {}
    for condition in _SANDBOX.parse(template).find_all((nodes.If, nodes.CondExpr)):
        if "strftime_now" in [name.name for name in condition.find_all(nodes.Name)]:
            tests = condition.find_all(nodes.Test)
            defined = (test.node for test in tests if test.name == "defined")
            names |= {node.name: None for node in defined if isinstance(node, nodes.Name)}
    return tuple(names)


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Return the names of a template's variables."""
    return frozenset(meta.find_undeclared_variables(_SANDBOX.parse(template)))


def has_generation_blocks(template: str) -> bool:
    """Whether a template has `{% generation %}` blocks around answers."""
    return _compile(template, "the chat template")[1]


def message_dicts(messages: Any) -> list[dict[str, Any]]:
    """Convert messages to dicts, and remove null and NaN values, like Transformers.

    Null values inside other values, such as the arguments of a call, are kept.
    """
    chat: list[dict[str, Any]] = []
    for i, value in enumerate(getattr(messages, "messages", messages)):
        if _is_deep(value):
            problem = f"message {i} is nested more than {_MAX_DEPTH} levels deep"
            raise XtokError(problem, hint="write its content as text, or as a list of parts")
        message = to_json_types(value)
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.isprintable():
            raise XtokError(
                f"message {i} has no role",
                hint='write each message as an object such as {"role": "user", "content": "Hello"}',
            )
        chat.append({key: item for key, item in message.items() if not is_missing(item)})
    return chat


def _is_deep(value: Any, levels: int = _MAX_DEPTH) -> bool:
    """Whether a value is nested more than `levels` levels deep."""
    if not isinstance(value, _NESTING):
        return False
    items = value.values() if isinstance(value, Mapping) else value
    return not levels or any(_is_deep(item, levels - 1) for item in items)


def _add_reasoning_names(message: TrackedObject) -> TrackedObject:
    reasoning = next((message[name] for name in REASONING_KEYS if name in message), None)
    if reasoning is not None:
        # Templates can write `message | tojson`, so the key order is the same as in Transformers.
        items = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        message.clear()
        message.update(items)
    return message


def tool_schemas(tools: Any) -> list[Any] | None:
    """Convert schemas, JSON strings or functions to a list of schemas."""
    if isinstance(tools, str):  # datasets with different schemas store tools as JSON strings
        tools = parse_json_field(tools, "the tools", _TOOLS_HINT)
    if is_missing(tools):
        return None
    if not isinstance(tools, (list, tuple)):
        raise _tools_error(tools)
    return [_tool_schema(tool) for tool in tools] or None


def _tool_schema(tool: Any) -> Any:
    if isinstance(tool, str):
        tool = parse_json_field(tool, "a tool", _TOOLS_HINT)
    if isfunction(tool) or ismethod(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool := to_json_types(tool), dict):
        raise _tools_error(tool)
    return tool


_TOOLS_HINT = 'write tools as [{"type": "function", "function": {"name": …}}, …]'


def _tools_error(value: Any) -> XtokError:
    problem = f"the tools contain {quoted(repr(value)[:40])}, which is not a JSON schema"
    return XtokError(problem, hint=_TOOLS_HINT)


def is_missing(value: Any) -> bool:
    """Whether a value is null or NaN, which pandas uses for missing values."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _require_utf8(text: TrackedText, source: str) -> None:
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        hits = [r.message for r in text._runs if r.start <= error.start < r.end and r.message >= 0]
        culprit = f"message {hits[0]}" if hits else source
        raise XtokError(
            f"{culprit} contains the unpaired surrogate {text[error.start]!a}",
            hint="write both surrogates of the pair, or the character itself",
        ) from error


def _make_rendering(
    text: TrackedText, count: int, add_generation_prompt: bool, *, is_dated: bool
) -> Rendering:
    plain_text = str.__str__(text)
    prompts = _positions_between(text._marks, "prompt", "prompted") if add_generation_prompt else []
    runs = tuple(run for run in text._runs if run.message >= 0)
    turns, last = _turns(text._marks, count, prompts[-1][0] if prompts else len(plain_text), runs)
    last = max(last, *(run.end for run in runs[-1:]), 0)
    return Rendering(
        text=plain_text,
        runs=runs,
        input_runs=tuple(run for run in text._runs if run.message < 0),
        turns=turns,
        generation_prompt=plain_text[slice(*prompts[-1])] if prompts else plain_text[last:],
        generation_blocks=tuple(_positions_between(text._marks, "generation", "generated")),
        is_dated=is_dated,
    )


def _turns(
    marks: Sequence[Mark], count: int, limit: int, runs: Sequence[Run]
) -> tuple[tuple[tuple[int, int] | None, ...], int]:
    """Return the turn of each message, and the end of the last iteration of a loop."""
    turns: list[tuple[int, int] | None] = [None] * count
    last = 0
    open_marks: list[Mark] = []
    num_open = Counter[int]()  # number of open marks for each loop
    other_outputs: list[tuple[int, int]] = []  # output of loops over values that are not messages
    for mark in marks:
        # Close the open marks of the loop, because `continue` and `break` skip `leave` marks.
        while mark.loop and num_open[mark.loop]:
            turn = open_marks.pop()
            num_open[turn.loop] -= 1
            start, end = turn.position, min(mark.position, limit)
            last = max(last, mark.position)
            if turn.message < 0:
                other_outputs.append((start, end))
                continue
            longest = turns[turn.message] or (0, 0)
            if end - start > longest[1] - longest[0]:  # ignores loops without output
                turns[turn.message] = (start, end)
        if mark.kind == "enter":
            open_marks.append(mark)
            num_open[mark.loop] += 1
    _add_turns(turns, runs, other_outputs)
    return tuple(turns), last


def _add_turns(
    turns: list[tuple[int, int] | None], runs: Sequence[Run], outputs: Sequence[tuple[int, int]]
) -> None:
    """Add the turns of messages in loops over numbers or over groups of messages.

    The turn of the last message in an iteration ends with the iteration. If the iteration writes
    only one message, the turn is the whole iteration.
    """
    starts = [run.start for run in runs]
    turn_candidates: dict[int, list[tuple[int, int, tuple[int, int]]]] = {}
    for start, end in outputs:
        runs_inside = runs[bisect_left(starts, start) : bisect_left(starts, end)]
        messages = [index for index, _ in groupby(run.message for run in runs_inside)]
        if messages and all(turns[index] is None for index in messages):
            first = next(run.start for run in runs_inside if run.message == messages[-1])
            turn = (start if len(messages) == 1 else first, end)
            turn_candidates.setdefault(messages[-1], []).append((len(messages), start - end, turn))
    for index, candidates in turn_candidates.items():
        turns[index] = min(candidates)[2]


def _positions_between(marks: Iterable[Mark], start: str, end: str) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    position = -1
    for mark in marks:
        if mark.kind == start:
            position = mark.position
        elif mark.kind == end:
            ranges.append((position, mark.position))
    return ranges


# Jinja with the settings of Transformers (utils/chat_template_utils.py), and with tracking


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja declares a set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = _mark("generation", line), _mark("generated", line)
        return nodes.Scope([start, *body, end], lineno=line)


class _Marking(NodeTransformer):
    """Adds marks around loop bodies and generation prompts."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:
        output = [*node.find_all((nodes.Output, nodes.CallBlock, nodes.FilterBlock))]
        self.generic_visit(node)
        if not output:  # such a loop can be a quadratic search, which marks would slow down
            return node
        self._loops += 1
        loop = nodes.Const(self._loops)
        target: nodes.Expr = nodes.Const(None)  # for a loop over tuples
        if isinstance(node.target, nodes.Name):
            target = nodes.Name(node.target.name, "load")
        enter = _mark("enter", node.lineno, loop, target)
        node.body = [enter, *node.body, _mark("leave", node.lineno, loop)]
        return [node, _mark("leave", node.lineno, loop)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Join the operands of `~` with `environment.concat`, which keeps sources."""
        self.generic_visit(node)
        concat = nodes.EnvironmentAttribute("concat")
        return nodes.Call(concat, [nodes.List(node.nodes)], [], None, None)

    def visit_If(self, node: nodes.If) -> nodes.Node:
        self.generic_visit(node)
        names = [node.test, *node.test.find_all(nodes.Name)]
        if any(isinstance(n, nodes.Name) and n.name == "add_generation_prompt" for n in names):
            start, end = _mark("prompt", node.lineno), _mark("prompted", node.lineno)
            node.body = [start, *node.body, end]
        return node


def _mark(kind: str, line: int, *arguments: nodes.Expr) -> nodes.Node:
    mark = nodes.EnvironmentAttribute("mark")
    call = nodes.Call(mark, [nodes.Const(kind), *arguments], [], None, None)
    return nodes.Output([call]).set_lineno(line)


class _Context(Context):
    message = -1  # index of the loop's current message


class _Sandbox(ImmutableSandboxedEnvironment):
    context_class = _Context
    concat = staticmethod(concatenate)

    @staticmethod
    @jinja2.pass_context
    def mark(context: _Context, kind: str, loop: int = 0, value: object = None) -> str:
        message = -1
        if kind == "enter" and (origin := origin_of(value)):
            message, path = origin
            if path:  # a loop over parts of a message, or over tools
                return ""
            context.message = message
        return TrackedText("", (), (Mark(0, kind, loop, message),))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join" and len(args) == 1:
            args = (list(args[0]),)
            if all(isinstance(part, str) for part in args[0]):
                return join_with(owner, args[0])
        return super().call(context, function, *args, **kwargs)


@functools.lru_cache(maxsize=32)
def _compile(template: str, source: str) -> tuple[jinja2.Template, bool]:
    try:
        tree = _SANDBOX.parse(template)
        _Marking().visit(tree)
        tree.set_environment(_SANDBOX)
        code: CodeType = _SANDBOX.compile(tree)
    # Python cannot compile some code that Jinja generates, such as `break` outside a loop.
    except Exception as error:
        problem = str(error.msg if isinstance(error, SyntaxError) else error)
        if isinstance(error, jinja2.TemplateSyntaxError):
            problem = f"line {error.lineno}: {error.message}"
        raise ChatTemplateError(
            f"{source} is not a Jinja template: {problem or type(error).__name__}",
            hint="fix the template, or use another template with {option}",
        ) from error
    compiled = jinja2.Template.from_code(_SANDBOX, code, _SANDBOX.make_globals(None))
    return compiled, tree.find(nodes.Scope) is not None  # body of a `{% generation %}` block


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to tracked JSON, without the HTML escapes of Jinja's `tojson`."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    origin = origin_of(value)
    return TrackedText(text, (Run(0, len(text), *origin, -1),) if origin else ())


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    get = make_attrgetter(environment, attribute) if attribute else None
    return join_with(d, value if get is None else map(get, value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_SANDBOX = _Sandbox(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_SANDBOX.filters |= {"tojson": _to_json, "join": _join}
_SANDBOX.globals["raise_exception"] = _raise_exception
