"""`EventMap` and its file: both vocabularies cut into events, to compare two softmaxes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from xtok import io
from xtok.errors import MapFileError
from xtok.maps import file as mapfile
from xtok.maps.nemo import require
from xtok.maps.pair import require_same_tokens
from xtok.maps.projection_map import ProjectionMap, StageReport
from xtok.vocab.table import Vocabulary

_ARRAYS = ("student_event", "teacher_event", "student_link", "teacher_link")
_HINT = "make the event map again with xtok events, or give another file"


@dataclass(frozen=True, kw_only=True, eq=False)
class EventMap:
    """Events of two vocabularies: each token is in one, and each event has tokens of both sides.

    Two distributions over next tokens become distributions over the same events, by sums within
    each event: mass is exact on both sides, and by the data processing inequality their divergence
    is at most the true one. Where both tokenizers begin a token at the same byte, the two tokens
    should be in one event; how often they are not is the *leak*.
    """

    student: Vocabulary
    teacher: Vocabulary
    # int32 `[V]`, the event of each token. Events are numbered by falling mass on the counted text,
    # those of equal mass by their lowest student id.
    student_event: NDArray[np.int32]
    teacher_event: NDArray[np.int32]
    # int32 `[V]`, the token of the other side that put a token where it is: the one of equal bytes
    # or role, else the first piece of its spelling; −1 for none.
    student_link: NDArray[np.int32]
    teacher_link: NDArray[np.int32]
    rest: int | None  # the event of unlinked tokens: special ones without a partner, unused ids
    history: tuple[Mapping[str, Any], ...] = ()  # one object per stage
    reports: tuple[StageReport, ...] = ()  # of the stages of this process; not saved

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        rows, columns = self.shape
        return f"EventMap({pair}, {rows} and {columns} tokens, {self.num_events} events)"

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    @property
    def num_events(self) -> int:
        """The number of events E; their ids are 0 to E − 1."""
        return int(self.student_event.max()) + 1

    def check(self) -> None:
        """Check what holds for every event map.

        Raises:
            ValueError: naming the first thing that does not hold.
        """
        for check, _ in INVARIANTS.values():
            check(self)

    def require(self, vocabularies: Mapping[str, Vocabulary], name: str = "the event map") -> None:
        """Raise an `XtokError` if a side, `student` or `teacher`, has other tokens than given."""
        for side, other in vocabularies.items():
            ours = getattr(self, side).table
            require_same_tokens(side, ours, other.table, what=name, other=other.model_id)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the events as `.safetensors`. The same events, the same bytes.

        Raises:
            OutputError: if the path has another suffix or cannot be written.
            ValueError: if the events are not whole.
        """
        target = check_output(path)
        self.check()
        io.write(target, [to_safetensors(self)])

    @staticmethod
    def load(path: str | PathLike[str]) -> EventMap:
        """Read an event map.

        Raises:
            MapFileError: if the file is not an event map, or is damaged.
        """
        parts = mapfile.read_parts(path)
        if parts is None or not mapfile.is_event_map(parts[0]):
            raise MapFileError(f"{path} is not an event map", hint="xtok events makes one")
        try:
            events, digests = assemble(*parts)
            for side, digest in digests.items():
                table = getattr(events, side).table
                require(table and table.sha256() == digest, f"the {side}'s table_sha256")
            events.check()
        except mapfile.MALFORMED as error:
            missing = "it lacks " if isinstance(error, KeyError) else ""
            raise MapFileError(
                f"{path} is not a valid event map: {missing}{error}", hint=_HINT
            ) from error
        return events


AnyMap: TypeAlias = ProjectionMap | EventMap
AnyMapLike: TypeAlias = str | PathLike[str] | ProjectionMap | EventMap


def _check_events(m: EventMap) -> None:
    if not len(m.student_event) or not len(m.teacher_event):
        raise ValueError("a side has no tokens")
    num_events = max(int(m.student_event.max()), int(m.teacher_event.max())) + 1
    for side, width in zip(("student", "teacher"), m.shape, strict=True):
        events = getattr(m, f"{side}_event")
        if events.shape != (width,):
            raise ValueError(f"{side}_event is not of shape [{width}]")
        if events.min() < 0:
            raise ValueError(f"{side}_event is not all in 0..{num_events - 1}")
        present = np.zeros(num_events, np.bool_)
        present[events] = True
        if not present.all():
            raise ValueError(f"event {int(np.argmin(present))} has no {side} token")
    if m.rest is not None and not 0 <= m.rest < num_events:
        raise ValueError(f"rest is {m.rest}, not an event")


def _check_links(m: EventMap) -> None:
    for side, other in (("student", "teacher"), ("teacher", "student")):
        links, events = getattr(m, f"{side}_link"), getattr(m, f"{side}_event")
        others = getattr(m, f"{other}_event")
        if links.shape != events.shape:
            raise ValueError(f"{side}_link is not of shape [{len(events)}]")
        if links.min() < -1 or links.max() >= len(others):
            raise ValueError(f"{side}_link is not all in -1..{len(others) - 1}")
        linked = np.flatnonzero(links >= 0)
        apart = linked[events[linked] != others[links[linked]]]
        if len(apart):
            raise ValueError(f"{side} id {int(apart[0])} is not in the event of its link")


def _check_measures(m: EventMap) -> None:
    for point in (point for step in m.history for point in step.get("measures", ())):
        values = [point[name] for name in ("num_events", "leak", "student_bits", "teacher_bits")]
        if not all(type(value) in (int, float) for value in values):
            raise ValueError("the measures of the counted text are not numbers")


INVARIANTS: Mapping[str, tuple[Callable[[EventMap], None], str]] = {
    "events": (_check_events, "each has tokens of both sides"),
    "links": (_check_links, "each token is in the event of its link"),
    "measures": (_check_measures, "numbers, where text was counted"),
}
"""What holds for every event map, as in `projection_map.INVARIANTS`."""


def check_output(path: str | PathLike[str]) -> Path:
    """Check, before any work is done, that an event map can be written to a path.

    Raises:
        OutputError: if it is not `.safetensors`, or `io.check_output` refuses it.
    """
    return io.check_output(path, (".safetensors",), or_folder=True)


def to_safetensors(events: EventMap) -> bytes:
    """Return the bytes of the event map's file."""
    from safetensors.numpy import save

    tensors = {name: getattr(events, name) for name in _ARRAYS}
    fields = {"kind": "events", "rest": events.rest, "history": list(events.history)}
    packed, metadata = mapfile.pack_sides(tensors, fields, events.student, events.teacher)
    return bytes(save(packed, {"xtok": metadata}))  # several keys would be in random order


def assemble(
    tensors: Mapping[str, NDArray[Any]], metadata: str
) -> tuple[EventMap, dict[str, str | None]]:
    """Make an event map of a file's parts, whose invariants and digests are not yet checked.

    Returns:
        the event map, and what the file says of each side's `table_sha256`.

    Raises:
        ValueError: if they are not an event map; or any other of `file.MALFORMED`.
    """
    fields = mapfile.unpack_fields(tensors, metadata)
    require(fields["rest"] is None or type(fields["rest"]) is int, "rest")
    sides = {s: mapfile.unpack_side(s, fields[s], tensors) for s in ("student", "teacher")}
    for side, vocabulary in sides.items():
        require(vocabulary.table is not None, f"the {side}'s tokens")
    events = EventMap(
        student=sides["student"],
        teacher=sides["teacher"],
        student_event=tensors["student_event"],
        teacher_event=tensors["teacher_event"],
        student_link=tensors["student_link"],
        teacher_link=tensors["teacher_link"],
        rest=fields["rest"],
        history=tuple(dict(step) for step in fields["history"]),
    )
    return events, {side: fields[side].get("table_sha256") for side in sides}


def holds_events(path: str | PathLike[str]) -> bool:
    """Tell by its header whether a file is an event map; False for one that cannot be read."""
    if not Path(path).is_file():
        return False
    try:
        with safe_open(path, framework="np") as file:
            return "student_event" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def as_any_map(source: AnyMapLike) -> AnyMap:
    """Return a map or an event map as it is, and load a path, whichever its file holds."""
    if isinstance(source, ProjectionMap | EventMap):
        return source
    return EventMap.load(source) if holds_events(source) else mapfile.load(source)
