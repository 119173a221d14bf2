"""The constants of `counting/synthetic.py`: which kind of token follows which, and Zipf's law.

Summed over six tokenizers; Chinese and Japanese are the languages without spaces. Prints both
matrices, and for each kind the shift and exponent of 1 / (rank + shift) ** exponent with the
highest likelihood on the text.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Row, documents, tokenizer
from xtok.building.counting import synthetic
from xtok.building.counting.synthetic import TextKind, text_kind
from xtok.tokenizers import Tokenizer

NAMES = ("llama3", "mistral-v3", "deepseek-v3", "qwen", "claude-2", "tekken")
NONE = len(TextKind)


def constants(options: Namespace) -> Iterator[Row]:
    """Measure all constants."""
    corpus = documents(options)
    texts = {
        label: [t for language, rows in corpus.items() if (language in ("zh", "ja")) == un
                for t in rows]
        for label, un in (("spaced", False), ("unspaced", True))
    }  # fmt: skip
    sides = [tokenizer(name) for name in NAMES if options.only in name]
    for label, quoted in (("spaced", synthetic._SPACED), ("unspaced", synthetic._UNSPACED)):
        counts = np.sum([transitions(side, texts[label]) for side in sides], 0)
        rows = np.where(counts.sum(1, keepdims=True) > 1000, counts, counts[TextKind.WORD])
        rows = rows / rows.sum(1, keepdims=True).clip(min=1)
        for kind in TextKind:
            shares = {f"to {other.name}": float(rows[kind, other]) for other in TextKind}
            off = float(np.abs(rows[kind] - quoted[kind]).max())
            yield {"text": label, "from": kind.name, **shares, "off by at most": off}
    for kind, quoted_fit in synthetic._ZIPF.items():
        label = "unspaced" if kind == TextKind.UNSPACED else "spaced"
        shift, exponent = np.median([zipf(side, texts[label], kind) for side in sides], 0)
        yield {
            "kind": kind.name, "shift": float(shift), "exponent": float(exponent),
            "quoted": str(quoted_fit),
        }  # fmt: skip


def kinds(side: Tokenizer) -> NDArray[np.int64]:
    """Return the kind of each token, `NONE` for tokens that are not valid text."""
    of_token = [text_kind(token) for token in side.table.tokens()]
    return np.array([NONE if kind is None else kind for kind in of_token])


def transitions(side: Tokenizer, texts: list[str]) -> NDArray[np.float64]:
    """Count how often each kind follows each."""
    of_kind, counts = kinds(side), np.zeros((NONE + 1, NONE + 1))
    for ids in side.library_arrays(texts):
        sequence = of_kind[ids]
        np.add.at(counts, (sequence[:-1], sequence[1:]), 1)
    return counts[:NONE, :NONE]


def zipf(side: Tokenizer, texts: list[str], kind: TextKind) -> tuple[float, float]:
    """Return the shift and the exponent that make a kind's tokens in the text most likely."""
    ids = np.concatenate([np.zeros(0, np.int64), *side.library_arrays(texts)])
    longer = np.array([len(token) > 1 for token in side.table.tokens()])
    own = np.bincount(ids, minlength=len(side.table))[(kinds(side) == kind) & longer]
    ranks = np.arange(1, len(own) + 1)
    best = (-np.inf, 0.0, 0.0)
    for shift, exponent in product((0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0), np.arange(5, 31) / 20):
        logs = -exponent * np.log(ranks + shift)
        likelihood = float((own * logs).sum() - own.sum() * np.log(np.exp(logs).sum()))
        best = max(best, (likelihood, shift, float(exponent)))
    return best[1], best[2]
