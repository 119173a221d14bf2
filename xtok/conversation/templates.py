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
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from xtok.conversation._limits import limited, spend, spend_on_call, spend_on_operator, text_size
from xtok.conversation._tracking import (
    Mark,
    Path,
    Run,
    TrackedItems,
    TrackedObject,
    TrackedText,
    concatenate,
    join_with,
    tracked,
)
from xtok.errors import XtokError

Message = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the template knows."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A conversation as text, and which message each part of it comes from."""

    text: str
    runs: tuple[Run, ...]  # the characters that come from messages, in order
    turns: tuple[tuple[int, int] | None, ...]  # what a loop over the messages wrote for each
    generation_prompt: str  # the text after the last message that asks for an answer
    generated: tuple[tuple[int, int], ...]  # within `{% generation %}` of a training template


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
    current: list[int] = []

    def mark(kind: str, loop: int = 0, value: object = None) -> str:
        spend()
        if kind == "tick":
            return ""
        if kind == "enter":
            if not isinstance(value, TrackedObject) or value._path:  # a loop over something else
                return ""
            current[:] = [value._message]
            return TrackedText("", (), (Mark(0, kind, loop, value._message),))
        return TrackedText("", (), (Mark(0, kind, loop),))

    context = {
        **(variables or {}),
        "messages": [tracked(_aliased(message), i, ()) for i, message in enumerate(messages)],
        "tools": tools or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        _MARK: mark,
    }
    try:
        with limited():
            rendered = _compile(template, source).render(context)
    except XtokError:
        raise
    # Jinja's own errors, and whatever Python raises, as for a template that adds None to a string.
    except Exception as error:
        where = ""
        if current:
            message = json.dumps(messages[current[0]], ensure_ascii=False, default=str)
            shown = message if len(message) <= 120 else f"{message[:119]}…"
            where = f" at message {current[0]}, {shown}"
        raise XtokError(
            f"{source} raises{where}: {str(error) or type(error).__name__}",
            hint="change the messages to what the template takes, or give another with {option}",
            parameter="template",
        ) from error
    text = rendered if isinstance(rendered, TrackedText) else TrackedText(rendered)
    _require_utf8(text, source)
    return _rendering(text, len(messages), add_generation_prompt)


def check_messages(messages: Sequence[Message]) -> None:
    """Check that messages are objects with a role.

    Raises:
        XtokError: naming the one that is not.
    """
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.isprintable():
            raise XtokError(
                f"message {i} has no role",
                hint='a message is an object such as {"role": "user", "content": "Hello"}',
            )


def _aliased(message: Message) -> Message:
    """Give a message's reasoning all the names that templates read it by, as transformers does."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _require_utf8(text: TrackedText, source: str) -> None:
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        at = [run.message for run in text._runs if run.start <= error.start < run.end]
        culprit = f"message {at[0]}" if at else source
        raise XtokError(
            f"{culprit} has {text[error.start]!a}, half of a surrogate pair, which is no text",
            hint="write the whole pair, or the character itself",
        ) from error


def _rendering(text: TrackedText, count: int, add_generation_prompt: bool) -> Rendering:
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
    stretches: list[tuple[int, int]] = []
    position = -1
    for mark in marks:
        if mark.kind == start:
            position = mark.position
        elif mark.kind == end:
            stretches.append((position, mark.position))
    return stretches


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
            node.body = [_mark("tick", node.lineno), *node.body]
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


def _concatenate(parts: Iterable[Any]) -> str:
    texts = list(parts)
    spend(sum(map(text_size, texts)))
    return concatenate(texts)


def _within_budget(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a filter take what it makes from the budget."""
    passed = int(hasattr(function, "jinja_pass_arg"))  # the environment, before the value

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[passed:]
        spend_on_call(name, value, [*rest, *kwargs.values()])
        return function(*args, **kwargs)

    return wrapper


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _KeepingCode
    concat = staticmethod(_concatenate)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Take what the operator makes from the budget."""
        spend_on_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Take what a method makes from the budget, and let `", ".join(...)` keep its parts."""
        method = getattr(function, "__wrapped__", function)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        spend_on_call(name, owner, [*args, *kwargs.values()])
        if name == "join" and isinstance(owner, str):
            return _join(self, args[0], owner)
        return super().call(context, function, *args, **kwargs)


@functools.lru_cache(maxsize=32)
def _compile(template: str, source: str) -> jinja2.Template:
    environment = _environment()
    try:
        tree = environment.parse(template)
        _Marking().visit(tree)
        tree.set_environment(environment)
        code: CodeType = environment.compile(tree)
    # Jinja's own, and what Python says to the code that Jinja makes of a template: a SyntaxError
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
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@functools.lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    def finalize(value: Any) -> Any:
        """Look at what is about to become text."""
        if not isinstance(value, str):
            spend(text_size(value))
        return value

    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=finalize
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    for name, function in environment.filters.items():
        environment.filters[name] = _within_budget(name, function)
    del environment.globals["lipsum"]  # it makes any number of words
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
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
    parts = list(value if get is None else map(get, value))
    spend(text_size(parts) + len(d) * len(parts))
    return join_with(d, parts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
