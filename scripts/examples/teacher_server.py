"""Serve a teacher's predictions as vLLM would, from a file or from a model.

    xtok project teacher.parquet STUDENT TEACHER --to vllm -o student.jsonl
    python scripts/examples/teacher_server.py student.jsonl --port 8000

TRL's trainers with a served teacher (`ServerDistillationTrainer`, `AsyncDistillationTrainer`) use
this address; the responses contain the ids of the student. The file must contain every requested
sequence, so use this for training on a fixed data set.

    python scripts/examples/teacher_server.py data/models/gemma3-270m --port 8000

A model folder is served with Transformers. Use the address for `xtok serve`, or store the responses
(with `return_token_ids`) as JSON Lines for `xtok project`. The server supports GET /health, GET
/v1/models and POST /v1/completions, on this machine only.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import torch

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Read the lines that `xtok project --to vllm` has written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Responses(Protocol):
    """Source of the predictions for prompts."""

    model: str

    def of(self, prompt: list[int], top: int) -> Line:
        """Return the choice of a prompt, with `top` candidates; LookupError if it is not known."""


class StoredResponses:
    """Choices of the sequences that are in a file."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.model: str = lines[0]["model"]
        choices = [choice for line in lines for choice in line["choices"]]
        self._choice_of = {tuple(choice["prompt_token_ids"]): choice for choice in choices}

    def of(self, prompt: list[int], top: int) -> Line:
        """Return the choice of a sequence that is in the file."""
        choice = self._choice_of[tuple(prompt)]
        rows = [
            row and {i: e for i, e in row.items() if e["rank"] <= top or i == str(own)}
            for own, row in zip(prompt, choice["prompt_logprobs"], strict=True)
        ]
        return {**choice, "prompt_logprobs": rows}


class ModelResponses:
    """Predictions of a causal language model, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = folder.name
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._one_at_a_time = threading.Lock()

    @torch.no_grad()
    def of(self, prompt: list[int], top: int) -> Line:
        """Return the log-probabilities of a prompt's tokens after the first."""
        with self._one_at_a_time:
            logits = self._model(input_ids=torch.tensor([prompt])).logits[0, :-1]
        logprobs = logits.log_softmax(-1)
        rows: list[Line | None] = [None]
        best = zip(*(found.tolist() for found in logprobs.topk(top)), strict=True)
        for own, values, (best_values, ids) in zip(prompt[1:], logprobs, best, strict=True):
            rank = 1 + int((values > values[own]).sum())
            row = {str(own): {"logprob": float(values[own]), "rank": rank}}
            for n, (token_id, value) in enumerate(zip(ids, best_values, strict=True), start=1):
                row.setdefault(str(token_id), {"logprob": value, "rank": n})
            rows.append(row)
        return {"prompt_logprobs": rows}


def completion(responses: Responses, request: Line) -> Line:
    """Respond to a request with sequences of ids; LookupError for an unknown sequence."""
    prompts = request["prompt"]
    prompts = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    top = request.get("prompt_logprobs") or 0
    choices = [{**responses.of(prompt, top), "index": n} for n, prompt in enumerate(prompts)]
    if request.get("return_token_ids"):
        for choice, prompt in zip(choices, prompts, strict=True):
            choice["prompt_token_ids"] = prompt
    return {"object": "text_completion", "model": responses.model, "choices": choices}


def server(responses: Responses, port: int = 0) -> ThreadingHTTPServer:
    """Return a server on this machine; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/health": {}, "/v1/models": {"data": [{"id": responses.model}]}}
            self._respond(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/completions":
                return self._respond(404, {})
            try:
                self._respond(200, completion(responses, json.loads(body)))
            except (LookupError, TypeError, ValueError):
                self._respond(400, {"error": {"message": "a sequence that is not known here"}})

        def _respond(self, code: int, value: Line) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextmanager
def serving(responses: Responses) -> Iterator[str]:
    """Serve in another thread, and yield the address."""
    with server(responses) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a file or a model until it is interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = "what xtok project --to vllm has written, or a model's folder"
    parser.add_argument("source", type=Path, help=what)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    source: Path = options.source
    try:
        responses = ModelResponses(source) if source.is_dir() else StoredResponses(read(source))
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"error: {source} is not {what}: {' '.join(str(error).split())[:200]}")
    try:
        made = server(responses, options.port)
    except OSError as error:
        sys.exit(f"error: port {options.port}: {error.strerror}; give another with --port")
    print(f"http://127.0.0.1:{made.server_address[1]}", flush=True)
    made.serve_forever()


if __name__ == "__main__":
    main()
