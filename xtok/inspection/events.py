"""Event maps, as `inspect`, `explain` and `evaluate` see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from xtok.counting.counts import require_starts
from xtok.counting.measures import entropy_of, share_of
from xtok.counting.texts import find_texts
from xtok.errors import MapFileError, XtokError
from xtok.inspection import Check
from xtok.inspection.inspect import SideDescription, describe_side
from xtok.inspection.seen_text import read_text
from xtok.inspection.verify import Verification, digest_check, token_check, width_check
from xtok.maps.event_map import EventMap
from xtok.maps.pair import require_same_tokens
from xtok.progress import TextProgress, silent_texts
from xtok.stages.events import common_ids
from xtok.tokenizers import ModelLike, as_tokenizer
from xtok.vocab.classes import TokenClass, token_classes
from xtok.vocab.table import Vocabulary


@dataclass(frozen=True, kw_only=True)
class LargeEvent:
    """An event with many tokens, or much mass.

    Attributes:
        event: its id.
        num_student: how many student tokens it has.
        num_teacher: how many teacher tokens.
        examples: the first few student tokens, then teacher tokens, escaped.
    """

    event: int
    num_student: int
    num_teacher: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EventsDescription:
    """What `inspect` says of an event map.

    Attributes:
        student: the student's side.
        teacher: the teacher's.
        num_events: how many events there are.
        one_to_one: events of one token on each side.
        one_student: events of one student token and several teacher tokens.
        one_teacher: events of one teacher token and several student tokens.
        several: events of several tokens on both sides, without the rest.
        rest: student and teacher tokens that no link leads to.
        measures: of the shared vocabulary, the bytes alone, and the result, on the counted text.
        heaviest: the events with the most mass on the counted text; none without one.
        largest: the events with the most tokens.
        history: one object per stage.
    """

    student: SideDescription
    teacher: SideDescription
    num_events: int
    one_to_one: int
    one_student: int
    one_teacher: int
    several: int
    rest: tuple[int, int]
    measures: tuple[Mapping[str, Any], ...]
    heaviest: tuple[LargeEvent, ...]
    largest: tuple[LargeEvent, ...]
    history: tuple[Mapping[str, Any], ...]


def describe_events(events: EventMap, *, num_examples: int = 5) -> EventsDescription:
    """Describe an event map; it carries all that this needs."""
    ours, theirs = (
        np.bincount(side, minlength=events.num_events)
        for side in (events.student_event, events.teacher_event)
    )
    is_rest = np.arange(events.num_events) == (-1 if events.rest is None else events.rest)
    measures = tuple(events.history[0].get("measures", ())) if events.history else ()
    largest = np.argsort(-np.where(is_rest, 0, ours + theirs), kind="stable")[:num_examples]
    heaviest = np.flatnonzero(~is_rest)[: num_examples if measures else 0]
    several = (ours > 1) & (theirs > 1) & ~is_rest
    return EventsDescription(
        student=describe_side(events.student),
        teacher=describe_side(events.teacher),
        num_events=events.num_events,
        one_to_one=int(((ours == 1) & (theirs == 1)).sum()),
        one_student=int(((ours == 1) & (theirs > 1) & ~is_rest).sum()),
        one_teacher=int(((ours > 1) & (theirs == 1) & ~is_rest).sum()),
        several=int(several.sum()),
        rest=(int((events.student_link < 0).sum()), int((events.teacher_link < 0).sum())),
        measures=measures,
        heaviest=tuple(_large(events, e) for e in heaviest.tolist()),
        largest=tuple(_large(events, e) for e in largest.tolist()),
        history=events.history,
    )


def _large(events: EventMap, event: int, num_tokens: int = 4) -> LargeEvent:
    members = [
        np.flatnonzero(side == event) for side in (events.student_event, events.teacher_event)
    ]
    tables = (events.student.table, events.teacher.table)
    examples = [
        table.shown(i)
        for ids, table in zip(members, tables, strict=True)
        for i in ids[:num_tokens].tolist()
        if table is not None
    ]
    return LargeEvent(
        event=event,
        num_student=len(members[0]),
        num_teacher=len(members[1]),
        examples=tuple(dict.fromkeys(examples)),
    )


@dataclass(frozen=True, kw_only=True)
class EventMember:
    """A token of an event, and why it is there."""

    side: str
    token_id: int
    token: str
    why: str


@dataclass(frozen=True, kw_only=True)
class EventExplanation:
    """The event of a token.

    Attributes:
        event: its id; events are numbered by falling mass on the counted text.
        is_rest: whether it is the event of the tokens that nothing is linked to.
        num_student: how many student tokens it has.
        num_teacher: how many teacher tokens.
        members: the token asked for, then some of the other side's, then of its own side's.
        by_text: into how many events these tokens would fall by their bytes alone.
    """

    event: int
    is_rest: bool
    num_student: int
    num_teacher: int
    members: tuple[EventMember, ...]
    by_text: int


def explain_event(
    events: EventMap, token_id: int, *, side: str = "student", num_members: int = 20
) -> EventExplanation:
    """Say which tokens share a token's event, and why.

    Raises:
        XtokError: if the side has no such id.
    """
    width = events.shape[side == "teacher"]
    if not 0 <= token_id < width:
        raise XtokError(
            f"there is no {side} id {token_id}: the {side} has ids 0 to {width - 1}",
            hint="give another id, or the token itself",
        )
    event = int((events.student_event if side == "student" else events.teacher_event)[token_id])
    ids = {
        "student": np.flatnonzero(events.student_event == event).tolist(),
        "teacher": np.flatnonzero(events.teacher_event == event).tolist(),
    }
    other = "teacher" if side == "student" else "student"
    theirs = [(other, i) for i in ids[other][: num_members // 2]]
    listed = [(side, token_id), *theirs]
    listed += [(side, i) for i in ids[side] if i != token_id]
    return EventExplanation(
        event=event,
        is_rest=event == events.rest,
        num_student=len(ids["student"]),
        num_teacher=len(ids["teacher"]),
        members=tuple(_member(events, s, i) for s, i in listed[:num_members]),
        by_text=_parts(events, ids),
    )


def explain_events(events: EventMap, tokens: Sequence[str | int]) -> list[EventExplanation]:
    """Explain the events of tokens.

    Args:
        events: an event map.
        tokens: student ids, or tokens as `map[token]` takes them: the student's, or the teacher's
            where the student has none.

    Raises:
        XtokError: if neither side has a token, or the student no such id.
    """
    explained = []
    for token in tokens:
        if isinstance(token, int):
            explained.append(explain_event(events, token))
            continue
        for side in ("student", "teacher"):
            ids = getattr(events, side).table.ids_of(token)
            if ids:
                explained += [explain_event(events, i, side=side) for i in ids]
                break
        else:
            raise XtokError(
                f"neither side has a token {token!r}",
                hint="a space is part of a token, as in ' the'; bytes are written like '\\xe4'",
            )
    return explained


def verify_events(
    path: str | PathLike[str],
    *,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
) -> Verification:
    """Check an event map's file: format, digests, events, links; and that it is of these models."""
    name = fspath(path)
    try:
        events = EventMap.load(path)
    except MapFileError as error:
        return Verification(path=name, checks=(Check("format", "failed", error.message),))
    rows, columns = events.shape
    says = f"{rows:,} and {columns:,} tokens in {events.num_events:,} events"
    checks = [Check("format", "ok", says)]
    checks.append(Check("events", "ok", "each has tokens of both sides, and those of its links"))
    checks += [
        digest_check(f"{side} tokens", getattr(events, side), ()) for side in ("student", "teacher")
    ]
    for side, model in (("student", student_model), ("teacher", teacher_model)):
        if model is not None:
            tokenizer = as_tokenizer(model)
            vocabulary: Vocabulary = getattr(events, side)
            checks.append(token_check(f"{side} model", vocabulary.table, tokenizer))
            checks.append(width_check(f"{side} width", vocabulary, tokenizer.vocabulary))
    return Verification(path=name, checks=tuple(checks))


def _member(events: EventMap, side: str, token_id: int) -> EventMember:
    other = "teacher" if side == "student" else "student"
    ours, theirs = getattr(events, side).table, getattr(events, other).table
    link = int(getattr(events, f"{side}_link")[token_id])
    if link < 0:
        why = "nothing on the other side goes with it"
    elif not ours[token_id]:
        why = f"same role as the {other}'s {theirs.shown(link)}"
    elif ours[token_id] == theirs[link]:
        why = f"equal bytes: the {other}'s {theirs.shown(link)}"
    else:
        why = f"the {other} spells it with {theirs.shown(link)} first"
    return EventMember(side=side, token_id=token_id, token=ours.name(token_id), why=why)


def _parts(events: EventMap, ids: Mapping[str, Sequence[int]]) -> int:
    """Count the components that links alone make of an event's tokens."""
    nodes = {(side, i) for side, members in ids.items() for i in members}
    neighbors: dict[tuple[str, int], list[tuple[str, int]]] = {node: [] for node in nodes}
    for side, i in nodes:
        link = int(getattr(events, f"{side}_link")[i])
        if link >= 0:
            other = ("teacher" if side == "student" else "student", link)
            neighbors[side, i].append(other)
            neighbors[other].append((side, i))
    parts = 0
    while nodes:
        parts += 1
        stack = [nodes.pop()]
        while stack:
            for node in neighbors[stack.pop()]:
                if node in nodes:
                    nodes.remove(node)
                    stack.append(node)
    return parts


@dataclass(frozen=True, kw_only=True)
class EventMeasuresOf:
    """How an event map does on one group of text.

    Attributes:
        name: of the event map.
        group: of text, as in `MapMeasures`.
        documents: in the group.
        starts: shared token boundaries.
        leak: how often the two tokens at one are in different events.
        shared_leak: the same for a strict shared vocabulary and a rest.
        student_bits: the entropy of the student's events, in bits.
        teacher_bits: of the teacher's.
        student_token_bits: the entropy of the student's tokens at shared boundaries.
        teacher_token_bits: of the teacher's.
        kept: the smaller entropy of events, as a share of the smaller one of tokens.
    """

    name: str
    group: str
    documents: int
    starts: int
    leak: float
    shared_leak: float
    student_bits: float
    teacher_bits: float
    student_token_bits: float
    teacher_token_bits: float
    kept: float


@dataclass(frozen=True, kw_only=True)
class EventClassMeasures:
    """How often student tokens of one class leak, over all text."""

    name: str
    token_class: str
    starts: int
    leak: float
    shared_leak: float


@dataclass(frozen=True, kw_only=True)
class EventLeak:
    """A pair of tokens in different events that occurs often: its share of all boundaries."""

    name: str
    student_token: str
    teacher_token: str
    share: float


@dataclass(frozen=True, kw_only=True)
class EventsEvaluation:
    """What `evaluate` measured of event maps; groups as in `Evaluation`."""

    student: str
    teacher: str
    measures: tuple[EventMeasuresOf, ...]
    classes: tuple[EventClassMeasures, ...]
    worst: tuple[EventLeak, ...]
    num_bytes: int
    lost_bytes: int
    differing: int

    def leaking(self, max_leak: float) -> list[str]:
        """Say in a line each which event maps leak more than this on any group of text."""
        return [
            f"{m.name} on {m.group}: leak {m.leak:.4f} is above {max_leak:g}"
            for m in self.measures
            if m.leak > max_leak
        ]


def evaluate_events(
    maps: Sequence[EventMap],
    texts: str | Path | Sequence[str | Path],
    student_model: ModelLike,
    teacher_model: ModelLike,
    *,
    names: Sequence[str],
    field: str = "text",
    group_by: str | None = None,
    num_worst: int = 5,
    text_progress: TextProgress = silent_texts,
) -> EventsEvaluation:
    """Measure event maps of one pair on text: their leak and their bits.

    Args:
        maps: at least one.
        texts: paths and globs of text, as `estimate` takes them.
        student_model: the model of the student, as `build` takes it.
        teacher_model: the teacher's.
        names: what to call the maps.
        field: as in `evaluate`.
        group_by: likewise.
        num_worst: how many of the pairs that leak most to list for each map.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read or nothing in it measured, or a map is of another pair.
    """
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    for name, events in zip(names, maps, strict=True):
        for side, ours, tokenizer in (
            ("student", events.student, student),
            ("teacher", events.teacher, teacher),
        ):
            model_id = tokenizer.vocabulary.model_id
            require_same_tokens(side, ours.table, tokenizer.table, what=name, other=model_id)
    seen = read_text(
        [], maps[0].shape, find_texts(texts), student, teacher, field, group_by,
        text_progress,
    )  # fmt: skip
    require_starts(len(seen.keys), len(seen.groups), seen.num_bytes, "measured")
    s, t = seen.keys >> 32, seen.keys & 0xFFFFFFFF
    shared = common_ids(student.table, teacher.table)
    is_shared_leak = shared[0][s] != shared[1][t]
    classes = token_classes(student.table)[s]
    totals = np.bincount(seen.places, seen.counts, len(seen.keys)).astype(np.float64)
    measures, by_class, worst = [], [], []
    groups = list(dict.fromkeys(seen.groups))
    for group in [*groups, "all"] if len(groups) > 1 else groups:
        chosen = np.array([group in (g, "all") for g in seen.groups], np.bool_)
        use = chosen[seen.documents]
        counts = np.bincount(seen.places[use], seen.counts[use], len(seen.keys)).astype(np.float64)
        for name, events in zip(names, maps, strict=True):
            a, b = events.student_event[s], events.teacher_event[t]
            bits = [entropy_of(ids, counts) for ids in (a, b, s, t)]
            measures.append(
                EventMeasuresOf(
                    name=name,
                    group=group,
                    documents=int(chosen.sum()),
                    starts=int(counts.sum()),
                    leak=share_of(counts, a != b),
                    shared_leak=share_of(counts, is_shared_leak),
                    student_bits=bits[0],
                    teacher_bits=bits[1],
                    student_token_bits=bits[2],
                    teacher_token_bits=bits[3],
                    kept=min(bits[:2]) / min(bits[2:]) if min(bits[2:]) > 0 else 1.0,
                )
            )
    for name, events in zip(names, maps, strict=True):
        leaks = events.student_event[s] != events.teacher_event[t]
        for token_class in TokenClass:
            of_class = classes == token_class
            if of_class.any():
                counts = totals * of_class
                by_class.append(
                    EventClassMeasures(
                        name=name,
                        token_class=token_class.label,
                        starts=int(counts.sum()),
                        leak=share_of(counts, leaks),
                        shared_leak=share_of(counts, is_shared_leak),
                    )
                )
        order = np.argsort(-totals * leaks, kind="stable")[:num_worst]
        worst += [
            EventLeak(
                name=name,
                student_token=student.table.shown(int(s[place])),
                teacher_token=teacher.table.shown(int(t[place])),
                share=float(totals[place] / totals.sum()),
            )
            for place in order.tolist()
            if leaks[place]
        ]
    return EventsEvaluation(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        measures=tuple(measures),
        classes=tuple(by_class),
        worst=tuple(worst),
        num_bytes=seen.num_bytes,
        lost_bytes=seen.lost_bytes,
        differing=seen.differing,
    )
