"""Conversations from ids, with the chat templates of real models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_families
import numpy as np
import pytest
from chat_families import CALL, RESULT
from checks import not_none
from hypothesis import given, settings
from hypothesis import strategies as st

from xtok.conversation import ReadBack, read_back, render
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer

EVIDENCE = Path(__file__).parents[2] / "docs" / "study" / "evidence.md"
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "How high, 3 < 4?"}
ANSWER = {"role": "assistant", "content": "201 steps 🌊."}
MORE = {"role": "user", "content": "again\n\nplease"}
LAST = {"role": "assistant", "content": "201, as I said"}
THOUGHT = {"role": "assistant", "content": "It is 4", "reasoning_content": "two and\n\ntwo"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number", "description": "x"}, "b": {"type": "string"}},
    "required": ["a"],
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add <two>", "parameters": PARAMETERS},
}

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a prompt": ([ASK], {"add_generation_prompt": True}),
    "one turn": ([ASK, ANSWER], {}),
    "several turns": ([ASK, ANSWER, MORE, LAST], {}),
    "the last answer cut off": ([ASK, ANSWER, MORE, LAST], {}),
    "a system message": ([SYSTEM, ASK, ANSWER], {}),
    "thinking": ([ASK, THOUGHT], {}),
    "tools": ([ASK, ANSWER], {"tools": [ADD]}),
    "calls and what tools say": ([ASK, CALL, RESULT, ANSWER], {"tools": [ADD]}),
    "the same, asking for an answer": (
        [ASK, CALL, RESULT], {"tools": [ADD], "add_generation_prompt": True},
    ),
}  # fmt: skip
READ, SAME_IDS, NONE, NOT_WRITTEN = "read", "part of the user's message", "None", "not written"


def plain(messages: Any) -> list[dict[str, Any]]:
    """Return messages without ignored keys; content with a single part becomes text."""
    simplified = []
    for message in messages:
        content = message["content"]
        short = {"role": message["role"], "content": content}
        if not isinstance(content, str):
            short["content"] = content[0]["text"]
        if "tool_calls" in message:
            short["calls"] = [call["function"] for call in message["tool_calls"]]
        if "reasoning_content" in message:
            short["thinking"] = message["reasoning_content"]
        simplified.append(short)
    return simplified


def outcome(tokenizer: Tokenizer, case: str) -> str:
    """Return the result of reading the ids of a case."""
    messages, options = CASES[case]
    try:
        chat = render(tokenizer, messages, **options)
    except XtokError:
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            chat = render(tokenizer, parts, **options)
        except XtokError:
            return NOT_WRITTEN
    if case == "thinking" and "two and" not in chat.text:
        return NOT_WRITTEN
    if "tools" in options and "add" not in chat.text:
        return NOT_WRITTEN
    ids, expected = chat.ids, plain(messages)
    if "cut off" in case:
        content = not_none(chat.message_spans[-1].content)
        ids = ids[: content.tokens[1] - 2]
        data = chat.text.encode()[content.bytes[0] : chat.bounds[len(ids)]]
        expected[-1]["content"] = data.decode()
    conversation = read_back(tokenizer, ids.tolist())
    if conversation is None:
        return NONE
    proved(tokenizer, ids, conversation)
    if plain(conversation.messages) == expected:
        assert conversation.tools == (options.get("tools") if "Add <two>" in chat.text else None)
        assert conversation.add_generation_prompt == ("add_generation_prompt" in options)
        return READ
    joined = f"{SYSTEM['content']}\n\n{ASK['content']}"
    assert plain(conversation.messages) == [{**ASK, "content": joined}, ANSWER]
    return SAME_IDS


def proved(tokenizer: Tokenizer, ids: Any, read: ReadBack) -> None:
    """Check that the conversation renders as the ids, or as a continuation of the ids."""
    again = render(
        tokenizer, read.messages, tools=read.tools, variables=read.variables,
        add_generation_prompt=read.add_generation_prompt,
    )  # fmt: skip
    assert again.ids[: len(ids)].tolist() == ids.tolist() == read.conversation.ids.tolist()
    assert read.conversation.bounds.tolist() == again.bounds[: len(ids) + 1].tolist()
    mask = again.assistant_mask[: len(ids)].tolist()
    assert read.conversation.assistant_mask.tolist() == mask


Family = Callable[[str], Tokenizer]
TEMPLATES = {path.stem: path.parent for path in chat_families.trl_templates()}


@pytest.fixture(scope="module")
def family(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Return a small tokenizer with one of TRL's templates and its control tokens."""
    pytest.importorskip("trl")

    def make(name: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp(name)
        chat_families.write(name, small / "small-byte-level", folder, TEMPLATES[name])
        return load_tokenizer(folder)

    return make


ALL = dict.fromkeys(CASES, READ)
NO_TOOLS = dict.fromkeys(list(CASES)[-3:], NOT_WRITTEN)
NO_CALLS = dict.fromkeys(list(CASES)[-2:], NONE)
OWN_TOOLS = dict.fromkeys(list(CASES)[-3:], NONE)
NO_THINKING = {"thinking": NOT_WRITTEN}
OUTCOMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(TEMPLATES, ALL | NO_THINKING | NO_TOOLS),
    **dict.fromkeys(["gemma", "gemma_training"], ALL | NO_THINKING | NO_TOOLS
                    | {"a system message": NOT_WRITTEN}),
    **dict.fromkeys(["gemma3", "gemma3_training"], ALL | NO_THINKING | NO_TOOLS
                    | {"a system message": SAME_IDS}),
    # These templates separate roles with plain text, which can also occur in messages.
    **dict.fromkeys(["llava_next", "llava_next_training"],
                    dict.fromkeys(CASES, NONE) | NO_THINKING | NO_TOOLS),
    **dict.fromkeys(["lfm2", "lfm2_training"],
                    ALL | NO_THINKING | NO_TOOLS | {"tools": READ}),
    **dict.fromkeys(["lfm2_v2", "lfm2_v2_training"], ALL | NO_THINKING | NO_CALLS),
    **dict.fromkeys(["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"], ALL | NO_CALLS),
    # Templates with special formats for tools: TypeScript, XML.
    **dict.fromkeys(["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4"],
                    ALL | NO_THINKING | OWN_TOOLS),
    **dict.fromkeys(["diffusion_gemma", "diffusion_gemma_training", "gemma4_v5", "gptoss",
                     "gptoss_training", "muse_glimmer", "muse_glimmer_training",
                     *(name for name in TEMPLATES if name.startswith("nemotron"))],
                    ALL | OWN_TOOLS),
    **dict.fromkeys(["llama3_1", "llama3_2", "qwen2_5", "qwen2_5_training", "qwen3_instruct_2507",
                     "qwen3_instruct_2507_training", "qwen3_vl", "qwen3_vl_training"],
                    ALL | NO_THINKING),
    **dict.fromkeys(["glm4moe", "glm4moe_training", "qwen3", "qwen3_training",
                     *(name for name in TEMPLATES if name.startswith(("qwen3_5", "qwen3_6",
                                                                     "qwen3_8")))], ALL),
}  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_of_real_templates(name: str, family: Family) -> None:
    tokenizer = family(name)
    assert {case: outcome(tokenizer, case) for case in CASES} == OUTCOMES[name]


def test_the_evidence_has_the_number_of_readable_templates() -> None:
    pytest.importorskip("trl")
    counts = {case: Counter(outcomes[case] for outcomes in OUTCOMES.values()) for case in CASES}
    total = len(OUTCOMES)
    read = {case: f"{c[READ]} of {total - c[NOT_WRITTEN]}" for case, c in counts.items()}
    same = {read.pop(case) for case in [*CASES][:4]}  # a prompt, turns, a truncated answer
    calls = {read.pop(case) for case in [*CASES][-2:]}
    assert (same, len(calls)) == ({f"70 of {total}"}, 1)
    sentence = (
        f"supports 70 of {total} templates. It recovers system messages for "
        f"{read['a system message'].replace(' of ', ' of the ')} templates that support system "
        f"messages, thinking for {read['thinking']}, tools for {read['tools']}, and tool calls "
        f"with tool messages for {calls.pop()}."
    )
    assert sentence in " ".join(EVIDENCE.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def qwen(family: Family) -> Tokenizer:
    return family("qwen3")


@settings(max_examples=60)
@given(st.data())
def test_random_conversations_are_read_back_or_none(qwen: Tokenizer, data: st.DataObject) -> None:
    """Ids truncated anywhere, other spellings, and text that resembles the template's."""
    words = st.text("ab \n<>東", max_size=8) | st.sampled_from(
        ["<|im_end|>", "</think>", "<think>\n", "<tool_response>\nx\n</tool_response>", "user\n"]
    )
    said = st.lists(words, min_size=1, max_size=3).map("".join)
    roles = data.draw(st.integers(1, 4))
    messages = [{"role": ("user", "assistant")[n % 2], "content": data.draw(said)}
                for n in range(roles)]  # fmt: skip
    ids = render(qwen, messages, add_generation_prompt=bool(roles % 2)).ids
    cut = ids[: data.draw(st.integers(1, len(ids)))]
    conversation = read_back(qwen, cut.tolist())
    if conversation is not None and len(cut) == len(ids):
        proved(qwen, cut, conversation)
    if conversation is not None:  # the truncated part may have other tokens than its bytes alone
        assert conversation.conversation.ids.tolist() == cut.tolist()
        again = render(qwen, conversation.messages, variables=conversation.variables,
                       add_generation_prompt=conversation.add_generation_prompt)  # fmt: skip
        own, again_text = (
            [(i, flag) for token, flag in zip(chat.ids.tolist(), chat.assistant_mask, strict=True)
             for i in byte_ids(qwen, token)]
            for chat in (conversation.conversation, again)
        )  # fmt: skip
        assert own == again_text[: len(own)]
    single = [i for token in cut.tolist() for i in byte_ids(qwen, token)]
    other = read_back(qwen, single)
    assert (other is None) == (conversation is None)
    if conversation is not None and other is not None:
        assert other.messages == conversation.messages
        assert other.conversation.ids.tolist() == single
        assert other.conversation.bounds[-1] == conversation.conversation.bounds[-1]


def byte_ids(tokenizer: Tokenizer, token: int) -> list[int]:
    """Spell a token with one token per byte."""
    known = tokenizer.table.canonical_ids()
    data = tokenizer.table[token]
    return [known[data[i : i + 1]] for i in range(len(data))] or [token]


def test_masks_of_ids_that_spell_the_text_byte_by_byte(qwen: Tokenizer) -> None:
    ids = render(qwen, [ASK, ANSWER]).ids.tolist()
    single = [i for token in ids for i in byte_ids(qwen, token)]
    chat = not_none(read_back(qwen, single)).conversation
    data = chat.text.encode()
    written = [data[chat.bounds[i] : chat.bounds[i + 1]]
               for i in np.flatnonzero(chat.assistant_mask)]  # fmt: skip
    assert b"".join(written).decode() == "<think>\n\n</think>\n\n201 steps 🌊.<|im_end|>"


def test_ids_without_a_conversation_return_none(qwen: Tokenizer, byte_level: Tokenizer) -> None:
    for text in ("no template", "<|im_start|>", "<|im_start|>user\nx<|im_end|><|im_end|>",
                 "<|im_start|>nobody\nx<|im_end|>\n"):  # fmt: skip
        assert read_back(qwen, qwen.encode(text).ids.tolist()) is None
    assert read_back(qwen, []) is None
    with pytest.raises(XtokError):
        read_back(byte_level, [1])


def test_thinking_variable_is_found_from_the_ids(qwen: Tokenizer) -> None:
    off = {"enable_thinking": False}
    ids = render(qwen, [ASK], add_generation_prompt=True, variables=off).ids.tolist()
    read = not_none(read_back(qwen, ids))
    assert (read.variables, read.add_generation_prompt) == (off, True)
    assert read.messages == [ASK]


def test_arguments_without_types_require_the_tools(family: Family) -> None:
    """Only the tool's schema distinguishes the number 2 from the text `2`."""
    tokenizer = family("qwen3_6")
    chat = [ASK, CALL, RESULT, ANSWER]
    assert read_back(tokenizer, render(tokenizer, chat).ids.tolist()) is None
    texts = {"name": "add", "arguments": {"a": "two", "b": "zwei"}}
    call = {**CALL, "tool_calls": [{"type": "function", "function": texts}]}
    read = not_none(
        read_back(tokenizer, render(tokenizer, [ASK, call, RESULT, ANSWER]).ids.tolist())
    )
    assert plain(read.messages) == plain([ASK, call, RESULT, ANSWER])
