"""What trainers ask, and how they are answered: pure functions from bytes to bytes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

import msgspec
import numpy as np

from xtok._lib.parsing import parse_json
from xtok.config import MAX_ENTRIES
from xtok.teachers.formats import sglang, vllm
from xtok.teachers.formats.ranked import RankedTopK, logprobs_of_ids
from xtok.tokenizers.display import shorten
from xtok.tokenizers.table import Vocabulary


class BadRequest(Exception):
    """A request that cannot be answered; the message names the field."""

    status = 400


class UnknownModel(BadRequest):
    """A request for a model that is not served."""

    status = 404


class Common(msgspec.Struct):
    """What requests of all dialects may say."""

    model: str | None = None  # whose answer it wants
    teacher_system: str | None = None  # what the teacher alone reads; no other server knows it


@dataclass(frozen=True)
class Asked:
    """A request: sequences of the student's ids, and how to write what the teacher says of them."""

    sequences: list[list[int]]
    top_k: int
    # of what is said of each, the student's vocabulary, and the request's number
    write: Callable[[Sequence[RankedTopK], Vocabulary, int], bytes]
    about: Common
    unread: Sequence[str] = ()  # its fields that ask for something, and that nobody reads
    num_chosen: int = 0  # how many ids of each place are chosen by the request itself
    temperature: float | None = None


def model_cards(student: Vocabulary, teacher: str, max_model_len: int | None) -> dict[str, Any]:
    """Return what `GET /v1/models` answers."""
    card = {
        "id": student.model_id, "object": "model", "created": 0, "owned_by": "xtok",
        "root": teacher, "parent": None, "max_model_len": max_model_len,
    }  # fmt: skip
    return {"object": "list", "data": [card]}


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error as vLLM and SGLang write it."""
    kind = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}
    what = {"message": message, "type": kind.get(status, "InternalServerError"), "param": None}
    return {"object": "error", "error": {**what, "code": status}}


# The fields of requests: those of the structs below are read, these are refused unless they ask for
# nothing, and all others are named in a note.

_WRITES, _WHOLE, _IDS = "does not generate", "scores whole sequences", "takes ids alone"
_COUNTS = dict.fromkeys(
    ("n", "best_of", "max_tokens", "max_completion_tokens", "max_new_tokens"), _WRITES
)  # of which clients may ask for one: vLLM's cannot ask for none
_REFUSED: Mapping[str, str] = {
    **_COUNTS, "stream": "does not stream", "use_beam_search": _WRITES, "suffix": _WRITES,
    "truncate_prompt_tokens": _WHOLE, "prompt_embeds": _IDS, "input_embeds": _IDS, "text": _IDS,
    "multi_modal_data": _IDS, "image_data": _IDS, "video_data": _IDS, "audio_data": _IDS,
    "lora_path": "has one model", "lora_request": "has one model",
}  # fmt: skip


def _unread(given: Mapping[str, Any], asked: msgspec.Struct, place: str = "") -> list[str]:
    """Return the fields of a request that nobody reads; those that would change it are refused."""
    names: list[str] = []
    for name, value in given.items():
        read = getattr(asked, name, None)
        if isinstance(read, msgspec.Struct):
            names += _unread(value, read, f"{place}{name}.")
        elif name in asked.__struct_fields__ or not value or (value == 1 and name in _COUNTS):
            continue
        elif name in _REFUSED:
            shown = f"{place}{name}: {shorten(json.dumps(value))}"
            raise BadRequest(f"{shown}, and this server {_REFUSED[name]}")
        else:
            names.append(shorten(place + name))
    return names


# vLLM


class _CompletionsRequest(Common):
    prompt: list[int | list[int]] | str = []
    prompt_logprobs: int | None = None
    temperature: float | None = None


def completions(body: bytes) -> Asked:
    """Read `POST /v1/completions`."""
    asked, unread = _read(body, _CompletionsRequest)
    if isinstance(asked.prompt, str) or not asked.prompt:
        raise BadRequest("prompt: give token ids, a list of them or several")
    sequences, _ = _split(asked.prompt, "prompt")
    top_k = _checked_top_k(asked.prompt_logprobs)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, number: int) -> bytes:
        size = sum(map(len, sequences))
        rows = [vllm.response_rows(one, top_k, student.vocab_size) for one in scores]
        choices = [
            {
                "index": n, "text": "", "logprobs": None, "finish_reason": "length",
                "stop_reason": None, "prompt_logprobs": of_sequence,
            }
            for n, of_sequence in enumerate(rows)
        ]  # fmt: skip
        usage = {"prompt_tokens": size, "total_tokens": size, "completion_tokens": 0}
        return msgspec.json.encode({
            "id": f"cmpl-{number}", "object": "text_completion", "created": 0,
            "model": student.model_id, "choices": choices, "usage": usage,
        })  # fmt: skip

    return Asked(sequences, top_k, write, asked, unread, temperature=asked.temperature)


class _DemoPrompt(msgspec.Struct):
    prompt_token_ids: list[int]


class _DemoRequest(Common):
    prompt: _DemoPrompt | str = ""
    prompt_logprobs: int | None = None
    temperature: float | None = None


class _Sampling(msgspec.Struct):
    prompt_logprobs: int | None = None
    temperature: float | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int = 0


class _TokensRequest(Common, kw_only=True):
    token_ids: list[int]
    sampling_params: _Sampling


def inference(body: bytes) -> Asked:
    """Read `POST /inference/v1/generate`."""
    asked, unread = _read(body, _TokensRequest)
    sampling, ids = asked.sampling_params, asked.token_ids
    asked_k, wanted = sampling.prompt_logprobs, list[list[int]]()
    if sampling.prompt_logprob_token_ids is not None:
        asked_k, wanted = asked_k or 0, _wanted_ids(sampling, len(ids))
    top_k = _checked_top_k(asked_k)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, number: int) -> bytes:
        [one] = scores
        answer: dict[str, Any] = {
            "request_id": f"generate-tokens-{number}", "prompt_logprobs": None,
            "choices": [
                {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": []}
            ],
        }  # fmt: skip
        if sampling.prompt_logprobs is not None:
            answer["prompt_logprobs"] = vllm.response_rows(one, top_k, student.vocab_size)
        if sampling.prompt_logprob_token_ids is not None:
            answer["prompt_token_id_logprobs"] = _npy(
                one, wanted, student, sampling.prompt_logprob_start + 1
            )
        return msgspec.json.encode(answer)

    width = max(map(len, wanted), default=0)
    return Asked(
        [ids], top_k, write, asked, unread, num_chosen=width, temperature=sampling.temperature
    )


def _wanted_ids(sampling: _Sampling, count: int) -> list[list[int]]:
    """Return the chosen ids of each token; none for those before the start."""
    start = sampling.prompt_logprob_start
    rows = sampling.prompt_logprob_token_ids or []
    if not 0 <= start < max(count, 1):
        raise BadRequest(f"prompt_logprob_start: {start} is not in 0..{count - 1}")
    if len(rows) != count - 1 - start:
        raise BadRequest(
            f"prompt_logprob_token_ids: {len(rows)} rows, and {count - 1 - start} tokens after "
            "prompt_logprob_start"
        )
    return [*repeat([], start + 1), *rows]


def _npy(one: RankedTopK, wanted: list[list[int]], student: Vocabulary, first: int) -> str:
    """Return the log-probabilities of chosen ids as a base64 `.npy`, float32 `[rows, K]`.

    Its first row is that of the token `first`.
    """
    rows = _chosen_logprobs(one, wanted, student, lowest=-1)[first:]  # -1 fills rows
    matrix = np.full((len(rows), max(map(len, rows), default=0)), -np.inf, np.float32)
    for n, (row, ids) in enumerate(zip(rows, wanted[first:], strict=True)):
        matrix[n, : len(row)] = np.where([i < 0 for i in ids], -np.inf, row)
    file = io.BytesIO()
    np.save(file, matrix)
    return base64.b64encode(file.getvalue()).decode()


def _chosen_logprobs(
    one: RankedTopK, wanted: list[list[int]], student: Vocabulary, lowest: int = 0
) -> list[list[float]]:
    outside = [i for row in wanted for i in row if not lowest <= i < student.vocab_size]
    if outside:
        raise BadRequest(
            f"the chosen id {outside[0]} is outside the vocabulary of {student.model_id}, "
            f"0..{student.vocab_size - 1}"
        )
    return logprobs_of_ids(one, wanted, student.vocab_size)


# SGLang


class _Temperature(msgspec.Struct):
    temperature: float | None = None  # never of the input's log-probabilities


class _GenerateRequest(Common):
    input_ids: list[int | list[int]] = []
    sampling_params: _Temperature | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    token_ids_logprob_positions: list[list[int]] | None = None
    input_logprob_temperature: float | None = None  # never echoed: it is not applied


def generate(body: bytes) -> Asked:
    """Read `POST /generate`: SGLang's by `input_ids`, that of vLLM's demo server by `prompt`."""
    keys = _decoded(body, dict[str, msgspec.Raw])
    if "prompt" in keys:
        return _demo(body)
    if "input_ids" not in keys:
        raise BadRequest("input_ids: give token ids, a list of them or several")
    asked, unread = _read(body, _GenerateRequest)
    sequences, is_one = _split(asked.input_ids, "input_ids")
    if not asked.return_logprob:
        raise BadRequest("return_logprob: this server only scores, so ask for it")
    sampling = asked.sampling_params or _Temperature()
    shortest = min(map(len, sequences), default=0)
    if asked.logprob_start_len >= max(1, shortest):
        raise BadRequest(f"logprob_start_len: {asked.logprob_start_len}, of {shortest} tokens")
    top_k = _checked_top_k(asked.top_logprobs_num, "top_logprobs_num")
    rows = _chosen_ids(asked, sequences)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, number: int) -> bytes:
        answers = [
            _sglang_answer(f"{number}-{n}", one, student, asked, wanted)
            for n, (one, wanted) in enumerate(zip(scores, rows, strict=True))
        ]
        return msgspec.json.encode(answers[0] if is_one else answers)

    widest = max((len(ids) for wanted in rows for ids in wanted or ()), default=0)
    temperature = asked.input_logprob_temperature or sampling.temperature
    return Asked(sequences, top_k, write, asked, unread, num_chosen=widest, temperature=temperature)


def _chosen_ids(
    asked: _GenerateRequest, sequences: list[list[int]]
) -> list[list[list[int]] | None]:
    """Return the ids that a request chooses, of each sequence and each of its tokens."""
    rows = asked.token_ids_logprob_positions
    if rows is not None:
        if len(sequences) > 1:
            raise BadRequest("token_ids_logprob_positions: give them with one sequence")
        if len(rows) != len(sequences[0]):
            raise BadRequest(
                f"token_ids_logprob_positions: {len(rows)} rows for {len(sequences[0])} tokens"
            )
        return [rows]
    ids = asked.token_ids_logprob
    return [None if ids is None else [ids] * len(sequence) for sequence in sequences]


def _sglang_answer(
    name: str,
    one: RankedTopK,
    student: Vocabulary,
    asked: _GenerateRequest,
    wanted: list[list[int]] | None,
) -> dict[str, Any]:
    ids, values = one.topk.token_ids.tolist(), one.topk.realized_logprob.tolist()
    top_k, start = asked.top_logprobs_num, asked.logprob_start_len
    start = start if start >= 0 else len(ids) - 1
    realized: list[Any] = [[value, i, None] for value, i in zip(values, ids, strict=True)][start:]
    realized[0][0] = None  # the first one is not scored
    meta: dict[str, Any] = {
        "id": name, "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids),
        "completion_tokens": 0, "cached_tokens": 0, "input_token_logprobs": realized,
        "output_token_logprobs": [],
    }  # fmt: skip
    if top_k:
        rows = sglang.response_rows(one, top_k, student.vocab_size)
        meta["input_top_logprobs"] = [None, *rows[start + 1 :]]
        meta["output_top_logprobs"] = []
    if wanted is not None:
        values_of = _chosen_logprobs(one, wanted, student)
        meta["input_token_ids_logprobs"] = [
            None,
            *(
                [[value, i, None] for value, i in zip(row, ids, strict=True)]
                for row, ids in zip(values_of[start + 1 :], wanted[start + 1 :], strict=True)
            ),
        ]
        meta["output_token_ids_logprobs"] = []
    return {"text": "", "output_ids": [], "meta_info": meta}


def _demo(body: bytes) -> Asked:
    """Read what atropos asks vLLM's demo server for, whose rows have plain numbers."""
    asked, unread = _read(body, _DemoRequest)
    if isinstance(asked.prompt, str):
        raise BadRequest("prompt: give {'prompt_token_ids': [...]}, token ids")
    top_k = _checked_top_k(asked.prompt_logprobs)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, number: int) -> bytes:
        rows = [
            {i: entry.logprob for i, entry in (row or {}).items()} or None
            for row in vllm.response_rows(scores[0], top_k, student.vocab_size)
        ]
        return msgspec.json.encode({"text": [""], "prompt_logprobs": rows})

    ids = asked.prompt.prompt_token_ids
    return Asked([ids], top_k, write, asked, unread, temperature=asked.temperature)


# What all share

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as problem:
        what, _, place = str(problem).partition(" - at ")
        field = place.strip("`").removeprefix("$.") if place else ""
        raise BadRequest(f"{field}: {what}" if field else what) from problem


def _read(body: bytes, kind: type[R]) -> tuple[R, list[str]]:
    """Return a request, and the fields of it that are not read.

    A field that is given twice is refused: msgspec keeps the last.
    """
    asked = _decoded(body, kind)
    try:
        given = parse_json(body)
    except ValueError as problem:
        raise BadRequest(str(problem)) from problem
    return asked, _unread(given, asked)


def _split(given: Sequence[int | list[int]], field: str) -> tuple[list[list[int]], bool]:
    """Return lists of ids, and whether one was given instead."""
    if not any(isinstance(one, list) for one in given):
        return [[*given]], True  # type: ignore[list-item]
    if not all(isinstance(one, list) for one in given):
        raise BadRequest(f"{field}: ids and lists of ids in one list")
    return [*given], False  # type: ignore[list-item]


def _checked_top_k(top_k: int | None, field: str = "prompt_logprobs") -> int:
    """Return how many candidates a request wants; vLLM's may say none."""
    if top_k is None:
        raise BadRequest(f"{field}: this server only scores, so ask for them")
    if not 0 <= top_k <= MAX_ENTRIES:
        raise BadRequest(f"{field}: {top_k} is not in 0..{MAX_ENTRIES}")
    return top_k
