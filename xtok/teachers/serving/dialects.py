"""Read requests from trainers and write responses, in the formats of vLLM and SGLang."""

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
from xtok.teachers.formats.ranked import RankedTopK, lookup_logprobs
from xtok.tokenizers.display import shorten
from xtok.tokenizers.table import Vocabulary


class BadRequest(Exception):
    """A request is invalid. The message names the field."""

    status = 400


class UnknownModel(BadRequest):
    """A request names an unknown model."""

    status = 404


class Common(msgspec.Struct):
    """Fields of all requests."""

    model: str | None = None
    teacher_system: str | None = None  # system text that only the teacher reads; specific to xtok


@dataclass(frozen=True)
class ScoringRequest:
    """A request: sequences of student ids, and the function that writes the response."""

    sequences: list[list[int]]
    top_k: int
    # arguments: scores of the sequences, the student's vocabulary, and the number of the request
    write: Callable[[Sequence[RankedTopK], Vocabulary, int], bytes]
    common: Common
    unread: Sequence[str]  # ignored fields
    temperature: float | None
    chooses: bool = False  # whether the request lists ids to score


def model_cards(student: Vocabulary, teacher: str, max_model_len: int | None) -> dict[str, Any]:
    """Return the response to `GET /v1/models`."""
    card = {
        "id": student.model_id, "object": "model", "created": 0, "owned_by": "xtok",
        "root": teacher, "parent": None, "max_model_len": max_model_len,
    }  # fmt: skip
    return {"object": "list", "data": [card]}


def outside_vocabulary(name: str, token_id: int, student: Vocabulary) -> str:
    """Return the error message for an id outside the student's vocabulary."""
    valid_ids = f"0..{student.vocab_size - 1}"
    return f"the {name} {token_id} is outside the vocabulary of {student.model_id}, {valid_ids}"


# The structs below list the supported fields. A request with a field in `_REFUSED` is refused,
# unless the field is empty. All other fields are ignored with a note.

_GENERATE, _WHOLE, _IDS = "does not generate", "scores whole sequences", "accepts only ids"
_COUNTS = dict.fromkeys(
    ("n", "best_of", "max_tokens", "max_completion_tokens", "max_new_tokens"), _GENERATE
)  # can be 1, which is vLLM's minimum
_REFUSED: Mapping[str, str] = {
    **_COUNTS, "stream": "does not stream", "use_beam_search": _GENERATE, "suffix": _GENERATE,
    "truncate_prompt_tokens": _WHOLE, "prompt_embeds": _IDS, "input_embeds": _IDS, "text": _IDS,
    "multi_modal_data": _IDS, "image_data": _IDS, "video_data": _IDS, "audio_data": _IDS,
    "lora_path": "has one model", "lora_request": "has one model",
}  # fmt: skip


def _unread(fields: Mapping[str, Any], request: msgspec.Struct, prefix: str = "") -> list[str]:
    """Return the names of a request's ignored fields. Refuse a request with unsupported fields."""
    names: list[str] = []
    for name, value in fields.items():
        read = getattr(request, name, None)
        if isinstance(read, msgspec.Struct):
            names += _unread(value, read, f"{prefix}{name}.")
        elif name in request.__struct_fields__ or not value or (value == 1 and name in _COUNTS):
            continue
        elif name in _REFUSED:
            example = f"{prefix}{name}: {shorten(json.dumps(value))}"
            raise BadRequest(f"{example}, but this server {_REFUSED[name]}")
        else:
            names.append(shorten(prefix + name))
    return names


# vLLM


class _DemoPrompt(msgspec.Struct):
    prompt_token_ids: list[int]


class _PromptRequest(Common):
    prompt: list[int | list[int]] | _DemoPrompt | str = []
    prompt_logprobs: int | None = None
    temperature: float | None = None


def completions(body: bytes) -> ScoringRequest:
    """Read `POST /v1/completions`."""
    request, unread = _read_body(body, _PromptRequest)
    if not isinstance(request.prompt, list) or not request.prompt:
        raise BadRequest("prompt: expected a list of token ids, or a list of such lists")
    sequences, _ = _split(request.prompt, "prompt")
    top_k = _checked_top_k(request.prompt_logprobs)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, request_index: int) -> bytes:
        size = sum(map(len, sequences))
        choices = [
            {
                "index": n, "text": "", "logprobs": None, "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": vllm.response_rows(ranked, top_k, student.vocab_size),
            }
            for n, ranked in enumerate(scores)
        ]  # fmt: skip
        usage = {"prompt_tokens": size, "total_tokens": size, "completion_tokens": 0}
        return msgspec.json.encode({
            "id": f"cmpl-{request_index}", "object": "text_completion", "created": 0,
            "model": student.model_id, "choices": choices, "usage": usage,
        })  # fmt: skip

    return ScoringRequest(sequences, top_k, write, request, unread, request.temperature)


class _Sampling(msgspec.Struct):
    prompt_logprobs: int | None = None
    temperature: float | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int = 0


class _TokensRequest(Common, kw_only=True):
    token_ids: list[int]
    sampling_params: _Sampling


def inference(body: bytes) -> ScoringRequest:
    """Read `POST /inference/v1/generate`."""
    request, unread = _read_body(body, _TokensRequest)
    sampling, ids = request.sampling_params, request.token_ids
    top_k, chosen = sampling.prompt_logprobs, list[list[int]]()
    if sampling.prompt_logprob_token_ids is not None:
        top_k, chosen = top_k or 0, _position_ids(sampling, len(ids))
    size = _checked_top_k(top_k)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, request_index: int) -> bytes:
        [ranked] = scores
        response: dict[str, Any] = {
            "request_id": f"generate-tokens-{request_index}", "prompt_logprobs": None,
            "choices": [
                {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": []}
            ],
        }  # fmt: skip
        if sampling.prompt_logprobs is not None:
            response["prompt_logprobs"] = vllm.response_rows(ranked, size, student.vocab_size)
        if sampling.prompt_logprob_token_ids is not None:
            response["prompt_token_id_logprobs"] = _npy(
                ranked, chosen, student, sampling.prompt_logprob_start + 1
            )
        return msgspec.json.encode(response)

    return ScoringRequest([ids], size, write, request, unread, sampling.temperature, any(chosen))


def _position_ids(sampling: _Sampling, count: int) -> list[list[int]]:
    """Return the chosen ids for each token, which are empty up to `prompt_logprob_start`."""
    start = sampling.prompt_logprob_start
    rows = sampling.prompt_logprob_token_ids or []
    if not 0 <= start < max(count, 1):
        raise BadRequest(f"prompt_logprob_start: {start} is not in 0..{count - 1}")
    if len(rows) != count - 1 - start:
        raise BadRequest(
            f"prompt_logprob_token_ids: {len(rows)} rows, expected {count - 1 - start}, one for "
            "each token after prompt_logprob_start"
        )
    return [*repeat([], start + 1), *rows]


def _npy(ranked: RankedTopK, chosen: list[list[int]], student: Vocabulary, first: int) -> str:
    """Return the chosen ids' log-probabilities, float32 `[rows, K]`, as a base64 `.npy` file.

    Row 0 belongs to the token with the index `first`.
    """
    rows = _chosen_logprobs(ranked, chosen, student, lowest=-1)[first:]  # -1 is padding
    matrix = np.full((len(rows), max(map(len, rows), default=0)), -np.inf, np.float32)
    for n, (row, ids) in enumerate(zip(rows, chosen[first:], strict=True)):
        matrix[n, : len(row)] = np.where([i < 0 for i in ids], -np.inf, row)
    file = io.BytesIO()
    np.save(file, matrix)
    return base64.b64encode(file.getvalue()).decode()


def _chosen_logprobs(
    ranked: RankedTopK, chosen: list[list[int]], student: Vocabulary, lowest: int = 0
) -> list[list[float]]:
    outside = [i for row in chosen for i in row if not lowest <= i < student.vocab_size]
    if outside:
        raise BadRequest(outside_vocabulary("chosen id", outside[0], student))
    return lookup_logprobs(ranked, chosen, student.vocab_size)


# SGLang


class _Temperature(msgspec.Struct):
    temperature: float | None = None  # no effect on the input's log-probabilities


class _GenerateRequest(Common):
    input_ids: list[int | list[int]] = []
    sampling_params: _Temperature | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    token_ids_logprob_positions: list[list[int]] | None = None
    input_logprob_temperature: float | None = None  # ignored and not in the response


def generate_request(body: bytes) -> ScoringRequest:
    """Read `POST /generate` of SGLang (`input_ids`) or of vLLM's demo server (`prompt`)."""
    keys = _decode(body, dict[str, msgspec.Raw])
    if "prompt" in keys:
        return _demo(body)
    if "input_ids" not in keys:
        raise BadRequest("input_ids: expected a list of token ids, or a list of such lists")
    request, unread = _read_body(body, _GenerateRequest)
    sequences, is_one = _split(request.input_ids, "input_ids")
    if not request.return_logprob:
        raise BadRequest("return_logprob: expected true, because this server only returns scores")
    shortest = min(map(len, sequences), default=0)
    if request.logprob_start_len >= max(1, shortest):
        raise BadRequest(
            f"logprob_start_len: {request.logprob_start_len}, expected less than the length "
            f"of the sequence, {shortest}"
        )
    top_k = _checked_top_k(request.top_logprobs_num, "top_logprobs_num")
    chosen = _chosen_ids(request, sequences)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, request_index: int) -> bytes:
        responses = [
            _sglang_response(f"{request_index}-{n}", ranked, student, request, ids)
            for n, (ranked, ids) in enumerate(zip(scores, chosen, strict=True))
        ]
        return msgspec.json.encode(responses[0] if is_one else responses)

    sampling = request.sampling_params or _Temperature()
    temperature = request.input_logprob_temperature or sampling.temperature
    return ScoringRequest(sequences, top_k, write, request, unread, temperature, any(chosen))


def _chosen_ids(
    request: _GenerateRequest, sequences: list[list[int]]
) -> list[list[list[int]] | None]:
    """Return the chosen ids for each token of each sequence.

    The result is None for a sequence without chosen ids.
    """
    rows = request.token_ids_logprob_positions
    if rows is not None:
        if len(sequences) > 1:
            raise BadRequest("token_ids_logprob_positions: supported only with one sequence")
        if len(rows) != len(sequences[0]):
            sizes = f"{len(rows)} rows for {len(sequences[0])} tokens"
            raise BadRequest(f"token_ids_logprob_positions: {sizes}")
        return [rows]
    ids = request.token_ids_logprob
    return [None if ids is None else [ids] * len(sequence) for sequence in sequences]


def _sglang_response(
    name: str,
    ranked: RankedTopK,
    student: Vocabulary,
    request: _GenerateRequest,
    chosen: list[list[int]] | None,
) -> dict[str, Any]:
    ids, values = ranked.topk.token_ids.tolist(), ranked.topk.realized_logprob.tolist()
    start = request.logprob_start_len if request.logprob_start_len >= 0 else len(ids) - 1
    realized = _triples(values, ids)[start:]
    realized[0][0] = None  # the first token has no score
    meta: dict[str, Any] = {
        "id": name, "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids),
        "completion_tokens": 0, "cached_tokens": 0, "input_token_logprobs": realized,
        "output_token_logprobs": [],
    }  # fmt: skip
    if request.top_logprobs_num:
        best = sglang.response_rows(ranked, request.top_logprobs_num, student.vocab_size)
        meta["input_top_logprobs"] = [None, *best[start + 1 :]]
        meta["output_top_logprobs"] = []
    if chosen is not None:
        rows = [*map(_triples, _chosen_logprobs(ranked, chosen, student), chosen)]
        meta["input_token_ids_logprobs"] = [None, *rows[start + 1 :]]
        meta["output_token_ids_logprobs"] = []
    return {"text": "", "output_ids": [], "meta_info": meta}


def _triples(logprobs: Sequence[float], ids: Sequence[int]) -> list[list[Any]]:
    return [[logprob, i, None] for logprob, i in zip(logprobs, ids, strict=True)]


def _demo(body: bytes) -> ScoringRequest:
    """Read a request for vLLM's demo server (for example from atropos).

    The rows of the response contain numbers, not objects.
    """
    request, unread = _read_body(body, _PromptRequest)
    if not isinstance(request.prompt, _DemoPrompt):
        raise BadRequest("prompt: expected {'prompt_token_ids': [...]}")
    top_k = _checked_top_k(request.prompt_logprobs)

    def write(scores: Sequence[RankedTopK], student: Vocabulary, request_index: int) -> bytes:
        rows = [
            {i: entry.logprob for i, entry in (row or {}).items()} or None
            for row in vllm.response_rows(scores[0], top_k, student.vocab_size)
        ]
        return msgspec.json.encode({"text": [""], "prompt_logprobs": rows})

    ids = request.prompt.prompt_token_ids
    return ScoringRequest([ids], top_k, write, request, unread, request.temperature)


# Shared functions

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        body.decode()  # so that the error does not depend on the version of msgspec
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as problem:
        message, _, path = str(problem).partition(" - at ")
        field = path.strip("`").removeprefix("$.") if path else ""
        raise BadRequest(f"{field}: {message}" if field else message) from problem


def _read_body(body: bytes, kind: type[R]) -> tuple[R, list[str]]:
    """Return a parsed request, and the names of ignored fields."""
    request = _decode(body, kind)
    try:
        fields = parse_json(body)
    except ValueError as problem:
        raise BadRequest(str(problem)) from problem
    return request, _unread(fields, request)


def _split(ids: Sequence[int | list[int]], field: str) -> tuple[list[list[int]], bool]:
    """Return sequences of ids, and whether the request contains a single sequence."""
    is_list = {isinstance(item, list) for item in ids}
    if len(is_list) > 1:
        raise BadRequest(f"{field}: expected ids or lists of ids, not both")
    return ([*ids], False) if True in is_list else ([[*ids]], True)  # type: ignore[list-item]


def _checked_top_k(top_k: int | None, field: str = "prompt_logprobs") -> int:
    """Validate the number of candidates."""
    if top_k is None:
        raise BadRequest(f"{field}: expected a number, because this server only returns scores")
    if not 0 <= top_k <= MAX_ENTRIES:
        raise BadRequest(f"{field}: {top_k} is not in 0..{MAX_ENTRIES}")
    return top_k
