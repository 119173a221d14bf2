"""Every value of a conversation is in the text, or an error or a note names it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from checks import error_of

import xtok
from xtok import DistillationCollator, TokenAligner
from xtok.alignment.chats import align_chat
from xtok.config import ChatTemplates
from xtok.conversation.files import chat_record
from xtok.conversation.rendering import NO_ANSWERS, Conversation, render
from xtok.conversation.templates import render_template
from xtok.inspection.first_rows import compare_side
from xtok.tokenizers import Tokenizer, load_tokenizer

ASK = {"role": "user", "content": "boats?"}
SEVEN = {"role": "assistant", "content": "Seven"}


def call(*whats: Any, **more: Any) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": "count", "arguments": {"what": w}}} for w in whats
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def chatml(body: str) -> str:
    return f"""\
{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}
{body}<|im_end|>
{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}"""


def targets(chat: Conversation) -> list[str]:
    edges = np.flatnonzero(np.diff(chat.assistant_mask, prepend=False, append=False))
    data, at = chat.text.encode(), chat.bounds
    return [data[at[a] : at[b]].decode() for a, b in edges.reshape(-1, 2)]


PLAIN = chatml("{{ m.content }}")
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
"""What templates write of one message `m`, or all there is."""


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (chatml("{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"),
         [ASK, call("boats", content="Let me count.")],
         "message 1 (assistant): the template drops its content"),
        (chatml("{{ m.content }}{% set c = (m.tool_calls or [0])[0] %}{% if c %}{{ c | tojson }}"
                "{% endif %}"),
         [ASK, call("boats", "lamps"), {"role": "tool", "content": "7"}],
         "drops its tool_calls[1].function.name"),
        # The template writes only the name of a call; a number is missing; a number is present.
        (chatml("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
                "{% endfor %}"), [ASK, call(7)], "drops its tool_calls[0].function.arguments.what"),
        (chatml("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
                "{{ c.function.arguments.what }}{% endfor %}"), [ASK, call(7), call(True)], ""),
        (PLAIN, [ASK, {**SEVEN, "reasoning": "3 + 4"}], "drops its reasoning"),
        (PLAIN, [ASK, {**SEVEN, "thoughts": "3 + 4"}], "drops its thoughts"),
        (PLAIN, [ASK, {**SEVEN, "function_call": {"name": "count"}}], "its function_call.name"),
        # Content parts: the template writes one of two texts, no image, or a part of a text.
        (chatml("{{ m.content[0].text }}"),
         [{**ASK, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "(user): the template drops its content[1].text"),
        (chatml("{% for p in m.content %}{{ p.text }}{% endfor %}"),
         [{**ASK, "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]}],
         "drops its content[1]"),
        (chatml("{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}"),
         [{**ASK, "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]}],
         ""),
        (chatml("{{ m.content[:5] }}"), [ASK], "drops the part '?' of its content"),
        (chatml("{{ m.content | replace('oat', '') }}"), [ASK], "the part 'oat' of its content"),
        (chatml("{{ m.content | replace('oat', 'e') }}"), [ASK, SEVEN], ""),
        (chatml("{{ m.content[0].text }}"),
         [{**ASK, "content": [{"type": "text", "text": "a", "thinking": "b"}]}],
         "drops its content[0].thinking"),
        # Filters lose the origin of text, and templates may replace placeholders of images.
        (chatml("{{ m.content | title }}"), [ASK, SEVEN], ""),
        (chatml("{{ m.content | replace('<image>', '<|image_1|>') }}"),
         [{**ASK, "content": "<image>boats?"}], ""),
    ],
)  # fmt: skip
def test_values_that_a_template_drops_are_an_error(
    byte_level: Tokenizer, template: str, messages: Any, problem: str
) -> None:
    if problem:
        assert problem in error_of(lambda: render(byte_level, messages, template=template))
    else:
        assert render(byte_level, messages, template=template).notes in ((), (NO_ANSWERS,))


# Rows and messages in formats of other projects


TOOL = {"type": "function", "function": {"name": "count", "description": "Zählt Boote"}}
BESIDE = "{% for x in tools or [] %}{{ x | tojson }}{% endfor %}" + PLAIN
GROUNDED = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}" + PLAIN


@pytest.mark.parametrize("tools", [[TOOL], (TOOL,), [json.dumps(TOOL)], json.dumps([TOOL])])
def test_tools_are_schemas_however_they_are_written(byte_level: Tokenizer, tools: Any) -> None:
    for options in ({"tools": tools}, {"variables": {"tools": tools}}):
        text = render(byte_level, [ASK, SEVEN], template=BESIDE, **options).text
        assert text.startswith(json.dumps(TOOL, ensure_ascii=False))
    assert "the template drops tools[0].function.name" in error_of(
        lambda: render(byte_level, [ASK, SEVEN], template=PLAIN, tools=tools)
    )


def test_an_omitted_thought_is_noted(byte_level: Tokenizer) -> None:
    """The template removes the thinking text, or writes it only in the last turn."""
    thought: Any = {**SEVEN, "content": "<think>3 + 4</think>Seven"}
    template = chatml("{{ m.content.split('</think>')[-1] }}")
    rendered = render(byte_level, [ASK, thought], template=template)
    assert rendered.notes == ("the template omits text marked with <think>",)
    template = chatml("{{ m.reasoning_content if loop.last }}{{ m.content }}")
    reasoned = {**SEVEN, "reasoning": "3 + 4"}
    assert render(byte_level, [ASK, reasoned], template=template).notes == ()
    rendered = render(byte_level, [ASK, reasoned, ASK, reasoned], template=template)
    assert rendered.notes == ("the template omits reasoning of earlier messages",)


def test_functions_are_tools(byte_level: Tokenizer) -> None:
    def count(what: str) -> int:
        """Count things.

        Args:
            what: the things
        """
        return len(what)

    text = render(byte_level, [ASK, SEVEN], template=BESIDE, tools=[count]).text
    assert text.startswith('{"type": "function", "function": {"name": "count"')


@pytest.mark.parametrize("tools", [TOOL, [7], 7])
def test_invalid_tools_are_errors(byte_level: Tokenizer, tools: Any) -> None:
    for options in ({"tools": tools}, {"variables": {"tools": tools}}):
        make = partial(render, byte_level, [ASK, SEVEN], template=BESIDE)
        problem = error_of(partial(make, **options))
        assert "not a JSON schema" in problem


def test_omitted_keys_of_tools_are_noted(byte_level: Tokenizer) -> None:
    template = "{% for x in tools or [] %}{{ x.function.name }}{% endfor %}" + PLAIN
    chat = render(byte_level, [ASK, SEVEN], template=template, tools=[TOOL | {"strict": True}])
    assert chat.notes == tuple(
        f"the template omits the key '{key}' of tools" for key in ("description", "strict")
    )


def test_documents_are_rendered_or_named_in_the_error(byte_level: Tokenizer) -> None:
    documents = [{"title": "Harbour", "text": "seven boats", "doc_id": 4}]
    rows: list[dict[str, Any]] = [{"documents": documents}]
    rows.append({"chat_template_kwargs": rows[0]})
    for row in rows:
        record = chat_record({"messages": [ASK, SEVEN], **row}, "row")
        chat = render(byte_level, record.messages, template=GROUNDED, variables=record.variables)
        assert chat.text.startswith("Harbour: seven boats<|im_start|>")
        assert (record.notes, chat.notes) == ((), ())
        make = partial(render, byte_level, record.messages, template=PLAIN)
        dropped = error_of(partial(make, variables=record.variables))
        assert "drops documents[0].title" in dropped
        part = "{% for d in documents %}{{ d.text }}{% endfor %}" + PLAIN
        chat = render(byte_level, record.messages, template=part, variables=record.variables)
        assert chat.notes == ("the template omits the key 'title' of documents",)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_named_like_an_argument_are_errors(byte_level: Tokenizer, name: str) -> None:
    make = partial(render, byte_level, [ASK, SEVEN], template=PLAIN)
    assert f"contain {name}" in error_of(partial(make, variables={name: []}))


def test_unused_keys_are_noted(byte_level: Tokenizer) -> None:
    row = {
        "messages": [ASK | {"mood": "calm"}, SEVEN],
        "loss": 1,
        "id": 7,
        "source": "x",
        "a": None,
    }
    record = chat_record(row, "row")
    variables = {"enable_thinking": False}
    chat = render(byte_level, record.messages, template=PLAIN, variables=variables)
    assert record.notes == ("the key 'loss' of conversations is ignored, because nothing uses it",)
    assert chat.notes == (
        "the key 'mood' of messages is ignored, because nothing uses it",
        "the variable enable_thinking is ignored, because the template does not use it",
    )
    reads = chatml("{{ m.content }}{{ m.mood }}{{ enable_thinking }}")
    assert not render(byte_level, record.messages, template=reads, variables=variables).notes


def test_a_system_text_outside_of_the_messages() -> None:
    record = chat_record({"messages": [ASK, SEVEN], "system": "Be brief."}, "row")
    assert record.messages == [{"role": "system", "content": "Be brief."}, ASK, SEVEN]


@dataclasses.dataclass
class Message:
    role: str
    content: str
    tool_calls: list[Any] | None = None


class Model:
    """The interface of pydantic's models."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


def test_objects_are_read_as_in_transformers(small: Path, byte_level: Tokenizer) -> None:
    from transformers import AutoTokenizer

    library: Any = AutoTokenizer.from_pretrained(str(small / "small-byte-level"))
    function = Model(name="count", arguments={"what": np.int64(7)})
    chat: Any = [
        Model(role="user", content="boats?", name=None),
        Message("assistant", "", [Model(type="function", function=function)]),
    ]
    template = chatml("{{ m.content }}" + CALLS + "{{ 'name' in m }}{{ 'tool_calls' in m }}")
    expected = library.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert render(byte_level, chat, template=template).text == expected
    held: Any = SimpleNamespace(messages=chat)
    assert render(byte_level, held, template=template).text == expected
    odd: Any = [ASK, call(SimpleNamespace())]
    assert "is a SimpleNamespace, which is not a JSON type" in error_of(
        lambda: render(byte_level, odd, template=template)
    )


# Targets


@pytest.mark.parametrize("key", ["weight", "loss_mask", "train"])
def test_weights_of_messages(byte_level: Tokenizer, key: str) -> None:
    chat: Any = [ASK, {**SEVEN, key: 0}, ASK, {**SEVEN, "content": "Nine", key: 1}]
    template = chatml("{{ m.content }}")
    trained = template.replace("{{ m.content }}<|im_end|>", "{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}")  # fmt: skip
    in_block = "{% generation %}<|end_of_text|>{% endgeneration %}"
    later = trained.replace("{% endfor %}", "{% endfor %}" + in_block)  # as in Phi 3
    rendered = render(byte_level, chat, template=later)
    assert targets(rendered) == ["Nine<|im_end|><|end_of_text|>"]
    rendered = render(byte_level, [*chat[2:], *chat[:2]], template=later)
    assert targets(rendered) == ["Nine<|im_end|>"]
    for either in (template, trained):
        rendered = render(byte_level, chat, template=either)
        assert (targets(rendered), rendered.notes) == (["Nine<|im_end|>"], ())
        rendered = render(byte_level, [ASK, {**SEVEN, key: False}], template=either)
        assert (targets(rendered), rendered.notes) == ([], (NO_ANSWERS,))
    for wrong in (0.5, "no"):
        make = partial(render, byte_level, [ASK, {**SEVEN, key: wrong}], template=template)
        assert f"has the {key}" in error_of(make)
    [note] = render(byte_level, [{**ASK, key: 1}, SEVEN], template=template).notes
    assert note.startswith(f"{key}=1 is ignored for the role user")


def test_roles_that_are_written_as_the_assistants(byte_level: Tokenizer) -> None:
    chat = [ASK, {"role": "model", "content": "Seven"}]
    gemma = PLAIN.replace("<|im_start|>assistant", "<|im_start|>model").replace(
        "{{ m.role }}", "{{ 'model' if m.role == 'assistant' else m.role }}"
    )
    rendered = render(byte_level, chat, template=gemma)
    assert (targets(rendered), rendered.notes) == (["Seven<|im_end|>"], ())
    rendered = render(byte_level, chat, template=PLAIN)
    assert targets(rendered) == []
    assert rendered.notes[0] == NO_ANSWERS
    assert "the role model are not targets" in rendered.notes[1]


INST = "[INST] {{ %s.content }} [/INST]"
ANSWER = "{{ ' ' + %s.content }} <|end_of_text|>"
EITHER = (
    "{% if messages[i].role == 'user' %}" + INST % "messages[i]"
    + "{% else %}" + ANSWER % "messages[i]" + "{% endif %}"
)  # fmt: skip


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(messages | length) %}" + EITHER + "{% endfor %}",
        "{% for pair in messages | batch(2) %}" + INST % "pair[0]" + ANSWER % "pair[1]"
        + "{% endfor %}",
        "{% for i in range(0, messages | length, 2) %}" + INST % "messages[i]"
        + ANSWER % "messages[i + 1]" + "{% endfor %}",
        "{% set ns = namespace(i=0) %}{% for _ in range(4) %}{% set i = ns.i %}" + EITHER
        + "{% set ns.i = ns.i + 1 %}{% endfor %}",
        "{% for user, said in messages | batch(2) %}" + INST % "user" + ANSWER % "said"
        + "{% endfor %}",
        "{% set ns = namespace(text='') %}{% for i in range(messages | length) %}{% set ns.text = "
        "ns.text ~ messages[i].content ~ ' <|end_of_text|>' %}{% endfor %}{{ ns.text }}",
        "{% for one in range(1) %}{% for i in range(messages | length) %}" + EITHER
        + "{% endfor %}{% endfor %}",
    ],
)  # fmt: skip
def test_loops_over_numbers(byte_level: Tokenizer, template: str) -> None:
    chat = [ASK, {**SEVEN, "content": "Nine"}, ASK, SEVEN]
    for end in ("<|end_of_text|>", "<|pad|>"):  # the second token has no role that ends a turn
        rendered = render(byte_level, chat, template=template.replace("<|end_of_text|>", end))
        written = [target.strip() for target in targets(rendered)]
        # in this case, the tracked spans are lost
        is_lost = "ns.text" in template and end == "<|pad|>"
        assert written == (["Nine", "Seven"] if is_lost else [f"Nine {end}", f"Seven {end}"])
        assert bool(rendered.notes) == is_lost


# Comparison with the library


def test_compare_side_reports_ignored_keys_and_other_templates(small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small / "small-byte-level", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(BESIDE)
    tokenizer = load_tokenizer(folder)
    rows = [
        chat_record({"messages": [ASK, SEVEN], "tools": [TOOL], "mood": 1}, 0),
        chat_record([ASK], 1),
        chat_record([ASK, {**SEVEN, "thinking": "3 + 4"}], 2),
    ]
    comparison = compare_side(tokenizer, rows)
    roles = [span.role for chat in comparison.rendered for span in chat.message_spans]
    assert (comparison.num_chats, sorted(roles)) == (3, ["assistant", "user", "user"])
    assert len({note for chat in comparison.rendered for note in chat.notes}) == 2
    assert comparison.differences == ["message 1 (assistant): the template drops its thinking"]
    tokenizer.library.chat_template = BESIDE + "!"
    sides = rows[:2]
    assert compare_side(tokenizer, sides, template=BESIDE).differences == []
    comparison = compare_side(tokenizer, sides)
    assert [line.split(" is ")[0] for line in comparison.differences] == [
        "conversation 0", "conversation 1"
    ]  # fmt: skip


# In the collator


def test_collator_notes_unused_keys(byte_level: Tokenizer) -> None:
    def collator_warnings(*samples: Any, **options: Any) -> list[str]:
        collator = DistillationCollator(
            byte_level, [], student_template=chatml("{{ m.content }}"), **options
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            collator(samples)
        return [str(warning.message).removeprefix("small-byte-level: ") for warning in caught]

    row = {"messages": [ASK, SEVEN], "teacher_messages": None, "source": "x"}
    assert collator_warnings(row, {"text": "boats", "id": 7}) == []
    effect = " is ignored, because nothing uses it"
    assert collator_warnings({**row, "loss": 0}) == [f"the key 'loss' of conversations{effect}"]
    both = {**row, "text": "boats"}
    assert collator_warnings(both) == [f"the key 'messages' of texts{effect}"]
    assert collator_warnings([ASK]) == [NO_ANSWERS]
    assert collator_warnings([Message("user", "boats?"), Message("assistant", "Seven")]) == []
    assert collator_warnings([ASK, {**SEVEN, "finish_reason": "stop", "id": 3}]) == []
    assert collator_warnings(row, max_length=2)[0].startswith(
        "max_length 2 cuts off all targets of a sample"
    )


def test_align_uses_the_variables_of_a_conversation(byte_level: Tokenizer) -> None:
    pair = xtok.load_pair(byte_level, byte_level)
    chat = {"messages": [ASK, SEVEN], "documents": [{"title": "Harbour", "text": "7"}]}
    templates = ChatTemplates(student_template=GROUNDED, teacher_template=GROUNDED)
    aligned = align_chat(TokenAligner(pair), pair, chat, templates)
    assert aligned.student.text.startswith("Harbour: 7")


# Results of tools

TWO_CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [
    {"id": f"call_{x}", "type": "function", "function": {"name": "count", "arguments": {"of": x}}}
    for x in "ab"]}  # fmt: skip
RESULTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}%s<|im_end|>\n"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("ids", "names", "shown", "note"),
    [
        ("ab", "xx", "", ""),
        ("ba", "xx", "", "not in the order of the calls"),
        ("ba", "xy", "", "not in the order of the calls"),
        ("ba", "xx", "{{ m.name }}", "not in the order of the calls"),
        ("ba", "xy", "{{ m.name }}", ""),
        ("ba", "xx", "{{ m.tool_call_id }}", ""),
        ("ba", "xx", "{% if m.tool_call_id == 'call_a' %}first{% endif %}", ""),
        ("az", "xx", "{{ m.tool_call_id }}", "message 3: no call has the tool_call_id 'call_z'"),
        ("aa", "xx", "", ""),
        ("b", "x", "", ""),
    ],
)
def test_results_and_their_calls(
    byte_level: Tokenizer, ids: str, names: str, shown: str, note: str
) -> None:
    results = [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": name, "content": str(n)}
        for n, (i, name) in enumerate(zip(ids, names, strict=True))
    ]
    chat = render(
        byte_level, [ASK, TWO_CALLS, *results, SEVEN], template=RESULTS.replace("%s", shown)
    )
    about = [n for n in chat.notes if "call" in n]
    assert len(about) == bool(note)
    assert note in "".join(about)


def test_calls_without_ids_match_any_result(byte_level: Tokenizer) -> None:
    calls = [{key: c[key] for key in ("type", "function")} for c in TWO_CALLS["tool_calls"]]
    result = {"role": "tool", "tool_call_id": "call_b", "content": "7"}
    chat = render(
        byte_level, [ASK, TWO_CALLS | {"tool_calls": calls}, result, SEVEN],
        template=RESULTS.replace("%s", ""),
    )  # fmt: skip
    assert chat.notes == ()


def test_the_id_of_a_call_is_a_key_of_results_only(byte_level: Tokenizer) -> None:
    chat = render(byte_level, [ASK | {"tool_call_id": "call_a"}, SEVEN], template="chatml")
    assert [note for note in chat.notes if "tool_call_id" in note]


# Values that are easily confused


@pytest.mark.parametrize(("value", "is_noted"), [("false", True), ("True", True), (False, False)])
def test_a_boolean_as_text(byte_level: Tokenizer, value: object, is_noted: bool) -> None:
    template = RESULTS.replace("%s", "{{ 'no' if not enable_thinking }}")
    chat = render(byte_level, [ASK, SEVEN], template=template, variables={"enable_thinking": value})
    assert any("enable_thinking" in note for note in chat.notes) == is_noted


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("thinks", "is_noted"), [(True, False), (False, True)])
def test_thinking_in_the_generation_prompt_is_noted(
    byte_level: Tokenizer, thinks: bool, is_noted: bool
) -> None:
    chat = render(byte_level, [ASK, SEVEN], template=THINKS, variables={"enable_thinking": thinks})
    assert any("generation prompt ends with" in note for note in chat.notes) == is_noted


@pytest.mark.parametrize("keeps_last", ["or loop.last", ""])
def test_thoughts_in_contents_take_few_renderings(
    byte_level: Tokenizer, keeps_last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rendering for each omitted thought would take quadratic time."""
    body = "{{ m.content if m.role == 'user' %s else m.content.split('</think>')[-1] }}"
    numbers = []
    for size in (4, 16):
        counted = Mock(wraps=render_template)
        monkeypatch.setattr("xtok.conversation.rendering.render_template", counted)
        chat = [m for i in range(size) for m in (ASK, {**SEVEN, "content": f"<think>{i}</think>7"})]
        assert render(byte_level, chat, template=chatml(body % keeps_last)).notes
        numbers.append(counted.call_count)
    assert numbers[0] == numbers[1]


def test_equal_tags_of_different_roles_are_checked_separately(byte_level: Tokenizer) -> None:
    """The template converts the assistant's tags, and drops the tagged text of users."""
    body = (
        "{{ m.content.replace('<b>x</b>', 'B') if m.role == 'assistant' "
        "else m.content.split('</b>')[-1] }}"
    )
    chat = [ASK, {**SEVEN, "content": "<b>x</b>y"}, {**ASK, "content": "<b>z</b>y"}, SEVEN]
    rendered = render(byte_level, chat, template=chatml(body))
    assert "By" in rendered.text
    assert any("text marked with <b>" in note for note in rendered.notes)


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ("<think>hm</think>seven", "text marked with <think>"),
        ("Write <think> and </think> there", "omits the text before <think> in the content"),
    ],
)
def test_a_quoted_tag(byte_level: Tokenizer, content: str, note: str) -> None:
    chat = render(byte_level, [ASK, SEVEN | {"content": content}], template=THINKS)
    assert any(note in n for n in chat.notes)
