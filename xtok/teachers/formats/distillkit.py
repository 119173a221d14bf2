"""Read and write DistillKit's Parquet (commit a61c2e7), where row i predicts token i + 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.lines import read_text
from xtok._lib.opening import need
from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import without_padding
from xtok.predictions.topk import TopK, take_rows
from xtok.teachers.formats.columns import CacheColumns, StudentSide, list_array, next_tokens
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.tokenizers.table import MAX_WIDTH

COLUMNS = (
    ("input_ids", "compressed_logprobs", "bytepacked_indices"),
    ("input_ids", "token_ids", "top_values"),
)
"""Columns that identify compressed rows, and columns that identify plain rows."""

CONFIG = "compression_config.yaml"

_FLOATS = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}
_TERMS = {"sqrt": np.sqrt, "exp": np.exp}  # an integer n stands for the n-th power
_MAX_POWER = 16
_AGAIN_HINT = "create or download the cache again, with its compression_config.yaml"

Packed: TypeAlias = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""The bounds of each row in a byte array, and the byte array."""


def read(
    batch: Any, locations: Sequence[object], config: Compression | None, is_projected: bool
) -> Documents:
    """Return the documents of a record batch, without validation.

    All rows have the same number of candidates, padded with −inf or large negative values. In files
    that `table` wrote, `labels[i]` masks row i, which predicts token i + 1.
    """
    columns = CacheColumns(batch, locations)
    if is_plain(batch.schema.names):
        rows, starts, ids, logprobs = columns.candidates("token_ids", "top_values")
    else:
        names = "bytepacked_indices", "compressed_logprobs"
        packed, values = (columns.flat_lists(name, 2, np.uint8) for name in names)
        rows = packed[0][0]
        columns.check_lengths([rows], values[0][:1], names)
        assert config is not None  # `open_cache` guarantees this
        bounded = [(bounds[1], data) for bounds, data in (packed, values)]
        matrix, matrix_logprobs = decompressed_rows(bounded[0], bounded[1], config, locations[0])
        starts = np.arange(len(matrix) + 1) * matrix.shape[1]
        ids, logprobs = matrix.ravel(), matrix_logprobs.ravel()
    bounds, token_ids = columns.bounds, columns.token_ids
    lengths = np.diff(bounds)
    predicted = offsets_of(np.maximum(0, lengths - 1))
    columns.check_lengths([predicted], [rows], ("tokens to predict", "rows"))
    widest = int(np.diff(starts).max(initial=0))
    if config is not None and len(ids) and widest != config.k:
        problem = f"its rows have {widest} candidates, but {CONFIG} has k: {config.k}"
        raise cache_error(locations[0], problem, _AGAIN_HINT)
    position = np.arange(len(token_ids)) - np.repeat(bounds[:-1], lengths)
    row = np.repeat(rows[:-1], lengths) + position - 1  # row i − 1 of a document predicts token i
    row[position == 0] = -1
    unknown = np.full(len(starts) - 1, np.nan, np.float32)
    topk = TopK(token_ids, bounds, starts, ids, logprobs, unknown, unknown)
    documents = columns.documents(without_padding(take_rows(topk, row, token_ids, bounds)))
    mask = documents.loss_mask
    if not is_projected or mask is None:
        return documents
    return documents._replace(loss_mask=np.append(False, mask)[:-1] & (position > 0))


def table(documents: Documents, target: StudentSide) -> Any:
    """Return plain columns. A document with N tokens gets N − 1 rows.

    `labels[i]` masks row i, which predicts token i + 1, because DistillKit's trainer expects this.
    """
    import pyarrow

    topk = documents.topk
    ids, logprobs, is_real = next_tokens(topk, target)
    is_target = is_real.any(axis=1) & np.append(documents.targets, False)[1:]
    is_last = np.isin(np.arange(1, len(topk.token_ids) + 1), topk.bounds)
    bounds = offsets_of(np.maximum(np.diff(topk.bounds) - 1, 0))
    labels = np.where(is_target, topk.token_ids, -100).astype(np.int64)
    return pyarrow.table({
        **documents.columns,
        "input_ids": list_array(topk.bounds, topk.token_ids.astype(np.uint64)),
        "labels": list_array(topk.bounds, labels),
        "token_ids": list_array(bounds, ids[~is_last]),
        "top_values": list_array(bounds, logprobs[~is_last]),
    })  # fmt: skip


class Bin(NamedTuple):
    """Residuals of some candidates, stored as a scale and integer multiples of the scale."""

    scale_dtype: str
    element_bits: int
    num_elements: int


class Compression(NamedTuple):
    """Options of compressed rows, the fields of DistillKit's `DistributionQuantizationConfig`."""

    d: int
    k: int
    exact_k: int
    exact_dtype: str = "float32"
    polynomial_terms: Sequence[int | str] = ()
    term_dtype: str = "float32"
    residual_bins: Sequence[Bin] = ()
    delta_encoding: bool = True
    error_diffusion: bool = False  # not used for reading
    normalize_t: bool = False


def is_plain(names: Sequence[str]) -> bool:
    """Whether columns with the given names contain plain rows."""
    return {"token_ids", "top_values"} <= {*names}


def read_compression(path: Path, names: Sequence[str]) -> Compression | None:
    """Read DistillKit's config from a file's folder. For plain rows, the config is optional."""
    config = path.with_name(CONFIG)
    if not config.exists():
        if is_plain(names):
            return None
        raise cache_error(path, f"its rows are compressed, but {config} is missing", _AGAIN_HINT)
    yaml = need("yaml", config)
    try:
        return _compression(**yaml.safe_load(read_text(config, "the config")))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError, OSError) as error:
        raise cache_error(config, f"invalid config: {error}", _AGAIN_HINT) from error


def _compression(**fields: Any) -> Compression:
    if not {"d", "k", "exact_k"} <= fields.keys():
        raise ValueError("the key d, k or exact_k is missing")
    fields["residual_bins"] = [Bin(**values) for values in fields.get("residual_bins") or ()]
    fields["polynomial_terms"] = list(fields.get("polynomial_terms") or ())
    config = Compression(**fields)
    for holds, problem in _rules(config):
        if not holds:
            raise ValueError(problem)
    return config


def _rules(config: Compression) -> list[tuple[object, str]]:
    """Return conditions that a config must meet, and a description of each violation."""
    d, k, exact_k, exact_dtype, terms, term_dtype, bins, *flags = config
    powers = [term for term in terms if not isinstance(term, str)]
    dtypes = {exact_dtype, term_dtype, *(bin_.scale_dtype for bin_ in bins)}
    sizes = [n for bin_ in bins for n in bin_[1:]]
    return [
        ({*map(type, [d, k, exact_k, *powers, *sizes])} == {int}, "a number is not an integer"),
        ({*map(type, flags)} == {bool}, "a flag is not a boolean"),
        (1 < d <= MAX_WIDTH, f"d is {d}, expected 2 to {MAX_WIDTH:,}"),
        (0 <= exact_k <= k <= d, f"k is {k} and exact_k is {exact_k}, expected exact_k <= k <= d"),
        ({*terms} <= {*range(_MAX_POWER + 1), *_TERMS}, f"unknown polynomial_terms: {terms}"),
        (dtypes <= {*_FLOATS}, f"a type is unknown: {dtypes}"),
        (all(0 < bits < 64 and n > 0 for _, bits, n in bins), f"invalid residual_bins: {bins}"),
        (sum(bin_.num_elements for bin_ in bins) <= k - exact_k, "more residuals than candidates"),
        (k == exact_k or terms or bins, "candidates beyond exact_k have no values"),
    ]


def config_for(vocab_size: int, width: int) -> str:
    """Return the config that DistillKit's trainer requires, even for plain columns."""
    return (
        f"d: {vocab_size}\nk: {width}\nexact_k: {width}\nexact_dtype: float32\n"
        "polynomial_terms: null\nresidual_bins: []\ndelta_encoding: false\n"
    )


def decompressed_rows(
    ids: Packed, logprobs: Packed, config: Compression, location: object
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Decompress ids and log-probabilities to `[rows, k]`, like DistillKit's `LogprobCompressor`.

    A row contains exact values for `exact_k` candidates. For the other candidates, the row contains
    the coefficients of a polynomial, and small corrections (residuals). If the probabilities of a
    row sum to more than 1, each probability is divided by the sum.
    """
    k, exact_k = config.k, config.exact_k
    num_rows = len(ids[0]) - 1
    if not num_rows:
        return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    bits = int(np.ceil(np.log2(np.float32(config.d))))
    packed, rest = _Bytes(ids, location), _Bytes(logprobs, location)
    candidates = packed.integers(k, bits).astype(np.int32)
    values = np.zeros((num_rows, k), np.float32)
    values[:, :exact_k] = rest.floats(exact_k, config.exact_dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and inf are reported later
        if config.polynomial_terms:
            others = k - exact_k
            t = np.linspace(0, 1, others) if config.normalize_t else np.arange(float(others))
            terms = [
                t**term if isinstance(term, int) else _TERMS[term](t)
                for term in config.polynomial_terms
            ]
            values[:, exact_k:] = rest.floats(len(terms), config.term_dtype) @ np.stack(terms)
        for scale_dtype, width, count in config.residual_bins:
            scale = rest.floats(1, scale_dtype)
            steps = rest.integers(count, width)
            steps = 2 * steps - 1 if width == 1 else steps - (1 << width - 1)
            values[:, exact_k : exact_k + count] += scale * steps
            exact_k += count
        packed.check_end()
        rest.check_end()
        if config.delta_encoding:
            values = np.cumsum(values, axis=1, dtype=np.float32)
        if config.exact_k < k or config.exact_dtype != "float32":
            sums = np.exp(values, dtype=np.float64).sum(axis=1, keepdims=True)
            values -= np.log(np.maximum(sums, 1)).astype(np.float32)
    return candidates, values


class _Bytes:
    def __init__(self, packed: Packed, location: object) -> None:
        starts, data = packed
        self.location, num_rows = location, len(starts) - 1
        width = len(data) // max(1, num_rows)
        if (np.diff(starts) != width).any():
            raise cache_error(location, "its compressed rows differ in length", _AGAIN_HINT)
        self.rest = data.reshape(num_rows, width)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        if self.rest.shape[1] < num_bytes:
            raise cache_error(self.location, f"its rows are too short for {CONFIG}", _AGAIN_HINT)
        block, self.rest = self.rest[:, :num_bytes], self.rest[:, num_bytes:]
        return block

    def check_end(self) -> None:
        if self.rest.shape[1]:
            raise cache_error(self.location, f"its rows are too long for {CONFIG}", _AGAIN_HINT)

    def integers(self, count: int, bits: int) -> NDArray[np.int64]:
        digits = np.unpackbits(self.take((bits * count + 7) // 8), axis=1)[:, : bits * count]
        digits = digits.reshape(len(digits), count, bits)
        numbers = np.zeros((len(digits), count), np.int64)
        for bit in range(bits):  # highest bit first
            numbers = numbers << 1 | digits[..., bit]
        return numbers

    def floats(self, count: int, kind: str) -> NDArray[np.float32]:
        dtype = np.dtype(_FLOATS[kind])
        values = np.ascontiguousarray(self.take(count * dtype.itemsize)).view(dtype)
        if kind == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)
