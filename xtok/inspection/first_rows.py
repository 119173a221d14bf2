"""The first rows of a run's data: ids and masks beside the libraries', and what is aligned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.aligner import AlignmentBatch
from xtok.conversation.teacher_side import SideChat, SideText
from xtok.inspection.chat_audit import ChatAudit, audit_chats
from xtok.tokenizers import Tokenizer, library_differences
from xtok.tokenizers.display import plural

ENOUGH = 0.5
"""The share of targets in chunks, and of chunks with equal bytes, below which a pair is doubtful.
Pairs of the tests have 0.9 and more; uncased and Unicode-normalizing sides have less."""

_SHOWN = 3


def side_differences(
    tokenizer: Tokenizer,
    samples: Sequence[SideText | SideChat],
    rows: Sequence[Sequence[int]],
    *,
    template: str | Path | None = None,
) -> list[str]:
    """Say where the ids, roles and masks of one side differ from those of its library.

    Args:
        tokenizer: of this side.
        samples: what it reads. Texts with a context are not compared: no library has them.
        rows: the ids of each sample in a batch, maybe cut.
        template: the side's chat template, if not its tokenizer's own.
    """
    of_texts = {
        number: sample.text
        for number, sample in enumerate(samples)
        if isinstance(sample, SideText) and not sample.context
    }
    differences = library_differences(
        tokenizer, [*of_texts.values()], [rows[number] for number in of_texts]
    )
    if chats := [sample.chat for sample in samples if isinstance(sample, SideChat)]:
        differences += chat_differences(audit_chats(tokenizer, chats, template=template))
    more = [f"{len(differences) - _SHOWN} more like these"] if len(differences) > _SHOWN else []
    name = tokenizer.vocabulary.model_id
    return [f"{name}: {line}" for line in (*differences[:_SHOWN], *more)]


def chat_differences(chats: ChatAudit) -> list[str]:
    """Say where conversations differ from what the library makes of them."""
    others = ("", chats.other_ids), ("the targets of ", chats.other_masks)
    lines = [
        f"{what}conversation {row} {'are' if what else 'is'} {both}"
        for what, rows in others
        for row, both in (rows or {}).items()
    ]
    return [*lines, *chats.errors]


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """How much of some rows the student can learn from one teacher; all are counts."""

    targets: int  # of the student's tokens, those that it learns
    in_chunks: int  # of these
    chunks: int
    equal: int  # of these, with the same bytes on both sides, or a role that both have
    ends: int  # targets that end a turn or a text
    ends_in_chunks: int
    begins: int  # rows that begin with bos on both sides, where that is a target
    begins_in_chunks: int

    @property
    def share(self) -> float:
        """The targets that are in a chunk, of all."""
        return self.in_chunks / max(1, self.targets)

    def differences(self) -> Iterator[str]:
        """Say what a student would not learn from this teacher."""
        if not self.targets:
            yield "there is no target: the student learns nothing of these rows"
            return
        if self.share < ENOUGH:
            yield f"{self.in_chunks} of {self.targets} targets are in a chunk with the teacher"
        if self.equal < ENOUGH * self.chunks:
            yield f"{self.equal} of {self.chunks} chunks have the same bytes on both sides"
        if self.ends_in_chunks < ENOUGH * self.ends:
            what = "ends of turns or texts are in a chunk: the student does not learn to stop"
            yield f"{self.ends_in_chunks} of {self.ends} {what}"
        if self.begins_in_chunks < self.begins:
            yield f"{self.begins_in_chunks} of {plural(self.begins, 'bos token')} are in a chunk"


def aligned(
    tokenizers: tuple[Tokenizer, Tokenizer],
    labels: NDArray[Any],
    teacher_ids: NDArray[Any],
    alignment: AlignmentBatch,
) -> Aligned:
    """Count what is aligned in a batch.

    Args:
        tokenizers: the student's and the teacher's.
        labels: the student's, of the tokens themselves, `[B, T_s]`; below 0 for no target.
        teacher_ids: `[B, T_t]`.
        alignment: of arrays, not shifted.
    """
    chunk, valid, correct = (
        np.asarray(x)
        for x in (alignment.student_chunk_id, alignment.pair_valid, alignment.pair_is_correct)
    )
    student, teacher = tokenizers
    inside = (chunk >= 0) & np.take_along_axis(valid, np.maximum(chunk, 0), axis=1)
    is_target = labels >= 0
    ends = np.isin(labels, [*_ids(student, "eos"), *_ids(student, "turn_end")])
    both_begin = np.isin(labels[:, 0], [*_ids(student, "bos")])
    both_begin &= np.isin(teacher_ids[:, 0], [*_ids(teacher, "bos")])
    ends[:, 0] = is_target[:, 0] = False  # nothing predicts the first
    return Aligned(
        targets=int(is_target.sum()),
        in_chunks=int((is_target & inside).sum()),
        chunks=int(valid.sum()),
        equal=int((valid & correct).sum()),
        ends=int(ends.sum()),
        ends_in_chunks=int((ends & inside).sum()),
        begins=int(both_begin.sum()),
        begins_in_chunks=int((both_begin & inside[:, 0]).sum()),
    )


def _ids(tokenizer: Tokenizer, role: str) -> Sequence[int]:
    return tokenizer.table.roles.get(role, ())
