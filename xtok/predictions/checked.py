"""A prediction obeys probability: what must hold for predictions, whoever made them.

Files, servers' answers, `serve`, collators, `project_logprobs` and `topk_kl` all call `checked`.
What no model can give is an error, or, where a file or a server writes it for "nothing", unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.predictions.topk import TopK, firsts_of, masses, rows_of, with_candidates

IMPOSSIBLE = -1e3
"""Finite log-probabilities below this are padding, or what a server writes for −∞ or for nothing:
−9999 (vLLM), −99999 (Tinker), −1e4 (DistillKit). The least of a float32 softmax is about −104."""

STAND_IN = -9999.0
"""What JSON's null, SGLang's for −∞, is read as."""

STORED_ROUNDING = 0.01
"""What half precision may add to a sum of probabilities, and to a log-probability."""

RELATIVE_ROUNDING = 2.0**-8
"""What bfloat16 may add to a log-probability, of its size: a whole last bit."""

PREDICTS_FIRST = "nothing predicts a first token: row i is of token i, not of the next"
"""What is wrong with rows that begin with a prediction."""

TRUE_HINT = "store natural log-probabilities at temperature 1"
_SHIFTED_HINT = "give rows that predict token i from the tokens before it; row 0 is empty"

# Statistics decide over so many rows, and by so much: against a true cache, in 4 of 10⁸ cases.
_ENOUGH_ROWS = 16
_EVIDENCE = 17.0  # nats
_MOST_EVIDENCE = 5.5  # of a row: four at least
_EVIDENCE_OF_ALL = 12.0  # nats, of all rows together, which are compared once
_LEAST_LEFT = 1e-4

_FEWEST_CANDIDATES = 4
_STEEPEST = 1.2
_LONGEST_TAIL = 3.0
"""By how much the rest may exceed the tail of the candidates, followed no steeper than
rank^−1.2: SmolLM2 and Gemma 3 (top 6 to 64; prose, code, digits, noise) reach 0.84 in 30 tokens,
their logarithms to base 2 exceed 3 in 93 % (top 12) to 100 % (32) of such texts."""


class PredictionError(ValueError):
    """What is impossible for a token, or a document's tokens; and the hint that fixes it."""

    def __init__(
        self, row: int, problem: str, hint: str = TRUE_HINT, *, is_document: bool = False
    ) -> None:
        self.row, self.problem, self.hint, self.is_document = row, problem, hint, is_document
        super().__init__(f"the predictions of token {row}: {problem}; {hint}")


def is_stand_in(logprobs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which log-probabilities only stand where there is none; NaN and −∞ may not.

    >>> is_stand_in(np.array([-0.5, -9999.0, -np.inf, np.nan])).tolist()
    [False, True, False, False]
    """
    return np.asarray((logprobs < IMPOSSIBLE) & ~np.isneginf(logprobs))


def own_logprobs(logprobs: NDArray[Any], firsts: NDArray[Any]) -> NDArray[Any]:
    """Return the log-probabilities of texts' own tokens, NaN where none is given.

    That is for stand-ins, and for a first token with 0.0, as if it were certain.

    >>> own_logprobs(np.array([0.0, -9999.0, 0.0]), firsts=np.array([0])).tolist()
    [nan, nan, 0.0]
    """
    known = np.where(is_stand_in(logprobs), np.asarray(np.nan, logprobs.dtype), logprobs)
    known[firsts] = np.where(known[firsts] == 0, np.nan, known[firsts])
    return known


def without_null(logprobs: Iterable[Any]) -> list[Any]:
    """Return log-probabilities of JSON, which has no −∞: null is what stands for it."""
    return [STAND_IN if value is None else value for value in logprobs]


def without_padding(topk: TopK) -> TopK:
    """Return predictions without the candidates that are padding; NaN, an error, is kept."""
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
    """Return predictions without padding, the best candidate first, with all rests filled in.

    No model breaks these rules, but for rounding:

    - A log-probability is at most 0. A row's sum to 1 with the rest, if it is given, else to less.
    - A candidate is a token, and occurs once.
    - Nothing that a top-k leaves out is above its least candidate: rest ≤ (V − K) · p_K; and over
      some rows, the rest goes on as the candidates fall.
    - Nothing predicts a first token, and a row is of its own token, document by document.

    `realized_logprob` becomes the candidate's where it is not given.

    Args:
        topk: as it was read.
        width: V, the largest id + 1.
        begins: whether documents begin with a text's first token.
        is_answer: whether a server gave all of it at once: then a text's own token is always a
            candidate, and has its value.
        is_projected: whether they were projected: then the rest is also what is not known, and a
            text's own token has what its chunk has.
        vocabulary: whose ids these are, as errors name it.

    Raises:
        PredictionError: for the first rule that a row breaks.
    """
    is_listed = ~np.isnan(_listed(topk, rows_of(topk.starts), 0))  # if only as impossible
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
        _check_places(topk, row_of, left, width, is_own_alone=is_answer or is_projected)
    token_ids, problem = topk.token_ids, "the log-probability of its own token, {}, is not the "
    problem += "candidate's, or missing"
    as_given = "store rows as the server gave them, with the ids that it was asked for"
    _require(differs, lambda n: problem.format(token_ids[n]), as_given)
    outside = np.where(np.isnan(listed) & (not is_projected), np.exp(own, dtype=np.float64), 0)
    with_own = sums + np.nan_to_num(outside)
    _require(
        topk.valid & (with_own > 1 + STORED_ROUNDING),
        lambda n: f"its candidates and its own token, which is none, sum to {with_own[n]:.4g}",
    )
    topk = _without_first_rows(topk, firsts)
    with np.errstate(divide="ignore"):
        rest = np.where(np.isnan(topk.rest_logprob), np.log(left), topk.rest_logprob)
    rest[~topk.valid] = np.nan
    own = np.where(np.isnan(own), own_logprobs(listed, firsts), own)
    return topk._replace(rest_logprob=rest.astype(np.float32), realized_logprob=own)


def _contradicted(topk: TopK, listed: NDArray[np.float32], *, is_answer: bool) -> NDArray[np.bool_]:
    """Return where a text's own token has another value than its candidate has.

    Of a file, only in documents where half of them do: two programs round otherwise.
    """
    own = topk.realized_logprob
    differs = np.abs(own - listed) > STORED_ROUNDING + RELATIVE_ROUNDING * np.abs(listed)
    given = np.flatnonzero(~np.isnan(own))
    num_given, num_differ = (
        _by_document(topk, given, x) for x in (np.ones(len(given)), differs[given])
    )
    is_most = (2 * num_differ >= num_given)[rows_of(topk.bounds)]
    return np.asarray(differs & (is_answer | is_most))


def _require(
    wrong: NDArray[np.bool_],
    problem: Callable[[int], str],
    hint: str = TRUE_HINT,
    row_of: NDArray[np.int64] | None = None,
) -> None:
    """Raise an error for the first that is wrong."""
    if wrong.any():
        index = int(np.argmax(wrong))
        raise PredictionError(index if row_of is None else int(row_of[index]), problem(index), hint)


def _without_first_rows(topk: TopK, firsts: NDArray[np.int64]) -> TopK:
    """Empty the rows of first tokens; one that predicts more than its own token is an error."""
    is_first = np.zeros(len(topk.token_ids), np.bool_)
    is_first[firsts] = True
    row_of = rows_of(topk.starts)
    is_certain = (topk.ids == topk.token_ids[row_of]) & (topk.logprobs == 0)
    predicts = np.bincount(row_of, ~is_certain, len(is_first)) > 0
    predicts |= ~np.isnan(topk.realized_logprob)
    problem = f"it has a prediction, and {PREDICTS_FIRST}"
    _require(is_first & predicts, lambda _: problem, _SHIFTED_HINT)
    return with_candidates(topk, ~is_first[row_of])


def _check_candidates(topk: TopK, row_of: NDArray[np.int64], within: str, width: int) -> None:
    """Check ids, and that log-probabilities are some; the rest may be −inf, and the own be NaN."""
    _require(
        (topk.ids < 0) | (topk.ids >= width),
        lambda n: f"the id {topk.ids[n]} is outside {within}",
        "give the model that made these ids",
        row_of,
    )
    own, rest = topk.realized_logprob, topk.rest_logprob
    for values, wrong, what, rows in (
        (topk.logprobs, ~(topk.logprobs <= STORED_ROUNDING), "a candidate", row_of),
        (own, (own > STORED_ROUNDING) | np.isneginf(own), "its own token", None),
        (rest, rest > STORED_ROUNDING, "the rest", None),
    ):
        hint = f"{TRUE_HINT}, not logits, and leave out what has none"
        _require(wrong, lambda n, x=values, what=what: _not_one(x[n], what), hint, rows)  # type: ignore[misc]
    keys = row_of << 32 | topk.ids
    order = np.argsort(keys, kind="stable")
    is_twice = keys[order[1:]] == keys[order[:-1]]
    once = "store each candidate once"
    _require(
        is_twice, lambda n: f"the candidate {topk.ids[order[n]]} occurs twice", once, row_of[order]
    )


def _not_one(value: float, what: str) -> str:
    if value > 0 and np.isfinite(value):
        return f"the log-probability {value:.4g} of {what} is of a probability above 1"
    return f"{'−inf' if value < 0 else value:.4} is not a log-probability of {what}"


def _sorted(topk: TopK, row_of: NDArray[np.int64]) -> TopK:
    """Put the best candidate first in each row, ties by the lower id."""
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
    """Check the sums of candidates, with the rest where it is given."""
    rest = np.exp(topk.rest_logprob, dtype=np.float64)
    is_given = topk.valid & ~np.isnan(rest)
    totals = sums + np.where(is_given, rest, 0)
    lacks = is_given & (totals < 1 - STORED_ROUNDING) & (not is_projected)
    wrong = (totals > 1 + STORED_ROUNDING) | lacks
    words = ["its probabilities", "its probabilities and the rest"]
    hint = f"{TRUE_HINT}; the rest is log(1 - their sum)"
    _require(wrong, lambda n: f"{words[int(is_given[n])]} sum to {totals[n]:.4g}", hint)


def _check_rest(
    topk: TopK, row_of: NDArray[np.int64], left: NDArray[np.float64], width: int
) -> None:
    """Check what candidates leave against the least of them, the text's own token aside.

    A server adds that one whatever its rank.
    """
    starts, counts = topk.starts[:-1], np.diff(topk.starts)
    own = np.full(len(counts), len(topk.ids))  # its rank
    hits = np.flatnonzero(topk.ids == topk.token_ids[row_of])
    own[row_of[hits]] = hits - starts[row_of[hits]]
    size = counts - (own < len(topk.ids))
    rows = np.flatnonzero(size > 0)
    starts, counts, own, size, left = starts[rows], counts[rows], own[rows], size[rows], left[rows]

    def of_rank(rank: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(topk.logprobs[starts + rank + (own <= rank)], np.float64)

    least, others = of_rank(size - 1), np.maximum(0, width - counts)
    most = others * np.exp(least * (1 - RELATIVE_ROUNDING)) + STORED_ROUNDING
    problem = "its candidates leave {:.4g}, and the {:,} other tokens have at most {:.2g} each, as "
    problem += "the least candidate has"
    hint = f"{TRUE_HINT}, those of the best candidates, not logits or logarithms to another base"
    _require(
        left > most, lambda n: problem.format(left[n], others[n], np.exp(least[n])), hint, rows
    )
    half = np.maximum(1, size // 2)
    steepness = (of_rank(half - 1) - least) / np.log(np.maximum(2, size) / half)
    power = 1 - np.clip(steepness, 0, _STEEPEST)
    power[power == 0] = 1e-9
    beyond = np.log(np.maximum(1, others / size))
    tail = np.exp(least) * size * np.expm1(power * beyond) / power
    some = size >= _FEWEST_CANDIDATES
    num_rows, lefts, tails = (
        _by_document(topk, rows[some], values[some])
        for values in (np.ones(len(rows)), left, np.minimum(1, tail) + RELATIVE_ROUNDING / 2)
    )
    _require_documents(
        topk,
        (num_rows >= _ENOUGH_ROWS) & (lefts > _LONGEST_TAIL * tails),
        lambda n: f"its candidates leave {lefts[n] / tails[n]:.0f} times what their tails go on to",
        hint,
    )


def _by_document(topk: TopK, rows: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sums of some rows' values over each document, and last over all."""
    document = np.searchsorted(topk.bounds, rows, side="right") - 1
    sums = np.bincount(document, values, len(topk.bounds) - 1)
    both: NDArray[np.float64] = np.append(sums, sums.sum()).astype(np.float64)
    return both


def _require_documents(
    topk: TopK, wrong: NDArray[np.bool_], problem: Callable[[int], str], hint: str
) -> None:
    """Raise an error for the first document that is wrong, or for all together."""
    if wrong.any():
        n = int(np.argmax(wrong))
        row = int(topk.bounds[n]) if n < len(wrong) - 1 else 0
        raise PredictionError(row, problem(n), hint, is_document=True)


def _listed(topk: TopK, row_of: NDArray[np.int64], shift: int) -> NDArray[np.float32]:
    """Return what each row gives the token that is `shift` on in its document; NaN if nothing."""
    tokens = np.full(len(topk.token_ids), -1, np.int64)
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
    topk: TopK,
    row_of: NDArray[np.int64],
    left: NDArray[np.float64],
    width: int,
    *,
    is_own_alone: bool,
) -> None:
    """Check that rows are of their own tokens, document by document.

    Rows of the next token give that more likelihood than their own, and list it about as often as
    their probabilities give. A token that is not listed has an equal part of what they leave.

    Args:
        topk: checked otherwise.
        row_of: the row of each candidate.
        left: what the candidates of each row leave.
        width: of the vocabulary.
        is_own_alone: whether it is unknown how often rows list their own token.
    """
    rows = np.flatnonzero(topk.valid)
    document, left = rows_of(topk.bounds)[rows], left[rows]
    others = np.maximum(1, width - np.diff(topk.starts)[rows])
    absent = np.log(np.maximum(_LEAST_LEFT, left) / others)
    absent = np.minimum(absent, topk.logprobs[topk.starts[1:][rows] - 1])
    listed = {shift: _listed(topk, row_of, shift)[rows] for shift in (0, 1, -1)}
    filled = {n: np.where(np.isnan(values), absent, values) for n, values in listed.items()}
    num_rows, mass = (_by_document(topk, rows, x) for x in (np.ones(len(rows)), 1 - left))
    hits = {n: _by_document(topk, rows, ~np.isnan(values)) for n, values in listed.items()}
    for shift, other in ((1, "next"), (-1, "previous")):
        inside = (rows + shift >= topk.bounds[document]) & (
            rows + shift < topk.bounds[document + 1]
        )
        gain = np.clip(filled[shift] - filled[0], -_MOST_EVIDENCE, _MOST_EVIDENCE) * inside
        _require_documents(
            topk,
            (_by_document(topk, rows, gain) >= _EVIDENCE) & (2 * hits[shift] >= mass),
            lambda n, shift=shift, other=other: (  # type: ignore[misc]
                f"its rows are shifted by one: {hits[shift][n] / num_rows[n]:.0%} hold the {other} "
                f"token, and {hits[0][n] / num_rows[n]:.0%} their own"
            ),
            _SHIFTED_HINT,
        )
    if is_own_alone:
        return
    is_known = ~np.isnan(listed[0]) | ~np.isnan(topk.realized_logprob[rows])
    known = _by_document(topk, rows, is_known)
    with np.errstate(divide="ignore", invalid="ignore"):
        share, stated = known / num_rows, np.minimum(mass / num_rows, 1 - _LEAST_LEFT)
        kept = np.nan_to_num(share * np.log(share / stated))
        evidence = num_rows * (kept + (1 - share) * np.log((1 - share) / (1 - stated)))
    is_wrong = (evidence >= _EVIDENCE_OF_ALL) & (3 * known < mass)
    is_wrong[:-1] = False
    _require_documents(
        topk,
        is_wrong,
        lambda n: (
            f"{share[n]:.0%} of its rows hold their own token, and by their probabilities "
            f"{stated[n]:.0%} do: they are of other tokens"
        ),
        "give the rows of these tokens, by the model that made these ids",
    )
