"""Run servers on loopback in threads: any app, and `xtok serve` in front of a teacher; requests."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

import httpx
import pytest
import uvicorn
from make_maps import built
from served_teachers import TeacherServer

import xtok
from xtok.config import BACK_MAP
from xtok.maps.projection_map import ProjectionMap
from xtok.teachers.serving.server import ScoreService, bound
from xtok.teachers.serving.teacher import TeacherClient
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


class Server(uvicorn.Server):
    """A server that can be stopped; uvicorn checks for the stop ten times a second."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False))
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End the server, from any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def main_loop(self) -> None:
        """Run until `stop`."""
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running requests."""
        for server in self.servers:
            server.close()
        for opened in sockets or ():
            opened.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.002)
        await self.lifespan.shutdown()


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """Run an app in a thread, and yield its address."""
    opened = bound("127.0.0.1", port)
    server = Server(app)
    with _thread([server], lambda: server.serve([opened])):
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"


@contextmanager
def serving(
    pair: Pair,
    url: str,
    back_map: ProjectionMap | None = None,
    *,
    notes: list[str] | None = None,
    candidates: int | None = None,
    api_key: str | None = None,
    chat: bool = True,
    templates: tuple[Path | str | None, Path | str | None] = (None, None),
    **teacher: Any,
) -> Iterator[str]:
    """Run `xtok serve` in a thread, in front of a teacher; yield its address."""
    note = ([] if notes is None else notes).append
    projection = back_map or built(pair.tokenizers[1], pair.tokenizers[0], BACK_MAP)
    servers: list[Server] = []

    async def serve(opened: socket.socket) -> None:
        async with aclosing(TeacherClient(url, pair.tokenizers[1], **teacher)) as client:
            await client.connect(candidates, 0.0, note)
            translator = Translator(pair, projection, chat=chat, templates=templates, num_threads=1)
            service = ScoreService(translator, client, api_key=api_key, note=note)
            servers.append(Server(service.app()))
            await servers[0].serve([opened])

    with bound("127.0.0.1", 0) as opened, _thread(servers, lambda: serve(opened)):
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"


@contextmanager
def _thread(servers: list[Server], serve: Any) -> Iterator[None]:
    """Run a server in a thread."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    while thread.is_alive() and not (servers and servers[0].started):
        thread.join(0.005)
    try:
        if failed:
            raise failed[0]
        yield
    finally:
        for server in servers:
            server.stop()
        thread.join()


# Requests to `xtok serve`

# msgspec's message for endless JSON depends on Python's recursion limit
TOO_DEEP = "Input data was truncated" if sys.version_info >= (3, 14) else "maximum recursion depth"
TEXT = "In 2014 there were 201 lamps — día tras día 灯, and the keeper’s 42 steps."


class Served(NamedTuple):
    """A pair with a running teacher, and `xtok serve` in front of it."""

    pair: Pair
    model: TeacherServer
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
        response = self.post("/v1/completions", prompt=[*sequences], prompt_logprobs=top_k)
        return [choice["prompt_logprobs"] for choice in response["choices"]]


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


Kind = Literal["vllm", "sglang"]
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
ServePair = Callable[..., Served]


def token_logprobs(ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the log-probability of each token after the first.

    Check that the token is the first candidate of its row.
    """
    assert rows[0] is None
    logprobs = []
    for i, row in zip(ids[1:], rows[1:], strict=True):
        assert next(iter(row)) == str(i)
        logprobs.append(row[str(i)]["logprob"])
    return logprobs


def check_rows(ids: Sequence[int], rows: Sequence[Any], top_k: int, width: int) -> None:
    """Check the properties of rows that trainers depend on: finite values and complete ranks."""
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


@contextmanager
def served_pairs(tokenizers: dict[str, Tokenizer]) -> Iterator[ServePair]:
    """Yield a function that starts `xtok serve` for a student and a teacher, once per pair."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))

        @cache
        def get(student: str, teacher: str, kind: Kind = "vllm") -> Served:
            pair = xtok.load_pair(tokenizers[student], tokenizers[teacher])
            model, notes = TeacherServer(tokenizers[teacher], kind), list[str]()
            teacher_url = stack.enter_context(running(model.app))
            url = stack.enter_context(serving(pair, teacher_url, notes=notes))
            return Served(pair, model, url, client, notes)

        yield get
