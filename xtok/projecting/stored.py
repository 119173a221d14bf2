"""Rows of stored predictions, and what must hold for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.vocab.table import TokenType, Vocabulary

IMPOSSIBLE = -1e3
"""Log-probabilities below this are padding, or the floor of a server (−9999)."""

PER_TOKEN = (
    *("input_ids", "topk_ids", "topk_logprobs", "rest_logprob", "realized_logprob"),
    *("loss_mask", "labels", "attention_mask", "position_ids"),
)
"""Columns of a value per token, which a student has its own of."""

AGAIN = "make the cache again, or fetch it again"

_ROUNDING = 0.01
"""What half precision may add to a sum of probabilities, and to a log-probability."""

_WHOSE = "give the model whose ids these are"

_ENOUGH = 32
"""Rows from which on statistics decide."""


class TopK(NamedTuple):
    """Predictions for documents that are laid one after another; row i is of token i.

    Row i is what is predicted for token i from the tokens before it. Log-probabilities are natural,
    and true ones: not normalized over the candidates.
    """

    token_ids: NDArray[np.int32]  # [N], the documents' tokens
    bounds: NDArray[np.int64]  # [documents + 1]; document d is token_ids[bounds[d]:bounds[d + 1]]
    # [N + 1]; candidates of row i are ids[starts[i]:starts[i + 1]], none where nothing is predicted
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]  # [nnz], the best first in a row, ties by the lower id; none twice
    logprobs: NDArray[np.float32]  # [nnz]
    rest_logprob: NDArray[np.float32]  # [N], log(1 - sum of the candidates), −inf for none; NaN
    # where it is not known: the source renormalized the candidates, or there is no prediction
    realized_logprob: NDArray[np.float32]  # [N], of token_ids[i]; NaN where not known

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which rows have a prediction, bool `[N]`."""
        return np.diff(self.starts) > 0


class StoredRows(NamedTuple):
    """Some rows of a cache: predictions, and the rows' other columns."""

    topk: TopK
    columns: dict[str, Any]  # pyarrow arrays, a value per document
    places: Sequence[object]  # each document's: file and row, as errors name them
    loss_mask: NDArray[np.bool_] | None = None  # [N], True where a token is a training target

    def place(self, index: int) -> str:
        """Name a token of all documents."""
        row = int(np.searchsorted(self.topk.bounds, index, side="right")) - 1
        return f"{self.places[row]}, position {index - int(self.topk.bounds[row])}"

    def values(self, name: str) -> list[Any]:
        """Return a column, None for each row if there is none."""
        if name not in self.columns:
            return [None] * len(self.places)
        values: list[Any] = self.columns[name].to_pylist()
        return values


def cache_error(place: object, problem: str, hint: str, parameter: str = "") -> XtokError:
    """Return an error of a cache."""
    return XtokError(f"{place}: {problem}", hint=hint, parameter=parameter)


def bounds_of(sizes: Any) -> NDArray[np.int64]:
    """Return where parts of these sizes begin, and the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def rows_of(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each candidate."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def candidates_of(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts of chosen rows, −1 for an empty one, and where their candidates are."""
    sizes = np.append(np.diff(starts), 0)[rows]
    chosen = bounds_of(sizes)
    return chosen, np.arange(chosen[-1]) + np.repeat(starts[rows] - chosen[:-1], sizes)


def chosen_rows(
    topk: TopK, rows: NDArray[np.int64], token_ids: NDArray[np.int32], bounds: NDArray[np.int64]
) -> TopK:
    """Return predictions for other documents, whose tokens have these rows; −1 for none."""
    starts, kept = candidates_of(topk.starts, rows)
    rest, realized = (
        np.append(values, np.float32(np.nan))[rows]
        for values in (topk.rest_logprob, topk.realized_logprob)
    )
    return TopK(token_ids, bounds, starts, topk.ids[kept], topk.logprobs[kept], rest, realized)


def without_impossible(topk: TopK) -> TopK:
    """Return predictions without the candidates that are padding; NaN, an error, is kept."""
    kept = ~(topk.logprobs < IMPOSSIBLE)
    starts = bounds_of(kept)[topk.starts]
    return topk._replace(starts=starts, ids=topk.ids[kept], logprobs=topk.logprobs[kept])


def masses(topk: TopK) -> NDArray[np.float64]:
    """Return the probability of each row's candidates together."""
    probabilities = np.exp(topk.logprobs, dtype=np.float64)
    sums = np.bincount(rows_of(topk.starts), probabilities, len(topk.token_ids))
    return sums.astype(np.float64)  # of no rows they are integers


def _has_all(topk: TopK, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return which rows have the whole vocabulary, so that there is no rest, bool `[N]`."""
    return np.diff(topk.starts) >= (vocabulary.tokenizer_vocab_size or vocabulary.vocab_size)


def is_renormalized(topk: TopK, vocabulary: Vocabulary) -> bool:
    """Whether rows look renormalized: they sum to 1 without covering the vocabulary."""
    is_told = ~np.isnan(topk.rest_logprob) | _has_all(topk, vocabulary)
    sums = masses(topk)[topk.valid & ~is_told]
    return len(sums) >= _ENOUGH and bool((np.abs(sums - 1) < 1e-3).all())


def checked(
    rows: StoredRows, vocabulary: Vocabulary, *, renormalized: bool, complete: bool
) -> StoredRows:
    """Check predictions, sort candidates, and fill in what a cache may leave out.

    Args:
        rows: as they were read.
        vocabulary: whose ids they are.
        renormalized: whether the rest is unknown, whatever the candidates sum to, but for rows
            of the whole vocabulary.
        complete: whether the token that a text really has is always a candidate, as with vLLM.

    Raises:
        XtokError: for ids outside the vocabulary, candidates that stand twice, what is no
            log-probability, sums above 1, and rows that are of the next or the last token.
    """
    topk = rows.topk
    row_of = rows_of(topk.starts)
    _check_ids(rows, topk.token_ids, None, vocabulary)
    _check_ids(rows, topk.ids, row_of, vocabulary)
    if vocabulary.table is not None:
        unused = vocabulary.table.types[topk.token_ids] == TokenType.UNUSED
        if unused.any():
            index = int(np.argmax(unused))
            raise cache_error(
                rows.place(index),
                f"the id {topk.token_ids[index]} stands for nothing in {vocabulary.model_id}",
                _WHOSE,
            )
    _check_values(rows, row_of)
    topk = _sorted(rows, row_of)
    own = _logprobs_of(topk, row_of, 0)
    known = ~np.isnan(topk.realized_logprob)
    differs = known & (np.abs(topk.realized_logprob - own) > _ROUNDING)
    if 2 * differs.sum() < known.sum():  # a projection knows more of a text's own token
        differs[:] = False
    if complete:
        differs |= topk.valid & np.isnan(own)
    _check_places(rows, topk, row_of, differs)
    has_all = _has_all(topk, vocabulary)
    topk = without_impossible(topk)
    sums = masses(topk)
    _check_sums(rows, topk, sums)
    with np.errstate(divide="ignore"):
        rest = np.log1p(-np.minimum(sums, 1)).astype(np.float32)
    rest = np.where(np.isnan(topk.rest_logprob), rest, topk.rest_logprob)
    rest[~topk.valid | renormalized] = np.nan
    rest[has_all] = -np.inf
    realized = np.where(known, topk.realized_logprob, own)
    return rows._replace(topk=topk._replace(rest_logprob=rest, realized_logprob=realized))


def _check_ids(
    rows: StoredRows,
    ids: NDArray[np.int32],
    row_of: NDArray[np.int64] | None,
    vocabulary: Vocabulary,
) -> None:
    wrong = (ids < 0) | (ids >= vocabulary.vocab_size)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise cache_error(
            rows.place(index if row_of is None else int(row_of[index])),
            f"the id {ids[index]} is outside the vocabulary of {vocabulary.model_id}, "
            f"0..{vocabulary.vocab_size - 1}",
            _WHOSE,
        )


def _check_values(rows: StoredRows, row_of: NDArray[np.int64]) -> None:
    """Raise an error for what is no log-probability; the rest may be −inf, and both others NaN."""
    topk = rows.topk
    wrong = ~(topk.logprobs <= _ROUNDING) | np.isneginf(topk.logprobs)
    _check(rows, wrong, topk.logprobs, "a candidate", row_of)
    realized = topk.realized_logprob
    _check(rows, (realized > _ROUNDING) | np.isneginf(realized), realized, "its own token")
    _check(rows, topk.rest_logprob > _ROUNDING, topk.rest_logprob, "the rest")


def _check(
    rows: StoredRows,
    wrong: NDArray[np.bool_],
    values: NDArray[np.float32],
    what: str,
    row_of: NDArray[np.int64] | None = None,
) -> None:
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    value = values[index]
    problem = f"{'−inf' if value < 0 else value:.4} is no log-probability of {what}"
    if value > 0 and np.isfinite(value):
        problem = f"the log-probability {value:.4g} of {what} is of a probability above 1"
    raise cache_error(
        rows.place(index if row_of is None else int(row_of[index])),
        problem,
        "store natural log-probabilities at temperature 1, not logits, and leave out what has none",
    )


def _check_sums(rows: StoredRows, topk: TopK, sums: NDArray[np.float64]) -> None:
    """Raise an error for rows above 1, and those that are not 1 with the rest that is told."""
    rest = np.exp(topk.rest_logprob, dtype=np.float64)
    is_told = topk.valid & ~np.isnan(rest)
    sums = sums + np.where(is_told, rest, 0)
    wrong = (sums > 1 + _ROUNDING) | (is_told & (sums < 1 - _ROUNDING))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise cache_error(
            rows.place(index),
            f"its probabilities{' and the rest' * bool(is_told[index])} sum to {sums[index]:.4g}",
            "store natural log-probabilities at temperature 1; the rest is log(1 - their sum)",
        )


def _sorted(rows: StoredRows, row_of: NDArray[np.int64]) -> TopK:
    """Return predictions with the best candidate first in each row."""
    topk = rows.topk
    ids, values = topk.ids, topk.logprobs
    keys = np.sort(row_of << 32 | ids)
    if (keys[1:] == keys[:-1]).any():
        twice = int(keys[1:][keys[1:] == keys[:-1]][0])
        raise cache_error(
            rows.place(twice >> 32),
            f"the candidate {twice & 0xFFFFFFFF} stands twice",
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
    rows: StoredRows, topk: TopK, row_of: NDArray[np.int64], differs: NDArray[np.bool_]
) -> None:
    """Reject rows shifted by one.

    A text's own tokens are mostly among the candidates of their rows, and seldom by chance.
    """
    predicted = topk.valid
    num_rows = int(predicted.sum())
    shares = {
        shift: float(np.mean(~np.isnan(_logprobs_of(topk, row_of, shift))[predicted]))
        for shift in ((0, 1, -1) if num_rows >= _ENOUGH or differs.any() else ())
    }
    best = max(shares, key=lambda shift: shares[shift], default=0)
    needed = 0.0 if differs.any() else max(0.2, 5 / np.sqrt(max(1, num_rows)))
    if best and shares[best] - shares[0] > needed:
        other = "next" if best > 0 else "previous"
        raise cache_error(
            rows.places[0],
            f"its rows are shifted by one: {shares[best]:.0%} hold the {other} token, and "
            f"{shares[0]:.0%} their own",
            "row i is what predicts token i from those before it, and row 0 is empty",
        )
    if differs.any():
        index = int(np.argmax(differs))
        raise cache_error(
            rows.place(index),
            f"the log-probability of its own token, {topk.token_ids[index]}, is not the "
            "candidate's, or missing",
            "store rows as the server gave them, with the ids that it was asked for",
        )
