"""Convert texts to the tokens of both sides, and project the teacher's predictions.

The texts and predictions come from `stored_texts.py` (files) or `serving/` (servers).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Note
from xtok._lib.ragged import offsets_of
from xtok.alignment.chats import shared_string_spans
from xtok.alignment.retokenize import Retokenizer
from xtok.alignment.sequences import FlatIds
from xtok.conversation import Conversation, ReadBack
from xtok.conversation.reading import readings
from xtok.errors import XtokError
from xtok.maps.creating import map_from_edges
from xtok.maps.map_arguments import MapLike, bind_map
from xtok.maps.projection_map import ProjectionMap
from xtok.predictions.topk import TopK, document_starts, segment_ids, take_rows
from xtok.teachers.formats.ranked import MIN_REST
from xtok.teachers.projector import Projector
from xtok.tokenizers.pairs import Pair

Templates: TypeAlias = tuple[str | Path | None, str | Path | None]
"""Chat templates of the student and the teacher; see `conversation.render`."""


def bind_back_map(pair: Pair, back_map: MapLike, note: Note) -> tuple[Pair, ProjectionMap]:
    """Return the pair with the map's widths, and the map from the teacher to the student.

    Scale slots are removed.

    Raises:
        XtokError: if the map belongs to a different pair.
    """
    projection = ProjectionMap.of(back_map)
    name = "the map" if projection is back_map else str(back_map)
    try:
        bound_map, back = bind_map(projection, pair.reversed)
    except XtokError as error:
        sides = f"{projection.student.model_id} → {projection.teacher.model_id}"
        expected = f"{pair.teacher.model_id} → {pair.student.model_id}"
        problem = f"the map is for {sides}, expected {expected} (teacher → student)"
        if sides == expected:
            problem = error.message
        hint = "for {option}, build a map from the teacher (rows) to the student (columns)"
        raise XtokError(f"{name}: {problem}", hint=hint, parameter="back_map") from error
    if bound_map.enable_scale_trick:
        edges = bound_map.edges.take(~bound_map.is_slot).normalized()
        note(f"{name}: ignoring its {bound_map.is_slot.sum():,} scale slots")
        bound_map = map_from_edges(edges, before=bound_map, scale_slot=None)
    return back.reversed, bound_map


class SharedText(NamedTuple):
    """A text in the student's tokens and in the teacher's tokens."""

    ids: NDArray[np.int32]  # [S], student ids
    # [P], student ids; the tokens of its name replace a special token that the teacher lacks
    spelled: NDArray[np.int32]
    starts: NDArray[np.int64]  # [S + 1], start of each token in `spelled`
    teacher_ids: NDArray[np.int32]  # [T]
    spans: list[tuple[slice, slice]]  # spans with equal bytes in `spelled` and `teacher_ids`
    # [S], True for the assistant's tokens; None if the text is not a conversation
    mask: NDArray[np.bool_] | None = None
    teacher_only: slice = slice(0, 0)  # span in `teacher_ids` that the student does not read

    @classmethod
    def of(
        cls,
        ids: Sequence[int] | NDArray[np.int32],
        teacher_ids: NDArray[np.int32],
        spans: list[tuple[slice, slice]] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Create a text in which `spelled` is equal to the student's ids.

        If `spans` is None, both sides have equal bytes.
        """
        array = np.asarray(ids, np.int32)
        whole = slice(0, len(array)), slice(0, len(teacher_ids))
        starts = np.arange(len(array) + 1)
        return cls(array, array, starts, teacher_ids, [whole] if spans is None else spans, mask)


class Translator:
    """Converts texts to the tokens of both sides, and projects the teacher's predictions.

    Like `Projector`, a translator allows only one call of `project` at a time.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: a map from the teacher (rows) to the student (columns); see `Projector`.
        templates: the chat templates of the student and the teacher.
        chat: whether conversations are recovered from ids. This requires a chat template on both
            sides.
        num_threads: the number of threads; None uses one per available core.
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
        self._to_teacher = Retokenizer(pair, exact=True)
        self._to_student = Retokenizer(pair.reversed)
        own = [tokenizer.chat_templates for tokenizer in pair.tokenizers]
        is_equal = templates[0] == templates[1] and own[0] == own[1]
        self._has_equal_templates = self.is_same and is_equal
        both = zip(templates, own, strict=True)
        self._reads_chats = chat and all(name not in (None, "default") or t for name, t in both)
        self._roles = pair.equal_roles
        self._texts: dict[int, list[int]] = {}
        roles = self.teacher.table.roles
        self._bos = roles.get("bos", ())
        ends = [i for i in roles.get("eos", ()) if i not in roles.get("turn_end", ())]
        self._first_ids = [*self._bos, *ends, *roles.get("eos", ())][:1]

    @functools.cached_property
    def pieces_per_token(self) -> float:
        """Average number of teacher tokens per student token, over the student's vocabulary."""
        tokens = [self.student.table[i] for i in self.student.table.text_ids.tolist()]
        sizes = [len(ids) for ids in self.teacher.segment_batch(tokens) if ids]
        return max(1.0, sum(sizes) / max(1, len(sizes)))

    # Texts

    def from_teacher_ids(self, sequences: Sequence[NDArray[np.int32]]) -> list[SharedText]:
        """Decode sequences of teacher ids, as conversations or as bytes.

        If the teacher's conversation is truncated, the student's conversation ends with the last
        text that both templates write.
        """
        chats = [self._conversation(ids.tolist(), 1) for ids in sequences]
        rest = [ids for ids, chat in zip(sequences, chats, strict=True) if chat is None]
        spelled = map(SharedText.of, self._to_student([ids.tolist() for ids in rest]), rest)
        return [chat or next(spelled) for chat in chats]

    def from_student_ids(self, ids: Sequence[int], teacher_system: str = "") -> SharedText:
        """Decode student ids, and convert the text to the teacher's tokens.

        If the ids can be parsed as a conversation, the teacher's chat template renders the
        conversation. Otherwise, the teacher's tokens spell the same bytes; if the tokenizers are
        equal, the ids stay the same.

        Args:
            ids: the student's ids.
            teacher_system: a system text that only the teacher reads. `teacher_system` replaces the
                system message of a conversation, and precedes other texts.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
            XtokError: if the teacher's template does not support a system text.
        """
        chat = self._conversation(ids, 0, teacher_system)
        if chat is None and self.is_same and not teacher_system:
            return SharedText.of(ids, np.array(ids, np.int32))
        return chat or self._spell(ids, teacher_system)

    def _conversation(
        self, ids: Sequence[int], source: Literal[0, 1], system: str = ""
    ) -> SharedText | None:
        """Recover the conversation in one side's ids, and render the other side's version.

        Return None if the ids might not be a conversation, or if the other side's template changes
        the assistant's text. For student ids, also return None if the template changes the end of
        an assistant's turn, or if the sides have equal tokenizers and templates and `system` is
        empty.
        """
        if not self._reads_chats or (source == 0 and self._has_equal_templates and not system):
            return None
        if source == 1 and not self.teacher.table.is_control[ids].any():
            return None
        tokenizer, template = self.pair.tokenizers[source], self.templates[source]
        for conversation in readings(tokenizer, ids, template=template):
            if text := self._render_other(conversation, source, system):
                return text
        return None

    def _render_other(
        self, conversation: ReadBack, source: Literal[0, 1], system: str
    ) -> SharedText | None:
        try:
            other, teacher_only = self._other_side(conversation, 1 - source, system)
        except XtokError:  # for example, the template does not support a role or tools
            if system:
                raise
            return None
        this = conversation.conversation
        student, teacher = (this, other) if source == 0 else (other, this)
        spans = self._shared_spans((student, teacher), source)
        if not spans:
            return None
        student_last, teacher_last = spans[-1]
        student_end, teacher_end = len(student.ids), len(teacher.ids)
        # If the student's ids end here, the student does not need later predictions.
        if source == 0 and student_last.stop == student_end:
            teacher_end = teacher_last.stop
        if source == 1 and this.bounds[-1] < len(this.text.encode()):  # truncated
            student_end = student_last.stop
        mask = student.assistant_mask[:student_end]
        text = SharedText.of(student.ids[:student_end], teacher.ids[:teacher_end], spans, mask)
        return text._replace(teacher_only=teacher_only)

    def _shared_spans(
        self, sides: tuple[Conversation, Conversation], source: Literal[0, 1]
    ) -> list[tuple[slice, slice]]:
        """Return the spans of tokens in which both sides write the same text.

        The list is empty if the bytes of a span differ, or if answer tokens of the source are
        outside the spans.
        """
        spans = shared_string_spans(*sides, self._roles)
        is_target = sides[source].assistant_mask.copy()
        if source == 1:
            is_target &= self.pair.tables[1].lengths[sides[1].ids] > 0
        for both in spans:
            is_target[both[source]] = False
            student, teacher = (
                table.spell(chat.ids[span].tolist())
                for table, chat, span in zip(self.pair.tables, sides, both, strict=True)
            )
            if student != teacher:
                return []
        return [] if is_target.any() else spans

    def _other_side(
        self, chat: ReadBack, side_index: int, system: str
    ) -> tuple[Conversation, slice]:
        """Render a recovered conversation for one side.

        If `system` is not empty, `system` becomes the system message. Also return the slice of the
        system message's tokens.
        """
        tokenizer, template = self.pair.tokenizers[side_index], self.templates[side_index]
        if not system:
            return chat.render(tokenizer, template), slice(0, 0)
        own = chat.messages[0]["role"] in ("system", "developer")
        first = {"role": "system", "content": system}
        chat = replace(chat, messages=[first, *chat.messages[own:]])
        new_indices = {i: i - 1 + own for i in range(1, len(chat.messages))}
        other = chat.render(tokenizer, template)
        whole = other.message_spans[0].whole
        return other.renumber(new_indices), slice(*whole.tokens) if whole else slice(0, 0)

    def _spell(self, ids: Sequence[int], context: str = "") -> SharedText:
        """Spell student ids in teacher tokens, after a context that only the teacher reads.

        The teacher's ids start with the teacher's bos token. If the teacher has no bos token, its
        end-of-document token replaces the student's bos token. If the student's ids have no bos
        token either, the first student token is spelled separately, so that all later tokens are
        predicted.
        """
        parts = [self._as_text(i) for i in ids]
        first_ids: list[int] = []
        roles, counterpart = self.student.table.roles_by_id.get(ids[0], ()), self._roles.get(ids[0])
        if "bos" in roles and (counterpart in (None, *self._bos) or "eos" in roles):
            first_ids, parts[0] = self._first_ids, [] if self._first_ids else parts[0]
        elif self._bos:
            first_ids = self._first_ids
        spelled = [i for part in parts for i in part]
        first = 0 if first_ids else len(parts[0])
        first_ids = [*first_ids, *self.teacher.encode(context).ids.tolist()]
        before, after = self._to_teacher([spelled[:first], spelled[first:]], begins=[False, False])
        teacher_ids = [*first_ids, *before, *after]
        span = slice(0, len(spelled)), slice(len(first_ids), len(teacher_ids))
        return SharedText(
            np.array(ids, np.int32), np.array(spelled, np.int32), offsets_of([*map(len, parts)]),
            np.array(teacher_ids, np.int32), [span],
        )  # fmt: skip

    def _as_text(self, token_id: int) -> list[int]:
        table = self.student.table
        if table.lengths[token_id] > 0 or token_id in self._roles:
            return [token_id]
        if token_id not in self._texts:
            name = table.control_names.get(token_id) or table.name(token_id)
            self._texts[token_id] = self.student.segment(name)
        return self._texts[token_id]

    # Predictions

    def teacher_positions(
        self, texts: Sequence[SharedText], predictions: TopK
    ) -> NDArray[np.int64]:
        """Return the teacher token in which each token of `spelled` starts; −1 if unknown."""
        spelled = _spelled_ids(texts)
        student_indices, student = _in_spans(texts, 0, spelled)
        teacher_indices, teacher = _in_spans(texts, 1, FlatIds(*predictions[:2]))
        within = self._projector.positions(student, teacher)
        positions = np.full(len(spelled.ids), -1)
        positions[student_indices] = np.append(teacher_indices, -1)[within.position]
        return positions

    def project(self, texts: Sequence[SharedText], predictions: TopK, top_k: int) -> TopK:
        """Return predictions for the tokens in `spelled`, with one document per text.

        The first row of each document is empty, because a student has no logits before the first
        token.

        Args:
            texts: texts in the tokens of both sides.
            predictions: the teacher's checked predictions for the `teacher_ids` of each text.
            top_k: maximum number of candidates per row.
        """
        topk = self._project(texts, predictions, top_k)
        rows = np.arange(len(topk.token_ids))
        rows[document_starts(topk.bounds)] = -1
        return take_rows(topk, rows, topk.token_ids, topk.bounds)

    def project_whole(self, text: SharedText, predictions: TopK, top_k: int) -> TopK:
        """Return predictions for a text, with a log-probability for each token except the first.

        Unlike `project`, this includes the log-probabilities of tokens that only one side's
        template writes, so the total equals the teacher's total.
        """
        topk = self._project([text], predictions, top_k)
        _share_gaps(topk.realized_logprob, text, predictions)
        # The spelling of token i is spelled[starts[i]:starts[i + 1]]. The spelling is empty if the
        # token's name is empty.
        parts = segment_ids(text.starts)
        rows = np.where(np.diff(text.starts) > 0, text.starts[:-1], -1)
        rows[0] = -1
        whole = take_rows(topk, rows, text.ids, np.array([0, len(text.ids)]))
        realized = np.bincount(parts, topk.realized_logprob, len(text.ids)).astype(np.float32)
        realized[0] = np.nan
        return _at_most_one(whole._replace(realized_logprob=realized))

    def _project(self, texts: Sequence[SharedText], predictions: TopK, top_k: int) -> TopK:
        spelled = _spelled_ids(texts)
        student_indices, student = _in_spans(texts, 0, spelled)
        teacher_indices, teacher = _in_spans(texts, 1, FlatIds(*predictions[:2]))
        shared = take_rows(predictions, teacher_indices, *teacher)
        projected = self._projector.project(shared, *student, top_k)
        rows = np.full(len(spelled.ids), -1)
        rows[student_indices] = np.arange(len(student_indices))
        return take_rows(projected, rows, *spelled)


def _spelled_ids(texts: Sequence[SharedText]) -> FlatIds:
    bounds = offsets_of([len(text.spelled) for text in texts])
    return FlatIds(_concat(text.spelled for text in texts), bounds)


def _in_spans(
    texts: Sequence[SharedText], side_index: Literal[0, 1], flat: FlatIds
) -> tuple[NDArray[np.int64], FlatIds]:
    """Return the positions of the tokens that are in spans, and the spans as documents."""
    ranges = [
        np.arange(offset + span[side_index].start, offset + span[side_index].stop)
        for text, offset in zip(texts, flat.bounds.tolist(), strict=False)
        for span in text.spans
    ]
    positions = _concat(ranges, np.int64)
    return positions, FlatIds(flat.ids[positions], offsets_of([*map(len, ranges)]))


def _concat(arrays: Iterable[NDArray[Any]], dtype: type = np.int32) -> NDArray[Any]:
    return np.concatenate([*arrays, np.zeros(0, dtype)])


def _share_gaps(logprobs: NDArray[np.float32], text: SharedText, predictions: TopK) -> None:
    """Between spans, divide the teacher's log-probability equally among student tokens, in place.

    `logprobs` contains a value for each token in `spelled`. Student tokens get 0 if there are no
    teacher tokens between the same spans.
    """
    teacher_logprobs = predictions.realized_logprob.copy()
    teacher_logprobs[text.teacher_only] = np.nan
    # A gap starts at the end of a span, and ends at the start of the next span. The first gap
    # starts at the student's token 1, because token 0 has no log-probability.
    starts = [(1, 0), *((s.stop, t.stop) for s, t in text.spans)]
    ends = [*((s.start, t.start) for s, t in text.spans), (len(logprobs), len(teacher_logprobs))]
    for (start, t_start), (end, t_end) in zip(starts, ends, strict=True):
        if start < end:
            logprobs[start:end] = np.nansum(teacher_logprobs[t_start:t_end]) / (end - start)


def _at_most_one(topk: TopK) -> TopK:
    """Scale the candidates so that each row, including its realized token, sums to at most 1."""
    row_ids = segment_ids(topk.starts)
    p = np.exp(topk.logprobs, dtype=np.float64) * (topk.ids == topk.token_ids[row_ids])
    others = 1 - np.bincount(row_ids, p, len(topk.token_ids))
    room = 1 - np.exp(topk.realized_logprob, dtype=np.float64)
    ratio = np.maximum(MIN_REST, room) / np.maximum(MIN_REST, others)
    factor = np.log(np.nan_to_num(np.minimum(1.0, ratio), nan=1.0))
    return topk._replace(
        logprobs=(topk.logprobs + factor[row_ids]).astype(np.float32),
        rest_logprob=(topk.rest_logprob + factor).astype(np.float32),
    )
