"""Documents of a cache: predictions with their texts' other columns, and errors that name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parquet import python_values
from xtok._lib.ragged import offsets_of
from xtok.errors import XtokError
from xtok.predictions.topk import TopK, chosen_rows, firsts_of

PER_TOKEN = (
    *("input_ids", "topk_ids", "topk_logprobs", "rest_logprob", "realized_logprob"),
    *("loss_mask", "labels", "attention_mask", "position_ids"),
)
"""Columns of a value per token: the student's are computed anew, and never copied."""

PROJECTED = "xtok project"
"""The source of predictions that `project` wrote."""

AGAIN_HINT = "make the cache again, or fetch it again"


class Documents(NamedTuple):
    """Some documents of a cache: predictions, and the documents' other columns."""

    topk: TopK
    columns: dict[str, Any]  # pyarrow arrays, a value per document
    places: Sequence[object]  # each document's: file and row, as errors name them
    loss_mask: NDArray[np.bool_] | None = None  # [N], True where a token is a training target

    def place(self, index: int) -> str:
        """Name a token of all documents."""
        row = int(np.searchsorted(self.topk.bounds, index, side="right")) - 1
        return f"{self.places[row]}, position {index - int(self.topk.bounds[row])}"

    def at_tokens(self, kept: NDArray[np.bool_]) -> Documents:
        """Return the documents at some tokens, bool `[N]`: the others are padding.

        What was predicted from padding alone is of a first token, and so nothing.
        """
        if kept.all():
            return self
        rows, topk, mask = np.flatnonzero(kept), self.topk, self.loss_mask
        bounds, before = offsets_of(kept)[topk.bounds], topk.bounds[:-1]
        firsts = firsts_of(bounds)
        places = np.where(np.isin(rows, before) | ~np.isin(np.arange(len(rows)), firsts), rows, -1)
        cut = chosen_rows(topk, places, topk.token_ids[rows], bounds)
        return self._replace(topk=cut, loss_mask=None if mask is None else mask[rows])

    def values(self, name: str) -> list[Any]:
        """Return a column, None for each row if there is none."""
        if name not in self.columns:
            return [None] * len(self.places)
        return python_values(self.columns[name], self.places)


def cache_error(place: object, problem: str, hint: str) -> XtokError:
    """Return an error of a cache."""
    return XtokError(f"{place}: {problem}", hint=hint)
