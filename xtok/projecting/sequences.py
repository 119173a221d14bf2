"""A text in the tokens of both sides: what the ids of one are on the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.chats import written_alike
from xtok.conversation import read_back
from xtok.errors import XtokError
from xtok.pairs import Pair

Templates = tuple[str | Path | None, str | Path | None]
"""The student's and the teacher's, as `conversation.render` takes them."""


class StudentSequence(NamedTuple):
    """A text in the student's tokens and in the teacher's."""

    ids: NDArray[np.int32]  # [S], the student's
    plain: NDArray[np.int32]  # [P], the same with tokens that the teacher lacks as their text
    begins: NDArray[np.int64]  # [S + 1], where each token's part of `plain` begins
    teacher_ids: NDArray[np.int32]  # [T]
    spans: list[tuple[slice, slice]]  # of `plain` and of the teacher's ids, that spell the same
    mask: NDArray[np.bool_] | None = None  # [S], what the assistant wrote; None: no conversation

    @classmethod
    def of(
        cls,
        ids: NDArray[np.int32],
        teacher_ids: NDArray[np.int32],
        spans: list[tuple[slice, slice]],
        mask: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Return a sequence of tokens that the teacher reads as they are."""
        return cls(ids, ids, np.arange(len(ids) + 1), teacher_ids, spans, mask)


def of_conversation(
    pair: Pair,
    ids: Sequence[int],
    given: Literal[0, 1],
    templates: Templates,
    *,
    ends_too: bool,
) -> StudentSequence | None:
    """Return the conversation that one side's ids surely are of, as both sides' templates have it.

    None if they are of none, or the other side's template leaves out or changes what the assistant
    wrote. Behind the last words that both have, one that breaks off goes no further on the other
    side.

    Args:
        pair: the student and the teacher, with their tokenizers.
        ids: of a side, perhaps broken off.
        given: whose they are: 0 for the student's, 1 for the teacher's.
        templates: of both.
        ends_too: whether the other side must have the ends of the assistant's turns as well.

    Raises:
        XtokError: if the side whose ids these are has no template.
    """
    told = read_back(pair.tokenizers[given], ids, template=templates[given])
    if told is None:
        return None
    own = told.conversation
    try:
        other = told.render(pair.tokenizers[1 - given], templates[1 - given])
    except XtokError:  # a template that refuses a role, or tools
        return None
    ours, theirs = (own, other) if given == 0 else (other, own)
    spans = written_alike(ours, theirs, pair.equal_roles)
    is_shared = np.zeros(len(own.ids), np.bool_)
    for both in spans:
        is_shared[both[given]] = True
        student, teacher = (
            b"".join(table[i] for i in side.ids[span].tolist())
            for table, side, span in zip(pair.tables, (ours, theirs), both, strict=True)
        )
        if student != teacher:
            return None
    needed = own.assistant_mask
    if not ends_too:
        needed = needed & (pair.tables[given].lengths[own.ids] > 0)
    if not spans or (needed & ~is_shared).any():
        return None
    last = spans[-1]
    our_end, their_end = len(ours.ids), len(theirs.ids)
    if given == 0 and last[0].stop == our_end:  # the teacher is asked for no more
        their_end = last[1].stop
    if given == 1 and own.bounds[-1] < len(own.text.encode()):  # it breaks off
        our_end = last[0].stop
    mask = ours.assistant_mask[:our_end]
    return StudentSequence.of(ours.ids[:our_end], theirs.ids[:their_end], spans, mask)
