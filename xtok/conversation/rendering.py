"""Conversations rendered and encoded once, with what the assistant wrote and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.conversation._places import MessageSpan, Places, Span
from xtok.conversation._tracking import Run, plain
from xtok.conversation.formats import FORMATS, PromptFormat
from xtok.conversation.leaves import WEIGHTS, Given, is_trained_on, unread_leaves
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

    def again(given: Given) -> Rendering:
        variables = {**(options.variables or {}), "documents": given["documents"]}
        changed = replace(options, tools=given["tools"], variables=variables)
        return rendered(tokenizer, given["messages"], changed)

    documents = (options.variables or {}).get("documents")
    given = {"messages": messages, "tools": options.tools, "documents": documents}
    yield from unread_leaves(again, given, rendering, first)


def _unread(tokenizer: Tokenizer, options: RenderOptions) -> Iterator[str]:
    """Yield notes on variables that the template does not read."""
    template = find_template(tokenizer, options.template, tools=bool(options.tools))
    source = template.template if isinstance(template, PromptFormat) else template
    for name in options.variables or ():
        if name != "documents" and name not in names_read(source):
            yield f"the template does not read the variable {name}: it has no effect"


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
    control = np.isin(ids, list(tokenizer.table.control_names))
    places = Places(rendering, bounds)
    mask, written = np.zeros(len(ids), np.bool_), rendering.text.encode()
    is_training = rendering.generated is not None
    ends = [i for role in ("eos", "turn_end") for i in tokenizer.table.roles.get(role, ())]
    of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [i for i in of_assistant if is_trained_on(messages[i], i)]
    rendering = _without_blocks(
        rendering, [places.whole(i) for i in of_assistant if i not in answers]
    )
    targets = list(_targets(tokenizer, messages, answers, options, rendering, places, control))
    notes = [*_not_targets(messages, answers, options)]
    for start, end in targets:
        answer = places.span(start, end)
        first, stop = answer.tokens
        if first < stop and bounds[first] < answer.bytes[0]:
            first += 1
            notes.append(BEGINS_IN_PROMPT)
        if not is_training and not control[stop - 1]:
            # As GLM 4.5 ends a turn with the next one's token; others write a space before it.
            rest = written[bounds[stop] :]
            behind = np.searchsorted(bounds, bounds[stop] + len(rest) - len(rest.lstrip()))
            stop = int(behind) + 1 if rest.strip() and ids[behind] in ends else stop
        mask[first:stop] = True
    for run in rendering.runs:  # a template may write one message within another
        if messages[run.message]["role"] != "assistant" and run.path[:1] != ("role",):
            mask[slice(*places.span(run.start, run.end).tokens)] = False
    if rendering.generated and not {a for a, _ in rendering.generated} <= {a for a, _ in targets}:
        notes.append(BLOCK_IN_PROMPT)
    if _is_left_out(answers, places, targets):
        notes.append(NOT_GENERATED if is_training else NO_TARGETS)
    if rendering.is_dated:
        notes.append(_note_on_date(tokenizer, messages, options))
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    if any(_end_of_turn(control, bounds, written, *edge) is None for edge in edges):
        notes.append(NO_END_OF_TURN)
    return Conversation(
        text=rendering.text,
        ids=ids,
        bounds=bounds,
        assistant_mask=mask,
        message_spans=tuple(places.of_message(i, m) for i, m in enumerate(messages)),
        runs=rendering.runs,
        notes=tuple(dict.fromkeys(notes)),
    )


def _targets(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    answers: Sequence[int],
    options: RenderOptions,
    rendering: Rendering,
    places: Places,
    control: NDArray[np.bool_],
) -> Iterator[tuple[int, int]]:
    """Return the assistant's answers, in characters: what follows the prompt in its turns.

    The blocks of a training template decide, if it has them, but for what is in the prompt already.
    """

    def up_to(index: int) -> str:
        with suppress(XtokError):
            part, closed = messages[: index + 1], replace(options, add_generation_prompt=False)
            return rendered(tokenizer, part, closed).text
        return ""

    asked: dict[str, str] = {}  # by the role of the message before the answer
    generated = list(rendering.generated or ())
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[max(0, index - 1)]
        if before["role"] not in asked:
            asked[before["role"]] = _answer_header(tokenizer, rendering, messages, before, options)
        header = asked[before["role"]]
        if rendering.generated is None and index in answers:
            yield from places.targets(index, header, control, up_to)
        generated = [(places.after_prompt(index, a, header), b) for a, b in generated]
    yield from ((start, end) for start, end in generated if start < end)


def _without_blocks(rendering: Rendering, turns: Sequence[tuple[int, int] | None]) -> Rendering:
    """Leave out the generation blocks of some turns."""
    if not rendering.generated:
        return rendering
    left_out = [turn for turn in turns if turn is not None]
    kept = (b for b in rendering.generated if not any(s <= b[0] < e for s, e in left_out))
    return rendering._replace(generated=tuple(kept))


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


def _is_left_out(
    answers: Sequence[int], places: Places, targets: Sequence[tuple[int, int]]
) -> bool:
    """Whether an answer has no targets."""
    return any(
        not targets if whole is None else not any(whole[0] < b and a < whole[1] for a, b in targets)
        for whole in map(places.whole, answers)
    )


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


def _answer_header(
    tokenizer: Tokenizer,
    rendering: Rendering,
    messages: Sequence[Message],
    before: Message,
    options: RenderOptions,
) -> str:
    """Return what asks for an answer to a message: its header; "" if that is unknown."""
    if options.add_generation_prompt and messages[-1]["role"] == before["role"]:
        return rendering.generation_prompt
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
    hint = f"give a Jinja file with {{option}}, or one of {', '.join(FORMATS)}"
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
    elif isinstance(template, str) and "{" in template:
        return template
    else:
        try:
            return Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"the chat template {template} cannot be read: {reason}"
    raise XtokError(problem, hint=hint, parameter="template")
