"""Errors of conversations and chat templates: causes, messages and hints."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from error_causes import (
    ANSWER,
    QUESTION,
    Errors,
    file,
    folder,
    messages_test,
    parquet,
    small_tokenizer,
)

from xtok.conversation import render, tool_suffix
from xtok.conversation.files import read_conversations
from xtok.conversation.formats import FORMATS
from xtok.tokenizers import load_tokenizer


def named_chat(messages: list[dict[str, Any]]) -> object:
    """Render with a tokenizer that has only a named template."""
    named = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    return render(load_tokenizer(folder("tokenizer_config", chat_template=named)), messages)


def read_chats(name: str, content: str | bytes) -> object:
    return list(read_conversations(Path(file(name, content))))


TOOL_RESULT = {"role": "tool", "content": "four"}

DROPS = "{% if m.role != 'tool' %}{{ m.role }}<|im_end|>{% endif %}"

WITHIN = "{% if m.role != 'tool' %}{{ m.role }}<|im_end|>{% if not loop.first %}"
WITHIN += "{{ messages[loop.index].content + m.content }}{% endif %}{% endif %}"


def chat(messages: list[Any], template: str | None = "chatml", **options: Any) -> object:
    return render(small_tokenizer(), messages, template=template, **options)


def suffix(body: str, *messages: dict[str, str]) -> object:
    return tool_suffix(small_tokenizer(), messages or [TOOL_RESULT], template=each(body))


def each(body: str) -> str:
    """Return a template that renders each message `m` in the same way."""
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


ERRORS: Errors = {
    'write a conversation as [{"role": "user", "content": "…"}, …], or {"messages": […], '
    '"tools": […]}': [
        (
            lambda: read_chats("a.jsonl", '[{"role": "user", "content": "x"}]\n{"mess'),
            "a.jsonl, line 2: not JSON: …",
        ),
        (lambda: read_chats("a.json", "[\n{},\n{x}]"), "a.json, line 3: not JSON: …"),
        (
            lambda: read_chats("a.jsonl", "[{}] [{}]"),
            "a.jsonl, line 1: contains more than one JSON value",
        ),
        (
            lambda: read_chats("a.parquet", parquet(text=["x"], id=[1]).read_bytes()),
            "a.parquet, row 0: the row has no messages, only: text, id",
        ),
        (lambda: read_chats("a.json", "[[], []]"), "a.json, row 0: the list of messages is empty"),
        (
            lambda: read_chats("a.json", '{"messages": [{}], "tools": "x"}'),
            "a.json: the value of 'tools': not JSON: Expecting value at column 1",
        ),
        (
            lambda: read_chats("a.json", '{"messages": [{}], "chat_template_kwargs": []}'),
            "a.json: the value of 'chat_template_kwargs' is not an object",
        ),
        (lambda: read_chats("a.json", ""), "a.json: the file contains no conversation"),
        (lambda: read_chats("a.json", "3"), "a.json: the value of 'messages' is not a list"),
    ],
    "check the path and its permissions; if the file is damaged, download it again": [
        (
            lambda: read_chats("a.json", gzip.compress(b"[]" * 999)[:-9]),
            "the text a.json cannot be read: …",
        ),
        (
            lambda: read_chats("a.parquet", "PAR1"),
            "the text a.parquet cannot be read: …",
        ),
        (
            lambda: list(read_conversations(Path("b.json"))),
            "the text b.json cannot be read: No such file or directory",
        ),
    ],
    "if the file is latin1, convert it: iconv -f latin1 -t UTF-8": [
        (
            lambda: read_chats("a.json", '[{"role": "\xff"}]'.encode("latin1")),
            "a.json is not UTF-8: byte 0xff at offset 11, in line 1",
        ),
    ],
    'write each message as an object such as {"role": "user", "content": "Hello"}': [
        (lambda: chat([{"content": "x"}]), "message 0 has no role"),
    ],
    "use one of the roles (system, user, assistant, tool), or use a chat template that "
    "supports this message": [
        (
            lambda: chat([{"role": "judge", "content": ""}]),
            "message 0 has the role 'judge', which the format chatml does not allow",
        ),
    ],
    "change the message, or use a chat template that supports this message": [
        (
            lambda: chat([{"role": "user", "content": None}]),
            "message 0 is not plain text, which the format chatml does not allow",
        ),
        (
            lambda: chat([{"role": "assistant", "content": "a <image>"}]),
            "message 0 is an answer that contains the image placeholder <image>, which the "
            "format chatml does not allow",
        ),
    ],
    "write both surrogates of the pair, or the character itself": [
        (
            lambda: chat([{"role": "user", "content": "a\ud83d"}]),
            "message 0 contains the unpaired surrogate '\\ud83d'",
        ),
    ],
    "write its content as text, or as a list of parts": [
        (
            lambda: chat([{"role": "user", "content": json.loads("[" * 900 + "]" * 900)}]),
            "message 0 is nested more than 100 levels deep",
        ),
    ],
    "give a Jinja file with template=, or one of the formats …": [
        (lambda: chat([QUESTION], None), "small-byte-level has no chat template"),
        (lambda: chat([QUESTION], "none.jinja"), "the chat template none.jinja is not a file"),
    ],
    "give one of the existing names, or a Jinja file with template=, or one of the formats …": [
        (lambda: named_chat([QUESTION]), "model has no chat template named default, only rag"),
    ],
    "fix the template, or use another template with template=": [
        (
            lambda: chat([QUESTION], "{% for %}"),
            "the chat template of small-byte-level is not a Jinja template: line 1: …",
        ),
    ],
    "change the messages, or use another template with template=": [
        (
            lambda: chat([QUESTION], each("{{ raise_exception('no') }}")),
            "the chat template of small-byte-level raises an error at message 0 (user): no",
        ),
        (
            lambda: render(
                small_tokenizer("small.model"),
                [{"role": "system", "content": "s"}],
                template="mistral",
            ),
            "the format mistral of small.model raises an error: there is no user message that the "
            "system text could be in",
        ),
    ],
    "use a template that writes this value (template=), or remove the value": [
        (
            lambda: chat([QUESTION], each("{{ m.role }}")),
            "message 0 (user): the template drops its content",
        ),
        (
            lambda: chat([{**QUESTION, "content": "xy"}], each("{{ m.content[:1] }}")),
            "message 0 (user): the template drops the part 'y' of its content",
        ),
        (lambda: chat([QUESTION], tools=[{"name": "add"}]), "the template drops tools[0].name"),
    ],
    'write tools as [{"type": "function", "function": {"name": …}}, …]': [
        (
            lambda: chat([QUESTION], tools=[7]),
            "the tools contain '7', which is not a JSON schema",
        ),
    ],
    "remove it from the variables": [
        (
            lambda: chat([QUESTION], variables={"messages": []}),
            "the template variables contain messages, which is a separate argument",
        ),
        (
            lambda: chat([QUESTION], variables={1: 2}),
            "the template variables contain 1, which is not a string",
        ),
        (
            lambda: chat([QUESTION], variables={"documents": {"title": "Harbour"}}),
            "the template variables contain documents, which is not a list",
        ),
    ],
    "use 1 to train on the message, or 0 to exclude it": [
        (
            lambda: chat([{"role": "assistant", "content": "yes", "weight": 0.5}]),
            "message 0 (assistant) has the weight '0.5'",
        ),
    ],
    "convert the value to a JSON type, for example with array.tolist()": [
        (
            lambda: chat(
                [{**QUESTION, "content": [{"type": "text", "text": b"yes"}]}],
                each("{% for p in m.content %}{{ p.text }}{% endfor %}"),
            ),
            "message 0: content[0].text is a bytes, which is not a JSON type",
        ),
    ],
    "use another format (…": [
        (
            lambda: chat([QUESTION], "mistral-v1"),
            "small-byte-level has no token </s>, which the format mistral-v1 requires",
        ),
    ],
    "pass pad_id to collate; the format uses <|finetune_right_pad_id|>, <|finetune_right_pad|>": [
        (
            lambda: FORMATS["llama3"].pad_id(small_tokenizer(r"small.tiktoken@\w+|\W+").table),
            "the vocabulary has no padding token for the format llama3",
        ),
    ],
    "use a template that has tools and end-of-turn tokens (template=)": [
        (
            lambda: suffix(
                "{{ m.content + ' t' }}",
                QUESTION,
                ANSWER,
                {"role": "tool", "content": "he cat"},
            ),
            "message 1 (assistant) ends inside a token",
        ),
        (
            lambda: suffix(DROPS, {"role": "tool", "content": ""}),
            "message 2 (tool) is not in the text",
        ),
        (
            lambda: suffix(WITHIN, QUESTION, ANSWER, TOOL_RESULT),
            "message 1 (assistant) continues after the tool messages",
        ),
    ],
}

test_conversation_errors = messages_test(ERRORS)
