"""Conversations rendered and encoded once, with what the assistant wrote and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.conversation._places import MessageSpan, Places, Span, written_header
from xtok.conversation._tracking import Run, plain
from xtok.conversation.formats import FORMATS, PromptFormat
from xtok.conversation.leaves import WEIGHTS, Inputs, is_trained_on, unread_leaves
from xtok.conversation.template_files import TEMPLATE_HINT, template_source
from xtok.conversation.templates import (
    Message,
    Rendering,
    names_beside_date,
    names_read,
    plain_messages,
    plain_tools,
    render_template,
)
from xtok.errors import XtokError
from xtok.tokenizers.display import printable, quoted

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

NO_END_OF_TURN = "no token that ends the turn is a target: a model does not learn to stop there"
BEGINS_IN_PROMPT = "a token holds the end of a prompt and the beginning of its answer: not a target"
BLOCK_IN_PROMPT = "a generation block begins in the prompt: what is in the prompt is not a target"
NOT_GENERATED = "an answer is outside the template's generation blocks: it has no targets"
NO_ANSWERS = "a conversation has no targets: no message in it is the assistant's to train on"
NO_TARGETS = "an answer leaves no trace in the text: it has no targets, not even its end"
_DATED = "the template writes today's date"
_PROBE = ({"role": "user", "content": "x"},)


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What decides how messages are rendered, as `render` explains it."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = False
    template: str | Path | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """A conversation of T tokens.

    Token i is bytes `bounds[i]` to `bounds[i + 1]` of the text. The mask has what the assistant
    wrote, its tool calls and the control token that ends its turn included, its header not. Where
    a template writes no such token, the mask has the next turn's first one if it is an eos token.
    If the template has `{% generation %}` blocks, they decide, as in Transformers; but a token that
    begins before one is not a target, which Transformers counts: a model that answers a prompt has
    read it already, and never writes it.
    """

    text: str
    ids: NDArray[np.int32]  # [T]
    bounds: NDArray[np.int64]  # [T + 1]
    assistant_mask: NDArray[np.bool_]  # [T], the training targets
    message_spans: tuple[MessageSpan, ...]
    runs: tuple[Run, ...] = ()  # the characters that come from messages
    notes: tuple[str, ...] = ()  # what to know before training on it

    def record(self) -> dict[str, Any]:
        """Return the conversation as a row of training data; `labels` are -100 but for targets."""
        ids, mask = self.ids.tolist(), self.assistant_mask
        return {
            "text": self.text,
            "input_ids": ids,
            "assistant_masks": mask.astype(np.int8).tolist(),
            "labels": np.where(mask, self.ids, -100).tolist(),
            "message_spans": [asdict(span) for span in self.message_spans],
        }


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | str | None = None,
    add_generation_prompt: bool = False,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Conversation:
    """Render a conversation once, encode the text once, and find the messages in it.

    Spans come from this one rendering, so templates that rewrite earlier turns do not confuse
    them. Control tokens are recognised by their names everywhere, in a message's content too, as
    the libraries do it. All that is given is in the text, or an error or a note names it.

    Args:
        tokenizer: any one.
        messages: dicts with `role` and `content`, dataclasses or pydantic models. One whose
            `weight`, `loss_mask` or `train` is 0 is not a target.
        tools: JSON schemas of the tools, as dicts or JSON, or functions; an empty list is the same
            as None.
        add_generation_prompt: end with what asks for an answer; no message's and no target.
        template: a file, the name of one of the tokenizer's own templates or of a format
            (`FORMATS`), or Jinja itself; by default the tokenizer's own named `"default"`.
        variables: what else the template reads, as `{"enable_thinking": False}`; `documents`.

    Raises:
        XtokError: if there is no template, or it raises, or drops something (the error names the
            message and the key); or a format does not allow a message.
    """
    options = RenderOptions(
        tools=plain_tools(tools),
        add_generation_prompt=add_generation_prompt,
        template=template,
        variables=variables,
    )
    messages, options = _as_plain(tokenizer, messages, options)
    rendering = rendered(tokenizer, messages, options)
    notes = [*_account(tokenizer, messages, options, rendering), *_unread(tokenizer, options)]
    chat = encoded(tokenizer, messages, options, rendering=rendering)
    return replace(chat, notes=(*chat.notes, *dict.fromkeys(notes)))


_KNOWN_ROLES = ("assistant", "user", "system", "developer", "tool")


def _as_plain(
    tokenizer: Tokenizer, messages: Any, options: RenderOptions
) -> tuple[list[dict[str, Any]], RenderOptions]:
    """Return what is given as plain values; what templates read may be among the variables.

    A role that the template writes as it writes the assistant's is the assistant's.
    """
    variables = dict(options.variables or {})
    given = {"messages", "add_generation_prompt", *(["tools"] if options.tools else [])}
    if named := sorted(given & variables.keys()):
        raise XtokError(
            f"the template's variables have {named[0]}, which is given beside them",
            hint="leave it out of the variables",
        )
    tools = options.tools or plain_tools(variables.pop("tools", None))
    if "documents" in variables:
        variables["documents"] = plain(variables["documents"])
    options = replace(options, tools=tools, variables=variables)
    chat = plain_messages(messages)
    for role in dict.fromkeys(m["role"] for m in chat if m["role"] not in _KNOWN_ROLES):
        renamed = [m | {"role": "assistant"} if m["role"] == role else m for m in chat]
        with suppress(XtokError):
            texts = [rendered(tokenizer, way, options).text for way in (chat, renamed)]
            chat = renamed if texts[0] == texts[1] else chat
    return chat, options


def _account(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: RenderOptions,
    rendering: Rendering,
    first: int = 0,
) -> Iterator[str]:
    """Yield notes on what the template leaves out; raises for what it drops."""

    def again(inputs: Inputs) -> Rendering:
        variables = {**(options.variables or {}), "documents": inputs["documents"]}
        changed = replace(options, tools=inputs["tools"], variables=variables)
        return rendered(tokenizer, inputs["messages"], changed)

    documents = (options.variables or {}).get("documents")
    inputs = {"messages": messages, "tools": options.tools, "documents": documents}
    yield from unread_leaves(again, inputs, rendering, first)


def _unread(tokenizer: Tokenizer, options: RenderOptions) -> Iterator[str]:
    """Yield notes on variables that the template does not read."""
    template = find_template(tokenizer, options.template, tools=bool(options.tools))
    source = template.template if isinstance(template, PromptFormat) else template
    for name, value in (options.variables or {}).items():
        if name != "documents" and name not in names_read(source):
            yield f"the template does not read the variable {name}: it has no effect"
        elif isinstance(value, str) and value.strip().lower() in ("false", "true", "null", "none"):
            yield f"the variable {name} is the text {quoted(value)}, which counts as true"


def encoded(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: RenderOptions,
    tokens: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None,
    rendering: Rendering | None = None,
) -> Conversation:
    """Render plain messages as `render` does, whatever the template drops.

    Args:
        tokenizer: any one.
        messages: dicts with `role` and `content`.
        options: how.
        tokens: ids of the text and their bounds, if not those of the tokenizer's library.
        rendering: what the messages are rendered as, if it is known.
    """
    rendering = rendering or rendered(tokenizer, messages, options)
    ids, bounds = tokens or tokenizer.encode(rendering.text)[:2]
    targets = _Targets(tokenizer, messages, options, rendering, ids, bounds)
    return Conversation(
        text=rendering.text,
        ids=ids,
        bounds=bounds,
        assistant_mask=targets.mask,
        message_spans=tuple(targets.places.of_message(i, m) for i, m in enumerate(messages)),
        runs=rendering.runs,
        notes=tuple(dict.fromkeys(targets.notes())),
    )


class _Targets:
    """What the assistant wrote of one rendering: as characters, as a mask, and notes on it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        options: RenderOptions,
        rendering: Rendering,
        ids: NDArray[np.int32],
        bounds: NDArray[np.int64],
    ) -> None:
        self._tokenizer, self._messages, self._options = tokenizer, messages, options
        self._rendering, self._ids, self._bounds = rendering, ids, bounds
        self._control = np.isin(ids, list(tokenizer.table.control_names))
        self.places = Places(rendering, bounds, self._control)
        self._bytes = rendering.text.encode()
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._answers = [i for i in assistant if is_trained_on(messages[i], i)]
        self._headers = _headers(tokenizer, rendering, messages, options)
        self._blocks = self._kept_blocks([i for i in assistant if i not in self._answers])
        self._stretches = [*self._find()]  # in characters
        self.mask = self._make_mask()

    def _kept_blocks(self, left_out: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the generation blocks outside of some messages; None if there can be none."""
        turns = [turn for turn in map(self.places.whole, left_out) if turn is not None]
        if self._rendering.generated is None:
            return None
        return [
            block
            for block in self._rendering.generated
            if not any(start <= block[0] < end for start, end in turns)
        ]

    def _find(self) -> Iterator[tuple[int, int]]:
        """Yield what follows the prompt in the assistant's turns.

        The blocks of a training template decide, if it has them, but for what is in the prompt.
        """
        if self._blocks is None:
            for index in self._answers:
                yield from self.places.targets(index, self._headers[index][0], self._up_to)
        for start, end in self._blocks or ():
            for index, (header, _) in self._headers.items():
                start = self.places.after_prompt(index, start, header)
            if start < end:
                yield start, end

    def _up_to(self, index: int) -> str:
        """Return the text without the messages behind one; "" if it cannot be rendered."""
        with suppress(XtokError):
            options = replace(self._options, add_generation_prompt=False)
            return rendered(self._tokenizer, self._messages[: index + 1], options).text
        return ""

    def _make_mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._ids), np.bool_)
        for start, end in self._stretches:
            first, stop = self.places.span(start, end).tokens
            first += self._begins_in_prompt(start, end)
            mask[first : self._with_end(stop)] = True
        for run in self._rendering.runs:  # a template may write one message within another
            if self._messages[run.message]["role"] != "assistant" and run.path[:1] != ("role",):
                mask[slice(*self.places.span(run.start, run.end).tokens)] = False
        return mask

    def _begins_in_prompt(self, start: int, end: int) -> bool:
        """Whether the first token of a stretch has a part of what is before it."""
        span = self.places.span(start, end)
        first, stop = span.tokens
        return first < stop and bool(self._bounds[first] < span.bytes[0])

    def _with_end(self, stop: int) -> int:
        """Return the token behind an answer, or behind an eos token that follows its turn.

        As GLM 4.5 ends a turn with the next one's token; others write a space before it.
        """
        if self._blocks is not None or self._control[stop - 1]:
            return stop
        rest = self._bytes[self._bounds[stop] :]
        place = self._bounds[stop] + len(rest) - len(rest.lstrip())
        behind = int(np.searchsorted(self._bounds, place))
        roles = self._tokenizer.table.roles
        ends = (*roles.get("eos", ()), *roles.get("turn_end", ()))
        return behind + 1 if rest.strip() and self._ids[behind] in ends else stop

    def notes(self) -> Iterator[str]:
        """Yield what to know before training on these targets."""
        yield from _not_targets(self._messages, self._answers, self._options)
        if any(self._begins_in_prompt(*stretch) for stretch in self._stretches):
            yield BEGINS_IN_PROMPT
        for index in self._answers if self._blocks is None else ():
            header, is_prompt = self._headers[index]
            if is_prompt and (rest := self.places.missing_prompt(index, header)):
                yield (
                    f"the generation prompt ends with {quoted(printable(rest))}, but the template "
                    "does not write this before an answer"
                )
        if not {start for start, _ in self._blocks or ()} <= {a for a, _ in self._stretches}:
            yield BLOCK_IN_PROMPT
        if any(map(self._is_left_out, self._answers)):
            yield NO_TARGETS if self._blocks is None else NOT_GENERATED
        if self._rendering.is_dated:
            yield _note_on_date(self._tokenizer, self._messages, self._options)
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False)).reshape(-1, 2)
        for start, stop in edges.tolist():
            if _end_of_turn(self._control, self._bounds, self._bytes, start, stop) is None:
                yield NO_END_OF_TURN

    def _is_left_out(self, answer: int) -> bool:
        """Whether an answer has no targets."""
        whole = self.places.whole(answer)
        if whole is None:
            return not self._stretches
        return not any(whole[0] < end and start < whole[1] for start, end in self._stretches)


def _not_targets(
    messages: Sequence[Message], answers: Sequence[int], options: RenderOptions
) -> Iterator[str]:
    """Yield notes on what is not a target, in spite of its role or weight."""
    if not answers and not options.add_generation_prompt:
        yield NO_ANSWERS
    for message in messages:
        role = message["role"]
        if role not in _KNOWN_ROLES:
            yield f"messages of the role {role} are no targets: the assistant's are written apart"
        for name in WEIGHTS if role != "assistant" else ():
            if message.get(name):
                yield f"{name} 1 of the {role}'s messages has no effect: they are no targets"


def _end_of_turn(
    control: NDArray[np.bool_], bounds: NDArray[np.int64], text: bytes, start: int, stop: int
) -> int | None:
    """Return the control token that tokens `start` to `stop` end with, but for white space."""
    for i in reversed(range(start, stop)):
        if control[i]:
            return i
        if text[bounds[i] : bounds[i + 1]].strip():
            break
    return None


def _note_on_date(tokenizer: Tokenizer, messages: Sequence[Message], options: RenderOptions) -> str:
    """Return the note on a template that writes today's date, with the variable that sets it."""
    template = find_template(tokenizer, options.template, tools=bool(options.tools))
    for name in names_beside_date(template) if isinstance(template, str) else ():
        variables = {**(options.variables or {}), name: "1 January 2026"}
        with suppress(XtokError):
            if not rendered(tokenizer, messages, replace(options, variables=variables)).is_dated:
                return (
                    f"{_DATED}: set its variable {name} for the same ids on each day, in a file by "
                    "each conversation's chat_template_kwargs"
                )
    return f"{_DATED}, and no variable sets another"


def _headers(
    tokenizer: Tokenizer,
    rendering: Rendering,
    messages: Sequence[Message],
    options: RenderOptions,
) -> dict[int, tuple[str, bool]]:
    """Return the header of each answer, and whether it is a generation prompt; "" if unknown."""
    prompts: dict[str, str] = {}  # by the role of the message before the answer

    def prompt(before: Message) -> str:
        role = before["role"]
        if role not in prompts:
            is_last = options.add_generation_prompt and messages[-1]["role"] == role
            prompts[role] = (
                rendering.generation_prompt if is_last else _prompt_of(tokenizer, before, options)
            )
        return prompts[role]

    written: str | None = None  # by a template that has no generation prompt
    headers: dict[int, tuple[str, bool]] = {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            headers[index] = header = prompt(messages[max(0, index - 1)]), True
            if not header[0] and not prompt(_PROBE[0]):
                if written is None:
                    written = _written_header(tokenizer, rendering, messages, options)
                headers[index] = written, False
    return headers


def _prompt_of(tokenizer: Tokenizer, before: Message, options: RenderOptions) -> str:
    """Return the generation prompt after a message; "" if it has none, or is unknown."""
    asking = replace(options, tools=None, add_generation_prompt=True)
    probes: list[Sequence[Message]] = [_PROBE]
    if before["role"] not in ("assistant", "system", "user"):
        # DeepSeek's own templates take no objects
        result = {**before, "content": "x"}
        probes = [[*_calling(result, called_with), result] for called_with in (None, "{}")] + probes
    # A template that wants more than that leaves the header unknown.
    for probe in probes:
        with suppress(XtokError):
            return rendered(tokenizer, probe, asking).generation_prompt
    return ""


def _written_header(
    tokenizer: Tokenizer,
    rendering: Rendering,
    messages: Sequence[Message],
    options: RenderOptions,
) -> str:
    """Return the header that a template writes before an answer; that of a probe, if it can be."""
    probe = [*_PROBE, {"role": "assistant", "content": "x"}] * 2
    with suppress(XtokError):
        plain_options = replace(options, tools=None, add_generation_prompt=False)
        return written_header(rendered(tokenizer, probe, plain_options), probe)
    return written_header(rendering, messages)


def tool_suffix(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | str | None = None,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the ids that messages of tools add after what a model wrote.

    They begin right after the token that ends the model's turn, so with the line break that many
    templates write there; where that token is the next turn's first (GLM 4.5), with it. They end
    with what asks for the next answer. `[*prompt, *written, *tool_suffix(tokenizer, messages)]` is
    then the next prompt: nothing is tokenized twice.

    Args:
        tokenizer: any one.
        messages: the tools' messages, or a conversation that ends with them. Alone, they follow a
            call of the first one's tool, by its `name`.
        tools: JSON schemas of the tools.
        template: as in `render`.
        variables: what else the template reads.

    Returns:
        int32 `[T]`.

    Raises:
        XtokError: as `render` does; also if what the model wrote ends within a token, or goes on
            after the tools' messages.
        ValueError: if there are no messages.
    """
    messages = plain_messages(messages)
    if not messages:
        raise ValueError("messages is empty")
    if all(message["role"] != "assistant" for message in messages):
        messages = [*_calling(messages[0]), *messages]
    options = RenderOptions(
        tools=plain_tools(tools), add_generation_prompt=True, template=template, variables=variables
    )
    messages, options = _as_plain(tokenizer, messages, options)
    rendering = rendered(tokenizer, messages, options)
    chat = encoded(tokenizer, messages, options, rendering=rendering)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for _ in _account(tokenizer, messages, options, rendering, last + 1):
        pass
    turns: list[Span] = []
    for i, span in enumerate(chat.message_spans[last:], start=last):
        if span.whole is None:
            raise _no_suffix(f"message {i}, the {span.role}'s, is not in the text")
        turns.append(span.whole)
    answer, *others = (turn.tokens for turn in turns)
    stop = min([answer[1], *(other[0] for other in others)])
    written = answer[0] + np.flatnonzero(chat.assistant_mask[slice(*answer)])
    if (written >= stop).any():
        raise _no_suffix(f"message {last}, the assistant's, goes on after the tools' messages")
    if len(written):
        control = np.isin(chat.ids, list(tokenizer.table.control_names))
        # Some training templates count the line break behind the end of a turn to the turn.
        end = _end_of_turn(control, chat.bounds, chat.text.encode(), answer[0], written[-1] + 1)
        if end is not None:
            return chat.ids[end + 1 :]
    # No control token ends the turn, so all of it was there when the tools were called.
    if chat.bounds[answer[1]] == turns[0].bytes[1] and stop == answer[1]:
        return chat.ids[stop:]
    raise _no_suffix(f"message {last}, the assistant's, does not end with a token")


def _no_suffix(problem: str) -> XtokError:
    return XtokError(
        problem,
        hint="give a template that knows tools and ends turns with control tokens, with {option}",
        parameter="template",
    )


def is_prefix_preserving(
    tokenizer: Tokenizer,
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether the ids up to a tool call stay the same when the tool's message follows.

    A loop that appends tools' messages needs no more. TRL's `is_chat_template_prefix_preserving`
    asks the same.

    Raises:
        XtokError: as `render` does, as of templates that take no messages of tools.
    """
    options = RenderOptions(template=template, variables=variables)
    tool = {"role": "tool", "name": "dummy", "content": "dummy"}
    call = _calling(tool)
    try:
        before = rendered(tokenizer, call, options).text
    except XtokError:  # DeepSeek's own templates take no objects
        call = _calling(tool, called_with="{}")
        before = rendered(tokenizer, call, options).text
    asking = replace(options, add_generation_prompt=True)
    after = rendered(tokenizer, [*call, tool], asking).text
    first, full = (tokenizer.encode(text).ids for text in (before, after))
    return np.array_equal(full[: len(first)], first)


def _calling(message: Message, called_with: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation that calls the tool of a message."""
    function = {"name": message.get("name", "tool"), "arguments": called_with or {}}
    call_id = message.get("tool_call_id", "000000000")  # Mistral's templates want nine characters
    call = {"type": "function", "id": call_id, "function": function}
    return [*_PROBE, {"role": "assistant", "content": "", "tool_calls": [call]}]


def rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], options: RenderOptions
) -> Rendering:
    """Render a conversation of plain messages without encoding it."""
    chosen = find_template(tokenizer, options.template, tools=bool(options.tools))
    names: dict[str, Any] = dict(tokenizer.special_token_names)
    source = "the chat template"
    if isinstance(chosen, PromptFormat):
        chosen.check(messages, tokenizer)
        names |= chosen.variables(tokenizer.table)
        source = f"the format {chosen.name}"
        chosen = chosen.template
    names |= options.variables or {}
    return render_template(
        chosen,
        messages,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        variables=names,
        source=f"{source} of {tokenizer.vocabulary.model_id}",
    )


def find_template(
    tokenizer: Tokenizer, template: str | Path | None = None, *, tools: bool = False
) -> str | PromptFormat:
    """Return the Jinja or the format that `template` names, else the tokenizer's own template.

    Raises:
        XtokError: if the tokenizer has none, or the file cannot be read.
    """
    templates = tokenizer.chat_templates
    hint = TEMPLATE_HINT
    if template in (None, "default"):
        for name in ("tool_use", "default") if tools else ("default",):
            if name in templates:
                return templates[name]
        problem = f"{tokenizer.vocabulary.model_id} has no chat template"
        if templates:
            problem += f" by default, but the named ones {', '.join(templates)}"
            hint = f"give the name of one, or {hint.removeprefix('give ')}"
    elif template in templates:
        return templates[str(template)]
    elif template in FORMATS:
        return FORMATS[str(template)]
    else:
        return template_source(template)
    raise XtokError(problem, hint=hint, parameter="template")
