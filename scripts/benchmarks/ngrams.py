"""An n-gram teacher over a real tokenizer's tokens: predictions in no time, without a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.topk import TopK

KINDS = {"en, Python": ("en", "python"), "zh": ("zh",), "own text": ("own text",)}
ORDER = 4
DISCOUNT = 0.4  # a peaked teacher: its truth can be sampled
Sparse = tuple[NDArray[np.int64], NDArray[np.float64]]


class NGrams:
    """An n-gram model with absolute discounting and back-off to lower orders.

    (Ney, Essen and Kneser, Computer Speech and Language 8, 1994, section 2.)
    """

    def __init__(self, rows: Sequence[NDArray[np.int32]]) -> None:
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


def flat(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return documents one after another."""
    return np.concatenate(rows), offsets_of([*map(len, rows)])


def stored(
    token_ids: NDArray[np.int32], bounds: NDArray[np.int64], rows: dict[int, Sparse], top_k: int
) -> TopK:
    """Return predictions for some tokens of documents as a cache has them; nothing for others."""
    counts = np.zeros(len(token_ids), np.int64)
    rest, realized = np.full((2, len(token_ids)), np.nan, np.float32)
    ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for j, (candidates, p) in sorted(rows.items()):
        own = p[candidates == token_ids[j]]
        ids.append(candidates[:top_k].astype(np.int32))
        logprobs.append(np.log(p[:top_k]).astype(np.float32))
        counts[j] = len(ids[-1])
        with np.errstate(divide="ignore"):
            rest[j] = np.log(max(0.0, 1 - p[:top_k].sum()))
        realized[j] = np.log(own[0]) if len(own) else np.nan
    return TopK(
        token_ids, bounds, offsets_of(counts), np.concatenate(ids), np.concatenate(logprobs), rest,
        realized,
    )  # fmt: skip
