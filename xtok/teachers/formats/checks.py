"""What must hold for a teacher's predictions, whoever wrote them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtok._lib.known_logprobs import (
    PREDICTS_FIRST,
    STORED_ROUNDING,
    listed_twice,
    own_logprobs,
    says_nothing,
)
from xtok._lib.topk import TopK, firsts_of, masses, rows_of, with_candidates, without_padding
from xtok.teachers.formats.documents import Documents, cache_error
from xtok.tokenizers.table import TokenType, Vocabulary

_WHOSE_HINT = "give the model that made these ids"

_SHIFTED_HINT = "give rows that predict token i from the tokens before it; row 0 is empty"

_TRUE_HINT = "store natural log-probabilities at temperature 1"

_ENOUGH = 32
"""Rows from which on statistics decide."""

_FEW = 4
"""Rows from which on it decides that all hold the next token and none its own: where one in ten
does not hold its own and one in five holds the next, four do once in six million times."""


def _has_all(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return which rows have the whole vocabulary, so that there is no rest, bool `[N]`."""
    return np.diff(topk.starts) >= (vocabulary.tokenizer_vocab_size or vocabulary.vocab_size)


def is_renormalized(topk: TopK, vocabulary: Vocabulary) -> bool:
    """Whether rows look renormalized: they sum to 1 without covering the vocabulary."""
    is_told = ~np.isnan(topk.rest_logprob) | _has_all(topk, vocabulary)
    sums = masses(topk)[topk.valid & ~is_told]
    return len(sums) >= _ENOUGH and bool((np.abs(sums - 1) < 1e-3).all())


def check_predictions(
    given: Documents,
    vocabulary: Vocabulary,
    *,
    renormalized: bool = False,
    is_answer: bool = False,
    is_projected: bool = False,
) -> Documents:
    """Check predictions, sort candidates, and fill in what a cache may leave out.

    What no model said becomes unknown; see `known_logprobs`.

    Args:
        given: as they were read.
        vocabulary: whose ids they are.
        renormalized: whether the rest is unknown, whatever the candidates sum to, but for rows
            of the whole vocabulary.
        is_answer: whether a server said all of it at once: then the token that a text really has is
            always a candidate, and has its value.
        is_projected: whether they were projected: then a text's own token has what its chunk has,
            whatever the candidates of its row.

    Raises:
        XtokError: for ids outside the vocabulary, candidates that occur twice, what is no
            log-probability, sums above 1, and rows that are of the next or the last token.
    """
    topk = given.topk
    row_of = rows_of(topk.starts)
    _check_ids(given, topk.token_ids, None, vocabulary)
    _check_ids(given, topk.ids, row_of, vocabulary)
    _check_used(given, vocabulary)
    _check_values(given, row_of)
    topk = _sorted(given, row_of)
    candidate = _logprobs_of(topk, row_of, 0)
    firsts = firsts_of(topk.bounds)
    told, listed = (own_logprobs(values, firsts) for values in (topk.realized_logprob, candidate))
    differs = np.abs(told - listed) > STORED_ROUNDING
    if is_projected or (not is_answer and 2 * differs.sum() < (~np.isnan(told)).sum()):
        differs[:] = False
    if is_answer:
        differs |= topk.valid & np.isnan(candidate)
    _check_places(given, topk, row_of, differs)
    topk = _without_first_rows(given, topk, firsts)
    has_all = _has_all(topk, vocabulary)
    topk = without_padding(topk)
    sums = masses(topk)
    realized = np.where(np.isnan(told), listed, told)
    _check_sums(given, topk, sums)
    if not is_projected:
        outside = np.where(np.isnan(listed), np.exp(realized, dtype=np.float64), 0)
        _check_own(given, topk, sums + np.nan_to_num(outside))
    with np.errstate(divide="ignore"):
        rest = np.log1p(-np.minimum(sums, 1)).astype(np.float32)
    rest = np.where(np.isnan(topk.rest_logprob), rest, topk.rest_logprob)
    rest[~topk.valid | renormalized] = np.nan
    rest[has_all] = -np.inf
    return given._replace(topk=topk._replace(rest_logprob=rest, realized_logprob=realized))


def _without_first_rows(given: Documents, topk: TopK, firsts: NDArray[np.int64]) -> TopK:
    """Empty the rows of first tokens that say nothing.

    Raises:
        XtokError: for one that does: whatever the number of rows, they are of the next token.
    """
    starts, realized = topk.starts, own_logprobs(topk.realized_logprob, firsts)
    for first in firsts[topk.valid[firsts] | ~np.isnan(realized[firsts])].tolist():
        row = slice(starts[first], starts[first + 1])
        is_told = not np.isnan(realized[first])
        if is_told or not says_nothing(
            int(topk.token_ids[first]), topk.ids[row], topk.logprobs[row]
        ):
            raise cache_error(
                given.place(first), f"it has a prediction, and {PREDICTS_FIRST}", _SHIFTED_HINT
            )
    is_first = np.zeros(len(topk.token_ids), np.bool_)
    is_first[firsts] = True
    return with_candidates(topk, ~is_first[rows_of(starts)])


def _check_ids(
    given: Documents,
    ids: NDArray[np.int32],
    row_of: NDArray[np.int64] | None,
    vocabulary: Vocabulary,
) -> None:
    wrong = (ids < 0) | (ids >= vocabulary.vocab_size)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise cache_error(
            given.place(index if row_of is None else int(row_of[index])),
            f"the id {ids[index]} is outside the vocabulary of {vocabulary.model_id}, "
            f"0..{vocabulary.vocab_size - 1}",
            _WHOSE_HINT,
        )


def _check_used(given: Documents, vocabulary: Vocabulary) -> None:
    if vocabulary.table is None:
        return
    unused = vocabulary.table.types[given.topk.token_ids] == TokenType.UNUSED
    if unused.any():
        index = int(np.argmax(unused))
        raise cache_error(
            given.place(index),
            f"the id {given.topk.token_ids[index]} stands for nothing in {vocabulary.model_id}",
            _WHOSE_HINT,
        )


def _check_values(given: Documents, row_of: NDArray[np.int64]) -> None:
    """Raise an error for invalid log-probabilities; the rest may be −inf, and both others NaN."""
    topk = given.topk
    wrong = ~(topk.logprobs <= STORED_ROUNDING) | np.isneginf(topk.logprobs)
    _check(given, wrong, topk.logprobs, "a candidate", row_of)
    realized = topk.realized_logprob
    _check(given, (realized > STORED_ROUNDING) | np.isneginf(realized), realized, "its own token")
    _check(given, topk.rest_logprob > STORED_ROUNDING, topk.rest_logprob, "the rest")


def _check(
    given: Documents,
    wrong: NDArray[np.bool_],
    values: NDArray[np.float32],
    what: str,
    row_of: NDArray[np.int64] | None = None,
) -> None:
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    value = values[index]
    problem = f"{'−inf' if value < 0 else value:.4} is not a log-probability of {what}"
    if value > 0 and np.isfinite(value):
        problem = f"the log-probability {value:.4g} of {what} is of a probability above 1"
    raise cache_error(
        given.place(index if row_of is None else int(row_of[index])),
        problem,
        f"{_TRUE_HINT}, not logits, and leave out what has none",
    )


def _check_sums(given: Documents, topk: TopK, sums: NDArray[np.float64]) -> None:
    """Raise an error for rows above 1, and those that are not 1 with the rest that is told."""
    rest = np.exp(topk.rest_logprob, dtype=np.float64)
    is_told = topk.valid & ~np.isnan(rest)
    sums = sums + np.where(is_told, rest, 0)
    wrong = (sums > 1 + STORED_ROUNDING) | (is_told & (sums < 1 - STORED_ROUNDING))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise cache_error(
            given.place(index),
            f"its probabilities{' and the rest' * bool(is_told[index])} sum to {sums[index]:.4g}",
            f"{_TRUE_HINT}; the rest is log(1 - their sum)",
        )


def _check_own(given: Documents, topk: TopK, sums: NDArray[np.float64]) -> None:
    """Raise an error where a text's own token, not a candidate, has more than they leave."""
    wrong = topk.valid & (sums > 1 + STORED_ROUNDING)
    if wrong.any():
        index = int(np.argmax(wrong))
        problem = f"its candidates and its own token, which is none, sum to {sums[index]:.4g}"
        raise cache_error(given.place(index), problem, _TRUE_HINT)


def _sorted(given: Documents, row_of: NDArray[np.int64]) -> TopK:
    """Return predictions with the best candidate first in each row."""
    topk = given.topk
    ids, values = topk.ids, topk.logprobs
    for row, twice in listed_twice(row_of, ids):
        raise cache_error(
            given.place(row),
            f"the candidate {twice} occurs twice",
            "store each candidate once",
        )
    rises = (values[1:] > values[:-1]) | ((values[1:] == values[:-1]) & (ids[1:] < ids[:-1]))
    unsorted = np.zeros(len(topk.token_ids), np.bool_)
    unsorted[row_of[1:][rises & (row_of[1:] == row_of[:-1])]] = True
    if unsorted.any():
        chosen = np.flatnonzero(unsorted[row_of])
        order = chosen[np.lexsort((ids[chosen], -values[chosen], row_of[chosen]))]
        ids, values = ids.copy(), values.copy()
        ids[chosen], values[chosen] = ids[order], values[order]
    return topk._replace(ids=ids, logprobs=values)


def _logprobs_of(topk: TopK, row_of: NDArray[np.int64], shift: int) -> NDArray[np.float32]:
    """Return what each row says of the token that is `shift` on; NaN if nothing."""
    tokens = np.full(len(topk.token_ids), -1, np.int32)
    document = rows_of(topk.bounds)
    source = np.arange(len(tokens)) + shift
    inside = (source >= 0) & (source < len(tokens))
    inside[inside] = document[source[inside]] == document[inside]
    tokens[inside] = topk.token_ids[source[inside]]
    found = np.full(len(tokens), np.nan, np.float32)
    hits = topk.ids == tokens[row_of]
    found[row_of[hits]] = topk.logprobs[hits]
    return found


def _check_places(
    given: Documents, topk: TopK, row_of: NDArray[np.int64], differs: NDArray[np.bool_]
) -> None:
    """Reject rows shifted by one.

    A text's own tokens are mostly among the candidates of their rows, and seldom by chance.
    """
    predicted = topk.valid
    num_rows = int(predicted.sum())
    shares = {
        shift: float(np.mean(~np.isnan(_logprobs_of(topk, row_of, shift))[predicted]))
        for shift in ((0, 1, -1) if num_rows >= _FEW or differs.any() else ())
    }
    best = max(shares, key=lambda shift: shares[shift], default=0)
    needed = 0.0
    if not differs.any():
        needed = max(0.2, 5 / np.sqrt(max(1, num_rows)))
        if best and num_rows < _ENOUGH and not shares[0]:  # all but those at a text's end
            needed = (max(_FEW, num_rows - len(given.places)) - 0.5) / num_rows
    if best and shares[best] - shares[0] > needed:
        other = "next" if best > 0 else "previous"
        raise cache_error(
            given.places[0],
            f"its rows are shifted by one: {shares[best]:.0%} hold the {other} token, and "
            f"{shares[0]:.0%} their own",
            _SHIFTED_HINT,
        )
    if differs.any():
        index = int(np.argmax(differs))
        raise cache_error(
            given.place(index),
            f"the log-probability of its own token, {topk.token_ids[index]}, is not the "
            "candidate's, or missing",
            "store rows as the server gave them, with the ids that it was asked for",
        )
