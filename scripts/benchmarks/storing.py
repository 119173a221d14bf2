"""Cost of `xtok project`: core-hours and gigabytes per billion student tokens.

The teacher is an n-gram model, so its predictions take no time. `unseen`: each document occurs
once; `seen`: additional cost of the same documents a second time.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import xtok
from benchmarks.harness import Row, chosen, pieces, tokenizer
from benchmarks.ngrams import ORDER, NGrams, Sparse
from xtok.building.build import build
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig

PAIRS = (("smollm2", "gemma3"), ("llama3", "qwen"))
CANDIDATES = (16, 64, 256)
CHARACTERS, TEXTS = 3000, 120
BILLION = 1e9
FORMATS: dict[CacheFormat, str] = {"neutral": "parquet", "distillkit": "parquet", "vllm": "jsonl"}


def cost(options: Namespace) -> Iterator[Row]:
    """Measure pairs and numbers of candidates; `--size` scales the texts."""
    texts = pieces(options, CHARACTERS)
    some = texts[: max(4, int(TEXTS * options.size))]
    for label, names in chosen(PAIRS, options):
        pair = xtok.load_pair(*map(tokenizer, names))
        rows = pair.tokenizers[1].library_arrays(some)
        model = NGrams(pair.tokenizers[1].library_arrays(texts[len(texts) // 4 :]))
        predicted = [_predictions(row, model) for row in rows]
        with TemporaryDirectory() as folder:
            back_map = Path(folder, "back.safetensors")
            build(pair.reversed, config=BACK_MAP).save(back_map)
            for k in CANDIDATES:
                table = _cache(some, rows, predicted, k)
                yield {"student ← teacher": label, "K": k} | _costs(table, pair, back_map, k)


def _costs(table: Any, pair: xtok.Pair, back_map: Path, k: int) -> Row:
    """Project a cache in each format; then its first row, all of them, and all of them twice."""
    config, folder = ProjectConfig(top_k=k), back_map.parent
    tables = [table.slice(0, 1), table, pa.concat_tables([table, table])]
    cached = [folder / f"{n}-{k}.parquet" for n in ("one", "all", "twice")]
    for some, file in zip(tables, cached, strict=True):
        pq.write_table(some, file)
    sizes = {}
    for to, kind in FORMATS.items():
        out = folder / f"{to}-{k}" / f"student.{kind}"
        out.parent.mkdir()
        of_format = replace(config, to=to)
        done = xtok.project(cached[1], pair, out, of_format, back_map=back_map)  # and compiles
        sizes[f"{to}, GB"] = out.stat().st_size / done.student_tokens
    seconds, tokens = [], []
    for file in cached:
        start = time.process_time()
        made = xtok.project(file, pair, folder / f"of-{file.name}", config, back_map=back_map)
        seconds.append(time.process_time() - start)
        tokens.append(made.student_tokens)
    unseen, seen = np.diff(seconds) / np.diff(tokens) * BILLION / 3600
    times: Row = {"unseen, core-hours": unseen, "seen, core-hours": seen}
    return {"tokens": done.student_tokens} | times | sizes


def _predictions(ids: NDArray[np.int32], model: NGrams) -> list[Sparse]:
    """Return the n-gram model's predictions for each token except the first."""
    before = (ids[max(0, j - ORDER + 1) : j].tolist() for j in range(1, len(ids)))
    return [model.prediction(context, max(CANDIDATES)) for context in before]


def _cache(
    texts: Sequence[str], rows: Sequence[NDArray[np.int32]], predicted: Sequence[list[Sparse]],
    top_k: int,
) -> Any:  # fmt: skip
    """Return a neutral cache."""
    none: list[Any] = [[]]  # nothing predicts the first token
    return pa.table({
        "text": texts,
        "input_ids": [row.tolist() for row in rows],
        "topk_ids": [none + [ids[:top_k].tolist() for ids, _ in row] for row in predicted],
        "topk_logprobs": [
            none + [np.log(p[:top_k]).astype(np.float32).tolist() for _, p in row]
            for row in predicted
        ],
    })  # fmt: skip
