"""Chats as messages, and the texts of their spans and targets."""

from __future__ import annotations

from typing import Any

import chat_families
import numpy as np
from checks import not_none

from xtok.conversation import Conversation
from xtok.tokenizers import Tokenizer

SPACED: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Wie hoch, 3 < 4?\n"},
    {"role": "assistant", "content": "  201 Stufen 🌊.\n"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "201"},
]
"""A chat with spaces and line ends around its contents, which some templates remove."""

TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "add 2 and 2"},
    chat_families.CALL,
    chat_families.RESULT,
    {"role": "assistant", "content": "It is 4"},
]

GENERATES = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{{- 'A:<|im_start|>' }}{% generation %}{{ m.content }}<|end_of_text|>{% endgeneration %}{{ '\n' }}
{%- else %}{{- m.content + '\n' }}{% endif %}
{%- endfor %}"""


def shown(conversation: Conversation, span: tuple[int, int]) -> str:
    """Return the text of a span of tokens."""
    data = conversation.text.encode()
    start, end = (int(conversation.bounds[i]) for i in span)
    return data[start:end].decode()


def each(body: str) -> str:
    """Return a template that renders each message `m` in the same way."""
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


def targets(conversation: Conversation) -> list[str]:
    """Return the spans of text that are training targets."""
    edges = np.flatnonzero(np.diff(np.r_[0, conversation.assistant_mask.astype(int), 0]))
    return [shown(conversation, (a, b)) for a, b in edges.reshape(-1, 2).tolist()]


def contents(conversation: Conversation) -> list[str | None]:
    return [
        None if s.content is None else conversation.text[slice(*s.content.chars)]
        for s in conversation.message_spans
    ]


def check_spans(
    conversation: Conversation, messages: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    """Check properties of every conversation."""
    data = conversation.text.encode()
    tokens, names = tokenizer.table.tokens(), tokenizer.table.control_names
    assert conversation.bounds[0] == 0
    assert conversation.bounds[-1] == len(data)
    for i, token_id in enumerate(conversation.ids.tolist()):
        token = names[token_id].encode() if token_id in names else tokens[token_id]
        written = data[conversation.bounds[i] : conversation.bounds[i + 1]]
        assert written == token or (i == 0 and b" " + written == token)  # a dummy prefix
    for message, span in zip(messages, conversation.message_spans, strict=True):
        assert span.role == message["role"]
        for stretch in (span.whole, span.content):
            if stretch is not None:
                a, b = stretch.chars
                assert data[slice(*stretch.bytes)].decode() == conversation.text[a:b]
                start, end = stretch.tokens
                assert conversation.bounds[start] <= stretch.bytes[0]
                assert conversation.bounds[end] >= stretch.bytes[1]
        if span.verbatim:
            text = conversation.text[slice(*not_none(span.content).chars)]
            assert text == message["content"][slice(*not_none(span.source))]


def decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = tokenizer.table.control_names
    return b"".join(tokenizer.table[i] or names[i].encode() for i in ids).decode()
