"""Where targets begin: at the first token that the prompt alone does not have, in whole or in part.

A model that answers a prompt has read its tokens already, so it never writes one of them. For the
chat templates at hand and many conversations, with a tokenizer that merges white space.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chat_families
import numpy as np
import pytest

from xtok.conversation.files import read_conversations
from xtok.conversation.rendering import (
    BEGINS_IN_PROMPT,
    BLOCK_IN_PROMPT,
    NO_TARGETS,
    NOT_GENERATED,
    Conversation,
    render,
)
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer

USER = {"role": "user", "content": "Hi"}
AGAIN = {"role": "user", "content": "again\n"}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CHATS: list[list[dict[str, Any]]] = [
    *([USER, answer(text)] for text in (
        "201", " 201", "\n201\n", "\n\n201", "  \n 201", "\t201 ", "", "é 🌊\r\n",
        "<think>\nhm\n</think>\n\nfour")),
    [{"role": "system", "content": " s "}, USER, answer("\n\n\n")],
    [USER, answer("one"), AGAIN, answer("\ntwo")],
    [USER, answer(" one\n"), AGAIN, answer(" two"), USER, answer("three")],
    [USER, answer("\nfour", reasoning_content="\nhm")],
    [USER, chat_families.CALL, chat_families.RESULT, answer("\n4")],
    [USER, {**chat_families.CALL, "content": None}, chat_families.RESULT, answer(" 4")],
]  # fmt: skip


@pytest.fixture
def library(small: Path) -> Any:
    """Return the byte-level tokenizer as Transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(small / "small-byte-level"))


def or_none(call: Callable[[], Conversation]) -> Conversation | None:
    """Return a conversation, or None if the template rejects the messages."""
    try:
        return call()
    except XtokError:
        return None


def shared(whole: Conversation, asked: Conversation) -> int:
    """Return the number of tokens that contain text of the prompt."""
    size = len(asked.text.encode())
    if whole.text.startswith(asked.text):
        return int(np.searchsorted(whole.bounds[:-1], size))
    width = min(len(whole.ids), len(asked.ids))
    return int(np.append(whole.ids[:width] != asked.ids[:width], True).argmax())


def check_targets(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], template: str | None = None
) -> int:
    """Compare each answer's first target with the prompt alone; return the number of answers."""
    checked = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        make = partial(render, tokenizer, template=template)
        whole = or_none(partial(make, messages[: index + 1]))
        asked = or_none(partial(make, messages[:index], add_generation_prompt=True))
        if whole is None or asked is None:
            continue
        inside = shared(whole, asked)
        wrong = np.flatnonzero(whole.assistant_mask[:inside] & ~asked.assistant_mask[:inside])
        assert not len(wrong), [whole.text[: whole.bounds[i + 1]] for i in wrong]
        checked += 1
    return checked


TEMPLATES = {name: chat_families.TEMPLATES / f"{name}.jinja" for name in chat_families.NAMES}
TEMPLATES |= {path.stem: path for path in chat_families.trl_templates()}


@pytest.mark.real
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_first_target_is_not_in_the_prompt(name: str, small: Path, tmp_path: Path) -> None:
    chat_families.write(name, small / "small-byte-level", tmp_path, TEMPLATES[name].parent)
    tokenizer = load_tokenizer(tmp_path)
    in_parts = [
        [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in chat]
        for chat in CHATS
    ]
    assert sum(check_targets(tokenizer, chat) for chat in [*CHATS, *in_parts]) >= 15


@pytest.mark.parametrize("name", ["chatml", "plain", "identity"])
def test_the_first_target_of_formats_is_not_in_the_prompt(name: str, byte_level: Tokenizer) -> None:
    assert sum(check_targets(byte_level, chat, name) for chat in CHATS) >= 10


# Control tokens that include the white space after them


PHI = """\
{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def test_a_control_token_that_strips_white_space(library: Any, tmp_path: Path) -> None:
    from tokenizers import AddedToken

    names = ["<|user|>", "<|assistant|>", "<|end|>"]
    library.add_special_tokens(
        {"additional_special_tokens": [AddedToken(n, rstrip=True, special=True) for n in names]}
    )
    library.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for content, begins in (("201", False), (" 201", True), ("\n201", True)):
        chat = render(tokenizer, [USER, answer(content)], template=PHI)
        written = [tokenizer.table.name(i) for i in chat.ids[chat.assistant_mask].tolist()]
        assert written == ["201", "<|end|>"] or "".join(written) == "201<|end|>"
        assert (BEGINS_IN_PROMPT in chat.notes) == begins


def test_line_breaks_that_merge(byte_level: Tokenizer) -> None:
    chat = render(byte_level, [USER, answer("\n201")], template="chatml")
    first = int(chat.assistant_mask.argmax())
    assert chat.text.encode()[: chat.bounds[first]].endswith(b"assistant\n\n")
    assert chat.notes == (BEGINS_IN_PROMPT,)


# A prompt that depends on the system message


SMOL = """\
{%- set empty = '<think>\\n\\n</think>\\n' if '/no_think' in messages[0].content else '' %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ (empty if m.role == 'assistant' else '') + m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + empty }}{% endif %}"""


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_prompt_that_depends_on_the_system_message(role: str, byte_level: Tokenizer) -> None:
    messages = [{"role": role, "content": "/no_think"}, USER, answer("four")]
    assert check_targets(byte_level, messages, SMOL) == 1
    chat = render(byte_level, messages, template=SMOL)
    first = int(chat.assistant_mask.argmax())
    assert chat.text.encode()[chat.bounds[first] :] == b"four<|im_end|>\n"


# A prompt that begins with the white space after the previous turn


def test_an_empty_answer_of_alpaca(byte_level: Tokenizer) -> None:
    template = (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}"
        "{% if m.role == 'assistant' %}<|end_of_text|>{% endif %}"
        "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}{% endif %}"
    )
    chat = render(byte_level, [USER, answer(""), USER, answer("four")], template=template)
    names = [byte_level.table.name(i) for i in chat.ids[chat.assistant_mask].tolist()]
    assert "".join(names) == "<|end_of_text|>four<|end_of_text|>"


# Templates for training


BLOCKS = """\
{% for m in messages %}{% if m.role == 'assistant' and m.keep %}
{%- generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}{% endfor %}"""


@pytest.mark.parametrize("trains", [(), (1,), (3,), (1, 3)])
def test_rows_without_a_block(library: Any, byte_level: Tokenizer, trains: tuple[int, ...]) -> None:
    messages = [USER, answer("one"), AGAIN, answer("two")]
    messages = [{**m, "keep": i in trains} for i, m in enumerate(messages)]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = library.apply_chat_template(messages, chat_template=BLOCKS, **options)
    chat = render(byte_level, messages, template=BLOCKS)
    assert chat.ids.tolist() == expected["input_ids"]
    assert chat.assistant_mask.astype(int).tolist() == expected["assistant_masks"]
    assert (NOT_GENERATED in chat.notes) == (trains != (1, 3))


def test_a_block_that_begins_in_the_prompt(byte_level: Tokenizer) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '\\n' + m.content }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ '\\n' + m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
    )
    chat = render(byte_level, [USER, answer("201")], template=template)
    first = int(chat.assistant_mask.argmax())
    assert chat.text.encode()[chat.bounds[first] :] == b"201<|im_end|>"
    assert chat.notes == (BLOCK_IN_PROMPT,)


@pytest.mark.parametrize("content", ["yo", ""])
def test_answer_without_text_is_noted(byte_level: Tokenizer, content: str) -> None:
    flat = "Do: {{ messages[0].content }}\nAnswer:{{ messages[1].content }}{{ eos_token }}"
    chat = render(byte_level, [USER, answer(content)], template=flat)
    assert (NO_TARGETS in chat.notes) == (content == "") == (not chat.assistant_mask.any())


# Keys that are null


NULLS: list[dict[str, Any]] = [
    {**chat_families.CALL, "content": None},
    answer("four", tool_calls=None, reasoning_content=None, name=None),
    answer("four", thinking=None, reasoning="hm"),
    answer(None, tool_calls=[{"type": "function", "id": None, "function": {
        "name": "add", "arguments": {"a": None, "b": [None, {"c": None}]}}}]),
]  # fmt: skip
SHOWS = (
    "{% for m in messages %}{{ m | tojson }}{{ m.content }}{{ 'content' in m }}"
    "{{ m.tool_calls is defined }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("message", NULLS)
def test_null_keys_are_omitted_as_in_transformers(
    library: Any, byte_level: Tokenizer, message: dict[str, Any], tmp_path: Path
) -> None:
    messages = [USER, message]
    expected = library.apply_chat_template(messages, chat_template=SHOWS, tokenize=False)
    assert render(byte_level, messages, template=SHOWS).text == expected
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    [record] = read_conversations(tmp_path / "chat.json")
    assert render(byte_level, record.messages, template=SHOWS).text == expected


@pytest.mark.parametrize("missing", [float("nan"), np.float64("nan")])
def test_pandas_nan_is_a_null(byte_level: Tokenizer, missing: float) -> None:
    calls = {**chat_families.CALL, "content": None}
    for null, nan in ((calls, {**calls, "content": missing}), (
        answer("four"), answer("four", tool_calls=missing, reasoning_content=missing)
    )):  # fmt: skip
        texts = [render(byte_level, [USER, m], template=SHOWS).text for m in (null, nan)]
        assert texts[0] == texts[1]


def test_numpy_values_are_written_as_json(byte_level: Tokenizer) -> None:
    def called(numbers: Any, one: Any) -> Any:
        function = {"name": "add", "arguments": {"numbers": numbers, "one": one}}
        return answer("", tool_calls=[{"type": "function", "function": function}])

    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    results = [called([1, 2], 0.5), called(np.array([1, 2]), np.float32(0.5))]
    texts = [render(byte_level, [message], template=template).text for message in results]
    assert texts[0] == texts[1]


def test_a_call_without_a_generation_prompt(byte_level: Tokenizer) -> None:
    """The header before a call is not a target, like the header before text."""
    body = "<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    body += (
        "<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    )
    template = f"{{% for m in messages %}}{body}{{% endfor %}}"
    call = {**chat_families.CALL, "content": ""}
    chat = render(byte_level, [USER, call], template=template)
    first = int(chat.assistant_mask.argmax())
    assert chat.text.encode()[chat.bounds[first] :].startswith(b"<tool_call>add")
