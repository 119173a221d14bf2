"""Prompt formats as Jinja files, for tokenizers without a chat template."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xtok.conversation.templates import Message
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import TokenTable, TokenType


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A chat template and the constants that its file defines."""

    name: str
    template: str  # Jinja source
    roles: Mapping[str, str]  # supported roles → names of the roles in the format
    needs: Sequence[str] = ()  # control or added tokens that the format requires
    pad_tokens: Sequence[str] = ()  # padding tokens, preferred to the roles `pad` and `unk`
    image_placeholders: Sequence[str] = ("<image>",)  # placeholders that answers must not contain

    def variables(self, table: TokenTable) -> dict[str, Any]:
        """Return the variables for the format's template.

        `space` is " " for SentencePiece vocabularies with byte tokens, because such tokenizers add
        a leading space.
        """
        return {"space": " " * bool(np.any(table.types == TokenType.BYTE))}

    def pad_id(self, table: TokenTable) -> int:
        """Return the padding id for this format.

        Raises:
            XtokError: if the vocabulary has no padding token.
        """
        ids = {name: i for i, name in table.control_names.items()}
        candidates = [ids[name] for name in self.pad_tokens if name in ids]
        candidates += [*table.roles.get("pad", ()), *table.roles.get("unk", ())]
        if not candidates:
            raise XtokError(
                f"the vocabulary has no padding token for the format {self.name}",
                hint=f"pass pad_id to collate; the format uses {', '.join(self.pad_tokens)}",
            )
        return candidates[0]

    def check(self, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
        """Check that the format supports the messages and the vocabulary.

        Raises:
            XtokError: if a message is not supported, or a required token is missing.
        """
        table = tokenizer.table
        ids, names = table.canonical_ids(), set(table.control_names.values())
        added = set(table.ids_of_type(TokenType.USER_DEFINED).tolist())
        missing = [n for n in self.needs if n not in names and ids.get(n.encode()) not in added]
        if missing:
            name = tokenizer.vocabulary.model_id
            raise XtokError(
                f"{name} has no token {min(missing)}, which the format {self.name} requires",
                hint=f"use another format ({', '.join(FORMATS)}) or a chat template",
            )
        for i, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            fix = "change the message"
            if role not in self.roles:
                problem = f"has the role {role!r}"
                fix = f"use one of the roles ({', '.join(self.roles)})"
            elif not isinstance(content, str) or message.get("tool_calls"):
                problem = "is not plain text"
            elif role == "assistant" and (
                image := next((p for p in self.image_placeholders if p in content), None)
            ):
                problem = f"is an answer that contains the image placeholder {image}"
            else:
                continue
            raise XtokError(
                f"message {i} {problem}, which the format {self.name} does not allow",
                hint=f"{fix}, or use a chat template that supports this message",
            )


_CONSTANT = re.compile(r"\{%- set (roles|needs|pad_tokens|image_placeholders) = (.+) %\}")
_ALIASES = {"qwen2p0": "chatml", "qwen2p5": "chatml", "llama3p1": "llama3", "llama3p2": "llama3"}


def _load(name: str) -> PromptFormat:
    template = (Path(__file__).parent / f"{_ALIASES.get(name, name)}.jinja").read_text("utf-8")
    values = {name: literal_eval(value) for name, value in _CONSTANT.findall(template)}
    return PromptFormat(name=name, template=template, **values)


_FILES = (path.stem for path in Path(__file__).parent.glob("*.jinja"))
FORMATS: Mapping[str, PromptFormat] = {name: _load(name) for name in sorted((*_FILES, *_ALIASES))}
"""The formats by name. Some formats also have the name that Megatron-LM uses."""
