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
        self._known: dict[int, list[int] | None] = {}

    def of(self, token_ids: NDArray[np.int64], progress: Progress = silent) -> Pieces:
        """Return the pieces of tokens, in the order of the tokens."""
        ids = token_ids.tolist()
        if missing := [i for i in ids if i not in self._known]:
            self._spell(missing, progress)
        spelled = [self._known[i] or [] for i in ids]
        return Pieces(
            np.fromiter(chain.from_iterable(spelled), np.int32),
            np.fromiter(map(len, spelled), np.int64, len(spelled)),
        )

    def _spell(self, token_ids: list[int], progress: Progress) -> None:
        tokens = self._table.tokens()
        with progress(self._label, len(token_ids)) as advance:
            for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
                chunk = token_ids[start : start + _TOKENS_AT_ONCE]
                spelled = self._spell_batch([tokens[i] for i in chunk])
                self._known.update(zip(chunk, spelled, strict=True))
                advance(len(chunk))
