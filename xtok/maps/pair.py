"""Is this map of these tokenizers?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from xtok.errors import MapFileError, XtokError
from xtok.vocab.table import MAX_WIDTH, TokenTable, Vocabulary

if TYPE_CHECKING:
    from xtok.maps.events import EventMap
    from xtok.maps.projection_map import ProjectionMap

M = TypeVar("M", bound="ProjectionMap | EventMap")


def with_vocabularies(
    projection: M,
    *,
    student: Vocabulary | None = None,
    teacher: Vocabulary | None = None,
    widths: bool = False,
    name: str = "the map",
) -> M:
    """Check a map's sides against vocabularies; a side without tokens takes the other.

    Args:
        projection: a map or an event map.
        student: what the rows should be of; not checked if None.
        teacher: what the columns should be of.
        widths: whether a width that differs is an error where the tokens are the same. Where the
            map has no tokens it always is, unless the map `can_grow` to the other.
        name: what errors call the map.

    Raises:
        XtokError: naming the map and the side whose tokens or width differ, and how.
    """
    for side, other in (("student", student), ("teacher", teacher)):
        if other is not None:
            ours: Vocabulary = getattr(projection, side)
            what = f"{name} ({ours.model_id})"
            require_same_tokens(side, ours.table, other.table, what=what, other=other.model_id)
            same = ours.vocab_size == other.vocab_size
            fits = same or can_grow(ours, other) or can_grow(other, ours)
            if not fits and (widths or ours.table is None):
                raise _other_width(side, ours, other, what)
            if ours.table is None and other.vocab_size >= ours.vocab_size:
                if other.table is not None:
                    ours = other
                elif ours.width_source == "ids":
                    ours = replace(
                        ours, vocab_size=other.vocab_size, width_source=other.width_source
                    )
            projection = _with_side(projection, side, ours)
    return projection


def name_notes(
    projection: ProjectionMap | EventMap,
    *,
    student: Vocabulary | None = None,
    teacher: Vocabulary | None = None,
) -> list[str]:
    """Return a note for each side of a map without tokens that names another model than is given.

    Only their widths can be compared then.
    """
    notes = []
    for side, given in (("student", student), ("teacher", teacher)):
        ours: Vocabulary = getattr(projection, side)
        if given is None or ours.table is not None:
            continue
        names = [v.model_id.rstrip("/").rpartition("/")[2].lower() for v in (ours, given)]
        if names[0] not in (names[1], "unknown"):
            notes.append(
                f"the map says that its {side} is {ours.model_id}; it has no tokens to compare, "
                f"and is taken for {given.model_id}'s"
            )
    return notes


def _other_width(side: str, ours: Vocabulary, other: Vocabulary, what: str) -> XtokError:
    hint = "give the map of this pair; xtok inspect shows the pair of a map"
    if _tokens_of(other) <= ours.vocab_size:
        hint += f"; if it is this pair, give the width {ours.vocab_size} with {{option}}"
    return XtokError(
        f"the {side} of {what} is {ours.vocab_size:,} wide, {other.model_id} {other.vocab_size:,}",
        hint=hint,
        parameter=f"{side}_vocab_size",
    )


def of_one_pair(maps: Sequence[ProjectionMap], names: Sequence[str]) -> list[ProjectionMap]:
    """Check that maps are of one pair, at the same widths; those without tokens take the others'.

    The first map that is not of the first one's pair is an `XtokError`; `names` are for that.
    """
    first = maps[0]
    for other, name in zip(maps[1:], names[1:], strict=True):
        with_vocabularies(
            other, student=first.student, teacher=first.teacher, widths=True, name=name
        )
        first = with_vocabularies(first, student=other.student, teacher=other.teacher, widths=True)
    return [
        first,
        *(with_vocabularies(m, student=first.student, teacher=first.teacher) for m in maps[1:]),
    ]


def at_width(
    projection: ProjectionMap, side: str, width: int, *, name: str = "the map"
) -> ProjectionMap:
    """Return a map whose side has this width.

    Raises:
        MapFileError: if it has ids beyond it, or is known to have another.
    """
    ours: Vocabulary = getattr(projection, side)
    if ours.vocab_size != width and not _is_lower_bound(ours):
        problem = f"is {ours.vocab_size} wide on the {side}'s side, not {width}"
        hint = (
            f"is it the map of this pair? It is of {projection.student.model_id} and "
            f"{projection.teacher.model_id}; else leave out {{option}}"
        )
    elif width < ours.vocab_size:
        problem = f"has the {side} id {ours.vocab_size - 1}, and is not {width} wide"
        hint = f"give the width of its logits with {{option}}, at least {ours.vocab_size}"
    elif width > MAX_WIDTH:
        problem, hint = f"cannot be {width} wide", f"give {{option}} up to {MAX_WIDTH}"
    else:
        wider = replace(ours, vocab_size=width, width_source="option")
        return projection if ours.table is not None else _with_side(projection, side, wider)
    raise MapFileError(f"{name} {problem}", hint=hint, parameter=f"{side}_vocab_size")


def shared_width(ours: Vocabulary, tokenizer: Vocabulary) -> int:
    """Return the width that a tokenizer should have to be used with a side of a map.

    A map with the tokenizer's tokens tells it, and so does one whose width a person gave. Else it
    is the tokenizer's; one that is not from a model's config is a lower bound, like a map's ids.
    """
    if ours.table is not None:
        return (
            ours.vocab_size if _same_tokens(ours.table, tokenizer.table) else tokenizer.vocab_size
        )
    if not _is_lower_bound(ours):
        return ours.vocab_size
    if tokenizer.width_source == "tokenizer" or ours.width_source == "map":
        return max(ours.vocab_size, tokenizer.vocab_size)
    return tokenizer.vocab_size


def can_grow(ours: Vocabulary, other: Vocabulary) -> bool:
    """Tell whether a side of a map may be made as wide as another vocabulary.

    That is where its file tells its ids, and not the width: rows and columns beyond are empty. The
    rows of a file by another program may be fewer than the model's, if its tokenizer has no more.
    """
    if not _is_lower_bound(ours) or ours.vocab_size > other.vocab_size:
        return False
    return ours.width_source == "ids" or ours.vocab_size >= _tokens_of(other)


def require_widths(projection: ProjectionMap) -> None:
    """Raise an `XtokError` if a width of a map is only its largest id + 1."""
    for side in ("student", "teacher"):
        ours: Vocabulary = getattr(projection, side)
        if ours.width_source == "ids":
            raise XtokError(
                f"the map's file does not tell the width of the {side}'s logits, only ids up to "
                f"{ours.vocab_size - 1:,}",
                hint="load or convert the map with {option}",
                parameter=f"{side}_vocab_size",
            )


def _is_lower_bound(ours: Vocabulary) -> bool:
    """Tell whether a side is of a file by another program, which may have fewer rows than V."""
    return ours.table is None and ours.width_source in ("ids", "map")


def require_same_tokens(
    side: str, ours: TokenTable | None, theirs: TokenTable | None, *, what: str, other: str
) -> None:
    """Raise an `XtokError` if a side of a map has other tokens than a tokenizer or another map.

    In its message, `what` is the map, and `other` what has the other tokens.
    """
    if ours is not None and theirs is not None and not _same_tokens(ours, theirs):
        raise XtokError(
            f"the {side} of {what} has other tokens than {other}",
            hint="give the models, or the maps, of one pair, student first; xtok inspect shows the "
            "pair of a map",
        )


def _same_tokens(ours: TokenTable, other: TokenTable | None) -> bool:
    """Tell whether two tables have the same bytes and control tokens, whatever their widths.

    Types may differ: transformers takes some unknown tokens for any other control token.
    """
    if ours is other or other is None:
        return ours is other
    width = min(len(ours), len(other))
    rests = ours.lengths[width:], other.lengths[width:]
    return (
        ours.control_names == other.control_names
        and not any(rest.any() for rest in rests)
        and np.array_equal(ours.lengths[:width], other.lengths[:width])
        and np.array_equal(ours.data, other.data)
    )


def _tokens_of(other: Vocabulary) -> int:
    """Return the least width that a vocabulary can have."""
    return other.tokenizer_vocab_size or other.vocab_size


def _with_side(projection: M, side: str, vocabulary: Vocabulary) -> M:
    ours: Vocabulary = getattr(projection, side)
    changed: dict[str, Any] = {side: vocabulary}
    more = vocabulary.vocab_size - ours.vocab_size
    if side == "student" and more:
        for name in ("row_kind", "scale_slot"):
            of_row = getattr(projection, name)
            changed[name] = None if of_row is None else np.pad(of_row, (0, more))
    return projection if ours is vocabulary else replace(projection, **changed)
