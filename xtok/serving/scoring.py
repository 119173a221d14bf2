"""A student's sequences in the teacher's tokens, and the teacher's answer on the student's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.retokenize import Retokenizer
from xtok.maps.projection_map import ProjectionMap
from xtok.projecting.project import Projector
from xtok.projecting.stored import TopK, bounds_of, chosen_rows, rows_of
from xtok.serving.answers import LEAST_REST, Scores
from xtok.vocab.pair import Pair


class Spelled(NamedTuple):
    """A student's sequence, and the same text in the teacher's tokens."""

    ids: NDArray[np.int32]  # [S], as it was asked for
    plain: NDArray[np.int32]  # [P], the same with tokens that the teacher lacks as their text
    begins: NDArray[np.int64]  # [S + 1], where each token's part of `plain` begins
    teacher_ids: list[int]
    spans: list[tuple[slice, slice]]  # of `plain` and of the teacher's ids, that spell the same


class Scorer:
    """Spells sequences for the teacher, and projects its answers.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: from the teacher (rows) to the student (columns), as `Projector` takes it.
        num_threads: one per available core if None.
    """

    def __init__(self, pair: Pair, back_map: ProjectionMap, num_threads: int | None = None) -> None:
        self.student, self.teacher = pair.tokenizers
        self.is_same = pair.is_same
        self._projector = Projector(pair, back_map, num_threads)
        self._retokenizer = Retokenizer(pair, exact=True)
        self._roles = pair.equal_roles
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

    def spell(self, ids: Sequence[int]) -> Spelled:
        """Spell a sequence for the teacher, byte for byte.

        A token without bytes and without a counterpart is spelled as its name, so that it has an
        honest value. The teacher's sequence begins with its bos; for a student's bos where it has
        none, with what ends its documents; else the first token is spelled by itself, so that the
        teacher predicts all that follow.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the text.
        """
        if self.is_same:
            whole = slice(0, len(ids))
            own = np.array(ids, np.int32)
            return Spelled(own, own, np.arange(len(ids) + 1), list(ids), [(whole, whole)])
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
        return Spelled(
            np.array(ids, np.int32), np.array(plain, np.int32), bounds_of([*map(len, parts)]),
            teacher_ids, [span],
        )  # fmt: skip

    def _is_text(self, token_id: int) -> bool:
        """Whether the teacher reads a token as its bytes, or as a token of the same role."""
        return bool(self._has_bytes[token_id]) or token_id in self._roles

    def _text_of(self, token_id: int) -> list[int]:
        """Return the student's tokens of the name of a token."""
        if token_id not in self._texts:
            table = self.student.table
            name = table.control_names.get(token_id) or table.name(token_id)
            self._texts[token_id] = self.student.segment(name)
        return self._texts[token_id]

    def score(
        self, spelled: Sequence[Spelled], answers: Sequence[Scores], top_k: int
    ) -> list[Scores]:
        """Project a teacher's answers to some sequences; of equal tokenizers they stay the same.

        Args:
            spelled: the sequences.
            answers: what the teacher says of the `teacher_ids` of each.
            top_k: the most candidates of a row.
        """
        if self.is_same:
            return list(answers)
        bounds = bounds_of([len(one.plain) for one in spelled])
        plain = np.concatenate([one.plain for one in spelled])
        given = joined([answer.topk for answer in answers])
        spans = [one.spans for one in spelled]
        projected, row_of = self._projector.project_spans(given, plain, bounds, spans, top_k)
        row_of = np.append(row_of, -1)
        own = np.append(projected.realized_logprob, np.float32(np.nan))[row_of]
        scores = []
        for one, begin in zip(spelled, bounds.tolist(), strict=False):
            is_there = np.diff(one.begins) > 0
            rows = np.where(is_there, row_of[begin + one.begins[:-1]], -1)
            rows[0] = -1  # as servers have it
            topk = chosen_rows(projected, rows, one.ids, np.array([0, len(one.ids)]))
            values = own[begin : begin + len(one.plain)]
            sums = np.bincount(rows_of(one.begins), values, len(one.ids)).astype(np.float32)
            sums[0] = np.nan
            topk = _at_most_one(topk._replace(realized_logprob=sums))
            scores.append(Scores(topk, _ranks(topk)))
        return scores


def joined(topks: Sequence[TopK]) -> TopK:
    """Return the documents of several predictions as one."""
    sizes = zip(*((np.diff(topk.bounds), np.diff(topk.starts)) for topk in topks), strict=True)
    bounds, starts = (bounds_of(np.concatenate(of_all)) for of_all in sizes)
    columns = [np.concatenate(column) for column in zip(*topks, strict=True)]
    return TopK(columns[0], bounds, starts, *columns[3:])


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
