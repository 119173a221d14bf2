"""Facts about a pair: common tokens of the vocabularies, and measures on text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xtok._lib.progress import Progress, silent
from xtok.building.counting.smoothing import entropy_kept, entropy_of, share_of
from xtok.maps.spellings import UNUSED, SpellingMap
from xtok.tokenizers.classes import num_digits
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType, differing_ids

_EXAMPLES = 3

if TYPE_CHECKING:
    from xtok.building.counting.pair_text import LeftOut, PairText
    from xtok.inspection.results import Grade


@dataclass(frozen=True)
class SharedCounts:
    """Numbers of items (strings or tokens): in the student, in the teacher, and in both."""

    student: int
    teacher: int
    both: int

    @property
    def only_student(self) -> int:
        """The number of items that only the student has."""
        return self.student - self.both

    @property
    def only_teacher(self) -> int:
        """The number of items that only the teacher has."""
        return self.teacher - self.both


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """The results of measuring a pair on a text."""

    files: tuple[str, ...]
    num_bytes: int
    tokens: SharedCounts  # `both`: number of equal tokens at the same offset
    partner_shares: tuple[float, float]  # share of tokens that have a partner with equal bytes
    boundaries: int  # number of shared token boundaries
    leak: float  # share of boundaries at which a shared token meets a different token
    bits: tuple[float, float]  # entropy of a partition into shared tokens and a rest
    num_events: int  # of the pair's event map; `EventMapMeasures` explains leak and kept
    event_leak: float
    event_kept: float
    # In bits, at boundaries: entropy of the teacher's token given the student's, and the reverse.
    conditional_entropy: tuple[float, float]
    left_out: LeftOut | None  # text for which the two sides differ

    @property
    def grade(self) -> Grade:
        """A grade for the share of text that the two tokenizers spell with different bytes."""
        share = 0.0 if self.left_out is None else self.left_out.share
        return "bad" if share > 0.05 else "usable" if share > 0.005 else "note"


@dataclass(frozen=True, kw_only=True)
class SpellingFacts:
    """Counts for CSD: tokens of one vocabulary that the other vocabulary can spell."""

    shared: int  # number of tokens paired one to one with a token of the other side
    spelled: int  # number of tokens with several pieces
    left_out: Mapping[str, int]  # tokens without a spelling by reason, except unused ids

    def __str__(self) -> str:
        words = f"{self.shared:,} shared, {self.spelled:,} spelled"
        reasons = ", ".join(f"{count:,} ({reason})" for reason, count in self.left_out.items())
        return f"{words}; left out: {reasons or 'none'}"

    @staticmethod
    def of(spellings: SpellingMap, side: str) -> SpellingFacts:
        """Count the tokens of one side."""
        left_out = spellings.left_out(side)
        return SpellingFacts(
            shared=len(spellings.shared[0]),
            spelled=int((getattr(spellings, f"{side}_counts") > 1).sum()),
            left_out={why: len(ids) for why, ids in left_out.items() if len(ids) and why != UNUSED},
        )


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """The tokens that two vocabularies have in common, and results on a text."""

    student: str
    teacher: str
    same: bool  # whether every id stands for the same token on both sides
    num_ids: int  # number of ids up to the last token; higher ids are padding
    differing: int  # number of ids with different tokens on the two sides
    differing_examples: tuple[str, ...]  # first of these ids, with both tokens
    vocabulary: SharedCounts  # number of distinct byte strings
    shared: int  # number of student tokens for which a teacher token has equal bytes
    student_share: float  # `shared`, divided by the number of the student's text tokens
    numbers: SharedCounts  # multi-digit tokens; `both`: tokens with equal bytes
    # share of the text's student tokens that are multi-digit numbers without a partner
    missing_numbers_text: float | None
    roles_alone: tuple[str, ...]  # roles without a counterpart, except `reserved`
    text: TextFacts | None
    # for student and teacher; None if the vocabularies are equal or there are no tokenizers
    spellings: tuple[SpellingFacts, SpellingFacts] | None = None


def pair_facts(
    pair: Pair, text: PairText | None = None, *, progress: Progress = silent
) -> PairFacts:
    """Compare two vocabularies, and measure the pair and its events on a text."""
    from xtok.building.spellings import spellings  # not needed by `verify`

    (student, teacher), is_equal = pair.tables, pair.equal_bytes >= 0
    differing = differing_ids(student, teacher)
    numbers = [num_digits(table) > 1 for table in pair.tables]  # multi-digit numbers
    strings = student.canonical_ids().keys(), teacher.canonical_ids().keys()
    alone = (r for r, ids in student.roles.items() if not (pair.partners[list(ids)] >= 0).any())
    spelled = missing_text = None
    if text is not None:
        missing_text = share_of(text.tokens[0], numbers[0] & ~is_equal)
    if pair.teacher_tokenizer is not None and not pair.is_same:
        spelling = spellings(pair, progress=progress)
        spelled = (SpellingFacts.of(spelling, "student"), SpellingFacts.of(spelling, "teacher"))
    return PairFacts(
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        same=pair.is_same,
        num_ids=max(int(np.flatnonzero(t.types != TokenType.UNUSED)[-1]) + 1 for t in pair.tables),
        differing=len(differing),
        differing_examples=tuple(
            f"{i} {student.quoted(i)} / {teacher.quoted(i)}" for i in differing[:_EXAMPLES]
        ),
        vocabulary=SharedCounts(len(strings[0]), len(strings[1]), len(strings[0] & strings[1])),
        shared=int(is_equal.sum()),
        student_share=int(is_equal.sum()) / max(1, len(student.text_ids)),
        numbers=SharedCounts(*(int(x.sum()) for x in (*numbers, numbers[0] & is_equal))),
        missing_numbers_text=missing_text,
        roles_alone=tuple(role for role in alone if role != "reserved"),
        text=None if text is None else _text_facts(pair, text, progress),
        spellings=spelled,
    )


def _text_facts(pair: Pair, text: PairText, progress: Progress) -> TextFacts:
    from xtok.building.events import events  # `verify` and `inspect` do not need it

    keys, amounts = text.pairs
    s, t = keys >> 32, keys & 0xFFFFFFFF
    a, b = pair.shared[0][s], np.where(pair.shared[1][t] >= 0, t, -1)
    event_map = events(pair, progress=progress)
    s_events, t_events = event_map.student_event[s], event_map.teacher_event[t]
    joint = entropy_of(keys, amounts)
    equal = int(amounts[(a >= 0) & (a == b)].sum())
    return TextFacts(
        files=tuple(source.name for source in text.sources),
        num_bytes=text.totals.num_bytes,
        tokens=SharedCounts(int(text.tokens[0].sum()), int(text.tokens[1].sum()), equal),
        partner_shares=(
            share_of(text.tokens[0], pair.equal_bytes >= 0),
            share_of(text.tokens[1], pair.reversed.equal_bytes >= 0),
        ),
        boundaries=int(amounts.sum()),
        leak=share_of(amounts, a != b),
        bits=(entropy_of(a, amounts), entropy_of(b, amounts)),
        num_events=event_map.num_events,
        event_leak=share_of(amounts, s_events != t_events),
        event_kept=entropy_kept((s_events, t_events), (s, t), amounts),
        conditional_entropy=(joint - entropy_of(s, amounts), joint - entropy_of(t, amounts)),
        left_out=text.left_out,
    )
