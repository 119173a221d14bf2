"""SGLang's `input_token_logprobs` and `input_top_logprobs` (0.5): `[logprob, id, text]`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED
from xtok.predictions.topk import TopK
from xtok.teachers.formats.documents import cache_error
from xtok.teachers.formats.flat_values import json_document
from xtok.teachers.formats.ranked import RankedTopK, ranked_entries, ranked_topk

ROUTE = "/generate"
MORE = "remove the limit of the proxy before it (SGLang itself has none), to get {}"
"""The change of a server that returns too few candidates."""

TOKENIZER, NO_TOKENIZER = "--tokenizer-path", "--skip-tokenizer-init"

_ASK = "ask for return_logprob, logprob_start_len 0, and top_logprobs_num K"


def read(answer: Mapping[str, Any], place: object) -> TopK:
    """Return the predictions of an answer that was stored, as one document.

    Candidates may also be flat, as lists or in base64 (`return_flat_raw_top_logprobs`).

    Raises:
        XtokError: if it is no such answer.
    """
    counts, ids, logprobs = list[int](), list[Any](), list[Any]()
    about: Any = answer.get("meta_info")
    try:
        owns = about["input_token_logprobs"]
        tops = about.get("input_top_logprobs") or _unflattened(about)
        for own, top in zip(owns, tops, strict=True):
            row = [(i, logprob) for logprob, i, *_ in top or ()]
            if row and own[1] not in dict(row):
                row.append((own[1], own[0]))
            ids += [i for i, _ in row]
            logprobs += [logprob for _, logprob in row]
            counts.append(len(row))
        tokens, of_tokens = [own[1] for own in owns], [own[0] for own in owns]
    except MALFORMED as error:
        names = ", ".join(about) if isinstance(about, dict) else "no names"
        problem = "not an answer of SGLang with input_token_logprobs and input_top_logprobs"
        problem += f" in a layout that is read; its meta_info has: {names}"
        raise cache_error(place, problem, _ASK) from error
    size = about.get("prompt_tokens")
    if isinstance(size, int) and size > len(tokens):
        raise cache_error(place, f"it has the last {len(tokens)} of {size} prompt tokens", _ASK)
    return json_document(tokens, counts, ids, logprobs, place, _ASK, of_tokens)


_ONCE = (b'"meta_info"', b'"input_token_logprobs"', b'"input_top_logprobs"')


def _unflattened(about: Mapping[str, Any]) -> list[list[tuple[Any, Any]]]:
    """Return rows of log-probabilities and ids of flat ones; the first of all have none."""
    flat = {name.replace("_flat", "").replace("_b64", ""): about[name] for name in about}
    values = _listed(flat["input_top_logprobs_val"], "<f4")
    entries = [*zip(values, _listed(flat["input_top_logprobs_idx"], "<i4"), strict=True)]
    width = flat["input_top_logprobs_shape"][1]
    rows = [entries[i : i + width] for i in range(0, len(entries), width)]
    return [*([] for _ in range(flat["input_top_logprobs_null_prefix"])), *rows]


def _listed(values: Any, dtype: str) -> list[Any]:
    """Return values, which may be base64 of little-endian ones."""
    if isinstance(values, str):
        values = np.frombuffer(base64.b64decode(values, validate=True), dtype).tolist()
    return list(values)


# On the wire


def request(model: str, ids: Sequence[int], top_k: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return the body of a request for `top_k` candidates at each of these ids."""
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": temperature, "max_new_tokens": 0},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k,
    }  # fmt: skip


def read_response(content: bytes, ids: Sequence[int]) -> RankedTopK:
    """Return what a server says of the ids that it was asked for; nothing is checked but types.

    Raises:
        ValueError: if it is no such answer, or of other ids; also what msgspec raises.
    """
    import msgspec

    from xtok.teachers.formats.structs import Generated

    about = msgspec.json.decode(content, type=Generated).meta_info
    if any(content.count(name) != 1 for name in _ONCE):  # JSON keeps the last of equal keys
        parse_json(content)
    if about.input_token_logprobs is None or about.input_top_logprobs is None:
        raise ValueError("no input_token_logprobs and input_top_logprobs")
    if [entry[1] for entry in about.input_token_logprobs] != [*ids]:
        raise ValueError("it is of other ids than it was asked for")
    if len(about.input_top_logprobs) != len(ids):
        raise ValueError(f"{len(about.input_top_logprobs)} rows for {len(ids)} ids")
    kept, ranks = list[dict[int, float | None]](), list[int]()
    for own, top in zip(about.input_token_logprobs, about.input_top_logprobs, strict=True):
        row = {i: value for value, i, _ in top or ()}
        if len(row) < len(top or ()):
            raise ValueError(f"a candidate of token {len(kept)} occurs twice")
        if row or own[0] is not None:
            row.setdefault(own[1], own[0])
        ranks.append(list(row).index(own[1]) + 1 if row else 0)
        kept.append(row)
    values = chain.from_iterable(row.values() for row in kept)
    return ranked_topk(ids, kept, values, ranks, [own[0] for own in about.input_token_logprobs])


def token_texts(value: Any, ids: Sequence[int]) -> list[Any]:
    """Return what a server's answer, which was read, calls the ids after the first."""
    return [name for _, _, name in value["meta_info"]["input_token_logprobs"][1:]]


def response_rows(
    scores: RankedTopK, top_k: int, vocab_size: int
) -> list[list[tuple[float, int, None]]]:
    """Return the `input_top_logprobs` that a server answers with, that of the first token too."""
    all_ids, logprobs, ranks, _ = ranked_entries(scores, top_k, vocab_size)
    order = np.argsort(ranks, axis=1, kind="stable")[:, :top_k]
    ids, values = (np.take_along_axis(part, order, axis=1).tolist() for part in (all_ids, logprobs))
    return [[*zip(*row, repeat(None))] for row in zip(values, ids, strict=True)]
