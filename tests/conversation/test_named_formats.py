"""The named chat formats: their texts and spans."""

from __future__ import annotations

import pytest
from rendered_chats import SPACED, check_spans, contents, targets

from xtok.conversation import render
from xtok.conversation.formats import FORMATS
from xtok.conversation.templates import render_template
from xtok.tokenizers import Tokenizer, load_tokenizer

OF_CHATML = (
    "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yo "
    "<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
)
SHORT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " yo "},
    {"role": "user", "content": "u"},
]
TEXTS_OF_FORMATS = [
    *((name, " ", "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
       "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
       "<|end_header_id|>\n\nyo<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
       "<|start_header_id|>assistant<|end_header_id|>\n\n")
      for name in ("llama3", "llama3p1", "llama3p2")),
    ("mistral", " ", "<s>[INST] hi[/INST]  yo </s>[INST] s\n\nu[/INST]"),
    ("mistral", "", "<s>[INST]hi[/INST] yo </s>[INST]s\n\nu[/INST]"),
    ("mistral-v1", " ", "<s> [INST] s\n\nhi [/INST]  yo </s> [INST] u [/INST]"),
    ("mistral-v7", "", "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]hi[/INST] yo </s>"
     "[INST]u[/INST]"),
    ("gemma", " ", "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyo"
     "<end_of_turn>\n<start_of_turn>user\nu<end_of_turn>\n<start_of_turn>model\n"),
    ("nemotron", " ", "<b><SPECIAL_10>System\ns\n<SPECIAL_11>User\nhi\n"
     "<SPECIAL_11>Assistant\n yo \n<SPECIAL_12>\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n"),
    ("nemotron-h-aligned", " ", "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nhi\n"
     "<SPECIAL_11>Assistant\nyo\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n"),
    ("deepseek", " ", "<｜begin▁of▁sentence｜>s<｜User｜>hi<｜Assistant｜> yo "
     "<｜end▁of▁sentence｜><｜User｜>u<｜Assistant｜>"),
    ("identity", " ", "shi yo u"),
    ("plain", " ", "<b>System\ns\n\nUser\nhi\n\nAssistant\n yo <e>\n\nUser\nu\n\n"
     "Assistant\n"),
    # Megatron-LM's names
    *((name, " ", OF_CHATML) for name in ("chatml", "qwen2p0", "qwen2p5")),
    ("nvlm-yi-34b", " ", "<b>" + OF_CHATML),
    ("nemotron5", " ", "<b>" + OF_CHATML.replace("im_start", "14").replace("im_end", "15")
     .replace("<|", "<SPECIAL_").replace("|>", ">")),
    ("nemotron5-aligned", " ", "<b>System\ns\n[PREFIX]User\nhi\n[PREFIX]Assistant\n yo \n"
     "[PREFIX]User\nu\n[PREFIX]Assistant\n"),
    ("nemotron-nano-v2", " ", "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nhi\n<SPECIAL_11>"
     "Assistant\nyo\n<SPECIAL_12>\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "space", "text"), TEXTS_OF_FORMATS)
def test_the_text_of_each_format(
    byte_level: Tokenizer, sentencepiece: Tokenizer, name: str, space: str, text: str
) -> None:
    chat_format, table = FORMATS[name], (sentencepiece if space else byte_level).table
    variables = {**chat_format.variables(table), "bos_token": "<b>", "eos_token": "<e>"}
    chat = [m for m in SHORT if m["role"] in chat_format.roles]
    rendered = render_template(
        chat_format.template, chat, variables=variables, add_generation_prompt=True
    )
    assert rendered.text == text
    generated = {"nemotron-h-aligned": "yo\n", "identity": " yo ", "plain": " yo <e>"}
    generated["nemotron-nano-v2"] = "yo\n<SPECIAL_12>\n"
    expected = [generated[name]] if name in generated else None
    blocks = rendered.generation_blocks
    assert expected == (None if blocks is None else [text[slice(*block)] for block in blocks])


def test_every_format_is_tested() -> None:
    assert {name for name, *_ in TEXTS_OF_FORMATS} == set(FORMATS)


def test_mistrals_merged_system_text_has_its_span(sentencepiece: Tokenizer) -> None:
    for name in ("mistral", "mistral-v1"):
        rendered = render(sentencepiece, SPACED, template=name)
        check_spans(rendered, SPACED, sentencepiece)
        assert contents(rendered) == [m["content"] for m in SPACED]
        assert targets(rendered) == ["   201 Stufen 🌊.\n</s>", " 201</s>"]
    assert FORMATS["mistral"].pad_id(sentencepiece.table) == sentencepiece.table.roles["unk"][0]


def test_plain_suits_every_vocabulary(byte_level: Tokenizer) -> None:
    rendered = render(load_tokenizer("bytes"), SPACED[2:], template="plain")
    assert rendered.text == ("Assistant\n  201 Stufen 🌊.\n\n\nUser\nagain\n\nAssistant\n201\n\n")
    assert targets(rendered) == ["  201 Stufen 🌊.\n\n\n", "201\n\n"]
    rendered = render(byte_level, SPACED[3:], template="plain")
    assert targets(rendered) == ["201<|end_of_text|>"]
    pad = FORMATS["chatml"].pad_id(byte_level.table)
    assert byte_level.table.control_names[pad] == "<|pad|>"
