"""`xtok serve` as a process: startup, signals, errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from checks import fails
from conftest import Cli
from forked import Forks
from running_servers import running
from served_teachers import TeacherServer

import xtok
from xtok.errors import XtokError
from xtok.teachers.serving.server import bound
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

BODY = {"prompt": [5, 6, 7], "prompt_logprobs": 1}
HALF_A_REQUEST = b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ours\r\n"
HALF_A_REQUEST += b"Content-Length: 9\r\n\r\n{"
SHORTER_LIMITS = """
import os, pathlib
import xtok.__main__
from xtok.teachers.serving import server
pathlib.Path({!r}).write_text(str(os.getpid()))
server.STOP_SECONDS, server.RESPONSE_SECONDS = 2, {}
xtok.__main__.program()
"""


class Command(NamedTuple):
    """A running command in a fork."""

    program: subprocess.Popen[str]  # waits for the fork, and ends with its exit code
    pid: int
    url: str

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


Start = Callable[..., AbstractContextManager[Command]]


@pytest.fixture
def command(forks: Forks, tmp_path: Path) -> Start:
    """A function that runs the command."""

    @contextmanager
    def start(*args: str, response_seconds: int = 60, **env: str) -> Iterator[Command]:
        code = SHORTER_LIMITS.format(str(tmp_path / "pid"), response_seconds)
        program = subprocess.Popen(
            [forks.folder / "python", "-c", code, "serve", *args, "--port", "0"],
            stdout=-1, stderr=-1, text=True, env={**forks.env, **env},
        )  # fmt: skip
        assert program.stdout is not None
        try:
            url = program.stdout.readline().strip()
            yield Command(program, int((tmp_path / "pid").read_text()), url)
        finally:
            program.kill()
            program.communicate()

    return start


def test_a_signal_ends_the_server(small: Path, digits: Tokenizer, command: Start) -> None:
    models = str(small / "small-byte-level"), str(small / "small-digits")
    model = TeacherServer(digits)
    keys: Any = {"XTOK_API_KEY": "ours", "XTOK_TEACHER_API_KEY": "theirs"}
    with (
        running(model.app) as teacher_url,
        command(*models, "--teacher-url", teacher_url, **keys) as (process, pid, url),
        ThreadPoolExecutor(1) as pool,
    ):
        assert url.startswith("http://127.0.0.1:")
        headers = {"Authorization": "Bearer ours"}
        model.delay = 0.5
        waiting = pool.submit(
            httpx.post, f"{url}/v1/completions", json=BODY, headers=headers, timeout=60
        )
        while not model.running:
            time.sleep(0.005)
        # clients that connect repeatedly, and clients that stay connected
        with ExitStack() as held:
            address = "127.0.0.1", int(url.rpartition(":")[2])
            with suppress(OSError):  # after it has stopped listening
                for number in range(300):
                    client = held.enter_context(socket.create_connection(address))
                    if number == 50:
                        client.sendall(HALF_A_REQUEST)
                        os.kill(pid, signal.SIGTERM)
            assert waiting.result().status_code == 200
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0
    assert out == ""
    assert "ours" not in err
    assert "theirs" not in err
    assert "small-digits at " in err
    assert model.keys == {"Bearer theirs"}


@contextmanager
def waiting(
    small: Path, digits: Tokenizer, command: Start
) -> Iterator[tuple[Command, Future[httpx.Response]]]:
    """Run the command with a teacher that does not respond; yield it and a response."""
    models = str(small / "small-byte-level"), str(small / "small-digits")
    model = TeacherServer(digits)
    with (
        running(model.app) as teacher_url,
        command(*models, "--teacher-url", teacher_url) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        model.delay = 600.0
        response = pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=60)
        while not model.running:
            time.sleep(0.005)
        yield server, response


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_server_at_once(
    small: Path, digits: Tokenizer, number: int, command: Start
) -> None:
    with waiting(small, digits, command) as (server, response):
        server.send(number)
        time.sleep(0.5)
        assert server.program.poll() is None
        server.send(number)
        assert server.program.wait(1) == -number % 256
        with pytest.raises(httpx.RemoteProtocolError):
            response.result()


def test_a_request_that_takes_too_long_does_not_delay_the_end(
    small: Path, digits: Tokenizer, command: Start
) -> None:
    with waiting(small, digits, command) as (server, response):
        server.send(signal.SIGTERM)
        assert response.result().status_code == 503
        _, err = server.program.communicate(timeout=60)
        assert server.program.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("by", ["SIGTERM", "time"])
def test_a_client_that_does_not_read(
    small: Path, digits: Tokenizer, by: str, command: Start
) -> None:
    """Its response is larger than the buffers."""
    models = str(small / "small-byte-level"), str(small / "small-digits")
    body = json.dumps({"prompt": [5, 6, 7] * 500, "prompt_logprobs": 60}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    with (
        running(TeacherServer(digits, max_model_len=4096).app) as teacher_url,
        command(
            *models, "--teacher-url", teacher_url, response_seconds=1 if by == "time" else 60
        ) as server,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(request % (len(body), body))
        metric = 'requests_total{route="/v1/completions",status="200"} 1.0'
        while metric not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.05)
        if by == "SIGTERM":
            server.send(signal.SIGTERM)
            assert server.program.wait(20) == 0
        else:
            time.sleep(3)
            with pytest.raises(ConnectionError):
                [*iter(partial(client.recv, 1 << 20), b"")]


def test_errors_at_startup(cli: Cli, small: Path, digits: Tokenizer, tmp_path: Path) -> None:
    models = str(small / "small-byte-level"), str(small / "small-digits")
    result = cli("serve", *models, "--teacher-url", "127.0.0.1:9", "--wait", "0", "--port", "0")
    fails(
        result,
        "http://127.0.0.1:9: ConnectError: ",
        "the address of the teacher's vLLM or SGLang server",
    )
    result = cli("serve", *models)
    assert result.returncode == 2
    assert "--teacher-url" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = cli("serve", *models, "--teacher-url", "x", "--port", port)
    fails(result, f"cannot listen on 127.0.0.1:{port}: ", "--port")
    with bound("127.0.0.1", 0) as first, pytest.raises(XtokError) as raised:
        # the signal comes before the first server accepts connections
        bound("127.0.0.1", first.getsockname()[1])
    assert raised.value.parameter == "port"
    with pytest.raises(XtokError) as raised:
        bound("192.0.2.1", 0)
    assert raised.value.parameter == "host"
    for name in ("XTOK_API_KEY", "XTOK_TEACHER_API_KEY"):
        env = {name: "secret\n", "XTOK_CACHE_DIR": str(tmp_path / "cache")}
        result = cli("serve", *models, "--teacher-url", "x", "--port", "0", env=env)
        fails(result, "the key starts or ends with a space")
        assert "secret" not in result.stderr
    assert not (tmp_path / "cache").exists()  # no map is built before the keys are checked
    with running(TeacherServer(digits, max_logprobs=5).app) as teacher_url:
        result = cli(
            "serve", *models, "--teacher-url", teacher_url, "--port", "0", "--host", "0.0.0.0"
        )
    fails(result, f"{teacher_url}: the server returns at most 5 candidates", "--max-logprobs 64")
    assert "note: every client that can reach 0.0.0.0 can send requests" in result.stderr


def test_the_map_is_built_once(cli: Cli, small: Path, tmp_path: Path) -> None:
    """The server does not block if the file is a pipe."""
    models = str(small / "small-byte-level"), str(small / "small-digits")
    serve = partial(
        cli, "serve", *models, "--teacher-url", "127.0.0.1:9", "--wait", "0", "--port", "0",
        env={"XTOK_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "note: built the map from the teacher to the student" in serve().stderr
    assert ".safetensors exists, and is kept" in serve().stderr
    [path] = tmp_path.glob("maps/*.safetensors")
    path.unlink()
    os.mkfifo(path)
    assert "note: the map from the teacher to the student is not cached" in serve().stderr


@pytest.mark.parametrize("problem", ["fails", "has another tokenizer", "is short"])
def test_a_server_that_does_not_score_is_an_error(
    problem: str, cli: Cli, small: Path, digits: Tokenizer, byte_level: Tokenizer
) -> None:
    models = [str(small / name) for name in ("small-byte-level", "small-digits")]
    served = TeacherServer(digits, texts=False, max_model_len=40 if problem == "is short" else 2048)
    if problem == "has another tokenizer":
        models.reverse()
    score = served.scored_rows

    async def once(request: Any, ids: list[int]) -> Any:
        if len(served.requested_ids) > 1:  # after the detection and the comparison of tokenizers
            served.status = 500
        return await score(request, ids)

    if problem == "fails":
        served.scored_rows = once  # type: ignore[method-assign]
    with running(served.app) as teacher_url:
        result = cli("serve", *models, "--teacher-url", teacher_url, "--port", "0", "--wait", "0")
    fails(result, teacher_url)


def test_a_missing_package(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("xtok.teachers.serving.server", "xtok.teachers.serving.teacher"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delattr("xtok.teachers.serving.server", raising=False)
    with pytest.raises(XtokError, match="needs the package uvicorn") as got:
        xtok.serve(pair, "http://127.0.0.1:9", back_map="unread.safetensors")
    assert "pip install starlette uvicorn" in got.value.hint
