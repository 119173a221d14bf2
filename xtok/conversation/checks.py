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
_THINKING = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 4."}
_CALL_ID = "a1B2c3D4e"  # nine letters and digits, as Mistral's templates want them
_TOOL_CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": _CALL_ID,
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
        }
    ],
}
_CALL = {**_TOOL_CALL, "content": "It needs a sum."}
_RESULT = {"role": "tool", "name": "add", "tool_call_id": _CALL_ID, "content": "4"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked. Only `failed` makes `doctor` exit with 3."""

    name: str
    level: Level
    message: str


@dataclass(frozen=True, kw_only=True)
class ChatDiagnosis:
    """What a chat template does.

    Attributes:
        checks: the findings.
        turn_ends: the control tokens that end an assistant's turn, in order.
        tool_suffix_ids: the ids that a tool message and the prompt for an answer add; None if the
            template takes none, or renders the earlier turns differently then.
    """

    checks: tuple[Check, ...]
    turn_ends: tuple[str, ...] = ()
    tool_suffix_ids: tuple[int, ...] | None = None


def check_chats(tokenizer: Tokenizer, template: str | Path | None) -> ChatDiagnosis:
    """Try out a chat template, by default the tokenizer's own.

    Raises:
        XtokError: if `template` cannot be read.
    """
    name = "chat template"
    if template is None and not tokenizer.chat_templates:
        message = "none; name a template file or a format to check one"
        return ChatDiagnosis(checks=(Check(name=name, level="warning", message=message),))
    chosen = find_template(tokenizer, template)
    source = "the tokenizer's own" if template is None else str(template)
    if isinstance(chosen, PromptFormat):
        source = f"the format {chosen.name}"
    trial = _Trial(tokenizer, template)
    ends = trial.turn_ends()
    suffix = trial.tool_suffix_ids()
    return ChatDiagnosis(
        checks=(
            Check(name=name, level="ok", message=source),
            trial.roles_check(),
            *trial.ends_checks(ends),
            *trial.tool_checks(suffix),
            *trial.turn_checks(),
        ),
        turn_ends=tuple(map(tokenizer.table.name, ends or ())),
        tool_suffix_ids=suffix,
    )


@dataclass(frozen=True)
class _Trial:
    """A chat template and who tokenizes what it renders."""

    tokenizer: Tokenizer
    template: str | Path | None

    def _ids(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> list[int]:
        chat = render(
            self.tokenizer, messages, template=self.template, add_generation_prompt=prompt
        )
        ids: list[int] = chat.ids.tolist()
        return ids

    def _error(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            self._ids(messages)
        except XtokError as error:
            return error.message
        return ""

    def roles_check(self) -> Check:
        """Tell which roles it renders."""
        chats: dict[str, list[Mapping[str, Any]]] = {
            "system": [{"role": "system", "content": "Be brief."}, _USER],
            "user": [_USER],
            "assistant": [_USER, _ANSWER],
            "tool": [_USER, _CALL, _RESULT],
        }
        failed = {role: error for role, chat in chats.items() if (error := self._error(chat))}
        rendered = ", ".join(role for role in chats if role not in failed) or "no role"
        lines = [f"renders {rendered}", *(f"{role}: {error}" for role, error in failed.items())]
        level: Level = "note" if failed else "ok"
        if {"user", "assistant"} & set(failed):
            level = "failed"
        return Check(name="roles", level=level, message="\n".join(lines))

    def turn_ends(self) -> list[int] | None:
        """Return the last control tokens among the targets of an answer; None if it is refused."""
        try:
            chat = render(self.tokenizer, [_USER, _ANSWER], template=self.template)
        except XtokError:
            return None
        targets = chat.ids[chat.assistant_mask].tolist()
        return [i for i in targets[-2:] if i in self.tokenizer.table.control_names]

    def ends_checks(self, ends: Sequence[int] | None) -> Iterator[Check]:
        """Tell whether generation stops at the end of an answer."""
        if ends is None:
            return
        table = self.tokenizer.table
        level: Level = "warning"
        if not ends:
            message = "no control token: the end of an answer is text, or not written at all"
        elif set(ends) & set(table.roles.get("eos", ())):
            level, message = "ok", f"{' '.join(map(table.name, ends))}, which is eos"
        else:
            message = (
                f"{' '.join(map(table.name, ends))}, which is not eos: generation does not stop "
                "there by itself"
            )
        yield Check(name="end of a turn", level=level, message=message)

    def tool_suffix_ids(self) -> tuple[int, ...] | None:
        """Return the ids that a tool message adds; None if what stands before it changes."""
        try:
            before, after = (
                self._ids([_USER, _CALL]),
                self._ids([_USER, _CALL, _RESULT], prompt=True),
            )
        except XtokError:
            return None
        return tuple(after[len(before) :]) if after[: len(before)] == before else None

    def tool_checks(self, suffix: Sequence[int] | None) -> Iterator[Check]:
        """Append a tool message, and see whether what stood before is rendered as before."""
        name = "prefix, tool message"
        if self._error([_USER, _CALL, _RESULT]):
            message = "the template takes no tool messages, or not in this form"
            yield Check(name=name, level="note", message=message)
            return
        calls = {
            "content present": _CALL,
            "empty": {**_TOOL_CALL, "content": ""},
            "absent": _TOOL_CALL,
        }
        results = {kind: self._keeps([_USER, call], _RESULT) for kind, call in calls.items()}
        if all(result == "kept" for result in results.values()):
            yield Check(name=name, level="ok", message="kept")
        else:
            changed = any(result.startswith("changed") for result in results.values())
            message = "\n".join(f"{kind}: {result}" for kind, result in results.items())
            yield Check(name=name, level="failed" if changed else "note", message=message)
        if suffix is not None:
            text = "".join(map(self.tokenizer.table.name, suffix))
            yield Check(name="tool suffix", level="ok", message=f"{len(suffix)} ids, '{text}'")

    def turn_checks(self) -> Iterator[Check]:
        """Do the same with a further user turn, after an answer with thinking in it too."""
        if self._error([_USER, _ANSWER]):  # the check of roles says so
            return
        result = self._keeps([_USER, _ANSWER], _FURTHER)
        level: Level = "ok" if result == "kept" else "warning"
        yield Check(name="prefix, user turn", level=level, message=result)
        result = self._keeps([_USER, _THINKING], _FURTHER)
        if result.startswith("changed"):
            message = f"{result}: earlier thinking is written anew"
            yield Check(name="prefix, thinking", level="warning", message=message)

    def _keeps(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> str:
        """Tell whether the ids of some messages stay the same when another one follows."""
        try:
            first, full = self._ids(before), self._ids([*before, message], prompt=True)
        except XtokError as error:
            return error.message
        if full[: len(first)] == first:
            return "kept"
        pairs = enumerate(zip(first, full, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), len(full))
        return f"changed from token {place} of {len(first)} on"
