"""The server: routes, limits, and one thread that projects what several requests wait for."""

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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from xtok._lib.progress import Note, silent_note
from xtok.errors import XtokError
from xtok.predictions.topk import joined, split, within
from xtok.teachers.formats.ranked import RankedTopK, ranked
from xtok.teachers.serving.connection import TeacherError
from xtok.teachers.serving.dialects import (
    Asked,
    BadRequest,
    UnknownModel,
    completions,
    error_body,
    generate,
    inference,
    model_cards,
)
from xtok.teachers.serving.teacher import PROBE, TeacherServer
from xtok.tokenizers.display import shorten

if TYPE_CHECKING:
    from xtok.teachers.translator import SharedText, Translator

LARGEST_BODY = 64 << 20
TOKENS_AT_ONCE = 1 << 16
"""Teacher tokens that are projected in one go, so that memory does not grow with what waits."""

MOST_NOTES = 100
"""Kinds of requests that there is a note of; a client may invent names of fields."""

BODY_SECONDS = 60.0
"""Time limit for the body of a request."""

ANSWER_SECONDS = 60
"""Time limit for a client that does not read its answer; then its connection is closed."""

STOP_SECONDS = 20
"""Time limit for requests in progress after SIGTERM. Kubernetes kills a process after 30 s."""

_BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn has it."""

Parser = Callable[[bytes], Asked]
_PARSERS: dict[str, Parser] = {
    "/v1/completions": completions,
    "/generate": generate,
    "/inference/v1/generate": inference,
}


class Metrics:
    """What Prometheus reads."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry, namespace="xtok")
        summary = partial(prometheus.Summary, registry=self.registry, namespace="xtok")
        by_chat = "Sequences, by whether they were read as conversations."
        self.requests = counter("requests", "Requests for log-probabilities.", ["route", "status"])
        self.tokens = counter("tokens", "Tokens that were scored.", ["side"])
        self.sequences = counter("sequences", by_chat, ["chat"])
        self.teacher = summary("teacher_seconds", "What the teacher's server took for a sequence.")
        self.own = summary("own_seconds", "What projecting took, for the sequences that waited.")
        self.rest = summary("rest", "The share of each prediction that is not known.")


def score(
    translator: Translator, texts: Sequence[SharedText], answers: Sequence[RankedTopK], top_k: int
) -> list[RankedTopK]:
    """Return what a teacher says of texts, on the student's tokens; a value for each but the first.

    Of equal tokenizers that read the same, answers stay the same, but for ids beyond the student's
    width, which a wider teacher's padding has.
    """
    width = translator.pair.student.vocab_size
    scores = dict[int, RankedTopK]()
    for n, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        if translator.is_same and len(text.ids) == len(text.teacher_ids):
            cut = within(answer.topk, width)
            scores[n] = answer if cut is answer.topk else ranked(cut)
    rest = [n for n in range(len(texts)) if n not in scores]
    if rest:
        given = joined([answers[n].topk for n in rest])
        topk = translator.project([texts[n] for n in rest], given, top_k, without_gaps=True)
        scores.update(zip(rest, map(ranked, split(topk)), strict=True))
    return [scores[n] for n in range(len(texts))]


class _WaitingSequence(NamedTuple):
    """A sequence that the teacher's server has scored, and that a request waits for."""

    text: SharedText
    answer: RankedTopK  # the teacher's
    top_k: int  # candidates that it needs
    future: asyncio.Future[RankedTopK]  # the answer in the student's tokens


class RequestQueue:
    """Projects in one thread, all sequences that wait at once."""

    def __init__(self, translator: Translator, metrics: Metrics) -> None:
        self._translator, self._metrics = translator, metrics
        self._pool = ThreadPoolExecutor(1, "xtok-project")
        self._waiting: list[_WaitingSequence] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, text: SharedText, answer: RankedTopK, top_k: int) -> RankedTopK:
        """Return a teacher's answer in the student's tokens."""
        future: asyncio.Future[RankedTopK] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingSequence(text, answer, top_k, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._take():
            try:
                scores = await loop.run_in_executor(self._pool, self._project, batch)
            except Exception as error:  # noqa: BLE001 - it is the requests' that wait
                for sequence in batch:
                    if not sequence.future.done():
                        sequence.future.set_exception(error)
                continue
            for sequence, projected in zip(batch, scores, strict=True):
                if not sequence.future.done():
                    sequence.future.set_result(projected)
        self._task = None

    def _take(self) -> list[_WaitingSequence]:
        """Take sequences whose clients still wait; leave what wants other numbers, or is too much.

        So no answer depends on what else waits.
        """
        batch: list[_WaitingSequence] = []
        left: list[_WaitingSequence] = []
        size = 0
        for sequence in self._waiting:
            if not sequence.future.done():
                is_alike = not batch or sequence.top_k == batch[0].top_k
                fits = is_alike and size < TOKENS_AT_ONCE
                (batch if fits else left).append(sequence)
                size += len(sequence.answer.topk.token_ids) * fits
        self._waiting = left
        return batch

    def _project(self, batch: Sequence[_WaitingSequence]) -> list[RankedTopK]:
        begin = time.perf_counter()
        texts, answers, tops, _ = zip(*batch, strict=True)
        scores = score(self._translator, texts, answers, tops[0])
        self._metrics.own.observe(time.perf_counter() - begin)
        return scores


class Proxy:
    """Answers requests of trainers by asking the teacher's server.

    Args:
        translator: of the student and the teacher.
        teacher: a server that was begun.
        api_key: what clients must send as a Bearer token, if anything.
        teacher_system: what the teacher alone reads, if a request does not say.
        note: called once for each kind of request that is not answered quite as asked.
    """

    def __init__(
        self,
        translator: Translator,
        teacher: TeacherServer,
        *,
        api_key: str | None = None,
        teacher_system: str = "",
        note: Note = silent_note,
    ) -> None:
        self.teacher_system = teacher_system
        self.translator, self.teacher, self.metrics = translator, teacher, Metrics()
        self.student = translator.student.vocabulary
        self._longest = int(translator.teacher.table.lengths.max())
        self._queue = RequestQueue(translator, self.metrics)
        self._key, self._note = api_key, note
        self._numbers = itertools.count()
        self._told: set[str] = set()  # what there was a note of

    def app(self) -> Starlette:
        """Return the routes."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
        ]
        for path, parse in _PARSERS.items():
            routes.append(Route(path, partial(self._scored, parse=parse), methods=["POST"]))
        return Starlette(routes=routes)

    async def warm_up(self) -> None:
        """Score a text once, so that kernels are compiled before the first request.

        Raises:
            XtokError: if it cannot be scored.
        """
        ids = self.translator.student.segment(PROBE)
        try:
            [spelled] = self._spelled([ids])
            await self._score(spelled, 1)
        except (TeacherError, BadRequest) as error:
            raise self.teacher.unusable(error) from error

    # Routes

    async def _health(self, request: Request) -> Response:
        problem = await self.teacher.problem()
        if problem:
            return _error(503, f"the teacher's server at {self.teacher.url}: {problem}")
        return Response(status_code=200)

    async def _metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        if problem := self._refused(request):
            return problem
        cards = model_cards(self.student, self.teacher.model, self._max_model_len())
        return JSONResponse(cards)

    async def _scored(self, request: Request, parse: Parser) -> Response:
        """Answer a request for log-probabilities, unless its client leaves before."""
        response = self._refused(request)
        if response is None:
            try:
                body = await _body(request)
                response = await _while_connected(request, self._answer(body, parse))
            except BadRequest as error:
                response = _error(error.status, str(error))
            except TeacherError as error:
                whose = f"the teacher's server at {self.teacher.url}"
                response = _error(400 if error.is_request else 502, f"{whose}: {error}")
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # by a second signal
                response = _error(503, "the server was stopped")
        self.metrics.requests.labels(request.url.path, response.status_code).inc()
        return response

    def _refused(self, request: Request) -> Response | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            return _error(401, "the key is missing or wrong: send it as a Bearer token")
        return None

    async def _answer(self, body: bytes, parse: Parser) -> Response:
        asked = await asyncio.to_thread(parse, body)
        self._check_model(asked.about.model)
        system = asked.about.teacher_system
        spelled = await asyncio.to_thread(self._spelled, asked.sequences, system)
        if asked.temperature not in (None, 0, 1):
            self._note_once(
                "temperature",
                f"a request asks for temperature {asked.temperature:g}: log-probabilities of a "
                "prompt are always those of temperature 1",
            )
        for name in asked.unread:
            self._note_once(name, f"a request has {name}, which this server does not use")
        scored = (self._score(one, asked.top_k, asked.num_chosen) for one in spelled)
        tasks = [asyncio.create_task(one) for one in scored]
        try:
            scores = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        content = await asyncio.to_thread(asked.write, scores, self.student, next(self._numbers))
        return Response(content, media_type="application/json")

    def _note_once(self, name: str, text: str) -> None:
        if name not in self._told and len(self._told) < MOST_NOTES:
            self._told.add(name)
            self._note(text)

    def _check_model(self, name: str | None) -> None:
        """Check that a request is for what is served: the student's name, or the teacher's."""
        own = self.student.model_id
        known = own, self.teacher.model, self.translator.pair.teacher.model_id
        if name and name.rpartition("/")[2] not in {one.rpartition("/")[2] for one in known}:
            raise UnknownModel(f"model: {shorten(name)}, and this server has {own}")

    def _spelled(
        self, sequences: Sequence[Sequence[int]], system: str | None = None
    ) -> list[SharedText]:
        """Check sequences, and spell them for the teacher, by a request's own system text."""
        spelled = []
        system = self.teacher_system if system is None else system
        for ids in sequences:
            if not ids:
                raise BadRequest("the sequence is empty: give at least one token id")
            outside = [i for i in ids if not 0 <= i < self.student.vocab_size]
            if outside:
                raise BadRequest(
                    f"the id {outside[0]} is outside the vocabulary of {self.student.model_id}, "
                    f"0..{self.student.vocab_size - 1}"
                )
            most = self.teacher.max_model_len
            if most is not None and len(ids) > most * self._longest:  # before any work
                raise BadRequest(
                    f"the sequence has {len(ids)} tokens, far more than the {most - 1} of the "
                    "teacher's that its server takes"
                )
            try:
                spelled.append(self.translator.of_student(ids, system))
            except XtokError as error:
                raise BadRequest(str(error)) from error
            self.metrics.sequences.labels(str(spelled[-1].mask is not None).lower()).inc()
            count = len(spelled[-1].teacher_ids)
            if most is not None and count >= most:
                raise BadRequest(
                    f"the sequence has {len(ids)} tokens, {count} of the teacher's, whose server "
                    f"takes at most {most - 1}: start it with a larger --max-model-len, or send "
                    "shorter ones"
                )
        return spelled

    async def _score(self, spelled: SharedText, top_k: int, num_chosen: int = 0) -> RankedTopK:
        begin, candidates = time.perf_counter(), self.teacher.candidates
        answer = await self.teacher.score(spelled.teacher_ids.tolist(), max(top_k, candidates))
        self.metrics.teacher.observe(time.perf_counter() - begin)
        most = max(top_k + 1, candidates)
        scores = await self._queue(spelled, answer, 16 * most if num_chosen else most)
        self.metrics.tokens.labels("student").inc(len(spelled.ids))
        self.metrics.tokens.labels("teacher").inc(len(spelled.teacher_ids))
        rest = np.exp(scores.topk.rest_logprob[scores.topk.valid], dtype=np.float64)
        self.metrics.rest.observe(float(np.nan_to_num(rest).mean()) if len(rest) else 0.0)
        return scores

    def _max_model_len(self) -> int | None:
        """Return how many of the student's tokens surely fit, in text as tokenizers meet it."""
        length = self.teacher.max_model_len
        if length is None:
            return None
        length -= len(self.translator.teacher.encode(self.teacher_system).ids)
        if self.translator.is_same:
            return length
        return int((length - 1) / self.translator.pieces_per_token)


async def _body(request: Request) -> bytes:
    """Return the body of a request; at most 64 MB."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BODY:
                    words = f"the body has more than {LARGEST_BODY >> 20} MB: send less at once"
                    raise BadRequest(words)
    except TimeoutError as error:
        raise BadRequest(f"the body took more than {BODY_SECONDS:g} seconds") from error
    return b"".join(parts)


async def _while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Do work until it is done or its client has left; then it is cancelled."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> Response:
    return JSONResponse(error_body(status, message), status)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything costs time; who connects early waits.

    Raises:
        XtokError: if the address is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ANSWER_SECONDS * 1000)
    try:
        opened.bind((host, port))
        opened.listen(_BACKLOG)  # else a second server could take it, too, until one listens
    except OSError as error:
        opened.close()
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise XtokError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}",
            hint="give another {option}" + ", or stop what listens there" * is_taken,
            parameter="port" if is_taken else "host",
        ) from error
    return opened


async def run(proxy: Proxy, listening: socket.socket, on_ready: Callable[[], object]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in progress then have `STOP_SECONDS` to finish.

    A second signal ends the process at once.
    """
    config = uvicorn.Config(
        proxy.app(),
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


def _stop_by_signals(server: uvicorn.Server) -> None:
    """Let signals stop a server that runs in the main thread.

    Uvicorn's own handlers raise the signal again after the server has stopped, so the process would
    not exit with 0.
    """

    def stop(number: int, _: object) -> None:
        server.should_exit = True
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
