"""Validate predictions from files, servers, collators and `project_logprobs`.

A value that no model can produce is an error, unless a format uses it as a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.predictions.topk import TopK, document_starts, keep_candidates, masses, segment_ids

LOWEST_LOGPROB = -1e3
"""Finite log-probabilities below this limit are placeholders for padding, −∞ or unknown values.

vLLM writes −9999, Tinker −99999 and DistillKit −1e4. A float32 softmax returns no value between −∞
and −104.
"""

PLACEHOLDER = -9999.0
"""Placeholder that replaces null in JSON. SGLang writes null for −∞."""

STORED_ROUNDING = 0.01
"""Allowed error of a log-probability or a sum of probabilities, due to half precision."""

RELATIVE_ROUNDING = 2.0**-8
"""Maximum relative rounding error of a log-probability in bfloat16."""

PREDICTS_FIRST = "row 0 must be empty: row i predicts token i, not token i + 1"

TRUE_HINT = "store natural log-probabilities at temperature 1"
_SHIFTED_HINT = "in row i, store the prediction of token i from the preceding tokens"

# Minimum evidence for rejecting a cache, in nats. A correct cache is rejected in at most 4 of 10⁸
# cases: the probability that a wrong distribution fits better by 17 nats is at most exp(-17).
_EVIDENCE = 17.0
_EVIDENCE_PER_ROW = 5.5  # maximum evidence from one row; a rejection needs four rows
_EVIDENCE_OF_ALL = 12.0  # minimum evidence for the test on all documents together

_MIN_TAIL = 1e-4  # minimum probability assumed for the rest of a row
_MIN_ROWS = 16
_MIN_CANDIDATES = 4
_MAX_SLOPE = 1.2  # maximum exponent of the Zipf law that extrapolates candidates
_MAX_TAIL_RATIO = 3.0
"""Maximum ratio of a document's actual rest to the rest extrapolated from its candidates.

With SmolLM2 and Gemma 3 (top 6 to 64, texts of 30 tokens), the largest ratio was 0.84. If the file
wrongly contains logarithms to base 2, the ratio exceeds 3 in 93 % (top 12) to 100 % (top 32) of
these texts.
"""


class PredictionError(ValueError):
    """An impossible prediction at one token or in a whole document."""

    def __init__(
        self, row: int, problem: str, hint: str = TRUE_HINT, *, is_document: bool = False
    ) -> None:
        self.row, self.problem, self.hint, self.is_document = row, problem, hint, is_document
        super().__init__(f"the predictions of token {row} are invalid: {problem}; {hint}")


def exceeds(values: Any, limit: Any) -> Any:
    """Return a mask of the values that exceed a limit by more than `STORED_ROUNDING`.

    >>> exceeds(np.array([-0.5, 0.004, 0.5, np.nan]), 0).tolist()
    [False, False, True, False]
    """
    return values > limit + STORED_ROUNDING


def is_placeholder(logprobs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the finite log-probabilities that are placeholders.

    >>> is_placeholder(np.array([-0.5, -9999.0, -np.inf, np.nan])).tolist()
    [False, True, False, False]
    """
    return np.asarray((logprobs < LOWEST_LOGPROB) & ~np.isneginf(logprobs))


def realized_logprobs(logprobs: NDArray[Any], firsts: NDArray[Any]) -> NDArray[Any]:
    """Replace placeholders with NaN. For the first token of a text, 0.0 is also a placeholder.

    >>> realized_logprobs(np.array([0.0, -9999.0, 0.0]), firsts=np.array([0])).tolist()
    [nan, nan, 0.0]
    """
    scored = np.where(is_placeholder(logprobs), np.asarray(np.nan, logprobs.dtype), logprobs)
    scored[firsts] = np.where(scored[firsts] == 0, np.nan, scored[firsts])
    return scored


def fill_null(logprobs: Iterable[Any]) -> list[Any]:
    """Replace null, which stands for −∞ in JSON, with a placeholder."""
    return [PLACEHOLDER if value is None else value for value in logprobs]


def without_padding(topk: TopK) -> TopK:
    """Remove padding candidates. Keep NaN, so that later checks report NaN."""
    return keep_candidates(topk, ~is_placeholder(topk.logprobs) & ~np.isneginf(topk.logprobs))


def checked(
    topk: TopK,
    width: int,
    *,
    begins: bool = True,
    is_response: bool = False,
    vocabulary: str = "the vocabulary",
) -> TopK:
    """Validate a teacher's predictions. Return sorted predictions without padding, with all rests.

    The following must hold, up to rounding:

    - Log-probabilities are at most 0. In each row, the candidates and the rest (the probability
      outside the candidates) sum to 1. If the rest is unknown, the candidates sum to at most 1.
    - The candidates of a row are distinct ids of the vocabulary.
    - No token outside the candidates is more likely than the last candidate: rest ≤ (V − K) · p_K.
      In a longer document, the rest must also match an extrapolation from the candidates.
    - The first token of a text has no prediction. Row i of a document predicts token i.

    Args:
        topk: the unchecked predictions. Missing `realized_logprob` values are taken from the
            candidates.
        width: V, the size of the vocabulary.
        begins: whether each document starts with the first token of a text.
        is_response: whether all values come from one response of a server. Each realized token must
            be a candidate with the same log-probability.
        vocabulary: name of the vocabulary in errors.

    Raises:
        PredictionError: if a condition does not hold. The error names the first invalid row.
    """
    is_listed = ~np.isnan(_lookup(topk, 0))  # includes placeholders
    topk, sums = _prepared(topk, width, begins, vocabulary)
    _check_sums(topk, sums, is_complete=True)
    mass_left = np.maximum(0, 1 - sums)
    _check_rest(topk, mass_left, width)
    listed = _lookup(topk, 0)
    if not is_response:
        _check_shift(topk, mass_left, width, also_chance=True)
    _check_realized(topk, listed, is_listed, is_response=is_response)
    others = np.where(np.isnan(listed), np.exp(topk.realized_logprob, dtype=np.float64), 0)
    with_own = sums + np.nan_to_num(others)
    _require(
        topk.valid & exceeds(with_own, 1),
        lambda n: (
            f"the candidates and the realized token sum to {with_own[n]:.4g}, expected at most 1"
        ),
    )
    return _completed(topk, mass_left, begins)


def checked_projected(
    topk: TopK, width: int, *, begins: bool = True, vocabulary: str = "the vocabulary"
) -> TopK:
    """Validate predictions that `project` wrote, with fewer conditions than `checked`.

    `realized_logprob` is a token's share of the log-probability of its chunk, so the token's
    probability can exceed the rest. The candidates and the rest of a row can sum to less than 1.
    """
    topk, sums = _prepared(topk, width, begins, vocabulary)
    _check_sums(topk, sums, is_complete=False)
    mass_left = np.maximum(0, 1 - sums)
    _check_shift(topk, mass_left, width, also_chance=False)
    return _completed(topk, mass_left, begins)


def _prepared(
    topk: TopK, width: int, begins: bool, vocabulary: str
) -> tuple[TopK, NDArray[np.float64]]:
    """Return sorted predictions without placeholders, and the sum of each row's candidates."""
    realized = realized_logprobs(topk.realized_logprob, _firsts(topk, begins))
    topk = without_padding(topk)._replace(realized_logprob=realized)
    _check_candidates(topk, width, f"{vocabulary}, 0..{width - 1}")
    topk = _sort(topk)
    return topk, masses(topk)


def _completed(topk: TopK, mass_left: NDArray[np.float64], begins: bool) -> TopK:
    """Fill unknown values of `rest_logprob` and `realized_logprob` from the candidates."""
    firsts = _firsts(topk, begins)
    listed, topk = _lookup(topk, 0), _without_first_rows(topk, firsts)
    with np.errstate(divide="ignore"):
        rest = np.where(np.isnan(topk.rest_logprob), np.log(mass_left), topk.rest_logprob)
    rest[~topk.valid] = np.nan
    realized = topk.realized_logprob
    realized = np.where(np.isnan(realized), realized_logprobs(listed, firsts), realized)
    return topk._replace(rest_logprob=rest.astype(np.float32), realized_logprob=realized)


def _firsts(topk: TopK, begins: bool) -> NDArray[np.int64]:
    return document_starts(topk.bounds) if begins else np.zeros(0, np.int64)


def _require(
    is_wrong: NDArray[np.bool_],
    problem: Callable[[int], str],
    hint: str = TRUE_HINT,
    rows: NDArray[np.int64] | None = None,
    *,
    is_document: bool = False,
) -> None:
    """Raise an error for the first wrong entry. `rows[i]` is the row of entry i."""
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        row = index if rows is None else int(rows[index])
        raise PredictionError(row, problem(index), hint, is_document=is_document)


def _check_candidates(topk: TopK, width: int, within: str) -> None:
    """Check that ids and log-probabilities are valid, and that no row has a candidate twice."""
    row_ids, realized, rest = segment_ids(topk.starts), topk.realized_logprob, topk.rest_logprob
    _require(
        (topk.ids < 0) | (topk.ids >= width),
        lambda n: f"the id {topk.ids[n]} is outside {within}",
        "pass the model that made the ids",
        row_ids,
    )

    def require(name: str, values: NDArray[Any], wrong: Any, rows: Any = None) -> None:
        _require(
            exceeds(values, 0) | wrong,
            lambda n: (
                f"the log-probability of {name} is {values[n]:.4g}, expected a number of at most 0"
            ),
            f"{TRUE_HINT}, not logits, and omit unknown values",
            rows,
        )

    require("a candidate", topk.logprobs, np.isnan(topk.logprobs), row_ids)
    require("the realized token", realized, np.isneginf(realized))
    require("the rest", rest, False)
    keys = row_ids << 32 | topk.ids
    order = np.argsort(keys, kind="stable")
    _require(
        keys[order[1:]] == keys[order[:-1]],
        lambda n: f"the candidate {topk.ids[order[n]]} occurs twice",
        "store each candidate once",
        row_ids[order],
    )


def _sort(topk: TopK) -> TopK:
    ids, values, row_ids = topk.ids, topk.logprobs, segment_ids(topk.starts)
    rises = (values[1:] > values[:-1]) | ((values[1:] == values[:-1]) & (ids[1:] < ids[:-1]))
    if not (rises & (row_ids[1:] == row_ids[:-1])).any():
        return topk
    order = np.lexsort((ids, -values, row_ids))
    return topk._replace(ids=ids[order], logprobs=values[order])


def _check_sums(topk: TopK, sums: NDArray[np.float64], *, is_complete: bool) -> None:
    """Check that no row sums to more than 1, and that complete rows with a rest sum to 1."""
    rest = np.exp(topk.rest_logprob, dtype=np.float64)
    has_rest = topk.valid & ~np.isnan(rest)
    totals = sums + np.where(has_rest, rest, 0)
    lacks = has_rest & exceeds(1 - totals, 0) & is_complete
    words = ("probabilities sum to {:.4g}, expected at most 1",
             "probabilities and the rest sum to {:.4g}, expected 1")  # fmt: skip
    _require(
        exceeds(totals, 1) | lacks,
        lambda n: f"its {words[int(has_rest[n])].format(totals[n])}",
        f"{TRUE_HINT}; the rest is log(1 - sum of the probabilities)",
    )


def _check_rest(topk: TopK, left: NDArray[np.float64], width: int) -> None:
    """Check the rest of each row, and the rests of each document together; see `checked`."""
    # Exclude the realized token, because servers add the realized token regardless of its rank.
    others = keep_candidates(topk, topk.ids != topk.token_ids[segment_ids(topk.starts)])
    rows = np.flatnonzero(others.valid)
    starts, size, left = others.starts[rows], np.diff(others.starts)[rows], left[rows]
    half = np.maximum(1, size // 2)
    least, middle = (others.logprobs[starts + n - 1].astype(np.float64) for n in (size, half))
    unlisted = np.maximum(0, width - np.diff(topk.starts)[rows])
    hint = f"{TRUE_HINT} for the best candidates, not logits or logarithms to another base"
    _require(
        exceeds(left, unlisted * np.exp(least * (1 - RELATIVE_ROUNDING))),
        lambda n: (
            f"its candidates sum to only {1 - left[n]:.4g}; the {unlisted[n]:,} other tokens "
            "cannot make up the rest, because each is at most as likely as the last candidate "
            f"({np.exp(least[n]):.2g})"
        ),
        hint,
        rows,
    )
    # A Zipf law p(r) = p(n) · (r / n)^−s goes through the middle and the last candidate (rank n).
    # Its integral from rank n to rank u is p(n) · n · ((u / n)^(1 − s) − 1) / (1 − s).
    slope = (middle - least) / np.log(np.maximum(2, size) / half)
    power = 1 - np.clip(slope, 0, _MAX_SLOPE)
    power[power == 0] = 1e-9
    tail = np.exp(least) * size * np.expm1(power * np.log(np.maximum(1, unlisted / size))) / power
    some = size >= _MIN_CANDIDATES
    num_rows, lefts, tails = (
        _by_document(topk, rows[some], values[some])
        for values in (np.ones(len(rows)), left, np.minimum(1, tail) + RELATIVE_ROUNDING / 2)
    )
    _require(
        (num_rows >= _MIN_ROWS) & (lefts > _MAX_TAIL_RATIO * tails),
        lambda n: (
            f"the probability outside the candidates is {lefts[n] / tails[n]:.0f} times the value "
            f"extrapolated from the candidates, expected at most {_MAX_TAIL_RATIO:g} times"
        ),
        hint,
        _first_rows(topk),
        is_document=True,
    )


def _check_realized(
    topk: TopK, listed: NDArray[Any], is_listed: NDArray[np.bool_], *, is_response: bool
) -> None:
    """Check that a realized token has the same log-probability as the candidate with its id.

    In a server's response, each realized token must be a candidate. In a file, the two values can
    be rounded differently, so a document is rejected only if at least half of its rows differ.
    """
    allowed = STORED_ROUNDING + RELATIVE_ROUNDING * np.abs(listed)
    differs = np.abs(topk.realized_logprob - listed) > allowed
    if is_response:
        differs |= topk.valid & ~is_listed
    else:
        scored = np.flatnonzero(~np.isnan(topk.realized_logprob))
        is_most = 2 * _by_document(topk, scored, differs[scored]) >= _by_document(
            topk, scored, np.ones(len(scored))
        )
        differs &= is_most[segment_ids(topk.bounds)]
    _require(
        differs,
        lambda n: (
            f"the realized token {topk.token_ids[n]} is not a candidate, or the candidate has a "
            "different log-probability"
        ),
        "store the rows as the server returned them, with the ids of the request",
    )


def _check_shift(topk: TopK, left: NDArray[np.float64], width: int, *, also_chance: bool) -> None:
    """Check with likelihood-ratio tests that each row predicts its own token.

    Two tests per document check whether the rows predict the next or the previous token instead.
    One test on all documents together checks whether a uniform distribution fits the tokens better
    than the rows. In this case, the rows belong to unrelated tokens.
    """
    rows = np.flatnonzero(topk.valid)
    left, counts = left[rows], np.diff(topk.starts)[rows]
    unlisted = np.log(np.maximum(_MIN_TAIL, left) / np.maximum(1, width - counts))
    unlisted = np.minimum(unlisted, topk.logprobs[topk.starts[1:][rows] - 1])
    num_rows = np.maximum(1, _by_document(topk, rows, np.ones(len(rows))))
    expected = _by_document(topk, rows, 1 - left) / num_rows

    def shifted(shift: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return the log-probability of each row's shifted token.

        Also return the share of rows that contain the shifted token as a candidate.
        """
        listed = _lookup(topk, shift)[rows]
        is_listed = ~np.isnan(listed)
        return np.where(is_listed, listed, unlisted), _by_document(topk, rows, is_listed) / num_rows

    def evidence(gain: NDArray[Any]) -> NDArray[np.float64]:
        return _by_document(topk, rows, np.clip(gain, -_EVIDENCE_PER_ROW, _EVIDENCE_PER_ROW))

    realized, realized_share = shifted(0)
    for shift, other in ((1, "next"), (-1, "previous")):
        logprobs, share = shifted(shift)
        _require(
            (evidence(logprobs - realized) >= _EVIDENCE) & (2 * share >= expected),
            lambda n, share=share, other=other: (  # type: ignore[misc]
                f"its rows are shifted by one: {share[n]:.0%} of the rows contain the {other} "
                f"token as a candidate, but only {realized_share[n]:.0%} contain their own token"
            ),
            _SHIFTED_HINT,
            _first_rows(topk),
            is_document=True,
        )
    is_unknown = np.isnan(topk.realized_logprob[rows])
    fits_chance = evidence((-np.log(width) - realized) * is_unknown)[-1] >= _EVIDENCE_OF_ALL
    if also_chance and fits_chance and 3 * realized_share[-1] < expected[-1]:
        raise PredictionError(
            0,
            f"only {realized_share[-1]:.0%} of the rows contain their own token as a candidate, "
            f"expected {expected[-1]:.0%} from the probabilities; the rows belong to other tokens",
            "store the predictions of the model that made the ids",
            is_document=True,
        )


def _by_document(topk: TopK, rows: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sum of the rows' values in each document, followed by the total."""
    document = np.searchsorted(topk.bounds, rows, side="right") - 1
    sums = np.bincount(document, values, len(topk.bounds) - 1)
    return np.append(sums, sums.sum()).astype(np.float64)


def _first_rows(topk: TopK) -> NDArray[np.int64]:
    """Return the row that an error names, for each document and for all documents together."""
    return np.append(topk.bounds[:-1], 0)


def _lookup(topk: TopK, shift: int) -> NDArray[np.float32]:
    """Return each row's log-probability of the token `shift` rows later, or NaN if not listed."""
    size, row_ids = len(topk.token_ids), segment_ids(topk.starts)
    index = np.clip(np.arange(size) + shift, -1, size)  # positions -1 and `size` do not exist
    document = np.append(segment_ids(topk.bounds), -1)
    tokens = np.where(document[index] == document[:-1], np.append(topk.token_ids, -1)[index], -1)
    logprobs = np.full(size, np.nan, np.float32)
    hits = topk.ids == tokens[row_ids]
    logprobs[row_ids[hits]] = topk.logprobs[hits]
    return logprobs


def _without_first_rows(topk: TopK, firsts: NDArray[np.int64]) -> TopK:
    is_first = np.isin(np.arange(len(topk.token_ids)), firsts)
    row_ids = segment_ids(topk.starts)
    is_certain = (topk.ids == topk.token_ids[row_ids]) & (topk.logprobs == 0)
    predicts = np.bincount(row_ids, ~is_certain, len(is_first)) > 0
    predicts |= ~np.isnan(topk.realized_logprob)
    problem = f"the first token has a prediction, but {PREDICTS_FIRST}"
    _require(is_first & predicts, lambda _: problem, _SHIFTED_HINT)
    return keep_candidates(topk, ~is_first[row_ids])
