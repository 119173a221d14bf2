"""Run servers on loopback in threads: any app, and `xtok serve` in front of a teacher."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from make_maps import built

from xtok.config import BACK_MAP
from xtok.maps.projection_map import ProjectionMap
from xtok.teachers.serving.server import Proxy, bound
from xtok.teachers.serving.teacher import TeacherServer
from xtok.teachers.translator import Translator
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
def proxied(
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
        async with aclosing(TeacherServer(url, pair.tokenizers[1], **teacher)) as asked:
            await asked.connect(candidates, 0.0, note)
            translator = Translator(pair, projection, chat=chat, templates=templates, num_threads=1)
            proxy = Proxy(translator, asked, api_key=api_key, note=note)
            servers.append(Server(proxy.app()))
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
