"""Client for the teacher's server (vLLM or SGLang): tokenizer, limits and scores."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import httpx
import msgspec
import numpy as np

from xtok._lib.progress import Note, silent_note
from xtok.config import DEFAULT_CANDIDATES, MIN_CANDIDATES
from xtok.errors import MALFORMED, XtokError
from xtok.teachers.formats import sglang, vllm
from xtok.teachers.formats.checks import check_predictions
from xtok.teachers.formats.documents import Documents
from xtok.teachers.formats.ranked import RankedTopK, completed
from xtok.teachers.serving.connection import Connection, TeacherError, json_of, problem_of, reason
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import MAX_WIDTH

ServerKind: TypeAlias = Literal["vllm", "sglang"]


class ServerFormat(Protocol):
    """A module that writes requests for one kind of server, and reads its responses."""

    ROUTE: str
    MORE: str  # advice if a server returns too few candidates; {} stands for the required number
    TOKENIZER: str  # the server's option that selects the tokenizer

    def request(
        self, model: str, ids: Sequence[int], top_k: int, temperature: float = 1.0, /
    ) -> dict[str, Any]:
        """Return the body of a request for `top_k` candidates for each id in `ids`."""

    def read_response(self, content: bytes, ids: Sequence[int], /) -> RankedTopK:
        """Read the server's response for `ids`. Check the types, but not the values."""

    def token_texts(self, value: Any, ids: Sequence[int], /) -> list[Any]:
        """Return the texts of all tokens except the first, from a valid response."""


_FORMATS: dict[ServerKind, ServerFormat] = {"vllm": vllm, "sglang": sglang}

CHECK_INTERVAL = 60.0
"""Seconds after which the server's tokenizer is checked again."""

ENTRY_BYTES = 512
"""Maximum average number of bytes per candidate in a response. vLLM needs 80, and SGLang fewer."""

PROBE = (
    "In 2014, 3,141 people said: “It's été — naïve!”\n\tdef f(x):  return x ** 2  # 東京で\r\n"
    "Привет, мир… 🙂 <b>&amp;</b> camelCase SHOUTING snake_case 0x7f"
)
"""A text that each family of tokenizers splits differently."""


class InvalidScores(TeacherError):
    """A response contains values that are not log-probabilities."""


@dataclass(frozen=True)
class ServerFinding:
    """A problem with a teacher's server, and the change that solves the problem."""

    problem: str
    change: str  # names the server's option, if an option solves the problem
    is_fatal: bool  # whether `serve` refuses the server


class TeacherClient:
    """A client for the teacher's server. For the arguments, see `Connection`."""

    kind: ServerKind
    model: str
    max_model_len: int | None = None
    candidates = DEFAULT_CANDIDATES

    def __init__(
        self, url: str, tokenizer: Tokenizer, *, api_key: str | None = None, concurrency: int = 64
    ) -> None:
        self.connection = Connection(url, api_key=api_key, concurrency=concurrency)
        self.url, self.tokenizer = self.connection.url, tokenizer
        self._is_connected = self._has_noted_fewer = False
        self._allows_any_id = False  # True from `identify` until the tokenizers are compared
        self.last_check = 0, -np.inf  # number of opened connections, and time, at the last check
        self._checking = asyncio.Lock()

    async def aclose(self) -> None:
        """Close the connections."""
        await self.connection.aclose()

    async def connect(
        self,
        candidates: int | None = None,
        wait: float = 0.0,
        note: Note = silent_note,
        student: Tokenizer | None = None,
    ) -> None:
        """Identify the server, and check that the server runs the teacher.

        Args:
            candidates: the number of candidates per token to request; None uses 64, or a lower
                limit of the server.
            wait: seconds to wait for a server that does not respond yet.
            note: called with notes for the user.
            student: the student's tokenizer, to detect that the student and teacher were swapped.

        Raises:
            XtokError: if the server does not respond, has a different tokenizer, or allows too few
                candidates.
        """
        try:
            await self.identify(wait, note)
            wanted = DEFAULT_CANDIDATES if candidates is None else candidates
            allowed = await self.detect(wanted)
            self.candidates = min(wanted, allowed)
            last_check = self.connection.opened, asyncio.get_running_loop().time()
            difference = await self.difference(self.tokenizer)
            if difference and student is not None and await self.difference(student) == "":
                raise XtokError(
                    f"the sides are swapped: the server at {self.url} has the tokenizer of "
                    f"{student.vocabulary.model_id}, but the teacher is "
                    f"{self.tokenizer.vocabulary.model_id}",
                    hint="give the student first, then the model that the server serves",
                )
            for finding in self.findings(allowed, difference, candidates):
                if finding.is_fatal:
                    problem = f"the teacher's server at {self.url}: {finding.problem}"
                    raise XtokError(problem, hint=finding.change)
                note(f"the teacher's server at {self.url}: {finding.problem}; {finding.change}")
            self.last_check, self._allows_any_id = last_check, False
            self._is_connected, self.connection.note = True, note
        except (TeacherError, httpx.RequestError) as error:
            raise self.unusable(error) from error

    def unusable(self, error: Exception) -> XtokError:
        """Return the error for a server that cannot be used."""
        problem = reason(error) if isinstance(error, httpx.RequestError) else error
        return XtokError(
            f"the teacher's server at {self.url}: {problem}",
            hint="pass the address of the teacher's vLLM or SGLang server, and the student before "
            "the teacher",
            parameter="teacher_url",
        )

    async def identify(self, wait: float = 0.0, note: Note = silent_note) -> None:
        """Wait until the server responds, and read the model's name and context length.

        Raises:
            TeacherError: if the server does not respond in time, or refuses the key.
        """
        response = await self.connection.first_response("/v1/models", wait, note)
        if response.status_code in (401, 403):
            raise TeacherError(f"the server rejects the key: {problem_of(response)}")
        value: Any = json_of(response) if response.is_success else None
        try:
            card = dict(value["data"][0])
        except MALFORMED:
            card = {}
        self.model = str(card.get("id") or self.tokenizer.vocabulary.model_id)
        length = card.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        self._allows_any_id = True  # the server can have more ids than the local tokenizer

    async def difference(self, tokenizer: Tokenizer) -> str | None:
        """Compare the server's tokenizer with a local tokenizer.

        If the response contains the context length of the server, set `max_model_len`.

        Returns:
            the difference, "" if the tokenizers are equal, or None if the server provides nothing
            to compare.
        """
        [ids] = tokenizer.encode_batch([PROBE])
        body = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
        response = await self.connection.send("POST", "/tokenize", json=body)
        value = json_of(response) if response.is_success else None
        if not isinstance(value, dict) or not isinstance(value.get("tokens"), list):
            return await self._text_difference(tokenizer, ids)
        if self.max_model_len is None and isinstance(value.get("max_model_len"), int):
            self.max_model_len = value["max_model_len"]
        if value["tokens"] == ids:
            return ""
        return (
            f"the server splits a text into {len(value['tokens'])} tokens, but {len(ids)} "
            "different tokens were expected"
        )

    async def _text_difference(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
        """Compare the texts of the tokens in a server's response with a local tokenizer."""
        request, max_bytes = self.format.request(self.model, ids, 1), len(ids) * 3 * ENTRY_BYTES

        async def response(**options: Any) -> bytes:
            body = msgspec.json.encode({**request, **options})
            return await self.connection.post(self.format.ROUTE, body, max_bytes)

        try:
            content = await response(return_text_in_logprobs=True)
        except TeacherError as error:
            if error.is_away:
                raise
            try:
                await response()
            except TeacherError as refusal:
                if refusal.is_request:  # the server refuses the ids
                    return str(refusal)
                raise
            return None  # SGLang without a tokenizer fails only if texts are requested
        self._parse(content, ids)
        texts = self.format.token_texts(msgspec.json.decode(content), ids)
        compared = 0
        for token_id, text in zip(ids[1:], texts, strict=True):
            expected = tokenizer.table[token_id].decode("utf-8", "replace").strip()
            if isinstance(text, str) and "\N{REPLACEMENT CHARACTER}" not in expected + text:
                compared += bool(expected)
                if text.strip() != expected:
                    return f"the server's token {token_id} is {text!r}, not {expected!r}"
        return "" if compared else None

    def findings(
        self, allowed: int, difference: str | None, wanted: int | None = None
    ) -> Iterator[ServerFinding]:
        """Yield a finding for too few candidates, and for a wrong or unchecked tokenizer."""
        teacher, form = self.tokenizer.vocabulary.model_id, self.format
        expected = DEFAULT_CANDIDATES if wanted is None else wanted
        if allowed < min(expected, len(self.tokenizer.table)):
            yield ServerFinding(
                f"the server returns at most {allowed} candidates per token, expected {expected}",
                form.MORE.format(max(expected, DEFAULT_CANDIDATES)),
                is_fatal=allowed < MIN_CANDIDATES or wanted is not None,
            )
        if difference:
            yield ServerFinding(
                f"the server has a different tokenizer than {teacher}: {difference}",
                f"start the server with {form.TOKENIZER} {teacher}, or use {self.model} as teacher",
                is_fatal=True,
            )
        elif difference is None:
            yield ServerFinding(
                "the tokenizer was not checked, because the server does not provide it",
                f"start the server without --skip-tokenizer-init, or check that it runs {teacher}",
                is_fatal=False,
            )

    async def _check_again(self) -> None:
        """Check the tokenizer again if a different server could have sent the last score.

        A new connection can lead to a different server. A load balancer can also switch to a
        different server without a new connection, so a check is valid for `CHECK_INTERVAL` seconds.
        """
        async with self._checking:
            before, at = self.last_check
            now = self.connection.opened, asyncio.get_running_loop().time()
            if now[0] == before and now[1] - at < CHECK_INTERVAL:
                return
            try:
                problem = await self.difference(self.tokenizer)
            except httpx.RequestError as error:
                raise TeacherError(reason(error), is_away=True) from error
            if problem:
                teacher = self.tokenizer.vocabulary.model_id
                problem = f"the server now has a different tokenizer than {teacher}: {problem}"
                raise TeacherError(problem)
            self.last_check = now

    async def detect(self, wanted: int) -> int:
        """Detect the kind of the server, and return the server's limit of candidates per token.

        Raises:
            TeacherError: if the server returns no log-probabilities of a prompt.
            InvalidScores: if the server returns values that are not log-probabilities.
        """
        ids = [*range(min(8, len(self.tokenizer.table)))]  # every vocabulary has ids 0 to 7
        problem = ""
        for self.kind in ("vllm", "sglang"):
            try:
                return _widest(await self.score(ids, wanted))
            except InvalidScores:
                raise
            except TeacherError as error:
                problem = problem or str(error)
                if limit := re.search(r"max allowed: (\d+)", str(error)):
                    return int(limit[1])
        raise TeacherError(f"the server responds neither like vLLM nor like SGLang: {problem}")

    async def problem(self) -> str:
        """Return the reason why the server is not healthy, or "" for a healthy server."""
        try:
            response = await self.connection.send("GET", "/health")
        except (TeacherError, httpx.RequestError) as error:
            return reason(error)
        return "" if response.is_success else problem_of(response)

    @property
    def format(self) -> ServerFormat:
        """The module that reads and writes the server's format."""
        return _FORMATS[self.kind]

    async def score(self, ids: Sequence[int], top_k: int, temperature: float = 1.0) -> RankedTopK:
        """Return the log-probability of each id, and the `top_k` best candidates at its position.

        Raises:
            TeacherError: if the server does not return log-probabilities for `ids`.
        """
        body = msgspec.json.encode(self.format.request(self.model, ids, top_k, temperature))
        max_bytes = len(ids) * (top_k + 2) * ENTRY_BYTES
        content = await self.connection.post(self.format.ROUTE, body, max_bytes, is_score=True)
        if self._is_connected:
            await self._check_again()
        scores = await asyncio.to_thread(self._parse, content, ids)
        size = _widest(scores)
        is_short = 0 < size < min(top_k, len(self.tokenizer.table))
        if is_short and self._is_connected and not self._has_noted_fewer:
            self._has_noted_fewer = True
            problem = f"the server returns {size} candidates per token, but {top_k} were requested"
            self.connection.note(f"the teacher's server at {self.url}: {problem}")
        return scores

    def _parse(self, content: bytes, ids: Sequence[int]) -> RankedTopK:
        try:
            topk, ranks = self.format.read_response(content, ids)
        except (msgspec.MsgspecError, XtokError, *MALFORMED) as error:
            raise TeacherError(
                f"{self.format.ROUTE} returned no log-probabilities of the prompt: {error}"
            ) from error
        documents = Documents(topk, {}, ["its response"])
        vocabulary = replace(self.tokenizer.vocabulary, table=None)  # unused ids are valid
        if self._allows_any_id:
            vocabulary = replace(vocabulary, vocab_size=MAX_WIDTH)
        try:
            response = check_predictions(documents, vocabulary, is_response=True)
        except XtokError as error:
            raise InvalidScores(str(error)) from error
        return completed(RankedTopK(response.topk, ranks), len(self.tokenizer.table))


def _widest(scores: RankedTopK) -> int:
    """Return the largest number of candidates in a row, not counting an appended text token."""
    sizes = np.diff(scores.topk.starts)
    return int((sizes - (scores.ranks >= sizes)).max(initial=0))
