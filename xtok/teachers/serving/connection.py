"""HTTP connection to the teacher's server, with proxies, time limits and retries."""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from xtok._lib.parsing import parse_json
from xtok._lib.progress import Note, silent_note
from xtok.errors import XtokError

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait between attempts. A server behind a load balancer needs time to restart."""

SHORT_SECONDS, SCORE_SECONDS = 30.0, 3600.0
"""Time limits in seconds for a whole response. For scores, the limit includes the time in the
server's queue."""

NOTE_INTERVAL = 30.0
"""Seconds between two notes while waiting for the server to start."""

_LONGEST_PAUSE = 60.0
"""Maximum pause in seconds, even if Retry-After is longer, because trainers have time limits."""

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 422)


class TeacherError(Exception):
    """The teacher's server did not return log-probabilities.

    Attributes:
        is_request: whether the server rejected the request as invalid.
        is_away: whether the server does not respond, or is too busy.
    """

    def __init__(self, message: str, *, is_request: bool = False, is_away: bool = False) -> None:
        super().__init__(message)
        self.is_request, self.is_away = is_request, is_away


class Connection:
    """HTTP connections to the teacher's server.

    Args:
        url: the address of the server. `http://` and a final `/v1` are optional.
        api_key: sent as a Bearer token.
        concurrency: maximum number of simultaneous `post` requests.

    Raises:
        XtokError: if the address or the proxy is not usable.
    """

    def __init__(self, url: str, *, api_key: str | None = None, concurrency: int = 64) -> None:
        base = _parse(url)
        self.url = _without_password(base)  # address for messages, including the proxy
        self.note: Note = silent_note
        # number of connections opened for scores; a new connection can reach another server
        self.opened = 0
        self._slots = asyncio.Semaphore(concurrency)
        self._is_away = False
        proxy = _proxy_for(base)
        if proxy:
            self.url += f" (proxy: {_without_password(proxy)})"
        try:
            self._client = httpx.AsyncClient(
                base_url=base,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(None, connect=SHORT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
                proxy=proxy,
                trust_env=False,  # httpx fails if NO_PROXY contains networks
                verify=httpx.create_ssl_context(),  # uses SSL_CERT_FILE, if set
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # SOCKS without socksio
            problem = f"the teacher's server at {self.url}: {error}"
            hint = "add the server to NO_PROXY, or set another proxy"
            raise XtokError(problem, hint=hint) from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def send(
        self,
        method: str,
        route: str,
        *,
        seconds: float = SHORT_SECONDS,
        max_bytes: int = 0,
        **options: Any,
    ) -> httpx.Response:
        """Send a request, and read the whole response, at most `max_bytes` plus 1 MiB.

        Raises:
            httpx.RequestError: if the server does not respond in time.
            TeacherError: if the response is too large.
        """
        limit = max_bytes + (1 << 20)
        content = bytearray()
        try:
            async with (
                asyncio.timeout(seconds),  # also ends endless responses with status 100 Continue
                self._client.stream(method, route, **options) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > limit:
                        raise TeacherError(f"{route} returned more than {limit >> 20} MiB")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete response in {seconds:g} seconds") from error
        wait = {"Retry-After": response.headers.get("Retry-After", "")}
        return httpx.Response(response.status_code, headers=wait, content=bytes(content))

    async def first_response(self, route: str, wait: float, note: Note) -> httpx.Response:
        """Repeat a request until the server responds, for at most `wait` seconds."""
        started_at, noted_at = asyncio.get_running_loop().time(), -NOTE_INTERVAL
        while True:
            try:
                response = await self.send("GET", route)
                if response.status_code not in BUSY:
                    return response
                problem = problem_of(response)
            except httpx.RequestError as error:
                problem = reason(error)
            waited = asyncio.get_running_loop().time() - started_at
            if waited >= wait:
                raise TeacherError(problem)
            if waited - noted_at >= NOTE_INTERVAL:
                left = f", for at most {wait - waited:.0f} s more"
                note(f"waiting for the teacher's server at {self.url}{left}: {problem}")
                noted_at = waited
            await asyncio.sleep(min(2.0, wait))

    async def post(
        self, route: str, content: bytes, max_bytes: int = 0, *, is_score: bool = False
    ) -> bytes:
        """Post JSON, and return the body of the response.

        The request is repeated if the server is too busy, or if the connection fails, but not after
        a timeout.

        Raises:
            TeacherError: if the server refuses the request, or does not respond.
        """
        for pause in (*PAUSES, None):
            try:
                async with self._slots:
                    response = await self.send(
                        "POST",
                        route,
                        seconds=SCORE_SECONDS,
                        max_bytes=max_bytes,
                        content=content,
                        headers={"Content-Type": "application/json"},
                        extensions={"trace": self.count_connection} if is_score else {},
                    )
            except httpx.TimeoutException as error:
                raise self._away(reason(error)) from error
            except httpx.RequestError as error:
                away, wait = self._away(reason(error)), 0.0
            else:
                if response.status_code not in BUSY:
                    self._note_state("responds again", is_away=False)
                    if response.is_success:
                        return response.content
                    is_request = response.status_code in REFUSED
                    raise TeacherError(problem_of(response), is_request=is_request)
                away, wait = TeacherError(problem_of(response), is_away=True), _wait(response)
            if pause is not None:
                await asyncio.sleep(max(pause, wait))
        raise self._away(str(away))

    def _away(self, problem: str) -> TeacherError:
        self._note_state(f"does not respond: {problem}", is_away=True)
        return TeacherError(problem, is_away=True)

    def _note_state(self, state: str, *, is_away: bool) -> None:
        if is_away != self._is_away:
            self._is_away = is_away
            self.note(f"the teacher's server at {self.url} {state}")

    async def count_connection(self, event: str, info: object) -> None:
        """Count new connections. Called by httpx."""
        self.opened += event == "connection.connect_tcp.complete"


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address, which only this machine can reach."""
    return host in ("", "::1", "localhost") or host.startswith("127.")


def json_of(response: httpx.Response) -> Any:
    """Return the JSON value of a response, or None if the response is not JSON."""
    with suppress(ValueError):
        return parse_json(response.content)
    return None


def problem_of(response: httpx.Response) -> str:
    """Return the status and message of an error response."""
    value = json_of(response)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    text = value if isinstance(value, str) else response.text
    status = f"{response.status_code} {response.reason_phrase}"
    return f"{status}: {' '.join(text.split())[:500]}" if text.strip() else status


def reason(error: Exception) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _wait(response: httpx.Response) -> float:
    seconds = response.headers.get("retry-after", "")
    return min(_LONGEST_PAUSE, float(seconds)) if seconds.isascii() and seconds.isdecimal() else 0.0


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
        has_more = bool(parsed.query or parsed.fragment)
        is_port = parsed.port is None or 0 < parsed.port < 1 << 16
        is_address = parsed.scheme in ("http", "https") and parsed.host and is_port
    except httpx.InvalidURL:
        is_address = has_more = False
    if not is_address or has_more:
        problem = f"{url.rpartition('@')[2]} is not the address of a server"
        hint = "give {option} as http://HOST:PORT" + ", without a query" * has_more
        raise XtokError(problem, hint=hint, parameter="teacher_url")
    return parsed.copy_with(path=parsed.path.rstrip("/").removesuffix("/v1") or "/")


def _without_password(url: httpx.URL | str) -> str:
    scheme, _, rest = str(url).partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}".rstrip("/")


def _proxy_for(url: httpx.URL) -> str | None:
    """Return the proxy that the environment defines for an address, if any.

    `NO_PROXY` can contain networks.
    """
    proxies = getproxies()
    excluded = map(str.strip, proxies.get("no", "").split(","))
    if is_loopback(url.host) or proxy_bypass(url.host) or any(_in(url.host, e) for e in excluded):
        return None
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _in(host: str, network: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    return False
