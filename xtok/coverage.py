"""What a map covers, by class of token: are the numerals pinned, which teacher tokens are lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.classes import NUMERALS, TokenClass, suited_loss, token_classes
from xtok.projection import ProjectionMap, RowKind
from xtok.tokens import TokenTable


@dataclass(frozen=True, kw_only=True)
class ClassCoverage:
    """What a map has for one class of tokens, on both sides.

    Attributes:
        token_class: the name of a `TokenClass`, in lower case.
        label: the class as a person reads it.
        rows: student tokens of the class.
        exact: rows that are pinned to equal bytes, or by role.
        empty: rows without an entry.
        mean_entries: entries per row that has any, slots left out.
        slot_share: the part of these rows' weight that is on slots.
        teacher_ids: teacher tokens of the class.
        teacher_unreached: those that no row leads to, but by a slot.
    """

    token_class: str
    label: str
    rows: int
    exact: int
    empty: int
    mean_entries: float
    slot_share: float
    teacher_ids: int
    teacher_unreached: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """A map's classes of tokens that either side has, and the loss that they speak for."""

    classes: tuple[ClassCoverage, ...]
    numerals: int
    numerals_exact: int
    loss: str
    why: str


def cover(projection: ProjectionMap) -> Coverage | None:
    """Measure a map by class of token; None if it carries no tokens."""
    rows, columns = projection.student.table, projection.teacher.table
    if rows is None or columns is None:
        return None
    ours, theirs = token_classes(rows), token_classes(columns)
    kind, slots = projection.row_kind, projection.is_slot
    exact = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])
    of_entry = ours[projection.student_ids]
    real = ~slots
    reached = np.zeros(len(columns), np.bool_)
    reached[projection.teacher_ids[real]] = True
    per_class = {
        "rows": _count(ours),
        "exact": _count(ours[exact]),
        "empty": _count(ours[kind == RowKind.EMPTY]),
        "entries": _count(of_entry[real]),
        "slots": np.bincount(of_entry[slots], projection.weights[slots], len(TokenClass)),
        "ids": _count(theirs),
        "unreached": _count(theirs[~reached]),
    }
    found = []
    for member in TokenClass:
        n = {name: counts[member].item() for name, counts in per_class.items()}
        filled = max(1, n["rows"] - n["empty"])
        if n["rows"] or n["ids"]:
            found.append(
                ClassCoverage(
                    token_class=member.name.lower(),
                    label=member.label,
                    rows=n["rows"],
                    exact=n["exact"],
                    empty=n["empty"],
                    mean_entries=n["entries"] / filled,
                    slot_share=n["slots"] / filled,
                    teacher_ids=n["ids"],
                    teacher_unreached=n["unreached"],
                )
            )
    numerals, pinned = (int(per_class[of][list(NUMERALS)].sum()) for of in ("rows", "exact"))
    loss, why = suited_loss(_exact_share(rows, kind), numerals, pinned)
    return Coverage(
        classes=tuple(found), numerals=numerals, numerals_exact=pinned, loss=loss, why=why
    )


def _count(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.bincount(classes, minlength=len(TokenClass))


def _exact_share(rows: TokenTable, kind: NDArray[np.uint8]) -> float:
    text = rows.text_ids
    return float(np.count_nonzero(kind[text] == RowKind.EXACT)) / max(1, len(text))
