"""`EventMap`: both vocabularies cut into events, which two softmaxes can be compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.maps.projection_map import StageReport
from xtok.vocab.table import Vocabulary


@dataclass(frozen=True, kw_only=True, eq=False)
class EventMap:
    """Events of two vocabularies: each token is in one, and each event has tokens of both sides.

    Two distributions over next tokens become distributions over the same events, by sums within
    each event: mass is exact on both sides, and by the data processing inequality their divergence
    is at most the true one. Where both tokenizers begin a token at the same byte, the two tokens
    should be in one event; how often they are not is the *leak*.

    Attributes:
        student: the student's vocabulary.
        teacher: the teacher's.
        student_event: int32 `[V_student]`, the event of each token. Events are numbered by falling
            mass on the counted text, those of equal mass by their lowest student id.
        teacher_event: int32 `[V_teacher]`.
        student_link: int32 `[V_student]`, the teacher token that put a token where it is: the one
            of equal bytes or role, else the first piece of its spelling; −1 for none.
        teacher_link: int32 `[V_teacher]`, likewise, a student token.
        rest: the event of the tokens that no link leads to, special ones without a partner and
            unused ids; None if all have one.
        history: one object per stage: its name, its options, the version that ran it.
        reports: what the stages of this process reported; not saved.
    """

    student: Vocabulary
    teacher: Vocabulary
    student_event: NDArray[np.int32]
    teacher_event: NDArray[np.int32]
    student_link: NDArray[np.int32]
    teacher_link: NDArray[np.int32]
    rest: int | None
    history: tuple[Mapping[str, Any], ...] = ()
    reports: tuple[StageReport, ...] = ()

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
        if not len(self.student_event) or not len(self.teacher_event):
            raise ValueError("a side has no tokens")
        num_events = max(int(self.student_event.max()), int(self.teacher_event.max())) + 1
        widths = {"student": self.shape[0], "teacher": self.shape[1]}
        for side, width in widths.items():
            events = getattr(self, f"{side}_event")
            if events.shape != (width,):
                raise ValueError(f"{side}_event is not of shape [{width}]")
            present = np.zeros(num_events, np.bool_)
            if events.min() < 0:
                raise ValueError(f"{side}_event is not all in 0..{num_events - 1}")
            present[events] = True
            if not present.all():
                raise ValueError(f"event {int(np.argmin(present))} has no {side} token")
        self._check_links("student", self.student_event, self.teacher_event)
        self._check_links("teacher", self.teacher_event, self.student_event)
        if self.rest is not None and not 0 <= self.rest < num_events:
            raise ValueError(f"rest is {self.rest}, not an event")

    def _check_links(self, side: str, events: NDArray[np.int32], others: NDArray[np.int32]) -> None:
        links: NDArray[np.int32] = getattr(self, f"{side}_link")
        if links.shape != events.shape:
            raise ValueError(f"{side}_link is not of shape [{len(events)}]")
        if links.min() < -1 or links.max() >= len(others):
            raise ValueError(f"{side}_link is not all in -1..{len(others) - 1}")
        linked = np.flatnonzero(links >= 0)
        apart = linked[events[linked] != others[links[linked]]]
        if len(apart):
            raise ValueError(f"{side} id {int(apart[0])} is not in the event of its link")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the events as `.safetensors`; see `event_file.save`."""
        from xtok.maps import event_file

        event_file.save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> EventMap:
        """Read an event map; see `event_file.load`."""
        from xtok.maps import event_file

        return event_file.load(path)
