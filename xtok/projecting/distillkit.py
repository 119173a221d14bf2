"""Log-probabilities as DistillKit packs them (commit a61c2e7, `distillkit/compression`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.input_files import need
from xtok.projecting.stored import cache_error

CONFIG = "compression_config.yaml"

_FLOATS = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}
_AGAIN = "make the cache again, or fetch it again with its compression_config.yaml"

Packed = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Rows of bytes: where each begins, and the bytes."""


def compression_of(path: Path) -> Mapping[str, Any]:
    """Read the config that DistillKit writes beside its files, `DistributionQuantizationConfig`.

    Raises:
        XtokError: if there is none, or it is none.
    """
    config = path.with_name(CONFIG)
    if not config.exists():
        raise cache_error(path, f"its rows are compressed, and there is no {config}", _AGAIN)
    yaml = need("yaml", config)
    try:
        found = yaml.safe_load(config.read_text(encoding="utf-8"))
        is_valid = found["d"] > 1 and 0 <= found["exact_k"] <= found["k"]
    except (yaml.YAMLError, LookupError, TypeError, UnicodeDecodeError):
        is_valid = False
    if not is_valid:
        raise cache_error(config, "it does not tell d, k and exact_k", _AGAIN)
    return dict(found)


def config_for(vocab_size: int, width: int) -> str:
    """Return the config that its trainer wants, for columns that are not compressed, too."""
    return (
        f"d: {vocab_size}\nk: {width}\nexact_k: {width}\nexact_dtype: float32\n"
        "polynomial_terms: null\nresidual_bins: []\ndelta_encoding: false\n"
    )


def decompressed_rows(
    ids: Packed, logprobs: Packed, config: Mapping[str, Any], place: str
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and log-probabilities `[rows, k]`, as `LogprobCompressor` does.

    A row is its first `exact_k` values, then a polynomial through the others, then what is left of
    them, in few bits. Such an approximation may sum to more than 1: then it is divided by its sum.

    Raises:
        XtokError: if rows are shorter than the config says; `place` is for that.
    """
    k, exact_k = config["k"], config["exact_k"]
    kind, terms = config.get("exact_dtype", "float32"), config.get("polynomial_terms") or ()
    bits = int(np.ceil(np.log2(np.float32(config["d"]))))
    found = _Bytes(ids, place).integers(k, bits).astype(np.int32)
    rest = _Bytes(logprobs, place)
    values = np.zeros((len(found), k), np.float32)
    values[:, :exact_k] = rest.floats(exact_k, kind)
    if terms:
        others = k - exact_k
        t = np.linspace(0, 1, others) if config.get("normalize_t") else np.arange(float(others))
        powers = np.stack([t**i if isinstance(i, int) else getattr(np, i)(t) for i in terms])
        values[:, exact_k:] = rest.floats(len(terms), config.get("term_dtype", "float32")) @ powers
    for part in config.get("residual_bins") or ():
        scale = rest.floats(1, part["scale_dtype"])
        width, count = part["element_bits"], part["num_elements"]
        steps = rest.integers(count, width)
        steps = 2 * steps - 1 if width == 1 else steps - (1 << width - 1)
        values[:, exact_k : exact_k + count] += scale * steps
        exact_k += count
    if config.get("delta_encoding", True):
        values = np.cumsum(values, axis=1, dtype=np.float32)
    if config["exact_k"] < k or kind != "float32":
        sums = np.exp(values, dtype=np.float64).sum(axis=1, keepdims=True)
        values -= np.log(np.maximum(sums, 1)).astype(np.float32)
    return found, values


class _Bytes:
    """Rows of bytes that are taken from the left."""

    def __init__(self, packed: Packed, place: str) -> None:
        starts, data = packed
        self.place, num_rows = place, len(starts) - 1
        width = len(data) // max(1, num_rows)
        if (np.diff(starts) != width).any():
            raise cache_error(place, "its compressed rows are of different lengths", _AGAIN)
        self.rest = data.reshape(num_rows, width)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        if self.rest.shape[1] < num_bytes:
            raise cache_error(self.place, f"its rows are shorter than {CONFIG} says", _AGAIN)
        taken, self.rest = self.rest[:, :num_bytes], self.rest[:, num_bytes:]
        return taken

    def integers(self, count: int, bits: int) -> NDArray[np.int64]:
        digits = np.unpackbits(self.take((bits * count + 7) // 8), axis=1)[:, : bits * count]
        digits = digits.reshape(len(digits), count, bits)
        numbers = np.zeros((len(digits), count), np.int64)
        for bit in range(bits):  # the highest first
            numbers = numbers << 1 | digits[..., bit]
        return numbers

    def floats(self, count: int, kind: str) -> NDArray[np.float32]:
        dtype = np.dtype(_FLOATS[kind])
        found = np.ascontiguousarray(self.take(count * dtype.itemsize)).view(dtype)
        if kind == "bfloat16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32)
