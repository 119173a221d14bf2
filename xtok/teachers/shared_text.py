"""A text in the tokens of both sides, whoever had it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Templates = tuple[str | Path | None, str | Path | None]
"""The student's and the teacher's, as `conversation.render` takes them."""


class SharedText(NamedTuple):
    """A text in the student's tokens and in the teacher's."""

    ids: NDArray[np.int32]  # [S], the student's
    plain: NDArray[np.int32]  # [P], the same with tokens that the teacher lacks as their text
    begins: NDArray[np.int64]  # [S + 1], where each token's part of `plain` begins
    teacher_ids: NDArray[np.int32]  # [T]
    spans: list[tuple[slice, slice]]  # of `plain` and of the teacher's ids, that spell the same
    mask: NDArray[np.bool_] | None = None  # [S], what the assistant wrote; None: no conversation
    alone: slice = slice(0, 0)  # of the teacher's ids: a system text that the student does not read

    @classmethod
    def of(
        cls,
        ids: Sequence[int] | NDArray[np.int32],
        teacher_ids: NDArray[np.int32],
        spans: list[tuple[slice, slice]] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Return a text whose tokens the teacher reads as they are; without spans, all of it."""
        own = np.asarray(ids, np.int32)
        whole = slice(0, len(own)), slice(0, len(teacher_ids))
        begins = np.arange(len(own) + 1)
        return cls(own, own, begins, teacher_ids, [whole] if spans is None else spans, mask)
