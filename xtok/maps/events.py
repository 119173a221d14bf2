"""`EventMap`: both vocabularies cut into events, to compare two softmaxes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.maps.file import StoredMap
from xtok.tokenizers.sides import SIDES


@dataclass(frozen=True, kw_only=True, eq=False)
class EventMap(StoredMap):
    """Events of two vocabularies: each token is in one, and each event has tokens of both sides.

    Two distributions over next tokens become distributions over the same events, by sums within
    each event: mass is exact on both sides, and by the data processing inequality their divergence
    is at most the true one. Where both tokenizers begin a token at the same byte, the two tokens
    should be in one event; how often they are not is the *leak*.
    """

    KIND = "events"

    # int32 `[V]`, the event of each token. Events are numbered by their lowest student id.
    student_event: NDArray[np.int32]
    teacher_event: NDArray[np.int32]
    # int32 `[V]`, the token of the other side that put a token where it is: the one of equal bytes
    # or role, else the first piece of its spelling; −1 for none.
    student_link: NDArray[np.int32]
    teacher_link: NDArray[np.int32]
    rest: int | None  # the event of unlinked tokens: special ones without a partner, unused ids

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        rows, columns = self.shape
        return f"EventMap({pair}, {rows} and {columns} tokens, {self.num_events} events)"

    @property
    def num_events(self) -> int:
        """The number of events E; their ids are 0 to E − 1."""
        return int(self.student_event.max()) + 1


def _check_events(m: EventMap) -> None:
    if not len(m.student_event) or not len(m.teacher_event):
        raise ValueError("a side has no tokens")
    num_events = max(int(m.student_event.max()), int(m.teacher_event.max())) + 1
    for side, width in zip(SIDES, m.shape, strict=True):
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


EventMap.INVARIANTS = {
    "events": (_check_events, "each has tokens of both sides"),
    "links": (_check_links, "each token is in the event of its link"),
}
