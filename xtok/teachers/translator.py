"""A text in the tokens of both sides, and what the teacher says of it on the student's tokens.

Files (`stored_texts.py`) and `serve` stand around this: they know where texts and predictions come
from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.chats import written_alike
from xtok.alignment.retokenize import Retokenizer
from xtok.conversation import Conversation, ReadBack, read_back
from xtok.conversation.teacher_side import renumbered
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.predictions.topk import TopK, chosen_rows, firsts_of, rows_of
from xtok.teachers.formats.ranked import MIN_REST
from xtok.teachers.projector import Projector
from xtok.tokenizers.pairs import Pair

Templates = tuple[str | Path | None, str | Path | None]
"""The student's and the teacher's, as `conversation.render` takes them."""


class SharedText(NamedTuple):
    """A text in the student's tokens and in the teacher's."""

    ids: NDArray[np.int32]  # [S], the student's
    plain: NDArray[np.int32]  # [P], the same with tokens that the teacher lacks as their text
    begins: NDArray[np.int64]  # [S + 1], where each token's part of `plain` begins
    teacher_ids: NDArray[np.int32]  # [T]
    spans: list[tuple[slice, slice]]  # of `plain` and of the teacher's ids, that spell the same
    mask: NDArray[np.bool_] | None = None  # [S], what the assistant wrote; None: no conversation
    alone: slice = slice(0, 0)  # of the teacher's ids: a system text that the student does not read

    @classmethod
    def of(
        cls,
        ids: Sequence[int] | NDArray[np.int32],
        teacher_ids: NDArray[np.int32],
        spans: list[tuple[slice, slice]] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Return a text whose tokens the teacher reads as they are; without spans, all of it."""
        own = np.asarray(ids, np.int32)
        whole = slice(0, len(own)), slice(0, len(teacher_ids))
        begins = np.arange(len(own) + 1)
        return cls(own, own, begins, teacher_ids, [whole] if spans is None else spans, mask)


class Translator:
    """Turns texts in one side's tokens into both sides', and the teacher's predictions on them.

    What is known of a pair is kept: it gets faster with what it has seen. One call of `project` at
    a time; it uses several threads itself.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: from the teacher (rows) to the student (columns), as `Projector` takes it.
        templates: of both sides' conversations.
        chat: read conversations back from ids, where both sides have a chat template.
        num_threads: one per available core if None.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        *,
        templates: Templates = (None, None),
        chat: bool = True,
        num_threads: int | None = None,
    ) -> None:
        self.pair, self.templates, self.is_same = pair, templates, pair.is_same
        self.student, self.teacher = pair.tokenizers
        self._projector = Projector(pair, back_map, num_threads)
        self.aligner = self._projector.aligner
        has_templates = (
            template not in (None, "default") or tokenizer.chat_templates
            for template, tokenizer in zip(templates, pair.tokenizers, strict=True)
        )
        self._reads_chats = chat and all(has_templates)
        self._roles = pair.equal_roles
        self._texts: dict[int, list[int]] = {}
        roles = self.teacher.table.roles
        self._bos = roles.get("bos", ())
        ends = [i for i in roles.get("eos", ()) if i not in roles.get("turn_end", ())]
        self._begin = [*self._bos, *ends, *roles.get("eos", ())][:1]

    @functools.cached_property
    def _to_teacher(self) -> Retokenizer:
        return Retokenizer(self.pair, exact=True)

    @functools.cached_property
    def _to_student(self) -> Retokenizer:
        return Retokenizer(self.pair.reversed)

    @functools.cached_property
    def is_control(self) -> NDArray[np.bool_]:
        """Which of the teacher's tokens are control tokens, bool `[V_teacher]`."""
        table = self.teacher.table
        return np.isin(np.arange(len(table)), list(table.control_names))

    @functools.cached_property
    def teacher_spelled(self) -> list[bytes]:
        """The bytes of each of the teacher's tokens; of a control token, its name."""
        table = self.teacher.table
        names = {i: name.encode() for i, name in table.control_names.items()}
        return [names.get(i, token) for i, token in enumerate(table.tokens())]

    @functools.cached_property
    def pieces_per_token(self) -> float:
        """How many of the teacher's tokens spell one of the student's, on average.

        Over the vocabulary, whose rare tokens have more than those of most texts.
        """
        tokens = [self.student.table[i] for i in self.student.table.text_ids.tolist()]
        sizes = [len(ids) for ids in self.teacher.segment_batch(tokens) if ids]
        return max(1.0, sum(sizes) / max(1, len(sizes)))

    # Texts

    def of_teacher(self, sequences: Sequence[NDArray[np.int32]]) -> list[SharedText]:
        """Return the texts of the teacher's ids: conversations, if both have a template, or bytes.

        The student's text goes no further than the last words that both templates have.
        """
        chats = {
            n: chat
            for n, ids in enumerate(sequences)
            if self.is_control[ids].any()
            and (chat := self._conversation(ids.tolist(), 1, ends_too=False)) is not None
        }
        rest = [n for n in range(len(sequences)) if n not in chats]
        spelled = self._to_student([sequences[n].tolist() for n in rest])
        student_ids = dict(zip(rest, spelled, strict=True))
        return [
            chats[n] if n in chats else SharedText.of(student_ids[n], ids)
            for n, ids in enumerate(sequences)
        ]

    def of_student(self, ids: Sequence[int], teacher_system: str = "") -> SharedText:
        """Return the text of the student's ids, as the teacher reads it.

        A conversation that the ids certainly are of is rendered by the teacher's own chat template.
        Anything else is spelled byte for byte.

        Args:
            ids: the student's.
            teacher_system: what the teacher alone reads: the system text of a conversation, in
                place of its own; before anything else, text.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
            XtokError: if its template takes no system text.
        """
        if self.is_same and not teacher_system:
            return SharedText.of(ids, np.array(ids, np.int32))
        chat = self._conversation(ids, 0, ends_too=True, system=teacher_system)
        return chat or self._spelled(ids, teacher_system)

    def _conversation(
        self, ids: Sequence[int], given: Literal[0, 1], *, ends_too: bool, system: str = ""
    ) -> SharedText | None:
        """Return the conversation that one side's ids surely are of, as both templates have it.

        None if they are of none, or the other side's template leaves out or changes what the
        assistant wrote.

        Args:
            ids: of a side, perhaps broken off.
            given: whose they are: 0 for the student's, 1 for the teacher's.
            ends_too: whether the other side must have the ends of the assistant's turns as well.
            system: the teacher's own system text.
        """
        if not self._reads_chats:
            return None
        back = read_back(self.pair.tokenizers[given], ids, template=self.templates[given])
        if back is None:
            return None
        this, tables = back.conversation, self.pair.tables
        read = self._other_side(back, 1 - given, system)
        if read is None:
            return None
        other, alone = read
        ours, theirs = (this, other) if given == 0 else (other, this)
        spans = written_alike(ours, theirs, self._roles)
        is_shared = np.zeros(len(this.ids), np.bool_)
        for both in spans:
            is_shared[both[given]] = True
            student, teacher = (
                b"".join(table[i] for i in side.ids[span].tolist())
                for table, side, span in zip(tables, (ours, theirs), both, strict=True)
            )
            if student != teacher:
                return None
        needed = this.assistant_mask
        if not ends_too:
            needed = needed & (tables[given].lengths[this.ids] > 0)
        if not spans or (needed & ~is_shared).any():
            return None
        last = spans[-1]
        our_end, their_end = len(ours.ids), len(theirs.ids)
        if given == 0 and last[0].stop == our_end:  # the teacher is asked for no more
            their_end = last[1].stop
        if given == 1 and this.bounds[-1] < len(this.text.encode()):  # it breaks off
            our_end = last[0].stop
        mask = ours.assistant_mask[:our_end]
        text = SharedText.of(ours.ids[:our_end], theirs.ids[:their_end], spans, mask)
        return text._replace(alone=alone)

    def _other_side(
        self, back: ReadBack, side: int, system: str
    ) -> tuple[Conversation, slice] | None:
        """Render what was read back by the other side's template, with its own system text.

        Return it with messages numbered as they were read, and the tokens of that text. None if the
        template refuses a role, or tools.
        """
        own = bool(system) and back.messages[0]["role"] in ("system", "developer")
        if system:
            first = {"role": "system", "content": system}
            back = replace(back, messages=[first, *back.messages[own:]])
        try:
            other = back.render(self.pair.tokenizers[side], self.templates[side])
        except XtokError:
            if system:
                raise
            return None
        if not system:
            return other, slice(0, 0)
        place = other.message_spans[0].whole
        numbers = {i: i - 1 + own for i in range(1, len(back.messages))}
        return renumbered(other, numbers), slice(*place.tokens) if place else slice(0, 0)

    def _spelled(self, ids: Sequence[int], context: str = "") -> SharedText:
        """Spell the student's ids byte for byte, behind a text that the teacher alone reads.

        A token without bytes and without a counterpart is spelled as its name, so that it has an
        honest value. The teacher's sequence begins with its bos; for a student's bos where it has
        none, with what ends its documents; else the first token is spelled by itself, so that the
        teacher predicts all that follow.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
        """
        parts = [self._as_text(i) for i in ids]
        begin: list[int] = []
        roles, counterpart = self.student.table.roles_by_id.get(ids[0], ()), self._roles.get(ids[0])
        if "bos" in roles and (counterpart in (None, *self._bos) or "eos" in roles):
            begin, parts[0] = self._begin, [] if self._begin else parts[0]
        elif self._bos:
            begin = self._begin
        plain = [i for part in parts for i in part]
        first = 0 if begin else len(parts[0])
        begin = [*begin, *self.teacher.encode(context).ids.tolist()]
        stretches = self._to_teacher([plain[:first], plain[first:]], begins=[False, False])
        teacher_ids = [*begin, *stretches[0], *stretches[1]]
        span = slice(0, len(plain)), slice(len(begin), len(teacher_ids))
        return SharedText(
            np.array(ids, np.int32), np.array(plain, np.int32), offsets_of([*map(len, parts)]),
            np.array(teacher_ids, np.int32), [span],
        )  # fmt: skip

    def _as_text(self, token_id: int) -> list[int]:
        """Return a token that the teacher reads as its bytes or role; of others, their name's."""
        table = self.student.table
        if table.lengths[token_id] > 0 or token_id in self._roles:
            return [token_id]
        if token_id not in self._texts:
            name = table.control_names.get(token_id) or table.name(token_id)
            self._texts[token_id] = self.student.segment(name)
        return self._texts[token_id]

    # Predictions

    def project(
        self,
        texts: Sequence[SharedText],
        predictions: TopK,
        top_k: int,
        *,
        without_gaps: bool = False,
    ) -> TopK:
        """Return predictions of the student's tokens, a document per text; first rows are empty.

        Args:
            texts: in both sides' tokens.
            predictions: the teacher's, of the `teacher_ids` of each; checked.
            top_k: the most candidates of a row.
            without_gaps: give each token after the first a log-probability, also what only one
                side's template writes, so that the sums of whole texts are the teacher's; and the
                candidates of its row room for it.
        """
        plain = _concatenated(text.plain for text in texts)
        plain_bounds = offsets_of([len(text.plain) for text in texts])
        spans = []  # the places of both sides' tokens in them, and where each begins
        for side, begins in ((0, plain_bounds), (1, predictions.bounds)):
            ranges = [
                np.arange(begin + span[side].start, begin + span[side].stop)
                for text, begin in zip(texts, begins.tolist(), strict=False)
                for span in text.spans
            ]
            spans.append((_concatenated(ranges, np.int64), offsets_of([*map(len, ranges)])))
        (ours, our_bounds), (theirs, their_bounds) = spans
        given = chosen_rows(predictions, theirs, predictions.token_ids[theirs], their_bounds)
        projected = self._projector.project(given, plain[ours], our_bounds, top_k)
        row_of = np.full(len(plain), -1)
        row_of[ours] = np.arange(len(ours))
        of_plain = np.append(projected.realized_logprob, np.float32(np.nan))[row_of]
        bounds = offsets_of([len(text.ids) for text in texts])
        # Token i's parts in `plain` are `begins[i]:begins[i + 1]`; one spelled as nothing has none.
        offsets = np.repeat(plain_bounds[:-1], np.diff(bounds))
        begins = offsets + _concatenated((text.begins[:-1] for text in texts), np.int64)
        sizes = _concatenated((np.diff(text.begins) for text in texts), np.int64)
        rows = np.where(sizes > 0, np.append(row_of, -1)[begins], -1)
        rows[firsts_of(bounds)] = -1  # no student has logits before its first token
        if without_gaps:
            _share_gaps(of_plain, plain_bounds, texts, predictions)
        realized = np.bincount(rows_of(offsets_of(sizes)), of_plain, len(sizes)).astype(np.float32)
        realized[firsts_of(bounds)] = np.nan
        token_ids = _concatenated(text.ids for text in texts)
        topk = chosen_rows(projected, rows, token_ids, bounds)
        if not without_gaps:
            realized[rows < 0] = np.nan
        topk = topk._replace(realized_logprob=realized)
        return _at_most_one(topk) if without_gaps else topk


def _concatenated(arrays: Iterable[NDArray[Any]], dtype: type = np.int32) -> NDArray[Any]:
    return np.concatenate([*arrays, np.zeros(0, dtype)])


def _share_gaps(
    of_plain: NDArray[np.float32],
    bounds: NDArray[np.int64],
    texts: Sequence[SharedText],
    predictions: TopK,
) -> None:
    """Share what the teacher gives to its own template among the student's tokens of its own.

    What only the student's template writes is certain.
    """
    for text, begin, their_begin in zip(
        texts, bounds.tolist(), predictions.bounds.tolist(), strict=False
    ):
        values = of_plain[begin : begin + len(text.plain)]
        theirs = predictions.realized_logprob[
            their_begin : their_begin + len(text.teacher_ids)
        ].copy()
        theirs[text.alone] = np.nan
        ends = [(1, 0), *((ours.stop, other.stop) for ours, other in text.spans)]
        begins = [(ours.start, other.start) for ours, other in text.spans]
        for (a, c), (b, d) in zip(ends, [*begins, (len(values), len(theirs))], strict=True):
            if a < b:
                values[a:b] = np.nansum(theirs[c:d]) / (b - a)


def _at_most_one(topk: TopK) -> TopK:
    """Return predictions whose other candidates leave room for the token itself.

    Of a chunk of several tokens, a row's own part of its token may be less than its value.
    """
    row_of = rows_of(topk.starts)
    p = np.exp(topk.logprobs, dtype=np.float64) * (topk.ids == topk.token_ids[row_of])
    others = 1 - np.bincount(row_of, p, len(topk.token_ids))
    room = 1 - np.exp(topk.realized_logprob, dtype=np.float64)
    ratio = np.maximum(MIN_REST, room) / np.maximum(MIN_REST, others)
    factor = np.log(np.nan_to_num(np.minimum(1.0, ratio), nan=1.0))
    return topk._replace(
        logprobs=(topk.logprobs + factor[row_of]).astype(np.float32),
        rest_logprob=(topk.rest_logprob + factor).astype(np.float32),
    )
