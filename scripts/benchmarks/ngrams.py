"""An n-gram teacher over a real tokenizer's tokens: predictions in no time, without a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.projecting.stored import TopK

KINDS = {"en, Python": ("en", "python"), "zh": ("zh",), "own text": ("own text",)}
ORDER = 4
DISCOUNT = 0.4  # a peaked teacher: its truth can be sampled
Sparse = tuple[NDArray[np.int64], NDArray[np.float64]]


class NGrams:
    """Absolute discounting, each order backing off to the one below, down to single tokens.

    (Ney, Essen and Kneser, Computer Speech and Language 8, 1994, section 2.)
    """

    def __init__(self, rows: Sequence[NDArray[np.int32]], seed: int = 0) -> None:
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for row in rows:
            ids = row.tolist()
            for i, token in enumerate(ids):
                for n in range(min(i + 1, ORDER)):
                    counts[tuple(ids[i - n : i])][token] += 1
        self._followers: dict[tuple[int, ...], Sparse] = {
            context: (np.array(list(c)), np.array(list(c.values()), np.float64))
            for context, c in counts.items()
        }
        ids, count = self._followers[()]
        order = np.argsort(-count, kind="stable")
        self._followers[()] = ids[order], count[order]
        self._singles = np.zeros(ids.max() + 1)
        self._singles[ids] = count / count.sum()
        self.random = np.random.default_rng(seed)

    def levels(self, context: Sequence[int]) -> Iterator[tuple[float, Sparse]]:
        """Yield mixture weights, with the tokens of each order and their shares."""
        weight = 1.0
        for n in range(ORDER - 1, -1, -1):
            followers = self._followers.get(tuple(context[max(0, len(context) - n) :]))
            if n <= len(context) and followers is not None:
                ids, count = followers
                taken = DISCOUNT * len(ids) / count.sum() if n else 0.0
                shares = count - (DISCOUNT if n else 0.0)
                yield weight * (1 - taken), (ids, shares / shares.sum())
                weight *= taken

    def prediction(self, context: Sequence[int], top_k: int | None = None) -> Sparse:
        """Return the best candidates, the best first, and their probabilities."""
        parts = list(self.levels(context))
        weight, (singles, _) = parts.pop()
        p = np.zeros_like(self._singles)
        ids = [singles if top_k is None else singles[:top_k]]  # they are sorted
        for of_level, (followers, part) in parts:
            p[followers] += of_level * part
            ids.append(followers)
        found = np.unique(np.concatenate(ids))
        p = p[found] + weight * self._singles[found]
        order = np.lexsort((found, -p))[:top_k]
        return found[order], p[order]

    def draw(self, context: Sequence[int]) -> int:
        """Return a token as the model would write it."""
        u = self.random.random()
        found = 0
        for weight, (ids, shares) in self.levels(context):
            place = int(np.searchsorted(np.cumsum(shares), u / weight))
            found = int(ids[min(len(ids) - 1, place)])
            if u < weight:
                break
            u -= weight
        return found


class Sides(NamedTuple):
    """Texts as tokens of both sides, one after another."""

    s_ids: NDArray[np.int32]
    s_bounds: NDArray[np.int64]
    t_ids: NDArray[np.int32]
    t_bounds: NDArray[np.int64]


def flat(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return documents one after another."""
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def predictions(
    sides: Sides, model: NGrams, rows: Iterable[int], top_k: int | None
) -> dict[int, Sparse]:
    """Return what the teacher predicts for some of its tokens."""
    found = {}
    for j in rows:
        begin = sides.t_bounds[np.searchsorted(sides.t_bounds, j, side="right") - 1]
        context = sides.t_ids[max(begin, j - ORDER + 1) : j].tolist()
        found[j] = model.prediction(context, top_k)
    return found


def stored(sides: Sides, rows: dict[int, Sparse], top_k: int | None) -> TopK:
    """Return predictions as a cache has them; nothing for the other tokens."""
    counts = np.zeros(len(sides.t_ids), np.int64)
    rest, realized = np.full((2, len(sides.t_ids)), np.nan, np.float32)
    ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for j, (candidates, p) in sorted(rows.items()):
        own = p[candidates == sides.t_ids[j]]
        ids.append(candidates[:top_k].astype(np.int32))
        logprobs.append(np.log(p[:top_k]).astype(np.float32))
        counts[j] = len(ids[-1])
        with np.errstate(divide="ignore"):
            rest[j] = np.log(max(0.0, 1 - p[:top_k].sum())) if top_k else -np.inf
        realized[j] = np.log(own[0]) if len(own) else np.nan
    return TopK(
        sides.t_ids, sides.t_bounds, np.cumsum([0, *counts]), np.concatenate(ids),
        np.concatenate(logprobs), rest, realized,
    )  # fmt: skip
