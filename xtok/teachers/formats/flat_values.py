"""Values of stored predictions, from Parquet or JSON: of the right type, or an error with a place.

All formats go through `flat_numbers`: JSON's lists become Arrow arrays as Parquet's are.
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
"""Where each list begins in what lists hold, and where the last one ends."""

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a value of JSON raises that is not built as it should be."""

_WORDS = {np.float32: "numbers", np.bool_: "true or false"}  # the others are integers


def json_document(
    token_ids: Any,
    counts: list[int],
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    place: object,
    hint: str,
    own: Sequence[Any] | None = None,
) -> TopK:
    """Return a document's predictions, whose values are as JSON has them: null stands for −∞.

    Args:
        token_ids: a list of the document's.
        counts: of candidates, for each token.
        ids: the candidates.
        logprobs: of the candidates.
        place: the document's, as errors name it.
        hint: for an answer without ids, or with others.
        own: log-probabilities of its tokens, if they are apart from the candidates.

    Raises:
        XtokError: as `flat_numbers`, and for another number of ids than counts.
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
    """Return flat values of a list of JSON, as `flat_numbers` does."""
    arrow = need("pyarrow", place)
    try:
        array = arrow.array(values)
    except (arrow.ArrowException, OverflowError, ValueError, TypeError) as error:
        wide = (n for n, v in enumerate(values) if isinstance(v, int) and v.bit_length() > 63)
        if (index := next(wide, None)) is not None:
            problem = f"its {name} are not all integers of 64 bits: {values[index]}"
            raise cache_error(place, problem, AGAIN_HINT) from error
        raise cache_error(
            place, f"its {name} are not all {_words(dtype)}: {error}", AGAIN_HINT
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
    """Return flat values of a type: nothing is cut, wraps around, or stands for another type.

    Args:
        array: a pyarrow array.
        name: what errors call it.
        dtype: int32, int64 or uint8, float32, or bool, for which 0 and 1 will do.
        places: the documents', at least one, as errors name them.
        bounds: those of the documents, then of the lists within.
        optional: whether a float may be null; it becomes NaN.

    Raises:
        XtokError: for values of another type, null, or outside the type's range.
    """
    import pyarrow

    types = pyarrow.types
    is_number = types.is_integer(array.type) or (dtype is np.bool_ and types.is_boolean(array.type))
    if dtype is np.float32:
        is_number |= types.is_floating(array.type)
    if not (is_number or types.is_null(array.type)):
        raise cache_error(
            places[0], f"its {name} are {array.type}, not {_words(dtype)}", AGAIN_HINT
        )
    if array.null_count and not optional:
        index = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise cache_error(
            place_of(index, places, bounds), f"a null is among its {name}", AGAIN_HINT
        )
    values = array.to_numpy(zero_copy_only=False)
    if dtype is np.float32:
        with np.errstate(over="ignore"):  # what is infinite then is refused as such
            return np.asarray(values.astype(np.float32, copy=False))
    limits = (0, 1) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    is_wrong = (values < limits[0]) | (values > limits[1])
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        problem = f"{values[index]} among its {name} is outside {limits[0]}..{limits[1]}"
        raise cache_error(place_of(index, places, bounds), problem, AGAIN_HINT)
    return np.asarray(values.astype(dtype, copy=False))


def _words(dtype: type) -> str:
    return _WORDS.get(dtype, "integers")


def place_of(index: int, places: Sequence[object], bounds: Sequence[Bounds]) -> str:
    """Name the document and the token that a flat value is of."""
    document, *inner = bounds
    for level in reversed(inner):
        index = int(np.searchsorted(level, index, side="right")) - 1
    row = int(np.searchsorted(document, index, side="right")) - 1
    return f"{places[row]}, position {index - int(document[row])}"
