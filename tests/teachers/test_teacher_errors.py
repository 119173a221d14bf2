"""Errors of a teacher's stored predictions: causes, messages and hints."""

from __future__ import annotations

import gzip
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
from error_causes import (
    QUESTION,
    Errors,
    bytes_pair,
    bytes_to_pieces,
    create,
    file,
    messages_test,
    parquet,
    with_module,
)
from pyarrow.parquet import write_table
from stored_teachers import predicted, write_distillkit

import xtok
from xtok.teachers.formats.caches import open_cache, read_cache


def cache_of(about: dict[str, str] | None = None, **columns: object) -> object:
    """Check a neutral cache of the text "abc" after a change of these columns."""
    plain = {"input_ids": [*b"abc"], "topk_ids": [[], [98], [99, 98]]}
    values: dict[str, Any] = {**plain, "topk_logprobs": [[], [-0.5], [-1, -2.0]], **columns}
    table = pyarrow.table({name: [column] for name, column in values.items()})
    write_table(table.replace_schema_metadata(about), "a.parquet")
    return checked("a.parquet")


def projected(
    config: xtok.ProjectConfig | None = None, template: str | None = None, **columns: object
) -> object:
    """Project such a cache with the same tokenizer on both sides."""
    cache_of(None, **columns)
    config = replace(
        config or xtok.ProjectConfig(), student_template=template, teacher_template=template
    )
    return to_bytes("a.parquet", "out.parquet", config)


def to_bytes(topk: str, output: str, config: xtok.ProjectConfig | None = None) -> object:
    """Project a cache of the tokenizer `bytes` to itself."""
    back_map = xtok.build("bytes", "bytes")
    return xtok.project(topk, bytes_pair(), output, config, back_map=back_map)


def empty_cache() -> Path:
    lists = pyarrow.list_(pyarrow.int32())
    columns = {"input_ids": lists, "topk_ids": pyarrow.list_(lists)}
    columns["topk_logprobs"] = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
    return parquet(**{name: pyarrow.array([], kind) for name, kind in columns.items()})


def responses(*lines: object) -> object:
    """Check lines of responses."""
    return checked(file("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))


def checked(path: str) -> object:
    cache = open_cache(Path(path))
    rows = [part for shard in cache.shards for part, _ in read_cache(cache, shard)]
    return [cache.check(documents, bytes_pair().teacher) for documents in rows]


def compressed(config: str | None) -> object:
    """Check compressed DistillKit rows with this config, or without a config."""
    rows = [{"id": "a", **predicted(b"abc", 256, 8)}]
    path = write_distillkit(Path("a.parquet"), rows, compressed=True, d=256)
    about = path.with_name("compression_config.yaml")
    about.unlink() if config is None else about.write_text(config)
    return checked(str(path))


def vllm(*rows: object, ids: object = (97, 98)) -> dict[str, object]:
    return {"prompt_token_ids": ids and [*ids], "prompt_logprobs": [*rows]}  # type: ignore[misc]


def sglang(owns: list[object], tops: list[object]) -> object:
    return {"meta_info": {"input_token_logprobs": owns, "input_top_logprobs": tops}}


ERRORS: Errors = {
    "pass the model that made the ids": [
        (
            lambda: cache_of(input_ids=[97, 999, 99]),
            "a.parquet, row 0, position 1: the id 999 is outside the vocabulary of bytes, 0..255",
        ),
    ],
    "store natural log-probabilities at temperature 1, not logits, and omit unknown values": [
        (
            lambda: cache_of(topk_logprobs=[[], [0.5], [-1, -2.0]]),
            "a.parquet, row 0, position 1: the log-probability of a candidate is 0.5, "
            "expected a number of at most 0",
        ),
        (
            lambda: cache_of(rest_logprob=[None, math.inf, None]),
            "a.parquet, row 0, position 1: the log-probability of the rest is inf, expected "
            "a number of at most 0",
        ),
        (
            lambda: cache_of(realized_logprob=[None, 3.0, None]),
            "a.parquet, row 0, position 1: the log-probability of the realized token is 3, "
            "expected a number of at most 0",
        ),
    ],
    "store natural log-probabilities at temperature 1; the rest is log(1 - sum of the "
    "probabilities)": [
        (
            lambda: cache_of(topk_logprobs=[[], [-0.5], [-0.1, -0.2]]),
            "a.parquet, row 0, position 2: its probabilities sum to 1.724, expected at most 1",
        ),
        (
            lambda: cache_of(rest_logprob=[None, -0.1, None]),
            "a.parquet, row 0, position 1: its probabilities and the rest sum to 1.511, expected 1",
        ),
        (
            lambda: cache_of(rest_logprob=[None, -50.0, None]),
            "a.parquet, row 0, position 1: its probabilities and the rest sum to 0.6065, "
            "expected 1",
        ),
    ],
    "store each candidate once": [
        (
            lambda: cache_of(topk_ids=[[], [98], [99, 99]]),
            "a.parquet, row 0, position 2: the candidate 99 occurs twice",
        ),
    ],
    "store natural log-probabilities at temperature 1": [
        (
            lambda: cache_of(topk_ids=[[], [7], [99, 98]], realized_logprob=[None, -0.1, -1.0]),
            "a.parquet, row 0, position 1: the candidates and the realized token sum to "
            "1.511, expected at most 1",
        ),
    ],
    "in row i, store the prediction of token i from the preceding tokens": [
        (
            lambda: cache_of(topk_ids=[[97], [98], []], topk_logprobs=[[-1.0], [-0.5], []]),
            "a.parquet, row 0, position 0: the first token has a prediction, but row 0 must "
            "be empty: row i predicts token i, not token i + 1",
        ),
        (
            lambda: cache_of(realized_logprob=[-1.0, None, None]),
            "a.parquet, row 0, position 0: the first token has a prediction, but row 0 must "
            "be empty: row i predicts token i, not token i + 1",
        ),
        (
            lambda: cache_of(
                input_ids=[97, *b"abcdefgh" * 5],
                topk_ids=[[], *([i] for i in b"bcdefgha" * 5)],
                topk_logprobs=[[], *[[-0.5]] * 40],
            ),
            "a.parquet, row 0: its rows are shifted by one: 98% of the rows contain the "
            "next token as a candidate, but only 0% contain their own token",
        ),
    ],
    "create or download the cache again": [
        (
            lambda: cache_of(topk_logprobs=[[], [-0.5], [-1.0]]),
            "a.parquet, row 0, position 2: 2 topk_ids, but 1 topk_logprobs",
        ),
        (
            lambda: cache_of(topk_ids=[[], [98]], topk_logprobs=[[], [-0.5]]),
            "a.parquet, row 0: 3 tokens, but 2 topk_ids",
        ),
        (
            lambda: cache_of(input_ids=[97, None, 99]),
            "a.parquet, row 0, position 1: input_ids contains null",
        ),
        (
            lambda: cache_of(input_ids=[97, 1.5, 99]),
            "a.parquet, row 0: input_ids has the type double, expected integers",
        ),
        (
            lambda: cache_of(topk_ids=[[], [2**32 + 98], [99, 98]]),
            "a.parquet, row 0, position 1: topk_ids contains 4294967394, expected "
            "-2147483648..2147483647",
        ),
        (
            lambda: responses(vllm(None, {"98": {"logprob": -1}, f"{10**20}": {"logprob": -2}})),
            "a.jsonl, line 1, position 1: candidates contains 100000000000000000000, "
            "expected -2147483648..2147483647",
        ),
        (
            lambda: responses({**vllm(None, {"98": {"logprob": -1}}), "loss_mask": [True]}),
            "a.jsonl, line 1: loss_mask has 1 values, expected one for each of 2 tokens",
        ),
        (
            lambda: responses({**vllm(None, {"98": {"logprob": -1}}), "labels": "x"}),
            "a.jsonl, line 1: labels is not a list",
        ),
    ],
    "correct or remove the footer": [
        (
            lambda: cache_of({"k": "1"}),
            "a.parquet, row 0, position 2: a row has 2 candidates, but the footer has k=1",
        ),
        (lambda: cache_of({"k": "x"}), "a.parquet: its footer has k=x, expected a number"),
        (
            lambda: cache_of({"vocab_size": "98"}),
            "a.parquet, row 0, position 1: it has the id 98, but the footer has vocab_size=98",
        ),
        (
            lambda: cache_of({"normalized": "topk"}),
            "a.parquet, row 0, position 1: its probabilities sum to 0.6065, but the footer "
            "has normalized=topk",
        ),
    ],
    "write the cache with this version of xtok": [
        (lambda: cache_of({"log_base": "2"}), "a.parquet: its footer has log_base=2, expected e"),
        (
            lambda: cache_of({"convention": "N"}),
            "a.parquet: its footer has convention=N, expected T",
        ),
        (
            lambda: cache_of({"format_version": "99"}),
            "a.parquet: its footer has format_version=99, expected 1",
        ),
    ],
    "create or download the cache again, with its compression_config.yaml": [
        (
            lambda: compressed("d: 512\n"),
            "compression_config.yaml: invalid config: the key d, k or exact_k is missing",
        ),
        (
            lambda: compressed(None),
            "a.parquet: its rows are compressed, but compression_config.yaml is missing",
        ),
    ],
    "pass a cache with at least one row": [
        (lambda: checked(file("a.parquet")), "a.parquet: the file is empty"),
        (lambda: to_bytes(str(empty_cache()), "out.parquet"), "the files contain no rows"),
    ],
    "check the path and its permissions; if the file is damaged, download it again": [
        (lambda: checked(file("a.parquet", b"PAR1")), "the cache a.parquet cannot be read: …"),
        (
            lambda: checked(file("a.jsonl.gz", gzip.compress(b'{"prompt_logprobs": []}\n')[:-9])),
            "the cache a.jsonl.gz cannot be read: …",
        ),
    ],
    "give one JSON object per line": [
        (lambda: checked(file("a.jsonl", "{\n")), "a.jsonl, line 1: not JSON: …"),
    ],
    "use Parquet with the columns input_ids, topk_ids and topk_logprobs, DistillKit's "
    "Parquet (input_ids, token_ids, top_values), or JSON lines with responses of vLLM "
    "(prompt_logprobs) or SGLang (meta_info)": [
        (
            lambda: open_cache(Path(file("a.jsonl", '{"prompt_logprobs": []}\n')), "neutral"),
            "a.jsonl: the file is not Parquet, so it is not a neutral cache",
        ),
        (
            lambda: open_cache(parquet(input_ids=[[97]], logprobs=[[0.5]])),
            "a.parquet: the format is unknown; the columns are: input_ids, logprobs",
        ),
        (
            lambda: responses({"text": "a"}),
            "a.jsonl: the file contains neither Parquet nor responses with prompt_logprobs or "
            "meta_info; line 1 contains: text",
        ),
        (
            lambda: projected(xtok.ProjectConfig(source="vllm")),
            "a.parquet: the file is Parquet, so it is not a vllm cache",
        ),
    ],
    "send requests with prompt_logprobs: K, return_token_ids: true and max_tokens: 1": [
        (
            lambda: responses(vllm(None, {"x": 1})),
            "a.jsonl, line 1, position 1: prompt_logprobs is not in vLLM's format",
        ),
        (
            lambda: responses(vllm(None, {"98": {"logprob": -1}}, ids=None)),
            "a.jsonl, line 1: no prompt_token_ids for 2 rows",
        ),
    ],
    "store the rows as the server returned them, with the ids of the request": [
        (
            lambda: responses(
                vllm(None, {"98": {"logprob": -1}}, {"7": {"logprob": -1}}, ids=b"abc")
            ),
            "a.jsonl, line 1, position 2: the realized token 99 is not a candidate, or "
            "the candidate has a different log-probability",
        ),
        (
            lambda: responses(sglang([[None, 97], [-1.0, 98]], [None, [[-2.0, 98]]])),
            "a.jsonl, line 1, position 1: the realized token 98 is not a candidate, or "
            "the candidate has a different log-probability",
        ),
    ],
    "send requests with return_logprob: true, logprob_start_len: 0 and top_logprobs_num: K": [
        (
            lambda: responses(
                {
                    "meta_info": {
                        "input_token_logprobs": [[None, 98]],
                        "input_top_logprobs": [None],
                        "prompt_tokens": 3,
                    }
                }
            ),
            "a.jsonl, line 1: the response contains only the last 1 of 3 prompt tokens",
        ),
        (
            lambda: responses({"meta_info": {"input_token_logprobs": []}}),
            "a.jsonl, line 1: input_token_logprobs or input_top_logprobs is missing "
            "or has an unknown layout; meta_info has: input_token_logprobs",
        ),
    ],
    "store them in different files": [
        (
            lambda: responses(
                {**vllm(None, {"98": {"logprob": -1}}), "system_fingerprint": "xtok project"},
                vllm(None, {"98": {"logprob": -1}}),
            ),
            "a.jsonl, line 2: the file mixes responses of a server with the output of xtok project",
        ),
    ],
    "request this text from the server again, or delete the line": [
        (
            lambda: responses(
                {"prompt_logprobs": [], "prompt_token_ids": []}, {"error": "too long"}
            ),
            "a.jsonl, line 2: the response is an error: too long",
        ),
    ],
    "pass the teacher that made the ids, or remove the columns text and messages, so "
    "that xtok decodes the ids": [
        (
            lambda: projected(text="abd"),
            "a.parquet, row 0: its ids do not spell its text; the first difference is at byte 2",
        ),
    ],
    "pass the teacher and the template that made the ids, or remove the columns text "
    "and messages, so that xtok decodes the ids": [
        (
            lambda: projected(messages=[QUESTION], template="plain"),
            "a.parquet, row 0: the teacher's template renders the row's messages to different ids",
        ),
    ],
    "write the data to a file first; xtok reads the file more than once": [
        (
            lambda: to_bytes(create("pipe.jsonl", os.mkfifo), "out.parquet"),
            "pipe.jsonl is a pipe, not a regular file",
        ),
    ],
    "pip install pyarrow, or in a clone of xtok: pip install -e '.[parquet]'": [
        (
            lambda: with_module("pyarrow", lambda: to_bytes(file("a.jsonl"), "a.parquet")),
            "a.parquet requires the package pyarrow, which is not installed",
        ),
    ],
    "choose a different path": [
        (lambda: to_bytes(file("a.parquet"), "a.parquet"), "the output a.parquet is an input"),
    ],
    "drop or rename the column": [
        (
            lambda: (
                cache_of(model="gpt"),
                to_bytes("a.parquet", "a.jsonl", xtok.ProjectConfig(to="vllm")),
            ),
            "a.parquet: the column 'model' has the same name as a field of vLLM's responses",
        ),
    ],
    "drop the column, or convert it to strings or numbers": [
        (
            lambda: (
                (
                    cache_of(when=b"\xff"),
                    to_bytes("a.parquet", "a.jsonl", xtok.ProjectConfig(to="vllm")),
                )
            ),
            "a.parquet: the column 'when' has the type binary, which JSON does not support",
        ),
    ],
    "for back_map=, build a map from the teacher (rows) to the student (columns)": [
        (
            lambda: (
                (
                    cache_of(),
                    xtok.project(
                        "a.parquet",
                        bytes_to_pieces(),
                        "out.parquet",
                        back_map=create(
                            "forth.safetensors", xtok.build(*bytes_to_pieces().tokenizers).save
                        ),
                    ),
                )
            ),
            "forth.safetensors: the map is for bytes → small.model, expected "
            "small.model → bytes (teacher → student)",
        ),
    ],
    "name it a.parquet": [
        (lambda: to_bytes(file("a.jsonl"), "a.txt"), "the output a.txt does not end in .parquet"),
    ],
}

test_teacher_errors = messages_test(ERRORS)
