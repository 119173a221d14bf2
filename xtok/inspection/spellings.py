"""Overview of a spelling map, and the spelling of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtok.inspection.describe import SideDescription, count_by_size, describe_side, evenly_spread
from xtok.inspection.pair_facts import SpellingFacts
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.sides import SIDES


@dataclass(frozen=True, kw_only=True)
class SpelledToken:
    """A token and its spelling; both are escaped, or names of control tokens."""

    side: str
    token_id: int
    token: str
    pieces: tuple[str, ...]
    left_out: str = ""  # reason for no pieces


@dataclass(frozen=True, kw_only=True)
class SpellingDescription:
    """Overview of a spelling map."""

    student: SideDescription
    teacher: SideDescription
    history: Sequence[Mapping[str, Any]]
    spelled: Mapping[str, SpellingFacts]  # by side
    pieces: Mapping[str, Mapping[int, int]]  # number of tokens by side and number of pieces
    examples: tuple[SpelledToken, ...]


def describe_spellings(m: SpellingMap, *, num_examples: int = 0) -> SpellingDescription:
    """Describe a spelling map: shared, spelled and left-out tokens.

    Args:
        m: the map.
        num_examples: number of tokens with several pieces to show for each side.
    """
    examples: list[SpelledToken] = []
    for side in SIDES:
        ids = evenly_spread(np.flatnonzero(getattr(m, f"{side}_counts") > 1), num_examples)
        examples += [spelled_token(m, side, i) for i in ids]
    return SpellingDescription(
        student=describe_side(m.student),
        teacher=describe_side(m.teacher),
        history=m.history,
        spelled={side: SpellingFacts.of(m, side) for side in SIDES},
        pieces={side: count_by_size(getattr(m, f"{side}_counts")) for side in SIDES},
        examples=tuple(examples),
    )


def spelled_token(m: SpellingMap, side: str, token_id: int) -> SpelledToken:
    """Return the spelling of a side's token in the other side's tokens."""
    table, others = m.tables if side == "student" else m.tables[::-1]
    pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
    end = int(counts[: token_id + 1].sum(dtype=np.int64))
    spelling = pieces[end - counts[token_id] : end].tolist()
    reasons = m.left_out(side) if not spelling else {}
    return SpelledToken(
        side=side,
        token_id=token_id,
        token=table.name(token_id),
        pieces=tuple(map(others.name, spelling)),
        left_out=next((why for why, ids in reasons.items() if token_id in ids), ""),
    )
