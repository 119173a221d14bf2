"""Check a chat template with sample conversations, for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from xtok._lib.ragged import num_common
from xtok.conversation.formats import PromptFormat
from xtok.conversation.rendering import find_template, is_prefix_preserving, render, tool_suffix
from xtok.conversation.templates import Message
from xtok.errors import XtokError
from xtok.inspection.results import Check, Level
from xtok.tokenizers import Tokenizer

_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "What is 2 + 2?"}
_FURTHER = {"role": "user", "content": "And 3 + 3?"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_THINKING = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 4."}
_CALL_ID = "a1B2c3D4e"  # Mistral's templates require ids with nine letters and digits
_ADD = {"name": "add", "arguments": {"a": 2, "b": 2}}
_TOOL_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": _ADD}],
}
_CALL = {**_TOOL_CALL, "content": "It needs a sum."}
_EMPTY_CALL = {**_TOOL_CALL, "content": ""}
_RESULT = {"role": "tool", "name": "add", "tool_call_id": _CALL_ID, "content": "4"}


class ChatTrial:
    """A chat template (default: the tokenizer's own), rendered with sample conversations."""

    turn_ends: tuple[int, ...] | None = None  # None if the template rejects answers
    tool_suffix_ids: tuple[int, ...] | None = None  # None if the template rejects tool messages

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None) -> None:
        self.tokenizer, self.template, self._table = tokenizer, template, tokenizer.table
        self._has_template = template is not None or "default" in tokenizer.chat_templates
        self._chosen = find_template(tokenizer, template) if self._has_template else ""
        with suppress(XtokError):
            chat = render(tokenizer, [_USER, _ANSWER], template=template)
            targets = chat.ids[chat.assistant_mask].tolist()
            self.turn_ends = tuple(i for i in targets[-2:] if i in self._table.control_names)
        with suppress(XtokError):
            suffix = tool_suffix(tokenizer, [_RESULT], template=template)
            self.tool_suffix_ids = tuple(suffix.tolist())

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer in the template, or the eos id if there are none."""
        eos = self.tokenizer.special_token_names.get("eos_token")
        ids = self._table.roles.get("eos", ()) if eos is None else self._table.ids_of(eos)
        return self.turn_ends or tuple(ids[:1])

    @property
    def shown_end(self) -> str:
        """The names of the tokens that end an answer, for messages to the user."""
        shown = " ".join(map(self._table.shown, self.ends)) or "nothing"
        if self.turn_ends or not self.ends:
            return shown
        roles = self._table.roles.get("turn_end", ())
        if not roles or {*roles} & {*self.ends}:
            return f"{shown} (eos)"
        return f"{shown} (eos, not the turn_end {self._table.shown(roles[0])})"

    def checks(self, *, tools: bool) -> Iterator[Check]:
        """Yield the checks. If `tools` is True, rewritten tool-call turns are a failure."""
        name = "chat template"
        if not self._has_template:
            names = ", ".join(self.tokenizer.chat_templates)
            default = f"none by default; choose {names}," if names else "none; choose"
            yield Check(name, "warning", f"{default} a template file or a format to check")
            return
        source = "the tokenizer's own" if self.template is None else str(self.template)
        if isinstance(self._chosen, PromptFormat):
            source = f"the format {self._chosen.name}"
        yield Check(name, "ok", source)
        yield self._roles_check()
        if self.turn_ends is not None:
            yield self._end_check(self.turn_ends)
        yield from self._tool_checks(tools)
        yield from self._turn_checks()

    def _roles_check(self) -> Check:
        chats: dict[str, list[Message]] = {
            "system": [_SYSTEM, _USER],
            "user": [_USER],
            "assistant": [_USER, _ANSWER],
            "tool": [_USER, _EMPTY_CALL, _RESULT],
        }
        failed = {role: error for role, chat in chats.items() if (error := self._error(*chat))}
        rendered = ", ".join(role for role in chats if role not in failed) or "no role"
        lines = [f"renders {rendered}", *(f"{role}: {error}" for role, error in failed.items())]
        level: Level = "note" if failed else "ok"
        if {"user", "assistant"} & failed.keys():
            level = "failed"
        return Check("roles", level, "\n".join(lines))

    def _end_check(self, ends: Sequence[int]) -> Check:
        name, shown = "end of a turn", " ".join(map(self._table.name, ends))
        if not ends:
            message = "no control token; the template ends an answer with text, or not at all"
            return Check(name, "warning", message)
        if set(ends) & set(self._table.roles.get("eos", ())):
            return Check(name, "ok", f"{shown}, which is eos")
        message = f"{shown}, which is not eos, so generation does not stop there"
        return Check(name, "warning", message)

    def _tool_checks(self, tools: bool) -> Iterator[Check]:
        """Check that an appended tool message does not change the earlier ids."""
        name = "prefix, tool message"
        if error := self._error(_USER, _EMPTY_CALL, _RESULT):
            yield Check(name, "note", f"the template rejects tool messages: {error}")
            return
        calls = {"content present": _CALL, "empty": _EMPTY_CALL, "absent": _TOOL_CALL}
        results = {kind: self._keeps(_USER, call, then=_RESULT) for kind, call in calls.items()}
        lines = [f"{kind}: {result}" for kind, result in results.items()]
        is_changed = any(result.startswith("changed") for result in results.values())
        if set(results.values()) == {"kept"}:
            yield Check(name, "ok", "kept")
        elif is_changed and self._suits_loops():
            lines.append("appending tool messages keeps the ids if the content of calls is empty")
            yield Check(name, "warning", "\n".join(lines))
        else:
            changed: Level = "failed" if tools else "warning"
            yield Check(name, changed if is_changed else "note", "\n".join(lines))
        if self.tool_suffix_ids is not None:
            text = "".join(map(self._table.name, self.tool_suffix_ids))
            yield Check("tool suffix", "ok", f"{len(self.tool_suffix_ids)} ids, '{text}'")

    def _suits_loops(self) -> bool:
        with suppress(XtokError):
            return is_prefix_preserving(self.tokenizer, template=self.template)
        return False

    def _turn_checks(self) -> Iterator[Check]:
        if self._error(_USER, _ANSWER):  # reported by the check `roles`
            return
        result = self._keeps(_USER, _ANSWER, then=_FURTHER)
        yield Check("prefix, user turn", "ok" if result == "kept" else "warning", result)
        result = self._keeps(_USER, _THINKING, then=_FURTHER)
        if result.startswith("changed"):
            message = f"{result}: the template rewrites earlier thinking"
            yield Check("prefix, thinking", "warning", message)

    def _ids(self, *messages: Message, prompt: bool = False) -> list[int]:
        chat = render(
            self.tokenizer, messages, template=self.template, add_generation_prompt=prompt
        )
        ids: list[int] = chat.ids.tolist()
        return ids

    def _error(self, *messages: Message) -> str:
        try:
            self._ids(*messages)
        except XtokError as error:
            return error.message
        return ""

    def _keeps(self, *messages: Message, then: Message) -> str:
        try:
            first, full = self._ids(*messages), self._ids(*messages, then, prompt=True)
        except XtokError as error:
            return error.message
        same = num_common(first, full)
        return "kept" if same == len(first) else f"changed from token {same} of {len(first)}"
