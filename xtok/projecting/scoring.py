"""A student's sequences in the teacher's tokens, and the teacher's answer on the student's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.retokenize import Retokenizer
from xtok.maps.projection_map import ProjectionMap
from xtok.pairs import Pair
from xtok.predictions.ranked import LEAST_REST, Scores
from xtok.predictions.topk import TopK, chosen_rows, joined, rows_of, within
from xtok.projecting.project import Projector
from xtok.projecting.rows import StudentSequence, Templates, of_conversation
from xtok.ragged import bounds_of


class Scorer:
    """Spells sequences for the teacher, and projects its answers.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: from the teacher (rows) to the student (columns), as `Projector` takes it.
        num_threads: one per available core if None.
        chat: read conversations back from ids, where both sides have a chat template.
        templates: of the student and the teacher, as `conversation.render` takes them.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        num_threads: int | None = None,
        *,
        chat: bool = True,
        templates: Templates = (None, None),
    ) -> None:
        self.student, self.teacher = pair.tokenizers
        self._pair, self.is_same = pair, pair.is_same
        self._projector = Projector(pair, back_map, num_threads)
        self._retokenizer = Retokenizer(pair, exact=True)
        self._roles = pair.equal_roles
        has_templates = (
            template or tokenizer.chat_templates
            for template, tokenizer in zip(templates, pair.tokenizers, strict=True)
        )
        self._templates = templates if chat and all(has_templates) else None
        self._has_bytes = self.student.table.lengths > 0
        self._texts: dict[int, list[int]] = {}
        roles = self.teacher.table.roles
        self._bos = roles.get("bos", ())
        ends = [i for i in roles.get("eos", ()) if i not in roles.get("turn_end", ())]
        self._begin = [*self._bos, *ends, *roles.get("eos", ())][:1]

    @functools.cached_property
    def pieces_per_token(self) -> float:
        """Return how many of the teacher's tokens spell one of the student's, on average.

        Over the vocabulary, whose rare tokens have more than those of most texts.
        """
        tokens = [self.student.table[i] for i in self.student.table.text_ids.tolist()]
        sizes = [len(ids) for ids in self.teacher.segment_batch(tokens) if ids]
        return max(1.0, sum(sizes) / max(1, len(sizes)))

    def spell(self, ids: Sequence[int]) -> StudentSequence:
        """Return a sequence as the teacher reads it.

        A conversation that the ids certainly are of is rendered by the teacher's own chat template.
        Anything else is spelled byte for byte.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
        """
        if self.is_same:
            own, whole = np.array(ids, np.int32), slice(0, len(ids))
            return StudentSequence.of(own, own, [(whole, whole)])
        chat = None
        if self._templates is not None:
            chat = of_conversation(self._pair, ids, 0, self._templates, ends_too=True)
        return chat or self._of_text(ids)

    def _of_text(self, ids: Sequence[int]) -> StudentSequence:
        """Spell a sequence byte for byte.

        A token without bytes and without a counterpart is spelled as its name, one whose
        counterpart is text as that text: so it has an honest value. The teacher's sequence begins
        with its bos; for a student's bos where it has none, with what ends its documents; else the
        first token is spelled by itself, so that the teacher predicts all that follow.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
        """
        parts = [[i] if self._is_text(i) else self._text_of(i) for i in ids]
        begin: list[int] = []
        if ids[0] in self.student.table.roles.get("bos", ()):
            if ids[0] not in self._roles and self._begin:
                begin, parts[0] = self._begin, []
        elif self._bos:
            begin = self._begin
        plain = [i for part in parts for i in part]
        first = 0 if begin else len(parts[0])
        stretches = self._retokenizer([plain[:first], plain[first:]])
        teacher_ids = [*begin, *stretches[0], *stretches[1]]
        span = slice(0, len(plain)), slice(len(begin), len(teacher_ids))
        return StudentSequence(
            np.array(ids, np.int32), np.array(plain, np.int32), bounds_of([*map(len, parts)]),
            np.array(teacher_ids, np.int32), [span],
        )  # fmt: skip

    def _is_text(self, token_id: int) -> bool:
        """Whether the teacher reads a token as its bytes, or as a control token of its own."""
        is_control = self._roles.get(token_id) in self.teacher.table.control_names
        return bool(self._has_bytes[token_id]) or is_control

    def _text_of(self, token_id: int) -> list[int]:
        """Return the student's tokens of what stands for a token in a text."""
        if token_id not in self._texts:
            table, text = self.student.table, b""
            if token_id in self._roles:  # a counterpart that is text, as Qwen's <tool_call>
                text = self.teacher.table[self._roles[token_id]]
            name = table.control_names.get(token_id) or table.name(token_id)
            self._texts[token_id] = self.student.segment(text or name)
        return self._texts[token_id]

    def score(
        self, spelled: Sequence[StudentSequence], answers: Sequence[Scores], top_k: int
    ) -> list[Scores]:
        """Project a teacher's answers to some sequences; of equal tokenizers they stay the same.

        But for ids beyond the student's width, which a wider teacher's padding has.

        Args:
            spelled: the sequences.
            answers: what the teacher says of the `teacher_ids` of each.
            top_k: the most candidates of a row.
        """
        if self.is_same:
            width = self.student.vocabulary.vocab_size
            if all((answer.topk.ids < width).all() for answer in answers):
                return list(answers)
            cut = [within(answer.topk, width) for answer in answers]
            return [Scores(topk, _ranks(topk)) for topk in cut]
        bounds = bounds_of([len(one.plain) for one in spelled])
        plain = np.concatenate([one.plain for one in spelled])
        given = joined([answer.topk for answer in answers])
        spans = [one.spans for one in spelled]
        projected, row_of = self._projector.project_spans(given, plain, bounds, spans, top_k)
        row_of = np.append(row_of, -1)
        own = np.append(projected.realized_logprob, np.float32(np.nan))[row_of]
        scores = []
        for one, answer, begin in zip(spelled, answers, bounds.tolist(), strict=False):
            is_there = np.diff(one.begins) > 0
            rows = np.where(is_there, row_of[begin + one.begins[:-1]], -1)
            rows[0] = -1  # as servers have it
            topk = chosen_rows(projected, rows, one.ids, np.array([0, len(one.ids)]))
            values = own[begin : begin + len(one.plain)]
            _share_gaps(values, one, answer.topk.realized_logprob)
            sums = np.bincount(rows_of(one.begins), values, len(one.ids)).astype(np.float32)
            sums[0] = np.nan
            topk = _at_most_one(topk._replace(realized_logprob=sums))
            scores.append(Scores(topk, _ranks(topk)))
        return scores


def _share_gaps(
    values: NDArray[np.float32], spelled: StudentSequence, told: NDArray[np.float32]
) -> None:
    """Share what the teacher gives to its own template among the student's tokens of its own.

    So these are finite, and sums of whole sequences are the teacher's. What only the student's
    template writes is certain.
    """
    ends = [(1, 0), *((ours.stop, theirs.stop) for ours, theirs in spelled.spans)]
    begins = [(ours.start, theirs.start) for ours, theirs in spelled.spans]
    for (a, c), (b, d) in zip(ends, [*begins, (len(values), len(told))], strict=True):
        if a < b:
            values[a:b] = np.nansum(told[c:d]) / (b - a)


def _at_most_one(topk: TopK) -> TopK:
    """Return predictions whose other candidates leave room for the token itself.

    Of a chunk of several tokens, a row's own part of its token may be less than its value.
    """
    row_of = rows_of(topk.starts)
    p = np.exp(topk.logprobs, dtype=np.float64) * (topk.ids == topk.token_ids[row_of])
    others = 1 - np.bincount(row_of, p, len(topk.token_ids))
    room = 1 - np.exp(topk.realized_logprob, dtype=np.float64)
    ratio = np.maximum(LEAST_REST, room) / np.maximum(LEAST_REST, others)
    factor = np.log(np.nan_to_num(np.minimum(1.0, ratio), nan=1.0))
    return topk._replace(
        logprobs=(topk.logprobs + factor[row_of]).astype(np.float32),
        rest_logprob=(topk.rest_logprob + factor).astype(np.float32),
    )


def _ranks(topk: TopK) -> NDArray[np.int64]:
    """Return the rank of each token among the candidates of its row."""
    row_of = rows_of(topk.starts)
    is_better = topk.logprobs > topk.realized_logprob[row_of]
    is_better &= topk.ids != topk.token_ids[row_of]
    return np.bincount(row_of, is_better, len(topk.token_ids)).astype(np.int64) + 1
