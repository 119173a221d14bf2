"""The teacher's server, vLLM's or SGLang's: what it is, and what it says of ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from types import ModuleType
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from xtok._lib.progress import Note, silent_note
from xtok.errors import XtokError
from xtok.teachers.formats import sglang, vllm
from xtok.teachers.formats.checks import check_predictions
from xtok.teachers.formats.documents import Documents
from xtok.teachers.formats.ranked import RankedTopK, completed
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.sides import MAX_WIDTH

ServerKind: TypeAlias = Literal["vllm", "sglang"]

_FORMATS: dict[ServerKind, ModuleType] = {"vllm": vllm, "sglang": sglang}

DEFAULT_CANDIDATES = 64
FEWEST = 20
"""Candidates of a token that the values of tokens inside a chunk need; vLLM's own limit."""

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a request is sent again; a server that restarts behind a balancer takes some."""

_SLOWEST = 3600.0
"""Seconds that the teacher may take for one sequence, waiting for others included."""

_LONGEST_PAUSE = 60.0
"""Seconds of Retry-After that are waited at most; clients of ours have limits of their own."""

CHECK_INTERVAL = 60.0
"""Seconds after which a server's tokenizer is checked again, before its next answer is used."""

ENTRY_BYTES = 512
"""Bytes of an answer for a candidate, at most on average; vLLM's take 80 (SGLang's fewer)."""

NOTE_INTERVAL = 30.0
"""Seconds after which it is said again that a server is waited for."""

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)

PROBE = (
    "In 2014, 3,141 people said: “It's été — naïve!”\n\tdef f(x):  return x ** 2  # 東京で\r\n"
    "Привет, мир… 🙂 <b>&amp;</b> camelCase SHOUTING snake_case 0x7f"
)
"""A text on which no two families of tokenizers agree."""


class TeacherError(Exception):
    """What the teacher's server answered instead of log-probabilities.

    Attributes:
        is_request: whether the request is at fault, and not the server.
        is_away: whether the server does not answer at all.
    """

    def __init__(self, message: str, *, is_request: bool = False, is_away: bool = False) -> None:
        super().__init__(message)
        self.is_request, self.is_away = is_request, is_away


class TeacherServer:
    """A teacher's server.

    Args:
        url: its address, without a route.
        tokenizer: the teacher's.
        api_key: what it asks for, if anything; sent as a Bearer token.
        concurrency: how many sequences it is asked for at once.

    Raises:
        XtokError: if the address is none.
    """

    kind: ServerKind
    model: str
    max_model_len: int | None = None
    candidates = DEFAULT_CANDIDATES

    def __init__(
        self, url: str, tokenizer: Tokenizer, *, api_key: str | None = None, concurrency: int = 64
    ) -> None:
        base = url if "://" in url else f"http://{url}"
        self.url = _address(base)
        self.tokenizer = tokenizer
        self._ids = replace(tokenizer.vocabulary, table=None)  # ids that stand for nothing, too
        self._client = httpx.AsyncClient(
            base_url=base.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_SLOWEST, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
        )
        self._places = asyncio.Semaphore(concurrency)
        self._note: Note = silent_note  # of an answer that is less than it should be; noted once
        self._connections = 0  # so far, for scores: what answers a new one may be another server
        self.checked = 0, -np.inf  # how many there were when its tokenizer was checked, and when
        self._checking = asyncio.Lock()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    # What it is

    async def connect(
        self,
        candidates: int | None = None,
        wait: float = 0.0,
        note: Note = silent_note,
        student: Tokenizer | None = None,
    ) -> None:
        """Find out what the server is, and check that it can answer for the teacher.

        Args:
            candidates: how many to ask for; None for 64, or fewer where it allows no more.
            wait: seconds to wait for a server that does not answer yet.
            note: called with what the user should know.
            student: whose tokenizer it does not have, unless the sides are swapped.

        Raises:
            XtokError: if it does not answer, is of another tokenizer, or allows too few candidates.
        """
        try:
            card = await self._card(wait, note)
            self.model = str(card.get("id") or self.tokenizer.vocabulary.model_id)
            length = card.get("max_model_len")
            self.max_model_len = length if isinstance(length, int) else None
            of_teacher = self._ids
            self._ids = replace(of_teacher, vocab_size=MAX_WIDTH)  # it may have another tokenizer
            await self._choose(candidates, note)
            checked = self._connections, asyncio.get_running_loop().time()
            await self._check_tokenizer(student, note)
            self.checked = checked
            self._ids = of_teacher
            self._note = note
        except (TeacherError, httpx.RequestError) as error:
            raise self.unusable(error) from error

    def unusable(self, error: Exception) -> XtokError:
        """Return the error of a server that gives no predictions of the teacher."""
        problem = _reason(error) if isinstance(error, httpx.RequestError) else error
        return XtokError(
            f"the teacher's server at {self.url}: {problem}",
            hint="give the address of a vLLM or SGLang server of the teacher, and the student "
            "before the teacher",
            parameter="teacher_url",
        )

    async def _card(self, wait: float, note: Note) -> dict[str, Any]:
        """Return what it says of its model; wait until it answers."""
        begin = asyncio.get_running_loop().time()
        noted_at = -np.inf
        while True:
            try:
                response = await self._sent("GET", "/v1/models", timeout=30.0)
                if response.status_code not in _BUSY:
                    break
                problem = _words(response)
            except httpx.RequestError as error:
                problem = _reason(error)
            waited = asyncio.get_running_loop().time() - begin
            if waited >= wait:
                raise TeacherError(problem)
            if waited - noted_at >= NOTE_INTERVAL:
                left = f", for at most {wait - waited:.0f} s more"
                note(f"waiting for the teacher's server at {self.url}{left}: {problem}")
                noted_at = waited
            await asyncio.sleep(min(2.0, wait))
        value = _json(response) if response.is_success else {}
        if response.status_code in (401, 403):
            raise TeacherError(f"it refuses the key: {_words(response)}")
        cards = value.get("data") if isinstance(value, dict) else None
        first = cards[0] if isinstance(cards, list) and cards else None
        return first if isinstance(first, dict) else {}

    async def differs(self, tokenizer: Tokenizer) -> str | None:
        """Return how the server's tokenizer differs from one: "" if it does not.

        None if it tells nothing that could be compared, as a server that was started without a
        tokenizer.
        """
        [ids] = tokenizer.encode_batch([PROBE])
        body = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
        response = await self._sent("POST", "/tokenize", json=body, timeout=60.0)
        value = _json(response) if response.is_success else None
        if not isinstance(value, dict) or not isinstance(value.get("tokens"), list):
            return await self._differs_in_names(tokenizer, ids)
        if self.max_model_len is None and isinstance(value.get("max_model_len"), int):
            self.max_model_len = value["max_model_len"]
        if value["tokens"] == ids:
            return ""
        return f"{len(value['tokens'])} tokens for a text of {len(ids)}, or others"

    async def _differs_in_names(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
        """Compare what the server calls the tokens of a text, where it has no /tokenize."""
        asked, route = self._format.request(self.model, ids, 1), self._format.ROUTE
        most = len(ids) * 3 * ENTRY_BYTES
        with_texts = msgspec.json.encode({**asked, "return_text_in_logprobs": True})
        try:
            response = await self.post(route, with_texts, most)
        except TeacherError as error:
            if error.is_away:
                raise
            try:  # SGLang fails at texts where it has no tokenizer (`skip_tokenizer_init`)
                await self.post(route, msgspec.json.encode(asked), most)
            except TeacherError as again:
                if again.is_request:
                    return str(again)
                raise
            return None
        self._read(response.content, ids)  # so it is what it should be
        value = _json(response)
        if value is None:  # nested too deeply
            raise TeacherError(f"{self._format.ROUTE} did not answer with JSON")
        compared = 0
        for token_id, name in zip(ids[1:], self._format.token_names(value, ids), strict=True):
            ours = tokenizer.table[token_id].decode("utf-8", "replace").strip()
            if isinstance(name, str) and "\N{REPLACEMENT CHARACTER}" not in ours + name:
                compared += bool(ours)
                if name.strip() != ours:
                    return f"its token {token_id} is {name!r}, not {ours!r}"
        return "" if compared else None

    async def _check_tokenizer(self, student: Tokenizer | None, note: Note) -> None:
        """Check that the server has the teacher's tokenizer, and not the student's."""
        problem, teacher = await self.differs(self.tokenizer), self.tokenizer.vocabulary.model_id
        if problem is None:
            note(
                f"tokenizer not checked: the server at {self.url} has no /tokenize and no texts of "
                f"tokens, so make sure that it serves {teacher}"
            )
        if not problem:
            return
        if student is not None and await self.differs(student) == "":
            raise XtokError(
                f"the sides are swapped: the server at {self.url} has the tokenizer of "
                f"{student.vocabulary.model_id}, and {teacher} was given as the teacher",
                hint="give the student first, then the teacher that the server has",
            )
        raise XtokError(
            f"the server at {self.url} has another tokenizer than {teacher}: {problem}",
            hint=f"give the model that it serves ({self.model}) as the teacher, or its address "
            "with {option}",
            parameter="teacher_url",
        )

    async def _check_again(self) -> None:
        """Check the tokenizer before an answer is used, if another server may have given it.

        A server may come back with another one between two requests, and a connection that was idle
        is then replaced without an error; behind a balancer, connections tell nothing.
        """
        async with self._checking:
            before, at = self.checked
            now = self._connections, asyncio.get_running_loop().time()
            if now[0] == before and now[1] - at < CHECK_INTERVAL:
                return
            try:
                problem = await self.differs(self.tokenizer)
            except httpx.RequestError as error:
                raise TeacherError(_reason(error), is_away=True) from error
            if problem:
                teacher = self.tokenizer.vocabulary.model_id
                raise TeacherError(f"it came back with another tokenizer than {teacher}: {problem}")
            self.checked = now

    async def _choose(self, candidates: int | None, note: Note) -> None:
        """Tell vLLM from SGLang, and find out how many candidates it gives."""
        some = [*range(min(8, len(self.tokenizer.table)))]  # ids that all vocabularies have
        wanted = DEFAULT_CANDIDATES if candidates is None else candidates
        problem = ""
        for self.kind in ("vllm", "sglang"):
            try:
                given = _widest(await self.score(some, wanted))
                break
            except TeacherError as error:
                problem = problem or str(error)
                if allowed := re.search(r"max allowed: (\d+)", str(error)):
                    given = int(allowed[1])
                    break
        else:
            raise TeacherError(f"it answers neither as vLLM nor as SGLang does: {problem}")
        self.candidates = min(wanted, given)
        if given >= min(wanted, len(self.tokenizer.table)):
            return
        if given < FEWEST or candidates is not None:
            raise XtokError(
                f"{self._gives(given)}, and {wanted} are needed",
                hint=self._format.MORE.format(max(wanted, DEFAULT_CANDIDATES)),
            )
        note(f"{self._gives(given)}: {self._format.MORE.format(DEFAULT_CANDIDATES)} for more")

    def _gives(self, candidates: int) -> str:
        return f"the server at {self.url} gives {candidates} candidates per token"

    async def problem(self) -> str:
        """Return why the server does not answer; nothing if it does."""
        try:
            response = await self._sent("GET", "/health", timeout=10.0)
        except (TeacherError, httpx.RequestError) as error:
            return _reason(error)
        return "" if response.is_success else _words(response)

    # What it says

    @property
    def _format(self) -> ModuleType:
        return _FORMATS[self.kind]

    async def score(self, ids: Sequence[int], top_k: int) -> RankedTopK:
        """Return the log-probabilities of ids, and of the best candidates of each place.

        Raises:
            TeacherError: if the server refuses the request, is away, or answers with what are no
                log-probabilities of these ids.
        """
        body = msgspec.json.encode(self._format.request(self.model, ids, top_k))
        most = len(ids) * (top_k + 2) * ENTRY_BYTES
        response = await self.post(self._format.ROUTE, body, most, is_score=True)
        if self.checked[1] >= 0:  # it has begun
            await self._check_again()
        scores = await asyncio.to_thread(self._read, response.content, ids)
        if 0 < (given := _widest(scores)) < min(top_k, len(self.tokenizer.table)):
            self._note(f"{self._gives(given)}, and was asked for {top_k}")
            self._note = silent_note
        return scores

    def _read(self, content: bytes, ids: Sequence[int]) -> RankedTopK:
        try:
            topk, ranks = self._format.read_response(content, ids)
            answer = Documents(topk, {}, ["its answer"])
            answer = check_predictions(answer, self._ids, is_answer=True)
        except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
            raise TeacherError(
                f"{self._format.ROUTE} answered without log-probabilities of the prompt: {error}"
            ) from error
        except XtokError as error:
            raise TeacherError(str(error)) from error
        return completed(RankedTopK(answer.topk, ranks), len(self.tokenizer.table))

    async def _sent(self, method: str, route: str, most: int = 0, **options: Any) -> httpx.Response:
        """Send a request; an answer may have a megabyte more than `most` bytes."""
        most += 1 << 20
        async with self._client.stream(method, route, **options) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise TeacherError(f"{route} answered with more than {most >> 20} MiB")
        wait = {"Retry-After": response.headers.get("Retry-After", "")}
        return httpx.Response(response.status_code, headers=wait, content=b"".join(parts))

    async def post(
        self, route: str, content: bytes, most: int = 0, *, is_score: bool = False
    ) -> httpx.Response:
        """Post a request, again where the server is away or too busy for a moment.

        When all pauses are over, the client gets a 502, which trainers ask again after.
        """
        for pause in (*PAUSES, None):
            try:
                async with self._places:
                    response = await self._sent(
                        "POST",
                        route,
                        most,
                        content=content,
                        headers={"Content-Type": "application/json"},
                        extensions={"trace": self.count_connection} if is_score else {},
                    )
                if response.is_success:
                    return response
                problem, wanted = _words(response), _retry_after(response)
                if response.status_code not in _BUSY:
                    is_request = response.status_code in (400, 413, 422)
                    raise TeacherError(problem, is_request=is_request)
            except httpx.TimeoutException as error:
                raise TeacherError(_reason(error), is_away=True) from error
            except httpx.RequestError as error:
                problem, wanted = _reason(error), 0.0
            if pause is None:
                break
            await asyncio.sleep(max(pause, wanted))
        raise TeacherError(problem, is_away=True)

    async def count_connection(self, event: str, about: object) -> None:
        """Count the connections that are opened; called by httpx."""
        self._connections += event == "connection.connect_tcp.complete"


def _widest(scores: RankedTopK) -> int:
    """Return how many of the best candidates a place has at most, the token itself aside."""
    sizes = np.diff(scores.topk.starts)
    return int((sizes - (scores.ranks >= sizes)).max(initial=0))


def _address(url: str) -> str:
    """Return where a server is, without a route or a password."""
    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address:
        raise XtokError(
            f"{shown} is not the address of a server",
            hint="give {option} as http://HOST:PORT",
            parameter="teacher_url",
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _words(response: httpx.Response) -> str:
    """Return what a server says of an error, and its status."""
    value = _json(response)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    text = value if isinstance(value, str) else response.text
    status = f"{response.status_code} {response.reason_phrase}"
    return f"{status}: {' '.join(text.split())[:500]}" if text.strip() else status


def _retry_after(response: httpx.Response) -> float:
    """Return how many seconds a busy server asks to wait; 0 if it does not say."""
    pause = response.headers.get("retry-after", "")
    return min(_LONGEST_PAUSE, float(pause)) if pause.isascii() and pause.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    """Return what went wrong on the way, in a line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
