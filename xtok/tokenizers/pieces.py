"""`Spellings`: cached spellings of one vocabulary's tokens by another tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.tokenizers.table import TokenTable

Spell = Callable[[Sequence[bytes]], list[list[int] | None]]
"""Function from byte strings to their pieces; None if a string cannot be spelled."""

_TOKENS_AT_ONCE = 16_384  # tokens per call to a tokenizer, so that a progress bar moves


class Pieces(NamedTuple):
    """The concatenated spellings of some tokens."""

    ids: NDArray[np.int32]  # [total], ids of the spelling tokenizer
    counts: NDArray[np.int64]  # [tokens], pieces of each token; 0 if it cannot be spelled


class Spellings:
    """The tokens of a table as a tokenizer's pieces, spelled on first use.

    A map of Llama 3 and Qwen needs the spelling of one in seven student tokens.
    """

    def __init__(self, table: TokenTable, spell: Spell, label: str) -> None:
        self._table, self._spell_batch, self._label = table, spell, label
        # Place and number of each token's pieces in `_ids`; the number is −1 before spelling.
        self._starts = np.zeros(len(table), np.int64)
        self._counts = np.full(len(table), -1, np.int64)
        self._ids = np.empty(0, np.int32)

    def of(self, token_ids: NDArray[np.int64], progress: Progress = silent) -> Pieces:
        """Return the pieces of tokens, in the order of the tokens."""
        missing = token_ids[self._counts[token_ids] < 0]
        if len(missing):
            self._spell(missing, progress)
        counts = self._counts[token_ids]
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(self._starts[token_ids] - before, counts)
        return Pieces(self._ids[places], counts)

    def _spell(self, token_ids: NDArray[np.int64], progress: Progress) -> None:
        tokens = self._table.tokens()
        counts, ids = np.zeros(len(token_ids), np.int64), [self._ids]
        with progress(self._label, len(token_ids)) as advance:
            for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
                chunk = token_ids[start : start + _TOKENS_AT_ONCE].tolist()
                spelled = self._spell_batch([tokens[i] for i in chunk])
                counts[start : start + len(chunk)] = [len(pieces or ()) for pieces in spelled]
                ids.append(np.fromiter(chain.from_iterable(filter(None, spelled)), np.int32))
                advance(len(chunk))
        self._starts[token_ids] = len(self._ids) + np.cumsum(counts) - counts
        self._counts[token_ids] = counts
        self._ids = np.concatenate(ids)
