"""`xtok serve` on loopback, in front of a real model's server: what it answers, and what not."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_teachers import Model, proxied, running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import xtok
from xtok.building.build import map_of_pair
from xtok.conversation import render
from xtok.errors import XtokError
from xtok.teachers.back_map import BACK_MAP
from xtok.teachers.serving import teacher as teachers
from xtok.teachers.serving.server import Proxy
from xtok.teachers.serving.teacher import TeacherError, TeacherServer
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType

# What msgspec says of JSON without an end, by how deep Python lets it read
TOO_DEEP = "Input data was truncated" if sys.version_info >= (3, 14) else "maximum recursion depth"

TEXT = "In 2014 there were 201 lamps — día tras día 灯, and the keeper’s 42 steps."
SIDES = [
    ("byte_level", "digits"), ("digits", "byte_level"), ("sentencepiece", "digits"),
    ("byte_level", "sentencepiece"), ("ranks", "byte_level"),
]  # fmt: skip


class Served(NamedTuple):
    """A pair whose teacher runs, and is served."""

    pair: Pair
    model: Model
    url: str
    client: httpx.Client
    notes: list[str]

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request that must be right."""
        response = self.client.post(self.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def rows(self, *sequences: Sequence[int], top_k: int = 5) -> list[list[dict[str, Any]]]:
        """Return the rows of some sequences by vLLM's route."""
        answer = self.post("/v1/completions", prompt=[*sequences], prompt_logprobs=top_k)
        return [choice["prompt_logprobs"] for choice in answer["choices"]]


Start = Callable[..., Served]


@pytest.fixture(scope="module")
def start(tokenizers: dict[str, Tokenizer]) -> Iterator[Start]:
    """Serve pairs, each once."""
    made: dict[Any, Served] = {}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))

        def get(student: str, teacher: str, kind: Literal["vllm", "sglang"] = "vllm") -> Served:
            key = student, teacher, kind
            if key not in made:
                pair = xtok.pair(tokenizers[student], tokenizers[teacher])
                model, notes = Model(tokenizers[teacher], kind), list[str]()
                behind = stack.enter_context(running(model.app))
                url = stack.enter_context(proxied(pair, behind, notes=notes))
                made[key] = Served(pair, model, url, client, notes)
            return made[key]

        yield get


def own(ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the value of each token after the first, which stands first in its row."""
    assert rows[0] is None
    found = []
    for i, row in zip(ids[1:], rows[1:], strict=True):
        assert next(iter(row)) == str(i)
        found.append(row[str(i)]["logprob"])
    return found


def check_rows(ids: Sequence[int], rows: Sequence[Any], top_k: int, width: int) -> None:
    """What every trainer relies on."""
    assert all(math.isfinite(value) and value <= 0 for value in own(ids, rows))
    for row in rows[1:]:
        candidates = [int(i) for i in row]
        ranks = [entry["rank"] for entry in row.values()]
        values = [entry["logprob"] for entry in row.values()]
        first, *others = ranks
        assert len(row) == max(1, top_k + (first > top_k))
        assert sorted([*others, *([first] if first <= top_k else [])]) == [*range(1, top_k + 1)]
        assert others == sorted(others)
        assert all(0 <= i < width for i in candidates)
        assert all(map(math.isfinite, values))
        assert values[1:] == sorted(values[1:], reverse=True)
        assert sum(map(math.exp, values)) < 1 + 1e-4
        by_rank = [value for _, value in sorted(zip(ranks, values, strict=True))]
        assert by_rank == sorted(by_rank, reverse=True)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(("student", "teacher"), SIDES)
def test_each_token_has_a_value_and_sums_are_the_teachers(
    start: Start, student: str, teacher: str, kind: str
) -> None:
    served = start(student, teacher, kind)
    ours, theirs = served.pair.tokenizers
    ids = ours.encode(TEXT).ids.tolist()
    bos = list(ours.table.roles.get("bos", ())[:1])
    served.model.asked.clear()
    [rows] = served.rows([*bos, *ids])
    check_rows([*bos, *ids], rows, 5, len(ours.table))
    [asked] = served.model.asked
    assert b"".join(theirs.table[i] for i in asked) == b"".join(ours.table[i] for i in ids)
    values = [math.nan] * (not bos) + own([*bos, *ids], rows)
    told = [math.nan, *served.model.own(asked)]
    start_of = len(asked) - len(asked[1:]) if theirs.table.lengths[asked[0]] == 0 else 0
    seen = 0
    for one in xtok.TokenAligner(served.pair).pairs(ids, asked[start_of:]):
        (a, b), (c, d) = one.student_tokens, one.teacher_tokens
        expected = sum(told[start_of + c : start_of + d])
        if a or bos:
            assert sum(values[a:b]) == pytest.approx(expected, abs=1e-5)
        seen += b - a
    assert seen == len(ids)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_equal_tokenizers_get_the_teachers_own_answer(start: Start, kind: str) -> None:
    served = start("digits", "digits", kind)
    tokenizer = served.pair.tokenizers[0]
    unused = np.flatnonzero(tokenizer.table.types == TokenType.UNUSED).tolist()
    ids = [*tokenizer.encode(TEXT).ids.tolist(), unused[0], 5]
    [rows] = served.rows(ids, top_k=7)
    assert served.model.asked[-1] == ids
    expected = served.model.logprobs(ids)
    for i, row, values in zip(ids[1:], rows[1:], expected, strict=True):
        best = values.topk(7)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        told = {str(i): float(values[i]), **{str(j): value for j, value in pairs}}
        assert {j: entry["logprob"] for j, entry in row.items()} == told
        if kind == "vllm":
            assert row[str(i)]["rank"] == int((values >= values[i]).sum())


def test_control_tokens_without_a_counterpart_are_spelled(start: Start) -> None:
    """By the name, so that they have the value that it has as text; unused ids, too."""
    served = start("byte_level", "sentencepiece")
    ours, theirs = served.pair.tokenizers
    lonely = [i for i in ours.table.control_names if i not in served.pair.equal_roles]
    word = ours.segment(b" twice")
    assert lonely
    ids = [*word, lonely[0], *word]
    served.model.asked.clear()
    [rows] = served.rows(ids)
    check_rows(ids, rows, 5, len(ours.table))
    [asked] = served.model.asked
    name = ours.table.control_names[lonely[0]].encode()
    assert b"".join(theirs.table[i] for i in asked) == b" twice" + name + b" twice"
    told = dict(zip(range(1, len(asked)), served.model.own(asked), strict=True))
    ends = np.cumsum([len(theirs.table[i]) for i in asked])
    spans = {n: (ends[n - 1], ends[n]) for n in range(1, len(asked))}
    inside = [n for n, (a, b) in spans.items() if a >= 6 and b <= 6 + len(name)]
    if spans[inside[0]][0] == 6 and spans[inside[-1]][1] == 6 + len(name):
        value = rows[len(word)][str(lonely[0])]["logprob"]
        assert value == pytest.approx(sum(told[n] for n in inside), abs=1e-5)


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize(("student", "teacher"), SIDES[:3])
def test_any_ids_are_answered(
    start: Start, student: str, teacher: str, data: st.DataObject
) -> None:
    """Batches of whatever a student may write: broken characters, control tokens, unused ids."""
    served = start(student, teacher)
    width = len(served.pair.tokenizers[0].table)
    ids = st.lists(st.integers(0, width - 1), min_size=1, max_size=12)
    batch = data.draw(st.lists(ids, min_size=1, max_size=4))
    top_k = data.draw(st.sampled_from([0, 1, 5, 64]))
    for sequence, rows in zip(batch, served.rows(*batch, top_k=top_k), strict=True):
        check_rows(sequence, rows, top_k, width)


def test_sglangs_answer(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    [rows] = served.rows(ids, top_k=3)
    ask: dict[str, Any] = {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    answer = served.post("/generate", input_ids=ids, logprob_start_len=0, **ask)
    about = answer["meta_info"]
    assert about["prompt_tokens"] == len(ids)
    assert "input_top_logprobs" not in about
    scored = about["input_token_logprobs"]
    assert scored[0] == [None, ids[0], None]
    assert [entry[1] for entry in scored] == ids
    assert [entry[0] for entry in scored[1:]] == own(ids, rows)
    # From a place on, for a batch, with the best candidates and chosen ones.
    [more, last] = served.post(
        "/generate", input_ids=[ids, ids[:6]], logprob_start_len=4, top_logprobs_num=3,
        token_ids_logprob=[ids[5], 7], **ask,
    )  # fmt: skip
    meta = more["meta_info"]
    assert meta["input_token_logprobs"] == [[None, ids[4], None], *scored[5:]]
    begin, [value, *about_last] = last["meta_info"]["input_token_logprobs"]
    assert (begin, about_last) == ([None, ids[4], None], scored[5][1:])
    assert value == pytest.approx(scored[5][0], abs=1e-4)  # of a shorter sequence
    assert meta["input_top_logprobs"][0] is None
    for row, top in zip(rows[5:], meta["input_top_logprobs"][1:], strict=True):
        best = sorted(row.items(), key=lambda item: item[1]["rank"])[:3]
        assert [int(i) for i, _ in best] == [i for _, i, _ in top]
        assert [e["logprob"] for _, e in best] == pytest.approx([v for v, _, _ in top], abs=1e-2)
    first = meta["input_token_ids_logprobs"][1]
    assert [entry[1] for entry in first] == [ids[5], 7]
    assert first[0][0] == scored[5][0]
    assert all(math.isfinite(value) and value < 0 for value, _, _ in first)
    # SGLang's default, −1, is the last token alone.
    last = served.post("/generate", input_ids=ids, **ask)["meta_info"]["input_token_logprobs"]
    assert last == [[None, ids[-1], None]]
    each = [[], *([i, 3] for i in ids[1:])]
    positions = served.post(
        "/generate", input_ids=ids, logprob_start_len=0, token_ids_logprob_positions=each, **ask
    )["meta_info"]["input_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in positions[1:]] == each[1:]
    assert [row[0][0] for row in positions[1:]] == own(ids, rows)


def test_vllms_other_routes(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    [rows] = served.rows(ids, top_k=1)
    demo = served.post("/generate", prompt={"prompt_token_ids": ids}, prompt_logprobs=1)
    plain = [row and {i: entry["logprob"] for i, entry in row.items()} for row in rows]
    assert demo["prompt_logprobs"] == plain
    sampling: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "prompt_logprobs": 1,
    }
    answer = served.post(
        "/inference/v1/generate", model="x", token_ids=ids, sampling_params=sampling
    )
    assert answer["prompt_logprobs"] == rows
    assert isinstance(answer["request_id"], str)
    [choice] = answer["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, [], "length")
    start_of = 6
    sampling = {
        "max_tokens": 1, "prompt_logprob_start": start_of - 1,
        "prompt_logprob_token_ids": [[i, 9, -1] for i in ids[start_of:]],
    }  # fmt: skip
    answer = served.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    matrix = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert (matrix.dtype, matrix.shape) == (np.float32, (len(ids) - start_of, 3))
    assert matrix[:, 0].astype(float).tolist() == own(ids, rows)[start_of - 1 :]
    assert np.isfinite(matrix[:, 1]).all()
    assert np.isneginf(matrix[:, 2]).all()


def test_models_and_metrics(start: Start) -> None:
    served = start("byte_level", "digits")
    ours, _ = served.pair.tokenizers
    [card] = served.client.get(f"{served.url}/v1/models").json()["data"]
    assert (card["id"], card["root"]) == (ours.vocabulary.model_id, "the-teacher")
    assert 1000 < card["max_model_len"] < 2048
    served.rows(ours.encode(TEXT).ids.tolist())
    served.client.post(f"{served.url}/v1/completions", json={})
    metrics = served.client.get(f"{served.url}/metrics").text
    assert 'xtok_requests_total{route="/v1/completions",status="400"}' in metrics
    assert 'xtok_tokens_total{side="teacher"}' in metrics
    assert "xtok_teacher_seconds_sum" in metrics
    assert "xtok_own_seconds_sum" in metrics
    [rest] = [line for line in metrics.splitlines() if line.startswith("xtok_rest_sum")]
    assert float(rest.split()[1]) > 0


BAD: list[tuple[str, Any, str]] = [
    ("/v1/completions", b"{", "Input data was truncated"),
    ("/v1/completions", {"prompt_logprobs": 1}, "prompt: give token ids"),
    ("/v1/completions", {"prompt": "text", "prompt_logprobs": 1}, "prompt: give token ids"),
    ("/v1/completions", {"prompt": [1, [2]], "prompt_logprobs": 1}, "prompt: ids and lists"),
    ("/v1/completions", {"prompt": [[1, "a"]], "prompt_logprobs": 1}, "prompt[0][1]: Expect"),
    ("/v1/completions", {"prompt": [1]}, "prompt_logprobs: this server only scores"),
    ("/v1/completions", {"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs: -1 is not in 0"),
    ("/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "stream": True}, "stream: "),
    ("/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "max_tokens": 9}, "max_tokens: 9"),
    ("/v1/completions", {"prompt": [[1], []], "prompt_logprobs": 1}, "the sequence is empty"),
    ("/v1/completions", {"prompt": [99999], "prompt_logprobs": 1}, "the id 99999 is outside the"),
    ("/v1/completions", {"prompt": [-1], "prompt_logprobs": 1}, "the id -1 is outside the"),
    ("/v1/completions", {"prompt": [1], "prompt_logprobs": 65}, "max allowed: 64"),
    ("/generate", {"input_ids": [1]}, "return_logprob: "),
    ("/generate", {"return_logprob": True}, "input_ids: give token ids"),
    ("/generate", {"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "logprob_s"),
    ("/generate", {"input_ids": [1], "return_logprob": [True, True]}, "return_logprob: Expected"),
    ("/inference/v1/generate", {"token_ids": [1]}, "Object missing required field `sampling_par"),
    (
        "/generate",
        {"input_ids": [1, 2], "return_logprob": True, "token_ids_logprob": [5, 99999]},
        "the chosen id 99999 is outside the vocabulary of small-byte-level",
    ),
    (
        "/generate",
        {"input_ids": [1, 2], "return_logprob": True, "token_ids_logprob": [-1, -7]},
        "the chosen id -1 is outside the vocabulary of small-byte-level",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [[-1, -7]]}},
        "the chosen id -7 is outside",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [[2**63]]}},
        "the chosen id 9223372036854775808 is outside",
    ),
    ("/v1/completions", b'{"prompt":[1],"prompt":[2],"prompt_logprobs":1}', "the key 'prompt' occ"),
    ("/generate", b'{"input_ids":[1],"return_logprob":true,"input_ids":[2]}', "the key 'input_ids"),
    (
        "/inference/v1/generate",
        b'{"token_ids":[1],"sampling_params":{"prompt_logprobs":1,"prompt_logprobs":2}}',
        "the key 'prompt_logprobs' occurs twice",
    ),
    ("/v1/completions", b'{"x":' + b"[" * 100000, TOO_DEEP),
    ("/generate", b'{"input_ids":[1],"x":' + b"[" * 100000, TOO_DEEP),
    ("/v1/completions", b'{"prompt":"\xff"}', "can't decode byte 0xff"),
    (
        "/generate",
        {"input_ids": [[1], [2]], "return_logprob": True, "top_logprobs_num": -1},
        "top_logprobs_num: -1 is not in 0",
    ),
    (
        "/generate",
        {
            "input_ids": [[1, 2], [2, 3]],
            "return_logprob": True,
            "token_ids_logprob_positions": [[], [1]],
        },
        "token_ids_logprob_positions: give them with one sequence",
    ),
    ("/v1/completions", {"prompt": [5] * 10**6, "prompt_logprobs": 1}, "far more than the 2047"),
    (
        "/inference/v1/generate",
        {"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [[1], [2]]}},
        "prompt_logprob_token_ids: 2 rows, and 1 tokens after prompt_logprob_start",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_a_bad_request_is_told_what_is_wrong(
    start: Start, path: str, body: Any, words: str
) -> None:
    served = start("byte_level", "digits")
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = served.client.post(served.url + path, content=content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["code"] == 400


KEYS = (
    *("prompt", "prompt_logprobs", "max_tokens", "n", "stream", "temperature", "input_ids"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "token_ids"),
    *("sampling_params", "prompt_logprob_token_ids", "prompt_logprob_start", "prompt_token_ids"),
    *("token_ids_logprob_positions", "max_new_tokens"),
)
small_ids = st.integers(-2, 9)
leaves = st.one_of(st.none(), st.booleans(), small_ids, st.floats(), st.text(max_size=3))
values = st.recursive(
    leaves | st.lists(small_ids, max_size=4) | st.lists(st.lists(small_ids, max_size=3)),
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100)
@given(
    path=st.sampled_from(["/v1/completions", "/generate", "/inference/v1/generate"]),
    body=st.dictionaries(st.sampled_from(KEYS), values),
)
def test_no_request_breaks_it(start: Start, path: str, body: Any) -> None:
    served = start("byte_level", "digits")
    defaults = {"prompt_logprobs": 1, "return_logprob": True, "token_ids": [1], "input_ids": [1, 2]}
    content = json.dumps({**defaults, "sampling_params": {}, **body})
    response = served.client.post(served.url + path, content=content)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]


def test_too_long_sequences_tell_both_counts(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].segment(b" 2014" * 1000)
    response = served.client.post(
        f"{served.url}/v1/completions", json={"prompt": ids, "prompt_logprobs": 1}
    )
    message = response.json()["error"]["message"]
    assert message.startswith(f"the sequence has {len(ids)} tokens, ")
    assert "whose server takes at most 2047: start it with a larger --max-model-len" in message


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_a_temperature_of_the_input_is_never_echoed(start: Start, value: float) -> None:
    """slime takes the echo for a server that has applied it, and stops without."""
    served = start("byte_level", "digits", "sglang")
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    plain = served.post("/generate", **body)
    found = served.post("/generate", **body, input_logprob_temperature=value)
    assert {**found["meta_info"], "id": ""} == {**plain["meta_info"], "id": ""}
    assert "temperature" not in json.dumps(found)


def test_another_temperature_is_noted_once(start: Start) -> None:
    served = start("digits", "byte_level")
    served.notes.clear()
    for temperature in (1.0, 0.7, 0.5):
        served.post("/v1/completions", prompt=[5, 6], prompt_logprobs=1, temperature=temperature)
    assert served.notes == [
        "a request asks for temperature 0.7: log-probabilities of a prompt are always those of "
        "temperature 1"
    ]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "How many steps?"},
    {"role": "assistant", "content": "There are 201 of them."},
    {"role": "user", "content": "And lamps?"},
    {"role": "assistant", "content": "One, and 42 wicks — día."},
]


@pytest.mark.parametrize("end", [None, -1, -3, "asks"])
def test_conversations_are_read_by_the_teachers_template(
    pair: Pair, digits: Tokenizer, tmp_path: Path, end: int | str | None
) -> None:
    """Whole ones, without the end of the last turn, cut off in it, and as prompts."""
    template = tmp_path / "teacher.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    student, teacher = pair.tokenizers
    messages, asks = (CHAT[:3], True) if end == "asks" else (CHAT, False)
    ours = render(student, messages, template="chatml", add_generation_prompt=asks)
    ids = ours.ids.tolist()
    end_of_turn = student.table.roles["turn_end"][0]
    if isinstance(end, int):
        ids = ids[: len(ids) - ids[::-1].index(end_of_turn)][:end]
    theirs = render(teacher, messages, template=template, add_generation_prompt=asks).ids.tolist()
    model = Model(digits)
    both = ("chatml", template)
    with running(model.app) as behind, proxied(pair, behind, templates=both) as url:
        model.asked.clear()
        body = {"prompt": ids, "prompt_logprobs": 5}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        metrics = httpx.get(f"{url}/metrics").text
    rows = answer["choices"][0]["prompt_logprobs"]
    check_rows(ids, rows, 5, len(student.table))
    [asked] = model.asked
    assert 'xtok_sequences_total{chat="true"} 1.0' in metrics
    assert asked == theirs[: len(asked)]
    if not isinstance(end, int):
        assert asked == theirs
    values, told = [math.nan, *own(ids, rows)], [math.nan, *model.own(asked)]
    for n, message in enumerate(messages[: 3 if isinstance(end, int) else None]):
        # Of what a role wrote, with the end of its turn, the sum is the teacher's.
        words = message["content"].encode()
        sums = [
            sum(numbers[a:b])
            for side, of, numbers in ((student, ids, values), (teacher, asked, told))
            for a, b in [span_of(side, of, words)]
        ]
        assert sums[0] == pytest.approx(sums[1], abs=1e-4), n


def span_of(side: Tokenizer, ids: Sequence[int], words: bytes) -> tuple[int, int]:
    """Return the tokens of words, with the control token behind them."""
    tokens = [side.table[i] for i in ids]
    ends = np.cumsum([0, *map(len, tokens)])
    start = b"".join(tokens).index(words)
    first = int(np.searchsorted(ends, start, side="right")) - 1
    last = int(np.searchsorted(ends, start + len(words)))
    assert b"".join(tokens[first:last]) == words
    return first, last + 1


def test_what_is_no_conversation_is_spelled(pair: Pair, digits: Tokenizer, tmp_path: Path) -> None:
    """Other ids, and all with --no-chat."""
    template = tmp_path / "teacher.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    student, teacher = pair.tokenizers
    whole = render(student, CHAT, template="chatml").ids.tolist()
    for chat, ids in ((True, [*whole[3:], *whole]), (False, whole)):
        model = Model(digits)
        both = ("chatml", template)
        with running(model.app) as behind, proxied(pair, behind, chat=chat, templates=both) as url:
            model.asked.clear()
            body = {"prompt": ids, "prompt_logprobs": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        check_rows(ids, answer["choices"][0]["prompt_logprobs"], 1, len(student.table))
        [asked] = model.asked
        ours = b"".join(student.table[i] for i in ids)
        assert b"".join(teacher.table[i] for i in asked) == ours


# The teacher's server


def begin(pair: Pair, model: Model, **options: Any) -> tuple[TeacherServer, list[str]]:
    """Return a teacher that was begun, and the notes."""
    notes: list[str] = []

    async def run(url: str) -> TeacherServer:
        async with aclosing(TeacherServer(url, pair.tokenizers[1])) as teacher:
            await teacher.begin(**{"note": notes.append, **options})
        return teacher

    with running(model.app) as url:
        return asyncio.run(run(url)), notes


def test_a_teacher_that_allows_fewer_candidates(pair: Pair, digits: Tokenizer) -> None:
    teacher, notes = begin(pair, Model(digits, max_logprobs=20))
    assert teacher.candidates == 20
    assert "gives 20 candidates per token: start it with --max-logprobs 64 for more" in notes[0]
    for allowed, options in ((5, {}), (20, {"candidates": 32})):
        with pytest.raises(XtokError, match=f"gives {allowed} candidates") as raised:
            begin(pair, Model(digits, max_logprobs=allowed), **options)
        assert raised.value.hint == "start it with --max-logprobs 64"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("tokenizes", [True, False])
def test_swapped_sides_are_told(
    byte_level: Tokenizer, digits: Tokenizer, kind: Literal["vllm", "sglang"], tokenizes: bool
) -> None:
    """Where the server has the tokenizer of what was given as the student."""
    model = Model(byte_level, kind, tokenizes=tokenizes)
    with pytest.raises(XtokError, match="the sides are swapped: the server at ") as raised:
        begin(xtok.pair(byte_level, digits), model, student=byte_level)
    assert raised.value.message.endswith(
        " has the tokenizer of small-byte-level, and small-digits was given as the teacher"
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("tokenizes", [True, False])
def test_the_wrong_teacher_is_an_error(
    byte_level: Tokenizer, digits: Tokenizer, kind: Literal["vllm", "sglang"], tokenizes: bool
) -> None:
    """With /tokenize, and by the names of tokens in its answers."""
    pair = xtok.pair(byte_level, digits)
    teacher, _ = begin(pair, Model(digits, kind, tokenizes=tokenizes))
    assert (teacher.kind, teacher.candidates, teacher.max_model_len) == (kind, 64, 2048)
    with pytest.raises(XtokError, match="has another tokenizer than small-byte-level") as raised:
        begin(pair.reversed, Model(digits, kind, tokenizes=tokenizes))
    assert raised.value.hint.startswith(
        "give the model that it serves (the-teacher) as the teacher"
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_tokenizer_that_cannot_be_compared_is_noted(
    byte_level: Tokenizer, digits: Tokenizer, kind: Literal["vllm", "sglang"]
) -> None:
    """A server without a tokenizer names no tokens; that is not as good as equal names."""
    pair = xtok.pair(byte_level, digits)
    _, notes = begin(pair, Model(digits, kind, texts=False), student=byte_level)
    assert [note for note in notes if note.startswith("tokenizer not checked: ")]
    _, notes = begin(pair, Model(digits, kind), student=byte_level)
    assert not [note for note in notes if "not checked" in note]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_token_that_the_teacher_calls_impossible_has_a_finite_value(
    pair: Pair, digits: Tokenizer, kind: Literal["vllm", "sglang"]
) -> None:
    """vLLM writes −9999 for −∞, SGLang null: neither is a log-probability."""
    model = Model(digits, kind)
    ids = pair.tokenizers[0].segment(b"The keeper lit 201 lamps.")
    with running(model.app) as behind, proxied(pair, behind) as url:
        before = ask_all(url, ids)
        [theirs] = [asked for asked in model.asked if len(asked) == len(model.asked[-1])][-1:]
        model.impossible = {theirs[5]}
        after = ask_all(url, ids)
    assert len(after) == len(before)
    assert all(-60 < value < 0 for value in after)
    assert after != before
    assert sum(a == b for a, b in zip(after, before, strict=True)) > len(ids) / 2


def ask_all(url: str, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after the first."""
    body = {"prompt": ids, "prompt_logprobs": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    return [row[str(i)]["logprob"] for i, row in zip(ids[1:], rows, strict=True)]


def test_servers_that_are_none(digits: Tokenizer) -> None:
    async def ask(url: str) -> None:
        async with aclosing(TeacherServer(url, digits)) as teacher:
            await teacher.begin()

    with running(Starlette()) as url, pytest.raises(XtokError, match="404 Not Found") as raised:
        asyncio.run(ask(url))
    assert "it answers neither as vLLM nor as SGLang does" in raised.value.message
    with pytest.raises(XtokError, match=r"^the teacher's server at http://127.0.0.1:9: Connect"):
        asyncio.run(ask("http://user:secret@127.0.0.1:9"))
    for wrong in ("ftp://x", "http://", "127.0.0.1:99999", "http://[::1", "http://u:secret@x:y"):
        with pytest.raises(XtokError, match="is not the address of a server") as raised:
            asyncio.run(ask(wrong))
        assert "secret" not in str(raised.value)

    async def unzipped(request: Any) -> Response:
        return Response(b"text", headers={"Content-Encoding": "gzip"})

    app = Starlette(routes=[Route("/v1/models", unzipped)])
    with running(app) as url, pytest.raises(XtokError, match="DecodingError: "):
        asyncio.run(ask(url))


def test_a_server_that_gives_fewer_candidates_than_it_did(pair: Pair, digits: Tokenizer) -> None:
    """As after a restart; it is said once. Before the start, too few are an error."""
    model, notes = Model(digits, "sglang"), list[str]()
    with (
        running(model.app) as behind,
        proxied(pair, behind, notes=notes) as url,
        httpx.Client(timeout=60) as client,
    ):
        model.gives = 20
        for _ in range(2):
            answer = client.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], **ONE})
            assert answer.status_code == 200
        told = f"the server at {behind} gives 20 candidates per token, and was asked for 64"
        assert notes == [told]
    _, notes = begin(pair, model)
    assert notes[0].endswith(" gives 20 candidates per token: let it give 64 for more")
    model.gives = 19
    with pytest.raises(XtokError, match="gives 19 candidates per token, and 64 are needed"):
        begin(pair, model)


ONE = {"prompt_logprobs": 1}


def test_a_server_that_is_still_loading_is_waited_for(
    pair: Pair, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is said again and again that it is."""
    monkeypatch.setattr(teachers, "_TOLD_EVERY", 1.0)
    model = Model(digits)
    model.busy = 2
    _, notes = begin(pair, model, wait=60.0)
    assert len(notes) == 2
    assert notes[0].startswith("waiting for the teacher's server at http://127.0.0.1:")
    assert notes[0].endswith(", for at most 60 s more: 503 Service Unavailable: loading")


def test_a_teacher_that_goes_away_and_comes_back(
    pair: Pair, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "_PAUSES", (0.01, 0.01))
    model = Model(digits)
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1}
    with (
        running(model.app) as behind,
        proxied(pair, behind) as url,
        httpx.Client(timeout=60) as client,
    ):
        right = client.post(f"{url}/v1/completions", json=body).json()["choices"]
        model.status = 500
        response = client.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 502
        words = f"the teacher's server at {behind}: 500 Internal Server Error: out of memory"
        assert response.json()["error"]["message"] == words
        assert client.get(f"{url}/health").status_code == 503
        model.status, before = 503, len(model.asked)
        assert client.post(f"{url}/v1/completions", json=body).status_code == 502
        assert len(model.asked) == before + 3
        # Too busy for one answer: the request is sent again, when the teacher says.
        model.status, model.busy, since = 200, 1, time.monotonic()
        assert client.post(f"{url}/v1/completions", json=body).json()["choices"] == right
        assert time.monotonic() - since >= 1
        assert client.get(f"{url}/health").status_code == 200


def test_a_teacher_that_dies(
    pair: Pair, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "_PAUSES", (0.01,))
    with ExitStack() as stack:
        model = running(Model(digits).app)
        url = stack.enter_context(proxied(pair, model.__enter__()))
        model.__exit__(None, None, None)
        response = httpx.post(
            f"{url}/v1/completions", json={"prompt": [5, 6], "prompt_logprobs": 1}, timeout=60
        )
        assert response.status_code == 502
        assert "Connect" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_teacher_that_comes_back_as_another_is_found_out(
    pair: Pair, digits: Tokenizer, small: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(teachers, "_PAUSES", (0.01,))
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1}
    other = load_tokenizer(str(small / "small-byte-level"))
    with ExitStack() as stack:
        model = running(Model(digits, kind).app)
        behind = model.__enter__()
        url = stack.enter_context(proxied(pair, behind))
        right = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        model.__exit__(None, None, None)
        port = int(behind.rpartition(":")[2])
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 502
        with running(Model(other, kind).app, port):
            for _ in range(2):
                response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                words = "it came back with another tokenizer than small-digits: "
                assert response.status_code == 502
                assert words in response.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 502
        with running(Model(digits, kind).app, port):
            again = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert again.json()["choices"] == right


def test_a_teacher_that_is_away_again_while_it_is_checked(
    pair: Pair, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = teachers.TeacherServer._post

    async def after_a_break(self: Any, *request: Any) -> httpx.Response:
        self._was_away = True
        return await post(self, *request)

    async def away(*_: Any) -> str:
        raise httpx.ConnectError("gone")

    with running(Model(digits).app) as behind, proxied(pair, behind) as url:
        monkeypatch.setattr(teachers.TeacherServer, "_post", after_a_break)
        monkeypatch.setattr(teachers.TeacherServer, "_differs", away)
        body = {"prompt": [5, 6, 7], "prompt_logprobs": 1}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 502
    assert response.json()["error"]["message"].endswith("ConnectError: gone")


OWN = [[None, 5, None], [-1.0, 6, None], [-1.0, 7, None]]
ODD: list[tuple[Any, str]] = [
    ({"choices": [{"prompt_logprobs": [None, None, None]}]}, "it has no candidates for token 1"),
    (
        {"choices": [{"prompt_logprobs": [{str(i): {"logprob": -1}} for i in (5, 6, 7)]}]},
        "position 0: it has a prediction",
    ),
    ({"choices": [{"prompt_logprobs": [None, {str(2**40): {"logprob": -1}}, None]}]}, "token 2"),
    (
        {"choices": [{"prompt_logprobs": [None, *[{str(2**40): {"logprob": -1}}] * 2]}]},
        "1099511627776 is not a token id",
    ),
    (b'{"choices":' + b"[" * 100000, "Expected `object`, got `array`"),
    (b'{"x":' + b"[" * 100000, TOO_DEEP),
    ({"meta_info": {"input_token_logprobs": OWN[:2], "input_top_logprobs": []}}, "of other ids"),
    ({"meta_info": {"input_token_logprobs": OWN, "input_top_logprobs": [None]}}, "1 rows for 3"),
    (
        {
            "meta_info": {
                "input_token_logprobs": [*OWN[:2], [None, 7, None]],
                "input_top_logprobs": [None, [], []],
            }
        },
        "it has no candidates for token 2",
    ),
    (
        b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-1},"6":{"logprob":-2}},{}]}]}',
        "the key '6' occurs twice in one object",
    ),
    (
        {"choices": [{"prompt_logprobs": [None, *[{"6": {"logprob": -1e39}}] * 2]}]},
        "^its answer, position 1: −inf is not a log-probability of a candidate",
    ),
    (
        {
            "meta_info": {
                "input_token_logprobs": OWN,
                "input_top_logprobs": [None, [[-1.0, 6, None], [-2.0, 6, None]], []],
            }
        },
        "a candidate of token 1 occurs twice",
    ),
    (
        {
            "meta_info": {
                "input_token_logprobs": OWN,
                "input_top_logprobs": [None, [[-1.5, 6, None]], []],
            }
        },
        "position 1: the log-probability of its own token, 6, is not the candidate's",
    ),
    (
        b'{"meta_info": {"input_token_logprobs": [[null, 5, null]], "input_token_logprobs": '
        b'[[null, 5, null], [-1, 6, null], [-1, 7, null]], "input_top_logprobs": [null, [], []]}}',
        "the key 'input_token_logprobs' occurs twice in one object",
    ),
    (b"<html>", "/v1/completions answered without log-probabilities of the prompt: "),
    ({"choices": []}, "without log-probabilities of the prompt: no prompt_logprobs"),
    ({"choices": [{"prompt_logprobs": [None]}]}, "of the prompt: 1 rows for 3 ids"),
    (
        {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": 0.5}}, {"7": {"logprob": -1}}]}]},
        "above 1",
    ),
    (
        {"choices": [{"prompt_logprobs": [None, *[{"99999": {"logprob": -1}}] * 2]}]},
        "the id 99999 is outside the vocabulary of small-digits",
    ),
]


@pytest.mark.parametrize(("answer", "words"), ODD)
def test_a_teacher_that_answers_something_else(digits: Tokenizer, answer: Any, words: str) -> None:
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    async def scored(request: Any) -> Response:
        return Response(content)

    async def ask(url: str) -> None:
        async with aclosing(TeacherServer(url, digits)) as teacher:
            teacher.kind, teacher.model = "sglang" if b"meta_info" in content else "vllm", "x"
            with pytest.raises(TeacherError) as raised:
                await teacher.score([5, 6, 7], 1)
            assert words.removeprefix("^") in str(raised.value)
            assert not words.startswith("^") or str(raised.value).startswith(words[1:])
            assert not raised.value.is_request

    routes = ("/v1/completions", "/generate")
    app = Starlette(routes=[Route(path, scored, methods=["POST"]) for path in routes])
    with running(app) as url:
        asyncio.run(ask(url))


@pytest.mark.parametrize(
    "odd",
    [b"", b"[]", b"null", b"<html>", b'{"choices": [{}]}', b'{"choices": [{"prompt_logprobs"'],
)
def test_a_teacher_that_calls_tokens_odd_names(digits: Tokenizer, odd: bytes) -> None:
    """Names are compared without /tokenize; those that are no text tell nothing."""

    async def scored(request: Request) -> Response:
        ids = (await request.json())["prompt"]
        if odd and len(ids) > 8:  # those of the text whose names are compared
            return Response(odd)
        rows = [
            {str(j): {"logprob": -7.0, "decoded_token": j} for j in [i, *range(200, 264)]}
            for i in ids[1:]
        ]
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *rows]}]})

    async def ask(url: str) -> None:
        async with aclosing(TeacherServer(url, digits)) as teacher:
            await teacher.begin()

    with running(Starlette(routes=[Route("/v1/completions", scored, methods=["POST"])])) as url:
        if not odd:
            asyncio.run(ask(url))
            return
        with pytest.raises(XtokError, match=f"^the teacher's server at {url}: ") as raised:
            asyncio.run(ask(url))
    assert raised.value.parameter == "teacher_url"


def test_a_client_that_leaves_frees_its_place(pair: Pair, digits: Tokenizer) -> None:
    model = Model(digits)
    with running(model.app) as behind, proxied(pair, behind, concurrency=1) as url:
        model.delay = 60.0
        body = {"prompt": [[5, 6], [7, 8]], "prompt_logprobs": 1}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
        end = time.monotonic() + 30
        while not model.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert model.cancelled == 1
        model.delay = 0.0
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert response.status_code == 200


def test_64_at_once(digits: Tokenizer, byte_level: Tokenizer) -> None:
    """Answers do not depend on what else waits, and the teacher gets no more than it should."""
    pair, model = xtok.pair(byte_level, digits), Model(digits)
    texts = [f"{TEXT[n:]} {n} times" for n in range(64)]
    rows = [ids.tolist() for ids in byte_level.library_arrays(texts)]
    with running(model.app) as behind, proxied(pair, behind, concurrency=8) as url:

        def ask(ids: list[int]) -> Any:
            body = {"prompt": ids, "prompt_logprobs": 5}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            return answer["choices"][0]["prompt_logprobs"]

        alone = [*map(ask, rows)]
        model.delay = 0.05
        with ThreadPoolExecutor(64) as pool:
            assert [*pool.map(ask, rows)] == alone
        assert model.most == 8
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": rows, "prompt_logprobs": 5}, timeout=60
        ).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == alone
    assert [choice["index"] for choice in answer["choices"]] == [*range(64)]


def test_keys(pair: Pair, digits: Tokenizer) -> None:
    model = Model(digits)
    notes: list[str] = []
    body = {"prompt": [5, 6], "prompt_logprobs": 1}
    with running(model.app) as behind, proxied(pair, behind, api_key="ours", notes=notes) as url:
        for key, status in (
            ("", 401), ("Bearer other", 401), ("Bearer ours", 200), ("bearer ours", 200),
            ("ours", 401), ("Basic ours", 401),
        ):  # fmt: skip
            headers = {"Authorization": key} if key else {}
            response = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            assert response.status_code == status
            assert "ours" not in response.text
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
    assert model.keys == {None}
    assert not any("ours" in note for note in notes)


def test_gzip_and_large_bodies(pair: Pair, digits: Tokenizer) -> None:
    """Answers are packed, though not for clients on this machine; bodies have 64 MB at most."""
    body = {"prompt": [[5, 6] * 50] * 20, "prompt_logprobs": 20}

    async def ask(url: str) -> None:
        async with aclosing(TeacherServer(url, digits)) as teacher:
            await teacher.begin()
            await ask_from_both(
                Proxy(Translator(pair, map_of_pair(pair.reversed, BACK_MAP)), teacher).app()
            )

    async def ask_from_both(app: Any) -> None:
        answers = []
        for host in ("10.0.0.1", "127.0.0.1"):
            transport = httpx.ASGITransport(app, client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200
                expected = "gzip" if host == "10.0.0.1" else None
                assert answer.headers.get("content-encoding") == expected
                answers.append(answer.json()["choices"])
                answer = await client.post("/v1/completions", content=b" " * (65 << 20))
                assert answer.json()["error"]["message"].startswith("the body has more than 64 MB")
        assert answers[0] == answers[1]

    with running(Model(digits).app) as url:
        asyncio.run(ask(url))
