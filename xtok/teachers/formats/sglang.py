"""Read and write SGLang's format (version 0.5), with entries `[logprob, id, text]`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED
from xtok.predictions.topk import TopK
from xtok.teachers.formats.documents import cache_error
from xtok.teachers.formats.flat_values import JsonRow, json_document
from xtok.teachers.formats.ranked import RankedTopK, ranked_entries, ranked_topk

ROUTE = "/generate"
MORE = "raise the limit of the proxy in front of SGLang to {}; SGLang itself has no limit"
"""Advice for a server that returns too few candidates."""

TOKENIZER = "--tokenizer-path"

_HINT = "send requests with return_logprob: true, logprob_start_len: 0 and top_logprobs_num: K"


def read(response: Mapping[str, Any], location: object) -> TopK:
    """Return the predictions of a stored response, as one document.

    Flat lists, in JSON or base64 (`return_flat_raw_top_logprobs`), are also supported.
    """
    meta: Any = response.get("meta_info")
    try:
        owns = meta["input_token_logprobs"]
        tops = meta.get("input_top_logprobs") or _unflatten(meta)
        rows = [_row(entry, top) for entry, top in zip(owns, tops, strict=True)]
        tokens, logprobs = [entry[1] for entry in owns], [entry[0] for entry in owns]
    except MALFORMED as error:
        names = ", ".join(meta) if isinstance(meta, dict) else "nothing"
        problem = "input_token_logprobs or input_top_logprobs is missing or has an unknown layout"
        raise cache_error(location, f"{problem}; meta_info has: {names}", _HINT) from error
    size = meta.get("prompt_tokens")
    if isinstance(size, int) and size > len(tokens):
        problem = f"the response contains only the last {len(tokens)} of {size} prompt tokens"
        raise cache_error(location, problem, _HINT)
    return json_document(tokens, rows, location, _HINT, logprobs)


def _row(entry: Any, top: Any) -> JsonRow:
    """Return the candidates for a token. If the token is not a candidate, append the token."""
    row = [(i, logprob) for logprob, i, *_ in top or ()]
    return [*row, (entry[1], entry[0])] if row and entry[1] not in dict(row) else row


_ONCE = (b'"meta_info"', b'"input_token_logprobs"', b'"input_top_logprobs"')


def _unflatten(meta: Mapping[str, Any]) -> list[list[tuple[Any, Any]]]:
    """Convert flat lists to rows of pairs (log-probability, id). The first rows can be empty."""
    flat = {name.replace("_flat", "").replace("_b64", ""): value for name, value in meta.items()}
    values = _as_list(flat["input_top_logprobs_val"], "<f4")
    entries = [*zip(values, _as_list(flat["input_top_logprobs_idx"], "<i4"), strict=True)]
    width = flat["input_top_logprobs_shape"][1]
    rows = [entries[i : i + width] for i in range(0, len(entries), width)]
    return [*([] for _ in range(flat["input_top_logprobs_null_prefix"])), *rows]


def _as_list(values: Any, dtype: str) -> list[Any]:
    if isinstance(values, str):
        values = np.frombuffer(base64.b64decode(values, validate=True), dtype).tolist()
    return list(values)


# Requests and responses of a live server


def request(model: str, ids: Sequence[int], top_k: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return the body of a request for `top_k` candidates for each id in `ids`."""
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": temperature, "max_new_tokens": 0},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k,
    }  # fmt: skip


def read_response(content: bytes, ids: Sequence[int]) -> RankedTopK:
    """Read the server's response for `ids`. Check the types, but not the values."""
    import msgspec

    from xtok.teachers.formats.structs import Generated

    meta = msgspec.json.decode(content, type=Generated).meta_info
    if any(content.count(name) != 1 for name in _ONCE):  # a key occurs twice
        parse_json(content)
    owns, tops = meta.input_token_logprobs, meta.input_top_logprobs
    if [entry[1] for entry in owns] != [*ids]:
        raise ValueError("the response contains other ids")
    if len(tops) != len(ids):
        raise ValueError(f"{len(tops)} rows for {len(ids)} ids")
    rows = [_row(entry, top) for entry, top in zip(owns, tops, strict=True)]
    each = zip(ids, rows, strict=True)
    ranks = [[t for t, _ in row].index(i) + 1 if row else 0 for i, row in each]
    return ranked_topk(ids, rows, ranks, _HINT, [entry[0] for entry in owns])


def token_texts(value: Any, ids: Sequence[int]) -> list[Any]:
    """Return the texts of all tokens except the first, from a valid response."""
    return [text for _, _, text in value["meta_info"]["input_token_logprobs"][1:]]


def response_rows(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> list[list[tuple[float, int, None]]]:
    """Return the `input_top_logprobs` of a response to a trainer, including the first token."""
    all_ids, logprobs, ranks, _ = ranked_entries(scores, top_k, vocab_size)
    order = np.argsort(ranks, axis=1, kind="stable")[:, :top_k]
    ids, values = (np.take_along_axis(part, order, axis=1).tolist() for part in (all_ids, logprobs))
    return [[*zip(*row, repeat(None))] for row in zip(values, ids, strict=True)]
