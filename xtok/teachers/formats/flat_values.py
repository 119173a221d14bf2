"""Convert numbers from Parquet and JSON to NumPy arrays, and check their types and ranges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import fill_null
from xtok.predictions.topk import TopK
from xtok.teachers.formats.documents import cache_error, locate
from xtok.tokenizers.display import shorten

Bounds: TypeAlias = NDArray[np.int64]
"""The start of each list in the flat values, then the end of the last list."""

JsonRow: TypeAlias = Sequence[tuple[Any, Any]]
"""Candidates of a token in JSON: pairs of id and log-probability."""

_WORDS = {np.float32: "numbers", np.bool_: "booleans"}  # other types are integers
_JSON_TYPES = {np.float32: {int, float}, np.bool_: {int, bool}}


def json_document(
    token_ids: Any, rows: Sequence[JsonRow], location: object, hint: str, own: Sequence[Any] = ()
) -> TopK:
    """Convert the rows of a response to predictions for one document.

    Null means −∞. `own` contains the log-probabilities of the text's tokens, for formats that store
    these values separately.
    """
    if not isinstance(token_ids, list) or len(token_ids) != len(rows):
        count = len(token_ids) if isinstance(token_ids, list) else "no"
        raise cache_error(location, f"{count} prompt_token_ids for {len(rows)} rows", hint)
    bounds, starts = np.array([0, len(rows)]), offsets_of([*map(len, rows)])
    candidates = [*chain.from_iterable(rows)]
    ids, logprobs = [i for i, _ in candidates], [logprob for _, logprob in candidates]
    unknown = np.full(len(rows), np.nan, np.float32)

    def log_probabilities(values: Sequence[Any], *within: Bounds) -> NDArray[Any]:
        return json_numbers(fill_null(values), "log-probabilities", np.float32, location, within)

    return TopK(
        json_numbers(token_ids, "prompt_token_ids", np.int32, location, [bounds]), bounds, starts,
        json_numbers(ids, "candidates", np.int32, location, [bounds, starts]),
        log_probabilities(logprobs, bounds, starts),
        unknown, log_probabilities(own, bounds) if own else unknown,
    )  # fmt: skip


def json_numbers(
    values: Sequence[Any], name: str, dtype: type, location: object, bounds: Sequence[Bounds]
) -> NDArray[Any]:
    """Convert a flat JSON list to a NumPy array of the type `dtype`, like `flat_numbers`."""
    types = {*map(type, values)} - _JSON_TYPES.get(dtype, {int})
    if types:
        index = next(n for n, value in enumerate(values) if type(value) in types)
        problem = f"{name} contains {shorten(json.dumps(values[index]))}, expected {_words(dtype)}"
        raise cache_error(locate(index, [location], bounds), problem)
    try:
        return _to_dtype(np.array(values), name, dtype, [location], bounds)
    except OverflowError as error:
        problem = f"{name} contains a number with too many digits"
        raise cache_error(location, problem) from error


def flat_numbers(
    array: Any,
    name: str,
    dtype: type,
    locations: Sequence[object],
    bounds: Sequence[Bounds],
    *,
    optional: bool = False,
) -> NDArray[Any]:
    """Convert a pyarrow array to a NumPy array of the type `dtype`.

    An integer outside the range of `dtype`, or a value of another type, is an error. If `dtype` is
    bool, the integers 0 and 1 are also accepted. If `optional` is True, null becomes NaN. Errors
    name a location; see `locate` for the meaning of `bounds`.
    """
    import pyarrow

    types = pyarrow.types
    supported = [types.is_integer, types.is_null]
    supported += {np.bool_: [types.is_boolean], np.float32: [types.is_floating]}.get(dtype, [])
    if not any(is_type(array.type) for is_type in supported):
        problem = f"{name} has the type {array.type}, expected {_words(dtype)}"
        raise cache_error(locations[0], problem)
    if array.null_count and not optional:
        index = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise cache_error(locate(index, locations, bounds), f"{name} contains null")
    return _to_dtype(array.to_numpy(zero_copy_only=False), name, dtype, locations, bounds)


def _to_dtype(
    values: NDArray[Any],
    name: str,
    dtype: type,
    locations: Sequence[object],
    bounds: Sequence[Bounds],
) -> NDArray[Any]:
    if dtype is not np.float32:
        limits = (0, 1) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        is_wrong = (values < limits[0]) | (values > limits[1])
        if is_wrong.any():
            index = int(np.argmax(is_wrong))
            example = shorten(str(values[index]))
            problem = f"{name} contains {example}, expected {limits[0]}..{limits[1]}"
            raise cache_error(locate(index, locations, bounds), problem)
    with np.errstate(over="ignore"):  # later checks report infinite values
        return np.asarray(values.astype(dtype, copy=False))


def _words(dtype: type) -> str:
    return _WORDS.get(dtype, "integers")
