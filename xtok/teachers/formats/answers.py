"""Answers of servers, stored as lines of JSON: a line has one, with choices or not, or a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.lines import JsonLine, LinePlace, json_lines
from xtok._lib.opening import need
from xtok._lib.shards import Shard
from xtok.config import CacheKind
from xtok.predictions.topk import TopK, joined
from xtok.teachers.formats import sglang, vllm
from xtok.teachers.formats.documents import AGAIN_HINT, PER_TOKEN, PROJECTED, Documents, cache_error
from xtok.teachers.formats.flat_values import json_numbers

MAX_LINE_BYTES = 1 << 29
"""A longer line is an error. vLLM's answer with 512 candidates for 8,192 tokens has 300 MB."""

_ANSWER = (
    *("choices", "prompt_logprobs", "prompt_token_ids", "prompt", "object"),
    *("created", "model", "usage", "service_tier", "system_fingerprint", "kv_transfer_params"),
    *("meta_info", "output_ids", *PER_TOKEN),
)
FORMATS = (
    "give Parquet with the columns input_ids, topk_ids, topk_logprobs, or DistillKit's (input_ids, "
    "token_ids, top_values), or lines of vLLM's answers (prompt_logprobs) or SGLang's (meta_info)"
)
"""What errors say of the formats that are read."""

_ASK_AGAIN_HINT = "ask the server for this text again, or leave out the line"


class _Answer(NamedTuple):
    """What a server said of one sequence."""

    topk: TopK  # one document
    columns: dict[str, str | None]
    mask: NDArray[np.bool_] | None  # which tokens are training targets
    place: LinePlace


def kind_of_answers(path: Path) -> tuple[CacheKind, dict[str, str]]:
    """Tell whose answers a file holds, from its first line, and their source if `project` wrote it.

    Raises:
        XtokError: if it is neither's, or empty.
    """
    first = next(_lines(Shard(path, "jsonl")), None)
    if first is None:
        raise cache_error(path, "the file is empty", "give a cache that has rows")
    for answer in _answers(first.value, first.place):
        about = {"source": PROJECTED} if answer.get("system_fingerprint") == PROJECTED else {}
        if "prompt_logprobs" in answer:
            return "vllm", about
        if "meta_info" in answer:
            return "sglang", about
    names = ", ".join(first.value) if isinstance(first.value, dict) else "a list"
    problem = f"neither Parquet nor answers with prompt_logprobs or meta_info; line 1 has: {names}"
    raise cache_error(path, problem, FORMATS)


def read_answers(shard: Shard, kind: CacheKind, candidates: int) -> Iterator[tuple[Documents, int]]:
    """Read a shard of answers, as `read_cache` does.

    Yields:
        documents, and the bytes on disk that they took, about.

    Raises:
        XtokError: for what is not an answer, with its line.
    """
    read = vllm.read if kind == "vllm" else sglang.read
    pending: list[_Answer] = []
    size, done = 0, shard.start
    for line in _lines(shard):
        for answer in _answers(line.value, line.place):
            topk, columns = read(answer, line.place), _columns(answer, kind, line.place)
            mask = _mask(answer, len(topk.token_ids), line.place)
            pending.append(_Answer(topk, columns, mask, line.place))
            size += len(topk.ids) + len(topk.token_ids)
        if size >= candidates:
            yield _joined(pending), line.read - done
            pending, size, done = [], 0, line.read
    if pending:
        yield _joined(pending), max(0, shard.start + shard.size - done)


def _lines(shard: Shard) -> Iterator[JsonLine]:
    hint = "give one JSON object per line"
    return json_lines(shard, max_bytes=MAX_LINE_BYTES, hint=hint, strict=True)


def _answers(value: Any, place: LinePlace) -> Iterator[dict[str, Any]]:
    """Return the answers of a line: a body, its choices, or several of them."""
    if isinstance(value, list) and value:
        for one in value:
            yield from _answers(one, place)
        return
    if not isinstance(value, dict):
        raise cache_error(place, f"{json.dumps(value)} is not an answer", _ASK_AGAIN_HINT)
    _require_no_error(value, place)
    choices = value.get("choices")
    choices = choices if isinstance(choices, list) else []
    chosen = [
        c for c in choices
        if isinstance(c, dict) and isinstance(c.get("prompt_logprobs"), list | dict)
    ]  # fmt: skip
    prompt = value.get("prompt_token_ids", value.get("input_ids", value.get("prompt")))
    for number, choice in enumerate(chosen or [{}]):
        answer = {name: v for name, v in value.items() if name != "choices"}
        answer |= {name: choice[name] for name in choice if name in _ANSWER}
        ids = choice.get("prompt_token_ids", prompt)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            ids = ids[number] if number < len(ids) else None
        answer["prompt_token_ids"] = ids
        if isinstance(prompt, str):
            answer.setdefault("text", prompt)
        if len(chosen) > 1 and "id" in answer:
            answer["id"] = f"{answer['id']}-{number}"
        yield answer


def _require_no_error(value: Mapping[str, Any], place: LinePlace) -> None:
    """Raise an error with the server's own words, if that is what it answered."""
    error = value.get("error", value if value.get("object") == "error" else None)
    if error and not {"choices", "meta_info", "prompt_logprobs"} & value.keys():
        message = error.get("message", error) if isinstance(error, dict) else error
        raise cache_error(place, f"the server answered: {message!s:.300}", _ASK_AGAIN_HINT)


def _columns(answer: Mapping[str, Any], kind: CacheKind, place: LinePlace) -> dict[str, str | None]:
    """Return an answer's other fields, all strings, so that all rows have one schema."""
    others = {name: value for name, value in answer.items() if name not in _ANSWER}
    if kind == "sglang":  # whose text is what the server wrote
        others.pop("text", None)
        if isinstance(answer.get("prompt"), str):
            others["text"] = answer["prompt"]
    try:
        return {
            name: value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
            for name, value in others.items()
        }
    except RecursionError as error:
        raise cache_error(place, "its fields are nested too deeply", _ASK_AGAIN_HINT) from error


def _mask(answer: Mapping[str, Any], num_tokens: int, place: LinePlace) -> NDArray[np.bool_] | None:
    """Return which tokens are targets by its `loss_mask`, or else its `labels`; None if by none."""
    name = "labels" if answer.get("loss_mask") is None else "loss_mask"
    given = answer.get(name)
    if given is None:
        return None
    if not isinstance(given, list):
        raise cache_error(place, f"its {name} are not a list", AGAIN_HINT)
    if len(given) != num_tokens:
        raise cache_error(place, f"{num_tokens} tokens, and {len(given)} {name}", AGAIN_HINT)
    dtype = np.int64 if name == "labels" else np.bool_
    values = json_numbers(given, name, dtype, place, [np.array([0, num_tokens])])
    return values != -100 if name == "labels" else values


def _joined(answers: Sequence[_Answer]) -> Documents:
    arrow = need("pyarrow", answers[0].place)
    names = dict.fromkeys(chain.from_iterable(answer.columns for answer in answers))
    columns = {n: arrow.array([a.columns.get(n) for a in answers], arrow.string()) for n in names}
    places = [answer.place for answer in answers]
    mask = None
    if any(answer.mask is not None for answer in answers):
        mask = np.concatenate([
            np.ones(len(answer.topk.token_ids), np.bool_) if answer.mask is None else answer.mask
            for answer in answers
        ])  # fmt: skip
    return Documents(joined([answer.topk for answer in answers]), columns, places, mask)
