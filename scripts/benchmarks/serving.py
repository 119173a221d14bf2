"""`xtok serve`: student tokens per second and core, compared with the teacher's own server.

The teacher's server returns stored predictions of an n-gram model, so no time is spent on a model.
xtok's server runs on a separate core; the teacher's server and the clients share the others.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import xtok
from benchmarks.harness import Row, chosen, path_of, pieces, tokenizer
from benchmarks.ngrams import ORDER, NGrams, stored
from xtok.building.build import build
from xtok.config import BACK_MAP, ServeConfig
from xtok.teachers.formats.ranked import RankedTopK
from xtok.teachers.serving.server import bound, score
from xtok.teachers.serving.teacher import PROBE
from xtok.teachers.translator import SharedText, Translator

PAIRS = (("llama3", "qwen"), ("qwen", "llama3"))
K, AT_ONCE, CHARACTERS = 64, 64, 3000


def serving(options: Namespace) -> Iterator[Row]:
    """Measure the projection alone, then with JSON, and the teacher's own server.

    `--size` scales the texts and the number of requests. The last quarter of the requests must not
    increase the memory.
    """
    texts = pieces(options, CHARACTERS)
    some = texts[: max(8, int(24 * options.size))]
    for label, names in chosen(PAIRS, options):
        pair = xtok.load_pair(*map(tokenizer, names))
        student, teacher = pair.tokenizers
        translator = Translator(pair, build(pair.reversed, config=BACK_MAP), num_threads=1)
        rows = [student.encode(text).ids.tolist() for text in some]
        spelled = [translator.from_student_ids(row) for row in rows]
        model = NGrams(teacher.library_arrays(texts[len(texts) // 4 :]))
        responses = [_response(one.teacher_ids, model) for one in spelled]
        score(translator, spelled[0], responses[0], K)  # compiles
        row: Row = {"student ← teacher": label, "tokens": sum(map(len, rows))}
        row |= {"first time /s": _alone(translator, spelled, responses)}
        row |= {"again": _alone(translator, spelled, responses)}
        translator = None  # type: ignore[assignment]
        yield row | _served(names, pair, rows, spelled, responses, options)


def _response(ids: NDArray[np.int32], model: NGrams) -> RankedTopK:
    """Return the n-gram model's predictions for a sequence, except for its first token."""
    before = {j: ids[max(0, j - ORDER + 1) : j].tolist() for j in range(1, len(ids))}
    rows = {j: model.prediction(context, K) for j, context in before.items()}
    topk = stored(ids, np.array([0, len(ids)]), rows, K)
    rest = topk.rest_logprob - np.log(2, dtype=np.float32)
    own = np.where(np.isnan(topk.realized_logprob), rest, topk.realized_logprob)
    return RankedTopK(topk._replace(realized_logprob=own), np.ones(len(ids), np.int64))


def _alone(translator: Translator, spelled: list[SharedText], responses: list[RankedTopK]) -> float:
    start = time.process_time()
    for text, response in zip(spelled, responses, strict=True):
        score(translator, text, response, K)
    return sum(len(one.ids) for one in spelled) / (time.process_time() - start)


def _served(
    names: tuple[str, str], pair: xtok.Pair, rows: list[list[int]], spelled: list[SharedText],
    responses: list[RankedTopK], options: Namespace,
) -> Row:  # fmt: skip
    """Ask a server of the pair, and the teacher's own, 64 requests at once."""
    bodies = {
        tuple(one.teacher_ids.tolist()): _json(a) for one, a in zip(spelled, responses, strict=True)
    }
    theirs, ours = bound("127.0.0.1", 0), bound("127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{opened.getsockname()[1]}" for opened in (theirs, ours)]
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_teacher, args=(theirs, pair.tokenizers[1], bodies), daemon=True)
    ours.close()  # before a fork, which would keep its port
    other.start()
    one = context.Process(target=_student, args=(names, *urls), daemon=True)
    one.start()
    turns = max(2, int(4 * options.size))
    try:
        direct = asyncio.run(_ask(urls[0], [list(ids) for ids in bodies], 1))[0]
        asyncio.run(_ask(urls[1], rows, 1))
        seconds, memory = [], []
        for _ in range(4):
            taken, cpu = asyncio.run(_ask(urls[1], rows, turns, one.pid))
            seconds.append(cpu or taken)
            memory.append(_resident(one.pid))
    finally:
        for process in (one, other):
            process.kill()
    count = turns * sum(map(len, rows))
    return {
        "with JSON": 4 * count / sum(seconds), "asked": 4 * count,
        "the teacher's own server": sum(map(len, bodies)) / direct,
        "MiB, quarter by quarter": " ".join(f"{size / 2**20:.0f}" for size in memory),
    }  # fmt: skip


def _json(response: RankedTopK) -> bytes:
    """Return a response as vLLM writes it."""
    topk, own = response.topk, response.topk.realized_logprob.tolist()
    starts, ids, values = topk.starts.tolist(), topk.ids.tolist(), topk.logprobs.tolist()
    rows: list[Any] = [None]
    for n, token in enumerate(topk.token_ids.tolist()[1:], 1):
        span = range(starts[n], starts[n + 1])
        row = {str(token): {"logprob": own[n], "rank": K + 1, "decoded_token": "x"}}
        row |= {
            str(ids[i]): {"logprob": values[i], "rank": rank, "decoded_token": "x"}
            for rank, i in enumerate(span, 1)
        }
        rows.append(row)
    return json.dumps({"choices": [{"index": 0, "prompt_logprobs": rows}]}).encode()


def _teacher(opened: Any, teacher: xtok.Tokenizer, bodies: dict[tuple[int, ...], bytes]) -> None:
    """Respond from memory; a sequence that is not there has the candidates 0 to 63 everywhere."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:] or [0])

    async def completions(request: Request) -> Response:
        ids = (await request.json())["prompt"]
        if tuple(ids) in bodies:
            return Response(bodies[tuple(ids)], media_type="application/json")
        row = {str(i): {"logprob": -5.0, "rank": i + 1} for i in range(K)}
        rows = [None, *({str(i): {"logprob": -5.0, "rank": 1}} | row for i in ids[1:])]
        return JSONResponse({"choices": [{"prompt_logprobs": rows}]})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": teacher.encode_batch([PROBE])[0]})

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "teacher"}]})

    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    asyncio.run(server.serve([opened]))


def _student(names: tuple[str, str], teacher_url: str, url: str) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    pair = xtok.load_pair(*(str(path_of(name)) for name in names))
    config = ServeConfig(port=int(url.rpartition(":")[2]))
    back_map = xtok.get_map(pair.reversed, config=BACK_MAP)
    xtok.serve(pair, teacher_url, config, back_map=back_map)


async def _ask(
    url: str, rows: list[list[int]], turns: int, pid: int | None = None
) -> tuple[float, float]:
    """Request all rows several times, 64 concurrently; return wall-clock and process seconds."""
    async with httpx.AsyncClient(timeout=600) as client:
        for _ in range(6000):
            try:
                await client.get(f"{url}/v1/models")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        left = [row for _ in range(turns) for row in rows]
        start, cpu = time.perf_counter(), _cpu(pid)

        async def work() -> None:
            while left:
                body = {"model": "teacher", "prompt": left.pop(), "prompt_logprobs": K}
                (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return time.perf_counter() - start, _cpu(pid) - cpu


def _cpu(pid: int | None) -> float:
    """Return the seconds of a core that a process has taken."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int | None) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
