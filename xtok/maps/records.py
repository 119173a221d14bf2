"""What is recorded of a map besides its arrays: kinds of rows, reports of stages, its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from xtok import __version__


class RowKind(IntEnum):
    """How a row of a map came about."""

    EMPTY = 0
    EXACT = 1
    PIECES = 2
    ROLE = 3
    SIMILAR = 4
    COUNTED = 5
    MIXED = 6
    RELAXED = 7


@dataclass(frozen=True)
class StageReport:
    """What a stage did: counts, and notes for a person."""

    stage: str
    counts: Mapping[str, float]  # what was counted, to how many
    notes: tuple[str, ...] = ()  # a sentence for each thing that was left out
    failures: tuple[str, ...] = ()  # a sentence on tokens that could not be decoded or spelled


Recipe: TypeAlias = Mapping[str, Any]
"""All that a map depends on but for its pair and the version of xtok, as JSON has it."""


class InvariantError(ValueError):
    """A map that breaks one of the `INVARIANTS` of its class, whose name is `invariant`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(invariant, message)  # both, so that other processes can raise it
        self.invariant, self.message = invariant, message

    def __str__(self) -> str:
        return self.message


def history_step(stage: str, options: Mapping[str, Any], **details: Any) -> dict[str, Any]:
    """Return the entry of a stage in the history: its name, its options, this version, and more."""
    return {"stage": stage, "options": options, **details, "xtok_version": __version__}
