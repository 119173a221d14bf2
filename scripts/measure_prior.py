"""Measure what xtok/prior.py quotes: how kinds of tokens follow each other, and Zipf's law in them.

Text: `--spaced` and `--unspaced`, files or globs as `xtok estimate --text` takes them, of languages
with and without spaces between words. Adds up over the tokenizers that were fetched, of six; prints
the two matrices, and the shift and exponent of 1 / (rank + shift) ** exponent
that foretell the text's tokens of a kind best, in likelihood.

    python scripts/measure_prior.py --spaced 'en.jsonl' --spaced 'de.jsonl' --unspaced 'ja.jsonl'
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xtok import prior
from xtok.prior import Kind, kind_of
from xtok.texts import ShardReader, find_texts, shards
from xtok.tokenizers import Tokenizer, load_tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
NAMES = (
    "llama3.tiktoken",
    "mistral-v3.model",
    "deepseek-v3",
    "qwen.tiktoken",
    "claude-2",
    "tekken.json",
)
NONE = len(Kind)


def read(patterns: list[str]) -> list[str]:
    """Return all documents."""
    found = [shard for path in find_texts(patterns) for shard in shards(path)]
    return [document for shard in found for document in ShardReader(shard)]


def kinds(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the kind of each token, `NONE` for what is no text on its own."""
    found = [kind_of(token) for token in tokenizer.table.tokens()]
    return np.array([NONE if kind is None else kind for kind in found])


def transitions(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.float64]:
    """Count how often each kind follows each."""
    of_kind = kinds(tokenizer)
    counts = np.zeros((NONE + 1, NONE + 1))
    for ids in tokenizer.library_arrays(texts):
        found = of_kind[ids]
        np.add.at(counts, (found[:-1], found[1:]), 1)
    return counts[:NONE, :NONE]


def shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows that sum to 1; a kind that hardly occurs is as a word."""
    rows = np.where(counts.sum(1, keepdims=True) > 1000, counts, counts[Kind.WORD])
    return np.asarray(rows / rows.sum(1, keepdims=True))


def zipf(tokenizer: Tokenizer, texts: list[str], kind: Kind) -> tuple[float, float]:
    """Return the shift and the exponent that make a kind's tokens in the text most likely."""
    ids = np.concatenate(tokenizer.library_arrays(texts))
    counts = np.bincount(ids, minlength=len(tokenizer.table))
    tokens = tokenizer.table.tokens()
    chosen = (kinds(tokenizer) == kind) & np.array([len(token) > 1 for token in tokens])
    own = counts[chosen]
    ranks = np.arange(1, len(own) + 1)
    best = (-np.inf, 0.0, 0.0)
    for shift, exponent in product((0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0), np.arange(5, 31) / 20):
        logs = -exponent * np.log(ranks + shift)
        likelihood = float((own * logs).sum() - own.sum() * np.log(np.exp(logs).sum()))
        best = max(best, (likelihood, shift, float(exponent)))
    return best[1], best[2]


def show(label: str, found: NDArray[np.float64], quoted: NDArray[np.float64]) -> None:
    """Print a matrix as prior.py has it, and how far the two differ."""
    print(f"{label}, at most {np.abs(found - quoted).max():.3f} from xtok/prior.py:")
    for row in found:
        print("    [" + ", ".join(f"{share:.3f}" for share in row) + "],")


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spaced", action="append", required=True)
    parser.add_argument("--unspaced", action="append", required=True)
    args = parser.parse_args()
    groups = {"spaced": read(args.spaced), "unspaced": read(args.unspaced)}
    names = [name for name in NAMES if (TOKENIZERS / name).exists()]
    loaded = [load_tokenizer(str(TOKENIZERS / name)) for name in names]
    print(f"tokenizers: {', '.join(names)}")
    for label, quoted in (("spaced", prior._SPACED), ("unspaced", prior._UNSPACED)):
        found = shares(np.sum([transitions(t, groups[label]) for t in loaded], 0))
        show(label, found, quoted)
    for kind in prior._ZIPF:
        texts = groups["unspaced" if kind == Kind.UNSPACED else "spaced"]
        fits = [zipf(tokenizer, texts, kind) for tokenizer in loaded]
        shift, exponent = np.median(fits, 0)
        print(
            f"{kind.name}: 1 / (rank + {shift:g}) ** {exponent:.2f} (medians); "
            f"quoted {prior._ZIPF[kind]}"
        )


if __name__ == "__main__":
    main()
