"""Templates of real models, compared with the libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import chat_families
import pytest
from checks import not_none
from conftest import Load
from rendered_chats import SPACED, TOOLS, check_spans, contents, decode_ids, targets

from xtok.conversation.rendering import (
    NO_END_OF_TURN,
    is_prefix_preserving,
    render,
    tool_suffix,
)
from xtok.conversation.templates import render_template
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer

TEMPLATES = chat_families.TEMPLATES
QWEN_CALL = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "zwei"}}\n</tool_call><|im_end|>'
)
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nzwei\n"
    "</parameter>\n</function>\n</tool_call>"
)
THINK = "<think>\n\n</think>\n\n"
ANSWERS = {
    # generation blocks mark the targets, except for the text that ends the prompts
    "deepseekv3_training": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
        '{"a": 2, "b": "zwei"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "It is 4<｜end▁of▁sentence｜>",
    ],
    "gemma4": [
        '<|tool_call>call:add{a:2,b:<|"|>zwei<|"|>}<tool_call|><|tool_response>', "It is 4<turn|>",
    ],
    "glm4moe": [
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>zwei</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\nIt is 4",
    ],
    "gptoss": [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": "zwei"}<|call|>',
        "<|channel|>final<|message|>It is 4<|return|>",
    ],
    "llama3_1": [
        '{"name": "add", "parameters": {"a": 2, "b": "zwei"}}<|eot_id|>', "It is 4<|eot_id|>",
    ],
    "nemotron_3_nano": [f"</think>\n{XML_CALL}\n<|im_end|>", "</think>It is 4<|im_end|>"],
    "qwen2_5": [QWEN_CALL, "It is 4<|im_end|>"],
    "qwen3": [QWEN_CALL, f"{THINK}It is 4<|im_end|>"],
    # "\n\n" begins in the prompt, which ends with "<think>\n"
    "qwen3_5_think": [f"</think>\n\n{XML_CALL}<|im_end|>", "</think>\n\nIt is 4<|im_end|>"],
    "qwen3_training": [f"{THINK}{QWEN_CALL}\n", f"{THINK}It is 4<|im_end|>\n"],
    "qwen3_vl": [QWEN_CALL, "It is 4<|im_end|>"],
}  # fmt: skip
"""The targets of `TOOLS`; the other templates refuse or drop tools' messages."""
Family = Callable[..., tuple[Any, Tokenizer]]


@pytest.fixture(scope="module")
def family(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Return Transformers' and xtok's tokenizer with a template and its control tokens."""

    def make(name: str, *templates: Path) -> tuple[Any, Tokenizer]:
        folder = tmp_path_factory.mktemp(name)
        library = chat_families.write(name, small / "small-byte-level", folder, *templates)
        return library, load_tokenizer(folder)

    return make


LEFT_OUT_BY_TRL = {"gemma4_v2": "\n", "diffusion_gemma_training": "<|tool_response>"}


@pytest.mark.real
@pytest.mark.parametrize("name", chat_families.NAMES)
def test_real_templates_have_the_librarys_ids_and_targets(name: str, family: Family) -> None:
    """Ids equal Transformers', contents have their spans, and targets are text of the assistant."""
    library, tokenizer = family(name)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in SPACED[1:]]
    for chat in (SPACED, SPACED[1:], TOOLS, parts):
        try:
            expected = library.apply_chat_template(chat, return_dict=False)
            rendered = render(tokenizer, chat)
        except XtokError as error:
            assert "drops its" in error.message or "is not plain" in error.message  # noqa: PT017
            assert chat is TOOLS or (name == "smolvlm") == (chat is not parts)
            assert name not in ANSWERS or chat is not TOOLS
            continue
        except Exception:  # noqa: BLE001 - templates raise errors of many types
            with pytest.raises(XtokError, match="raises"):
                render(tokenizer, chat)
            continue
        assert rendered.ids.tolist() == expected
        check_spans(rendered, chat, tokenizer)
        for message, span in zip(chat, rendered.message_spans, strict=True):
            if isinstance(message["content"], str) and message["content"] in rendered.text:
                assert message["content"] == "" or span.content is not None
        if chat is TOOLS:
            assert targets(rendered) == ANSWERS[name]
            # In GLM, the first token of the next turn ends a turn.
            assert (NO_END_OF_TURN in rendered.notes) == (name == "glm4moe")
        elif chat is not parts:
            answers = [m["content"].strip() for m in chat if m["role"] == "assistant"]
            assert all(a in text for a, text in zip(answers, targets(rendered), strict=True))


@pytest.mark.real
def test_equal_calls_with_results_in_their_turn(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rendering finds the ends of all turns, even if the template omits the thinking text."""
    _, tokenizer = family("gemma4")
    call = {**chat_families.CALL, "reasoning_content": "hm"}
    counted = Mock(wraps=render_template)
    monkeypatch.setattr("xtok.conversation.rendering.render_template", counted)
    written, answer = ANSWERS["gemma4"]
    thoughtful = f"<|channel>thought\nhm\n<channel|>{written}"
    numbers = []
    for size in (5, 20):
        rounds = [TOOLS[0], *[call, chat_families.RESULT] * size, TOOLS[-1]]
        assert targets(render(tokenizer, rounds)) == [*[thoughtful] * size, answer]
        numbers.append(counted.call_count)
        counted.reset_mock()
    assert numbers[0] == numbers[1]
    earlier = [*TOOLS[:1], call, *TOOLS[2:]]
    chat = render(tokenizer, [*earlier, *rounds])
    assert targets(chat) == [written, answer, *[thoughtful] * 20, answer]
    chat = render(tokenizer, [*earlier, TOOLS[0], TOOLS[-1]])
    assert targets(chat) == [written, answer, answer]


@pytest.mark.real
def test_a_call_that_continues_the_turn_of_an_answer(family: Family) -> None:
    """Gemma 4 writes no second header."""
    _, tokenizer = family("gemma4")
    written, answer = ANSWERS["gemma4"]
    chat = render(tokenizer, [TOOLS[0], TOOLS[-1], *TOOLS[1:]])
    assert targets(chat) == [answer, written, answer]


@pytest.mark.real
def test_a_header_that_depends_on_a_result(family: Family) -> None:
    """Diffusion Gemma writes a second header after a result, but not after a call."""
    if not (paths := chat_families.trl_templates()):
        pytest.skip("requires TRL")
    _, tokenizer = family("diffusion_gemma", paths[0].parent)
    written, answer = ANSWERS["gemma4"]
    chat = render(tokenizer, [*TOOLS[:3], *TOOLS[1:], TOOLS[0], TOOLS[-1]])
    assert targets(chat) == [
        written, f"<|turn>model\n{written}", f"<|turn>model\n{answer}", answer,
    ]  # fmt: skip


def or_error(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or None for any error."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - TRL passes on the errors of templates
        return None


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # comes from TRL's import
@pytest.mark.parametrize("name", [*chat_families.NAMES, *LEFT_OUT_BY_TRL])
def test_tool_suffixes_equal_those_of_trl(name: str, family: Family) -> None:
    trl = pytest.importorskip("trl")
    from trl.chat_template_utils import is_chat_template_prefix_preserving

    trl_folders = [Path(trl.__file__).parent / "chat_templates"] * (name in LEFT_OUT_BY_TRL)
    library, tokenizer = family(name, *trl_folders)
    trainer = SimpleNamespace(
        processing_class=library, _tokenizer=library, _is_vlm=False,
        chat_template=library.chat_template, chat_template_kwargs={},
    )  # fmt: skip
    expected = or_error(lambda: trl.GRPOTrainer._get_tool_suffix_ids(trainer, TOOLS[2:3]))
    for messages in (TOOLS[2:3], TOOLS[:3]):
        suffix = or_error(partial(tool_suffix, tokenizer, messages))
        suffix = suffix if suffix is None else suffix.tolist()
        if name == "cohere2":  # drops the tool's text; TRL's suffix also lacks it
            assert suffix is None
        elif name in LEFT_OUT_BY_TRL:
            assert suffix == [*tokenizer.encode(LEFT_OUT_BY_TRL[name]).ids, *expected]
        elif name == "qwen3":  # an error in TRL, as <think> precedes the tool's message
            assert expected is None
            begin = "\n<|im_start|>user\n<tool_response>\nfour\n"
            assert decode_ids(tokenizer, suffix or []).startswith(begin)
        else:
            assert suffix == expected
    keeps = or_error(lambda: is_chat_template_prefix_preserving(library))
    assert or_error(lambda: is_prefix_preserving(tokenizer)) == keeps


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen3", "gemma4", "gptoss", "llama3_1"])
def test_characters_that_a_normalizer_changes(name: str, family: Family, tmp_path: Path) -> None:
    """Ids, masks and spans equal the library's offsets."""
    from tokenizers import AddedToken, normalizers

    library, _ = family(name)
    library.backend_tokenizer.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    library.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    chat = [
        {"role": "user", "content": "cafe\u0301 <think> \u1100\u1161?"},
        {"role": "assistant", "content": "e\u0301te\u0301 201"},
        {"role": "user", "content": "<|im_end|>o\u0308"},
        {"role": "assistant", "content": "u\u0308ber"},
    ]
    rendered = render(tokenizer, chat)
    assert rendered.ids.tolist() == library.apply_chat_template(chat, return_dict=False)
    assert contents(rendered) == [m["content"] for m in chat]
    for message, target in zip(chat[1::2], targets(rendered), strict=True):
        assert message["content"] in target
    assert sum("\u0301" in text or "\u0308" in text for text in targets(rendered)) == 2


@pytest.mark.real
def test_qwen3_cuts_the_thinking_out_of_earlier_turns(family: Family) -> None:
    library, tokenizer = family("qwen3")
    thinking: list[dict[str, Any]] = [{"content": "<think>\nhm\n</think>\n\nfour"}]
    keys = "reasoning_content", "thinking", "reasoning"
    thinking += [{"content": "four", key: "hm"} for key in keys]
    for message in thinking:
        chat = [SPACED[1], {"role": "assistant", **message}]
        rendered = render(tokenizer, chat)
        assert rendered.ids.tolist() == library.apply_chat_template(chat, return_dict=False)
        assert targets(rendered) == ["<think>\nhm\n</think>\n\nfour<|im_end|>"]
        rendered = render(tokenizer, [*chat, SPACED[3]])
        assert targets(rendered) == ["four<|im_end|>"]
        assert contents(rendered)[1] == "four"
        assert message["content"][slice(*not_none(rendered.message_spans[1].source))] == "four"


@pytest.mark.real
def test_ids_of_mistral_equal_those_of_its_library(
    load_real: Load, real: Callable[[str], str]
) -> None:
    """mistral-common encodes each part separately, which adds a space to each part."""
    import sentencepiece as sp

    chat = [dict(m, content=m["content"].strip()) for m in SPACED]
    _, first, answer, again, last = (m["content"] for m in chat)

    encode = sp.SentencePieceProcessor(model_file=real("mistral-v1.model")).encode
    system = f"[INST] Be brief.\n\n{first} [/INST]"
    expected = [1, *encode(system), *encode(answer), 2]
    expected += [*encode(f"[INST] {again} [/INST]"), *encode(last), 2]
    rendered = render(load_real("mistral-v1.model"), chat, template="mistral-v1")
    assert rendered.ids.tolist() == expected

    encode = sp.SentencePieceProcessor(model_file=real("mistral-v3.model")).encode
    expected = [1, 3, *encode(first), 4, *encode(answer), 2]
    expected += [3, *encode(f"Be brief.\n\n{again}"), 4, *encode(last), 2]
    rendered = render(load_real("mistral-v3.model"), chat, template="mistral")
    assert rendered.ids.tolist() == expected
