"""Common types of check results, and names in reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "failed", "skipped"]
Grade: TypeAlias = Literal["bad", "usable", "note", "good"]

GOOD_LEAK, MOST_LEAK = 0.02, 0.05
"""Maximum shares of wrong boundaries for the grades `good` and `usable`."""

Result: TypeAlias = tuple[Level, str]
"""Level and sentence of a comparison's result."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Only checks with the level `failed` make a command exit with code 3. `skipped` means that the
    map file does not contain the data for the check.
    """

    name: str
    level: Level
    message: str


def distinct_names(names: Sequence[str]) -> list[str]:
    """Make names distinct by appending numbers to repeated names: a, a (2)."""
    result: list[str] = []
    for name in names:
        numbered = (f"{name} ({n})" if n > 1 else name for n in count(1))
        result.append(next(text for text in numbered if text not in result))
    return result


def leak_grade(leak: float) -> Grade:
    """Grade an event map by its leak (see `EventMap`)."""
    return "good" if leak <= GOOD_LEAK else "usable" if leak <= MOST_LEAK else "bad"
