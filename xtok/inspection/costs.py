"""Divide the loss of a map on text among classes of student tokens, and among rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.building.counting.pair_text import PerDocument
from xtok.maps.edges import ranks
from xtok.tokenizers.classes import TokenClass, token_classes
from xtok.tokenizers.pairs import Pair

NUM_WORST = 5
"""Number of worst rows per map."""


@dataclass(frozen=True, kw_only=True)
class ClassMeasures:
    """A map's results for one class of student tokens, on all text."""

    name: str  # name of the map
    token_class: str  # the name of a `TokenClass`, in lower case
    starts: int
    loss: float  # cross-entropy at starts or over chunks; for event maps, the leak
    reference: float  # loss of the floor; for event maps, the leak of shared tokens and a rest
    coverage: float  # coverage at starts


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """A row with a large avoidable loss, and the teacher tokens that the text requires."""

    name: str  # name of the map
    student_id: int
    token: str  # escaped
    starts: int  # number of occurrences at shared boundaries
    excess: float  # the row's part of the cross-entropy above the floor, or of the leak
    # Most frequent teacher tokens at the boundaries (or in the chunks), with their share and the
    # map's weight. In event maps, the weight is 1 if both tokens are in one event.
    wanted: tuple[tuple[str, float, float], ...]


_Values: TypeAlias = NDArray[np.float64] | NDArray[np.bool_]


class Occurrences:
    """The occurrences of student tokens in a text, at shared boundaries or in chunks.

    The loss of a chunk is divided equally among the student tokens in the chunk.
    """

    def __init__(self, pair: Pair, text: PerDocument, *, by_chunk: bool) -> None:
        self._student, self._teacher = pair.tables
        self.by_chunk, self.shape = by_chunk, pair.shape
        # student token and count of each pair at boundaries
        self._starts = text.keys >> 32, text.amounts(np.ones(len(text.groups), np.bool_))
        # for each occurrence: student token, count, and index of its loss
        self._rows, self._amounts = self._starts
        self._owner = np.arange(len(self._rows))
        # pairs of tokens in the text, and their counts
        self.keys, self._counts = text.keys, self._amounts
        if by_chunk:
            chunks = text.chunks
            self._owner = np.repeat(np.arange(len(chunks.widths)), chunks.widths)
            indices = chunks.bounds[:-1][self._owner] + ranks(self._owner)
            self._rows = chunks.ids[indices].astype(np.int64)
            self._amounts = (chunks.counts / chunks.widths)[self._owner]
            self.keys, counts = chunks.pairs()
            self._counts = counts.astype(np.float64)

    def classes(
        self, name: str, losses: _Values, reference: _Values, is_covered: NDArray[np.bool_]
    ) -> list[ClassMeasures]:
        """Measure a map for each class of student tokens.

        `losses` and `reference` contain one value for each pair at boundaries, or for each chunk.
        `is_covered`, bool `[pairs]`, is True if the map contains a pair.
        """
        token_kinds = token_classes(self._student)

        def count(rows: NDArray[np.int64], values: _Values) -> NDArray[np.float64]:
            return np.bincount(token_kinds[rows], values, len(TokenClass)).astype(np.float64)

        rows, counts = self._starts
        starts, covered = count(rows, counts), count(rows, counts * is_covered)
        amounts = np.maximum(count(self._rows, self._amounts), 1e-9)
        loss, mean_reference = (
            count(self._rows, self._amounts * values[self._owner]) / amounts
            for values in (losses, reference)
        )
        return [
            ClassMeasures(
                name=name,
                token_class=kind.name.lower(),
                starts=int(starts[kind]),
                loss=float(loss[kind]),
                reference=float(mean_reference[kind]),
                coverage=float(covered[kind] / starts[kind]),
            )
            for kind in TokenClass
            if starts[kind]
        ]

    def worst(self, name: str, avoidable: _Values, weights: _Values) -> list[WorstRow]:
        """Return the rows with the largest avoidable losses.

        `avoidable` contains one value for each pair at boundaries, or for each chunk. `weights`
        contains the map's weight for each pair in the text.
        """
        share = self._amounts / max(1.0, self._amounts.sum())
        excess = np.bincount(self._rows, share * avoidable[self._owner])
        starts = np.bincount(*self._starts, len(self._student))
        rows = np.argsort(-excess, kind="stable")[:NUM_WORST].tolist()
        return [
            WorstRow(
                name=name,
                student_id=row,
                token=self._student.name(row),
                starts=int(starts[row]),
                excess=float(excess[row]),
                wanted=tuple(self._frequent_tokens(row, weights)),
            )
            for row in rows
            if excess[row] > 0
        ]

    def _frequent_tokens(self, row: int, weights: _Values) -> Iterator[tuple[str, float, float]]:
        entries = np.flatnonzero(self.keys >> 32 == row)
        total = self._counts[entries].sum()
        for entry in entries[np.argsort(-self._counts[entries], kind="stable")][:3]:
            token = self._teacher.name(int(self.keys[entry] & 0xFFFFFFFF))
            yield token, float(self._counts[entry] / total), float(weights[entry])
