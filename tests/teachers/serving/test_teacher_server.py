"""The teacher's server behind `xtok serve`: wrong, restarted, replaced or damaged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any

import httpx
import pytest
from running_servers import (
    KINDS,
    TOO_DEEP,
    Kind,
    error_message,
    post,
    prompt_rows,
    running,
    serving,
    token_logprobs,
)
from served_teachers import TeacherServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from xtok.errors import XtokError
from xtok.teachers.serving import connection
from xtok.teachers.serving import teacher as teachers
from xtok.teachers.serving.connection import Connection, TeacherError
from xtok.teachers.serving.teacher import TeacherClient
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


@pytest.fixture
def model(digits: Tokenizer) -> TeacherServer:
    return TeacherServer(digits)


# The teacher's server


def begun(url: str, tokenizer: Tokenizer, **options: Any) -> tuple[TeacherClient, list[str]]:
    """Connect to a teacher and disconnect; return it and its notes."""
    notes: list[str] = []

    async def run() -> TeacherClient:
        async with aclosing(TeacherClient(url, tokenizer)) as teacher:
            await teacher.connect(note=notes.append, **options)
        return teacher

    return asyncio.run(run()), notes


def begin(pair: Pair, model: TeacherServer, **options: Any) -> tuple[TeacherClient, list[str]]:
    with running(model.app) as url:
        return begun(url, pair.tokenizers[1], **options)


def test_a_teacher_that_allows_fewer_candidates(pair: Pair, digits: Tokenizer) -> None:
    teacher, notes = begin(pair, TeacherServer(digits, max_logprobs=20))
    assert teacher.candidates == 20
    assert notes[0].endswith(
        ": the server returns at most 20 candidates per token, expected 64; start the server with "
        "--max-logprobs 64"
    )
    for allowed, options in ((5, {}), (20, {"candidates": 32})):
        with pytest.raises(XtokError, match=f"at most {allowed} ") as raised:
            begin(pair, TeacherServer(digits, max_logprobs=allowed), **options)
        assert "--max-logprobs 64" in raised.value.hint


@KINDS
@pytest.mark.parametrize("tokenizes", [True, False])
def test_swapped_sides_are_an_error(
    byte_level: Tokenizer, pair: Pair, kind: Kind, tokenizes: bool
) -> None:
    model = TeacherServer(byte_level, kind, tokenizes=tokenizes)
    with pytest.raises(XtokError, match=r"swapped: .*small-digits"):
        begin(pair, model, student=byte_level)


@KINDS
@pytest.mark.parametrize("tokenizes", [True, False])
def test_the_wrong_teacher_is_an_error(
    pair: Pair, digits: Tokenizer, kind: Kind, tokenizes: bool
) -> None:
    """The server may or may not have the route /tokenize."""
    teacher, _ = begin(pair, TeacherServer(digits, kind, tokenizes=tokenizes))
    assert (teacher.kind, teacher.candidates, teacher.max_model_len) == (kind, 64, 2048)
    with pytest.raises(XtokError, match="small-byte-level") as raised:
        begin(pair.reversed, TeacherServer(digits, kind, tokenizes=tokenizes))
    assert "use the-teacher as teacher" in raised.value.hint


@KINDS
@pytest.mark.parametrize("texts", [True, False])
def test_a_tokenizer_that_cannot_be_compared_is_noted(
    pair: Pair, digits: Tokenizer, kind: Kind, texts: bool
) -> None:
    _, notes = begin(pair, TeacherServer(digits, kind, texts=texts), student=pair.tokenizers[0])
    assert any(": the tokenizer was not checked, " in note for note in notes) is not texts
    assert any("not checked" in note for note in notes) is not texts


@KINDS
def test_a_token_that_the_teacher_calls_impossible_has_a_finite_value(
    pair: Pair, digits: Tokenizer, kind: Kind
) -> None:
    """vLLM writes −9999 for −∞, SGLang null."""
    model = TeacherServer(digits, kind)
    ids = pair.tokenizers[0].segment(b"The keeper lit 201 lamps.")
    with running(model.app) as teacher_url, serving(pair, teacher_url) as url:
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
    model, notes = TeacherServer(digits, "sglang"), list[str]()
    with running(model.app) as teacher_url, serving(pair, teacher_url, notes=notes) as url:
        model.max_candidates = 20
        for _ in range(2):
            assert post(url, [5, 6, 7]).status_code == 200
        note = (
            f"the teacher's server at {teacher_url}: the server returns 20 candidates per token, "
        )
        note += "but 64 were requested"
        assert notes == [note]
    _, notes = begin(pair, model)
    assert " at most 20 candidates per token, expected 64; raise the limit" in notes[0]
    model.max_candidates = 19
    with pytest.raises(XtokError, match="at most 19 candidates"):
        begin(pair, model)


def test_a_server_that_is_still_loading_is_waited_for(
    pair: Pair, model: TeacherServer, monkeypatch: pytest.MonkeyPatch
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
def test_the_server_recovers_if_the_teacher_returns(pair: Pair, model: TeacherServer) -> None:
    ids = [5, 6, 7]
    with running(model.app) as teacher_url, serving(pair, teacher_url) as url:
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
        model = running(TeacherServer(digits, kind).app)
        teacher_url = model.__enter__()
        url = stack.enter_context(serving(pair, teacher_url, notes=notes))
        right = prompt_rows(post(url, ids))
        model.__exit__(None, None, None)
        assert "Connect" in error_message(post(url, ids), 502)
        assert httpx.get(f"{url}/health").status_code == 503
        [away] = notes
        assert away.startswith(
            f"the teacher's server at {teacher_url} does not respond: ConnectError"
        )
        port = int(teacher_url.rpartition(":")[2])
        with running(TeacherServer(byte_level, kind).app, port):
            for _ in range(2):
                words = "the server now has a different tokenizer than small-digits: "
                assert words in error_message(post(url, ids), 502)
        back = f"the teacher's server at {teacher_url} responds again"
        assert notes == [away, back]
        error_message(post(url, ids), 502)
        with running(TeacherServer(digits, kind).app, port):
            assert prompt_rows(post(url, ids)) == right
    assert notes == [away, back, away, back]


@KINDS
@pytest.mark.parametrize("by", ["a new connection", "the clock"])
def test_a_teacher_replaced_between_two_requests_is_an_error(
    pair: Pair, digits: Tokenizer, byte_level: Tokenizer, kind: Kind, by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No request fails; behind a load balancer, no new connection is needed either."""
    ids, model = [5, 6, 7], TeacherServer(digits, kind)
    port = 0
    with ExitStack() as stack:
        first = running(model.app)
        teacher_url = first.__enter__()
        port = int(teacher_url.rpartition(":")[2])
        url = stack.enter_context(serving(pair, teacher_url))
        right = prompt_rows(post(url, ids))
        first.__exit__(None, None, None)
        if by == "the clock":
            monkeypatch.setattr(teachers, "CHECK_INTERVAL", 0.0)
            monkeypatch.setattr(Connection, "count_connection", lambda *_: asyncio.sleep(0))
        with running(TeacherServer(byte_level, kind).app, port):
            for _ in range(2):
                assert "the server now has a different tokenizer" in error_message(
                    post(url, ids), 502
                )
        with running(TeacherServer(digits, kind).app, port):
            assert prompt_rows(post(url, ids)) == right


def test_a_response_without_end_is_refused(pair: Pair, model: TeacherServer) -> None:
    """The memory for a response is limited."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    with running(model.app) as teacher_url, serving(pair, teacher_url) as url:
        monkey: Any = model
        monkey.scored_rows = lambda *_: asyncio.sleep(0, StreamingResponse(long()))
        assert "/v1/completions returned more than 1 MiB" in error_message(
            post(url, [5, 6, 7]), 502
        )


@pytest.mark.usefixtures("short_pauses")
def test_a_teacher_that_disappears_during_its_check(
    pair: Pair, model: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        with running(model.app) as teacher_url:
            url = stack.enter_context(serving(pair, teacher_url))
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


@pytest.mark.parametrize(("response", "words"), ODD)
def test_unusable_responses_of_the_teacher_are_errors(
    digits: Tokenizer, response: Any, words: str
) -> None:
    content = response if isinstance(response, bytes) else json.dumps(response).encode()

    async def ask(url: str) -> None:
        async with aclosing(TeacherClient(url, digits)) as teacher:
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
