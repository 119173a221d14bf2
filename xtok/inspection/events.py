"""Event maps, as `inspect`, `explain` and `evaluate` see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from xtok.counting.counts import require_starts
from xtok.counting.measures import entropy_of, share_of
from xtok.counting.texts import find_texts
from xtok.errors import MapFileError
from xtok.inspection import Check
from xtok.inspection.seen_text import read_text
from xtok.inspection.verify import Verification, digest_check, token_check, width_check
from xtok.maps.event_map import EventMap
from xtok.maps.pair import require_same_tokens
from xtok.progress import TextProgress, silent_texts
from xtok.stages.events import common_ids
from xtok.tokenizers import ModelLike, as_tokenizer
from xtok.vocab.classes import TokenClass, token_classes
from xtok.vocab.table import Vocabulary


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
        texts: paths and globs of text, as `build` takes them.
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
