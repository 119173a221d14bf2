"""`EventMap`: a partition of both vocabularies into events."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtok.maps.file import StoredMap
from xtok.maps.opening import Tensors
from xtok.maps.packing import Header
from xtok.maps.records import require, require_valid
from xtok.tokenizers.table import SIDES


@dataclass(frozen=True, kw_only=True, eq=False)
class EventMap(StoredMap):
    """A partition of two vocabularies into events. Each event contains tokens of both sides.

    Adding up probabilities within each event converts a next-token distribution to a distribution
    over the events. By the data processing inequality, this does not increase the divergence of two
    distributions. The *leak* is the error rate at shared token boundaries: how often the student's
    and the teacher's token belong to different events.

    >>> events = xtok.events("bytes", "bytes")
    >>> int(events.student_event[97]), int(events.teacher_event[97])  # the event of `a`
    (97, 97)
    """

    KIND = "events"
    SUFFIXES = (".safetensors",)
    ARRAYS: ClassVar = {f"{side}_{name}": "int32" for side in SIDES for name in ("event", "link")}

    # int32 `[V]`, event of each token; events are numbered in the order of their lowest student id
    student_event: NDArray[np.int32]
    teacher_event: NDArray[np.int32]
    # int32 `[V]`, link of each token: the other side's token with the same bytes or role, or else
    # the first piece of the token's spelling, or −1. A token and its link belong to the same event.
    student_link: NDArray[np.int32]
    teacher_link: NDArray[np.int32]
    rest: int | None  # event of tokens without a link, such as unused ids

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        rows, columns = self.shape
        return f"EventMap({pair}, {rows} and {columns} tokens, {self.num_events} events)"

    @property
    def num_events(self) -> int:
        """Number of events E; their ids are 0 to E − 1."""
        return int(self.student_event.max()) + 1

    def header(self) -> dict[str, Any]:
        """Return the header entries, with the event of tokens without a link (`rest`)."""
        return {**super().header(), "rest": self.rest}

    @classmethod
    def header_fields(cls, header: Header, tensors: Tensors) -> dict[str, Any]:
        """Read the event of tokens without a link."""
        require_valid(type(header["rest"]) in (int, NoneType), "rest")
        return {"rest": header["rest"]}


def _check_events(m: EventMap) -> None:
    require(len(m.student_event) and len(m.teacher_event), "a side has no tokens")
    num_events = max(int(m.student_event.max()), int(m.teacher_event.max())) + 1
    for side, width in zip(SIDES, m.shape, strict=True):
        events = getattr(m, f"{side}_event")
        require(events.shape == (width,), f"{side}_event does not have shape [{width}]")
        require(events.min() >= 0, f"{side}_event has values outside 0..{num_events - 1}")
        present = np.zeros(num_events, np.bool_)
        present[events] = True
        require(present.all(), f"event {int(np.argmin(present))} has no {side} token")
    require(m.rest is None or 0 <= m.rest < num_events, f"the rest event {m.rest} does not exist")


def _check_links(m: EventMap) -> None:
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        links, events = getattr(m, f"{side}_link"), getattr(m, f"{side}_event")
        others = getattr(m, f"{other}_event")
        require(links.shape == events.shape, f"{side}_link does not have shape [{len(events)}]")
        is_within = links.min() >= -1 and links.max() < len(others)
        require(is_within, f"{side}_link has values outside -1..{len(others) - 1}")
        linked = np.flatnonzero(links >= 0)
        wrong = linked[events[linked] != others[links[linked]]]
        if len(wrong):
            raise ValueError(f"{side} id {int(wrong[0])} is not in the event of its link")


EventMap.INVARIANTS = {
    "events": (_check_events, "each event has tokens of both sides"),
    "links": (_check_links, "each token is in the event of its link"),
}
