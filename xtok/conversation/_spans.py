"""Locate messages and answers in a rendered conversation."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import num_common
from xtok.conversation._tracking import Run
from xtok.conversation.templates import Message, Rendering
from xtok.tokenizers.table import byte_offsets

_PIECES = re.compile(r"<[^<>]*>|\[[A-Z_/]+\]|\w+|\s|.")
"""Pattern for a piece of a text: a tag, a word or a single character."""

_TAG = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of a rendered conversation in three units. Each field is `(start, end)`."""

    chars: tuple[int, int]
    bytes: tuple[int, int]  # in UTF-8
    tokens: tuple[int, int]  # all tokens that overlap the bytes


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """The position of one message in a rendered conversation.

    `source` is the range of `message["content"]` that the template wrote. If the template strips
    white space, this range is shorter than the content.
    """

    role: str
    whole: Span | None  # includes header and end of turn; merged messages have the same span
    content: Span | None  # None if the text contains no content of the message
    source: tuple[int, int] | None  # None if the content is a list of parts
    verbatim: bool  # whether `content` and `source` have the same characters


class Spans:
    """Finds messages and answers in one rendering."""

    def __init__(
        self, rendering: Rendering, bounds: NDArray[np.int64], control: NDArray[np.bool_]
    ) -> None:
        self._text, self._turns, self._bounds = rendering.text, rendering.turns, bounds
        self._control = control  # [T], bool, True at control tokens
        self._byte_offsets = byte_offsets(rendering.text)
        self._runs = rendering.runs
        self._message_runs: dict[int, list[Run]] = {}
        for run in rendering.runs:
            self._message_runs.setdefault(run.message, []).append(run)

    def span(self, start: int, end: int) -> Span:
        byte_start, byte_end = int(self._byte_offsets[start]), int(self._byte_offsets[end])
        token_end = token_start = int(np.searchsorted(self._bounds[:-1], byte_end, side="left"))
        if byte_start < byte_end:
            token_start = int(np.searchsorted(self._bounds[1:], byte_start, side="right"))
        return Span(
            chars=(start, end), bytes=(byte_start, byte_end), tokens=(token_start, token_end)
        )

    def locate(self, index: int, message: Message) -> MessageSpan:
        content, whole = message.get("content"), self.whole(index)
        chars, source = self._content_chars(index, content, whole)
        return MessageSpan(
            role=message["role"],
            whole=None if whole is None else self.span(*whole),
            content=None if chars is None else self.span(*chars),
            source=source,
            verbatim=chars is not None
            and source is not None
            and self._text[slice(*chars)] == str(content)[slice(*source)],
        )

    def _content_chars(
        self, index: int, content: object, turn: tuple[int, int] | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return the range in the text, and the range of `content` that was written there."""
        if runs := self._content_runs(index):
            chars = runs[0].start, runs[-1].end
            is_text = isinstance(content, str) and runs[0].offset >= 0
            end = runs[-1].offset + runs[-1].end - runs[-1].start
            return chars, (runs[0].offset, end) if is_text else None
        if isinstance(content, str) and turn is not None and (stripped := content.strip()):
            first, start = self._text.find(stripped, *turn), content.index(stripped)
            if first >= 0:  # a filter kept the text but removed the tracking
                return (first, first + len(stripped)), (start, start + len(stripped))
        return None, None

    def _content_runs(self, index: int) -> list[Run]:
        runs: list[Run] = []
        for run in self._message_runs.get(index, ()):
            if run.path[:1] == ("content",):
                if runs and (run.path, run.offset) <= (runs[-1].path, runs[-1].offset):
                    break  # the template writes the content a second time
                runs.append(run)
        return runs

    def targets(self, index: int, header: str, own_text: str) -> Iterator[tuple[int, int]]:
        """Yield the ranges of an answer, without its header.

        Gemma 4 writes tool results into the turn of the call, so the answer has two ranges. The
        first range ends where the text differs from `own_text`, the answer rendered without
        results.
        """
        turn = self.whole(index)
        if turn is None:
            return
        runs, later = self.turn_runs(index)
        start = self._answer_start(turn, runs, header)
        if not later:
            yield from self._target(start, runs, turn[1])
            return
        tail = [r for r in runs if r.start >= later[-1].end and r.path[:1] == ("content",)]
        begin = min(runs[0].start if runs else turn[0], later[0].start)
        limit = self._common_end(begin, later[0].start, own_text)
        yield from self._target(start, [r for r in runs if r.end <= limit], limit)
        if tail:
            yield from self._target(tail[0].start, tail, turn[1])

    def turn_runs(self, index: int) -> tuple[list[Run], list[Run]]:
        """Return the runs in the turn of a message: its own runs, and the runs of later messages.

        The first list does not contain the runs of the role.
        """
        turn = self.whole(index) or (0, 0)
        start, end = (bisect_left(self._runs, (position,)) for position in turn)
        turn_runs = self._runs[start:end]
        own_runs = [r for r in turn_runs if r.message == index and r.path[:1] != ("role",)]
        return own_runs, [r for r in turn_runs if r.message > index]

    def _answer_start(self, turn: tuple[int, int], runs: Sequence[Run], header: str) -> int:
        first = runs[0].start if runs else turn[1]
        start = self._header_end(turn[0], first, header)
        if start >= 0:
            return start
        tag = _PIECES.match(header.strip())
        # A turn without a header continues the previous turn.
        return first if tag and self._text.find(tag[0], turn[0], first) >= 0 else turn[0]

    def _common_end(self, start: int, end: int, text: str) -> int:
        """Return the first position where the rendering differs from a text.

        If the difference is inside a tag, return the start of the tag.
        """
        limit = start + num_common(self._text[start:end], text)
        tag = self._text.rfind("<", start, limit)
        return tag if tag > self._text.rfind(">", start, limit) else limit

    def _target(self, start: int, runs: Sequence[Run], limit: int) -> Iterator[tuple[int, int]]:
        if limit <= start:
            return
        end = max((run.end for run in runs), default=start)
        tokens_after = self.span(end, limit).tokens
        ends = np.flatnonzero(self._control[slice(*tokens_after)])
        if len(ends):
            byte = int(self._bounds[tokens_after[0] + int(ends[-1]) + 1])
            # Some control tokens include the following white space, even in the next turn.
            end = max(end, min(int(np.searchsorted(self._byte_offsets, byte, side="left")), limit))
        else:  # no control token ends the turn
            end = max(end, start + len(self._text[start:limit].rstrip()))
        if start < end:
            yield start, end

    def skip_header(self, index: int, offset: int, header: str) -> int:
        """Return `offset`, or the end of an answer's header if `offset` is inside the header."""
        turn = self.whole(index)
        if turn is None or not turn[0] <= offset < turn[1]:
            return offset
        return max(offset, self._header_end(turn[0], self._content_start(index, turn), header))

    def missing_prompt(self, index: int, prompt: str) -> str:
        """Return the end of a generation prompt that is missing before an answer.

        The result is "" if the missing text contains no tag.
        """
        turn = self.whole(index)
        if turn is None:
            return ""
        parts = list(accumulate(_PIECES.findall(prompt.rstrip())))
        first = self._content_start(index, turn)
        for part in reversed(parts):
            start = max(0, turn[0] - len(prompt))
            if self._text.find(part, start, first + len(part)) >= 0:
                rest = prompt[len(part) :].strip()
                return rest if _TAG.search(rest) else ""
        return ""

    def _content_start(self, index: int, turn: tuple[int, int]) -> int:
        runs = (r.start for r in self._message_runs.get(index, ()) if r.path[:1] != ("role",))
        return next(runs, turn[1])

    def _header_end(self, start: int, first: int, header: str) -> int:
        """Return the position where a turn's header ends, or -1.

        `first` is the start of the message. The header starts before `first`, but the
        header can end after `first` if both the header and the message contain `<think>`. If the
        turn contains less than half of `header`, the result is -1.
        """
        header = header.lstrip() or header  # white space can belong to the previous turn
        pieces = _PIECES.findall(header)
        for count in range(len(pieces), 0, -1):
            part = "".join(pieces[:count])
            if 2 * len(part) < len(header):
                break
            offset = self._text.find(part, start, first + len(part) - 1)
            if offset >= 0:
                return offset + len(part)
        return -1

    def whole(self, index: int) -> tuple[int, int] | None:
        """Return a message's turn, or the range of the message's characters.

        Messages outside the template's loop have no turn, so the method returns their range. If
        such a message is the only message before the first turn, its range is all text before that
        turn.
        """
        runs = self._message_runs.get(index)
        if self._turns[index] is not None or not runs:
            return self._turns[index]
        start, end = runs[0].start, runs[-1].end
        first = min((turn[0] for turn in self._turns if turn is not None), default=0)
        owns_start = all(run.message == index for run in self._runs if run.start < first)
        return (0, first) if end <= first and owns_start else (start, end)


def written_header(rendering: Rendering, messages: Sequence[Message]) -> str:
    r"""Find the header of the last answer by a comparison with the header of another role.

    If an answer starts with `<|im_start|>assistant\n<think>` and a user message starts with
    `<|im_start|>user\n`, the header is `<|im_start|>assistant\n`.
    """
    header: list[str] = []
    for index, message in reversed([*enumerate(messages)]):
        turn = rendering.turns[index]
        runs = (r.start for r in rendering.runs if r.message == index and r.path[:1] != ("role",))
        if turn is None or (first := next(runs, -1)) < turn[0]:
            continue
        pieces = _PIECES.findall(rendering.text[turn[0] : first])
        if message["role"] == "assistant":
            header = header or pieces
        elif header:
            header = header[: _num_corresponding(header, pieces)]
            break
    return "".join(header) if "".join(header).strip() else ""


def _num_corresponding(header: Sequence[str], other: Sequence[str]) -> int:
    """Count the pieces of a header that correspond to pieces of another role's header.

    If the headers do not correspond, all pieces count.
    """
    role = size = num_common(header, other)  # the first difference is the role
    if role < min(len(header), len(other)):
        size = role + 1 + num_common(header[role + 1 :], other[role + 1 :])
        if _piece_kind(header[role]) != _piece_kind(other[role]) or size == 1 < len(other):
            return len(header)
    elif not other:
        return len(header)
    return size + len([*takewhile(str.isspace, header[size:])])


def _piece_kind(piece: str) -> str:
    return "tag" if len(piece) > 1 and piece[0] in "<[" else "word" if piece.isalnum() else piece
