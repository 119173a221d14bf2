"""Caches of predictions as files: xtok's own, those of servers, and those that trainers read.

In a neutral cache row i is of token i, and row 0 is empty. Trainers' rows are of the next token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import CacheFormat, CacheKind
from xtok.counting.texts import TextShard, lines
from xtok.input_files import decompressed, need, parquet_file, reading
from xtok.projecting.distillkit import compression_of, decompressed_rows
from xtok.projecting.stored import (
    StoredRows,
    TopK,
    bounds_of,
    cache_error,
    candidates_of,
    chosen_rows,
    without_impossible,
)

CANDIDATES = 1 << 20
"""Candidates of the rows that are worked on at a time, about: 8 MB of them."""

PAD = -1e4
"""What fills a row for readers that want rows of one width, and make NaN of −inf."""

_PREDICTIONS = ("input_ids", "topk_ids", "topk_logprobs", "rest_logprob", "realized_logprob")
_PER_TOKEN = (*_PREDICTIONS, "loss_mask", "labels", "attention_mask", "position_ids")
_DISTILLKIT = ("compressed_logprobs", "bytepacked_indices", "token_ids", "top_values")
_ANSWER = (
    *("choices", "prompt_logprobs", "prompt_token_ids", "prompt", "object"),
    *("created", "model", "usage", "service_tier", "system_fingerprint", "kv_transfer_params"),
    *("meta_info", "output_ids", *_PER_TOKEN),
)
_AGAIN = "make the cache again, or fetch it again"
_FORMATS = "xtok help project names the formats"


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A file of stored predictions, and what it says of itself."""

    path: Path
    kind: CacheKind
    about: Mapping[str, Any] = field(default_factory=dict)  # the footer; DistillKit's config

    @property
    def renormalized(self) -> bool:
        """Whether probabilities were made to sum to 1 over the candidates: the rest is unknown."""
        return bool(self.about.get("normalized") == "topk")

    @property
    def temperature(self) -> str:
        """The temperature of the predictions, as the file has it; 1 if it does not say."""
        return str(self.about.get("temperature", "1.0"))


def open_cache(path: Path, kind: CacheKind | None = None) -> Cache:
    """Tell the format of a file from its contents, if it is not given, and read what it says.

    Raises:
        XtokError: if it cannot be read, or is of no known format.
    """
    with reading(path, "the cache"), path.open("rb") as raw:
        if raw.read(4) != b"PAR1":
            raw.seek(0)
            first = next((line for line in decompressed(raw, path) if line.strip()), b"")
            return Cache(path=path, kind=kind or _kind_of_line(_parsed(first, path), path))
        schema = parquet_file(path).schema_arrow
    known: dict[CacheKind, tuple[str, ...]] = {
        "neutral": _PREDICTIONS[:3],
        "distillkit": ("input_ids", *_DISTILLKIT[:2]),
    }
    of_columns = [kind for kind, names in known.items() if {*names} <= {*schema.names}]
    if {"input_ids", *_DISTILLKIT[2:]} <= {*schema.names}:
        of_columns.append("distillkit")
    if not of_columns or (kind and kind not in of_columns):
        logits = "; its logits tell no rest" if "packed_indices" in schema.names else ""
        columns = ", ".join(schema.names)
        problem = f"no cache of a known format, its columns are: {columns}{logits}"
        raise cache_error(path, problem, _FORMATS)
    about: dict[str, Any] = {
        key.decode(): value.decode("utf-8", "replace")
        for key, value in (schema.metadata or {}).items()
        if key not in (b"ARROW:schema", b"pandas", b"huggingface")
    }
    kind = kind or of_columns[0]
    if kind == "distillkit" and _DISTILLKIT[0] in schema.names:
        about["compression"] = compression_of(path)
    return Cache(path=path, kind=kind, about=about)


def _kind_of_line(value: Any, path: Path) -> CacheKind:
    for answer in _answers(value):
        if "prompt_logprobs" in answer:
            return "vllm"
        if "meta_info" in answer:
            return "sglang"
    raise cache_error(
        path, "no Parquet, and no answers with prompt_logprobs or meta_info", _FORMATS
    )


def read_cache(
    cache: Cache, shard: TextShard, candidates: int = CANDIDATES
) -> Iterator[tuple[StoredRows, int]]:
    """Read a shard of a cache, rows of about so many candidates at a time; nothing is checked.

    The cut depends on the file alone.

    Yields:
        rows, and the bytes on disk that they took, about.

    Raises:
        XtokError: if the file is damaged, or not what its format demands.
    """
    with reading(cache.path, "the cache"):
        if shard.format == "parquet":
            yield from _parquet_rows(cache, shard, candidates)
            return
        parse = _vllm if cache.kind == "vllm" else _sglang
        pending: list[_Answer] = []
        with shard.path.open("rb") as raw:
            done = shard.start
            for offset, line in lines(shard, decompressed(raw, shard.path), -1):
                if line.strip():
                    place = f"{shard.path}, the line at byte {offset}"
                    pending += parse(_parsed(line, place), place)
                if sum(len(answer.ids) for answer in pending) >= candidates:
                    yield _joined(pending), raw.tell() - done
                    pending, done = [], raw.tell()
            if pending:
                yield _joined(pending), max(0, shard.start + shard.size - done)


def _parsed(line: bytes, place: object) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise cache_error(place, f"no JSON: {error}", "give one JSON object per line") from error


# Parquet


def _parquet_rows(
    cache: Cache, shard: TextShard, candidates: int
) -> Iterator[tuple[StoredRows, int]]:
    file = parquet_file(shard.path, buffer_size=1 << 20)
    about = file.metadata
    read = rows_of_neutral if cache.kind == "neutral" else partial(_distillkit, cache)
    stop = about.num_row_groups if shard.stop is None else shard.stop
    for group in range(shard.start, stop):
        first = sum(about.row_group(before).num_rows for before in range(group))
        part = about.row_group(group)
        values = max(part.column(i).num_values for i in range(part.num_columns))
        at_once = max(1, part.num_rows * candidates // max(1, values))
        for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
            names = [f"{shard.path}, row {first + i}" for i in range(len(batch))]
            yield read(batch, names), shard.size * len(batch) // part.num_rows
            first += len(batch)


def _flat(array: Any, dtype: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return an array of lists as bounds and flat values; without a dtype, they stay pyarrow's."""
    import pyarrow.compute

    lengths = pyarrow.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    values = array.flatten()
    if dtype is not None:
        values = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return bounds_of(lengths), values


def _rows_of_lists(batch: Any, name: str, dtype: Any) -> tuple[Any, Any, NDArray[Any]]:
    """Return the bounds of documents, those of their rows, and flat values."""
    bounds, rows = _flat(batch.column(name), None)
    return bounds, *_flat(rows, dtype)


def _others(batch: Any) -> dict[str, Any]:
    own = (*_PER_TOKEN, *_DISTILLKIT)
    return {name: batch.column(name) for name in batch.schema.names if name not in own}


def _mask(batch: Any, bounds: NDArray[np.int64], names: list[str]) -> NDArray[np.bool_] | None:
    for name, dtype in (("loss_mask", np.bool_), ("labels", np.int64)):
        if name in batch.schema.names:
            given, values = _flat(batch.column(name), dtype)
            _same_lengths(bounds, given, names, name)
            mask: NDArray[np.bool_] = values if dtype is np.bool_ else values != -100
            return mask
    return None


def _same_lengths(
    bounds: NDArray[np.int64], other: NDArray[np.int64], names: list[str], what: str
) -> None:
    differs = np.flatnonzero(np.diff(bounds) != np.diff(other))
    if len(differs):
        row = int(differs[0])
        tokens, rows = (int(np.diff(b)[row]) for b in (bounds, other))
        raise cache_error(names[row], f"{tokens} tokens, and {rows} {what}", _AGAIN)


def rows_of_neutral(batch: Any, places: list[str] | None = None) -> StoredRows:
    """Return the rows of a record batch of a neutral cache; they are not checked."""
    names = places or [f"row {i}" for i in range(len(batch))]
    bounds, token_ids = _flat(batch.column("input_ids"), np.int32)
    rows, starts, ids = _rows_of_lists(batch, "topk_ids", np.int32)
    _, other, logprobs = _rows_of_lists(batch, "topk_logprobs", np.float32)
    _same_lengths(bounds, rows, names, "topk_ids")
    if not np.array_equal(starts, other):
        raise cache_error(names[0], "topk_ids and topk_logprobs are of different lengths", _AGAIN)
    given = []
    for name in _PREDICTIONS[3:]:
        values = np.full(len(token_ids), np.nan, np.float32)
        if name in batch.schema.names:
            of, values = _flat(batch.column(name), np.float32)
            _same_lengths(bounds, of, names, name)
        given.append(values)
    topk = TopK(token_ids, bounds, starts, ids, logprobs, *given)
    return StoredRows(topk, _others(batch), names, _mask(batch, bounds, names))


def _distillkit(cache: Cache, batch: Any, names: list[str]) -> StoredRows:
    """`compressed_logit_schema` and `decompress_to_sparse` of DistillKit a61c2e7.

    Its row i predicts token i + 1; rows are of one width, padded with −inf or large negatives.
    """
    bounds, token_ids = _flat(batch.column("input_ids"), np.int32)
    if "token_ids" in batch.schema.names:
        rows, starts, ids = _rows_of_lists(batch, "token_ids", np.int32)
        _, other, logprobs = _rows_of_lists(batch, "top_values", np.float32)
        if not np.array_equal(starts, other):
            raise cache_error(names[0], "token_ids and top_values are of different lengths", _AGAIN)
    else:
        rows, *packed = _rows_of_lists(batch, "bytepacked_indices", np.uint8)
        _, *values = _rows_of_lists(batch, "compressed_logprobs", np.uint8)
        ids, logprobs = decompressed_rows(
            (packed[0], packed[1]), (values[0], values[1]), cache.about["compression"], names[0]
        )
        starts = np.arange(len(ids) + 1) * ids.shape[1]
        ids, logprobs = ids.ravel(), logprobs.ravel()
    # Token i takes row i − 1 of its document, the first none.
    lengths = np.diff(bounds)
    place = np.arange(len(token_ids)) - np.repeat(bounds[:-1], lengths)
    row = np.repeat(rows[:-1], lengths) + place - 1
    row[(place == 0) | (row >= np.repeat(rows[1:], lengths))] = -1
    unknown = np.full(len(starts) - 1, np.nan, np.float32)
    given = TopK(token_ids, bounds, starts, ids, logprobs, unknown, unknown)
    topk = without_impossible(chosen_rows(given, row, token_ids, bounds))
    return StoredRows(topk, _others(batch), names, _mask(batch, bounds, names))


# Servers' answers

_ASK = "ask the server with prompt_logprobs: K, return_token_ids: true, max_tokens: 1"


class _Answer(NamedTuple):
    """A sequence's predictions as they came: row i of token i, in any order."""

    token_ids: Sequence[int] | None  # None where the answer does not tell
    counts: list[int]
    ids: list[int]
    logprobs: list[float]
    columns: dict[str, str | None]
    place: str


def _answers(value: Any) -> Iterator[dict[str, Any]]:
    """Return the answers of a line: a body, its choices, or several of them."""
    if isinstance(value, list):
        for one in value:
            yield from _answers(one)
        return
    if not isinstance(value, dict):
        return
    choices = value.get("choices")
    choices = choices if isinstance(choices, list) else []
    chosen = [c for c in choices if isinstance(c, dict) and c.get("prompt_logprobs")]
    prompt = value.get("prompt_token_ids", value.get("input_ids", value.get("prompt")))
    for number, choice in enumerate(chosen or [{}]):
        answer = {name: v for name, v in value.items() if name != "choices"}
        answer |= {name: choice[name] for name in choice if name in _ANSWER}
        ids = choice.get("prompt_token_ids", prompt)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            ids = ids[number] if number < len(ids) else None
        answer["prompt_token_ids"] = ids if isinstance(ids, list) else None
        if isinstance(prompt, str):
            answer.setdefault("text", prompt)
        if len(chosen) > 1 and "id" in answer:
            answer["id"] = f"{answer['id']}-{number}"
        yield answer


def _columns_of(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """Return an answer's other fields, all strings, so that all rows have one schema."""
    return {
        name: value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
        for name, value in answer.items()
        if name not in _ANSWER
    }


_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


def _vllm(value: Any, place: str) -> Iterator[_Answer]:
    """`prompt_logprobs` of vLLM 0.33: null, then `{"<id>": {"logprob": …, "rank": …}}`."""
    for answer in _answers(value):
        rows = answer.get("prompt_logprobs")
        if not isinstance(rows, list):
            raise cache_error(place, "an answer without prompt_logprobs", _ASK)
        counts, ids, logprobs = list[int](), list[int](), list[float]()
        try:
            for row in rows:
                counts.append(len(row or ()))
                if row:
                    ids += map(int, row)
                    logprobs += [entry["logprob"] for entry in row.values()]
        except _MALFORMED as error:
            where = f"{place}, position {len(counts) - 1}"
            problem = "its prompt_logprobs are not those of vLLM"
            raise cache_error(where, problem, _ASK) from error
        tokens = answer["prompt_token_ids"]
        yield _Answer(tokens, counts, ids, logprobs, _columns_of(answer), place)


def _sglang(value: Any, place: str) -> Iterator[_Answer]:
    """`input_token_logprobs` and `input_top_logprobs` of SGLang: `[logprob, id, text]`."""
    for answer in _answers(value):
        try:
            about = answer["meta_info"]
            tokens = [entry[1] for entry in about["input_token_logprobs"]]
            counts, ids, logprobs = [], list[int](), list[float]()
            pairs = zip(about["input_token_logprobs"], about["input_top_logprobs"], strict=True)
            for own, top in pairs:
                entries = {int(i): float(lp) for lp, i, *_ in top or ()}
                if top and own[0] is not None:
                    entries.setdefault(int(own[1]), float(own[0]))
                counts.append(len(entries))
                ids += entries
                logprobs += entries.values()
        except _MALFORMED as error:
            raise cache_error(
                place,
                "no answer of SGLang with the log-probabilities of its input",
                "ask for return_logprob, logprob_start_len 0, and top_logprobs_num K",
            ) from error
        if "text" in answer and not isinstance(answer.get("prompt"), str):
            del answer["text"]  # what the server wrote
        yield _Answer(tokens, counts, ids, logprobs, _columns_of(answer), place)


def _joined(answers: Sequence[_Answer]) -> StoredRows:
    arrow = need("pyarrow", Path(answers[0].place))
    for answer in answers:
        if answer.token_ids is None or len(answer.token_ids) != len(answer.counts):
            told = "no" if answer.token_ids is None else len(answer.token_ids)
            raise cache_error(
                answer.place,
                f"{told} prompt_token_ids for {len(answer.counts)} rows",
                _ASK,
            )
    tokens = np.array([*chain.from_iterable(a.token_ids or () for a in answers)], np.int64)
    bounds = bounds_of([len(answer.counts) for answer in answers])
    starts = bounds_of([*chain.from_iterable(answer.counts for answer in answers)])
    ids = np.fromiter(chain.from_iterable(answer.ids for answer in answers), np.int64)
    logprobs = np.fromiter(chain.from_iterable(a.logprobs for a in answers), np.float32)
    unknown = np.full(len(tokens), np.nan, np.float32)
    names = dict.fromkeys(chain.from_iterable(answer.columns for answer in answers))
    columns = {n: arrow.array([a.columns.get(n) for a in answers], arrow.string()) for n in names}
    topk = TopK(_int32(tokens), bounds, starts, _int32(ids), logprobs, unknown, unknown)
    return StoredRows(topk, columns, [answer.place for answer in answers])


def _int32(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return ids; those that no vocabulary has are −1."""
    return np.where((ids < 0) | (ids >= 2**31), -1, ids).astype(np.int32)


# What is written


def neutral_table(rows: StoredRows) -> Any:
    """Return rows as a pyarrow table of a neutral cache."""
    topk = rows.topk
    columns = {
        "input_ids": _lists(topk.bounds, topk.token_ids),
        "topk_ids": _lists(topk.bounds, _lists(topk.starts, topk.ids)),
        "topk_logprobs": _lists(topk.bounds, _lists(topk.starts, topk.logprobs)),
        "rest_logprob": _lists(topk.bounds, _nullable(topk.rest_logprob)),
        "realized_logprob": _lists(topk.bounds, _nullable(topk.realized_logprob)),
    }
    if rows.loss_mask is not None:
        columns["loss_mask"] = _lists(topk.bounds, rows.loss_mask)
    return need("pyarrow", Path("a cache")).table({**rows.columns, **columns})


def _lists(bounds: NDArray[np.int64], values: Any) -> Any:
    import pyarrow

    values = pyarrow.array(values) if isinstance(values, np.ndarray) else values
    return pyarrow.ListArray.from_arrays(bounds.astype(np.int32), values)


def _nullable(values: NDArray[np.float32]) -> Any:
    import pyarrow

    return pyarrow.array(values, mask=np.isnan(values))


class Target(NamedTuple):
    """What a format is told of the student."""

    model: str
    width: int  # K
    pad_id: int  # fills rows; one that a student gives next to nothing


def _targets(
    topk: TopK, target: Target
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
    """Return ids, log-probabilities and which are real, `[N, K]`; row i is of token i + 1."""
    lengths = np.diff(topk.bounds)
    rows = np.arange(1, len(topk.token_ids) + 1)
    rows[topk.bounds[1:][lengths > 0] - 1] = -1  # the last token's
    starts, kept = candidates_of(topk.starts, rows)
    counts = np.diff(starts)
    is_real = np.arange(target.width) < counts[:, None]
    ids = np.full(is_real.shape, target.pad_id, np.int32)
    logprobs = np.full(is_real.shape, PAD, np.float32)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts) < target.width
    ids[is_real], logprobs[is_real] = topk.ids[kept][within], topk.logprobs[kept][within]
    return ids, logprobs, is_real


def _matrices(bounds: NDArray[np.int64], values: NDArray[Any]) -> Any:
    starts = np.arange(len(values) + 1) * values.shape[1]
    return _lists(bounds, _lists(starts, values.ravel()))


def axolotl_table(rows: StoredRows, target: Target) -> Any:
    """Return the prepared columns of axolotl 0.19, as `DataCollatorForKD` reads them.

    Renormalized over the candidates. Its loss counts padding in the student's normalizer, so the
    padding is an id that a student gives next to nothing.
    """
    import pyarrow

    topk = rows.topk
    ids, logprobs, is_real = _targets(topk, target)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.where(is_real, np.exp(logprobs), 0).sum(axis=1, keepdims=True)
        logprobs = np.where(is_real, logprobs - np.log(sums), np.float32(-1e9))
    mask = np.ones(len(topk.token_ids), np.bool_) if rows.loss_mask is None else rows.loss_mask
    is_target = is_real & np.append(mask[1:], False)[:, None]
    columns = {
        "input_ids": topk.token_ids,
        "attention_mask": np.ones(len(topk.token_ids), np.int8),
        "labels": np.where(mask, topk.token_ids, -100).astype(np.int32),
    }
    targets = {
        "target_token_ids": ids,
        "target_logprobs": logprobs.astype(np.float32),
        "target_mask": is_target.astype(np.int8),
    }
    return pyarrow.table({
        **rows.columns,
        **{name: _lists(topk.bounds, values) for name, values in columns.items()},
        **{name: _matrices(topk.bounds, values) for name, values in targets.items()},
    })  # fmt: skip


def distillkit_table(rows: StoredRows, target: Target) -> Any:
    """Return DistillKit's uncompressed columns, a row less than tokens.

    Its trainer masks row i by `labels[i]`, so that is -100 where row i predicts nothing.
    """
    import pyarrow

    topk = rows.topk
    ids, logprobs, is_real = _targets(topk, target)
    is_target = is_real.any(axis=1)
    if rows.loss_mask is not None:
        is_target &= np.append(rows.loss_mask[1:], False)
    is_last = np.zeros(len(topk.token_ids), np.bool_)
    is_last[topk.bounds[1:][np.diff(topk.bounds) > 0] - 1] = True
    bounds = bounds_of(np.maximum(np.diff(topk.bounds) - 1, 0))
    labels = np.where(is_target, topk.token_ids, -100).astype(np.int64)
    return pyarrow.table({
        **rows.columns,
        "input_ids": _lists(topk.bounds, topk.token_ids.astype(np.uint64)),
        "labels": _lists(topk.bounds, labels),
        "token_ids": _matrices(bounds, ids[~is_last]),
        "top_values": _matrices(bounds, logprobs[~is_last]),
    })  # fmt: skip


def vllm_lines(rows: StoredRows, target: Target) -> Iterator[bytes]:
    """Return a line per document: the answer of vLLM's `/v1/completions` to its ids.

    Candidates stand in the order of their ranks, the text's own token last if it is none of them.
    """
    topk = rows.topk
    columns = [rows.values(name) for name in rows.columns]
    tokens, realized = topk.token_ids.tolist(), topk.realized_logprob.tolist()
    bounds, starts = topk.bounds.tolist(), topk.starts.tolist()
    for document, others in enumerate(
        zip(*columns, strict=True) if columns else [()] * len(rows.places)
    ):
        begin, end = bounds[document : document + 2]
        first, last = starts[begin], starts[end]
        ids, logprobs = topk.ids[first:last].tolist(), topk.logprobs[first:last].tolist()
        entries: list[dict[str, Any] | None] = []
        for i in range(begin, end):
            some = range(starts[i] - first, starts[i + 1] - first)
            row = {
                str(ids[j]): {"logprob": logprobs[j], "rank": n, "decoded_token": None}
                for n, j in enumerate(some, 1)
            }
            if row and realized[i] == realized[i]:
                own = {"logprob": realized[i], "rank": len(row) + 1, "decoded_token": None}
                row.setdefault(str(tokens[i]), own)
            entries.append(row or None)
        choice = {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "length",
            "prompt_token_ids": tokens[begin:end], "prompt_logprobs": entries,
        }  # fmt: skip
        line = {
            **dict(zip(rows.columns, others, strict=True)),
            "object": "text_completion", "model": target.model, "choices": [choice],
        }  # fmt: skip
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


WRITERS: Mapping[CacheFormat, Callable[[StoredRows, Target], Any]] = {
    "axolotl": axolotl_table,
    "distillkit": distillkit_table,
    "vllm": vllm_lines,
}
"""What makes a table, or lines, of rows."""
