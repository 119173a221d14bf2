"""Requests to `xtok serve`: invalid ones, ignored fields, keys, limits, and many at once."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_servers import (
    TEXT,
    TOO_DEEP,
    ServePair,
    error_message,
    post,
    prompt_rows,
    running,
    serving,
)
from served_teachers import TeacherServer

from xtok.teachers.serving import server
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


@pytest.fixture
def model(digits: Tokenizer) -> TeacherServer:
    return TeacherServer(digits)


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
def test_a_bad_request_is_refused(serve_pair: ServePair, path: str, body: Any, words: str) -> None:
    served = serve_pair("byte_level", "digits")
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
def test_random_requests_get_a_response_or_an_error(
    serve_pair: ServePair, path: str, body: Any
) -> None:
    served = serve_pair("byte_level", "digits")
    defaults = {**ONE, **LOGPROBS, "token_ids": [1], "input_ids": [1, 2], "sampling_params": {}}
    response = served.client.post(served.url + path, content=json.dumps({**defaults, **body}))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert error_message(response, 400)


def test_the_error_of_a_long_sequence_has_both_counts(serve_pair: ServePair) -> None:
    served = serve_pair("byte_level", "digits")
    ids = served.pair.tokenizers[0].segment(b" 2014" * 1000)
    message = error_message(post(served.url, ids), 400)
    assert message.startswith(f"the sequence has {len(ids)} student tokens (")
    assert (
        "server accepts at most 2047 teacher tokens: send shorter sequences, or start the server"
        in message
    )


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_a_temperature_of_the_input_is_never_echoed(serve_pair: ServePair, value: float) -> None:
    """slime expects the echo only from servers that apply the temperature."""
    served = serve_pair("byte_level", "digits", "sglang")
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    plain = served.post("/generate", **body)
    with_temperature = served.post("/generate", **body, input_logprob_temperature=value)
    assert {**with_temperature["meta_info"], "id": ""} == {**plain["meta_info"], "id": ""}
    assert "temperature" not in json.dumps(with_temperature)


def test_fields_that_are_not_used_are_named_once(serve_pair: ServePair) -> None:
    """This includes nested fields; empty fields cause no note."""
    served = serve_pair("digits", "byte_level")
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


def test_another_temperature_is_noted_once(serve_pair: ServePair) -> None:
    served = serve_pair("digits", "sentencepiece")
    served.notes.clear()
    for temperature in (1.0, 0.7, 0.5):
        served.post("/v1/completions", prompt=[5, 6], prompt_logprobs=1, temperature=temperature)
    assert served.notes == [
        "a request sets temperature 0.7, which has no effect: log-probabilities of a prompt are "
        "always at temperature 1"
    ]


def test_a_request_of_a_closed_connection_is_cancelled(pair: Pair, model: TeacherServer) -> None:
    with running(model.app) as teacher_url, serving(pair, teacher_url, concurrency=1) as url:
        model.delay = 60.0
        with pytest.raises(httpx.ReadTimeout):
            post(url, [[5, 6], [7, 8]], timeout=0.3)
        end = time.monotonic() + 30
        while not model.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert model.cancelled == 1
        model.delay = 0.0
        assert post(url, [[5, 6], [7, 8]], timeout=30).status_code == 200


def test_many_at_once(pair: Pair, model: TeacherServer, byte_level: Tokenizer) -> None:
    """Responses do not depend on other requests; the concurrency is limited."""
    texts = [f"{TEXT[n:]} {n} times" for n in range(24)]
    rows = [ids.tolist() for ids in byte_level.library_arrays(texts)]
    with running(model.app) as teacher_url, serving(pair, teacher_url, concurrency=8) as url:

        def ask(ids: list[int]) -> Any:
            return prompt_rows(post(url, ids, 5))[0]

        single = [*map(ask, rows)]
        model.delay = 0.05
        with ThreadPoolExecutor(len(rows)) as pool:
            assert [*pool.map(ask, rows)] == single
        assert model.max_running == 8
        response = post(url, rows, 5)
    assert prompt_rows(response) == single
    assert [choice["index"] for choice in response.json()["choices"]] == [*range(24)]


def test_only_requests_with_the_key_are_accepted(pair: Pair, model: TeacherServer) -> None:
    notes: list[str] = []
    with (
        running(model.app) as teacher_url,
        serving(pair, teacher_url, api_key="ours", notes=notes) as url,
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


def test_large_bodies_are_refused(pair: Pair, model: TeacherServer) -> None:
    with running(model.app) as teacher_url, serving(pair, teacher_url) as url:
        response = httpx.post(f"{url}/v1/completions", content=b" " * (65 << 20), timeout=60)
    assert error_message(response, 400).startswith("the body has more than 64 MiB")
