"""`xtok serve` reads conversations with the teacher's template and system text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from running_servers import (
    KINDS,
    TEXT,
    ServePair,
    check_rows,
    post,
    prompt_rows,
    running,
    serving,
    token_logprobs,
)
from served_teachers import TeacherServer

import xtok
from xtok.conversation import render
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


@pytest.fixture
def model(digits: Tokenizer) -> TeacherServer:
    return TeacherServer(digits)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "teacher.jinja"
    path.write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    return path


CHAT = [
    {"role": "user", "content": "How many steps?"},
    {"role": "assistant", "content": "There are 201 of them."},
    {"role": "user", "content": "And lamps?"},
    {"role": "assistant", "content": "One, and 42 wicks — día."},
]


@pytest.mark.parametrize("end", [None, -1, -3, "asks"])
def test_conversations_are_read_by_the_teachers_template(
    pair: Pair, model: TeacherServer, template: Path, end: int | str | None
) -> None:
    """Conversations: complete, without the last end of turn, truncated, and as a prompt."""
    student, teacher = pair.tokenizers
    messages, asks = (CHAT[:3], True) if end == "asks" else (CHAT, False)
    ours = render(student, messages, template="chatml", add_generation_prompt=asks)
    ids = ours.ids.tolist()
    end_of_turn = student.table.roles["turn_end"][0]
    if isinstance(end, int):
        ids = ids[: len(ids) - ids[::-1].index(end_of_turn)][:end]
    theirs = render(teacher, messages, template=template, add_generation_prompt=asks).ids.tolist()
    both = ("chatml", template)
    with running(model.app) as teacher_url, serving(pair, teacher_url, templates=both) as url:
        model.requested_ids.clear()
        [rows] = prompt_rows(post(url, ids, 5))
        metrics = httpx.get(f"{url}/metrics").text
    check_rows(ids, rows, 5, len(student.table))
    [teacher_ids] = model.requested_ids
    assert 'xtok_sequences_total{chat="true"} 1.0' in metrics
    assert teacher_ids == theirs[: len(teacher_ids) if isinstance(end, int) else None]
    values = [math.nan, *token_logprobs(ids, rows)]
    teacher_values = [math.nan, *model.token_logprobs(teacher_ids)]
    for n, message in enumerate(messages[: 3 if isinstance(end, int) else None]):
        # the sum over a message and its end of turn equals the teacher's
        words = message["content"].encode()
        sums = [
            sum(numbers[a:b])
            for side, side_ids, numbers in (
                (student, ids, values),
                (teacher, teacher_ids, teacher_values),
            )
            for a, b in [span_of(side, side_ids, words)]
        ]
        assert sums[0] == pytest.approx(sums[1], abs=1e-4), n


def span_of(side: Tokenizer, ids: Sequence[int], words: bytes) -> tuple[int, int]:
    """Return the span of the words' tokens and of the control token after them."""
    tokens = [side.table[i] for i in ids]
    ends = np.cumsum([0, *map(len, tokens)])
    start = b"".join(tokens).index(words)
    first = int(np.searchsorted(ends, start, side="right")) - 1
    last = int(np.searchsorted(ends, start + len(words)))
    assert b"".join(tokens[first:last]) == words
    return first, last + 1


SYSTEM = "There are 201 steps and one lamp."


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_only_the_teacher_has_a_system_text(
    pair: Pair, model: TeacherServer, template: Path, before: list[dict[str, str]], kind: str
) -> None:
    """The response contains only the student's tokens; the sums equal the teacher's."""
    student, teacher = pair.tokenizers
    ids = render(student, [*before, *CHAT], template="chatml").ids.tolist()
    rendered = render(
        teacher, [{"role": "system", "content": SYSTEM}, *CHAT], template=template
    ).ids
    expected, both = rendered.tolist(), ("chatml", template)
    if kind == "text":
        ids = student.encode(TEXT).ids.tolist()
        expected = teacher.table.roles["bos"][:1]
        expected = [*expected, *teacher.encode_batch([SYSTEM])[0], *teacher.segment(TEXT)]
    with running(model.app) as teacher_url, serving(pair, teacher_url, templates=both) as url:
        body = {"prompt": ids, "prompt_logprobs": 5}
        model.requested_ids.clear()
        responses = [
            httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=60)
            for more in ({"teacher_system": SYSTEM}, {"teacher_system": ""}, {})
        ]
    [rows], [usual], [without] = map(prompt_rows, responses)
    check_rows(ids, rows, 5, len(student.table))
    assert usual == without != rows
    assert model.requested_ids[0] == expected
    values = [math.nan, *token_logprobs(ids, rows)]
    teacher_values = [math.nan, *model.token_logprobs(expected)]
    for words in [m["content"].encode() for m in CHAT] if kind == "chat" else ():
        sums = [
            sum(numbers[slice(*span_of(side, side_ids, words))])
            for side, side_ids, numbers in (
                (student, ids, values), (teacher, expected, teacher_values)
            )
        ]  # fmt: skip
        assert sums[0] == pytest.approx(sums[1], abs=1e-4)
    if kind == "text":
        size = len(teacher.segment(TEXT))
        assert sum(values[1:]) <= 0
        assert sum(values[1:]) >= sum(teacher_values[-size:]) - 1e-3


@pytest.mark.parametrize("kind", KINDS.args[1])
def test_equal_tokenizers_with_a_system_text(serve_pair: ServePair, kind: str) -> None:
    served = serve_pair("byte_level", "byte_level", kind)
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    served.model.requested_ids.clear()
    body = {"prompt": ids, "prompt_logprobs": 5, "teacher_system": SYSTEM}
    [choice] = served.post("/v1/completions", **body)["choices"]
    rows, [teacher_ids] = choice["prompt_logprobs"], served.model.requested_ids
    check_rows(ids, rows, 5, len(served.pair.tokenizers[0].table))
    assert teacher_ids[-len(ids) :] == ids
    assert token_logprobs(ids, rows) == pytest.approx(
        served.model.token_logprobs(teacher_ids)[1 - len(ids) :], abs=1e-4
    )


def test_equal_tokenizers_with_a_system_text_of_equal_length(
    model: TeacherServer, digits: Tokenizer
) -> None:
    """The response contains the student's ids, not the teacher's."""
    one, two = (
        render(digits, [{"role": "system", "content": n}, *CHAT], template="chatml").ids.tolist()
        for n in "12"
    )
    assert len(one) == len(two)
    pair, both = xtok.load_pair(digits, digits), ("chatml", "chatml")
    with running(model.app) as teacher_url, serving(pair, teacher_url, templates=both) as url:
        body = {"prompt": one, "prompt_logprobs": 5, "teacher_system": "2"}
        [rows] = prompt_rows(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    assert model.requested_ids[-1] == two
    check_rows(one, rows, 5, len(digits.table))


def test_equal_tokenizers_with_different_templates(
    model: TeacherServer, digits: Tokenizer, template: Path
) -> None:
    """The teacher reads conversations in its own template, and other ids unchanged."""
    student, teacher = (
        render(digits, CHAT, template=each).ids.tolist() for each in ("chatml", template)
    )
    text, both = digits.encode(TEXT).ids.tolist(), ("chatml", template)
    pair = xtok.load_pair(digits, digits)
    with running(model.app) as teacher_url, serving(pair, teacher_url, templates=both) as url:
        model.requested_ids.clear()
        rows, other = prompt_rows(post(url, [student, text], 5))
    assert sorted(model.requested_ids) == sorted([teacher, text])
    check_rows(student, rows, 5, len(digits.table))
    assert token_logprobs(text, other) == model.token_logprobs(text)


def test_ids_that_are_no_conversation_are_spelled(
    pair: Pair, digits: Tokenizer, template: Path
) -> None:
    student, teacher = pair.tokenizers
    rendered = render(student, CHAT, template="chatml").ids.tolist()
    both = ("chatml", template)
    for chat, ids in ((True, [*rendered[3:], *rendered]), (False, rendered)):
        model = TeacherServer(digits)
        with (
            running(model.app) as teacher_url,
            serving(pair, teacher_url, chat=chat, templates=both) as url,
        ):
            model.requested_ids.clear()
            [rows] = prompt_rows(post(url, ids))
        check_rows(ids, rows, 1, len(student.table))
        [teacher_ids] = model.requested_ids
        ours = b"".join(student.table[i] for i in ids)
        assert b"".join(teacher.table[i] for i in teacher_ids) == ours
