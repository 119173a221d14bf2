"""`Pair`: a student's and a teacher's vocabulary, and all that follows from the two."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import XtokError
from xtok.vocab.relaxed import match_relaxed
from xtok.vocab.roles import match_roles
from xtok.vocab.table import SIDES as SIDES
from xtok.vocab.table import (
    TokenTable,
    Vocabulary,
    common_ids,
    decode_vocabulary,
    differing_ids,
    match_bytes,
    same_tokens,
)

if TYPE_CHECKING:
    from xtok.maps.events import EventMap
    from xtok.maps.projection_map import ProjectionMap
    from xtok.tokenizers import Tokenizer

M = TypeVar("M", bound="ProjectionMap | EventMap")


@dataclass(frozen=True, eq=False)
class Pair:
    """Two vocabularies, their tokenizers where they are known, and what both have in common.

    Each fact is computed when it is first asked for, and kept. The widths are those of both models'
    logits; `xtok.pair` makes a pair of two models, `of` one of maps.
    """

    student: Vocabulary
    teacher: Vocabulary
    student_tokenizer: Tokenizer | None = None
    teacher_tokenizer: Tokenizer | None = None

    @staticmethod
    def of(*maps: ProjectionMap | EventMap) -> Pair:
        """Return the pair of maps: a side is the first that carries tokens, else the first."""
        students, teachers = [m.student for m in maps], [m.teacher for m in maps]
        return Pair(_with_tokens(students), _with_tokens(teachers))

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Both tokenizers; a `ValueError` for a pair without them."""
        if self.student_tokenizer is None or self.teacher_tokenizer is None:
            raise ValueError("the pair has no tokenizers: make it with xtok.pair of both models")
        return self.student_tokenizer, self.teacher_tokenizer

    @functools.cached_property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        """Both token tables; an `XtokError` where a map of another program is all that is known."""
        return require_table(self.student), require_table(self.teacher)

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    @functools.cached_property
    def reversed(self) -> Pair:
        """The same pair with the teacher as the student; reversed again, it is this one."""
        other = Pair(self.teacher, self.student, self.teacher_tokenizer, self.student_tokenizer)
        vars(other)["reversed"] = self
        return other

    @functools.cached_property
    def equal_bytes(self) -> dict[int, int]:
        """For each student id whose bytes a teacher token has, that teacher id."""
        return match_bytes(*self.tables)

    @functools.cached_property
    def equal_roles(self) -> dict[int, int]:
        """For each special token of the student, the teacher's of the same role or name."""
        return match_roles(*self.tables)

    @functools.cached_property
    def near_equivalents(self) -> dict[int, int]:
        """Student ids without an exact counterpart, and teacher ids of the same relaxed form."""
        return match_relaxed(*self.tables)

    @functools.cached_property
    def common_ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The events of a strict shared vocabulary; see `table.common_ids`."""
        return common_ids(*self.tables)

    @functools.cached_property
    def differing_ids(self) -> list[int]:
        """The ids that are not the same token on both sides, rising; none for one vocabulary."""
        return differing_ids(*self.tables)

    @property
    def is_same(self) -> bool:
        """Whether both sides are one vocabulary, whatever their widths."""
        return not self.differing_ids

    def counterpart(self, student_id: int) -> int | None:
        """Return the teacher's token of the same role or bytes, if there is one."""
        return self.equal_roles.get(student_id, self.equal_bytes.get(student_id))

    def in_form(
        self, form: TokenForm, ignored: tuple[Collection[int], Collection[int]] = ((), ())
    ) -> Pair:
        """Return the pair in the form that tokens are compared in, some ids taken for UNUSED.

        Raises:
            XtokError: for display strings, which a map does not carry, without the tokenizers.
        """
        if form == "bytes" and not any(ignored):
            return self
        tables = [
            _in_form(table, tokenizer, form, frozenset(ids))
            for table, tokenizer, ids in zip(
                self.tables, (self.student_tokenizer, self.teacher_tokenizer), ignored, strict=True
            )
        ]
        student, teacher = (
            replace(v, table=t) for v, t in zip((self.student, self.teacher), tables, strict=True)
        )
        return replace(self, student=student, teacher=teacher)

    def at_widths_of(self, projection: ProjectionMap | EventMap) -> Pair:
        """Return the pair as wide as a map of it, where the map tells and no option says other."""
        changed: dict[str, Any] = {}
        for side in SIDES:
            ours, tokenizer = getattr(self, side), getattr(self, f"{side}_tokenizer")
            width = _shared_width(getattr(projection, side), ours)
            if width == ours.vocab_size:
                continue
            if tokenizer is not None:
                changed[f"{side}_tokenizer"] = tokenizer = tokenizer.at_width(width)
                changed[side] = tokenizer.vocabulary
            elif ours.table is not None:
                table = ours.table.at_width(width)
                changed[side] = replace(ours, vocab_size=width, width_source="option", table=table)
        return replace(self, **changed) if changed else self

    def admit(self, projection: M, *, name: str = "the map") -> M:
        """Check that a map is of this pair; a side of it without tokens takes the pair's.

        Args:
            projection: a map or an event map.
            name: what errors call the map.

        Raises:
            XtokError: naming the map and the side whose tokens or width differ, and how.
        """
        for side in SIDES:
            ours: Vocabulary = getattr(projection, side)
            theirs: Vocabulary = getattr(self, side)
            if ours is theirs:
                continue
            is_known = ours.table is not None and theirs.table is not None
            if is_known and not same_tokens(ours.table, theirs.table):
                raise self._other_tokens(side, projection, name)
            same = ours.vocab_size == theirs.vocab_size
            if not (same or can_grow(ours, theirs) or can_grow(theirs, ours)):
                raise _other_width(side, ours, theirs, f"{name} ({ours.model_id})")
            if ours.table is None and theirs.vocab_size >= ours.vocab_size:
                if theirs.table is not None:
                    ours = theirs
                elif ours.width_source == "ids":
                    ours = replace(
                        ours, vocab_size=theirs.vocab_size, width_source=theirs.width_source
                    )
                if ours is not getattr(projection, side):
                    made: Any = projection  # no event map, which has the tokens of both sides
                    projection = made.with_side(side, ours)
        return projection

    def is_swapped(self, projection: ProjectionMap | EventMap) -> bool:
        """Whether a map is not of this pair, but of the same two the other way round."""
        ours, theirs = projection.student.table, projection.teacher.table
        student, teacher = self.student.table, self.teacher.table
        crossed = same_tokens(ours, teacher) and same_tokens(theirs, student)
        return ours is not None and theirs is not None and crossed and not self.is_same

    def name_notes(self, projection: ProjectionMap | EventMap) -> list[str]:
        """Return a note for each side of a map without tokens that names another model.

        Only their widths can be compared then.
        """
        notes = []
        for side in SIDES:
            ours, given = getattr(projection, side), getattr(self, side)
            names = [v.model_id.rstrip("/").rpartition("/")[2].lower() for v in (ours, given)]
            if ours.table is None and names[0] not in (names[1], "unknown"):
                notes.append(
                    f"the map says that its {side} is {ours.model_id}; it has no tokens to "
                    f"compare, and is taken for {given.model_id}'s"
                )
        return notes

    def _other_tokens(self, side: str, projection: Any, name: str) -> XtokError:
        ours, theirs = getattr(projection, side), getattr(self, side)
        problem = f"the {side} of {name} ({ours.model_id}) has other tokens than {theirs.model_id}"
        hint = "give the models, or the maps, of one pair, student first; xtok inspect shows the "
        hint += "pair of a map"
        if self.is_swapped(projection):
            problem = (
                f"the sides are swapped: {name} is of the student {ours.model_id} and the "
                f"teacher {projection.teacher.model_id}"
            )
            hint = "give the student first, as the map has them, or build the map the other way"
        return XtokError(problem, hint=hint)


def _with_tokens(sides: Sequence[Vocabulary]) -> Vocabulary:
    return next((side for side in sides if side.table is not None), sides[0])


def require_table(vocabulary: Vocabulary) -> TokenTable:
    """Return the tokens of a side, or raise an `XtokError` if the map carries none."""
    if vocabulary.table is None:
        raise XtokError(
            f"the map carries no tokens of {vocabulary.model_id}: xtok did not write it",
            hint="give both models, the student's with {option}",
            parameter="student_model",
        )
    return vocabulary.table


def _in_form(
    table: TokenTable, tokenizer: Tokenizer | None, form: TokenForm, ignored: Collection[int]
) -> TokenTable:
    if tokenizer is not None:
        return tokenizer.table_as(form, ignore=ignored)
    if form == "raw":
        raise XtokError(
            "the map was made with the token form raw, and carries no display strings",
            hint="give both models, the student's with {option}",
            parameter="student_model",
        )
    if form == "bytes" and not ignored:
        return table
    changed, _ = decode_vocabulary(table.entries(), width=len(table), form=form, ignore=ignored)
    return changed.like(table)


def _other_width(side: str, ours: Vocabulary, other: Vocabulary, what: str) -> XtokError:
    hint = "give the map of this pair; xtok inspect shows the pair of a map"
    fits = _tokens_of(other) <= ours.vocab_size
    if fits or is_lower_bound(ours):
        width = ours.vocab_size if fits else other.vocab_size
        hint += f"; if it is this pair, give the width {width} with {{option}}"
    return XtokError(
        f"the {side} of {what} is {ours.vocab_size:,} wide, {other.model_id} {other.vocab_size:,}",
        hint=hint,
        parameter=f"{side}_vocab_size",
    )


def _shared_width(ours: Vocabulary, tokenizer: Vocabulary) -> int:
    """Return the width that a tokenizer should have to be used with a side of a map.

    A map with the tokenizer's tokens tells it, and so does one whose width a person gave. Else it
    is the tokenizer's; one that is not from a model's config is a lower bound, like a map's ids.
    """
    if tokenizer.width_source == "option":
        return tokenizer.vocab_size
    if ours.table is not None:
        same = same_tokens(ours.table, tokenizer.table)
        return ours.vocab_size if same else tokenizer.vocab_size
    if not is_lower_bound(ours):
        return ours.vocab_size
    if tokenizer.width_source == "tokenizer" or ours.width_source == "map":
        return max(ours.vocab_size, tokenizer.vocab_size)
    return tokenizer.vocab_size


def can_grow(ours: Vocabulary, other: Vocabulary) -> bool:
    """Whether a side of a map may be made as wide as another vocabulary.

    That is where its file tells its ids, and not the width: rows and columns beyond are empty. The
    rows of a file by another program may be fewer than the model's, if its tokenizer has no more.
    """
    if not is_lower_bound(ours) or ours.vocab_size > other.vocab_size:
        return False
    return ours.width_source == "ids" or ours.vocab_size >= _tokens_of(other)


def is_lower_bound(ours: Vocabulary) -> bool:
    """Whether a side is of a file by another program, which may have fewer rows than V."""
    return ours.table is None and ours.width_source in ("ids", "map")


def _tokens_of(other: Vocabulary) -> int:
    """Return the least width that a vocabulary can have."""
    return other.tokenizer_vocab_size or other.vocab_size
