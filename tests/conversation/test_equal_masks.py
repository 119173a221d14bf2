"""Equal texts have equal masks, for headers from `m.role` and for literal headers."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import chat_families
import numpy as np
import pytest

from xtok.conversation import Conversation, render
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer

USER = {"role": "user", "content": "How many?"}
BOATS = {"role": "assistant", "content": "two boats"}
THOUGHT = {"role": "assistant", "content": "four", "reasoning_content": "hm"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "bos": [USER, BOATS, USER, BOATS],
    "thought": [USER, BOATS, USER, THOUGHT],
    "call": [USER, chat_families.CALL, {**chat_families.RESULT, "role": "user"}, BOATS],
}
FAMILIES = {
    "chatml": ("<|im_start|>", "", "\n", "<|im_end|>\n"),
    "llama 3": ("<|start_header_id|>", "", "<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "", "\n", "<end_of_turn>\n"),
    "phi 3": ("<|", "", "|>\n", "<|end|>\n"),
    "glm": ("<|", "", "|>\n", ""),
    "deepseek": ("<｜", "capitalize", "｜>", "<｜end▁of▁sentence｜>"),
    "harmony": ("<|start|>", "", "<|message|>", "<|end|>"),
    "granite": ("<|start_of_role|>", "", "<|end_of_role|>", "<|end_of_text|>\n"),
    "vicuna": ("", "upper", ": ", "<|end_of_text|>"),
    "claude 2": ("\n\n", "capitalize", ": ", ""),
    "alpaca": ("### ", "capitalize", ":\n", "\n\n"),
    "nemotron": ("<extra_id_1>", "capitalize", "\n", "\n"),
}
BODIES = {
    "bos": "{{ m.content }}",
    "thought": "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n"
    "{% endif %}{{ m.content }}",
    "call": "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{{ m.content }}",
}


def header(family: str, role: str) -> str:
    """Return the header of a role."""
    start, case, end, _ = FAMILIES[family]
    return start + (getattr(role, case)() if case else role) + end


def template(family: str, body: str, *, has_prompt: bool, is_literal: bool) -> str:
    start, case, end, turn_end = FAMILIES[family]
    written = start + "{{ m.role" + (f" | {case}" if case else "") + " }}" + end
    if is_literal:
        written = "{% if m.role == 'user' %}" + header(family, "user")
        written += "{% else %}" + header(family, "assistant") + "{% endif %}"
    bos = "{% if loop.first %}<|begin|>{% endif %}" if body == "bos" else ""
    text = "{% for m in messages %}" + bos + written + BODIES[body] + turn_end + "{% endfor %}"
    prompt = header(family, "assistant")
    return text + "{% if add_generation_prompt %}" + prompt + "{% endif %}" if has_prompt else text


def targets(chat: Conversation) -> list[str]:
    edges = np.flatnonzero(np.diff(np.r_[0, chat.assistant_mask.astype(int), 0])).reshape(-1, 2)
    data = chat.text.encode()
    return [data[chat.bounds[a] : chat.bounds[b]].decode() for a, b in edges.tolist()]


TABLE = [*product(FAMILIES, BODIES, (False, True))]


def test_the_table_is_large() -> None:
    assert len(TABLE) == 72


@pytest.mark.parametrize(("family", "body", "has_prompt"), TABLE)
def test_headers_with_the_role_and_with_a_literal(
    byte_level: Tokenizer, family: str, body: str, has_prompt: bool
) -> None:
    ways = [
        template(family, body, has_prompt=prompt, is_literal=literal)
        for prompt, literal in ((has_prompt, False), (has_prompt, True), (True, True))
    ]
    role, literal, prompt = (render(byte_level, CHATS[body], template=way) for way in ways)
    assert role.text == literal.text == prompt.text
    assert targets(role) == targets(literal) == targets(prompt)
    assert literal.assistant_mask.any()


EXPECTED = {
    ("chatml", "bos"): ["two boats<|im_end|>", "two boats<|im_end|>"],
    ("chatml", "thought"): [
        "<think>\n\n</think>\ntwo boats<|im_end|>", "<think>\nhm\n</think>\nfour<|im_end|>"],
    ("chatml", "call"): ['<call>add{"a": 2, "b": "zwei"}</call><|im_end|>', "two boats<|im_end|>"],
    ("gemma", "bos"): ["two boats<end_of_turn>", "two boats<end_of_turn>"],
    ("deepseek", "call"): [
        '<call>add{"a": 2, "b": "zwei"}</call><｜end▁of▁sentence｜>',
        "two boats<｜end▁of▁sentence｜>"],
    ("alpaca", "thought"): ["<think>\n\n</think>\ntwo boats", "<think>\nhm\n</think>\nfour"],
}  # fmt: skip


@pytest.mark.parametrize(("family", "body"), EXPECTED)
def test_targets_without_a_generation_prompt(byte_level: Tokenizer, family: str, body: str) -> None:
    way = template(family, body, has_prompt=False, is_literal=True)
    assert targets(render(byte_level, CHATS[body], template=way)) == EXPECTED[family, body]


# Real templates, with the role replaced by a literal, and without their generation prompt

ROLE = re.compile(r"(?<=[+~{] )message(\.role|\['role'\]|\[\"role\"\])")
ROLES = "{'user': 'user', 'assistant': 'assistant', 'system': 'system', 'tool': 'tool'}"


def or_none(tokenizer: Tokenizer, chat: list[dict[str, Any]], way: str) -> Conversation | None:
    try:
        return render(tokenizer, chat, template=way)
    except XtokError:
        return None


@pytest.mark.real
@pytest.mark.parametrize("name", chat_families.NAMES)
def test_real_templates_have_equal_masks_for_literal_roles(
    name: str, small: Path, tmp_path: Path
) -> None:
    chat_families.write(name, small / "small-byte-level", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    source = (chat_families.TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    for chat in (*CHATS.values(), [USER, chat_families.CALL, chat_families.RESULT, BOATS]):
        for way in (source, source.replace("if add_generation_prompt", "if false")):
            first = or_none(tokenizer, chat, way)
            other = or_none(tokenizer, chat, ROLE.sub(lambda m: f"{ROLES}[{m[0]}]", way))
            assert (first is None) == (other is None)
            if first is not None and other is not None:
                assert first.text == other.text
                assert targets(first) == targets(other)
