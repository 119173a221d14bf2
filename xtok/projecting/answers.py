"""Answers of servers with a prompt's log-probabilities, a line of JSON each: vLLM's, SGLang's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import CacheKind
from xtok.files.lines import JsonLine, Line, json_lines
from xtok.files.opening import need
from xtok.files.shards import Shard
from xtok.projecting.stored import PER_TOKEN, StoredRows, TopK, bounds_of, cache_error
from xtok.projecting.values import json_numbers

MAX_LINE_BYTES = 1 << 29
"""A longer line is an error. vLLM's answer with 512 candidates for 8,192 tokens has 300 MB."""

_ANSWER = (
    *("choices", "prompt_logprobs", "prompt_token_ids", "prompt", "object"),
    *("created", "model", "usage", "service_tier", "system_fingerprint", "kv_transfer_params"),
    *("meta_info", "output_ids", *PER_TOKEN),
)
_ASK_VLLM = "ask the server with prompt_logprobs: K, return_token_ids: true, max_tokens: 1"
_ASK_SGLANG = "ask for return_logprob, logprob_start_len 0, and top_logprobs_num K"
_ASK_AGAIN = "ask the server for this text again, or leave out the line"
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class _Answer(NamedTuple):
    """A sequence's predictions as they came: row i of token i, in any order."""

    token_ids: NDArray[np.int32]
    counts: list[int]  # candidates of each token
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    columns: dict[str, str | None]
    place: Line


def kind_of_answers(path: Path) -> CacheKind:
    """Tell whose answers a file holds, from its first line.

    Raises:
        XtokError: if it is neither's, or empty.
    """
    first = next(_lines(Shard(path, "jsonl")), None)
    if first is None:
        raise cache_error(path, "the file is empty", "give a cache that has rows")
    for answer in _answers(first.value, first.place):
        if "prompt_logprobs" in answer:
            return "vllm"
        if "meta_info" in answer:
            return "sglang"
    problem = "no Parquet, and no answers with prompt_logprobs or meta_info"
    raise cache_error(path, problem, "xtok help project names the formats")


def read_answers(
    shard: Shard, kind: CacheKind, candidates: int
) -> Iterator[tuple[StoredRows, int]]:
    """Read a shard of answers, as `read_cache` does.

    Yields:
        rows, and the bytes on disk that they took, about.

    Raises:
        XtokError: for what is no answer, with its line.
    """
    parse = _vllm if kind == "vllm" else _sglang
    pending: list[_Answer] = []
    size, done = 0, shard.start
    for place, value, read in _lines(shard):
        for answer in _answers(value, place):
            pending.append(parse(answer, place))
            size += len(pending[-1].ids) + len(pending[-1].token_ids)
        if size >= candidates:
            yield _joined(pending), read - done
            pending, size, done = [], 0, read
    if pending:
        yield _joined(pending), max(0, shard.start + shard.size - done)


def _lines(shard: Shard) -> Iterator[JsonLine]:
    hint = "give one JSON object per line"
    return json_lines(shard, max_bytes=MAX_LINE_BYTES, hint=hint, strict=True)


def _answers(value: Any, place: Line) -> Iterator[dict[str, Any]]:
    """Return the answers of a line: a body, its choices, or several of them."""
    if isinstance(value, list) and value:
        for one in value:
            yield from _answers(one, place)
        return
    if not isinstance(value, dict):
        raise cache_error(place, f"{json.dumps(value)} is no answer", _ASK_AGAIN)
    _require_no_error(value, place)
    choices = value.get("choices")
    choices = choices if isinstance(choices, list) else []
    chosen = [
        c for c in choices if isinstance(c, dict) and isinstance(c.get("prompt_logprobs"), list)
    ]
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


def _require_no_error(value: Mapping[str, Any], place: Line) -> None:
    """Raise an error with the server's own words, if that is what it answered."""
    error = value.get("error", value if value.get("object") == "error" else None)
    if error and not {"choices", "meta_info", "prompt_logprobs"} & value.keys():
        message = error.get("message", error) if isinstance(error, dict) else error
        raise cache_error(place, f"the server answered: {message!s:.300}", _ASK_AGAIN)


def _vllm(answer: Mapping[str, Any], place: Line) -> _Answer:
    """`prompt_logprobs` of vLLM 0.33: null, then `{"<id>": {"logprob": …, "rank": …}}`."""
    rows = answer.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise cache_error(place, "an answer without prompt_logprobs", _ASK_VLLM)
    counts, ids, logprobs = list[int](), list[int](), list[Any]()
    try:
        for row in rows:
            entries = {} if row is None else dict(row.items())
            of_row = [*map(int, entries)]
            if [*map(str, of_row)] != [*entries]:  # as "+1", " 1" or "1_0"
                raise ValueError("no id")
            ids += of_row
            logprobs += [entry["logprob"] for entry in entries.values()]
            counts.append(len(entries))
        columns = _columns_of(answer)
    except _MALFORMED as error:
        where = f"{place}, position {len(counts)}"
        raise cache_error(where, "its prompt_logprobs are not vLLM's", _ASK_VLLM) from error
    return _answer(answer["prompt_token_ids"], counts, ids, logprobs, columns, place)


def _sglang(answer: Mapping[str, Any], place: Line) -> _Answer:
    """`input_token_logprobs` and `input_top_logprobs` of SGLang: `[logprob, id, text]`."""
    counts, ids, logprobs = list[int](), list[Any](), list[Any]()
    try:
        about = answer["meta_info"]
        owns, tops = about["input_token_logprobs"], about["input_top_logprobs"]
        tokens = [own[1] for own in owns]
        for own, top in zip(owns, tops, strict=True):
            row = [(i, logprob) for logprob, i, *_ in top or ()]
            if row and own[0] is not None and own[1] not in dict(row):
                row.append((own[1], own[0]))
            ids += [i for i, _ in row]
            logprobs += [logprob for _, logprob in row]
            counts.append(len(row))
        columns = _columns_of(answer)
    except _MALFORMED as error:
        problem = "no answer of SGLang with the log-probabilities of its input"
        raise cache_error(place, problem, _ASK_SGLANG) from error
    columns.pop("text", None)  # what the server wrote
    if isinstance(answer.get("prompt"), str):
        columns["text"] = answer["prompt"]
    return _answer(tokens, counts, ids, logprobs, columns, place)


def _columns_of(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """Return an answer's other fields, all strings, so that all rows have one schema."""
    return {
        name: value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
        for name, value in answer.items()
        if name not in _ANSWER
    }


def _answer(
    token_ids: Any,
    counts: list[int],
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    columns: dict[str, str | None],
    place: Line,
) -> _Answer:
    """Check the values of an answer."""
    if not isinstance(token_ids, list) or len(token_ids) != len(counts):
        told = len(token_ids) if isinstance(token_ids, list) else "no"
        raise cache_error(place, f"{told} prompt_token_ids for {len(counts)} rows", _ASK_VLLM)
    bounds = [np.array([0, len(counts)]), bounds_of(counts)]
    return _Answer(
        json_numbers(token_ids, "prompt_token_ids", np.int32, place, bounds[:1]),
        counts,
        json_numbers(ids, "candidates", np.int32, place, bounds),
        json_numbers(logprobs, "log-probabilities", np.float32, place, bounds),
        columns,
        place,
    )


def _joined(answers: Sequence[_Answer]) -> StoredRows:
    arrow = need("pyarrow", answers[0].place)
    token_ids, ids, logprobs = (
        np.concatenate([getattr(answer, name) for answer in answers])
        for name in ("token_ids", "ids", "logprobs")
    )
    bounds = bounds_of([len(answer.counts) for answer in answers])
    starts = bounds_of([*chain.from_iterable(answer.counts for answer in answers)])
    unknown = np.full(len(token_ids), np.nan, np.float32)
    names = dict.fromkeys(chain.from_iterable(answer.columns for answer in answers))
    columns = {n: arrow.array([a.columns.get(n) for a in answers], arrow.string()) for n in names}
    topk = TopK(token_ids, bounds, starts, ids, logprobs, unknown, unknown)
    return StoredRows(topk, columns, [answer.place for answer in answers])


def vllm_lines(rows: StoredRows, model: str) -> Iterator[bytes]:
    """Return a line per document: the answer of vLLM's `/v1/completions` to its ids.

    Candidates stand in the order of their ranks, the text's own token among them. The first token
    has null, and one that nothing is predicted for no entries.
    """
    topk = rows.topk
    columns = [rows.values(name) for name in rows.columns]
    tokens, realized = topk.token_ids.tolist(), topk.realized_logprob.tolist()
    bounds, starts = topk.bounds.tolist(), topk.starts.tolist()
    for document in range(len(rows.places)):
        begin, end = bounds[document : document + 2]
        first, last = starts[begin], starts[end]
        ids, logprobs = topk.ids[first:last].tolist(), topk.logprobs[first:last].tolist()
        entries = [
            _ranked(
                dict(zip(ids[a - first : b - first], logprobs[a - first : b - first], strict=True)),
                tokens[i],
                realized[i],
            )
            for i, a, b in zip(
                range(begin, end), starts[begin:end], starts[begin + 1 : end + 1], strict=True
            )
        ]
        choice = {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "length",
            "prompt_token_ids": tokens[begin:end],
            "prompt_logprobs": [None, *entries[1:]] if entries else [],
        }  # fmt: skip
        line = {
            **{name: values[document] for name, values in zip(rows.columns, columns, strict=True)},
            "object": "text_completion", "model": model, "choices": [choice],
        }  # fmt: skip
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _ranked(row: dict[int, float], token: int, realized: float) -> dict[str, dict[str, Any]]:
    """Return a row of candidates, the best first, as vLLM's entries by rank.

    The text's own token is put where its log-probability belongs, NaN if that is not known.
    """
    if row and realized == realized and token not in row:
        row[token] = realized
        row = dict(
            sorted(row.items(), key=lambda entry: -entry[1])
        )  # of equal ones, it is the last
    return {
        str(i): {"logprob": logprob, "rank": rank, "decoded_token": None}
        for rank, (i, logprob) in enumerate(row.items(), 1)
    }
