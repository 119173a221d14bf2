"""What must hold for a teacher's predictions, whoever wrote them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtok.predictions.checked import PredictionError, checked
from xtok.predictions.topk import TopK, masses, rows_of
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.tokenizers.table import TokenType, Vocabulary

_ENOUGH = 32
"""Rows from which on it decides that all of them sum to 1."""


def _has_all(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return which rows have the whole vocabulary, so that there is no rest, bool `[N]`."""
    return np.diff(topk.starts) >= (vocabulary.tokenizer_vocab_size or vocabulary.vocab_size)


def is_renormalized(topk: TopK, vocabulary: Vocabulary) -> bool:
    """Whether rows look renormalized: they sum to 1 without covering the vocabulary."""
    is_told = ~np.isnan(topk.rest_logprob) | _has_all(topk, vocabulary)
    sums = masses(topk)[topk.valid & ~is_told]
    return len(sums) >= _ENOUGH and bool((np.abs(sums - 1) < 1e-3).all())


def _is_padding(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return which tokens are padding, as far as that shows without a mask, bool `[N]`."""
    roles = {} if vocabulary.table is None else vocabulary.table.roles
    pads, ends = ({*roles.get(role, ())} for role in ("pad", "eos"))
    is_pad = np.isin(topk.token_ids, [*pads])
    place, document = np.arange(len(is_pad)), rows_of(topk.bounds)
    text = np.flatnonzero(~is_pad)
    first, last = topk.bounds[1:].copy(), topk.bounds[:-1] - 1  # of what is no padding
    np.minimum.at(first, document[text], text)
    np.maximum.at(last, document[text], text)
    is_end = np.isin(topk.token_ids, [*ends])
    leading, trailing = place < first[document], place > last[document]
    trailing &= ~is_end | (place > last[document] + 1)
    return is_pad & (trailing | (leading & ~is_end)) & (last >= first)[document]


def check_predictions(
    given: Documents,
    vocabulary: Vocabulary,
    *,
    renormalized: bool = False,
    is_answer: bool = False,
    is_projected: bool = False,
) -> Documents:
    """Check predictions, sort candidates, and fill in what a cache may leave out; see `checked`.

    Tokens of the pad role at either end of a document are left out; so are all but the first of
    those at its end, where they also end a text.

    Args:
        given: as they were read.
        vocabulary: whose ids they are.
        renormalized: whether the rest is unknown, whatever the candidates sum to, but for rows
            of the whole vocabulary.
        is_answer: as `checked` takes it.
        is_projected: as `checked` takes it.

    Raises:
        XtokError: for ids that the vocabulary does not have, and what `checked` refuses.
    """
    given = given.at_tokens(~_is_padding(given.topk, vocabulary))
    topk, table = given.topk, vocabulary.table
    ids, width, model = topk.token_ids, vocabulary.vocab_size, vocabulary.model_id
    is_unknown = (ids < 0) | (ids >= width)
    whose = f"the vocabulary of {model}"
    problem = f"is outside {whose}, 0..{width - 1}"
    if table is not None and not is_unknown.any():
        is_unknown = table.types[ids] == TokenType.UNUSED
        problem = f"stands for nothing in {model}"
    if is_unknown.any():
        n = int(np.argmax(is_unknown))
        hint = "give the model that made these ids"
        raise cache_error(given.place(n), f"the id {ids[n]} {problem}", hint)
    has_all = _has_all(topk, vocabulary)
    try:
        topk = checked(
            topk, width, is_answer=is_answer, is_projected=is_projected, vocabulary=whose
        )
    except PredictionError as error:
        row = int(np.searchsorted(topk.bounds, error.row, side="right")) - 1
        place = given.places[row] if error.is_document else given.place(error.row)
        raise cache_error(place, error.problem, error.hint) from error
    rest = topk.rest_logprob.copy()
    rest[~topk.valid | renormalized] = np.nan
    rest[has_all] = -np.inf
    return given._replace(topk=topk._replace(rest_logprob=rest))
