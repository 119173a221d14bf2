"""What a function is given as a map: a map or its path, and whether it is of a pair."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from xtok.errors import MapFileError, XtokError
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap, require_width
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import SIDES, Pair
from xtok.tokenizers.table import Vocabulary, same_tokens

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

AnyMap: TypeAlias = ProjectionMap | EventMap | SpellingMap
MapLike: TypeAlias = str | PathLike[str] | ProjectionMap
AnyMapLike: TypeAlias = MapLike | EventMap | SpellingMap

CLASSES: Mapping[mapfile.MapKind, type[AnyMap]] = {
    "map": ProjectionMap, "events": EventMap, "spellings": SpellingMap,
}  # fmt: skip
"""The class of what a file holds."""


def as_map(source: MapLike) -> ProjectionMap:
    """Return a map as it is, and load a path with the defaults of `ProjectionMap.load`."""
    return source if isinstance(source, ProjectionMap) else ProjectionMap.load(source)


def as_any_map(source: AnyMapLike, **options: Any) -> AnyMap:
    """Return a map of any kind as it is, and load a path, whatever its file holds.

    The options are those of `ProjectionMap.load`; those of scale slots and of learned weights are
    for projection maps alone.

    Raises:
        MapFileError: if the file is not a map, is of another width, or does not take an option.
    """
    if isinstance(source, AnyMap):
        return source
    reading = {name: options[name] for name in ("preserve_last", "normalize") if name in options}
    fields = mapfile.read(source, **reading)
    kind = mapfile.kind_of(fields)
    if kind == "map":
        return ProjectionMap.of_fields(fields, source, **options)
    name, (what, _) = os.fspath(source), mapfile.KINDS[kind]
    for option in ("preserve_last", "normalize"):
        if options.get(option) is not None and (options[option] or option == "preserve_last"):
            raise MapFileError(
                f"{name} is {what}, which has no weights",
                hint="leave out {option}",
                parameter=option,
            )
    loaded = mapfile.map_of_fields(CLASSES[kind], fields, source)
    for side in SIDES:
        if (width := options.get(f"{side}_vocab_size")) is not None:
            require_width(loaded, side, width, name=name)
    return loaded


def as_maps(
    sources: Any, names: Sequence[str] = (), read: Callable[[Any], Any] = as_map
) -> tuple[list[Any], list[str]]:
    """Return the maps of one source or several, and what messages call them.

    Args:
        sources: maps or paths.
        names: a name for each; by default a file's path, and `map 1` and so on for other maps.
        read: makes a map of a source.

    Raises:
        ValueError: if there are other numbers of names than of maps.
    """
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        sources = [sources]
    if names and len(names) != len(sources):
        raise ValueError(f"{len(sources)} maps, {len(names)} names")
    defaults = [
        os.fspath(source) if isinstance(source, str | PathLike) else f"map {number}"
        for number, source in enumerate(sources, 1)
    ]
    return [read(source) for source in sources], list(names or defaults)


M = TypeVar("M", bound="AnyMap")


def pair_of_maps(*maps: AnyMap) -> Pair:
    """Return the pair of maps: a side is the first that carries tokens, else the first."""
    students, teachers = [m.student for m in maps], [m.teacher for m in maps]
    return Pair(_with_tokens(students), _with_tokens(teachers))


def pair_of_map(
    any_map: AnyMap,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
) -> Pair:
    """Return the pair of a map, with the tokenizers given, as wide as the map."""
    if student is None and teacher is None:
        return pair_of_maps(any_map)
    sides: dict[str, Any] = {}
    for side, tokenizer in zip(SIDES, (student, teacher), strict=True):
        sides[f"{side}_tokenizer"] = tokenizer
        sides[side] = getattr(any_map, side) if tokenizer is None else tokenizer.vocabulary
    return at_map_widths(Pair(**sides), any_map)


def _with_tokens(sides: Sequence[Vocabulary]) -> Vocabulary:
    return next((side for side in sides if side.table is not None), sides[0])


def at_map_widths(pair: Pair, any_map: AnyMap | None) -> Pair:
    """Return a pair as wide as a map of it, if any, where it knows and no option sets another."""
    if any_map is None:
        return pair
    changed: dict[str, Any] = {}
    for side in SIDES:
        of_pair, tokenizer = getattr(pair, side), getattr(pair, f"{side}_tokenizer")
        width = _shared_width(getattr(any_map, side), of_pair)
        if width == of_pair.vocab_size:
            continue
        if tokenizer is not None:
            changed[f"{side}_tokenizer"] = tokenizer = tokenizer.at_width(width)
            changed[side] = tokenizer.vocabulary
        elif of_pair.table is not None:
            table = of_pair.table.at_width(width)
            changed[side] = replace(of_pair, vocab_size=width, width_source="option", table=table)
    return replace(pair, **changed) if changed else pair


def _shared_width(of_map: Vocabulary, of_pair: Vocabulary) -> int:
    """Return the width that a tokenizer should have to be used with a side of a map.

    It is the map's if that has the tokenizer's tokens, or a width that a person gave. Else it
    is the tokenizer's; one that is not from a model's config is a lower bound, like a map's ids.
    """
    if of_pair.width_source == "option":
        return of_pair.vocab_size
    if of_map.table is not None:
        same = same_tokens(of_map.table, of_pair.table)
        return of_map.vocab_size if same else of_pair.vocab_size
    if not of_map.is_lower_bound:
        return of_map.vocab_size
    if of_pair.width_source == "tokenizer" or of_map.width_source == "map":
        return max(of_map.vocab_size, of_pair.vocab_size)
    return of_pair.vocab_size


def bind_map(pair: Pair, projection: M, *, name: str = "the map") -> M:
    """Check that a map is of a pair, and return it; a side without tokens takes the pair's.

    Args:
        pair: the pair.
        projection: a map of any kind.
        name: what errors call the map.

    Raises:
        XtokError: naming the map and the side whose tokens or width differ, and how.
    """
    for side in SIDES:
        of_map: Vocabulary = getattr(projection, side)
        of_pair: Vocabulary = getattr(pair, side)
        if of_map is of_pair:
            continue
        is_known = of_map.table is not None and of_pair.table is not None
        if is_known and not same_tokens(of_map.table, of_pair.table):
            raise _other_tokens(pair, side, projection, name)
        same = of_map.vocab_size == of_pair.vocab_size
        if not (same or can_grow(of_map, of_pair) or can_grow(of_pair, of_map)):
            raise _other_width(side, of_map, of_pair, f"{name} ({of_map.model_id})")
        if of_map.table is None and of_pair.vocab_size >= of_map.vocab_size:
            known: Any = projection  # a projection map: the others have the tokens of both sides
            if of_pair.table is not None:
                made_of = of_map.definition_sha256
                projection = known.with_side(side, replace(of_pair, definition_sha256=made_of))
            elif of_map.width_source == "ids":
                width: dict[str, Any] = {
                    "vocab_size": of_pair.vocab_size, "width_source": of_pair.width_source,
                }  # fmt: skip
                projection = known.with_side(side, replace(of_map, **width))
    return projection


def admitted(pair: Pair | None, *maps: M, names: Sequence[str] = ()) -> tuple[Pair, list[M]]:
    """Return a pair as wide as the first of some maps of it, and the maps; see `bind_map`.

    Args:
        pair: the pair; that of the maps if None.
        maps: at least one.
        names: what errors call the maps.

    Raises:
        XtokError: for a map of another pair.
    """
    pair = pair_of_maps(*maps) if pair is None else at_map_widths(pair, maps[0])
    named = zip(maps, names or ["the map"] * len(maps), strict=True)
    return pair, [bind_map(pair, one, name=name) for one, name in named]


def is_swapped(pair: Pair, any_map: AnyMap) -> bool:
    """Whether a map is not of a pair, but of the same two the other way round."""
    rows, columns = any_map.student.table, any_map.teacher.table
    student, teacher = pair.student.table, pair.teacher.table
    crossed = same_tokens(rows, teacher) and same_tokens(columns, student)
    return rows is not None and columns is not None and crossed and not pair.is_same


def name_notes(pair: Pair, any_map: AnyMap | None) -> list[str]:
    """Return a note for each side of a map without tokens that names another model.

    Only their widths can be compared then.
    """
    notes = []
    for side in SIDES if any_map else ():
        of_map, of_pair = getattr(any_map, side), getattr(pair, side)
        names = [v.model_id.rstrip("/").rpartition("/")[2].lower() for v in (of_map, of_pair)]
        if of_map.table is None and names[0] not in (names[1], "unknown"):
            notes.append(
                f"the map says that its {side} is {of_map.model_id}; it has no tokens to "
                f"compare, and is taken for {of_pair.model_id}'s"
            )
    return notes


def can_grow(of_map: Vocabulary, other: Vocabulary) -> bool:
    """Whether a side of a map may be made as wide as another vocabulary.

    That is where its file has its ids, and not the width: rows and columns beyond are empty. The
    rows of a file by another program may be fewer than the model's, if its tokenizer has no more.
    """
    if not of_map.is_lower_bound or of_map.vocab_size > other.vocab_size:
        return False
    return of_map.width_source == "ids" or of_map.vocab_size >= _least_width(other)


def _least_width(other: Vocabulary) -> int:
    return other.tokenizer_vocab_size or other.vocab_size


def _other_tokens(pair: Pair, side: str, any_map: AnyMap, name: str) -> XtokError:
    of_map, of_pair = getattr(any_map, side), getattr(pair, side)
    problem = f"the {side} of {name} ({of_map.model_id}) has other tokens than {of_pair.model_id}"
    hint = "give the models, or the maps, of one pair, student first; xtok inspect shows the "
    hint += "pair of a map"
    if is_swapped(pair, any_map):
        problem = (
            f"the sides are swapped: {name} is of the student {any_map.student.model_id} and "
            f"the teacher {any_map.teacher.model_id}"
        )
        hint = "give the student first, as the map has them, or build the map the other way"
    return XtokError(problem, hint=hint)


def _other_width(side: str, of_map: Vocabulary, other: Vocabulary, what: str) -> XtokError:
    hint = "give the map of this pair; xtok inspect shows the pair of a map"
    fits = _least_width(other) <= of_map.vocab_size
    if fits or of_map.is_lower_bound:
        width = of_map.vocab_size if fits else other.vocab_size
        hint += f"; if it is this pair, give the width {width} with {{option}}"
    return XtokError(
        f"the {side} of {what} is {of_map.vocab_size:,} wide, {other.model_id} "
        f"{other.vocab_size:,}",
        hint=hint,
        parameter=f"{side}_vocab_size",
    )
