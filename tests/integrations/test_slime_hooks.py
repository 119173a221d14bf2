"""slime's hooks, called as slime 0.3.1 calls them; the teacher is a server on this machine.

slime itself needs GPUs. What it calls is in slime/rollout/rm_hub and slime/ray/rollout.py; the
server answers as sglang's /generate does, with a log-probability for each id that it was sent.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import slime_hooks
import torch

from xtok import XtokError
from xtok.tokenizers import Tokenizer

PAIRS = [
    ("small-digits", "small-byte-level"),
    ("small-hf", "small-digits"),
    ("small-byte-level", "small-hf"),
]


@dataclass
class Sample:
    """The fields of slime's Sample that matter here."""

    tokens: list[int]
    response_length: int
    reward: Any = None
    loss_mask: list[int] | None = None
    teacher_log_probs: Any = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]


def logprob(place: int, token_id: int) -> float:
    """What the teacher thinks of a token: any number will do, if each token has its own."""
    return -0.25 - (token_id % 97) / 8 - place / 64


class Teacher(BaseHTTPRequestHandler):
    """sglang's answer to a prompt that is scored and not continued."""

    received: list[list[int]] = []  # noqa: RUF012
    status = 200

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["return_logprob"] is True
        assert request["logprob_start_len"] == 0
        assert request["sampling_params"]["max_new_tokens"] == 0
        ids = request["input_ids"]
        Teacher.received.append(ids)
        pairs = [[None if n == 0 else logprob(n, i), i, None] for n, i in enumerate(ids)]
        body = json.dumps({"text": "", "meta_info": {"input_token_logprobs": pairs}}).encode()
        self.send_response(Teacher.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def args() -> Iterator[Any]:
    """slime's arguments, of a teacher that runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    Teacher.received, Teacher.status = [], 200
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield SimpleNamespace(rm_url=f"http://127.0.0.1:{server.server_port}/generate", reward_key=None)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    slime_hooks.pair.cache_clear()
    yield
    slime_hooks.pair.cache_clear()


def tokenizers(
    monkeypatch: pytest.MonkeyPatch, small: Path, student: str, teacher: str
) -> tuple[Tokenizer, Tokenizer]:
    monkeypatch.setenv("STUDENT_TOKENIZER", str(small / student))
    monkeypatch.setenv("TEACHER_TOKENIZER", str(small / teacher))
    retokenizer = slime_hooks.pair().retokenizer
    return retokenizer.student, retokenizer.teacher


def samples_of(student: Tokenizer) -> list[Sample]:
    """Samples of prompts and responses, with an end, half a character, or tools in between."""
    end = list(student.table.roles["eos"][:1])
    spell = student.segment
    texts: list[tuple[list[int], list[int], list[int] | None]] = [
        (spell(b"How many steps?"), [*spell(" 201 — día tras día.".encode()), *end], None),
        (spell(b"The keeper "), spell("灯".encode()[:2]), None),
        (spell(b"Q"), [*spell(b"lit 201 lamps"), *spell(b"tool"), *spell(b" ends"), *end], []),
    ]
    samples = []
    for prompt, response, mask in texts:
        samples.append(Sample([*prompt, *response], len(response)))
        if mask is not None:
            samples[-1].loss_mask = [0 if 4 <= n < 7 else 1 for n in range(len(response))]
    return samples


async def rewards(args: Any, samples: list[Sample]) -> list[Any]:
    """As slime's async_rm for each sample, all at once."""
    return await asyncio.gather(
        *(slime_hooks.reward_func(args, s, evaluation=False) for s in samples)
    )


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_samples(
    args: Any, small: Path, monkeypatch: pytest.MonkeyPatch, student: str, teacher: str
) -> None:
    ours, theirs = tokenizers(monkeypatch, small, student, teacher)
    samples = samples_of(ours)
    masks = [sample.loss_mask for sample in samples]
    for sample, reward in zip(samples, asyncio.run(rewards(args, samples)), strict=True):
        sample.reward = reward
    assert slime_hooks.post_process_rewards(args, samples) == ([0.0] * 3, [0.0] * 3)
    aligner = slime_hooks.pair().aligner
    for sample, mask in zip(samples, masks, strict=True):
        start = len(sample.tokens) - sample.response_length
        prompt, response = (
            b"".join(ours.table[i] for i in part)
            for part in (sample.tokens[:start], sample.tokens[start:])
        )
        end = list(theirs.table.roles["eos"][:1]) * (sample is not samples[1])
        sent = [*theirs.table.roles["bos"][:1], *theirs.segment(prompt)]
        first = len(sent)
        sent += [*theirs.segment(response), *end]
        assert sent in Teacher.received
        log_probs = sample.teacher_log_probs
        assert (log_probs.dtype, log_probs.shape) == (torch.float32, (sample.response_length,))
        expected = sum(logprob(n, i) for n, i in enumerate(sent) if n >= first)
        assert float(log_probs.double().sum()) == pytest.approx(expected, abs=1e-5)
        assert sample.loss_mask == (mask or [1] * sample.response_length)
        # Chunk by chunk, the sums are the teacher's.
        for pair in aligner.pairs(sample.tokens[start:], sent[first:]):
            (a, b), (c, d) = pair.student_tokens, pair.teacher_tokens
            theirs_sum = sum(logprob(first + n, sent[first + n]) for n in range(c, d))
            assert float(log_probs[a:b].double().sum()) == pytest.approx(theirs_sum, abs=1e-5)


def test_a_token_without_a_counterpart_is_left_out(
    args: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = tokenizers(monkeypatch, small, "small-byte-level", "small-hf")
    [turn] = ours.table.roles["turn_start"]
    words = ours.segment(b" twice")
    sample = Sample([*ours.segment(b"Say"), *words, turn, *words], 2 * len(words) + 1)
    [sample.reward] = asyncio.run(rewards(args, [sample]))
    slime_hooks.post_process_rewards(args, [sample])
    assert sample.loss_mask == [*[1] * len(words), 0, *[1] * len(words)]
    assert float(sample.teacher_log_probs[len(words)]) == 0


def test_faults(args: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = tokenizers(monkeypatch, small, "small-digits", "small-byte-level")
    [sample, *_] = samples_of(ours)
    [sample.reward] = asyncio.run(rewards(args, [sample]))
    sample.reward["meta_info"]["input_token_logprobs"][3][1] += 1
    with pytest.raises(
        XtokError, match=r"^the teacher scored other ids than it was sent \(set TEA"
    ):
        slime_hooks.post_process_rewards(args, [sample])
    Teacher.status = 500
    with pytest.raises(urllib.error.HTTPError, match="500") as refused:
        asyncio.run(rewards(args, [sample]))
    refused.value.close()
    monkeypatch.delenv("TEACHER_TOKENIZER")
    slime_hooks.pair.cache_clear()
    with pytest.raises(XtokError, match=r"^STUDENT_TOKENIZER or TEACHER_TOKENIZER is not set"):
        asyncio.run(rewards(args, [sample]))
