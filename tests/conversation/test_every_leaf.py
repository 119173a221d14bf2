"""Values of 32 conversations that 72 templates omit: each value has its error or note."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import chat_families
import pytest

from xtok.conversation import render
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer

Messages = list[dict[str, Any]]

# Each value is a different word or number.


def user(content: Any = "qask", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any = "qanswer", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(name: str = "qname", arguments: Any = None, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments or {"key": "qvalue"}}
    return {"type": "function", "id": f"callid00{number}", "function": function}


def call_message(*calls: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    return answer(content, tool_calls=list(calls or [call()]), **more)


def result(content: str = "qtold", name: str = "qname", number: int = 1) -> dict[str, Any]:
    fields = {"name": name, "tool_call_id": f"callid00{number}"}
    return {"role": "tool", **fields, "content": content}


def tool(*, required: list[str], properties: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": "qtool", "description": "qabout", "parameters": parameters, **more}
    return [{"type": "function", "function": about}]


KEY = {"type": "string", "description": "qparameter"}
TOOL = tool(required=["key"], properties={"key": KEY})
RICH = tool(
    required=["key"],
    properties={
        "key": {"type": "string", "enum": ["qone", "qtwo"], "default": "qdefault"},
        "size": {"type": "integer", "minimum": 71177},
        "deep": {"type": "object", "properties": {"x": {"type": "string", "description": "qdeep"}}},
    },
    strict=True,
    returns={"type": "string", "description": "qreturns"},
)
AGAIN, LAST, SECOND = user("qagain"), answer("qlast"), call("qsecond", {"key": "qother"}, 2)
IMAGE = {"type": "image", "image": "qimage.png"}
CASES: dict[str, Messages] = {
    "plain": [user(), answer()],
    "system": [{"role": "system", "content": "qsystem"}, user(), answer()],
    "turns": [user(), answer(), AGAIN, LAST],
    "developer": [{"role": "developer", "content": "qsystem"}, user(), answer()],
    "a part": [user(parts("qask")), answer()],
    "parts": [user(parts("qask", "qmore")), answer(parts("qanswer", "qthen"))],
    "an image": [user([IMAGE, *parts("qask")]), answer(parts("qanswer"))],
    **{key: [user(), answer(**{key: "qthought"})]
       for key in ("reasoning_content", "reasoning", "thinking", "thoughts")},
    "earlier reasoning": [
        user(), answer(reasoning="qthought"), AGAIN, answer("qlast", reasoning_content="qfinal")],
    "a marked thought": [user(), answer("<think>\nqthought\n</think>\n\nqanswer")],
    "earlier marked": [user(), answer("<think>\nqthought\n</think>\n\nqanswer"), AGAIN,
                       answer("<think>\nqfinal\n</think>\n\nqlast")],
    "a call": [user(), call_message()],
    "numbers": [user(), call_message(call(arguments={"size": 71177, "key": "qvalue"}))],
    "nested": [user(), call_message(call(arguments={"deep": {"list": ["qvalue", 71177]}}))],
    "JSON arguments": [user(), call_message(call(arguments='{"key": "qvalue"}'))],
    "call and content": [user(), call_message(content="qbeside")],
    "call and reasoning": [user(), call_message(reasoning_content="qthought")],
    "two calls": [user(), call_message(call(), SECOND)],
    "result": [user(), call_message(), result(), answer()],
    "two results": [
        user(), call_message(call(), SECOND), result(), result("qtoo", "qsecond", 2), answer()],
    "content, result": [user(), call_message(content="qbeside"), result(), answer()],
    "reasoning, result": [
        user(), call_message(reasoning_content="qthought"), result(),
        answer(reasoning_content="qfinal")],
    "earlier call": [
        user(), call_message(reasoning_content="qthought"), result(), answer(), AGAIN, LAST],
    "a tool": [user(), answer()],
    "a rich tool": [user(), answer()],
    "tool and call": [user(), call_message(), result(), answer()],
    "documents": [user(), answer()],
    "a name": [user(name="qspeaker"), answer()],
    "function_call": [
        user(), answer("", function_call={"name": "qname", "arguments": {"key": "qvalue"}})],
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "a tool": {"tools": TOOL}, "a rich tool": {"tools": RICH}, "tool and call": {"tools": TOOL},
    "documents": {"documents": [{"title": "qtitle", "text": "qtext"}]},
}  # fmt: skip

ALIKE = """\
cohere cohere_training
cohere2 cohere2_training
deepseek_r1_distill
deepseek_r1_distill_training
deepseekv3
deepseekv3_training
diffusion_gemma diffusion_gemma_training gemma4_v5
gemma gemma_training
gemma3 gemma3_training
gemma4 gemma4_v3 gemma4_v4
gemma4_v2
glm4moe glm4moe_training
gptoss gptoss_training
lfm2 lfm2_training
lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl nemotron_3_5_lightning nemotron_3_5_lightning_training
 nemotron_3_nano nemotron_3_nano_training nemotron_3_super nemotron_3_super_training
 nemotron_3_ultra nemotron_3_ultra_training
lfm2_v2 lfm2_v2_training
llama3 llama3_training idefics3 idefics3_training qwen2_5_vl qwen2_5_vl_training smolvlm
 smolvlm_training
llama3_1 llama3_2
llava_next llava_next_training
muse_glimmer muse_glimmer_training
phi3 phi3_training phi3_5 phi3_5_training
qwen2_5 qwen2_5_training
qwen3
qwen3_5_nothink qwen3_5_think qwen3_6
qwen3_5_nothink_training qwen3_5_think_training qwen3_6_training qwen3_8 qwen3_8_training
qwen3_instruct_2507 qwen3_instruct_2507_training
qwen3_training
qwen3_vl qwen3_vl_training"""
GROUPS = {line.split()[0]: line.split() for line in ALIKE.replace("\n ", " ").splitlines()}
"""Templates that leave out the same, by the first of them."""
ANY = " ".join(GROUPS)
WITH_PARTS = ("idefics3", "llava_next", "smolvlm")  # these accept only a list of parts

NO_CALLS = "cohere cohere2 deepseek_r1_distill deepseek_r1_distill_training gemma gemma3 lfm2 "
NO_CALLS += "llama3 llava_next phi3"
NO_TOOLS = "cohere cohere2 deepseek_r1_distill deepseek_r1_distill_training deepseekv3 "
NO_TOOLS += "deepseekv3_training gemma gemma3 llama3 llava_next phi3"
RESULTS = "deepseek_r1_distill deepseek_r1_distill_training lfm2 llama3"  # without calls
SPEAK = "deepseekv3_training gemma4_v2 lfm2_v2 llama3_1 qwen2_5 qwen3_instruct_2507 qwen3_vl"
NO_THOUGHTS = f"{NO_TOOLS} gemma4 gemma4_v2 lfm2 lfm2_v2 llama3_1 qwen2_5 qwen3_instruct_2507 "
NO_THOUGHTS += "qwen3_vl"
NO_PARTS = "qwen3 qwen3_instruct_2507 qwen3_training"
DEEPSEEK = "deepseek_r1_distill deepseekv3 deepseekv3_training"

ABSENT: dict[str, dict[str, str]] = {
    "developer": {"qsystem": f"cohere2 deepseek_r1_distill_training {DEEPSEEK} glm4moe phi3 "
                  f"muse_glimmer qwen2_5 {NO_PARTS} qwen3_vl"},
    "a part": {"qask": NO_PARTS},
    "parts": {"qthen": "llava_next", "qask qmore qanswer qthen": NO_PARTS},
    "an image": {"qimage": "glm4moe", "qimage qask qanswer": NO_PARTS},
    "reasoning_content": {"qthought": NO_THOUGHTS},
    "reasoning": {"qthought": NO_THOUGHTS},
    "thinking": {"qthought": NO_THOUGHTS},
    "thoughts": {"qthought": ANY},
    "earlier reasoning": {"qthought qfinal": NO_THOUGHTS},
    "a call": {"qname qvalue": NO_CALLS},
    "numbers": {"qname 71177 qvalue": NO_CALLS},
    "nested": {"qname qvalue 71177": NO_CALLS},
    "JSON arguments": {"qname qvalue": NO_CALLS},
    "call and content": {"qname qvalue": NO_CALLS, "qbeside": "llama3_1 muse_glimmer"},
    "call and reasoning": {"qname qvalue qthought": NO_CALLS, "qthought": SPEAK},
    "two calls": {"qname qvalue qsecond qother": NO_CALLS, "qsecond qother": "gptoss"},
    "result": {"qname qvalue": RESULTS, "qname qvalue qtold": "phi3"},
    "two results": {"qname qvalue qsecond qother": RESULTS, "qsecond qother": "gptoss",
                    "qname qvalue qsecond qother qtold qtoo": "phi3"},
    "content, result": {"qname qvalue": RESULTS, "qbeside": "llama3_1 muse_glimmer",
                        "qname qvalue qtold": "phi3"},
    "reasoning, result": {"qname qvalue qthought qfinal": RESULTS, "qthought qfinal": SPEAK,
                          "qfinal": "gemma4", "qname qvalue qthought qtold qfinal": "phi3"},
    "earlier call": {"qname qvalue qthought": RESULTS, "qthought": SPEAK,
                     "qname qvalue qthought qtold": "phi3"},
    "a tool": {"qtool qabout qparameter": NO_TOOLS},
    "a rich tool": {"qtool qabout qone qtwo qdefault 71177 qdeep qreturns": NO_TOOLS},
    "tool and call": {
        "qname qvalue qtool qabout qparameter": RESULTS.replace(" lfm2", ""),
        "qtool qabout qparameter": "deepseekv3_training", "qname qvalue": "lfm2",
        "qname qvalue qtold qtool qabout qparameter": "phi3"},
    "documents": {"qtitle qtext": ANY},
    "function_call": {"qname qvalue": ANY},
}  # fmt: skip
"""By case, values missing from the text of some groups; an error names the first of them."""

NOTED: dict[str, dict[str, str]] = {
    "earlier reasoning":
        {"qthought": "diffusion_gemma glm4moe gptoss lfm2_2_5 qwen3 qwen3_5_nothink"},
    "a marked thought": {"qthought": DEEPSEEK},
    "earlier marked":
        {"qthought qfinal": DEEPSEEK, "qthought": "glm4moe lfm2_2_5 qwen3 qwen3_5_nothink"},
    "content, result": {"qbeside": "gptoss"},
    "reasoning, result": {"qthought": "gptoss"},
    "earlier call":
        {"qthought": "diffusion_gemma gemma4 glm4moe gptoss lfm2_2_5 qwen3 qwen3_5_nothink"},
    "a rich tool": {"qdefault 71177 qreturns": "diffusion_gemma gemma4 gemma4_v2",
                    "71177 qdeep qreturns": "gptoss", "qreturns": "muse_glimmer"},
    "a name": {"qspeaker": ANY},
}  # fmt: skip
"""Values that a note reports: the family's convention, or a key that the template ignores."""


def words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for item in value.values() for word in words(item)]
    if isinstance(value, list):
        return [word for item in value for word in words(item)]
    return re.findall(r"q[a-z]+|71177", str(value))


def named(problem: str, case: Messages, beside: dict[str, Any]) -> Any:
    """Return the value at the message and the key that an error names."""
    match = re.search(r"message (\d+) \(\w+\): the template drops (?:.* of )?its (\S+)", problem)
    value: Any = case[int(match[1])] if match else beside
    path = match[2] if match else problem.partition("the template drops ")[2]
    return functools.reduce(
        lambda at, key: at[int(key) if key.isdigit() else key], re.findall(r"\w+", path), value
    )


@functools.cache
def expected(name: str, case: str) -> tuple[str, bool]:
    """Return the values that a template omits, and whether this is an error, from the tables."""
    [group] = [first for first, alike in GROUPS.items() if name in alike]
    for table in (ABSENT, NOTED):
        for absent, groups in table.get(case, {}).items():
            if group in groups.split():
                return absent, table is ABSENT
    return "", False


@pytest.fixture(scope="module")
def library(small: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(small / "small-byte-level"))


@pytest.mark.parametrize("path", chat_families.trl_templates(), ids=lambda path: path.stem)
def test_values_missing_from_the_text_are_reported(
    path: Path, library: Any, byte_level: Tokenizer
) -> None:
    template = path.read_text(encoding="utf-8")
    for case, messages in CASES.items():
        if path.stem.removesuffix("_training") in WITH_PARTS:
            messages = [
                {**m, "content": parts(m["content"])} if isinstance(m["content"], str) else m
                for m in messages
            ]
        beside = BESIDE.get(case, {})
        make = functools.partial(
            library.apply_chat_template, chat_template=template, tokenize=False
        )
        try:
            text = make(messages, **beside)
        except Exception:  # noqa: BLE001 - an error of the template
            text = None
        problem, notes = "", []
        try:
            variables = {k: v for k, v in beside.items() if k == "documents"}
            chat = render(
                byte_level, messages, template=template, tools=beside.get("tools"),
                variables=variables,
            )  # fmt: skip
            notes = [note for note in chat.notes if re.search("omits|ignored", note)]
            assert chat.text == text, case
        except XtokError as error:
            problem = error.message
        if text is None:
            assert "raises" in problem, case
            continue
        if case == "an image":  # the text contains a placeholder for the image
            without = [{**m, "content": [p for p in m["content"] if p != IMAGE]} for m in messages]
            text += "qimage" * (text != make(without))
        input_words = dict.fromkeys(words([messages, *beside.values()]))
        absent, is_error = expected(path.stem, case)
        assert [word for word in input_words if word not in text] == absent.split(), case
        assert (bool(problem), bool(notes)) == (is_error, bool(absent) and not is_error), case
        if problem:
            assert set(words(named(problem, messages, beside))) & {*absent.split()}, problem


def test_the_table_has_all_templates() -> None:
    pytest.importorskip("trl")
    stems = sorted(path.stem for path in chat_families.trl_templates())
    assert sorted(name for group in GROUPS.values() for name in group) == stems
