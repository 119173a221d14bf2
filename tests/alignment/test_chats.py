"""Alignment of conversations that two chat templates render."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_families import TURNS
from checks import fails, not_none
from command_lines import two_files
from conftest import REAL, Cli

import xtok
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.chats import ChatAlignment, align_chat, shared_string_spans
from xtok.config import ChatTemplates
from xtok.conversation import render
from xtok.conversation.files import chat_record
from xtok.tokenizers.display import to_json, unescape
from xtok.tokenizers.pairs import Pair

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the token 2014 of the text?"},
    {"role": "assistant", "content": "The text: 東京."},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "ok"},
]


@pytest.fixture(scope="module")
def aligner(pair: Pair) -> TokenAligner:
    return TokenAligner(pair)


Align = Callable[..., ChatAlignment]


@pytest.fixture(scope="module")
def align(aligner: TokenAligner, pair: Pair) -> Align:
    """Align messages, rendered by a template on each side."""

    def run(messages: list[dict[str, Any]], student: str, teacher: str) -> ChatAlignment:
        templates = ChatTemplates(student_template=student, teacher_template=teacher)
        return align_chat(aligner, pair, messages, templates)

    return run


def aligned(chat: ChatAlignment, aligner: TokenAligner) -> list[tuple[str, str]]:
    """Check that chunk numbers increase on both sides; return the texts of correct chunks."""
    alignment = chat.alignment
    for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id):
        used = ids[ids >= 0].tolist()
        assert used == sorted(used)
        assert set(used) == set(range(len(alignment.is_correct)))
    pairs = aligner.pairs(chat.student.ids.tolist(), chat.teacher.ids.tolist(), alignment)
    student, teacher = aligner.student.table.name, aligner.teacher.table.name
    return [
        ("".join(map(student, p.student_ids)), "".join(map(teacher, p.teacher_ids)))
        for p in pairs
        if p.is_correct
    ]


def aligned_text(chat: ChatAlignment, aligner: TokenAligner) -> str:
    return unescape("".join(student for student, _ in aligned(chat, aligner))).decode()


CALLS = (
    "{% for m in messages %}{{ open }}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %} CALL {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Berlin"}}}
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "the weather in the city"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sun": 2014}'},
    {"role": "assistant", "content": "It is sunny."},
]
THOUGHT = [
    {"role": "user", "content": "why the text?"},
    {"role": "assistant", "content": "<think>a long thought about the text</think>the answer"},
]
KEEPS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
CUTS = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "student", "teacher", "text"),
    [
        (CHAT, "chatml", TURNS, "Be briefWhat is the token 2014 of the text?The text: 東京okok"),
        (THOUGHT, KEEPS, CUTS, "why the text?the answer"),
        (
            TOOLS,
            CALLS.replace("{{ open }}", "<<"),
            CALLS.replace("{{ open }}", "=====> "),
            ' the weather in the city get_weather {"city": "Berlin"} {"sun": 2014} It is sunny.',
        ),
    ],
)
def test_message_contents_are_aligned_and_template_text_is_not(
    align: Align, aligner: TokenAligner, messages: Any, student: str, teacher: str, text: str
) -> None:
    assert aligned_text(align(messages, student, teacher), aligner) == text


def test_ends_of_turns_match_by_role(align: Align, aligner: TokenAligner) -> None:
    chat = align(CHAT, "chatml", "chatml")
    assert aligned(chat, aligner).count(("<|im_end|>", "<|im_end|>")) == len(CHAT)
    student, teacher = (
        set(ids[side.assistant_mask & (ids >= 0)].tolist())
        for side, ids in (
            (chat.student, chat.alignment.student_chunk_id),
            (chat.teacher, chat.alignment.teacher_chunk_id),
        )
    )
    assert student == teacher != set()


def test_short_contents_do_not_slip_into_other_turns(align: Align) -> None:
    chat = [{"role": role, "content": "ok"} for role in ("user", "assistant") * 3]
    alignment = align(chat, "chatml", TURNS)
    numbers = alignment.alignment.student_chunk_id, alignment.alignment.teacher_chunk_id
    for i in range(len(chat)):
        inside = []
        for side, ids in zip((alignment.student, alignment.teacher), numbers, strict=True):
            span = side.message_spans[i].content
            inside.append(set(ids[slice(*not_none(span).tokens)].tolist()))
        assert inside[0] == inside[1] != {-1}


WHOLE = "{% for m in messages %}({{ m.content }}){% endfor %}"
TRIMMED = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
ANSWER = "{% for m in messages %}<{{ m.content.split('</think>')[-1] }}>{% endfor %}"
CUT = (
    "{% for m in messages %}{{ m.content.split('|')[0] }}{{ m.content.split('|')[-1] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "own", "whole"),
    [
        (TRIMMED, "\u3000Hello", "Hello", "Hello"),
        (TRIMMED, "Hello\u3000", "Hello", "Hello"),
        (ANSWER, "<think>\u6771\u4eac</think>Hello", "Hello", "Hello"),
        (CUT, "\u6771|Hello", "\u6771Hello", "\u6771|Hello"),  # the aligner pairs equal text
        (CUT.replace(" }}", ".upper() }}"), "Hello", "HELLO", "Hello"),
    ],
)
def test_contents_are_the_text_that_both_templates_write(
    template: str, content: str, own: str, whole: str
) -> None:
    tokenizer = xtok.load_tokenizer("bytes")
    student, teacher = (
        render(tokenizer, [{"role": "user", "content": content}], template=side_template)
        for side_template in (template, WHOLE)
    )
    [both] = shared_string_spans(student, teacher, {})
    [back] = shared_string_spans(teacher, student, {})
    assert both == back[::-1]
    texts = [
        bytes(side.ids[span].tolist()).decode()
        for side, span in zip((student, teacher), both, strict=True)
    ]
    assert texts == [own, whole]


@pytest.mark.real
@pytest.mark.parametrize(
    ("student", "teacher"), [("llama3_training", "qwen3"), ("qwen3", "gemma3")]
)
def test_real_templates_align_every_message(load_real: Any, student: str, teacher: str) -> None:
    folder = REAL / "chat-templates"
    if not folder.exists():
        pytest.skip("the chat templates are missing: run scripts/fetch_tokenizers.py")
    pair = xtok.load_pair(load_real("llama3.tiktoken"), load_real("qwen.tiktoken"))
    aligner = TokenAligner(pair)
    ours, theirs = (str(folder / f"{name}.jinja") for name in (student, teacher))
    templates = ChatTemplates(student_template=ours, teacher_template=theirs)
    chat = align_chat(aligner, pair, CHAT[1:], templates)
    text = aligned_text(chat, aligner)
    offset = 0
    for message in CHAT[1:]:
        offset = text.index(message["content"], offset) + len(message["content"])


def test_the_command_and_the_function(cli: Cli, small: Path, tmp_path: Path) -> None:
    pair = xtok.load_pair(*[small / "small.model"] * 2)
    (tmp_path / "chat.json").write_text(json.dumps(CHAT), encoding="utf-8")
    (tmp_path / "two.json").write_text(json.dumps([CHAT, CHAT]))
    (tmp_path / "plain.jinja").write_text(TURNS)
    args = ["align", *two_files(small), "--student-chat-template", "plain.jinja"]
    args += ["--teacher-chat-template", TURNS + " ", "--chat"]
    data = json.loads(cli(*args, "chat.json", "--json").stdout)
    assert data["num_correct"] > 20
    templates = ChatTemplates(student_template=TURNS, teacher_template=TURNS + " ")
    notes: list[str] = []
    chats: tuple[Any, ...] = tmp_path / "chat.json", CHAT, {"messages": CHAT}
    for chat in chats:
        shown = xtok.align(pair, chat=chat, templates=templates, note=notes.append)
        assert json.loads(to_json(shown)) == data
    assert "the targets contain no end-of-turn token" in " ".join(notes)
    assert data["student_unaligned"] == data["teacher_unaligned"] - 1 > 0
    assert "the targets contain no end-of-turn token" in cli(*args, "chat.json").stderr
    fails(cli(*args, "two.json"), "two.json")
    with pytest.raises(xtok.XtokError, match=r"^the conversation: .*empty"):
        xtok.align(pair, chat=[])


def test_additional_messages_of_the_teacher_are_not_aligned(
    aligner: TokenAligner, pair: Pair
) -> None:
    teacher_messages = [{"role": "system", "content": "201 steps."}, *CHAT[1:]]
    chat = chat_record({"messages": CHAT, "teacher_messages": teacher_messages}, "line 1")
    templates = ChatTemplates(student_template=TURNS, teacher_template=TURNS)
    chat_alignment = align_chat(aligner, pair, chat, templates)
    assert "201 steps." in chat_alignment.teacher.text
    texts = ["".join(part) for part in zip(*aligned(chat_alignment, aligner), strict=True)]
    assert [unescape(text).decode() for text in texts] == ["The text: 東京.\n\nok"] * 2
