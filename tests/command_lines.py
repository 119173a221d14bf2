"""Command lines of tests: programs, arguments, and input files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_python(code: str, *args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a new process."""
    command = [sys.executable, "-c", code, *map(str, args)]
    settings = {"capture_output": True, "text": True, "check": False, **options}
    result: subprocess.CompletedProcess[str] = subprocess.run(command, **settings)
    return result


def two_files(small: Path) -> list[str]:
    """Return the files of two tokenizers that load quickly."""
    model = str(small / "small.model")
    return ["--student-model", model, "--teacher-model", model]


LAZY_PACKAGES = [
    *("torch", "transformers", "numba", "sentencepiece", "tiktoken", "tokenizers"),
    *("starlette", "uvicorn", "httpx", "msgspec", "prometheus_client"),
]


def write_documents(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return path


PAIR = ["--student-model", "small.model", "--teacher-model", "bytes"]
EXAMPLE_ARGUMENTS: dict[str, Sequence[str]] = {
    "build": [*PAIR, "-o", "map.safetensors"],
    "inspect": ["map.safetensors"],
    "verify": ["map.safetensors", *PAIR],
    "convert": ["map.safetensors", "-o", "map.pt"],
    "doctor": ["small.model"],
    "evaluate": ["map.safetensors", *PAIR, "--text", "text.txt"],
    "align": [*PAIR, "in 2012"],
    "vocab": ["small.model", "-t", "bytes", "-o", "vocab.jsonl"],
    "report": ["map.safetensors", "-o", "report.html"],
    "multitoken": [*PAIR, "-o", "first.safetensors"],
    "reapply-exact": ["first.safetensors", "-o", "exact.safetensors"],
    "sort-cut": ["exact.safetensors", "-k", "4", "-o", "cut.safetensors"],
    "generate": ["model", "model", "--embedding-model", "own", "-o", "near.safetensors"],
    "events": [*PAIR, "-o", "events.safetensors"],
    "transplant": ["model", "model", "-o", "copy.model"],
    "render": ["chat.json", "-m", "bytes", "--chat-template", "plain", "-o", "chat.jsonl"],
    "serve": ["--help"],  # serve needs a teacher's server, and does not exit
    "project": ["teacher.jsonl", *PAIR, "--to", "vllm", "-o", "student.jsonl"],
}
"""The arguments of one use of each command."""
TEACHER = (
    '{"prompt_token_ids": [97, 98], '
    '"prompt_logprobs": [null, {"98": {"logprob": -0.5, "rank": 1}}]}'
)
"""Input of `project`: the response of a teacher with the tokenizer `bytes`."""
RUN_FIRST = ["build", "multitoken", "reapply-exact", "sort-cut"]
"""These commands write the inputs of the other commands."""
