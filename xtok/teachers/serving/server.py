"""The HTTP server: routes, limits, and the thread that projects scores."""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from xtok._lib.progress import Note, silent_note
from xtok.errors import XtokError
from xtok.predictions.topk import cut_to_width
from xtok.teachers.formats.ranked import RankedTopK, ranked
from xtok.teachers.serving import dialects
from xtok.teachers.serving.connection import TeacherError
from xtok.teachers.serving.dialects import BadRequest, ScoringRequest
from xtok.teachers.serving.teacher import PROBE, TeacherClient
from xtok.teachers.translator import SharedText, Translator
from xtok.tokenizers.display import shorten

MAX_BODY_BYTES = 64 << 20
MAX_NOTES = 100
"""Maximum number of notes about requests. Otherwise, each new field name would cause a note."""

BODY_SECONDS = 60.0
"""Time limit in seconds for the body of a request."""

RESPONSE_SECONDS = 60
"""Seconds after which a connection is closed if the client does not read the response."""

STOP_SECONDS = 20
"""Seconds to finish requests in progress after SIGTERM. Kubernetes kills processes after 30 s."""

_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted. This is uvicorn's default."""

Parser: TypeAlias = Callable[[bytes], ScoringRequest]
_PARSERS: dict[str, Parser] = {
    "/v1/completions": dialects.completions,
    "/generate": dialects.generate_request,
    "/inference/v1/generate": dialects.inference,
}


class Metrics:
    """Prometheus metrics of the server."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry, namespace="xtok")
        summary = partial(prometheus.Summary, registry=self.registry, namespace="xtok")
        by_chat = "Sequences; chat is true if a conversation was recovered from the ids."
        self.requests = counter("requests", "Requests for log-probabilities.", ["route", "status"])
        self.tokens = counter("tokens", "Scored tokens.", ["side"])
        self.sequences = counter("sequences", by_chat, ["chat"])
        self.teacher = summary("teacher_seconds", "Seconds that the teacher needs per sequence.")
        self.own = summary("own_seconds", "Seconds that the projection needs per sequence.")
        self.rest = summary("rest", "Mean probability outside the candidates, per sequence.")


def score(translator: Translator, text: SharedText, scores: RankedTopK, top_k: int) -> RankedTopK:
    """Convert a teacher's scores for a text to scores for the student's tokens.

    Each token after the first gets a log-probability. If the tokenizers and the ids are equal, the
    scores stay the same, except that candidates beyond the student's width are removed.
    """
    if translator.is_same and np.array_equal(text.ids, text.teacher_ids):
        topk = cut_to_width(scores.topk, translator.pair.student.vocab_size)
        return scores if topk is scores.topk else ranked(topk)
    return ranked(translator.project_whole(text, scores.topk, top_k))


class ScoreService:
    """The web application that translates between trainers and the teacher's server.

    Args:
        translator: converts the student's ids, and projects the teacher's scores.
        teacher: a client that is connected to the teacher's server.
        api_key: the Bearer token that clients must send, if any.
        teacher_system: the default system text for the teacher only.
        note: called once for each ignored field, and once if a temperature is ignored.
    """

    def __init__(
        self,
        translator: Translator,
        teacher: TeacherClient,
        api_key: str | None = None,
        *,
        teacher_system: str = "",
        note: Note = silent_note,
    ) -> None:
        self.teacher_system = teacher_system
        self.translator, self.teacher, self.metrics = translator, teacher, Metrics()
        self.student = translator.student.vocabulary
        self._longest = int(translator.teacher.table.lengths.max())
        self._pool = ThreadPoolExecutor(1, "xtok-project")  # one projection at a time
        self._project = self.metrics.own.time()(score)
        self._key, self._note = api_key, note
        self._numbers = itertools.count()
        self._noted: set[str] = set()  # subjects of all previous notes

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [Route("/health", self._health), Route("/metrics", self._metrics)]
        routes.append(Route("/v1/models", self._models))
        for path, parse in _PARSERS.items():
            routes.append(Route(path, partial(self._respond, parse=parse), methods=["POST"]))
        return Starlette(routes=routes)

    async def warm_up(self) -> None:
        """Score a text, so that Numba compiles the kernels before the first request."""
        ids = self.translator.student.segment(PROBE)
        try:
            [text] = self._texts([ids], self.teacher_system)
            await self._score(text, 1)
        except (TeacherError, BadRequest) as error:
            raise self.teacher.unusable(error) from error

    async def run(self, listening: socket.socket, on_ready: Callable[[], object]) -> None:
        """Run the server until SIGTERM or Ctrl-C.

        After the signal, requests in progress have `STOP_SECONDS` to finish.
        """
        config = uvicorn.Config(
            self.app(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve([listening]))
        while not (server.started or task.done()):
            await asyncio.sleep(0.01)
        if server.started:
            _stop_by_signals(server)
            on_ready()
        await task

    # Routes

    async def _health(self, request: Request) -> Response:
        if problem := await self.teacher.problem():
            return _error(503, f"the teacher's server at {self.teacher.url}: {problem}")
        return Response(status_code=200)

    async def _metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        if problem := self._refuse(request):
            return problem
        cards = dialects.model_cards(self.student, self.teacher.model, self._max_model_len())
        return JSONResponse(cards)

    async def _respond(self, request: Request, parse: Parser) -> Response:
        """Respond to a request for log-probabilities. Cancel the work if the client disconnects."""
        response = self._refuse(request)
        if response is None:
            try:
                body = await _body(request)
                response = await _while_connected(request, self._response_to(body, parse))
            except BadRequest as error:
                response = _error(error.status, str(error))
            except TeacherError as error:
                message = f"the teacher's server at {self.teacher.url}: {error}"
                response = _error(400 if error.is_request else 502, message)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # cancelled STOP_SECONDS after a signal
                response = _error(503, "the server was stopped")
        self.metrics.requests.labels(request.url.path, response.status_code).inc()
        return response

    def _refuse(self, request: Request) -> Response | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if self._key and not hmac.compare_digest(key.encode(), self._key.encode()):
            return _error(401, "the key is missing or wrong; send the key as a Bearer token")
        return None

    async def _response_to(self, body: bytes, parse: Parser) -> Response:
        request = await asyncio.to_thread(parse, body)
        self._check_model(request.common.model)
        system = request.common.teacher_system
        system = self.teacher_system if system is None else system
        texts = await asyncio.to_thread(self._texts, request.sequences, system)
        if request.temperature not in (None, 0, 1):
            self._note_once(
                "temperature",
                f"a request sets temperature {request.temperature:g}, which has no effect: "
                "log-probabilities of a prompt are always at temperature 1",
            )
        for name in request.unread:
            self._note_once(name, f"the field {name} of a request is ignored")
        tasks = [
            asyncio.create_task(self._score(text, request.top_k, chooses=request.chooses))
            for text in texts
        ]
        try:
            scores = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        content = await asyncio.to_thread(request.write, scores, self.student, next(self._numbers))
        return Response(content, media_type="application/json")

    def _note_once(self, subject: str, text: str) -> None:
        if subject not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(subject)
            self._note(text)

    def _check_model(self, name: str | None) -> None:
        """Check that a model name in a request is the name of the student or the teacher."""
        served = self.student.model_id
        names = served, self.teacher.model, self.translator.pair.teacher.model_id
        if name and name.rpartition("/")[2] not in {n.rpartition("/")[2] for n in names}:
            raise dialects.UnknownModel(f"model: {shorten(name)} is not served, expected {served}")

    def _texts(self, sequences: Sequence[Sequence[int]], system: str) -> list[SharedText]:
        """Check sequences of student ids, and convert the sequences to the teacher's tokens."""
        texts = []
        for ids in sequences:
            self._check_ids(ids)
            try:
                text = self.translator.from_student_ids(ids, system)
            except XtokError as error:
                raise BadRequest(str(error)) from error
            self.metrics.sequences.labels(str(text.mask is not None).lower()).inc()
            limit, count = self.teacher.max_model_len, len(text.teacher_ids)
            if limit is not None and count >= limit:
                raise BadRequest(
                    f"the sequence has {len(ids)} student tokens ({count} teacher tokens), but the "
                    f"teacher's server accepts at most {limit - 1} teacher tokens: send shorter "
                    "sequences, or start the server with a larger --max-model-len"
                )
            texts.append(text)
        return texts

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise BadRequest("the sequence is empty, expected at least one token id")
        width = self.student.vocab_size
        if outside := [i for i in ids if not 0 <= i < width]:
            raise BadRequest(dialects.outside_vocabulary("id", outside[0], self.student))
        limit = self.teacher.max_model_len
        # Even the longest teacher tokens cannot spell so many student tokens.
        if limit is not None and len(ids) > limit * self._longest:
            raise BadRequest(
                f"the sequence has {len(ids)} student tokens, but the teacher's server accepts at "
                f"most {limit - 1} teacher tokens"
            )

    async def _score(self, text: SharedText, top_k: int, *, chooses: bool = False) -> RankedTopK:
        started_at, candidates = time.perf_counter(), self.teacher.candidates
        teacher_scores = await self.teacher.score(text.teacher_ids.tolist(), max(top_k, candidates))
        self.metrics.teacher.observe(time.perf_counter() - started_at)
        size = max(top_k + 1, candidates) * (16 if chooses else 1)
        scores = await asyncio.get_running_loop().run_in_executor(
            self._pool, self._project, self.translator, text, teacher_scores, size
        )
        self.metrics.tokens.labels("student").inc(len(text.ids))
        self.metrics.tokens.labels("teacher").inc(len(text.teacher_ids))
        rest = np.exp(scores.topk.rest_logprob[scores.topk.valid], dtype=np.float64)
        self.metrics.rest.observe(float(np.nan_to_num(rest).mean()) if len(rest) else 0.0)
        return scores

    def _max_model_len(self) -> int | None:
        """Estimate the number of student tokens that fit into the teacher's context."""
        length = self.teacher.max_model_len
        if length is None:
            return None
        length -= len(self.translator.teacher.encode(self.teacher_system).ids)
        if self.translator.is_same:
            return length
        return int((length - 1) / self.translator.pieces_per_token)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise BadRequest(f"the body has more than {MAX_BODY_BYTES >> 20} MiB")
    except TimeoutError as error:
        raise BadRequest(f"the body is incomplete after {BODY_SECONDS:g} seconds") from error
    return b"".join(parts)


async def _while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Wait for the work to finish. Cancel the work if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> Response:
    """Return an error response in the format of vLLM and SGLang."""
    kinds = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"object": "error", "error": error}, status)


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients can connect now, and wait until the server is ready."""
    is_v6 = ":" in host
    try:
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise XtokError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another {option}" + ", or stop the other program" * is_taken,
            parameter="port" if is_taken else "host",
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, RESPONSE_SECONDS * 1000)
    return listening


def _stop_by_signals(server: uvicorn.Server) -> None:
    """Stop the server on signals, if the server runs in the main thread.

    Uvicorn's own handlers raise the signal again after the server has stopped, so the process would
    not exit with code 0.
    """

    def stop(number: int, _: object) -> None:
        server.should_exit = True
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
