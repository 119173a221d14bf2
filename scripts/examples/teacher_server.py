"""Serve predictions from a file as vLLM would: a student reads its teacher through any client.

    xtok project teacher.parquet STUDENT TEACHER --to vllm -o student.jsonl
    python scripts/examples/teacher_server.py student.jsonl --port 8000

TRL's trainers with a served teacher (`ServerDistillationTrainer`, `AsyncDistillationTrainer`) take
the address as their teacher's: the answers have the student's own ids. Only sequences that are in
the file can be asked for, so this is for training on the text that the teacher has seen. It answers
GET /health, GET /v1/models and POST /v1/completions, on this machine only.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Read the lines that `xtok project --to vllm` has written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Answers:
    """What a server knows: a choice for each sequence of ids."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.model = lines[0]["model"]
        choices = [choice for line in lines for choice in line["choices"]]
        self._choice_of = {tuple(choice["prompt_token_ids"]): choice for choice in choices}

    def completion(self, request: Line) -> Line:
        """Answer a request with one sequence of ids, or several; KeyError for an unknown one."""
        prompts = request["prompt"]
        prompts = [prompts] if prompts and isinstance(prompts[0], int) else prompts
        top = request.get("prompt_logprobs") or 0
        choices = [
            {**choice, "index": n, "prompt_logprobs": [
                row and {i: e for i, e in row.items() if e["rank"] <= top or i == str(own)}
                for own, row in zip(prompt, choice["prompt_logprobs"], strict=True)
            ]}
            for n, prompt in enumerate(prompts)
            for choice in [self._choice_of[tuple(prompt)]]
        ]  # fmt: skip
        return {"object": "text_completion", "model": self.model, "choices": choices}


def server(lines: Sequence[Line], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of these lines on this machine; port 0 takes a free one."""
    answers = Answers(lines)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/health": {}, "/v1/models": {"data": [{"id": answers.model}]}}
            self._answer(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                self._answer(200, answers.completion(json.loads(body)))
            except KeyError:
                self._answer(400, {"error": {"message": "a sequence that is not in the file"}})

        def _answer(self, code: int, value: Line) -> None:
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
def serving(lines: Sequence[Line]) -> Iterator[str]:
    """Serve lines in another thread, and yield the address."""
    with server(lines) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a file until it is interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what xtok project --to vllm has written")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    made = server(read(options.file), options.port)
    print(f"http://127.0.0.1:{made.server_address[1]}", flush=True)
    made.serve_forever()


if __name__ == "__main__":
    main()
