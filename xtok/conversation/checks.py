"""What a tokenizer's chat template does to a conversation, tried out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xtok.conversation import find_template, render
from xtok.conversation.formats import PromptFormat
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer

Level = Literal["ok", "note", "warning", "failed"]

_USER = {"role": "user", "content": "What is 2 + 2?"}
_FURTHER = {"role": "user", "content": "And 3 + 3?"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_CALL_ID = "a1B2c3D4e"  # nine letters and digits, as Mistral's templates want them


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. Only `failed` makes `doctor` exit with 3."""

    name: str
    level: Level
    message: str


class ChatChecks:
    """A tokenizer's chat template, tried out."""

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.turn_ends: tuple[str, ...] = ()
        self.tool_suffix_ids: tuple[int, ...] | None = None
        self._is_format = False

    def checks(self) -> tuple[Check, ...]:
        """Try the template out, and note on the way what ends a turn and what a tool adds."""
        name = "chat template"
        if self._template is None and not self._tokenizer.chat_templates:
            message = "none; name a template file or a format to check one"
            return (Check(name=name, level="warning", message=message),)
        chosen = find_template(self._tokenizer, self._template)
        self._is_format = isinstance(chosen, PromptFormat)
        source = (
            f"the format {chosen.name}"
            if isinstance(chosen, PromptFormat)
            else ("the tokenizer's own" if self._template is None else str(self._template))
        )
        return (
            Check(name=name, level="ok", message=source),
            *self._roles(),
            *self._ends(),
            *self._prefixes(),
        )

    def _ids(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> list[int]:
        found = render(
            self._tokenizer, messages, template=self._template, add_generation_prompt=prompt
        )
        ids: list[int] = found.ids.tolist()
        return ids

    def _roles(self) -> Iterator[Check]:
        chats = {
            "system": [{"role": "system", "content": "Be brief."}, _USER],
            "user": [_USER],
            "assistant": [_USER, _ANSWER],
            "tool": [_USER, self._call("It needs a sum."), self._result()],
        }
        failed = {role: error for role, chat in chats.items() if (error := self._error(chat))}
        rendered = [role for role in chats if role not in failed]
        message = "\n".join(
            [f"renders {', '.join(rendered) or 'no role'}"]
            + [f"{role}: {error}" for role, error in failed.items()]
        )
        level: Level = "failed" if {"user", "assistant"} & set(failed) else "ok"
        yield Check(
            name="roles", level="note" if failed and level == "ok" else level, message=message
        )

    def _error(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            self._ids(messages)
        except XtokError as error:
            return error.message
        return ""

    def _ends(self) -> Iterator[Check]:
        """Find what ends the assistant's turn: the last control tokens that are its targets."""
        try:
            found = render(self._tokenizer, [_USER, _ANSWER], template=self._template)
        except XtokError:
            return
        table = self._tokenizer.table
        targets = found.ids[found.assistant_mask].tolist()
        ends = [i for i in targets[-2:] if i in table.control_names]
        self.turn_ends = tuple(table.name(i) for i in ends)
        if not ends:
            message = "no control token: the end of an answer is text, or not written at all"
            yield Check(name="end of a turn", level="warning", message=message)
            return
        eos = set(ends) & set(table.roles.get("eos", ()))
        names = " ".join(self.turn_ends)
        message = f"{names}, which {'is' if eos else 'is not'} eos"
        if not eos:
            message += ": generation does not stop there by itself"
        yield Check(name="end of a turn", level="ok" if eos else "warning", message=message)

    def _prefixes(self) -> Iterator[Check]:
        """Append messages, and see whether what stood before is rendered as before."""
        name = "prefix, tool message"
        level: Level
        if self._error([_USER, self._call("It needs a sum."), self._result()]):
            message = "the template takes no tool messages, or not in this form"
            yield Check(name=name, level="note", message=message)
        else:
            kinds = {"content present": "It needs a sum.", "empty": "", "absent": None}
            results = {
                kind: self._keeps([_USER, self._call(content)], self._result())
                for kind, content in kinds.items()
            }
            kept = all(result == "kept" for result in results.values())
            changed = any(result.startswith("changed") for result in results.values())
            level = "ok" if kept else "failed" if changed else "note"
            shown = "\n".join(f"{kind}: {result}" for kind, result in results.items())
            yield Check(name=name, level=level, message="kept" if kept else shown)
            yield from self._suffix()
        if self._error([_USER, _ANSWER]):  # said above
            return
        result = self._keeps([_USER, _ANSWER], _FURTHER)
        level = "ok" if result == "kept" else "warning"
        yield Check(name="prefix, user turn", level=level, message=result)
        thinking = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 4."}
        result = self._keeps([_USER, thinking], _FURTHER)
        if result.startswith("changed"):
            message = f"{result}: earlier thinking is written anew"
            yield Check(name="prefix, thinking", level="warning", message=message)

    def _keeps(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> str:
        try:
            first, full = self._ids(before), self._ids([*before, message], prompt=True)
        except XtokError as error:
            return error.message
        if full[: len(first)] == first:
            return "kept"
        place = next(
            (i for i, (a, b) in enumerate(zip(first, full, strict=False)) if a != b), len(full)
        )
        return f"changed from token {place} of {len(first)} on"

    def _suffix(self) -> Iterator[Check]:
        before = [_USER, self._call("It needs a sum.")]
        try:
            first, full = self._ids(before), self._ids([*before, self._result()], prompt=True)
        except XtokError:
            return
        if full[: len(first)] != first:
            return
        self.tool_suffix_ids = tuple(full[len(first) :])
        table = self._tokenizer.table
        text = "".join(table.name(i) for i in self.tool_suffix_ids)
        message = f"{len(self.tool_suffix_ids)} ids, '{text}'"
        yield Check(name="tool suffix", level="ok", message=message)

    def _call(self, content: str | None) -> dict[str, Any]:
        function = {"name": "add", "arguments": {"a": 2, "b": 2}}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        if content is None:
            del message["content"]
        return message

    def _result(self) -> dict[str, Any]:
        return {"role": "tool", "name": "add", "tool_call_id": _CALL_ID, "content": "4"}
