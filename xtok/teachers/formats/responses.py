"""Read stored responses of vLLM and SGLang from JSON lines.

Each line contains a response, or a list of responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.lines import FileRow, LineOffset, json_lines
from xtok._lib.opening import need
from xtok._lib.shards import Shard
from xtok.config import CacheKind
from xtok.predictions.topk import joined
from xtok.teachers.formats import sglang, vllm
from xtok.teachers.formats.documents import PER_TOKEN, PROJECTED, Documents, cache_error
from xtok.teachers.formats.flat_values import json_numbers

FIELDS = (
    *("choices", "prompt_logprobs", "prompt_token_ids", "prompt", "object"),
    *("created", "model", "usage", "service_tier", "system_fingerprint", "kv_transfer_params"),
    *("meta_info", "output_ids", *PER_TOKEN),
)
"""Fields of a response that do not become columns."""

FORMATS = (
    "use Parquet with the columns input_ids, topk_ids and topk_logprobs, DistillKit's Parquet "
    "(input_ids, token_ids, top_values), or JSON lines with responses of vLLM (prompt_logprobs) or "
    "SGLang (meta_info)"
)
"""A hint that lists the supported formats."""

_RETRY_HINT = "request this text from the server again, or delete the line"


def detect_responses(path: Path) -> tuple[CacheKind, dict[str, str]]:
    """Detect the format from the first line. Also return metadata for `Cache.footer`."""
    first = next(_lines(Shard(path, "jsonl")), None)
    if first is None:
        raise cache_error(path, "the file is empty", "pass a cache with at least one row")
    for response in _responses(first.value, first.location):
        footer = {"source": PROJECTED} if response.get("system_fingerprint") == PROJECTED else {}
        if "prompt_logprobs" in response:
            return "vllm", footer
        if "meta_info" in response:
            return "sglang", footer
    names = ", ".join(first.value) if isinstance(first.value, dict) else "a list"
    problem = "the file contains neither Parquet nor responses with prompt_logprobs or meta_info"
    raise cache_error(path, f"{problem}; line 1 contains: {names}", FORMATS)


def read_responses(
    shard: Shard, kind: CacheKind, candidates: int, *, is_projected: bool
) -> Iterator[tuple[Documents, int]]:
    """Read a shard of stored responses for `read_cache`.

    `is_projected` is True if `project` wrote the first line.

    Yields:
        documents, and their approximate size on disk in bytes.
    """
    read = vllm.read if kind == "vllm" else sglang.read
    pending: list[Documents] = []
    size, done = 0, shard.start
    for line in _lines(shard):
        for response in _responses(line.value, line.location):
            if is_projected != (response.get("system_fingerprint") == PROJECTED):
                problem = "the file mixes responses of a server with the output of xtok project"
                raise cache_error(line.location, problem, "store them in different files")
            topk, columns = read(response, line.location), _columns(response, kind, line.location)
            per_token = partial(_mask, response, len(topk.token_ids), line.location)
            mask, is_token = per_token("loss_mask"), per_token("attention_mask")
            mask = per_token("labels") if mask is None else mask
            rows = Documents(topk, columns, [line.location], mask)
            pending.append(rows if is_token is None else rows.at_tokens(is_token))
            size += len(topk.ids) + len(topk.token_ids)
        if size >= candidates:
            yield _join(pending), line.read - done
            pending, size, done = [], 0, line.read
    if pending:
        yield _join(pending), max(0, shard.start + shard.size - done)


def _lines(shard: Shard) -> Iterator[FileRow]:
    return json_lines(shard, hint="give one JSON object per line", strict=True)


def _responses(value: Any, location: LineOffset) -> Iterator[dict[str, Any]]:
    """Yield the responses in a line. A response with several choices becomes several responses."""
    for item in value if isinstance(value, list) and value else [value]:
        if not isinstance(item, dict):
            raise cache_error(location, f"{json.dumps(item)} is not a response", _RETRY_HINT)
        _require_no_error(item, location)
        choices = item.get("choices")
        choices = [x for x in choices if isinstance(x, dict)] if isinstance(choices, list) else []
        choices = [x for x in choices if isinstance(x.get("prompt_logprobs"), list | dict)]
        choices = _without_repetitions(choices, item.get("usage"))
        for index, choice in enumerate(choices or [{}]):
            yield _choice_response(item, choice, index, is_only=len(choices) < 2)


def _without_repetitions(choices: list[dict[str, Any]], usage: Any) -> list[dict[str, Any]]:
    """Return one choice per prompt.

    vLLM can return `n` choices per prompt, which contain the same predictions for the prompt. The
    function infers `n` from `usage`, which counts each prompt only once.
    """
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    sizes = [len(choice["prompt_logprobs"]) for choice in choices]
    for n in range(2, len(choices) + 1):
        if sum(sizes[::n]) == tokens and sum(sizes) == n * tokens:
            return choices[::n]
    return choices


def _choice_response(
    value: Mapping[str, Any], choice: Mapping[str, Any], index: int, *, is_only: bool
) -> dict[str, Any]:
    """Merge a choice with the fields of the response that apply to all choices."""
    response = {name: v for name, v in value.items() if name != "choices"}
    response |= {name: v for name, v in choice.items() if name in FIELDS}
    prompt = value.get("prompt_token_ids", value.get("input_ids", value.get("prompt")))
    response["prompt_token_ids"] = choice.get("prompt_token_ids", _item(prompt, index))
    if isinstance(prompt, str):
        response.setdefault("text", prompt)
    if "id" in response and not is_only:
        response["id"] = f"{response['id']}-{index}"
    return response


def _item(prompt: Any, index: int) -> Any:
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], list)):
        return prompt
    return prompt[index] if index < len(prompt) else None


def _require_no_error(value: Mapping[str, Any], location: LineOffset) -> None:
    error = value.get("error", value if value.get("object") == "error" else None)
    if error and not {"choices", "meta_info", "prompt_logprobs"} & value.keys():
        message = error.get("message", error) if isinstance(error, dict) else error
        raise cache_error(location, f"the response is an error: {message!s:.300}", _RETRY_HINT)


def _columns(
    response: Mapping[str, Any], kind: CacheKind, location: LineOffset
) -> dict[str, str | None]:
    """Return all fields that are not in `FIELDS` as strings, so that all rows have one schema."""
    other_fields = {name: value for name, value in response.items() if name not in FIELDS}
    if kind == "sglang":  # in responses, `text` is the generated text
        other_fields.pop("text", None)
        if isinstance(response.get("prompt"), str):
            other_fields["text"] = response["prompt"]
    try:
        return {
            name: value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
            for name, value in other_fields.items()
        }
    except RecursionError as error:
        raise cache_error(location, "the fields are nested too deeply", _RETRY_HINT) from error


def _mask(
    response: Mapping[str, Any], num_tokens: int, location: LineOffset, name: str
) -> NDArray[np.bool_] | None:
    """Convert a field with a flag or label for each token to a mask.

    Return None if the response does not contain the field.
    """
    stored = response.get(name)
    if stored is None:
        return None
    if not isinstance(stored, list):
        raise cache_error(location, f"{name} is not a list")
    if len(stored) != num_tokens:
        problem = f"{name} has {len(stored)} values, expected one for each of {num_tokens} tokens"
        raise cache_error(location, problem)
    dtype = np.int64 if name == "labels" else np.bool_
    values = json_numbers(stored, name, dtype, location, [np.array([0, num_tokens])])
    return values != -100 if name == "labels" else values


def _join(responses: Sequence[Documents]) -> Documents:
    """Concatenate documents. The strings of each column become a pyarrow array."""
    locations = [name for response in responses for name in response.locations]
    arrow = need("pyarrow", locations[0])
    names = dict.fromkeys(chain.from_iterable(response.columns for response in responses))
    columns = {n: arrow.array([a.columns.get(n) for a in responses], arrow.string()) for n in names}
    has_mask = any(response.loss_mask is not None for response in responses)
    mask = np.concatenate([response.targets for response in responses]) if has_mask else None
    return Documents(joined([response.topk for response in responses]), columns, locations, mask)
