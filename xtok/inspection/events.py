"""Describe event maps and spelling maps, and explain single tokens in a map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtok.inspection.describe import MapDescription, count_by_size, describe_sides, evenly_spread
from xtok.inspection.pair_facts import SpellingFacts
from xtok.maps.events import EventMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import require_table
from xtok.tokenizers.table import SIDES

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event: the numbers of student tokens and teacher tokens, and the first tokens."""

    number: int
    is_rest: bool  # whether this is the event of all tokens without a link
    student_count: int
    student: tuple[str, ...]
    teacher_count: int
    teacher: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EventOfToken:
    """A student token, its linked teacher token (if any), and its event."""

    student_id: int
    token: str
    link_id: int | None
    link: str | None
    event: Event


@dataclass(frozen=True, kw_only=True)
class EventDescription(MapDescription):
    """Overview of an event map."""

    num_events: int
    one_to_one: int  # number of events with one token on each side
    rest: Event | None
    largest: tuple[Event, ...]  # largest events, without the rest


def describe_events(m: EventMap, *, num_examples: int = 5) -> EventDescription:
    """Describe an event map: its sides, the number of events, and the largest events."""
    sizes = np.stack([np.bincount(getattr(m, f"{side}_event")) for side in SIDES])
    total = sizes.sum(axis=0)
    if m.rest is not None:
        total[m.rest] = 0
    largest = np.argsort(-total, kind="stable")[:num_examples].tolist()
    return EventDescription(
        **describe_sides(m),
        num_events=m.num_events,
        one_to_one=int((sizes == 1).all(axis=0).sum()),
        rest=None if m.rest is None else _event(m, m.rest),
        largest=tuple(_event(m, event) for event in largest if total[event]),
    )


def token_event(m: EventMap, student_id: int) -> EventOfToken:
    """Return a student token's event, with the other tokens in this event."""
    link = int(m.student_link[student_id])
    return EventOfToken(
        student_id=student_id,
        token=require_table(m.student).name(student_id),
        link_id=link if link >= 0 else None,
        link=require_table(m.teacher).name(link) if link >= 0 else None,
        event=_event(m, int(m.student_event[student_id])),
    )


def _event(m: EventMap, number: int) -> Event:
    fields: dict[str, Any] = {}
    for side in SIDES:
        table = require_table(getattr(m, side))
        ids = np.flatnonzero(getattr(m, f"{side}_event") == number)
        fields[f"{side}_count"] = len(ids)
        fields[side] = tuple(map(table.name, ids[:_SHOWN].tolist()))
    return Event(number=number, is_rest=number == m.rest, **fields)


# Spelling maps


@dataclass(frozen=True, kw_only=True)
class SpelledToken:
    """A token and its spelling, as escaped bytes or names of control tokens."""

    side: str
    token_id: int
    token: str
    pieces: tuple[str, ...]
    left_out: str = ""  # reason for missing pieces


@dataclass(frozen=True, kw_only=True)
class SpellingDescription(MapDescription):
    """Overview of a spelling map."""

    spelled: Mapping[str, SpellingFacts]  # number of tokens by side
    pieces: Mapping[str, Mapping[int, int]]  # number of tokens by side and number of pieces
    examples: tuple[SpelledToken, ...]


def describe_spellings(m: SpellingMap, *, num_examples: int = 0) -> SpellingDescription:
    """Count the shared, spelled and omitted tokens of a spelling map.

    `num_examples` is the number of examples for each side: tokens with several pieces.
    """
    examples: list[SpelledToken] = []
    for side in SIDES:
        ids = evenly_spread(np.flatnonzero(getattr(m, f"{side}_counts") > 1), num_examples)
        examples += [spelled_token(m, side, i) for i in ids]
    return SpellingDescription(
        **describe_sides(m),
        spelled={side: SpellingFacts.of(m, side) for side in SIDES},
        pieces={side: count_by_size(getattr(m, f"{side}_counts")) for side in SIDES},
        examples=tuple(examples),
    )


def spelled_token(m: SpellingMap, side: str, token_id: int) -> SpelledToken:
    """Return a token of one side with its spelling in the tokens of the other side."""
    table, other_table = m.tables if side == "student" else m.tables[::-1]
    pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
    end = int(counts[: token_id + 1].sum(dtype=np.int64))
    spelling = pieces[end - counts[token_id] : end].tolist()
    reasons = m.left_out(side) if not spelling else {}
    return SpelledToken(
        side=side,
        token_id=token_id,
        token=table.name(token_id),
        pieces=tuple(map(other_table.name, spelling)),
        left_out=next((reason for reason, ids in reasons.items() if token_id in ids), ""),
    )
