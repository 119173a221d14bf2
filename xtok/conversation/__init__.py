"""Conversations as ids, rendered and encoded once, with what the assistant wrote and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.conversation._tracking import Run
from xtok.conversation.batching import collate as collate
from xtok.conversation.batching import unpad as unpad
from xtok.conversation.formats import FORMATS, PromptFormat
from xtok.conversation.templates import Message, Rendering, check_messages, render_template
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer

_PROBE = ({"role": "user", "content": "x"},)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a rendered conversation, in three units; each `(start, end)`.

    Attributes:
        chars: in characters of the text.
        bytes: in bytes of the text's UTF-8.
        tokens: the tokens that have at least one byte of it; `ids[start:end]`.
    """

    chars: tuple[int, int]
    bytes: tuple[int, int]
    tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """Where one message is in a rendered conversation.

    Attributes:
        role: the message's role.
        whole: everything that was rendered for it, header and end of turn included; None if
            nothing was. Messages that a template merges share a stretch or lie within one another.
        content: where its `content` is; None if the template drops it or it has none.
        source: characters of `content` that the span `content` begins and ends with, so that a
            template that strips it is seen: `message["content"][source[0]:source[1]]`. None where
            the content is a list of parts.
        verbatim: whether `content` is the text of `source`, character by character.
    """

    role: str
    whole: Span | None
    content: Span | None
    source: tuple[int, int] | None
    verbatim: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """A conversation of T tokens.

    Attributes:
        text: what the template or format gives.
        ids: int32 `[T]`.
        bounds: int64 `[T + 1]`; token i is bytes `bounds[i]` to `bounds[i + 1]` of the text.
        assistant_mask: bool `[T]`, the training targets: what the assistant wrote, its tool calls
            and the token that ends its turn included, its header not.
        message_spans: one per message.
        runs: the characters that come from messages, and from which string of which.
    """

    text: str
    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    assistant_mask: NDArray[np.bool_]
    message_spans: tuple[MessageSpan, ...]
    runs: tuple[Run, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the conversation as a row of training data, all of it plain Python.

        Returns:
            `text`; `input_ids`; `assistant_masks`, 1 where a token is a target; `labels`, the ids
            of targets, else -100; and `message_spans`.
        """
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
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Conversation:
    """Render a conversation once, encode the text once, and find the messages in it.

    Nothing is rendered twice and compared, so templates that write earlier turns anew do not
    confuse the spans. Control tokens are recognised by their names everywhere, in a message's
    content too, as the libraries do it.

    Args:
        tokenizer: any one.
        messages: dicts with `role` and `content`.
        tools: JSON schemas of the tools; an empty list is the same as None.
        add_generation_prompt: end with what asks for an answer; no message's and no target.
        template: a file, the name of a format (`FORMATS`), or Jinja itself; by default, and as
            `"default"`, the tokenizer's own template.
        variables: what else the template reads, as `{"enable_thinking": False}`.

    Raises:
        XtokError: if there is no template, or it raises, or a format does not allow a message.
    """
    options: dict[str, Any] = {"template": template, "variables": variables}
    rendering = _render(
        tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
    )
    asked = ""  # what asks for an answer: its header
    if any(m["role"] == "assistant" for m in messages) and not rendering.generated:
        if not add_generation_prompt:
            # A template that wants more than a user's message leaves the header unknown.
            with suppress(XtokError):
                probe = _render(tokenizer, _PROBE, add_generation_prompt=True, **options)
                asked = probe.generation_prompt
        else:
            asked = rendering.generation_prompt
    encoding = tokenizer.encode(rendering.text)
    control = np.isin(encoding.ids, list(tokenizer.table.control_names))
    spans = _Spans(rendering, encoding.bounds)
    targets = rendering.generated or tuple(
        target
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and (target := spans.target(i, asked, control)) is not None
    )
    mask = np.zeros(len(encoding.ids), np.bool_)
    for start, end in targets:
        mask[slice(*spans.span(start, end).tokens)] = True
    return Conversation(
        text=rendering.text,
        ids=encoding.ids,
        bounds=encoding.bounds,
        assistant_mask=mask,
        message_spans=tuple(spans.of_message(i, m) for i, m in enumerate(messages)),
        runs=rendering.runs,
    )


def tool_suffix(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the ids that messages of tools add behind what a model wrote.

    They begin right behind the token that ends the model's turn, so with the line break that many
    templates write there, and end with what asks for the next answer. `[*prompt, *written,
    *tool_suffix(tokenizer, messages)]` is then the next prompt: nothing is tokenized twice.

    Args:
        tokenizer: any one.
        messages: the tools' messages, or a conversation that ends with them. Alone, they follow a
            call of the first one's tool, by its `name`.
        tools: as in `render`; so are `template` and `variables`.
        template: see there.
        variables: see there.

    Returns:
        int32 `[T]`.

    Raises:
        XtokError: as `render` does; also if the template drops one of the messages, or does not end
            the assistant's turn with a control token.
        ValueError: if there are no messages.
    """
    check_messages(messages)
    if not messages:
        raise ValueError("messages is empty")
    if all(message["role"] != "assistant" for message in messages):
        messages = [*_calling(messages[0]), *messages]
    options: dict[str, Any] = {"tools": tools, "template": template, "variables": variables}
    found = render(tokenizer, messages, add_generation_prompt=True, **options)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    turns = [span.whole for span in found.message_spans[last:]]
    problem = "does not end with a control token"
    if None in turns:
        last += turns.index(None)
        problem = "is not in the text"
    elif turns[0] is not None:
        start, stop = turns[0].tokens
        control = np.isin(found.ids, list(tokenizer.table.control_names))
        written = start + np.flatnonzero(found.assistant_mask[start:stop])
        for i in written[control[written]][-1:]:
            # Some training templates count the line break behind the end of a turn to the turn.
            places = found.bounds[[i + 1, written[-1] + 1]].tolist()
            if not found.text.encode()[slice(*places)].strip():
                return found.ids[i + 1 :]
    raise XtokError(
        f"message {last}, the {messages[last]['role']}'s, {problem}",
        hint="give a template that knows tools and ends turns with control tokens, with {option}",
        parameter="template",
    )


def _calling(message: Message) -> list[dict[str, Any]]:
    """Return a conversation that calls the tool of a message."""
    function = {"name": message.get("name", "tool"), "arguments": {}}
    call_id = message.get("tool_call_id", "000000000")  # Mistral's templates want nine characters
    call = {"type": "function", "id": call_id, "function": function}
    return [*_PROBE, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | Path | None,
    variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Rendering:
    """Render a conversation without encoding it; arguments and errors are those of `render`."""
    check_messages(messages)
    chosen = find_template(tokenizer, template, tools=bool(tools))
    names: dict[str, Any] = dict(tokenizer.special_token_names)
    source = "the chat template"
    if isinstance(chosen, PromptFormat):
        chosen.check(messages, tokenizer)
        names |= chosen.variables(tokenizer.table)
        source = f"the format {chosen.name}"
        chosen = chosen.template
    return render_template(
        chosen,
        messages,
        tools=tools,
        variables={**names, **(variables or {})},
        source=f"{source} of {tokenizer.vocabulary.model_id}",
        **options,
    )


def find_template(
    tokenizer: Tokenizer, template: str | Path | None = None, *, tools: bool = False
) -> str | PromptFormat:
    """Return the Jinja or the format that `template` names, else the tokenizer's own template.

    Raises:
        XtokError: if the tokenizer has none, or the file cannot be read.
    """
    model = tokenizer.vocabulary.model_id
    if template in (None, "default"):
        own = tokenizer.chat_templates
        if tools and "tool_use" in own:
            return own["tool_use"]
        if "default" in own:
            return own["default"]
        raise XtokError(
            f"{model} has no chat template",
            hint=f"give one with {{option}}: a Jinja file, or one of {', '.join(FORMATS)}",
            parameter="template",
        )
    if isinstance(template, str):
        if template in FORMATS:
            return FORMATS[template]
        if "{" in template:
            return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise XtokError(
            f"the chat template {template} cannot be read: {reason}",
            hint=f"give a Jinja file, or one of the formats {', '.join(FORMATS)}",
        ) from error


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Return where each character of a text begins in its UTF-8, and the end, int64 `[n + 1]`."""
    return np.concatenate([[0], np.cumsum([len(char.encode()) for char in text], dtype=np.int64)])


class _Spans:
    """The places of one rendering, in characters, bytes and tokens."""

    def __init__(self, rendering: Rendering, bounds: NDArray[np.int64]) -> None:
        self._text, self._turns, self._bounds = rendering.text, rendering.turns, bounds
        self._byte_of = byte_offsets(rendering.text)
        self._all_runs = rendering.runs
        self._runs: dict[int, list[Run]] = {}
        for run in rendering.runs:
            self._runs.setdefault(run.message, []).append(run)

    def span(self, start: int, end: int) -> Span:
        first, last = int(self._byte_of[start]), int(self._byte_of[end])
        stop = begin = int(np.searchsorted(self._bounds[:-1], last, side="left"))
        if first < last:
            begin = int(np.searchsorted(self._bounds[1:], first, side="right"))
        return Span(chars=(start, end), bytes=(first, last), tokens=(begin, stop))

    def of_message(self, index: int, message: Message) -> MessageSpan:
        content, whole = message.get("content"), self._whole(index)
        runs: list[Run] = []  # of the content's first appearance in the text
        for run in self._runs.get(index, ()):
            if run.path[:1] == ("content",):
                if runs and (run.path, run.offset) <= (runs[-1].path, runs[-1].offset):
                    break  # it is repeated
                runs.append(run)
        place: tuple[int, int] | None = (runs[0].start, runs[-1].end) if runs else None
        source: tuple[int, int] | None = None
        verbatim = False
        if place and isinstance(content, str) and runs[0].offset >= 0:
            source = (runs[0].offset, runs[-1].offset + runs[-1].end - runs[-1].start)
            verbatim = self._text[slice(*place)] == content[slice(*source)]
        if place is None and isinstance(content, str) and content.strip() and whole is not None:
            stripped = content.strip()
            first = self._text.find(stripped, *whole)
            if first >= 0:  # a filter lost the origin, and did not change the text
                place, start = (first, first + len(stripped)), content.index(stripped)
                source, verbatim = (start, start + len(stripped)), True
        return MessageSpan(
            role=message["role"],
            whole=None if whole is None else self.span(*whole),
            content=None if place is None else self.span(*place),
            source=source,
            verbatim=verbatim,
        )

    def target(self, index: int, asked: str, control: NDArray[np.bool_]) -> tuple[int, int] | None:
        """Return what the assistant wrote of a message: from its header to the end of its turn."""
        whole = self._whole(index)
        if whole is None:
            return None
        runs = self._runs.get(index, [])
        written = [run for run in runs if run.path[:1] != ("role",)]
        first = written[0].start if written else whole[1]
        start = self._after_header(whole[0], first, asked)
        if not asked and written and written[0].path[:1] == ("content",) and runs[0] != written[0]:
            start = first  # nothing asks for an answer; the header is what has the role
        end = max((run.end for run in written), default=start)
        inside = self.span(end, whole[1]).tokens
        ends = np.flatnonzero(control[slice(*inside)])
        if len(ends):
            byte = int(self._bounds[inside[0] + int(ends[-1]) + 1])
            limit = int(np.searchsorted(self._byte_of, byte, side="left"))
            # A control token may have taken the whitespace behind it, and that of the next turn.
            end = max(end, min(limit, whole[1]))
        else:  # the turn's end is text, or there is none
            end = max(end, whole[0] + len(self._text[slice(*whole)].rstrip()))
        return (start, end) if start < end else None

    def _after_header(self, start: int, first: int, asked: str) -> int:
        """Return where an answer begins in a turn whose first written character is at `first`."""
        for length in range(len(asked), max(1, len(asked) // 2) - 1, -1):
            place = self._text.find(asked[:length], start, first)
            if place >= 0:
                return place + length
        return start if not asked or self._text.endswith(asked, 0, start) else first

    def _whole(self, index: int) -> tuple[int, int] | None:
        """Return the turn, or for a message outside the loop, what is around its characters.

        What stands before the first turn is the first message's if that is written there, as a
        system message is; a message that is written within another one's turn has its own
        characters only.
        """
        written = self._runs.get(index)
        if self._turns[index] is not None or not written:
            return self._turns[index]
        start, end = written[0].start, written[-1].end
        first = min((turn[0] for turn in self._turns if turn is not None), default=0)
        alone = all(run.message == index for run in self._all_runs if run.start < first)
        return (0, first) if end <= first and alone else (start, end)
