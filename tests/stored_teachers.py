"""Random predictions of teachers, and caches of them in every format."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import small_tokenizers

from xtok.teachers.formats.caches import open_cache, read_cache
from xtok.teachers.formats.distillkit import config_for
from xtok.teachers.formats.documents import Documents
from xtok.tokenizers import Tokenizer

TEXTS = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line][:6]
Row = dict[str, Any]


def predicted(ids: Sequence[int], vocab_size: int, k: int, seed: int = 0) -> Row:
    """Return a neutral row with `k` candidates per token. The rest is about a tenth."""
    generator = np.random.default_rng([seed, *ids])
    topk_ids: list[list[int]] = [[]]
    topk_logprobs: list[list[float]] = [[]]
    for token in ids[1:]:
        others = generator.permutation(vocab_size)
        chosen = [token, *others[others != token][: k - 1].tolist()]
        weights = generator.dirichlet(np.ones(k + 1))[:k]
        # No token outside the candidates may be likelier than a candidate.
        weights = np.maximum(weights, (1 - weights.sum()) / max(1, vocab_size - k))
        order = np.lexsort((chosen, -weights))
        topk_ids.append([chosen[i] for i in order])
        topk_logprobs.append(np.log(weights[order]).astype(np.float32).tolist())
    return {"input_ids": list(ids), "topk_ids": topk_ids, "topk_logprobs": topk_logprobs}


def teacher_rows(
    tokenizer: Tokenizer, texts: Sequence[str], k: int = 8, *, with_text: bool = False
) -> list[Row]:
    """Return one neutral row per text, with an id."""
    return [
        {
            "id": f"row {number}",
            **({"text": text} if with_text else {}),
            **predicted(ids, tokenizer.vocabulary.vocab_size, k),
        }
        for number, (text, ids) in enumerate(zip(texts, tokenizer.encode_batch(texts), strict=True))
    ]


_LISTS = pyarrow.list_(pyarrow.list_(pyarrow.int32()))
_FLOATS = pyarrow.list_(pyarrow.list_(pyarrow.float32()))


def write_neutral(
    path: Path, rows: Sequence[Row], *, row_group_size: int = 2, **about: str
) -> Path:
    """Write rows as a neutral cache with several row groups."""
    types = {"input_ids": pyarrow.list_(pyarrow.int32()), "topk_ids": _LISTS}
    types["topk_logprobs"] = _FLOATS
    table = pyarrow.table(
        {name: pyarrow.array([r.get(name) for r in rows], types.get(name)) for name in rows[0]}
    )
    table = table.replace_schema_metadata(about or None)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def vllm_response(row: Row, **fields: Any) -> Row:
    """Return a row as a response of vLLM: the text's own token first, then by rank."""
    entries: list[Row | None] = [None]
    for token, ids, logprobs in list(zip(*map(row.get, NAMES), strict=True))[1:]:
        ranked = list(zip(ids, logprobs, range(1, len(ids) + 1), strict=True))
        ranked.sort(key=lambda entry: entry[0] != token)
        entries.append(
            {str(i): {"logprob": lp, "rank": n, "decoded_token": "?"} for i, lp, n in ranked}
        )
    choice = {"index": 0, "text": "!", "prompt_logprobs": entries}
    choice["prompt_token_ids"] = row["input_ids"]
    others = {name: row[name] for name in row if name not in NAMES}
    return {**others, **fields, "object": "text_completion", "choices": [choice]}


NAMES = ("input_ids", "topk_ids", "topk_logprobs")


def sglang_response(row: Row) -> Row:
    """Return a row as a response of SGLang: the text's own tokens, and candidates by rank."""
    own, top = [], []
    for token, ids, logprobs in zip(*map(row.get, NAMES), strict=True):
        entries = [[lp, i, None] for i, lp in zip(ids, logprobs, strict=True)]
        own.append(next((e for e in entries if e[1] == token), [None, token, None]))
        top.append(entries or None)
    about = {"input_token_logprobs": own, "input_top_logprobs": top}
    return {"id": row["id"], "text": "a continuation", "meta_info": about}


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_distillkit(
    path: Path, rows: Sequence[Row], *, compressed: bool, d: int, k: int = 8
) -> Path:
    """Write rows as DistillKit does, without a row for the first token.

    Packed ids start with the highest bit.
    """
    table: dict[str, Any] = {"id": [row["id"] for row in rows]}
    uint64 = pyarrow.list_(pyarrow.uint64())
    table["input_ids"] = pyarrow.array([row["input_ids"] for row in rows], uint64)
    ids, logprobs = ([row[name][1:] for row in rows] for name in ("topk_ids", "topk_logprobs"))
    if compressed:
        bits = math.ceil(math.log2(d))
        table["bytepacked_indices"] = [
            [packed([f"{i:0{bits}b}" for i in row]) for row in row_values] for row_values in ids
        ]
        table["compressed_logprobs"] = [
            [list(np.array(row, "<f4").tobytes()) for row in row_values] for row_values in logprobs
        ]
        path.with_name("compression_config.yaml").write_text(config_for(d, k))
    else:
        table |= {"token_ids": ids, "top_values": logprobs}
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=4)
    return path


def packed(digits: list[str]) -> list[int]:
    """Concatenate binary numbers, and return their bytes."""
    text = "".join(digits)
    text += "0" * (-len(text) % 8)
    return [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]


def read_documents(path: Path, tokenizer: Tokenizer, candidates: int = 1 << 22) -> list[Documents]:
    """Read a cache, and check it against a tokenizer."""
    cache = open_cache(path)
    return [
        cache.check(rows, tokenizer.vocabulary)
        for shard in cache.shards
        for rows, _ in read_cache(cache, shard, candidates)
    ]
