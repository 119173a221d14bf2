"""Caches of predictions as files: xtok's own, those of servers, and those that trainers read.

In a neutral cache row i is of token i, and row 0 is empty. Trainers' rows are of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import CacheFormat, CacheKind
from xtok.files.opening import need, parquet_file, reading
from xtok.files.shards import Shard
from xtok.projecting.answers import kind_of_answers, read_answers, vllm_lines
from xtok.projecting.distillkit import compression_of, decompressed_rows
from xtok.projecting.stored import (
    AGAIN,
    PER_TOKEN,
    StoredRows,
    TopK,
    bounds_of,
    cache_error,
    candidates_of,
    chosen_rows,
    without_impossible,
)
from xtok.projecting.values import Bounds, lists, place_of

CANDIDATES = 1 << 20
"""Candidates of the rows that are worked on at a time, about: 8 MB of them."""

PAD = -1e4
"""What fills a row for readers that want rows of one width, and make NaN of −inf."""

FORMAT_VERSION = 1
"""Of neutral caches; a footer may tell it, and other versions are refused."""

_COLUMNS: Mapping[CacheKind, Sequence[tuple[str, ...]]] = {
    "neutral": [("input_ids", "topk_ids", "topk_logprobs")],
    "distillkit": [
        ("input_ids", "compressed_logprobs", "bytepacked_indices"),
        ("input_ids", "token_ids", "top_values"),
    ],
}
"""The columns that tell a format of Parquet, any one of the sets."""

_FOOTER = {
    "format_version": (str(FORMAT_VERSION),),
    "log_base": ("e",),
    "normalized": ("false", "topk"),
}
"""What a footer may say, if it does."""

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
        XtokError: if it cannot be read, is of no known format, or says that it holds what is not
            read: another base of the logarithms, rows of the next token, a newer version.
    """
    with reading(path, "the cache"):
        with path.open("rb") as raw:
            is_parquet = raw.read(4) == b"PAR1"
        if kind and is_parquet != (kind in _COLUMNS):
            what = "is Parquet" if is_parquet else "is no Parquet"
            raise cache_error(path, f"the file {what}, so it is no {kind} cache", _FORMATS)
        if not is_parquet:
            return Cache(path=path, kind=kind or kind_of_answers(path))
        schema = parquet_file(path).schema_arrow
        kind = _kind_of_columns(path, schema.names, kind)
        about: dict[str, Any] = {
            key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for key, value in (schema.metadata or {}).items()
            if key not in (b"ARROW:schema", b"pandas", b"huggingface")
        }
    known = {**_FOOTER, "convention": ("T" if kind == "neutral" else "N",)}
    for key, values in known.items():
        if about.get(key, values[0]) not in values:
            problem = f"its footer has {key}={about[key]}, and {' or '.join(values)} is read"
            raise cache_error(path, problem, "write it as this version of xtok does")
    if kind == "distillkit" and not {"token_ids", "top_values"} <= {*schema.names}:
        about["compression"] = compression_of(path)
    return Cache(path=path, kind=kind, about=about)


def _kind_of_columns(path: Path, names: Sequence[str], kind: CacheKind | None) -> CacheKind:
    """Tell a format of Parquet from the names of its columns."""
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise cache_error(path, f"two of its columns have the name {twice}", AGAIN)
    for known in [kind] if kind else _COLUMNS:
        if any({*columns} <= {*names} for columns in _COLUMNS[known]):
            return known
    logits = "; its logits tell no rest" if "packed_indices" in names else ""
    problem = f"no cache of a known format, its columns are: {', '.join(names)}{logits}"
    raise cache_error(path, problem, _FORMATS)


def read_cache(
    cache: Cache, shard: Shard, candidates: int = CANDIDATES
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
        else:
            yield from read_answers(shard, cache.kind, candidates)


# Parquet


def _parquet_rows(cache: Cache, shard: Shard, candidates: int) -> Iterator[tuple[StoredRows, int]]:
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
            places = [f"{shard.path}, row {first + i}" for i in range(len(batch))]
            yield read(batch, places), shard.size * len(batch) // max(1, part.num_rows)
            first += len(batch)


def _others(batch: Any, places: Sequence[object]) -> dict[str, Any]:
    """Return the columns that are carried through; Parquet does not check what is a string."""
    import pyarrow

    own = {*PER_TOKEN, *(name for columns in _COLUMNS["distillkit"] for name in columns)}
    others = batch.select([name for name in batch.schema.names if name not in own])
    if "text" in others.schema.names:
        kind = others.schema.field("text").type
        if str(kind) not in ("string", "large_string", "null"):
            raise cache_error(places[0], f"its text is {kind}, not a string", "leave it out")
    try:
        others.validate(full=True)
    except pyarrow.ArrowInvalid:
        for i, place in enumerate(places):
            try:
                others.slice(i, 1).validate(full=True)
            except pyarrow.ArrowInvalid as error:
                raise cache_error(place, f"it is damaged: {error}", AGAIN) from error
        raise
    return dict(zip(others.schema.names, others.columns, strict=True))


def _per_token(
    batch: Any, name: str, dtype: type, bounds: Bounds, places: Sequence[object]
) -> NDArray[Any] | None:
    """Return an optional column of a value per token; None if there is none."""
    column = batch.column(name) if name in batch.schema.names else None
    if column is None or str(column.type) == "null":
        return None
    [of], values = lists(column, name, 1, dtype, places, optional=dtype is np.float32)
    _same_lengths(bounds, of, ("tokens", name), places.__getitem__)
    return values


def _mask(batch: Any, bounds: Bounds, places: Sequence[object]) -> NDArray[np.bool_] | None:
    mask = _per_token(batch, "loss_mask", np.bool_, bounds, places)
    labels = None if mask is not None else _per_token(batch, "labels", np.int64, bounds, places)
    return mask if labels is None else labels != -100


def _same_lengths(
    a: Bounds, b: Bounds, what: tuple[str, str], place: Callable[[int], object]
) -> None:
    differs = np.flatnonzero(np.diff(a) != np.diff(b))
    if len(differs):
        index = int(differs[0])
        sizes = [int(bounds[index + 1] - bounds[index]) for bounds in (a, b)]
        problem = f"{sizes[0]} {what[0]}, and {sizes[1]} {what[1]}"
        raise cache_error(place(index), problem, AGAIN)


def _candidates(
    batch: Any, ids_name: str, logprobs_name: str, places: Sequence[object]
) -> tuple[Bounds, Bounds, NDArray[np.int32], NDArray[np.float32]]:
    """Return the bounds of documents and of their rows, candidates, and their log-probabilities."""
    names = ids_name, logprobs_name
    [rows, starts], ids = lists(batch.column(ids_name), ids_name, 2, np.int32, places)
    column = batch.column(logprobs_name)
    [others, other_starts], logprobs = lists(column, logprobs_name, 2, np.float32, places)
    _same_lengths(rows, others, names, places.__getitem__)
    _same_lengths(starts, other_starts, names, lambda row: place_of(row, places, [rows]))
    return rows, starts, ids, logprobs


def rows_of_neutral(batch: Any, places: Sequence[object] = ()) -> StoredRows:
    """Return the rows of a record batch of a neutral cache; they are not checked."""
    places = places or [f"row {i}" for i in range(len(batch))]
    [bounds], token_ids = lists(batch.column("input_ids"), "input_ids", 1, np.int32, places)
    rows, starts, ids, logprobs = _candidates(batch, "topk_ids", "topk_logprobs", places)
    _same_lengths(bounds, rows, ("tokens", "topk_ids"), places.__getitem__)
    unknown = np.full(len(token_ids), np.nan, np.float32)
    told = [
        _per_token(batch, name, np.float32, bounds, places)
        for name in ("rest_logprob", "realized_logprob")
    ]
    rest, realized = (unknown if values is None else values for values in told)
    topk = TopK(token_ids, bounds, starts, ids, logprobs, rest, realized)
    return StoredRows(topk, _others(batch, places), places, _mask(batch, bounds, places))


def _distillkit(cache: Cache, batch: Any, places: Sequence[object]) -> StoredRows:
    """`compressed_logit_schema` and `decompress_to_sparse` of DistillKit a61c2e7.

    Its row i predicts token i + 1; rows are of one width, padded with −inf or large negatives.
    """
    [bounds], token_ids = lists(batch.column("input_ids"), "input_ids", 1, np.int32, places)
    if "compression" not in cache.about:
        rows, starts, ids, logprobs = _candidates(batch, "token_ids", "top_values", places)
    else:
        names = "bytepacked_indices", "compressed_logprobs"
        packed, values = (lists(batch.column(name), name, 2, np.uint8, places) for name in names)
        rows = packed[0][0]
        _same_lengths(rows, values[0][0], names, places.__getitem__)
        both = [(bounds[1], data) for bounds, data in (packed, values)]
        found = decompressed_rows(both[0], both[1], cache.about["compression"], places[0])
        starts = np.arange(len(found[0]) + 1) * found[0].shape[1]
        ids, logprobs = found[0].ravel(), found[1].ravel()
    # Token i takes row i − 1 of its document, the first none.
    lengths = np.diff(bounds)
    place = np.arange(len(token_ids)) - np.repeat(bounds[:-1], lengths)
    row = np.repeat(rows[:-1], lengths) + place - 1
    row[(place == 0) | (row >= np.repeat(rows[1:], lengths))] = -1
    unknown = np.full(len(starts) - 1, np.nan, np.float32)
    given = TopK(token_ids, bounds, starts, ids, logprobs, unknown, unknown)
    topk = without_impossible(chosen_rows(given, row, token_ids, bounds))
    return StoredRows(topk, _others(batch, places), places, _mask(batch, bounds, places))


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
    logprobs = logprobs - logprobs.max(axis=1, keepdims=True)  # exp is 0 below −104
    with np.errstate(divide="ignore"):
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


WRITERS: Mapping[CacheFormat, Callable[[StoredRows, Target], Any]] = {
    "axolotl": axolotl_table,
    "distillkit": distillkit_table,
    "vllm": lambda rows, target: vllm_lines(rows, target.model),
}
"""What makes a table, or lines, of rows."""
