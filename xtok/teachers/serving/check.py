"""Check a teacher's server, and report facts, problems and fixes."""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from xtok.config import DEFAULT_CANDIDATES
from xtok.teachers.serving.connection import TeacherError, json_of
from xtok.teachers.serving.teacher import InvalidScores, ServerFinding, ServerKind, TeacherClient
from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """Facts about a teacher's server. Facts that the server does not provide are None."""

    url: str
    kind: ServerKind | None
    version: str | None
    model: str
    max_model_len: int | None
    # per prompt token, at most 64; 0 if the server returns no log-probabilities of prompts
    candidates: int
    # difference from the teacher's tokenizer; "" if the tokenizers are equal
    tokenizer_difference: str | None
    # for prompts, according to a measurement: a value of vLLM's option --logprobs-mode
    logprobs_mode: str | None
    prefix_caching: bool | None
    findings: tuple[ServerFinding, ...]

    @property
    def failed(self) -> bool:
        """Whether `serve` would refuse to use this server."""
        return any(finding.is_fatal for finding in self.findings)


async def server_report(url: str, teacher: Tokenizer, api_key: str | None) -> ServerReport:
    """Implement `check_server`."""
    async with aclosing(TeacherClient(url, teacher, api_key=api_key)) as client:
        try:
            await client.identify()
            return await _report(client)
        except (TeacherError, httpx.RequestError) as error:
            raise client.unusable(error) from error


async def _report(client: TeacherClient) -> ServerReport:
    findings = list[ServerFinding]()
    kind: ServerKind | None = None
    candidates, difference, mode = 0, None, None
    try:
        candidates = await client.detect(DEFAULT_CANDIDATES)
        kind = client.kind
        difference = await client.difference(client.tokenizer)
        mode = await _logprobs_mode(client, min(candidates, DEFAULT_CANDIDATES))
    except InvalidScores as error:
        kind, mode = client.kind, "raw_logits"
        problem = f"the server's values are not log-probabilities: {error}"
        findings.append(ServerFinding(problem, _PROBABILITIES, is_fatal=True))
    except TeacherError as error:
        if error.is_away:
            raise
        problem = f"the server returns no log-probabilities of a prompt: {error}"
        findings.append(ServerFinding(problem, _START, is_fatal=True))
    version, prefix_caching = await _options(client, kind)
    if candidates:
        findings += client.findings(candidates, difference)
    if kind == "vllm" and candidates and prefix_caching:
        problem = "prefix caching can return outdated log-probabilities of a prompt"
        change = "start the server with --no-enable-prefix-caching"
        findings.append(ServerFinding(problem, change, is_fatal=False))
    return ServerReport(
        url=client.url,
        kind=kind,
        version=version,
        model=client.model,
        max_model_len=client.max_model_len,
        candidates=candidates,
        tokenizer_difference=difference,
        logprobs_mode=mode,
        prefix_caching=prefix_caching,
        findings=tuple(findings),
    )


_START = "serve the teacher with vLLM 0.10 or later, or with SGLang"
_PROBABILITIES = "start a vLLM server with --logprobs-mode raw_logprobs"


async def _logprobs_mode(client: TeacherClient, top_k: int) -> str:
    """Measure whether the temperature changes the log-probabilities of a prompt."""
    ids = [*range(min(64, (client.max_model_len or 65) - 1))]  # ids in every vocabulary
    first, second = [
        (await client.score(ids, top_k, temperature=temperature)).topk.realized_logprob[1:]
        for temperature in (1.0, 0.5)
    ]
    # The responses to two equal requests differ by less than 0.1.
    is_raw = bool(np.abs(first - second).mean() < 0.1)
    return "raw_logprobs" if is_raw else "processed_logprobs"


async def _options(
    client: TeacherClient, kind: ServerKind | None
) -> tuple[str | None, bool | None]:
    """Return the server's version, and whether the server caches prefixes."""
    if kind == "sglang":
        info = await _json(client, "/get_server_info")
        uncached = info.get("disable_radix_cache")
        return info.get("version"), not uncached if isinstance(uncached, bool) else None
    if kind == "vllm":
        version = (await _json(client, "/version")).get("version")
        metrics = (await client.connection.send("GET", "/metrics", max_bytes=16 << 20)).text
        pattern = r'vllm:cache_config_info\{[^}]*enable_prefix_caching="(\w+)"'
        caching = re.search(pattern, metrics)
        return version, caching[1] == "True" if caching else None
    return None, None


async def _json(client: TeacherClient, route: str) -> dict[str, Any]:
    response = await client.connection.send("GET", route, max_bytes=1 << 20)
    value = json_of(response) if response.is_success else None
    return value if isinstance(value, dict) else {}
