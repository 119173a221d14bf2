"""Ragged arrays: parts of different sizes in one flat array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def offsets_of(sizes: Any) -> NDArray[np.int64]:
    """Return the offsets of parts of these sizes, int64 `[parts + 1]`.

    >>> offsets_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
