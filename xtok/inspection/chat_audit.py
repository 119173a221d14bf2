"""What one side makes of some conversations, beside what its folder's own library makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xtok.conversation import (
    BEGINS_IN_PROMPT,
    BLOCK_IN_PROMPT,
    Conversation,
    find_template,
)
from xtok.conversation.files import ChatRecord
from xtok.conversation.formats import PromptFormat
from xtok.conversation.leaves import WEIGHTS
from xtok.conversation.templates import has_generation
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.library import ids_apart


@dataclass(frozen=True, kw_only=True)
class ChatAudit:
    """What one side makes of some conversations, and where its library differs."""

    num_rows: int
    num_tokens: int
    num_targets: int
    roles: dict[str, int]  # messages by their role
    notes: dict[str, int]  # by note, its rows: what is left out, keys that nobody reads, …
    errors: dict[str, int]  # likewise, of rows that cannot be rendered
    # The rows whose ids are not the library's, and those whose targets are not, where a template
    # has generation blocks; each with both. None where there is no library, but a file or a format.
    other_ids: dict[int, str] | None
    other_masks: dict[int, str] | None


def audit_chats(
    tokenizer: Tokenizer,
    rows: Sequence[ChatRecord],
    *,
    template: str | Path | None = None,
) -> ChatAudit:
    """Render conversations as training does, and compare them with `apply_chat_template`.

    Targets may lack what the library counts and a note explains: tokens of the prompt, and messages
    of weight 0.

    Args:
        tokenizer: of one side.
        rows: conversations, as `chat_record` and `read_conversations` return them.
        template: as in `render`.

    Raises:
        XtokError: if there is no template.
    """
    is_format = isinstance(find_template(tokenizer, template), PromptFormat)  # no library has it
    library = None if is_format else tokenizer.library
    roles, notes, errors = Counter[str](), Counter[str](), Counter[str]()
    chats: dict[int, Conversation] = {}
    other_ids: dict[int, str] = {}
    other_masks: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            chat = row.render(tokenizer, template)
            chats[number] = chat
            roles.update(span.role for span in chat.message_spans)
            notes.update(chat.notes)
            if library is not None:
                theirs = _by_library(library, tokenizer, template, row)
                if (ids := chat.ids.tolist()) != theirs["input_ids"]:
                    other_ids[number] = ids_apart(ids, theirs["input_ids"])
                elif masks := _other_masks(chat, row, theirs):
                    other_masks[number] = masks
        except XtokError as error:
            errors[error.message] += 1
    return ChatAudit(
        num_rows=len(rows),
        num_tokens=sum(len(chat.ids) for chat in chats.values()),
        num_targets=sum(int(chat.assistant_mask.sum()) for chat in chats.values()),
        roles=dict(roles),
        notes=dict(notes),
        errors=dict(errors),
        other_ids=None if library is None else other_ids,
        other_masks=None if library is None else other_masks,
    )


def _by_library(
    library: Any, tokenizer: Tokenizer, template: str | Path | None, row: ChatRecord
) -> dict[str, Any]:
    """Return a row's ids and masks by `apply_chat_template`.

    Raises:
        XtokError: if it raises.
    """
    chosen = find_template(tokenizer, template, tools=bool(row.tools))
    try:
        found: dict[str, Any] = library.apply_chat_template(
            row.messages,
            chat_template=None if template is None else chosen,
            return_dict=True,
            return_assistant_tokens_mask=has_generation(str(chosen)),
            **{"tools": row.tools or None, **row.variables},
        )
    except Exception as error:  # the template's, or of a kind of data that it does not take
        raise XtokError(
            f"apply_chat_template of {type(library).__name__} raises: {error}",
            hint="write the conversation as Transformers takes it",
        ) from error
    return found


def _other_masks(chat: Conversation, row: ChatRecord, theirs: Mapping[str, Any]) -> str:
    """Show a row's targets beside the library's, where they differ."""
    ours = chat.assistant_mask
    masks = np.array(theirs.get("assistant_masks", ours), np.bool_)
    is_told = {BEGINS_IN_PROMPT, BLOCK_IN_PROMPT} & {*chat.notes} or any(
        name in message for message in row.messages for name in WEIGHTS
    )
    is_other = (ours & ~masks).any() if is_told else (ours != masks).any()
    return ids_apart(chat.ids[ours].tolist(), chat.ids[masks].tolist()) if is_other else ""
