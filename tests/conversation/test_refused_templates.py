"""Templates and conversations that cannot be rendered."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from checks import error_of
from rendered_chats import SPACED, TOOLS, each

from xtok.conversation import render
from xtok.conversation.templates import render_template
from xtok.tokenizers import Tokenizer

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
        (
            SPACED,
            "nemotron6-moe",
            "nemotron6-moe is not a file",
        ),  # the text of this error is private
        (SPACED, "{{ '\udc00' }}", "contains the unpaired surrogate '\\udc00'"),
        (SPACED, "{{ cycler() }}", "raises an error: "),
        (SPACED, "{{ 'x'.join(messages) }}", "raises an error: sequence item 0: expected str"),
        (SPACED, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "raises an error: "),
        (SPACED, "{% break %}", "'break' outside loop"),
        (SPACED, "{% if 1 %}" * 200 + "{% endif %}" * 200, "is not a Jinja template: too many"),
        (SPACED, "{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "Jinja template: too many"),
        (SPACED, "{{ " + "(" * 5_000 + ")" * 5_000 + " }}", "template: maximum recursion"),
        # Templates cannot read files or private attributes of Python.
        (SPACED, "{% include '/etc/passwd' %}", "no loader"),
        (SPACED, "{{ messages.__class__.__mro__ }}", "is unsafe"),
        (SPACED, "{{ cycler.__init__.__globals__ }}", "is unsafe"),
        # Templates cannot call the internal function that marks targets.
        (SPACED, "{{ mark('generation') }}", "'mark' is undefined"),
        (SPACED, "{{ environment.mark('generation') }}", "'environment' is undefined"),
        (SPACED, "{{ xtok_mark('generation') }}", "'xtok_mark' is undefined"),
        (SPACED, "{{ self.mark('generation') }}", "has no attribute 'mark'"),
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
    chat = [SPACED[0], {"role": "user", "content": value}]
    call = partial(render, byte_level, chat, template=each("{{ m.content | string }}"))
    if depth < 100:
        assert call().text.endswith("'x'" + "]" * depth)
    else:
        assert "message 1 is nested" in error_of(call)


def test_only_the_assistant_may_not_write_an_image(byte_level: Tokenizer) -> None:
    user = {"role": "user", "content": "see <image>"}
    assert render(byte_level, [user], template="chatml").text.count("<image>") == 1


def test_templates_have_no_access_to_attributes_of_python() -> None:
    template = "{{ messages[0].content | attr('__class__') }}{{ '{0.__class__}'.format(messages) }}"
    assert render_template(template, SPACED).text == ""
