"""HTTP to the teacher's server: addresses, proxies, time limits."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, suppress

import httpx
import pytest
from running_servers import running
from served_teachers import TeacherServer
from starlette.applications import Starlette

from xtok.errors import XtokError
from xtok.teachers.serving import connection
from xtok.teachers.serving.connection import Connection, TeacherError
from xtok.teachers.serving.teacher import TeacherClient
from xtok.tokenizers import Tokenizer

NOBODY = "http://user:secret@127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def connect(url: str, tokenizer: Tokenizer) -> TeacherClient:
    """Connect to a server, and disconnect."""

    async def run() -> TeacherClient:
        async with aclosing(TeacherClient(url, tokenizer)) as teacher:
            await teacher.connect()
        return teacher

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_loopback_addresses_need_no_proxy(
    digits: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, NOBODY)
    with running(TeacherServer(digits).app) as url:
        assert connect(url, digits).url == url


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_error_names_the_proxy(
    digits: Tokenizer, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", NOBODY)
    monkeypatch.setenv("NO_PROXY", "fd00::/8, 10.0.0.0/8, other.test")
    with pytest.raises(XtokError) as raised:
        connect(f"{scheme}://teacher.test:8000", digits)
    assert "//teacher.test:8000 (proxy: http://127.0.0.1:9): Connect" in raised.value.message
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9", "http://[::1"])
def test_a_proxy_that_is_not_usable(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(XtokError) as raised:
        Connection("teacher.test")
    assert raised.value.message.startswith("the teacher's server at http://teacher.test (proxy: ")
    assert proxy in raised.value.message
    assert "NO_PROXY" in raised.value.hint


@pytest.mark.parametrize(
    ("url", "excluded"),
    [
        ("http://10.1.2.3:8000", "10.0.0.0/8"),
        ("http://10.1.2.3:8000", "other.test, 10.1.2.3"),
        ("http://[fd00::7]:8000", "fd00::/8"),
        ("http://a.teacher.test", ".teacher.test"),
        ("http://teacher.test", "*"),
    ],
)
def test_no_proxy_excludes_a_server_from_the_proxy(
    url: str, excluded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", NOBODY)
    assert Connection(url).url == f"{url} (proxy: http://127.0.0.1:9)"
    monkeypatch.setenv("NO_PROXY", excluded)
    assert Connection(url).url == url


def test_an_error_shows_the_whole_address(digits: Tokenizer) -> None:
    with running(Starlette()) as url:
        for route, shown in (("/v1/completions", "/v1/completions"), ("/a/v1/", "/a")):
            with pytest.raises(XtokError) as raised:
                connect(url + route, digits)
            assert f" {url}{shown}: " in raised.value.message
    with pytest.raises(XtokError, match=re.escape(f"{url}/?x=1")) as raised:
        connect(f"{url}/?x=1", digits)
    assert "without a query" in raised.value.hint


def test_a_url_may_have_a_path_before_the_routes(digits: Tokenizer) -> None:
    app = Starlette()
    app.mount("/teachers/1", TeacherServer(digits).app)
    with running(app) as url:
        assert connect(f"{url}/teachers/1/v1", digits).model == "the-teacher"


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(("first", "part"), [(CONTINUE, CONTINUE), (HEAD, b" ")])
def test_a_response_without_end(
    digits: Tokenizer, first: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the response arrives in time, but the whole response does not."""
    monkeypatch.setattr(connection, "SCORE_SECONDS", 0.3)

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with aclosing(TeacherClient(f"127.0.0.1:{port}", digits)) as teacher:
                teacher.kind, teacher.model = "vllm", "x"
                with pytest.raises(TeacherError) as raised:
                    await teacher.score([5, 6, 7], 1)
                assert raised.value.is_away
                assert "0.3 seconds" in str(raised.value)
                with pytest.raises(httpx.ReadTimeout):
                    await teacher.connection.send("GET", "/v1/models", seconds=0.3)
            await asyncio.sleep(0.1)  # until both connections are closed

    asyncio.run(run())
