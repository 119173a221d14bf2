r"""Render and encode a conversation once, and mark the assistant's tokens.

Rendering has four steps:

1. `_prepare` converts messages, tools and documents to JSON types.
2. `templates.render_template` returns a `Rendering`: the text, its runs (ranges of characters that
   come from a string in a message) and its turns (for each message, the range that the template
   wrote in its loop).
3. `leaves.unread_leaves` raises an error if the template drops a value.
4. `Targets` encodes the text. `Spans` finds the end of the header in each answer's turn. The
   characters after the header are targets.

    message  {"role": "assistant", "content": " Yes", "tool_calls": [… "f" … {"n": 5}]}
    turn     <turn>assistant\nYes f.n=5<end>\n
    runs     `Yes` is ("content",) from offset 1, `f` is ("tool_calls", 0, "function", "name")
    target                     Yes f.n=5<end>

In four cases, xtok compares the text with a second rendering:

- A number such as 5 has no run. If the number 6 gives the same text, the template drops the number
  (`_LeafCheck.depends_on`).
- The header of an answer ends like the generation prompt of a short conversation (`_prompt_after`).
  Without a generation prompt, the header is compared with the header of another role
  (`written_header`).
- If an answer's turn also contains a tool result, the answer ends at the first difference from a
  rendering without tool results (`_answers_without`).
- A role such as `model` is replaced by `assistant` if the text stays the same (`_prepare`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.conversation._spans import MessageSpan, Span, Spans, written_header
from xtok.conversation._tracking import Run, to_json_types
from xtok.conversation.formats import FORMATS, PromptFormat
from xtok.conversation.leaves import WEIGHT_KEYS, answer_indices, unread_leaves
from xtok.conversation.template_files import TEMPLATE_HINT, template_source
from xtok.conversation.templates import (
    Message,
    Rendering,
    date_variables,
    message_dicts,
    render_template,
    template_variables,
    tool_schemas,
)
from xtok.errors import ChatTemplateError, XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import printable, quoted

NO_END_OF_TURN = "the targets contain no end-of-turn token, so the model does not learn to stop"
BEGINS_IN_PROMPT = (
    "a token spans the end of the prompt and the start of the answer, so it is not a target"
)
BLOCK_IN_PROMPT = (
    "a generation block starts within the prompt; the part in the prompt is not a target"
)
NOT_GENERATED = "an answer is outside the template's generation blocks, so it has no targets"
NO_ANSWERS = "the conversation has no targets, because it has no assistant message to train on"
NO_TARGETS = "an answer has no targets, because the chat template writes nothing for the answer"
_DATED = "the template writes today's date"
_PROBE = ({"role": "user", "content": "x"},)


@dataclass(frozen=True)
class Renderer:
    """A tokenizer and the options of `render`."""

    tokenizer: Tokenizer
    template: str | Path | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None  # after `_prepare`, a list of JSON schemas
    add_generation_prompt: bool = False

    def resolve_template(self) -> str | PromptFormat:
        """Return the Jinja source or the prompt format; see `find_template`."""
        return find_template(self.tokenizer, self.template, tools=bool(self.tools))

    def source(self) -> str:
        """Return the Jinja source of the template or format."""
        template = self.resolve_template()
        return template.template if isinstance(template, PromptFormat) else template

    def conversation(self, messages: Any) -> Conversation:
        """Render and encode messages, and check for dropped values; see `render`."""
        renderer, messages = _prepare(self, messages)
        rendering = renderer.render(messages)
        notes = [*unread_leaves(renderer, messages, rendering), *_variable_notes(renderer)]
        chat = Targets(renderer, messages, rendering).conversation()
        return replace(chat, notes=(*chat.notes, *dict.fromkeys(notes)))

    def render(self, messages: Sequence[Message], **changes: Any) -> Rendering:
        """Render messages to text. `changes` overrides options of this renderer."""
        if changes:
            return replace(self, **changes).render(messages)
        tokenizer, template, source = self.tokenizer, self.resolve_template(), "the chat template"
        names: dict[str, Any] = dict(tokenizer.special_token_names)
        if isinstance(template, PromptFormat):
            template.check(messages, tokenizer)
            names |= template.variables(tokenizer.table)
            source = f"the format {template.name}"
            template = template.template
        return render_template(
            template,
            messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            variables={**names, **self.variables},
            source=f"{source} of {tokenizer.vocabulary.model_id}",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """A rendered conversation of T tokens.

    Token i consists of the bytes from `bounds[i]` to `bounds[i + 1]` of the text. The mask covers
    the assistant's text, tool calls and end-of-turn token, but not the header. If the template
    writes no end-of-turn token, the mask includes the eos token that starts the next turn.

    If the template has `{% generation %}` blocks, the blocks define the mask, as in Transformers. A
    token that starts before a block and ends inside the block is not a target, because the prompt
    already contains this token. In Transformers, such a token is a target.
    """

    text: str
    ids: NDArray[np.int32]  # [T], token ids
    bounds: NDArray[np.int64]  # [T + 1], byte offset of each token, then the length of the text
    assistant_mask: NDArray[np.bool_]  # [T], True at training targets
    message_spans: tuple[MessageSpan, ...]
    runs: tuple[Run, ...] = ()  # ranges of characters that come from messages
    notes: tuple[str, ...] = ()  # warnings

    def record(self) -> dict[str, Any]:
        """Return the conversation as a training row. The labels are -100 outside targets."""
        ids, mask = self.ids.tolist(), self.assistant_mask
        return {
            "text": self.text,
            "input_ids": ids,
            "assistant_masks": mask.astype(np.int8).tolist(),
            "labels": np.where(mask, self.ids, -100).tolist(),
            "message_spans": [asdict(span) for span in self.message_spans],
        }

    def first(self, size: int) -> Conversation:
        """Return a copy with only the first tokens. The text and the spans do not change."""
        ids, mask = self.ids[:size], self.assistant_mask[:size]
        return replace(self, ids=ids, bounds=self.bounds[: size + 1], assistant_mask=mask)

    def renumber(self, new_indices: Mapping[int, int]) -> Conversation:
        """Return a copy with new message indices in the runs.

        Messages that are not in `new_indices` get negative indices.
        """
        runs = (r._replace(message=new_indices.get(r.message, -2 - r.message)) for r in self.runs)
        return replace(self, runs=tuple(runs))


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | str | None = None,
    add_generation_prompt: bool = False,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Conversation:
    """Render and encode a conversation, and locate its messages and targets.

    If a message contains the name of a control token, the name is encoded as this control token.
    Transformers does the same. If the template drops a value, the result is an error or a note.

    Args:
        tokenizer: the tokenizer of the model.
        messages: dicts with `role` and `content`, dataclasses or pydantic models. A message is not
            a target if its `weight`, `loss_mask` or `train` is 0.
        tools: JSON schemas (dicts or JSON strings) or functions.
        add_generation_prompt: append the generation prompt, which is not a target.
        template: a file, Jinja source, the name of a format (`FORMATS`), or the name of a template
            of the tokenizer. The default is the tokenizer's template.
        variables: other template variables, such as `{"enable_thinking": False}` or `documents`.

    Raises:
        XtokError: if the template is missing, raises an error or drops an input value, or if the
            format does not support a message.
    """
    renderer = Renderer(tokenizer, template, variables or {}, tools, add_generation_prompt)
    return renderer.conversation(messages)


_KNOWN_ROLES = ("assistant", "user", "system", "developer", "tool")


def _prepare(renderer: Renderer, messages: Any) -> tuple[Renderer, list[dict[str, Any]]]:
    """Convert messages, tools and documents to JSON types.

    `assistant` replaces every role that gives the same text as the role `assistant`.
    """
    tools, variables = tool_schemas(renderer.tools), dict(renderer.variables)
    arguments = {"messages", "add_generation_prompt", *(["tools"] if tools else [])}
    for name, value in variables.items():
        reasons = {
            "a separate argument": name in arguments,
            "not a string": not isinstance(name, str),
            "not a list": name == "documents" and not isinstance(value, list | tuple | None),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            problem = f"the template variables contain {name}, which is {reason}"
            raise XtokError(problem, hint="remove it from the variables")
    tools = tools or tool_schemas(variables.pop("tools", None))
    if "documents" in variables:
        variables["documents"] = to_json_types(variables["documents"])
    renderer = replace(renderer, tools=tools, variables=variables)
    chat = message_dicts(messages)
    for role in dict.fromkeys(m["role"] for m in chat if m["role"] not in _KNOWN_ROLES):
        renamed = [m | {"role": "assistant"} if m["role"] == role else m for m in chat]
        with suppress(XtokError):
            if renderer.render(chat).text == renderer.render(renamed).text:
                chat = renamed
    return renderer, chat


def _variable_notes(renderer: Renderer) -> Iterator[str]:
    source = renderer.source()
    for name, value in renderer.variables.items():
        if name != "documents" and name not in template_variables(source):
            yield f"the variable {name} is ignored, because the template does not use it"
        elif isinstance(value, str) and value.strip().lower() in ("false", "true", "null", "none"):
            yield f"the variable {name} is the text {quoted(value)}, which is true in Jinja"


class Targets:
    """Encodes a rendering and finds its targets, without a check for dropped values."""

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        rendering: Rendering,
        tokens: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None,
    ) -> None:
        """Find the targets. `tokens` is the text's ids and bounds; None encodes the text."""
        self._renderer, self._messages, self._rendering = renderer, messages, rendering
        self._ids, self._bounds = tokens or renderer.tokenizer.encode(rendering.text)[:2]
        table, self._bytes = renderer.tokenizer.table, rendering.text.encode()
        self._end_ids = (*table.roles.get("eos", ()), *table.roles.get("turn_end", ()))
        self._control = np.isin(self._ids, list(table.control_names))
        self._spans = Spans(rendering, self._bounds, self._control)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._answers = answer_indices(messages)
        self._headers = self._find_headers(assistant)
        self._blocks = self._answer_blocks([i for i in assistant if i not in self._answers])
        self._target_chars = [*self._find_targets()]  # target ranges in characters
        self._mask = self._make_mask()

    def conversation(self) -> Conversation:
        """Return the encoded conversation with its notes."""
        return Conversation(
            text=self._rendering.text,
            ids=self._ids,
            bounds=self._bounds,
            assistant_mask=self._mask,
            message_spans=tuple(self._spans.locate(i, m) for i, m in enumerate(self._messages)),
            runs=self._rendering.runs,
            notes=tuple(dict.fromkeys(self._notes())),
        )

    def _answer_blocks(self, untrained: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the generation blocks, except in turns with weight 0, or None without blocks.

        A block after a turn belongs to this turn. For example, Phi 3 has a block for the last eos
        token.
        """
        if (blocks := self._rendering.generation_blocks) is None:
            return None
        is_trained = dict.fromkeys(self._answers, True) | dict.fromkeys(untrained, False)
        spans = ((self._spans.whole(index), flag) for index, flag in is_trained.items())
        turns = [(0, True), *sorted((span[0], flag) for span, flag in spans if span)]
        return [b for b in blocks if turns[bisect(turns, (b[0], True)) - 1][1]]

    def _find_targets(self) -> Iterator[tuple[int, int]]:
        """Yield the target ranges in characters, from generation blocks or from answers."""
        if self._blocks is None:
            later = [run for i in self._answers for run in self._spans.turn_runs(i)[1]]
            texts = self._answers_without({run.message for run in later}) if later else {}
            for index in self._answers:
                header = self._headers[index][0]
                yield from self._spans.targets(index, header, texts.get(index, ""))
        for start, end in self._blocks or ():
            for index, (header, _) in self._headers.items():
                start = self._spans.skip_header(index, start, header)
            if start < end:
                yield start, end

    def _answers_without(self, results: set[int]) -> dict[int, str]:
        """Return the text of each answer, rendered without the tool results inside other turns.

        Each text starts at the answer's first run, because the header can depend on a result
        (diffusion Gemma).
        """
        kept = [i for i in range(len(self._messages)) if i not in results or i in self._answers]
        with suppress(XtokError):
            messages = [self._messages[i] for i in kept]
            rendering = self._renderer.render(messages, add_generation_prompt=False)
            runs = [r for r in reversed(rendering.runs) if r.path[:1] != ("role",)]
            first = {kept[run.message]: run.start for run in runs}
            turns = zip(kept, rendering.turns, strict=True)
            return {i: rendering.text[first.get(i, t[0]) : t[1]] for i, t in turns if t}
        return {}

    def _make_mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._ids), np.bool_)
        for start, end in self._target_chars:
            first, stop = self._spans.span(start, end).tokens
            first += self._begins_in_prompt(start, end)
            mask[first : self._include_eos(stop)] = True
        for run in self._rendering.runs:  # a template can write a message inside another message
            if self._messages[run.message]["role"] != "assistant" and run.path[:1] != ("role",):
                mask[slice(*self._spans.span(run.start, run.end).tokens)] = False
        return mask

    def _begins_in_prompt(self, start: int, end: int) -> bool:
        span = self._spans.span(start, end)
        first, stop = span.tokens
        return first < stop and bool(self._bounds[first] < span.bytes[0])

    def _include_eos(self, end: int) -> int:
        """Extend a token range by the eos token that follows the turn, if there is one.

        White space can precede the eos token. In GLM 4.5, the next turn starts with this token.
        """
        if self._blocks is not None or self._control[end - 1]:
            return end
        rest = self._bytes[self._bounds[end] :]
        offset = self._bounds[end] + len(rest) - len(rest.lstrip())
        end_index = int(np.searchsorted(self._bounds, offset))
        is_whole = end_index < len(self._ids) and self._bounds[end_index] == offset
        return end_index + 1 if is_whole and self._ids[end_index] in self._end_ids else end

    def end_of_turn(self, start: int, end: int) -> int | None:
        """Return the index of the control token that ends a range, or None. Skips white space."""
        for i in reversed(range(start, end)):
            if self._control[i]:
                return i
            if self._bytes[self._bounds[i] : self._bounds[i + 1]].strip():
                break
        return None

    def _notes(self) -> Iterator[str]:
        """Yield notes about missing and incomplete targets, and about the date."""
        yield from self._role_notes()
        if any(self._begins_in_prompt(*stretch) for stretch in self._target_chars):
            yield BEGINS_IN_PROMPT
        yield from self._prompt_notes() if self._blocks is None else ()
        if not {start for start, _ in self._blocks or ()} <= {a for a, _ in self._target_chars}:
            yield BLOCK_IN_PROMPT
        if any(map(self._has_no_targets, self._answers)):
            yield NO_TARGETS if self._blocks is None else NOT_GENERATED
        if self._rendering.is_dated:
            yield self._date_note()
        edges = np.flatnonzero(np.diff(self._mask, prepend=False, append=False)).reshape(-1, 2)
        if any(self.end_of_turn(*edge) is None for edge in edges.tolist()):
            yield NO_END_OF_TURN

    def _prompt_notes(self) -> Iterator[str]:
        for index in self._answers:
            header, is_prompt = self._headers[index]
            if is_prompt and (rest := self._spans.missing_prompt(index, header)):
                yield (
                    f"the generation prompt ends with {quoted(printable(rest))}, but the template "
                    "does not write this before an answer"
                )

    def _has_no_targets(self, answer: int) -> bool:
        turn_start, turn_end = self._spans.whole(answer) or (0, len(self._rendering.text))
        return not any(turn_start < end and start < turn_end for start, end in self._target_chars)

    def _role_notes(self) -> Iterator[str]:
        if not self._answers and not self._renderer.add_generation_prompt:
            yield NO_ANSWERS
        for message in self._messages:
            role = message["role"]
            if role not in _KNOWN_ROLES:
                yield (
                    f"messages of the role {role} are not targets, because the template does not "
                    "write them like the assistant's messages"
                )
            for name in WEIGHT_KEYS if role != "assistant" else ():
                if message.get(name):
                    yield f"{name}=1 is ignored for the role {role}, which has no targets"

    def _date_note(self) -> str:
        for name in date_variables(self._renderer.source()):
            variables = {**self._renderer.variables, name: "1 January 2026"}
            with suppress(XtokError):
                if not self._renderer.render(self._messages, variables=variables).is_dated:
                    return (
                        f"{_DATED}; set the variable {name} to get the same ids every day (in a "
                        "file, set it in the chat_template_kwargs of each conversation)"
                    )
        return f"{_DATED}, and no variable can replace it"

    def _find_headers(self, assistant: Sequence[int]) -> dict[int, tuple[str, bool]]:
        """Return the header of each answer, and whether the header is a generation prompt.

        An unknown header is "".
        """
        previous = {i: self._messages[max(0, i - 1)] for i in assistant}
        of_role = {m["role"]: m for m in (*previous.values(), *_PROBE) if previous}
        prompts = {role: self._prompt_after(message) for role, message in of_role.items()}
        if previous and not any(prompts.values()):  # the template has no generation prompt
            return dict.fromkeys(previous, (self._written_header(), False))
        return {index: (prompts[message["role"]], True) for index, message in previous.items()}

    def _prompt_after(self, message: Message) -> str:
        """Return the generation prompt of a short conversation that ends like this message."""
        probes: list[Sequence[Message]] = []
        if message["role"] not in ("assistant", "system", "user"):
            result = {**message, "content": "x"}
            # DeepSeek's templates accept arguments only as JSON strings
            probes = [[*_make_call(result, arguments), result] for arguments in (None, "{}")]
        # SmolLM3's prompt contains an empty thought if the system message contains /no_think
        system = [*takewhile(lambda m: m["role"] in ("system", "developer"), self._messages)]
        for probe in (*probes, _PROBE):
            with suppress(XtokError):
                asked = replace(self._renderer, tools=None, add_generation_prompt=True)
                return asked.render([*system, *probe]).generation_prompt
        return ""

    def _written_header(self) -> str:
        probe = [*_PROBE, {"role": "assistant", "content": "x"}] * 2
        with suppress(XtokError):
            rendering = self._renderer.render(probe, tools=None, add_generation_prompt=False)
            return written_header(rendering, probe)
        return written_header(self._rendering, self._messages)


def tool_suffix(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | str | None = None,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the ids of tool messages and of the following generation prompt.

    The ids start after the answer's end-of-turn token. If the template writes this token only at
    the start of the next turn (GLM 4.5), the ids start with this token. The next prompt is
    `[*prompt, *answer, *tool_suffix(tokenizer, messages)]`, so the answer keeps its ids.

    Args:
        tokenizer: the tokenizer.
        messages: tool messages, or a conversation that ends with tool messages. If there are only
            tool messages, xtok inserts a call before the tool messages.
        tools: JSON schemas of the tools.
        template: see `render`.
        variables: see `render`.

    Returns:
        int32 `[T]`.

    Raises:
        XtokError: if the answer ends inside a token or continues after the tool messages, or for
            the same reasons as `render`.
        ValueError: if `messages` is empty.
    """
    messages = message_dicts(messages)
    if not messages:
        raise ValueError("messages is empty")
    if all(message["role"] != "assistant" for message in messages):
        messages = [*_make_call(messages[0]), *messages]
    renderer = Renderer(tokenizer, template, variables or {}, tools, add_generation_prompt=True)
    renderer, messages = _prepare(renderer, messages)
    rendering = renderer.render(messages)
    targets = Targets(renderer, messages, rendering)
    conversation = targets.conversation()
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    list(unread_leaves(renderer, messages, rendering, last + 1))  # raises if a value is dropped
    answer, *others = _turn_spans(conversation, last)
    start, end = answer.tokens
    limit = min([end, *(other.tokens[0] for other in others)])
    target_indices = start + np.flatnonzero(conversation.assistant_mask[start:end])
    if (target_indices >= limit).any():
        raise _suffix_error(f"message {last} (assistant) continues after the tool messages")
    if len(target_indices):
        # In some training templates, the answer includes the line break after the end of the turn.
        position = targets.end_of_turn(start, target_indices[-1] + 1)
        if position is not None:
            return conversation.ids[position + 1 :]
    # Without an end-of-turn token, the model wrote the whole turn.
    if conversation.bounds[end] == answer.bytes[1] and limit == end:
        return conversation.ids[limit:]
    raise _suffix_error(f"message {last} (assistant) ends inside a token")


def _turn_spans(conversation: Conversation, first: int) -> list[Span]:
    turns: list[Span] = []
    for i, span in enumerate(conversation.message_spans[first:], start=first):
        if span.whole is None:
            raise _suffix_error(f"message {i} ({span.role}) is not in the text")
        turns.append(span.whole)
    return turns


def _suffix_error(problem: str) -> ChatTemplateError:
    return ChatTemplateError(
        problem, hint="use a template that has tools and end-of-turn tokens ({option})"
    )


def is_prefix_preserving(
    tokenizer: Tokenizer,
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the ids of a conversation stay the same when a tool message is appended.

    Training loops that append tool messages require this. TRL's equivalent function is
    `is_chat_template_prefix_preserving`.

    Raises:
        XtokError: for the same reasons as `render`.
    """
    renderer = Renderer(tokenizer, template, variables or {})
    tool = {"role": "tool", "name": "dummy", "content": "dummy"}
    call = _make_call(tool)
    try:
        before = renderer.render(call).text
    except XtokError:  # DeepSeek's templates accept arguments only as JSON strings
        call = _make_call(tool, arguments="{}")
        before = renderer.render(call).text
    after = renderer.render([*call, tool], add_generation_prompt=True).text
    first, full = (tokenizer.encode(text).ids for text in (before, after))
    return np.array_equal(full[: len(first)], first)


def _make_call(message: Message, arguments: str | None = None) -> list[dict[str, Any]]:
    function = {"name": message.get("name", "tool"), "arguments": arguments or {}}
    call_id = message.get("tool_call_id", "000000000")  # Mistral requires ids of nine characters
    call = {"type": "function", "id": call_id, "function": function}
    return [*_PROBE, {"role": "assistant", "content": "", "tool_calls": [call]}]


def find_template(
    tokenizer: Tokenizer, template: str | Path | None = None, *, tools: bool = False
) -> str | PromptFormat:
    """Return the Jinja source or the prompt format. The default is the tokenizer's template."""
    templates, hint = tokenizer.chat_templates, TEMPLATE_HINT
    if template in (None, "default"):
        for name in ("tool_use", "default") if tools else ("default",):
            if name in templates:
                return templates[name]
        problem = f"{tokenizer.vocabulary.model_id} has no chat template"
        if templates:
            problem += f" named default, only {', '.join(templates)}"
            hint = f"give one of the existing names, or {hint.removeprefix('give ')}"
        raise ChatTemplateError(problem, hint=hint)
    if template in templates:
        return templates[str(template)]
    return FORMATS[str(template)] if template in FORMATS else template_source(template)
