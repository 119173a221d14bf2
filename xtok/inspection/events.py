"""Overview of an event map, and the event of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtok.inspection.describe import SideDescription, describe_side
from xtok.maps.events import EventMap
from xtok.tokenizers.pairs import require_table
from xtok.tokenizers.sides import SIDES

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event: the number of tokens of each side, and the first tokens, escaped."""

    number: int
    is_rest: bool  # event of all tokens without a link
    student_count: int
    student: tuple[str, ...]
    teacher_count: int
    teacher: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EventOfToken:
    """A student token, the teacher token that links it to its event, and the event."""

    student_id: int
    token: str
    link_id: int | None
    link: str | None
    event: Event


@dataclass(frozen=True, kw_only=True)
class EventDescription:
    """Overview of an event map."""

    student: SideDescription
    teacher: SideDescription
    history: Sequence[Mapping[str, Any]]
    num_events: int
    one_to_one: int  # events with one token of each side
    rest: Event | None
    largest: tuple[Event, ...]  # without the rest


def describe_events(m: EventMap, *, num_examples: int = 5) -> EventDescription:
    """Describe an event map: its sides, number of events, and largest events."""
    sizes = np.stack([np.bincount(getattr(m, f"{side}_event")) for side in SIDES])
    total = sizes.sum(axis=0)
    if m.rest is not None:
        total[m.rest] = 0
    largest = np.argsort(-total, kind="stable")[:num_examples].tolist()
    return EventDescription(
        student=describe_side(m.student),
        teacher=describe_side(m.teacher),
        history=m.history,
        num_events=m.num_events,
        one_to_one=int((sizes == 1).all(axis=0).sum()),
        rest=None if m.rest is None else _event(m, m.rest),
        largest=tuple(_event(m, number) for number in largest if total[number]),
    )


def event_of_token(m: EventMap, student_id: int) -> EventOfToken:
    """Return the event of a student token, with the tokens that share it."""
    link = int(m.student_link[student_id])
    return EventOfToken(
        student_id=student_id,
        token=require_table(m.student).name(student_id),
        link_id=link if link >= 0 else None,
        link=require_table(m.teacher).name(link) if link >= 0 else None,
        event=_event(m, int(m.student_event[student_id])),
    )


def _event(m: EventMap, number: int) -> Event:
    of_sides: dict[str, Any] = {}
    for side in SIDES:
        table = require_table(getattr(m, side))
        ids = np.flatnonzero(getattr(m, f"{side}_event") == number)
        of_sides[f"{side}_count"] = len(ids)
        of_sides[side] = tuple(map(table.name, ids[:_SHOWN].tolist()))
    return Event(number=number, is_rest=number == m.rest, **of_sides)
