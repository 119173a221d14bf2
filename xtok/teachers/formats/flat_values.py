"""Values of stored predictions from Parquet and JSON, checked for their types.

All formats use `flat_numbers`. Lists from JSON become Arrow arrays first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.opening import need
from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import without_null
from xtok.predictions.topk import TopK
from xtok.teachers.formats.documents import AGAIN_HINT, cache_error

Bounds = NDArray[np.int64]
"""Starts of lists within their flat values, and the end of the last list."""

_WORDS = {np.float32: "numbers", np.bool_: "booleans"}  # integers otherwise


def json_document(
    token_ids: Any,
    counts: list[int],
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    place: object,
    hint: str,
    own: Sequence[Any] | None = None,
) -> TopK:
    """Return a document's predictions from JSON values, where null stands for −∞.

    `ids` and `logprobs` are flat, with `counts` candidates per token. `own` contains the realized
    log-probabilities if the format stores them separately.

    Raises:
        XtokError: as in `flat_numbers`, or if the numbers of ids and counts differ; `hint` is for
            missing ids.
    """
    if not isinstance(token_ids, list) or len(token_ids) != len(counts):
        count = len(token_ids) if isinstance(token_ids, list) else "no"
        raise cache_error(place, f"{count} prompt_token_ids for {len(counts)} rows", hint)
    bounds, starts = np.array([0, len(counts)]), offsets_of(counts)
    unknown = np.full(len(counts), np.nan, np.float32)
    name, within = "log-probabilities", [bounds, starts]
    return TopK(
        json_numbers(token_ids, "prompt_token_ids", np.int32, place, [bounds]), bounds, starts,
        json_numbers(ids, "candidates", np.int32, place, within),
        json_numbers(without_null(logprobs), name, np.float32, place, within),
        unknown,
        unknown if own is None
        else json_numbers(without_null(own), name, np.float32, place, [bounds]),
    )  # fmt: skip


def json_numbers(
    values: Sequence[Any], name: str, dtype: type, place: object, bounds: Sequence[Bounds]
) -> NDArray[Any]:
    """Return flat values of a JSON list; see `flat_numbers`."""
    arrow = need("pyarrow", place)
    try:
        array = arrow.array(values)
    except (arrow.ArrowException, OverflowError, ValueError, TypeError) as error:
        wide = (n for n, v in enumerate(values) if isinstance(v, int) and v.bit_length() > 63)
        if (index := next(wide, None)) is not None:
            problem = f"{name} contains {values[index]}, expected integers of at most 64 bits"
            raise cache_error(place, problem, AGAIN_HINT) from error
        raise cache_error(
            place, f"{name} contains other values than {_words(dtype)}: {error}", AGAIN_HINT
        ) from error
    return flat_numbers(array, name, dtype, [place], bounds)


def flat_numbers(
    array: Any,
    name: str,
    dtype: type,
    places: Sequence[object],
    bounds: Sequence[Bounds],
    *,
    optional: bool = False,
) -> NDArray[Any]:
    """Convert a pyarrow array to a NumPy type without loss.

    Types are int32, int64, uint8, float32, and bool, which also accepts 0 and 1. `bounds`
    contains the bounds of the documents, then of the lists within; they locate errors. With
    `optional`, null becomes NaN.

    Raises:
        XtokError: for a different type, null, or values outside the range.
    """
    import pyarrow

    types = pyarrow.types
    is_number = types.is_integer(array.type) or (dtype is np.bool_ and types.is_boolean(array.type))
    if dtype is np.float32:
        is_number |= types.is_floating(array.type)
    if not (is_number or types.is_null(array.type)):
        raise cache_error(
            places[0], f"{name} has the type {array.type}, expected {_words(dtype)}", AGAIN_HINT
        )
    if array.null_count and not optional:
        index = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise cache_error(place_of(index, places, bounds), f"{name} contains null", AGAIN_HINT)
    values = array.to_numpy(zero_copy_only=False)
    if dtype is np.float32:
        with np.errstate(over="ignore"):  # infinite values are errors later
            return np.asarray(values.astype(np.float32, copy=False))
    limits = (0, 1) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    is_wrong = (values < limits[0]) | (values > limits[1])
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        problem = f"{name} contains {values[index]}, expected {limits[0]}..{limits[1]}"
        raise cache_error(place_of(index, places, bounds), problem, AGAIN_HINT)
    return np.asarray(values.astype(dtype, copy=False))


def _words(dtype: type) -> str:
    return _WORDS.get(dtype, "integers")


def place_of(index: int, places: Sequence[object], bounds: Sequence[Bounds]) -> str:
    """Return the document and the token of a flat value, for errors."""
    document, *inner = bounds
    for level in reversed(inner):
        index = int(np.searchsorted(level, index, side="right")) - 1
    row = int(np.searchsorted(document, index, side="right")) - 1
    return f"{places[row]}, position {index - int(document[row])}"
