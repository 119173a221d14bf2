"""Conversations: one rendering, exact spans, targets, named formats, batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import chat_families
import numpy as np
import pytest
from checks import error_of, not_none
from conftest import Load
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import copied

from xtok.conversation import (
    NO_END_OF_TURN,
    Conversation,
    collate,
    is_prefix_preserving,
    render,
    tool_suffix,
    unpad,
)
from xtok.conversation.formats import FORMATS
from xtok.conversation.templates import render_template
from xtok.errors import XtokError
from xtok.inspection.chat_checks import ChatTrial
from xtok.tokenizers import Tokenizer, load_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Wie hoch, 3 < 4?\n"},
    {"role": "assistant", "content": "  201 Stufen 🌊.\n"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "201"},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "add 2 and 2"},
    chat_families.CALL,
    chat_families.TOLD,
    {"role": "assistant", "content": "It is 4"},
]


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


def test_chatml_exactly(byte_level: Tokenizer) -> None:
    rendered = render(byte_level, CHAT, template="chatml")
    assert rendered.text == (
        "<|im_start|>system\n Be brief. <|im_end|>\n"
        "<|im_start|>user\nWie hoch, 3 < 4?\n<|im_end|>\n"
        "<|im_start|>assistant\n  201 Stufen 🌊.\n<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n201<|im_end|>\n"
    )
    assert contents(rendered) == [m["content"] for m in CHAT]
    whole = [s.whole for s in rendered.message_spans]
    assert "".join(shown(rendered, w.tokens) for w in whole if w) == rendered.text
    start = byte_level.table.roles["turn_start"][0]
    assert rendered.ids.tolist().count(start) == 5
    assert rendered.ids.dtype == np.int32


PROMPT_IN_THE_LOOP = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}
{%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("template", ["chatml", PROMPT_IN_THE_LOOP])
@pytest.mark.parametrize("asked", [False, True])
def test_generation_prompt_belongs_to_no_message(
    byte_level: Tokenizer, template: str, asked: bool
) -> None:
    rendered = render(byte_level, CHAT, template=template, add_generation_prompt=asked)
    check_spans(rendered, CHAT, byte_level)
    assert rendered.text.endswith("<|im_start|>assistant\n") == asked
    assert targets(rendered) == ["  201 Stufen 🌊.\n<|im_end|>", "201<|im_end|>"]
    last = not_none(rendered.message_spans[-1].whole)
    assert rendered.text[slice(*last.chars)].strip() == "<|im_start|>assistant\n201<|im_end|>"


PARTS = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": " it"}]
CUTS = "{{ '\n' ~ m.role ~ ': ' ~ ((c.split('|')[-1] | trim).replace('a', 'bb')[1:]) + '!' }}"
OF_PARTS = "{% for p in c %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %};"


@pytest.mark.parametrize(
    ("content", "written", "text", "span_text", "source", "verbatim"),
    [
        # The template replaces the letter a by bb, so the tracked content begins after it.
        ("no | xay z ", CUTS, "\nuser: bby z!", "y z", (7, 10), True),
        ("xay z|qk", CUTS, "\nuser: k!", "k", (7, 8), True),
        (PARTS, OF_PARTS, "see <image> it;", "see <image> it", None, False),
        (" Be brief. ", "{{ '%s.' % c }};", " Be brief. .;", "Be brief.", (1, 10), True),
        (" Be brief. ", "{{ c | urlencode }};", "%20Be%20brief.%20;", None, None, False),
    ],
)
def test_spans_of_contents(
    byte_level: Tokenizer, content: Any, written: str, text: str, span_text: Any, source: Any,
    verbatim: bool,
) -> None:  # fmt: skip
    template = each(f"{{%- set c = m.content %}}{written}")
    chat = render(byte_level, [{"role": "user", "content": content}], template=template)
    assert (chat.text, contents(chat)) == (text, [span_text])
    [span] = chat.message_spans
    assert (span.source, span.verbatim) == (source, verbatim)


@pytest.mark.parametrize(
    "expression",
    [
        "c.strip().upper()", "c.lstrip('x ').rstrip()", "c.partition(' ')[2]",
        "c.rpartition(' ')[0]", "c.rsplit(' ', 1)[0]", "c.split()[0]", "c.splitlines()[0]",
        "c.removeprefix(' x').removesuffix('z ')", "[c, 'and', c] | join('; ')", "'-'.join([c, c])",
        "c | replace('y', '')", "c | tojson", "'%s!' % c", "c | upper | lower", "c[2]", "c * 2",
        "c | title", "(c ~ 1) | trim", "c | string | default('x')", "c[::-1]", "c | length",
    ],
)  # fmt: skip
def test_the_text_equals_that_of_transformers(expression: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    template = each(f"{{% set c = m.content %}}[{{{{ {expression} }}}}]")
    chat = [{"role": "user", "content": content} for content in (" xay yz ", "a", "x é\ny")]
    hf_class: Any = PreTrainedTokenizerFast
    library = hf_class(tokenizer_object=Backend(BPE()))
    try:
        expected = library.apply_chat_template(chat, chat_template=template, tokenize=False)
    except IndexError:
        with pytest.raises(XtokError, match="raises at message"):
            render_template(template, chat)
        return
    rendered = render_template(template, chat)
    assert rendered.text == expected
    for run in rendered.runs:
        content = chat[run.message]["content"]
        text = rendered.text[run.start : run.end]
        if run.path == ("content",) and run.offset >= 0:
            part = content[run.offset : run.offset + len(text)]
            assert text.lower() == part.lower()


@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    name=st.sampled_from(["chatml", PROMPT_IN_THE_LOOP]),
)
@settings(max_examples=100)
def test_content_spans_of_real_templates(
    byte_level: Tokenizer, texts: list[str], name: str
) -> None:
    chat = [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]
    rendered = render(byte_level, chat, template=name)
    for message, span in zip(chat, rendered.message_spans, strict=True):
        if message["content"]:
            assert rendered.text[slice(*not_none(span.content).chars)] == message["content"]
            assert span.source == (0, len(message["content"]))


def test_a_template_of_the_folder_and_its_variables(small: Path, tmp_path: Path) -> None:
    folder = copied(small / "small-byte-level", tmp_path / "hf")
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
        "{% if tools is none %} none{% endif %}{{ style }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    rendered = render(tokenizer, CHAT[3:4], tools=[], variables={"style": "!"})
    assert rendered.text == "<|begin_of_text|>again<|end_of_text|> none!"
    ids = {name: i for i, name in tokenizer.table.control_names.items()}
    assert rendered.ids[0] == ids["<|begin_of_text|>"]
    # The same ids as the library's.
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(str(folder))
    expected = library.apply_chat_template(CHAT[3:4], return_dict=False, style="!")
    assert rendered.ids.tolist() == expected


def test_a_template_does_not_know_the_eos_of_the_generation_config(
    small: Path, tmp_path: Path
) -> None:
    names = {"eos_token": None}
    folder = copied(small / "small-byte-level", tmp_path / "hf", tokenizer_config=names)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.table.roles["eos"]
    assert render(tokenizer, CHAT[3:4]).text == "<|begin_of_text|>again"


@pytest.mark.parametrize("kind", ["ranks", "sentencepiece", "digits"])
def test_every_backend_accepts_a_template(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer = request.getfixturevalue(kind)
    rendered = render(tokenizer, CHAT, template=PROMPT_IN_THE_LOOP)
    check_spans(rendered, CHAT, tokenizer)
    assert len(targets(rendered)) == 2


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
        rendered = render(sentencepiece, CHAT, template=name)
        check_spans(rendered, CHAT, sentencepiece)
        assert contents(rendered) == [m["content"] for m in CHAT]
        assert targets(rendered) == ["   201 Stufen 🌊.\n</s>", " 201</s>"]
    assert FORMATS["mistral"].pad_id(sentencepiece.table) == sentencepiece.table.roles["unk"][0]


def test_plain_suits_every_vocabulary(byte_level: Tokenizer) -> None:
    rendered = render(load_tokenizer("bytes"), CHAT[2:], template="plain")
    assert rendered.text == ("Assistant\n  201 Stufen 🌊.\n\n\nUser\nagain\n\nAssistant\n201\n\n")
    assert targets(rendered) == ["  201 Stufen 🌊.\n\n\n", "201\n\n"]
    rendered = render(byte_level, CHAT[3:], template="plain")
    assert targets(rendered) == ["201<|end_of_text|>"]
    pad = FORMATS["chatml"].pad_id(byte_level.table)
    assert byte_level.table.control_names[pad] == "<|pad|>"


# Suffixes for tool messages


def decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = tokenizer.table.control_names
    return b"".join(tokenizer.table[i] or names[i].encode() for i in ids).decode()


def test_the_next_prompt_is_prompt_and_answer_and_suffix(byte_level: Tokenizer) -> None:
    chat = [*CHAT, {"role": "tool", "content": "four"}]
    prompt = render(byte_level, chat[:4], template="chatml", add_generation_prompt=True).ids
    full = render(byte_level, chat, template="chatml", add_generation_prompt=True)
    written = full.ids[len(prompt) :][full.assistant_mask[len(prompt) :]]
    suffix = tool_suffix(byte_level, chat, template="chatml")
    assert [*prompt, *written, *suffix] == full.ids.tolist()


def test_turns_without_a_control_token_at_their_end(byte_level: Tokenizer) -> None:
    template = each("{{ '<|im_start|>' + m.role + m.content }}")
    chat = [CHAT[3], {"role": "assistant", "content": "<|im_end|> four"}]
    suffix = tool_suffix(byte_level, [*chat, TOOLS[2]], template=template)
    assert decode_ids(byte_level, suffix.tolist()) == "<|im_start|>toolfour"


# Bad input


DROPS = each(
    "{{ m.role }};{% if m.role in keep %}{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}{{ calls and m.tool_calls }}{% endif %}"
)
RAISES = each(
    "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.role + m.content }}"
)


@pytest.mark.parametrize(
    ("messages", "template", "problem"),
    [
        ([{"role": "us\ud83d", "content": "x"}], "chatml", "message 0 has no role"),
        (["x"], "chatml", "message 0 has no role"),
        (TOOLS, RAISES, "small-byte-level raises an error at message 2 (tool): no"),
        ([{"role": "user", "content": None}], RAISES, "raises an error at message 0 (user): "),
        (CHAT, "nemotron6-moe", "nemotron6-moe is not a file"),  # the text of this error is private
        (CHAT, "{{ '\udc00' }}", "contains the unpaired surrogate '\\udc00'"),
        (CHAT, "{{ cycler() }}", "raises an error: "),
        (CHAT, "{{ 'x'.join(messages) }}", "raises an error: sequence item 0: expected str"),
        (CHAT, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "raises an error: "),
        (CHAT, "{% break %}", "'break' outside loop"),
        (CHAT, "{% if 1 %}" * 200 + "{% endif %}" * 200, "is not a Jinja template: too many"),
        (CHAT, "{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "Jinja template: too many"),
        (CHAT, "{{ " + "(" * 5_000 + ")" * 5_000 + " }}", "template: maximum recursion"),
        # Templates cannot read files or private attributes of Python.
        (CHAT, "{% include '/etc/passwd' %}", "no loader"),
        (CHAT, "{{ messages.__class__.__mro__ }}", "is unsafe"),
        (CHAT, "{{ cycler.__init__.__globals__ }}", "is unsafe"),
        # Templates cannot call the internal function that marks targets.
        (CHAT, "{{ mark('generation') }}", "'mark' is undefined"),
        (CHAT, "{{ environment.mark('generation') }}", "'environment' is undefined"),
        (CHAT, "{{ xtok_mark('generation') }}", "'xtok_mark' is undefined"),
        (CHAT, "{{ self.mark('generation') }}", "has no attribute 'mark'"),
    ],
)
def test_conversations_that_cannot_be_rendered(
    byte_level: Tokenizer, messages: Any, template: str | None, problem: str
) -> None:
    assert problem in error_of(partial(render, byte_level, messages, template=template))


@pytest.mark.parametrize(
    ("keep", "calls", "culprit"),
    [
        ("user assistant", True, "message 2 (tool)"),
        ("assistant tool", True, "message 0 (user)"),
        ("user tool", True, "message 3 (assistant)"),
        ("user assistant tool", False, "message 1 (assistant)"),
    ],
)
def test_error_names_the_part_that_a_template_drops(
    byte_level: Tokenizer, keep: str, calls: bool, culprit: str
) -> None:
    make = partial(render, byte_level, TOOLS, template=DROPS)
    whole = make(variables={"keep": "user assistant tool", "calls": True})
    assert whole.message_spans[2].content is not None
    assert culprit in error_of(lambda: make(variables={"keep": keep, "calls": calls}))


@pytest.mark.parametrize("depth", [99, 100_000])
def test_content_that_is_nested_deep(byte_level: Tokenizer, depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    chat = [CHAT[0], {"role": "user", "content": value}]
    call = partial(render, byte_level, chat, template=each("{{ m.content | string }}"))
    if depth < 100:
        assert call().text.endswith("'x'" + "]" * depth)
    else:
        assert "message 1 is nested" in error_of(call)


def test_only_the_assistant_may_not_write_an_image(byte_level: Tokenizer) -> None:
    user = {"role": "user", "content": "see <image>"}
    assert render(byte_level, [user], template="chatml").text.count("<image>") == 1


def test_a_header_without_a_generation_prompt_is_no_target(byte_level: Tokenizer) -> None:
    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "201."}]
    for body in ("{{ m.role + ': ' + m.content + '\n' }}", "{{ m.role }}: {{ m.content }}\n"):
        rendered = render(byte_level, chat, template=each(body))
        assert targets(rendered) == ["201.\n"]  # ".\n" is one token


def test_templates_have_no_access_to_attributes_of_python() -> None:
    template = "{{ messages[0].content | attr('__class__') }}{{ '{0.__class__}'.format(messages) }}"
    assert render_template(template, CHAT).text == ""


# Notes


DATED = each("{{ m.content }}<|im_end|>")
LLAMA_DATE = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{% endif %}{{ date_string }}"
)


@pytest.mark.parametrize(
    ("template", "variables", "culprit"),
    [
        (LLAMA_DATE, {}, "date_string"),
        (LLAMA_DATE, {"date_string": "26 Jul 2024"}, None),
        ("{{ today if today is defined else strftime_now('%Y') }}", {}, "today"),
        ("{% if x is defined %}{{ strftime_now('%Y') }}{% endif %}", {}, None),
        ("{% if x is defined %}{{ strftime_now('%Y') }}{% endif %}", {"x": 1}, "no variable"),
        ("{{ strftime_now('%Y') }}", {}, "no variable"),
    ],
)
def test_a_template_that_writes_the_date_is_noted(
    byte_level: Tokenizer, template: str, variables: dict[str, Any], culprit: str | None
) -> None:
    chat = render(byte_level, CHAT, template=template + DATED, variables=variables)
    notes = [note for note in chat.notes if note.startswith("the template writes today's date")]
    assert len(notes) == (culprit is not None)
    assert all(str(culprit) in note for note in notes)


@pytest.mark.parametrize(
    ("user", "end", "ends"),
    [
        # A token of the next turn is a target only if generation stops at it.
        ("<|end_of_text|>", "", ["<|end_of_text|>", ""]),
        ("<|begin_of_text|>", "", ["", ""]),
        ("<|end_of_text|>", "<|im_end|>", ["<|im_end|>", "<|im_end|>"]),
    ],
)
def test_the_token_that_ends_a_turn_is_a_target(
    byte_level: Tokenizer, user: str, end: str, ends: list[str]
) -> None:
    turn = (
        f"{{{{ '<|im_start|>' if m.role == 'assistant' else '{user}' }}}}{{{{ m.content }}}}{end}"
    )
    template = each(turn) + "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    rendered = render(byte_level, CHAT, template=template)
    answers = "  201 Stufen 🌊.\n", "201"
    assert targets(rendered) == [answer + end for answer, end in zip(answers, ends, strict=True)]
    assert rendered.notes == (() if end else (NO_END_OF_TURN,))


@pytest.mark.parametrize("behind", ["", "  ", " the", " the<|end_of_text|>"])
def test_text_of_the_template_after_an_answer_is_not_a_target(
    byte_level: Tokenizer, behind: str
) -> None:
    rendered = render(byte_level, CHAT[1:3], template=each("\n{{ m.content | trim }}") + behind)
    assert targets(rendered) == ["201 Stufen 🌊."]  # " the" is one token


def test_a_tokenizers_own_template_is_read_once(small: Path, tmp_path: Path) -> None:
    shutil.copy(small / "small.model", tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    first = render(tokenizer, CHAT[:1])
    (tmp_path / "chat_template.jinja").unlink()
    again = render(tokenizer, CHAT[:1], template="default")
    assert again.text == first.text == "<s>" + CHAT[0]["content"]


@pytest.mark.parametrize(
    ("template", "text"),
    [("rag", "Hi"), ("default", None), (None, None), ("chatml", "<|im_start|>")],
)
def test_a_named_template_is_chosen_by_its_name(
    small: Path, tmp_path: Path, template: str | None, text: str | None
) -> None:
    named = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    parts = {"tokenizer_config": {"chat_template": named}}
    tokenizer = load_tokenizer(copied(small / "small-byte-level", tmp_path / "named", **parts))
    make = partial(render, tokenizer, [{"role": "user", "content": "Hi"}], template=template)
    if text is not None:
        assert make().text.startswith(text)
        return
    assert "it has rag" in error_of(make)
    if template is None:
        [check] = ChatTrial(tokenizer, template).checks(tools=False)
        assert "choose rag" in check.message


# Batches


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_is_the_inverse_of_collate(byte_level: Tokenizer, side: Any) -> None:
    chats = [render(byte_level, chat, template="chatml") for chat in (CHAT[3:], CHAT, CHAT[:1])]
    batch = collate(chats, pad_id=7, padding_side=side)
    width, lengths = max(len(chat.ids) for chat in chats), [len(chat.ids) for chat in chats]
    assert batch["ids"].shape == batch["assistant_mask"].shape == (3, width)
    padding = [7] * (width - lengths[0])
    row = [*padding, *chats[0].ids] if side == "left" else [*chats[0].ids, *padding]
    assert batch["ids"][0].tolist() == row
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["text"] == [chat.text for chat in chats]
    for sample, chat in zip(unpad(batch), chats, strict=True):
        assert list(sample) == ["ids", "assistant_mask", "message_spans", "text"]
        assert sample["ids"].tolist() == chat.ids.tolist()
        assert sample["assistant_mask"].tolist() == chat.assistant_mask.tolist()
        assert (sample["text"], sample["message_spans"]) == (chat.text, chat.message_spans)
    rows = collate([chat.record() for chat in chats], pad_id=7, padding_side=side)
    assert np.array_equal(rows["input_ids"], batch["ids"])
    assert np.array_equal(rows["labels"] != -100, batch["assistant_mask"])
    assert np.array_equal(rows["attention_mask"], batch["attention_mask"])


def test_other_fields_of_a_batch() -> None:
    import torch

    samples = [
        {"ids": [1, 2], "labels": np.array([1, 2]), "teacher": torch.tensor([5, 6, 7]),
         "reward": 0.5, "types": [0, 1], "spans": [4], "logits": np.ones((2, 3), np.float32)},
        {"ids": [3], "labels": np.array([3]), "teacher": torch.tensor([8]),
         "reward": 1.0, "types": [1], "spans": [5, 6], "logits": np.ones((1, 3), np.float32)},
    ]  # fmt: skip
    batch = collate(samples, pad_id=9, pad_values={"teacher": -1})
    values = {name: np.asarray(batch[name]).tolist() for name in batch if name != "spans"}
    ones, zeros = [1.0] * 3, [0.0] * 3
    assert values == {
        "ids": [[1, 2], [9, 3]],
        "labels": [[1, 2], [-100, 3]],
        "teacher": [[5, 6, 7], [-1, -1, 8]],
        "reward": [0.5, 1.0],
        "types": [[0, 1], [0, 1]],  # integers, one per token
        "logits": [[ones, ones], [zeros, ones]],
        "attention_mask": [[True, True], [False, True]],
    }
    assert batch["spans"] == [[4], [5, 6]]
    with pytest.raises(ValueError, match="the same fields"):
        collate([samples[0], {"ids": np.array([1])}], pad_id=0)


def test_unpad_accepts_tensors_and_other_fields() -> None:
    import torch

    batch = {
        "input_ids": torch.tensor([[9, 1], [2, 3], [9, 9]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1], [0, 0]]),
        "reward": np.array([0.5, 1.0, 2.0]),
        "tags": ["a", "b", "c"],
    }
    rows = unpad(batch)
    assert isinstance(rows[0]["input_ids"], torch.Tensor)
    assert [row["input_ids"].tolist() for row in rows] == [[1], [2, 3], []]
    assert (rows[1]["reward"], rows[1]["tags"]) == (1.0, "b")
    assert unpad({"pad": [[1, 0]], "ids": np.array([[5, 6]])}, mask="pad")[0]["ids"].tolist() == [5]
    assert unpad({"attention_mask": np.zeros((0, 3))}) == []


GENERATES = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{{- 'A:<|im_start|>' }}{% generation %}{{ m.content }}<|end_of_text|>{% endgeneration %}{{ '\n' }}
{%- else %}{{- m.content + '\n' }}{% endif %}
{%- endfor %}"""


def test_generation_blocks_are_the_targets(byte_level: Tokenizer) -> None:
    rendered = render(byte_level, CHAT, template=GENERATES)
    check_spans(rendered, CHAT, byte_level)
    assert targets(rendered) == ["  201 Stufen 🌊.\n<|end_of_text|>", "201<|end_of_text|>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_cuts_the_lists_that_transformers_pads(small: Path, side: str) -> None:
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    library = load(str(small / "small-byte-level"), padding_side=side)
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    make = partial(library.apply_chat_template, chat_template=GENERATES, **options)
    chats = [CHAT[3:], CHAT]
    batch = make(chats, padding=True)
    assert isinstance(batch["input_ids"], list)
    batch["tags"] = [["a"], ["b"]]
    for chat, sample, tags in zip(chats, unpad(batch), batch["tags"], strict=True):
        single = make(chat)
        assert set(single.pop("attention_mask")) == {1}
        assert sample == {**single, "tags": tags}


def test_a_mask_of_the_samples_is_kept() -> None:
    samples = [
        {"input_ids": [9, 1], "attention_mask": [0, 1]},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
    ]
    batch = collate(samples, pad_id=9)
    assert batch["attention_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert [row["input_ids"].tolist() for row in unpad(batch)] == [[1], [1, 2, 3]]
    with pytest.raises(ValueError, match="attention_mask"):
        collate([{"ids": [1, 2], "attention_mask": [1]}], pad_id=0)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (
            {"attention_mask": [[1, 0], [1, 1]], "ids": [[1, 2]]},
            "ids has 1 rows, expected 2",
        ),
        (
            {"attention_mask": [[1, 1, 1], [1, 0, 1]]},
            "padding between the tokens of row 1",
        ),
        ({"attention_mask": [[0, 2]]}, r"not a mask \[B, T\] of 0 and 1"),
        ({"ids": [[1]]}, r"attention_mask is not a mask \[B, T\]"),
    ],
)
def test_unpad_rejects_invalid_masks(batch: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        unpad({name: np.array(rows) for name, rows in batch.items()})


# Real templates


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
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT[1:]]
    for chat in (CHAT, CHAT[1:], TOOLS, parts):
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
        rounds = [TOOLS[0], *[call, chat_families.TOLD] * size, TOOLS[-1]]
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
        chat = [CHAT[1], {"role": "assistant", **message}]
        rendered = render(tokenizer, chat)
        assert rendered.ids.tolist() == library.apply_chat_template(chat, return_dict=False)
        assert targets(rendered) == ["<think>\nhm\n</think>\n\nfour<|im_end|>"]
        rendered = render(tokenizer, [*chat, CHAT[3]])
        assert targets(rendered) == ["four<|im_end|>"]
        assert contents(rendered)[1] == "four"
        assert message["content"][slice(*not_none(rendered.message_spans[1].source))] == "four"


@pytest.mark.real
def test_ids_of_mistral_equal_those_of_its_library(
    load_real: Load, real: Callable[[str], str]
) -> None:
    """mistral-common encodes each part separately, which adds a space to each part."""
    import sentencepiece as sp

    chat = [dict(m, content=m["content"].strip()) for m in CHAT]
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
