"""A teacher's predictions over its own tokens, as predictions over a student's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer
from xtok.vocab.table import TokenTable


class TopK(NamedTuple):
    """Predictions for documents that are laid one after another; row i is of token i.

    Row i is what is predicted for token i from the tokens before it. Log-probabilities are natural,
    and true ones: not normalized over the candidates.
    """

    token_ids: NDArray[np.int32]  # [N], the documents' tokens
    bounds: NDArray[np.int64]  # [documents + 1]; document d is token_ids[bounds[d]:bounds[d + 1]]
    # [N + 1]; candidates of row i are ids[starts[i]:starts[i + 1]], none where nothing is predicted
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]  # [nnz], the best first in a row, ties by the lower id; none twice
    logprobs: NDArray[np.float32]  # [nnz]
    rest_logprob: NDArray[np.float32]  # [N], log(1 - sum of the candidates), −inf for none; NaN
    # where it is not known: the source renormalized the candidates, or there is no prediction
    realized_logprob: NDArray[np.float32]  # [N], of token_ids[i]; NaN where not known

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which rows have a prediction, bool `[N]`."""
        return np.diff(self.starts) > 0


class Projector:
    """Turns predictions of a teacher into predictions of a student, for a pair and a map.

    Args:
        student: its tokenizer, which spells what teacher tokens begin with.
        teacher: its tokens.
        back_map: from the teacher (rows) to the student (columns), such as
            `xtok.build(teacher, student, loss="p-kl", target="start")` makes; without scale slots.
        num_threads: one per available core if None. The result does not depend on it.

    Raises:
        ValueError: if the map is not of these two widths, or has scale slots.
    """

    def __init__(
        self,
        student: Tokenizer,
        teacher: TokenTable,
        back_map: ProjectionMap,
        num_threads: int | None = None,
    ) -> None:
        raise NotImplementedError

    def project(
        self,
        teacher: TopK,
        student_ids: NDArray[np.int32],
        student_bounds: NDArray[np.int64],
        top_k: int,
    ) -> TopK:
        """Project predictions onto the student's tokens of the same documents.

        A row is valid where the student's token begins at a byte that both sides spell alike, and
        the teacher's token at that byte has a prediction. `realized_logprob` is exact where one
        student token is what one or more teacher tokens spell together: the sum of theirs; else it
        is the row's own, before the cut to `top_k`, NaN if the token has no part of it.

        Args:
            teacher: its predictions; not checked.
            student_ids: int32 `[tokens]`, the student's tokens of these documents.
            student_bounds: int64 `[documents + 1]`.
            top_k: the most candidates of a row; what is cut away is part of the rest.

        Raises:
            ValueError: for ids that a vocabulary does not have, and other numbers of documents.
        """
        raise NotImplementedError
