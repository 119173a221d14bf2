"""Where the messages are in a rendered conversation, and what the assistant wrote of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.conversation._tracking import Run
from xtok.conversation.templates import Message, Rendering
from xtok.tokenizers.table import byte_offsets

_PIECES = re.compile(r"<[^<>]*>|\[[A-Z_/]+\]|\w+|\s|.")
"""Tags, words, and single other characters: a header ends behind one of them, not within."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a rendered conversation, in three units; each `(start, end)`."""

    chars: tuple[int, int]
    bytes: tuple[int, int]  # of UTF-8
    tokens: tuple[int, int]  # those that have at least one byte of it


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """Where one message is in a rendered conversation.

    `message["content"][source[0]:source[1]]` is what the span `content` begins and ends with, so
    that a template that strips it is seen.
    """

    role: str
    whole: Span | None  # header and end of turn included; messages that are merged share it
    content: Span | None  # None if the message has none
    source: tuple[int, int] | None  # None if the content is a list of parts
    verbatim: bool  # whether the span is the text of `source`, character by character


class Places:
    """The places of one rendering, in characters, bytes and tokens."""

    def __init__(self, rendering: Rendering, bounds: NDArray[np.int64]) -> None:
        self._text, self._turns, self._bounds = rendering.text, rendering.turns, bounds
        self._byte_of = byte_offsets(rendering.text)
        self._all_runs = rendering.runs
        self._runs: dict[int, list[Run]] = {}
        for run in rendering.runs:
            self._runs.setdefault(run.message, []).append(run)

    def span(self, start: int, end: int) -> Span:
        first, last = int(self._byte_of[start]), int(self._byte_of[end])
        stop = begin = int(np.searchsorted(self._bounds[:-1], last, side="left"))
        if first < last:
            begin = int(np.searchsorted(self._bounds[1:], first, side="right"))
        return Span(chars=(start, end), bytes=(first, last), tokens=(begin, stop))

    def of_message(self, index: int, message: Message) -> MessageSpan:
        content, whole = message.get("content"), self.whole(index)
        runs: list[Run] = []  # of the content's first appearance in the text
        for run in self._runs.get(index, ()):
            if run.path[:1] == ("content",):
                if runs and (run.path, run.offset) <= (runs[-1].path, runs[-1].offset):
                    break  # it is repeated
                runs.append(run)
        place: tuple[int, int] | None = (runs[0].start, runs[-1].end) if runs else None
        source: tuple[int, int] | None = None
        verbatim = False
        if place and isinstance(content, str) and runs[0].offset >= 0:
            source = (runs[0].offset, runs[-1].offset + runs[-1].end - runs[-1].start)
            verbatim = self._text[slice(*place)] == content[slice(*source)]
        if place is None and isinstance(content, str) and content.strip() and whole is not None:
            stripped = content.strip()
            first = self._text.find(stripped, *whole)
            if first >= 0:  # a filter lost the origin, and did not change the text
                place, start = (first, first + len(stripped)), content.index(stripped)
                source, verbatim = (start, start + len(stripped)), True
        return MessageSpan(
            role=message["role"],
            whole=None if whole is None else self.span(*whole),
            content=None if place is None else self.span(*place),
            source=source,
            verbatim=verbatim,
        )

    def targets(
        self, index: int, asked: str, control: NDArray[np.bool_], up_to: Callable[[int], str]
    ) -> Iterator[tuple[int, int]]:
        """Return what the assistant wrote of a message: from its header to the end of its turn.

        Some templates, Gemma 4's, write a tool's answer into the turn of the call; it then has two
        parts. `up_to` returns the text without the later messages, which shows where the first
        part ends, if it can be rendered; `asked` is what asks for an answer.
        """
        whole = self.whole(index)
        if whole is None:
            return
        inside = [r for r in self._all_runs if whole[0] <= r.start and r.end <= whole[1]]
        mine = [r for r in inside if r.message == index]
        spoken = [r for r in mine if r.path[:1] != ("role",)]
        later = [r for r in inside if r.message > index]
        first = spoken[0].start if spoken else whole[1]
        start = self._after_header(whole[0], first, asked)
        if start < 0:
            start = whole[0] if not asked or self._text.endswith(asked, 0, whole[0]) else first
        if not asked and mine and mine[0].path[:1] == ("role",):
            # Nothing asks for an answer; the header is what has the role.
            is_written = not spoken or spoken[0].path[:1] == ("content",)
            start = first if is_written else self._behind_role(mine[0].end)
        if not later:
            yield from self._part(start, spoken, whole[1], control)
            return
        both = self._text[: later[0].start], up_to(index)
        limit = min(map(len, both))
        limit = next((i for i in range(limit) if both[0][i] != both[1][i]), limit)
        if self._text.rfind("<", start, limit) > self._text.rfind(">", start, limit):
            limit = self._text.rfind("<", start, limit)  # not within a tag
        if limit > start:
            yield from self._part(start, [r for r in spoken if r.end <= limit], limit, control)
        resumed = [r for r in spoken if r.start >= later[-1].end and r.path[:1] == ("content",)]
        if resumed:
            yield from self._part(resumed[0].start, resumed, whole[1], control)

    def _part(
        self, start: int, written: Sequence[Run], limit: int, control: NDArray[np.bool_]
    ) -> Iterator[tuple[int, int]]:
        """Return `start` to the end of what is written, with what ends a turn before `limit`."""
        end = max((run.end for run in written), default=start)
        inside = self.span(end, limit).tokens
        ends = np.flatnonzero(control[slice(*inside)])
        if len(ends):
            byte = int(self._bounds[inside[0] + int(ends[-1]) + 1])
            # A control token may have taken the whitespace behind it, and that of the next turn.
            end = max(end, min(int(np.searchsorted(self._byte_of, byte, side="left")), limit))
        else:  # the turn's end is text, or there is none
            end = max(end, start + len(self._text[start:limit].rstrip()))
        if start < end:
            yield start, end

    def after_prompt(self, index: int, place: int, asked: str) -> int:
        """Return a place in an answer's turn, or where what asks for the answer ends behind it."""
        whole = self.whole(index)
        if whole is None or not whole[0] <= place < whole[1]:
            return place
        spoken = [r for r in self._runs.get(index, ()) if r.path[:1] != ("role",)]
        first = spoken[0].start if spoken else whole[1]
        return max(place, self._after_header(whole[0], first, asked))

    def _after_header(self, start: int, first: int, asked: str) -> int:
        """Return where the header of a turn ends, which asks for the answer; -1 if it has none.

        It begins before the first character that the message has, at `first`, and may end behind
        it: a prompt that opens a `<think>` block has what some messages begin with.
        """
        pieces = _PIECES.findall(asked)
        for count in range(len(pieces), 0, -1):
            header = "".join(pieces[:count])
            if 2 * len(header) < len(asked):
                break
            place = self._text.find(header, start, first + len(header) - 1)
            if place >= 0:
                return place + len(header)
        return -1

    def _behind_role(self, place: int) -> int:
        """Return where a header ends whose role ends at `place`, by the other messages' headers."""
        for runs in self._runs.values():
            if [run.path[:1] for run in runs[:2]] == [("role",), ("content",)]:
                header = self._text[runs[0].end : runs[1].start]
                if self._text.startswith(header, place):
                    return place + len(header)
        return place

    def whole(self, index: int) -> tuple[int, int] | None:
        """Return the turn, or for a message outside the loop, what is around its characters.

        What stands before the first turn is the first message's if that is written there, as a
        system message is; a message that is written within another one's turn has its own
        characters only.
        """
        written = self._runs.get(index)
        if self._turns[index] is not None or not written:
            return self._turns[index]
        start, end = written[0].start, written[-1].end
        first = min((turn[0] for turn in self._turns if turn is not None), default=0)
        alone = all(run.message == index for run in self._all_runs if run.start < first)
        return (0, first) if end <= first and alone else (start, end)
