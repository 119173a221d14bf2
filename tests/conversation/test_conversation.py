"""Conversations: one rendering, exact spans, targets and notes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import error_of, not_none
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import copy_folder
from rendered_chats import (
    GENERATES,
    SPACED,
    TOOLS,
    check_spans,
    contents,
    decode_ids,
    each,
    shown,
    targets,
)

from xtok.conversation.rendering import (
    NO_END_OF_TURN,
    render,
    tool_suffix,
)
from xtok.conversation.templates import render_template
from xtok.errors import XtokError
from xtok.inspection.chat_checks import ChatTrial
from xtok.tokenizers import Tokenizer, load_tokenizer


def test_chatml_exactly(byte_level: Tokenizer) -> None:
    rendered = render(byte_level, SPACED, template="chatml")
    assert rendered.text == (
        "<|im_start|>system\n Be brief. <|im_end|>\n"
        "<|im_start|>user\nWie hoch, 3 < 4?\n<|im_end|>\n"
        "<|im_start|>assistant\n  201 Stufen 🌊.\n<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n201<|im_end|>\n"
    )
    assert contents(rendered) == [m["content"] for m in SPACED]
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
    rendered = render(byte_level, SPACED, template=template, add_generation_prompt=asked)
    check_spans(rendered, SPACED, byte_level)
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
    folder = copy_folder(small / "small-byte-level", tmp_path / "hf")
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
        "{% if tools is none %} none{% endif %}{{ style }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    rendered = render(tokenizer, SPACED[3:4], tools=[], variables={"style": "!"})
    assert rendered.text == "<|begin_of_text|>again<|end_of_text|> none!"
    ids = {name: i for i, name in tokenizer.table.control_names.items()}
    assert rendered.ids[0] == ids["<|begin_of_text|>"]
    # The same ids as the library's.
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(str(folder))
    expected = library.apply_chat_template(SPACED[3:4], return_dict=False, style="!")
    assert rendered.ids.tolist() == expected


def test_a_template_does_not_know_the_eos_of_the_generation_config(
    small: Path, tmp_path: Path
) -> None:
    names = {"eos_token": None}
    folder = copy_folder(small / "small-byte-level", tmp_path / "hf", tokenizer_config=names)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.table.roles["eos"]
    assert render(tokenizer, SPACED[3:4]).text == "<|begin_of_text|>again"


@pytest.mark.parametrize("kind", ["ranks", "sentencepiece", "digits"])
def test_every_backend_accepts_a_template(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer = request.getfixturevalue(kind)
    rendered = render(tokenizer, SPACED, template=PROMPT_IN_THE_LOOP)
    check_spans(rendered, SPACED, tokenizer)
    assert len(targets(rendered)) == 2


def test_the_next_prompt_is_prompt_and_answer_and_suffix(byte_level: Tokenizer) -> None:
    chat = [*SPACED, {"role": "tool", "content": "four"}]
    prompt = render(byte_level, chat[:4], template="chatml", add_generation_prompt=True).ids
    full = render(byte_level, chat, template="chatml", add_generation_prompt=True)
    written = full.ids[len(prompt) :][full.assistant_mask[len(prompt) :]]
    suffix = tool_suffix(byte_level, chat, template="chatml")
    assert [*prompt, *written, *suffix] == full.ids.tolist()


def test_turns_without_a_control_token_at_their_end(byte_level: Tokenizer) -> None:
    template = each("{{ '<|im_start|>' + m.role + m.content }}")
    chat = [SPACED[3], {"role": "assistant", "content": "<|im_end|> four"}]
    suffix = tool_suffix(byte_level, [*chat, TOOLS[2]], template=template)
    assert decode_ids(byte_level, suffix.tolist()) == "<|im_start|>toolfour"


def test_a_header_without_a_generation_prompt_is_no_target(byte_level: Tokenizer) -> None:
    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "201."}]
    for body in ("{{ m.role + ': ' + m.content + '\n' }}", "{{ m.role }}: {{ m.content }}\n"):
        rendered = render(byte_level, chat, template=each(body))
        assert targets(rendered) == ["201.\n"]  # ".\n" is one token


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
    chat = render(byte_level, SPACED, template=template + DATED, variables=variables)
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
    rendered = render(byte_level, SPACED, template=template)
    answers = "  201 Stufen 🌊.\n", "201"
    assert targets(rendered) == [answer + end for answer, end in zip(answers, ends, strict=True)]
    assert rendered.notes == (() if end else (NO_END_OF_TURN,))


@pytest.mark.parametrize("behind", ["", "  ", " the", " the<|end_of_text|>"])
def test_text_of_the_template_after_an_answer_is_not_a_target(
    byte_level: Tokenizer, behind: str
) -> None:
    rendered = render(byte_level, SPACED[1:3], template=each("\n{{ m.content | trim }}") + behind)
    assert targets(rendered) == ["201 Stufen 🌊."]  # " the" is one token


def test_a_tokenizers_own_template_is_read_once(small: Path, tmp_path: Path) -> None:
    shutil.copy(small / "small.model", tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    first = render(tokenizer, SPACED[:1])
    (tmp_path / "chat_template.jinja").unlink()
    again = render(tokenizer, SPACED[:1], template="default")
    assert again.text == first.text == "<s>" + SPACED[0]["content"]


@pytest.mark.parametrize(
    ("template", "text"),
    [("rag", "Hi"), ("default", None), (None, None), ("chatml", "<|im_start|>")],
)
def test_a_named_template_is_chosen_by_its_name(
    small: Path, tmp_path: Path, template: str | None, text: str | None
) -> None:
    named = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    parts = {"tokenizer_config": {"chat_template": named}}
    tokenizer = load_tokenizer(copy_folder(small / "small-byte-level", tmp_path / "named", **parts))
    make = partial(render, tokenizer, [{"role": "user", "content": "Hi"}], template=template)
    if text is not None:
        assert make().text.startswith(text)
        return
    assert "only rag" in error_of(make)
    if template is None:
        [check] = ChatTrial(tokenizer, template).checks(tools=False)
        assert "choose rag" in check.message


def test_generation_blocks_are_the_targets(byte_level: Tokenizer) -> None:
    rendered = render(byte_level, SPACED, template=GENERATES)
    check_spans(rendered, SPACED, byte_level)
    assert targets(rendered) == ["  201 Stufen 🌊.\n<|end_of_text|>", "201<|end_of_text|>"]
