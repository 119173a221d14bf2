"""Validation of predictions from files, servers, `serve`, collators and `project_logprobs`.

Values that no model can produce are errors, unless a file or a server uses them for "unknown".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.predictions.topk import TopK, firsts_of, masses, rows_of, with_candidates

IMPOSSIBLE = -1e3
"""Finite log-probabilities below this are padding, or a server's value for −∞ or unknown: −9999
(vLLM), −99999 (Tinker), −1e4 (DistillKit). A float32 softmax cannot go below about −104."""

STAND_IN = -9999.0
"""Value for null in JSON, which SGLang writes for −∞."""

STORED_ROUNDING = 0.01
"""Rounding error of half precision, in a sum of probabilities and in a log-probability."""

RELATIVE_ROUNDING = 2.0**-8
"""Relative rounding error of bfloat16 in a log-probability: its last bit."""

PREDICTS_FIRST = "row 0 must be empty: row i predicts token i, not token i + 1"

TRUE_HINT = "store natural log-probabilities at temperature 1"
_SHIFTED_HINT = "store the prediction of token i, from the tokens before it, in row i"

# Minimum evidence for rejecting a cache, in nats. A correct cache is rejected in at most 4 of 10⁸
# cases: the probability that a wrong distribution fits better by 17 nats is at most exp(-17).
_EVIDENCE = 17.0
_EVIDENCE_PER_ROW = 5.5  # so that at least four rows decide
_EVIDENCE_OF_ALL = 12.0  # for the test of all documents together, which runs once

_MIN_TAIL = 1e-4  # least probability that the rest of a row is assumed to have
_MIN_ROWS = 16
_MIN_CANDIDATES = 4
_MAX_SLOPE = 1.2
_MAX_TAIL_RATIO = 3.0
"""Maximum ratio of the rest to the tail of the candidates, extrapolated with a slope of at most
rank^−1.2. SmolLM2 and Gemma 3 (top 6 to 64; prose, code, digits, noise) reach 0.84 in 30 tokens;
their logarithms to base 2 exceed 3 in 93 % (top 12) to 100 % (top 32) of such texts."""


class PredictionError(ValueError):
    """An impossible prediction of a token, or of a whole document, with the hint that fixes it."""

    def __init__(
        self, row: int, problem: str, hint: str = TRUE_HINT, *, is_document: bool = False
    ) -> None:
        self.row, self.problem, self.hint, self.is_document = row, problem, hint, is_document
        super().__init__(f"the predictions of token {row}: {problem}; {hint}")


def is_stand_in(logprobs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the finite log-probabilities that stand for padding or unknown values.

    >>> is_stand_in(np.array([-0.5, -9999.0, -np.inf, np.nan])).tolist()
    [False, True, False, False]
    """
    return np.asarray((logprobs < IMPOSSIBLE) & ~np.isneginf(logprobs))


def own_logprobs(logprobs: NDArray[Any], firsts: NDArray[Any]) -> NDArray[Any]:
    """Replace stand-ins, and 0.0 for a first token, in realized log-probabilities with NaN.

    >>> own_logprobs(np.array([0.0, -9999.0, 0.0]), firsts=np.array([0])).tolist()
    [nan, nan, 0.0]
    """
    known = np.where(is_stand_in(logprobs), np.asarray(np.nan, logprobs.dtype), logprobs)
    known[firsts] = np.where(known[firsts] == 0, np.nan, known[firsts])
    return known


def without_null(logprobs: Iterable[Any]) -> list[Any]:
    """Replace null, JSON's −∞, in log-probabilities with the stand-in."""
    return [STAND_IN if value is None else value for value in logprobs]


def without_padding(topk: TopK) -> TopK:
    """Remove candidates that are padding. NaN, which is an error, is kept."""
    return with_candidates(topk, ~is_stand_in(topk.logprobs) & ~np.isneginf(topk.logprobs))


def checked(
    topk: TopK,
    width: int,
    *,
    begins: bool = True,
    is_answer: bool = False,
    is_projected: bool = False,
    vocabulary: str = "the vocabulary",
) -> TopK:
    """Validate predictions; return them without padding, sorted, and with all rests filled in.

    Rules, up to rounding:

    - Log-probabilities are at most 0. Candidates and rest sum to 1, or to less without a rest.
    - Candidates are ids of the vocabulary, and unique in a row.
    - Other tokens are no likelier than the last candidate: rest ≤ (V − K) · p_K. Over several rows,
      the rest continues the tail of the candidates.
    - The first token of a text has no prediction, and row i predicts token i of its document.

    Args:
        topk: the unchecked predictions. Missing `realized_logprob` are filled in.
        width: V, the largest id + 1.
        begins: whether documents start with the first token of a text.
        is_answer: whether one response of a server contains all values, so that the realized token
            is a candidate with the same value.
        is_projected: whether `project` wrote the predictions, so that the rest includes unknown
            probability, and a realized token has its share of the chunk.
        vocabulary: name of the vocabulary for errors.

    Raises:
        PredictionError: for the first violation.
    """
    is_listed = ~np.isnan(_listed(topk, rows_of(topk.starts), 0))  # even with an impossible value
    firsts = firsts_of(topk.bounds) if begins else np.zeros(0, np.int64)
    own = own_logprobs(topk.realized_logprob, firsts)
    topk = without_padding(topk)._replace(realized_logprob=own)
    row_of = rows_of(topk.starts)
    _check_candidates(topk, row_of, f"{vocabulary}, 0..{width - 1}", width)
    topk = _sorted(topk, row_of)
    sums = masses(topk)
    _check_sums(topk, sums, is_projected=is_projected)
    left = np.maximum(0, 1 - sums)
    if not is_projected:
        _check_rest(topk, row_of, left, width)
    listed = _listed(topk, row_of, 0)
    differs = _contradicted(topk, listed, is_answer=is_answer) & (not is_projected)
    if is_answer:
        differs |= topk.valid & ~is_listed
    if not is_answer or differs.any():
        _check_places(topk, row_of, left, width, also_chance=not (is_answer or is_projected))
    token_ids = topk.token_ids
    _require(
        differs,
        lambda n: (
            f"the realized token {token_ids[n]} is missing or has a different "
            "log-probability among the candidates"
        ),
        "store the rows as the server returned them, with the ids of the request",
    )
    outside = np.where(np.isnan(listed) & (not is_projected), np.exp(own, dtype=np.float64), 0)
    with_own = sums + np.nan_to_num(outside)
    _require(
        topk.valid & (with_own > 1 + STORED_ROUNDING),
        lambda n: (
            f"its candidates and its realized token sum to {with_own[n]:.4g}, expected at most 1"
        ),
    )
    topk = _without_first_rows(topk, firsts)
    with np.errstate(divide="ignore"):
        rest = np.where(np.isnan(topk.rest_logprob), np.log(left), topk.rest_logprob)
    rest[~topk.valid] = np.nan
    own = np.where(np.isnan(own), own_logprobs(listed, firsts), own)
    return topk._replace(rest_logprob=rest.astype(np.float32), realized_logprob=own)


def _contradicted(topk: TopK, listed: NDArray[np.float32], *, is_answer: bool) -> NDArray[np.bool_]:
    """Return a mask of rows where a realized log-probability differs from the candidate's.

    In files, only documents with at least half of such rows count: programs round differently.
    """
    own = topk.realized_logprob
    differs = np.abs(own - listed) > STORED_ROUNDING + RELATIVE_ROUNDING * np.abs(listed)
    known = np.flatnonzero(~np.isnan(own))
    num_known, num_differ = (
        _by_document(topk, known, x) for x in (np.ones(len(known)), differs[known])
    )
    is_most = (2 * num_differ >= num_known)[rows_of(topk.bounds)]
    return np.asarray(differs & (is_answer | is_most))


def _require(
    wrong: NDArray[np.bool_],
    problem: Callable[[int], str],
    hint: str = TRUE_HINT,
    row_of: NDArray[np.int64] | None = None,
) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        raise PredictionError(index if row_of is None else int(row_of[index]), problem(index), hint)


def _without_first_rows(topk: TopK, firsts: NDArray[np.int64]) -> TopK:
    is_first = np.zeros(len(topk.token_ids), np.bool_)
    is_first[firsts] = True
    row_of = rows_of(topk.starts)
    is_certain = (topk.ids == topk.token_ids[row_of]) & (topk.logprobs == 0)
    predicts = np.bincount(row_of, ~is_certain, len(is_first)) > 0
    predicts |= ~np.isnan(topk.realized_logprob)
    problem = f"the first token has a prediction, but {PREDICTS_FIRST}"
    _require(is_first & predicts, lambda _: problem, _SHIFTED_HINT)
    return with_candidates(topk, ~is_first[row_of])


def _check_candidates(topk: TopK, row_of: NDArray[np.int64], within: str, width: int) -> None:
    _require(
        (topk.ids < 0) | (topk.ids >= width),
        lambda n: f"the id {topk.ids[n]} is outside {within}",
        "pass the model that made these ids",
        row_of,
    )
    own, rest = topk.realized_logprob, topk.rest_logprob
    for values, wrong, name, rows in (
        (topk.logprobs, ~(topk.logprobs <= STORED_ROUNDING), "a candidate", row_of),
        (own, (own > STORED_ROUNDING) | np.isneginf(own), "the realized token", None),
        (rest, rest > STORED_ROUNDING, "the rest", None),
    ):
        _require(
            wrong,
            lambda n, x=values, name=name: (  # type: ignore[misc]
                f"the log-probability of {name} is {x[n]:.4g}, expected a number of at most 0"
            ),
            f"{TRUE_HINT}, not logits, and omit unknown values",
            rows,
        )
    keys = row_of << 32 | topk.ids
    order = np.argsort(keys, kind="stable")
    _require(
        keys[order[1:]] == keys[order[:-1]],
        lambda n: f"the candidate {topk.ids[order[n]]} occurs twice",
        "store each candidate once",
        row_of[order],
    )


def _sorted(topk: TopK, row_of: NDArray[np.int64]) -> TopK:
    ids, values = topk.ids, topk.logprobs
    rises = (values[1:] > values[:-1]) | ((values[1:] == values[:-1]) & (ids[1:] < ids[:-1]))
    unsorted = np.zeros(len(topk.token_ids), np.bool_)
    unsorted[row_of[1:][rises & (row_of[1:] == row_of[:-1])]] = True
    if not unsorted.any():
        return topk
    chosen = np.flatnonzero(unsorted[row_of])
    order = chosen[np.lexsort((ids[chosen], -values[chosen], row_of[chosen]))]
    ids, values = ids.copy(), values.copy()
    ids[chosen], values[chosen] = ids[order], values[order]
    return topk._replace(ids=ids, logprobs=values)


def _check_sums(topk: TopK, sums: NDArray[np.float64], *, is_projected: bool) -> None:
    rest = np.exp(topk.rest_logprob, dtype=np.float64)
    has_rest = topk.valid & ~np.isnan(rest)
    totals = sums + np.where(has_rest, rest, 0)
    lacks = has_rest & (totals < 1 - STORED_ROUNDING) & (not is_projected)
    words = ("probabilities sum to {:.4g}, expected at most 1",
             "probabilities and the rest sum to {:.4g}, expected 1")  # fmt: skip
    _require(
        (totals > 1 + STORED_ROUNDING) | lacks,
        lambda n: f"its {words[int(has_rest[n])].format(totals[n])}",
        f"{TRUE_HINT}; the rest is log(1 - sum of the probabilities)",
    )


def _check_rest(
    topk: TopK, row_of: NDArray[np.int64], left: NDArray[np.float64], width: int
) -> None:
    """Compare the rest of each row with its last candidate and, per document, with the tail.

    The realized token is not counted, because servers add it regardless of its rank.
    """
    starts, counts = topk.starts[:-1], np.diff(topk.starts)
    own = np.full(len(counts), len(topk.ids))  # rank of the realized token
    hits = np.flatnonzero(topk.ids == topk.token_ids[row_of])
    own[row_of[hits]] = hits - starts[row_of[hits]]
    size = counts - (own < len(topk.ids))
    rows = np.flatnonzero(size > 0)
    starts, counts, own, size, left = starts[rows], counts[rows], own[rows], size[rows], left[rows]

    def of_rank(rank: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(topk.logprobs[starts + rank + (own <= rank)], np.float64)

    least, others = of_rank(size - 1), np.maximum(0, width - counts)
    most = others * np.exp(least * (1 - RELATIVE_ROUNDING)) + STORED_ROUNDING
    hint = f"{TRUE_HINT}, of the best candidates; not logits, and not logarithms to another base"
    _require(
        left > most,
        lambda n: (
            f"its candidates sum to {1 - left[n]:.4g}, but {others[n]:,} other tokens of at most "
            f"{np.exp(least[n]):.2g} each (as the last candidate) cannot add up to the rest"
        ),
        hint,
        rows,
    )
    half = np.maximum(1, size // 2)
    slope = (of_rank(half - 1) - least) / np.log(np.maximum(2, size) / half)
    power = 1 - np.clip(slope, 0, _MAX_SLOPE)
    power[power == 0] = 1e-9
    beyond = np.log(np.maximum(1, others / size))
    tail = np.exp(least) * size * np.expm1(power * beyond) / power
    some = size >= _MIN_CANDIDATES
    num_rows, lefts, tails = (
        _by_document(topk, rows[some], values[some])
        for values in (np.ones(len(rows)), left, np.minimum(1, tail) + RELATIVE_ROUNDING / 2)
    )
    _require_documents(
        topk,
        (num_rows >= _MIN_ROWS) & (lefts > _MAX_TAIL_RATIO * tails),
        lambda n: (
            "its candidates leave a rest that is "
            f"{lefts[n] / tails[n]:.0f} times the extrapolated tail of the candidates, expected at "
            f"most {_MAX_TAIL_RATIO:g} times"
        ),
        hint,
    )


def _by_document(topk: TopK, rows: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sum of these rows' values per document; the last entry is the total."""
    document = np.searchsorted(topk.bounds, rows, side="right") - 1
    sums = np.bincount(document, values, len(topk.bounds) - 1)
    both: NDArray[np.float64] = np.append(sums, sums.sum()).astype(np.float64)
    return both


def _require_documents(
    topk: TopK, wrong: NDArray[np.bool_], problem: Callable[[int], str], hint: str
) -> None:
    if wrong.any():
        n = int(np.argmax(wrong))
        row = int(topk.bounds[n]) if n < len(wrong) - 1 else 0
        raise PredictionError(row, problem(n), hint, is_document=True)


def _listed(topk: TopK, row_of: NDArray[np.int64], shift: int) -> NDArray[np.float32]:
    """Return each row's log-probability for the token `shift` places later; NaN if not listed."""
    tokens = np.full(len(topk.token_ids), -1, np.int64)
    document = rows_of(topk.bounds)
    source = np.arange(len(tokens)) + shift
    inside = (source >= 0) & (source < len(tokens))
    inside[inside] = document[source[inside]] == document[inside]
    tokens[inside] = topk.token_ids[source[inside]]
    logprobs = np.full(len(tokens), np.nan, np.float32)
    hits = topk.ids == tokens[row_of]
    logprobs[row_of[hits]] = topk.logprobs[hits]
    return logprobs


def _check_places(
    topk: TopK,
    row_of: NDArray[np.int64],
    left: NDArray[np.float64],
    width: int,
    *,
    also_chance: bool,
) -> None:
    """Check that rows predict their own tokens, with one likelihood-ratio test per alternative.

    The alternatives: the rows predict the next tokens, the previous tokens, or, for all documents
    together, unrelated tokens, so that a uniform distribution fits better.
    """
    rows = np.flatnonzero(topk.valid)
    document, left = rows_of(topk.bounds)[rows], left[rows]
    others = np.maximum(1, width - np.diff(topk.starts)[rows])
    unlisted = np.log(np.maximum(_MIN_TAIL, left) / others)
    unlisted = np.minimum(unlisted, topk.logprobs[topk.starts[1:][rows] - 1])
    listed = {shift: _listed(topk, row_of, shift)[rows] for shift in (0, 1, -1)}
    num_rows, mass = (_by_document(topk, rows, x) for x in (np.ones(len(rows)), 1 - left))
    share = {
        n: _by_document(topk, rows, ~np.isnan(values)) / np.maximum(1, num_rows)
        for n, values in listed.items()
    }
    expected = mass / np.maximum(1, num_rows)
    logprobs = {n: np.where(np.isnan(values), unlisted, values) for n, values in listed.items()}

    def evidence(gain: NDArray[Any]) -> NDArray[np.float64]:
        return _by_document(topk, rows, np.clip(gain, -_EVIDENCE_PER_ROW, _EVIDENCE_PER_ROW))

    for shift, other in ((1, "next"), (-1, "previous")):
        place = rows + shift
        inside = (place >= topk.bounds[document]) & (place < topk.bounds[document + 1])
        _require_documents(
            topk,
            (evidence((logprobs[shift] - logprobs[0]) * inside) >= _EVIDENCE)
            & (2 * share[shift] >= expected),
            lambda n, shift=shift, other=other: (  # type: ignore[misc]
                f"its rows are shifted by one: {share[shift][n]:.0%} of them list the {other} "
                f"token, but only {share[0][n]:.0%} their own token"
            ),
            _SHIFTED_HINT,
        )
    is_unknown = np.isnan(topk.realized_logprob[rows])
    gain = (-np.log(width) - logprobs[0]) * is_unknown
    is_chance = (evidence(gain) >= _EVIDENCE_OF_ALL) & (3 * share[0] < expected) & also_chance
    is_chance[:-1] = False
    _require_documents(
        topk,
        is_chance,
        lambda n: (
            f"only {share[0][n]:.0%} of its rows list their own token, expected {expected[n]:.0%} "
            "from their probabilities; the rows belong to other tokens"
        ),
        "store the predictions of these tokens, from the model that made the ids",
    )
