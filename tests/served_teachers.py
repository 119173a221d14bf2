"""A server of a small model that responds like vLLM or SGLang."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tiny_models import tiny_model

from xtok.tokenizers import Tokenizer


class TeacherServer:
    """A server with exact log-probabilities of prompts, as from vLLM 0.32 or SGLang 0.5.

    Attributes:
        requested_ids: the ids of all requests.
        status: the status of every response, if not 200.
        delay: seconds per response.
        busy: number of next requests to refuse with Retry-After.
        max_candidates: maximum number of candidates of SGLang.
        max_running: largest number of requests at one time.
        texts: False for a server without a tokenizer.
        impossible: tokens with probability 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: Literal["vllm", "sglang"] = "vllm",
        *,
        max_logprobs: int = 64,
        max_model_len: int = 2048,
        tokenizes: bool = True,
        texts: bool = True,
        seed: int = 0,
    ) -> None:
        self.tokenizer, self.kind = tokenizer, kind
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.model = tiny_model(len(tokenizer.table), seed=seed, sharp=0.6).eval()
        self.requested_ids: list[list[int]] = []
        self._cached: dict[tuple[int, ...], torch.Tensor] = {}
        self.status, self.delay = 200, 0.0
        self.max_candidates = len(tokenizer.table)
        self.texts, self.impossible = texts, set[int]()
        self.mode, self.prefix_caching = "raw_logprobs", False
        self.running = self.max_running = self.cancelled = self.busy = 0
        self.keys: set[str | None] = set()
        routes = [Route("/health", self._health), Route("/v1/models", self._models)]
        if tokenizes and texts:
            routes.append(Route("/tokenize", self._tokenize, methods=["POST"]))
        if kind == "vllm":
            routes.append(Route("/v1/completions", self._completions, methods=["POST"]))
            routes += [Route("/version", self._version), Route("/metrics", self._metrics)]
        else:
            routes.append(Route("/generate", self._generate, methods=["POST"]))
            routes.append(Route("/get_server_info", self._server_info))
        self.app = Starlette(routes=routes)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of each token after the first, `[T - 1, V]`.

        They are cached, because the last bits of a model's output may vary.
        """
        if tuple(ids) not in self._cached:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, :-1]
            self._cached[tuple(ids)] = logits.float().log_softmax(-1)
        return self._cached[tuple(ids)]

    def token_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token after the first."""
        all_of = self.logprobs(ids)
        return [float(all_of[n, i]) for n, i in enumerate(ids[1:])]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=self.status)

    async def _models(self, request: Request) -> Response:
        if self.busy:
            self.busy -= 1
            return JSONResponse({"error": {"message": "loading"}}, 503)
        card = {"id": "the-teacher", "root": "/models/teacher", "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _metrics(self, request: Request) -> Response:
        labels = f'block_size="16",enable_prefix_caching="{self.prefix_caching}",num_gpu_blocks="9"'
        return Response(f"vllm:cache_config_info{{{labels}}} 1.0\n")

    async def _server_info(self, request: Request) -> Response:
        about = {"version": "0.5.9", "disable_radix_cache": not self.prefix_caching}
        return JSONResponse(about)

    def _by_mode(self, logprobs: torch.Tensor, temperature: float) -> torch.Tensor:
        if self.mode == "raw_logits":
            return logprobs + 20
        processed = self.mode == "processed_logprobs"
        return (logprobs / temperature).log_softmax(-1) if processed else logprobs

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        [ids] = self.tokenizer.encode_batch([body["prompt"]])
        return JSONResponse({"count": len(ids), "max_model_len": 2048, "tokens": ids})

    async def scored_rows(self, request: Request, ids: list[int]) -> torch.Tensor | Response:
        self.keys.add(request.headers.get("authorization"))
        self.requested_ids.append(ids)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            for _ in range(int(self.delay * 100)):
                if await request.is_disconnected():
                    self.cancelled += 1
                    return Response(status_code=499)
                await asyncio.sleep(0.01)
            if self.status != 200:
                return JSONResponse({"error": {"message": "out of memory"}}, self.status)
            if self.busy:
                self.busy -= 1
                return Response(status_code=429, headers={"Retry-After": "1"})
            if len(ids) + 1 > self.max_model_len:
                return _refused(f"the prompt has {len(ids)} tokens")
            if max(ids) >= len(self.tokenizer.table):
                return _refused(f"Token id {max(ids)} is out of vocabulary")
            return self.logprobs(ids)
        finally:
            self.running -= 1

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        ids, top = body["prompt"], body["prompt_logprobs"]
        assert body["model"] == "the-teacher"
        assert body["max_tokens"] == 1
        if top > self.max_logprobs:
            return _refused(
                f"Requested prompt logprobs of {top}, which is greater than max allowed: "
                f"{self.max_logprobs}"
            )
        scored = await self.scored_rows(request, ids)
        if isinstance(scored, Response):
            return scored
        scored = self._by_mode(scored, body["temperature"])
        rows: list[Any] = [None]
        for own, values in zip(ids[1:], scored, strict=True):
            rank = int((values >= values[own]).sum())
            row = {str(own): self._entry(own, float(values[own]), rank)}
            best, at = values.topk(min(top, len(values)))
            for n, (value, i) in enumerate(zip(best.tolist(), at.tolist(), strict=True), 1):
                row.setdefault(str(i), self._entry(i, value, n))
            rows.append(row)
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": rows}
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    def _entry(self, token_id: int, value: float, rank: int) -> dict[str, Any]:
        name = self.tokenizer.table[token_id].decode("utf-8", "replace") if self.texts else None
        value = -9999.0 if token_id in self.impossible else value
        return {"logprob": value, "rank": rank, "decoded_token": name}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        ids, top = body["input_ids"], body["top_logprobs_num"]
        assert body["return_logprob"] is True
        assert body["logprob_start_len"] == 0
        assert body["sampling_params"]["max_new_tokens"] == 0
        scored = await self.scored_rows(request, ids)
        if isinstance(scored, Response):
            return scored
        if body.get("return_text_in_logprobs") and not self.texts:
            return Response("Internal Server Error", 500)
        own: list[Any] = [[None, ids[0], None]]
        best: list[Any] = [None]
        for i, values in zip(ids[1:], scored, strict=True):
            name = self.tokenizer.table[i].decode("utf-8", "replace")
            value = None if i in self.impossible else float(values[i])
            own.append([value, i, name if body.get("return_text_in_logprobs") else None])
            some = values.topk(min(top, self.max_candidates))
            pairs = zip(some.values.tolist(), some.indices.tolist(), strict=True)
            best.append([[None if j in self.impossible else v, j, None] for v, j in pairs])
        meta = {"prompt_tokens": len(ids), "input_token_logprobs": own, "input_top_logprobs": best}
        return JSONResponse({"text": "", "meta_info": meta})


def _refused(message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": error}, 400)
