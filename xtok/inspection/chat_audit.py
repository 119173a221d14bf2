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
from xtok.tokenizers.hub import quiet_hub


@dataclass(frozen=True, kw_only=True)
class ChatAudit:
    """What one side makes of some conversations, and where its library differs."""

    num_rows: int
    num_tokens: int
    num_targets: int
    roles: dict[str, int]  # messages by their role
    notes: dict[str, int]  # by note, its rows: what is left out, keys that nobody reads, …
    errors: dict[str, int]  # likewise, of rows that cannot be rendered
    library: str  # what the rows were compared with; "" if there is nothing
    other_ids: tuple[int, ...]  # the rows whose ids differ from the library's
    other_masks: tuple[int, ...]  # those whose targets do, where a template has generation blocks


def audit_chats(
    tokenizer: Tokenizer,
    rows: Sequence[ChatRecord],
    *,
    template: str | Path | None = None,
    library: Any = None,
) -> ChatAudit:
    """Render conversations as training does, and compare them with `apply_chat_template`.

    Targets may lack what the library counts and a note explains: tokens of the prompt, and messages
    of weight 0.

    Args:
        tokenizer: of one side.
        rows: conversations, as `chat_record` and `read_conversations` return them.
        template: as in `render`.
        library: a Transformers tokenizer; by default that of the tokenizer's folder or repo.

    Raises:
        XtokError: if there is no template.
    """
    is_format = isinstance(find_template(tokenizer, template), PromptFormat)  # no library has it
    if library is None and not is_format:
        library = library_of(tokenizer)
    roles, notes, errors = Counter[str](), Counter[str](), Counter[str]()
    chats: dict[int, Conversation] = {}
    others: dict[str, list[int]] = {"ids": [], "masks": [], "": []}
    for number, row in enumerate(rows):
        try:
            chat = row.render(tokenizer, template)
            chats[number] = chat
            roles.update(span.role for span in chat.message_spans)
            notes.update(chat.notes)
            if library is not None:
                theirs = _by_library(library, tokenizer, template, row)
                others[_differing(chat, row, theirs)].append(number)
        except XtokError as error:
            errors[error.message] += 1
    return ChatAudit(
        num_rows=len(rows),
        num_tokens=sum(len(chat.ids) for chat in chats.values()),
        num_targets=sum(int(chat.assistant_mask.sum()) for chat in chats.values()),
        roles=dict(roles),
        notes=dict(notes),
        errors=dict(errors),
        library="" if library is None else type(library).__name__,
        other_ids=tuple(others["ids"]),
        other_masks=tuple(others["masks"]),
    )


def library_of(tokenizer: Tokenizer) -> Any:
    """Return what AutoTokenizer loads from a tokenizer's folder or repo; None for other kinds.

    Raises:
        XtokError: if it loads nothing from there.
    """
    location, revision = tokenizer.location, tokenizer.vocabulary.revision
    if location is None or (isinstance(location, Path) and not location.is_dir()):
        return None
    from transformers import AutoTokenizer

    try:
        with quiet_hub():
            return AutoTokenizer.from_pretrained(location, revision=revision, local_files_only=True)
    except Exception as error:  # whatever the libraries raise
        raise XtokError(
            f"AutoTokenizer does not load {location}, to compare conversations with: {error}",
            hint="give the folder all files of its tokenizer",
        ) from error


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


def _differing(chat: Conversation, row: ChatRecord, theirs: Mapping[str, Any]) -> str:
    """Return what of a row the library has otherwise: "ids", "masks", or nothing."""
    if theirs["input_ids"] != chat.ids.tolist():
        return "ids"
    ours = chat.assistant_mask
    masks = np.array(theirs.get("assistant_masks", ours), np.bool_)
    is_told = {BEGINS_IN_PROMPT, BLOCK_IN_PROMPT} & {*chat.notes} or any(
        name in message for message in row.messages for name in WEIGHTS
    )
    is_other = (ours & ~masks).any() if is_told else (ours != masks).any()
    return "masks" if is_other else ""
