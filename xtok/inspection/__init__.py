"""Looking at maps and tokenizers: what a map holds, whether it is right, how good it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from xtok.vocab.pair import Pair

if TYPE_CHECKING:
    from xtok.maps.events import EventMap
    from xtok.maps.projection_map import ProjectionMap
    from xtok.tokenizers import ModelLike, PairLike

Level = Literal["ok", "note", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and what was found.

    Only `failed` makes a command exit with 3. `skipped` are checks that a map file has nothing for.
    """

    name: str
    level: Level
    message: str


def distinct(names: Sequence[str]) -> list[str]:
    """Number the repeated names: a, a (2)."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name} ({n})" if n > 1 else name for n in count(1))
        found.append(next(one for one in numbered if one not in found))
    return found


def pair_of_map(
    projection: ProjectionMap | EventMap,
    student_model: PairLike | None = None,
    teacher_model: ModelLike | None = None,
) -> Pair:
    """Return the pair of a map, with the tokenizers of the models given; none imports nothing."""
    if student_model is None and teacher_model is None:
        return Pair.of(projection)
    if isinstance(student_model, Pair):
        return student_model.at_widths_of(projection)
    from xtok.tokenizers import pair

    return pair(student_model, teacher_model, of=projection)
