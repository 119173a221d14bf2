"""Read and write the neutral Parquet format, where row i predicts token i.

Row 0 is empty, because the first token of a document has no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xtok._lib.opening import need
from xtok.predictions.topk import TopK
from xtok.teachers.formats.columns import CacheColumns, list_array
from xtok.teachers.formats.documents import Documents

FORMAT_VERSION = 1
"""Version of the format. A footer without a version is also accepted."""

COLUMNS = ("input_ids", "topk_ids", "topk_logprobs")
"""Columns that identify the format."""


def read(batch: Any, locations: Sequence[object] = ()) -> Documents:
    """Return the documents of a record batch, without validation."""
    columns = CacheColumns(batch, locations)
    rows, starts, ids, logprobs = columns.candidates("topk_ids", "topk_logprobs")
    columns.check_lengths([columns.bounds], [rows], ("tokens", "topk_ids"))
    unknown = np.full(len(columns.token_ids), np.nan, np.float32)
    stored = [columns.per_token(name, np.float32) for name in ("rest_logprob", "realized_logprob")]
    rest, realized = (unknown if values is None else values for values in stored)
    topk = TopK(columns.token_ids, columns.bounds, starts, ids, logprobs, rest, realized)
    return columns.documents(topk)


def table(documents: Documents) -> Any:
    """Return documents as a pyarrow table, with null for unknown values."""
    topk = documents.topk
    bounds, starts = topk.bounds, topk.starts
    columns = {
        "input_ids": list_array(bounds, topk.token_ids),
        "topk_ids": list_array(bounds, list_array(starts, topk.ids)),
        "topk_logprobs": list_array(bounds, list_array(starts, topk.logprobs)),
        "rest_logprob": list_array(bounds, topk.rest_logprob),
        "realized_logprob": list_array(bounds, topk.realized_logprob),
    }
    if documents.loss_mask is not None:
        columns["loss_mask"] = list_array(bounds, documents.loss_mask)
    return need("pyarrow", Path("a cache")).table({**documents.columns, **columns})
