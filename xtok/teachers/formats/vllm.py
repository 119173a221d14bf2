"""Read and write vLLM's format (version 0.33).

The entry of the first token is null. Each later token has the entry
`{"<id>": {"logprob": …, "rank": …}, …}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED
from xtok.predictions.topk import TopK
from xtok.teachers.formats.documents import PROJECTED, Documents, cache_error
from xtok.teachers.formats.flat_values import JsonRow, json_document
from xtok.teachers.formats.ranked import MIN_REST, RankedTopK, ranked_entries, ranked_topk

if TYPE_CHECKING:
    from xtok.teachers.formats.structs import VllmEntry

ROUTE = "/v1/completions"
MORE = "start the server with --max-logprobs {}"
"""Advice for a server that returns too few candidates."""

TOKENIZER = "--tokenizer"

_HINT = "send requests with prompt_logprobs: K, return_token_ids: true and max_tokens: 1"


def read(response: Mapping[str, Any], location: object) -> TopK:
    """Return the predictions of a stored response, as one document.

    Numbers instead of objects (from older servers) and flat lists (`FlatLogprobs`) are also
    supported.
    """
    stored = response.get("prompt_logprobs")
    if not isinstance(stored, list | dict):
        raise cache_error(location, "the response has no prompt_logprobs", _HINT)
    rows = list[JsonRow]()
    try:
        rows.extend(_rows(stored))
    except MALFORMED as error:
        position = f"{location}, position {len(rows)}"
        raise cache_error(position, "prompt_logprobs is not in vLLM's format", _HINT) from error
    return json_document(response["prompt_token_ids"], rows, location, _HINT)


def _rows(stored: Any) -> Iterator[JsonRow]:
    if isinstance(stored, dict):  # in flat lists, the realized token can occur twice
        entries = [*zip(stored["token_ids"], stored["logprobs"], strict=True)]
        bounds = [0, *stored["end_indices"]]
        if bounds[:-1] != stored["start_indices"]:
            raise ValueError("rows that overlap")
        yield from ([*dict.fromkeys(entries[start:end])] for start, end in pairwise(bounds))
        return
    for row in stored:
        items = () if row is None else row.items()
        yield [(_id(i), e["logprob"] if isinstance(e, dict) else e) for i, e in items]


def _id(key: str) -> int:
    if str(number := int(key)) != key:  # "+1", " 1", "1_0"
        raise ValueError("no id")
    return number


def lines(documents: Documents, model: str) -> Iterator[bytes]:
    """Yield one JSON line per document, in the format of `/v1/completions`.

    The candidates and the text's token are sorted by rank. The entry of the first token is null.
    Each other token without a prediction has an empty object. NaN and infinity in other columns
    become null.
    """
    topk, columns = documents.topk, {name: documents.values(name) for name in documents.columns}
    mask = None if documents.loss_mask is None else documents.loss_mask.tolist()
    # A realized token's share of its chunk can exceed the probability outside the candidates.
    limits = np.nan_to_num(np.maximum(topk.rest_logprob, np.log(MIN_REST)))  # 0 if unknown
    realized = np.minimum(topk.realized_logprob, limits)
    tokens, values, starts = topk.token_ids.tolist(), realized.tolist(), topk.starts.tolist()
    for document, (start, end) in enumerate(pairwise(topk.bounds.tolist())):
        span = slice(starts[start], starts[end])
        entries = zip(topk.ids[span].tolist(), topk.logprobs[span].tolist(), strict=True)
        rows = [
            _rank(dict(islice(entries, starts[i + 1] - starts[i])), tokens[i], values[i])
            for i in range(start, end)
        ]
        choice = {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "length",
            "prompt_token_ids": tokens[start:end],
            "prompt_logprobs": [None, *rows[1:]] if rows else [],
        }  # fmt: skip
        others = json.dumps({name: values[document] for name, values in columns.items()})
        line = {
            **json.loads(others, parse_constant=lambda _: None),  # JSON has no NaN and no Infinity
            **({} if mask is None else {"loss_mask": mask[start:end]}),
            "object": "text_completion", "model": model, "system_fingerprint": PROJECTED,
            "choices": [choice],
        }  # fmt: skip
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _rank(row: dict[int, float], token: int, realized: float) -> dict[str, dict[str, Any]]:
    """Return the entries of a row, sorted by rank.

    The text's token is included, unless its log-probability is NaN or the row is empty.
    """
    if row and realized == realized and token not in row:
        row[token] = min(realized, *row.values())  # it is not one of the best
    return {
        str(i): {"logprob": logprob, "rank": rank, "decoded_token": None}
        for rank, (i, logprob) in enumerate(row.items(), 1)
    }


# Requests and responses of a live server


def request(model: str, ids: Sequence[int], top_k: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return the body of a request for `top_k` candidates for each id in `ids`."""
    return {
        "model": model, "prompt": ids, "max_tokens": 1, "temperature": temperature,
        "prompt_logprobs": top_k,
    }  # fmt: skip


def read_response(content: bytes, ids: Sequence[int]) -> RankedTopK:
    """Read the server's response for `ids`. Check the types, but not the values."""
    import msgspec

    from xtok.teachers.formats.structs import Completion

    choice = msgspec.json.decode(content, type=Completion).choices[0]
    candidates = [row or {} for row in choice.prompt_logprobs]
    if content.count(b'"logprob"') != sum(map(len, candidates)):  # a key occurs twice
        parse_json(content)
    rows = [[(i, entry.logprob) for i, entry in row.items()] for row in candidates]
    realized = [row.get(i) for i, row in zip(ids, candidates, strict=False)]
    return ranked_topk(ids, rows, [entry.rank or 0 if entry else 0 for entry in realized], _HINT)


def token_texts(value: Any, ids: Sequence[int]) -> list[Any]:
    """Return the texts of all tokens except the first, from a valid response."""
    rows = value["choices"][0]["prompt_logprobs"]
    entries = [row.get(str(i), {}) for i, row in zip(ids, rows, strict=True) if row]
    return [entry.get("decoded_token") for entry in entries]


def response_rows(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> list[dict[int, VllmEntry] | None]:
    """Return the `prompt_logprobs` of a response to a trainer."""
    from xtok.teachers.formats.structs import VllmEntry

    entries = ranked_entries(scores, top_k, vocab_size)
    return [
        dict(zip(ids[:size], map(VllmEntry, values[:size], ranks[:size]), strict=True)) or None
        for ids, values, ranks, size in zip(*(part.tolist() for part in entries), strict=True)
    ]
