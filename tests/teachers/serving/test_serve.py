"""`xtok serve` on loopback, in front of a small model's server: responses and errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_servers import proxied, running
from served_teachers import Model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import xtok
from xtok.conversation import render
from xtok.errors import XtokError
from xtok.teachers.serving import connection, server
from xtok.teachers.serving import teacher as teachers
from xtok.teachers.serving.connection import Connection, TeacherError
from xtok.teachers.serving.teacher import TeacherServer
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType

# msgspec's message for endless JSON depends on Python's recursion limit
TOO_DEEP = "Input data was truncated" if sys.version_info >= (3, 14) else "maximum recursion depth"

TEXT = "In 2014 there were 201 lamps — día tras día 灯, and the keeper’s 42 steps."
SIDES = [
    ("byte_level", "digits"), ("digits", "byte_level"), ("sentencepiece", "digits"),
    ("byte_level", "sentencepiece"), ("ranks", "byte_level"),
]  # fmt: skip


class Served(NamedTuple):
    """A pair with a running teacher, and `xtok serve` in front of it."""

    pair: Pair
    model: Model
    url: str
    client: httpx.Client
    notes: list[str]

    def post(self, path: str, **body: Any) -> Any:
        """Return the response to a valid request."""
        response = self.client.post(self.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def rows(self, *sequences: Sequence[int], top_k: int = 5) -> list[list[dict[str, Any]]]:
        """Return the rows of sequences from vLLM's route."""
        answer = self.post("/v1/completions", prompt=[*sequences], prompt_logprobs=top_k)
        return [choice["prompt_logprobs"] for choice in answer["choices"]]


def post(url: str, prompt: Any, top_k: int = 1, timeout: float = 60, **options: Any) -> Any:
    """Send a request to vLLM's route."""
    body = {"prompt": prompt, "prompt_logprobs": top_k}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout, **options)


def prompt_rows(response: Any) -> list[list[dict[str, Any]]]:
    return [choice["prompt_logprobs"] for choice in response.json()["choices"]]


def error_message(response: Any, status: int) -> str:
    """Return the error message of a response with this status."""
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


@pytest.fixture
def model(digits: Tokenizer) -> Model:
    return Model(digits)


Kind = Literal["vllm", "sglang"]
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
Start = Callable[..., Served]


@pytest.fixture(scope="module")
def start(tokenizers: dict[str, Tokenizer]) -> Iterator[Start]:
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))

        @cache
        def get(student: str, teacher: str, kind: Kind = "vllm") -> Served:
            pair = xtok.load_pair(tokenizers[student], tokenizers[teacher])
            model, notes = Model(tokenizers[teacher], kind), list[str]()
            teacher_url = stack.enter_context(running(model.app))
            url = stack.enter_context(proxied(pair, teacher_url, notes=notes))
            return Served(pair, model, url, client, notes)

        yield get


def token_logprobs(ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the value of each token after the first; it must be the first in its row."""
    assert rows[0] is None
    logprobs = []
    for i, row in zip(ids[1:], rows[1:], strict=True):
        assert next(iter(row)) == str(i)
        logprobs.append(row[str(i)]["logprob"])
    return logprobs


def check_rows(ids: Sequence[int], rows: Sequence[Any], top_k: int, width: int) -> None:
    """Check the properties that trainers rely on."""
    assert all(math.isfinite(value) and value <= 0 for value in token_logprobs(ids, rows))
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


@KINDS
@pytest.mark.parametrize(("student", "teacher"), SIDES)
def test_sums_of_chunks_equal_the_teachers(
    start: Start, student: str, teacher: str, kind: str
) -> None:
    served = start(student, teacher, kind)
    ours, theirs = served.pair.tokenizers
    ids = ours.encode(TEXT).ids.tolist()
    bos = list(ours.table.roles.get("bos", ())[:1])
    served.model.requested_ids.clear()
    [rows] = served.rows([*bos, *ids])
    check_rows([*bos, *ids], rows, 5, len(ours.table))
    [teacher_ids] = served.model.requested_ids
    assert b"".join(theirs.table[i] for i in teacher_ids) == b"".join(ours.table[i] for i in ids)
    values = [math.nan] * (not bos) + token_logprobs([*bos, *ids], rows)
    teacher_values = [math.nan, *served.model.token_logprobs(teacher_ids)]
    num_bos = 1 if theirs.table.lengths[teacher_ids[0]] == 0 else 0
    seen = 0
    for chunk in xtok.TokenAligner(served.pair).pairs(ids, teacher_ids[num_bos:]):
        (a, b), (c, d) = chunk.student_tokens, chunk.teacher_tokens
        if a or bos:
            expected = sum(teacher_values[num_bos + c : num_bos + d])
            assert sum(values[a:b]) == pytest.approx(expected, abs=1e-5)
        seen += b - a
    assert seen == len(ids)


@KINDS
def test_equal_tokenizers_get_the_teachers_own_answer(start: Start, kind: str) -> None:
    served = start("digits", "digits", kind)
    tokenizer = served.pair.tokenizers[0]
    unused = np.flatnonzero(tokenizer.table.types == TokenType.UNUSED).tolist()
    ids = [*tokenizer.encode(TEXT).ids.tolist(), unused[0], 5]
    [rows] = served.rows(ids, top_k=7)
    assert served.model.requested_ids[-1] == ids
    for i, row, values in zip(ids[1:], rows[1:], served.model.logprobs(ids), strict=True):
        best = values.topk(7)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        row_values = {str(i): float(values[i]), **{str(j): value for j, value in pairs}}
        assert {j: entry["logprob"] for j, entry in row.items()} == row_values
        if kind == "vllm":
            assert row[str(i)]["rank"] == int((values >= values[i]).sum())


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize(("student", "teacher"), SIDES[:3])
def test_requests_with_any_ids_get_a_response(
    start: Start, student: str, teacher: str, data: Any
) -> None:
    """The ids include broken characters, control tokens and unused ids."""
    served = start(student, teacher)
    width = len(served.pair.tokenizers[0].table)
    ids = st.lists(st.integers(0, width - 1), min_size=1, max_size=12)
    batch = data.draw(st.lists(ids, min_size=1, max_size=4))
    top_k = data.draw(st.sampled_from([0, 1, 5, 64]))
    for sequence, rows in zip(batch, served.rows(*batch, top_k=top_k), strict=True):
        check_rows(sequence, rows, top_k, width)


@pytest.mark.parametrize("top_k", [255, 256, 257, 300])
def test_more_candidates_than_the_student_has_ids(digits: Tokenizer, top_k: int) -> None:
    pair, ids = xtok.load_pair(xtok.load_tokenizer("bytes"), digits), [*b"In 2014"]
    with (
        running(Model(digits, max_logprobs=300).app) as teacher_url,
        proxied(pair, teacher_url) as url,
    ):
        [rows] = prompt_rows(post(url, ids, top_k))
        body = {"input_ids": ids, "top_logprobs_num": top_k, "logprob_start_len": 0, **LOGPROBS}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    if top_k == 255:
        check_rows(ids, rows, top_k, 256)
    for row, best in zip(rows[1:], answer["meta_info"]["input_top_logprobs"][1:], strict=True):
        for candidates in (sorted(map(int, row)), sorted(i for _, i, _ in best)):
            assert len({*candidates}) == len(candidates)
            assert {*candidates} <= {*range(256)}
            assert len(candidates) in {min(top_k, 256), min(top_k + 1, 256)}


def test_sglangs_route_returns_the_values_of_vllms_route(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    [rows] = served.rows(ids, top_k=3)
    ask: dict[str, Any] = {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    answer = served.post("/generate", input_ids=ids, logprob_start_len=0, **ask)
    info = answer["meta_info"]
    assert info["prompt_tokens"] == len(ids)
    assert "input_top_logprobs" not in info
    scored = info["input_token_logprobs"]
    assert scored[0] == [None, ids[0], None]
    assert [entry[1] for entry in scored] == ids
    assert [entry[0] for entry in scored[1:]] == token_logprobs(ids, rows)
    # A batch with a start position, best candidates and chosen ids
    [more, last] = served.post(
        "/generate", input_ids=[ids, ids[:6]], logprob_start_len=4, top_logprobs_num=3,
        token_ids_logprob=[ids[5], 7], **ask,
    )  # fmt: skip
    meta = more["meta_info"]
    assert meta["input_token_logprobs"] == [[None, ids[4], None], *scored[5:]]
    begin, [value, *about_last] = last["meta_info"]["input_token_logprobs"]
    assert (begin, about_last) == ([None, ids[4], None], scored[5][1:])
    assert value == pytest.approx(scored[5][0], abs=1e-4)  # computed for a shorter sequence
    assert meta["input_top_logprobs"][0] is None
    for row, top in zip(rows[5:], meta["input_top_logprobs"][1:], strict=True):
        best = sorted(row.items(), key=lambda item: item[1]["rank"])[:3]
        assert [int(i) for i, _ in best] == [i for _, i, _ in top]
        assert [e["logprob"] for _, e in best] == pytest.approx([v for v, _, _ in top], abs=1e-2)
    first = meta["input_token_ids_logprobs"][1]
    assert [entry[1] for entry in first] == [ids[5], 7]
    assert first[0][0] == scored[5][0]
    assert all(math.isfinite(value) and value < 0 for value, _, _ in first)
    # SGLang's default start, −1, scores only the last token
    last = served.post("/generate", input_ids=ids, **ask)["meta_info"]["input_token_logprobs"]
    assert last == [[None, ids[-1], None]]
    each = [[], *([i, 3] for i in ids[1:])]
    positions = served.post(
        "/generate", input_ids=ids, logprob_start_len=0, token_ids_logprob_positions=each, **ask
    )["meta_info"]["input_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in positions[1:]] == each[1:]
    assert [row[0][0] for row in positions[1:]] == token_logprobs(ids, rows)


def test_vllms_other_routes(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    [rows] = served.rows(ids, top_k=1)
    demo = served.post("/generate", prompt={"prompt_token_ids": ids}, prompt_logprobs=1)
    plain = [row and {i: entry["logprob"] for i, entry in row.items()} for row in rows]
    assert demo["prompt_logprobs"] == plain
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    answer = served.post(
        "/inference/v1/generate", model="the-teacher", token_ids=ids,
        sampling_params={**sampling, "max_tokens": 1},
    )  # fmt: skip
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
    assert matrix[:, 0].astype(float).tolist() == token_logprobs(ids, rows)[start_of - 1 :]
    assert np.isfinite(matrix[:, 1]).all()
    assert np.isneginf(matrix[:, 2]).all()
    sampling["prompt_logprob_token_ids"][:2] = [[], []]  # rows without ids are counted
    answer = served.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    some = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert np.isneginf(some[:2]).all()
    assert some[2:].tolist() == matrix[2:].tolist()


def test_models_and_metrics(start: Start) -> None:
    served = start("byte_level", "digits")
    student, _ = served.pair.tokenizers
    [card] = served.client.get(f"{served.url}/v1/models").json()["data"]
    assert (card["id"], card["root"]) == (student.vocabulary.model_id, "the-teacher")
    assert 1000 < card["max_model_len"] < 2048
    served.rows(student.encode(TEXT).ids.tolist())
    served.client.post(f"{served.url}/v1/completions", json={})
    metrics = served.client.get(f"{served.url}/metrics").text
    assert 'xtok_requests_total{route="/v1/completions",status="400"}' in metrics
    assert 'xtok_tokens_total{side="teacher"}' in metrics
    assert "xtok_teacher_seconds_sum" in metrics
    assert "xtok_own_seconds_sum" in metrics
    [rest] = [line for line in metrics.splitlines() if line.startswith("xtok_rest_sum")]
    assert float(rest.split()[1]) > 0


ONE: dict[str, Any] = {"prompt_logprobs": 1}
LOGPROBS: dict[str, Any] = {"return_logprob": True}


def chosen(*ids: list[int]) -> dict[str, Any]:
    return {"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [*ids]}}


BAD: dict[str, list[tuple[Any, str]]] = {
    "/v1/completions": [
        (b"{", "Input data was truncated"),
        (ONE, "prompt: expected a list of token ids"),
        ({"prompt": "text", **ONE}, "prompt: expected a list of token ids"),
        ({"prompt": [1, [2]], **ONE}, "prompt: expected ids or lists of ids"),
        ({"prompt": [[1, "a"]], **ONE}, "prompt[0][1]: Expect"),
        ({"prompt": [1]}, "prompt_logprobs: expected a number"),
        ({"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs: -1 is not in 0"),
        ({"prompt": [1], **ONE, "stream": True}, "stream: "),
        ({"prompt": [1], **ONE, "max_tokens": 9}, "max_tokens: 9"),
        ({"prompt": [1], **ONE, "best_of": 2}, "best_of: 2, but this server does not generate"),
        ({"prompt": [1], **ONE, "truncate_prompt_tokens": 4}, "truncate_prompt_tokens: 4, but "),
        ({"prompt": [1], **ONE, "prompt_embeds": "AAAA"}, 'prompt_embeds: "AAAA", but this serv'),
        ({"prompt": [[1], []], **ONE}, "the sequence is empty"),
        ({"prompt": [99999], **ONE}, "the id 99999 is outside the"),
        ({"prompt": [-1], **ONE}, "the id -1 is outside the"),
        ({"prompt": [1], "prompt_logprobs": 65}, "max allowed: 64"),
        (b'{"prompt":[1],"prompt":[2],"prompt_logprobs":1}', "the key 'prompt' occ"),
        (b'{"x":' + b"[" * 100000, TOO_DEEP),
        (b'{"prompt":"\xff"}', "can't decode byte 0xff"),
        ({"prompt": [5] * 10**6, **ONE}, "accepts at most 2047"),
    ],
    "/generate": [
        ({"input_ids": [1]}, "return_logprob: "),
        (LOGPROBS, "input_ids: expected a list of token ids"),
        ({"input_ids": [1], **LOGPROBS, "logprob_start_len": 1}, "logprob_s"),
        ({"input_ids": [1], "return_logprob": [True, True]}, "return_logprob: Expected"),
        ({"input_ids": [1], **LOGPROBS, "sampling_params": {"max_new_tokens": 2, "n": 1}},
         "sampling_params.max_new_tokens: 2, but this server does not generate"),
        ({"input_ids": [1], **LOGPROBS, "lora_path": "x"}, "lora_path: "),
        ({"input_ids": [1, 2], **LOGPROBS, "token_ids_logprob": [5, 99999]},
         "the chosen id 99999 is outside the vocabulary of small-byte-level"),
        ({"input_ids": [1, 2], **LOGPROBS, "token_ids_logprob": [-1, -7]},
         "the chosen id -1 is outside the vocabulary of small-byte-level"),
        (b'{"input_ids":[1],"return_logprob":true,"input_ids":[2]}', "the key 'input_ids"),
        (b'{"input_ids":[1],"x":' + b"[" * 100000, TOO_DEEP),
        ({"input_ids": [[1], [2]], **LOGPROBS, "top_logprobs_num": -1},
         "top_logprobs_num: -1 is not in 0"),
        ({"input_ids": [[1, 2], [2, 3]], **LOGPROBS, "token_ids_logprob_positions": [[], [1]]},
         "token_ids_logprob_positions: supported only with one sequence"),
    ],
    "/inference/v1/generate": [
        ({"token_ids": [1]}, "Object missing required field `sampling_par"),
        ({"token_ids": [1], "sampling_params": {**ONE, "truncate_prompt_tokens": 3}},
         "sampling_params.truncate_prompt_tokens: 3, but this server scores whole sequences"),
        (chosen([-1, -7]), "the chosen id -7 is outside"),
        (chosen([2**63]), "the chosen id 9223372036854775808 is outside"),
        (b'{"token_ids":[1],"sampling_params":{"prompt_logprobs":1,"prompt_logprobs":2}}',
         "the key 'prompt_logprobs' occurs twice"),
        (chosen([1], [2]),
         "prompt_logprob_token_ids: 2 rows, expected 1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "words"), [(path, *one) for path in BAD for one in BAD[path]]
)
def test_a_bad_request_is_refused(start: Start, path: str, body: Any, words: str) -> None:
    served = start("byte_level", "digits")
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = served.client.post(served.url + path, content=content)
    assert words in error_message(response, 400)
    assert response.json()["error"]["code"] == 400


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
@given(path=st.sampled_from([*BAD]), body=st.dictionaries(st.sampled_from(KEYS), values))
def test_random_requests_get_an_answer_or_an_error(start: Start, path: str, body: Any) -> None:
    served = start("byte_level", "digits")
    defaults = {**ONE, **LOGPROBS, "token_ids": [1], "input_ids": [1, 2], "sampling_params": {}}
    response = served.client.post(served.url + path, content=json.dumps({**defaults, **body}))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert error_message(response, 400)


def test_the_error_of_a_long_sequence_has_both_counts(start: Start) -> None:
    served = start("byte_level", "digits")
    ids = served.pair.tokenizers[0].segment(b" 2014" * 1000)
    message = error_message(post(served.url, ids), 400)
    assert message.startswith(f"the sequence has {len(ids)} student tokens (")
    assert (
        "server accepts at most 2047 teacher tokens: send shorter sequences, or start the server"
        in message
    )


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_a_temperature_of_the_input_is_never_echoed(start: Start, value: float) -> None:
    """slime expects the echo only from servers that apply the temperature."""
    served = start("byte_level", "digits", "sglang")
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    plain = served.post("/generate", **body)
    with_temperature = served.post("/generate", **body, input_logprob_temperature=value)
    assert {**with_temperature["meta_info"], "id": ""} == {**plain["meta_info"], "id": ""}
    assert "temperature" not in json.dumps(with_temperature)


def test_fields_that_are_not_used_are_named_once(start: Start) -> None:
    """This includes nested fields; empty fields cause no note."""
    served = start("digits", "byte_level")
    served.notes.clear()
    plain: dict[str, Any] = {"prompt": [5, 6], "prompt_logprobs": 1, "max_tokens": 1, "n": 1}
    odd = {"echo": True, "logit_bias": {"5": 1}, "user": None, "stream": False, "best_of": 1}
    for _ in range(2):
        served.post("/v1/completions", **plain, **odd)
    sampling = {"prompt_logprobs": 1, "seed": 7}
    served.post("/inference/v1/generate", token_ids=[5], sampling_params=sampling)
    assert served.notes == [
        f"the field {name} of a request is ignored"
        for name in ("echo", "logit_bias", "sampling_params.seed")
    ]
    for name in ("small-digits", "org/small-digits", "small-byte-level", "the-teacher", ""):
        served.post("/v1/completions", **plain, model=name)
    served.post("/v1/completions", **plain, **{f"invented-{n}": 1 for n in range(200)})
    assert len(served.notes) == server.MAX_NOTES
    response = served.client.post(f"{served.url}/v1/completions", json={**plain, "model": "gpt"})
    assert "gpt" in error_message(response, 404)


def test_another_temperature_is_noted_once(start: Start) -> None:
    served = start("digits", "sentencepiece")
    served.notes.clear()
    for temperature in (1.0, 0.7, 0.5):
        served.post("/v1/completions", prompt=[5, 6], prompt_logprobs=1, temperature=temperature)
    assert served.notes == [
        "a request sets temperature 0.7, which has no effect: log-probabilities of a prompt are "
        "always at temperature 1"
    ]


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
    pair: Pair, model: Model, template: Path, end: int | str | None
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
    with running(model.app) as teacher_url, proxied(pair, teacher_url, templates=both) as url:
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
    pair: Pair, model: Model, template: Path, before: list[dict[str, str]], kind: str
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
    with running(model.app) as teacher_url, proxied(pair, teacher_url, templates=both) as url:
        body = {"prompt": ids, "prompt_logprobs": 5}
        model.requested_ids.clear()
        answers = [
            httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=60)
            for more in ({"teacher_system": SYSTEM}, {"teacher_system": ""}, {})
        ]
    [rows], [usual], [without] = map(prompt_rows, answers)
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
def test_equal_tokenizers_with_a_system_text(start: Start, kind: str) -> None:
    served = start("byte_level", "byte_level", kind)
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
    model: Model, digits: Tokenizer
) -> None:
    """The response contains the student's ids, not the teacher's."""
    one, two = (
        render(digits, [{"role": "system", "content": n}, *CHAT], template="chatml").ids.tolist()
        for n in "12"
    )
    assert len(one) == len(two)
    pair, both = xtok.load_pair(digits, digits), ("chatml", "chatml")
    with running(model.app) as teacher_url, proxied(pair, teacher_url, templates=both) as url:
        body = {"prompt": one, "prompt_logprobs": 5, "teacher_system": "2"}
        [rows] = prompt_rows(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    assert model.requested_ids[-1] == two
    check_rows(one, rows, 5, len(digits.table))


def test_equal_tokenizers_with_different_templates(
    model: Model, digits: Tokenizer, template: Path
) -> None:
    """The teacher reads conversations in its own template, and other ids unchanged."""
    student, teacher = (
        render(digits, CHAT, template=each).ids.tolist() for each in ("chatml", template)
    )
    text, both = digits.encode(TEXT).ids.tolist(), ("chatml", template)
    pair = xtok.load_pair(digits, digits)
    with running(model.app) as teacher_url, proxied(pair, teacher_url, templates=both) as url:
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
        model = Model(digits)
        with (
            running(model.app) as teacher_url,
            proxied(pair, teacher_url, chat=chat, templates=both) as url,
        ):
            model.requested_ids.clear()
            [rows] = prompt_rows(post(url, ids))
        check_rows(ids, rows, 1, len(student.table))
        [teacher_ids] = model.requested_ids
        ours = b"".join(student.table[i] for i in ids)
        assert b"".join(teacher.table[i] for i in teacher_ids) == ours


# The teacher's server


def begun(url: str, tokenizer: Tokenizer, **options: Any) -> tuple[TeacherServer, list[str]]:
    """Connect to a teacher and disconnect; return it and its notes."""
    notes: list[str] = []

    async def run() -> TeacherServer:
        async with aclosing(TeacherServer(url, tokenizer)) as teacher:
            await teacher.connect(note=notes.append, **options)
        return teacher

    return asyncio.run(run()), notes


def begin(pair: Pair, model: Model, **options: Any) -> tuple[TeacherServer, list[str]]:
    with running(model.app) as url:
        return begun(url, pair.tokenizers[1], **options)


def test_a_teacher_that_allows_fewer_candidates(pair: Pair, digits: Tokenizer) -> None:
    teacher, notes = begin(pair, Model(digits, max_logprobs=20))
    assert teacher.candidates == 20
    assert notes[0].endswith(
        ": it returns at most 20 candidates per token, expected 64: start it with --max-logprobs 64"
    )
    for allowed, options in ((5, {}), (20, {"candidates": 32})):
        with pytest.raises(XtokError, match=f"at most {allowed} candidates") as raised:
            begin(pair, Model(digits, max_logprobs=allowed), **options)
        assert "--max-logprobs 64" in raised.value.hint


@KINDS
@pytest.mark.parametrize("tokenizes", [True, False])
def test_swapped_sides_are_an_error(
    byte_level: Tokenizer, pair: Pair, kind: Kind, tokenizes: bool
) -> None:
    model = Model(byte_level, kind, tokenizes=tokenizes)
    with pytest.raises(XtokError, match=r"swapped: .* small-byte-level, .*small-digits"):
        begin(pair, model, student=byte_level)


@KINDS
@pytest.mark.parametrize("tokenizes", [True, False])
def test_the_wrong_teacher_is_an_error(
    pair: Pair, digits: Tokenizer, kind: Kind, tokenizes: bool
) -> None:
    """The server may or may not have the route /tokenize."""
    teacher, _ = begin(pair, Model(digits, kind, tokenizes=tokenizes))
    assert (teacher.kind, teacher.candidates, teacher.max_model_len) == (kind, 64, 2048)
    with pytest.raises(XtokError, match="tokenizer than small-byte-level") as raised:
        begin(pair.reversed, Model(digits, kind, tokenizes=tokenizes))
    assert "name the-teacher as the teacher" in raised.value.hint


@KINDS
@pytest.mark.parametrize("texts", [True, False])
def test_a_tokenizer_that_cannot_be_compared_is_noted(
    pair: Pair, digits: Tokenizer, kind: Kind, texts: bool
) -> None:
    _, notes = begin(pair, Model(digits, kind, texts=texts), student=pair.tokenizers[0])
    assert any(": its tokenizer was not checked, " in note for note in notes) is not texts
    assert any("not checked" in note for note in notes) is not texts


@KINDS
def test_a_token_that_the_teacher_calls_impossible_has_a_finite_value(
    pair: Pair, digits: Tokenizer, kind: Kind
) -> None:
    """vLLM writes −9999 for −∞, SGLang null."""
    model = Model(digits, kind)
    ids = pair.tokenizers[0].segment(b"The keeper lit 201 lamps.")
    with running(model.app) as teacher_url, proxied(pair, teacher_url) as url:
        before = token_logprobs(ids, prompt_rows(post(url, ids))[0])
        model.impossible = {model.requested_ids[-1][5]}
        after = token_logprobs(ids, prompt_rows(post(url, ids))[0])
    assert len(after) == len(before)
    assert all(-60 < value < 0 for value in after)
    assert after != before
    assert sum(a == b for a, b in zip(after, before, strict=True)) > len(ids) / 2


def test_errors_for_addresses_without_a_teacher(digits: Tokenizer) -> None:
    with running(Starlette()) as url, pytest.raises(XtokError, match="404 Not Found") as raised:
        begun(url, digits)
    assert "neither like vLLM nor like SGLang" in raised.value.message
    with pytest.raises(XtokError, match=r"127\.0\.0\.1:9: Connect"):
        begun("http://user:secret@127.0.0.1:9", digits)
    for wrong in ("ftp://x", "http://", "127.0.0.1:99999", "http://[::1", "http://u:secret@x:y"):
        with pytest.raises(XtokError, match="not the address") as raised:
            begun(wrong, digits)
        assert "secret" not in str(raised.value)

    zipped = Response(b"text", headers={"Content-Encoding": "gzip"})
    app = Starlette(routes=[Route("/v1/models", zipped)])
    with running(app) as url, pytest.raises(XtokError, match="DecodingError: "):
        begun(url, digits)


def test_fewer_candidates_after_a_restart_are_noted(pair: Pair, digits: Tokenizer) -> None:
    """A restart causes one note; at startup, it is an error."""
    model, notes = Model(digits, "sglang"), list[str]()
    with running(model.app) as teacher_url, proxied(pair, teacher_url, notes=notes) as url:
        model.gives = 20
        for _ in range(2):
            assert post(url, [5, 6, 7]).status_code == 200
        note = f"the teacher's server at {teacher_url}: it returns 20 candidates per token, "
        note += "although 64 were requested"
        assert notes == [note]
    _, notes = begin(pair, model)
    assert " at most 20 candidates per token, expected 64: raise the limit" in notes[0]
    model.gives = 19
    with pytest.raises(XtokError, match="at most 19 candidates"):
        begin(pair, model)


def test_a_server_that_is_still_loading_is_waited_for(
    pair: Pair, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "NOTE_INTERVAL", 1.0)
    model.busy = 2
    _, notes = begin(pair, model, wait=60.0)
    assert len(notes) == 2
    assert notes[0].startswith("waiting for the teacher's server at http://127.0.0.1:")
    assert notes[0].endswith(", for at most 60 s more: 503 Service Unavailable: loading")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAUSES", (0.01, 0.01))


@pytest.mark.usefixtures("short_pauses")
def test_the_server_recovers_if_the_teacher_returns(pair: Pair, model: Model) -> None:
    ids = [5, 6, 7]
    with running(model.app) as teacher_url, proxied(pair, teacher_url) as url:
        right = prompt_rows(post(url, ids))
        model.status = 500
        words = f"the teacher's server at {teacher_url}: 500 Internal Server Error: out of memory"
        assert error_message(post(url, ids), 502) == words
        assert httpx.get(f"{url}/health").status_code == 503
        model.status, before = 503, len(model.requested_ids)
        error_message(post(url, ids), 502)
        assert len(model.requested_ids) == before + 3
        # the server is busy once, and the request is repeated after Retry-After
        model.status, model.busy, since = 200, 1, time.monotonic()
        assert prompt_rows(post(url, ids)) == right
        assert time.monotonic() - since >= 1
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.usefixtures("short_pauses")
@KINDS
def test_a_teacher_that_returns_with_another_tokenizer_is_an_error(
    pair: Pair, digits: Tokenizer, byte_level: Tokenizer, kind: Kind
) -> None:
    ids, notes = [5, 6, 7], list[str]()
    with ExitStack() as stack:
        model = running(Model(digits, kind).app)
        teacher_url = model.__enter__()
        url = stack.enter_context(proxied(pair, teacher_url, notes=notes))
        right = prompt_rows(post(url, ids))
        model.__exit__(None, None, None)
        assert "Connect" in error_message(post(url, ids), 502)
        assert httpx.get(f"{url}/health").status_code == 503
        [away] = notes
        assert away.startswith(
            f"the teacher's server at {teacher_url} does not respond: ConnectError"
        )
        port = int(teacher_url.rpartition(":")[2])
        with running(Model(byte_level, kind).app, port):
            for _ in range(2):
                words = "it returned with a different tokenizer than small-digits: "
                assert words in error_message(post(url, ids), 502)
        back = f"the teacher's server at {teacher_url} responds again"
        assert notes == [away, back]
        error_message(post(url, ids), 502)
        with running(Model(digits, kind).app, port):
            assert prompt_rows(post(url, ids)) == right
    assert notes == [away, back, away, back]


@KINDS
@pytest.mark.parametrize("by", ["a new connection", "the clock"])
def test_a_teacher_replaced_between_two_requests_is_an_error(
    pair: Pair, digits: Tokenizer, byte_level: Tokenizer, kind: Kind, by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No request fails; behind a load balancer, no new connection is needed either."""
    ids, model = [5, 6, 7], Model(digits, kind)
    port = 0
    with ExitStack() as stack:
        first = running(model.app)
        teacher_url = first.__enter__()
        port = int(teacher_url.rpartition(":")[2])
        url = stack.enter_context(proxied(pair, teacher_url))
        right = prompt_rows(post(url, ids))
        first.__exit__(None, None, None)
        if by == "the clock":
            monkeypatch.setattr(teachers, "CHECK_INTERVAL", 0.0)
            monkeypatch.setattr(Connection, "count_connection", lambda *_: asyncio.sleep(0))
        with running(Model(byte_level, kind).app, port):
            for _ in range(2):
                assert "it returned with a different tokenizer" in error_message(
                    post(url, ids), 502
                )
        with running(Model(digits, kind).app, port):
            assert prompt_rows(post(url, ids)) == right


def test_an_answer_without_end_is_refused(pair: Pair, model: Model) -> None:
    """The memory for a response is limited."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    with running(model.app) as teacher_url, proxied(pair, teacher_url) as url:
        monkey: Any = model
        monkey.scored_rows = lambda *_: asyncio.sleep(0, StreamingResponse(long()))
        assert "/v1/completions returned more than 1 MiB" in error_message(
            post(url, [5, 6, 7]), 502
        )


def test_a_teacher_that_disappears_during_its_check(
    pair: Pair, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        with running(model.app) as teacher_url:
            url = stack.enter_context(proxied(pair, teacher_url))
            monkeypatch.setattr(teachers, "CHECK_INTERVAL", 0.0)
        assert "ConnectError: " in error_message(post(url, [5, 6, 7]), 502)


OWN = [[None, 5, None], [-1.0, 6, None], [-1.0, 7, None]]


def vllm(*rows: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [*rows]}]}


def sglang(own: Any, *top: Any) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [*top]}}


def entry(token: int, logprob: float = -1) -> dict[str, Any]:
    return {str(token): {"logprob": logprob}}


NO_ROWS = "log-probabilities of the prompt: "
ODD: list[tuple[Any, str]] = [
    (vllm(None, None, None), "token 1 has no candidates"),
    (vllm(entry(5), entry(6), entry(7)), "position 0: the first token has a prediction"),
    (vllm(None, entry(2**40), None), "token 2"),
    (vllm(None, *[entry(2**40)] * 2), "candidates contains 1099511627776, expected"),
    (b'{"choices":' + b"[" * 100000, "Expected `object`, got `array`"),
    (b'{"x":' + b"[" * 100000, TOO_DEEP),
    (sglang(OWN[:2]), "contains other ids"),
    (sglang(OWN, None), "1 rows for 3"),
    (sglang([*OWN[:2], [None, 7, None]], None, [], []), "token 1 has no candidates"),
    (
        b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-1},"6":{"logprob":-2}},{}]}]}',
        "the key '6' occurs twice in one object",
    ),
    (
        sglang(OWN, None, [[-1.0, 6, None], [-2.0, 6, None]], [[-1.0, 7, None]]),
        "position 1: the candidate 6 occurs twice",
    ),
    (
        sglang(OWN, None, [[-1.5, 6, None]], [[-1.0, 7, None]]),
        "position 1: the realized token 6 is not a candidate, or the candidate has a different ",
    ),
    (
        b'{"meta_info": {"input_token_logprobs": [[null, 5, null]], "input_token_logprobs": '
        b'[[null, 5, null], [-1, 6, null], [-1, 7, null]], "input_top_logprobs": [null, [], []]}}',
        "the key 'input_token_logprobs' occurs twice in one object",
    ),
    (b"<html>", f"/v1/completions returned no {NO_ROWS}"),
    ({"choices": []}, f"returned no {NO_ROWS}Expected `array` of length >= 1"),
    (vllm(None), "its response: 3 prompt_token_ids for 1 rows"),
    (vllm(None, entry(6, 0.5), entry(7)), "expected a number of at most 0"),
    (
        vllm(None, *[entry(99999)] * 2),
        "the id 99999 is outside the vocabulary of small-digits",
    ),
]


@pytest.mark.parametrize(("answer", "words"), ODD)
def test_unusable_answers_of_the_teacher_are_errors(
    digits: Tokenizer, answer: Any, words: str
) -> None:
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    async def ask(url: str) -> None:
        async with aclosing(TeacherServer(url, digits)) as teacher:
            teacher.kind, teacher.model = "sglang" if b"meta_info" in content else "vllm", "x"
            with pytest.raises(TeacherError) as raised:
                await teacher.score([5, 6, 7], 1)
            assert words.removeprefix("^") in str(raised.value)
            assert not words.startswith("^") or str(raised.value).startswith(words[1:])
            assert not raised.value.is_request

    with running(Response(content)) as url:
        asyncio.run(ask(url))


@pytest.mark.parametrize(
    "odd",
    [b"", b"[]", b"null", b"<html>", b'{"choices": [{}]}', b'{"choices": [{"prompt_logprobs"'],
)
def test_texts_of_tokens_with_other_types(digits: Tokenizer, odd: bytes) -> None:

    async def scored(request: Request) -> Response:
        ids = (await request.json())["prompt"]
        if odd and len(ids) > 8:  # the request that compares tokenizers
            return Response(odd)
        rows = [
            {str(j): {"logprob": -7.0, "decoded_token": j} for j in [i, *range(200, 264)]}
            for i in ids[1:]
        ]
        return JSONResponse(vllm(None, *rows))

    with running(Starlette(routes=[Route("/v1/completions", scored, methods=["POST"])])) as url:
        if not odd:
            begun(url, digits)
            return
        with pytest.raises(XtokError, match=f"{url}: ") as raised:
            begun(url, digits)
    assert raised.value.parameter == "teacher_url"


def test_a_request_of_a_closed_connection_is_cancelled(pair: Pair, model: Model) -> None:
    with running(model.app) as teacher_url, proxied(pair, teacher_url, concurrency=1) as url:
        model.delay = 60.0
        with pytest.raises(httpx.ReadTimeout):
            post(url, [[5, 6], [7, 8]], timeout=0.3)
        end = time.monotonic() + 30
        while not model.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert model.cancelled == 1
        model.delay = 0.0
        assert post(url, [[5, 6], [7, 8]], timeout=30).status_code == 200


def test_many_at_once(pair: Pair, model: Model, byte_level: Tokenizer) -> None:
    """Responses do not depend on other requests; the concurrency is limited."""
    texts = [f"{TEXT[n:]} {n} times" for n in range(24)]
    rows = [ids.tolist() for ids in byte_level.library_arrays(texts)]
    with running(model.app) as teacher_url, proxied(pair, teacher_url, concurrency=8) as url:

        def ask(ids: list[int]) -> Any:
            return prompt_rows(post(url, ids, 5))[0]

        single = [*map(ask, rows)]
        model.delay = 0.05
        with ThreadPoolExecutor(len(rows)) as pool:
            assert [*pool.map(ask, rows)] == single
        assert model.most == 8
        answer = post(url, rows, 5)
    assert prompt_rows(answer) == single
    assert [choice["index"] for choice in answer.json()["choices"]] == [*range(24)]


def test_only_requests_with_the_key_are_accepted(pair: Pair, model: Model) -> None:
    notes: list[str] = []
    with (
        running(model.app) as teacher_url,
        proxied(pair, teacher_url, api_key="ours", notes=notes) as url,
    ):
        for key, status in (
            ("", 401), ("Bearer other", 401), ("Bearer ours", 200), ("bearer ours", 200),
            ("ours", 401), ("Basic ours", 401),
        ):  # fmt: skip
            response = post(url, [5, 6], headers={"Authorization": key} if key else {})
            assert response.status_code == status
            assert "ours" not in response.text
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
    assert model.keys == {None}
    assert not any("ours" in note for note in notes)


def test_large_bodies_are_refused(pair: Pair, model: Model) -> None:
    with running(model.app) as teacher_url, proxied(pair, teacher_url) as url:
        response = httpx.post(f"{url}/v1/completions", content=b" " * (65 << 20), timeout=60)
    assert error_message(response, 400).startswith("the body has more than 64 MB")
