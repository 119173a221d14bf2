"""Predictions of random teachers, and the same predictions after typical mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

V, T = 420, 31
Rows = list[Any]


def random_rows(seed: int, k: int = 20) -> tuple[Any, Rows, Rows, Rows]:
    """Return the T ids of a text, and each row's candidates: ids, log-probabilities and logits.

    There are 20 kinds of random teachers. Their logits are normal, follow Zipf's law, or prefer the
    same tokens at each position. The text is sampled from the teacher. Each row contains the k best
    candidates, and for odd seeds also the text's own token.
    """
    generator = np.random.default_rng(seed)
    spread = (1.5, 2.0, 2.5, 3.0)[seed % 20 // 5]
    logits = spread * generator.normal(size=(T, V))
    if seed % 5 > 2:
        ranks = generator.permuted(np.tile(np.arange(1, V + 1), (T, 1)), axis=1)
        logits = 0.3 * logits - spread / 1.5 * np.log(ranks)
    elif seed % 5 > 1:
        logits -= np.log(np.arange(1, V + 1))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    text = (logprobs + generator.gumbel(size=logprobs.shape)).argmax(1)
    ids = [np.argsort(-row)[:k] for row in logprobs]
    if seed % 2:
        ids = [i if own in i else np.append(i, own) for i, own in zip(ids, text, strict=True)]
    pick = [[row[i] for row, i in zip(full, ids, strict=True)] for full in (logprobs, logits)]
    return text, ids, *pick


def shifted(rows: Rows, by: int) -> Rows:
    """Replace each row after the first by the row `by` positions later."""
    return [rows[0], *(rows[min(max(1, i + by), T - 1)] for i in range(1, T))]


MISTAKES: dict[str, Callable[[Any, Rows, Rows, Rows], tuple[Any, Rows, Rows]]] = {
    "base 2": lambda t, i, p, z: (t, i, [x / math.log(2) for x in p]),
    "base 10": lambda t, i, p, z: (t, i, [x / math.log(10) for x in p]),
    "logits": lambda t, i, p, z: (t, i, z),
    "logits below 0": lambda t, i, p, z: (t, i, [x - 30 for x in z]),
    "divided": lambda t, i, p, z: (t, i, [x / 2 for x in p]),
    "multiplied": lambda t, i, p, z: (t, i, [x * 1.5 for x in p]),
    "next": lambda t, i, p, z: (t, shifted(i, 1), shifted(p, 1)),
    "previous": lambda t, i, p, z: (t, shifted(i, -1), shifted(p, -1)),
    "another tokenizer": lambda t, i, p, z: (t, [(x * 11 + 5) % V for x in i], p),
}
"""Functions that apply a mistake to the results of `random_rows`.

Each function returns the ids of the text, and the candidates and log-probabilities of each row.
"""
