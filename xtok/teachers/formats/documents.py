"""Documents of a cache: predictions, other columns, and locations for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parquet import python_values
from xtok._lib.ragged import offsets_of
from xtok.errors import XtokError
from xtok.predictions.topk import TopK, take_rows

PER_TOKEN = (
    *("input_ids", "topk_ids", "topk_logprobs", "rest_logprob", "realized_logprob"),
    *("loss_mask", "labels", "attention_mask", "position_ids"),
)
"""Columns with one entry per token, which `project` never copies."""

PROJECTED = "xtok project"
"""Metadata value that marks predictions that `project` wrote."""

AGAIN_HINT = "create or download the cache again"


class Documents(NamedTuple):
    """A block of documents: predictions, and the documents' other columns."""

    topk: TopK
    columns: dict[str, Any]  # pyarrow arrays with one value per document
    locations: Sequence[object]  # file and row of each document, for error messages
    loss_mask: NDArray[np.bool_] | None = None  # [N], True for targets; None: all are targets

    @property
    def targets(self) -> NDArray[np.bool_]:
        """Mask of training targets. Without a loss mask, all tokens are targets."""
        mask = self.loss_mask
        return np.ones(len(self.topk.token_ids), np.bool_) if mask is None else mask

    def location(self, index: int) -> str:
        """Return the location of a token, for an error message."""
        return locate(index, self.locations, [self.topk.bounds])

    def at_tokens(self, is_token: NDArray[np.bool_]) -> Documents:
        """Keep only the tokens for which `is_token`, bool `[N]`, is True, and remove the others.

        If padding precedes the first remaining token of a document, the prediction of this token
        is removed.
        """
        if is_token.all():
            return self
        rows, topk, mask = np.flatnonzero(is_token), self.topk, self.loss_mask
        bounds, before = offsets_of(is_token)[topk.bounds], topk.bounds[:-1]
        is_first = np.isin(np.arange(len(rows)), bounds)
        source_rows = np.where(np.isin(rows, before) | ~is_first, rows, -1)
        cut = take_rows(topk, source_rows, topk.token_ids[rows], bounds)
        return self._replace(topk=cut, loss_mask=None if mask is None else mask[rows])

    def values(self, name: str) -> list[Any]:
        """Return a column as a list. If the column is missing, all values are None."""
        if name not in self.columns:
            return [None] * len(self.locations)
        return python_values(self.columns[name], self.locations)


def locate(index: int, locations: Sequence[object], bounds: Sequence[NDArray[np.int64]]) -> str:
    """Return the location of a value in a flat array: its document and its position.

    `bounds` contains the bounds of the documents, then the bounds of the lists in each document.
    """
    document, *inner = bounds
    for level in reversed(inner):
        index = int(np.searchsorted(level, index, side="right")) - 1
    row = int(np.searchsorted(document, index, side="right")) - 1
    return f"{locations[row]}, position {index - int(document[row])}"


def cache_error(location: object, problem: str, hint: str = AGAIN_HINT) -> XtokError:
    """Return an error that names a location in the cache."""
    return XtokError(f"{location}: {problem}", hint=hint)
