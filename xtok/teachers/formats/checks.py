"""Validate stored predictions against a vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.checked import (
    RELATIVE_ROUNDING,
    PredictionError,
    checked,
    checked_projected,
    without_padding,
)
from xtok.predictions.topk import TopK, masses, segment_ids
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.tokenizers.table import TokenType, Vocabulary

_MIN_ROWS = 32
"""Minimum number of rows for detecting renormalized values."""

_DECIMALS = 1e-4
"""Tolerance for a comparison of a sum with 1. Probabilities can be rounded to four decimals."""


def _has_all(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return a mask `[N]`, True for rows in which the candidates are the whole vocabulary."""
    return np.diff(topk.starts) >= vocabulary.num_ids


def is_renormalized(topk: TopK, vocabulary: Vocabulary) -> bool:
    """Whether the candidates sum to 1 in each row, which usually means that they were renormalized.

    Rows with a known rest, and rows that contain the whole vocabulary, are ignored.
    """
    has_rest = ~np.isnan(topk.rest_logprob) | _has_all(topk, vocabulary)
    topk = without_padding(topk)
    bits = topk.logprobs.view(np.int32)
    # [nnz], maximum rounding errors. A float32 value that was converted from bfloat16 ends with 16
    # zero bits. A value that was converted from float16 ends with 13 zero bits.
    errors = np.select([bits & 0xFFFF == 0, bits & 0x1FFF == 0], [RELATIVE_ROUNDING, 2.0**-11])
    errors *= np.exp(topk.logprobs) * np.abs(topk.logprobs)
    limits = _DECIMALS + np.bincount(segment_ids(topk.starts), errors, len(has_rest))
    rows = np.flatnonzero(topk.valid & ~has_rest)
    excess = masses(topk)[rows] - 1
    is_around_1 = (np.abs(excess) <= limits[rows]).all() and 4 * (excess > -1e-5).sum() >= len(rows)
    return len(rows) >= _MIN_ROWS and bool(is_around_1)


def _is_padding(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    roles = {} if vocabulary.table is None else vocabulary.table.roles
    groups = (roles.get(role, ()) for role in ("pad", "bos", "eos"))
    is_pad, is_bos, is_eos = (np.isin(topk.token_ids, ids) for ids in groups)
    # `num_text`, [N + 1]: number of tokens before each token, without padding
    num_text, document = offsets_of(~is_pad), segment_ids(topk.bounds)
    start, end = (num_text[edge][document] for edge in (topk.bounds[:-1], topk.bounds[1:]))
    is_leading, is_trailing = num_text[1:] == start, num_text[1:] == end
    is_trailing &= ~is_eos | np.append(False, is_pad)[:-1]
    is_leading &= ~is_bos | np.append(is_pad, False)[1:]
    at_an_edge: NDArray[np.bool_] = is_trailing | (is_leading & ~is_eos)
    return at_an_edge & is_pad & (end > start)


def check_predictions(
    documents: Documents,
    vocabulary: Vocabulary,
    *,
    renormalized: bool = False,
    is_response: bool = False,
    is_projected: bool = False,
) -> Documents:
    """Remove padding at the start and end of documents, then validate the predictions.

    If the pad token is also the bos or an end-of-text token, the pad token next to the text is
    kept. If `renormalized` is True, the rest is unknown, except in rows that contain the whole
    vocabulary.
    """
    documents = documents.at_tokens(~_is_padding(documents.topk, vocabulary))
    topk, table = documents.topk, vocabulary.table
    ids, width, model = topk.token_ids, vocabulary.vocab_size, vocabulary.model_id
    is_unknown = (ids < 0) | (ids >= width)
    name = f"the vocabulary of {model}"
    problem = f"is outside {name}, 0..{width - 1}"
    if table is not None and not is_unknown.any():
        is_unknown = table.types[ids] == TokenType.UNUSED
        problem = f"is unused in {model}"
    if is_unknown.any():
        n = int(np.argmax(is_unknown))
        hint = "pass the model that made the ids"
        raise cache_error(documents.location(n), f"the id {ids[n]} {problem}", hint)
    has_all = _has_all(topk, vocabulary)
    try:
        if is_projected:
            topk = checked_projected(topk, width, vocabulary=name)
        else:
            topk = checked(topk, width, is_response=is_response, vocabulary=name)
    except PredictionError as error:
        row = int(np.searchsorted(topk.bounds, error.row, side="right")) - 1
        location = documents.locations[row] if error.is_document else documents.location(error.row)
        raise cache_error(location, error.problem, error.hint) from error
    rest = topk.rest_logprob.copy()
    rest[~topk.valid | renormalized] = np.nan
    rest[has_all] = -np.inf
    return documents._replace(topk=topk._replace(rest_logprob=rest))
