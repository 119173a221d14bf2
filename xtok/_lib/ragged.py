"""Sequences of different lengths: offsets into one flat array, and common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def offsets_of(sizes: Any) -> NDArray[np.int64]:
    """Return the start of each part and the end of the last part, from the parts' sizes.

    The offsets are int64, `[parts + 1]`.

    >>> offsets_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def num_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences.

    >>> num_common(b"reader", b"reading")
    4
    """
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))
