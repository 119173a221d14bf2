"""Load map arguments of functions (a map or its path), and check that maps belong to a pair."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeAlias, Unpack

from xtok.errors import XtokError
from xtok.loss_names import MapKind
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.packing import M
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, Vocabulary, same_tokens

AnyMap: TypeAlias = ProjectionMap | EventMap | SpellingMap
MapLike: TypeAlias = str | PathLike[str] | ProjectionMap
AnyMapLike: TypeAlias = MapLike | EventMap | SpellingMap

MAP_CLASSES: Mapping[MapKind, type[AnyMap]] = {
    "map": ProjectionMap,
    "events": EventMap,
    "spellings": SpellingMap,
}
"""Class of each kind of map file."""


def read_map(source: AnyMapLike, **options: Unpack[mapfile.LoadOptions]) -> AnyMap:
    """Load a map of any kind from its path, or return a given map unchanged.

    Accepts the options of `ProjectionMap.load`.

    Raises:
        MapFileError: if the file is not a map, has another width, or does not support an option.
    """
    if isinstance(source, AnyMap):
        return source
    contents = mapfile.read(source)
    return MAP_CLASSES[contents.kind].of_contents(contents, **options)


def bind_map(
    any_map: M, pair: Pair | Mapping[str, Tokenizer] | None = None, *, name: str = "the map"
) -> tuple[M, Pair]:
    """Check that a map belongs to a pair, and make the widths and tokens of both equal.

    `pair` can also be a dict of tokenizers with the keys `student` and `teacher`. By default, the
    pair consists of the map's vocabularies. A map without tokens gets the pair's tokens. The pair
    gets the map's widths, unless the user set other widths. `name` is the map's name in errors.
    """
    pair = _make_pair(pair, [any_map])
    return _bind(pair, any_map, name), pair


def bind_maps(
    sources: AnyMapLike | Sequence[AnyMapLike],
    read: Callable[[Any], M],
    pair: Pair | None = None,
    names: Sequence[str] = (),
) -> tuple[list[M], Pair, list[str]]:
    """Load maps of one pair with `bind_map`. Return the maps, the pair and the maps' names.

    By default, a map's name is its path, or `map 1`, `map 2`, … for maps in memory. `read` is the
    function that loads a map, such as `read_map` or `ProjectionMap.of`.
    """
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        sources = [sources]
    if not sources:
        raise ValueError("no map was given")
    if names and len(names) != len(sources):
        raise ValueError(f"{len(sources)} maps, but {len(names)} names")
    names = list(names) or [
        os.fspath(source) if isinstance(source, str | PathLike) else f"map {number}"
        for number, source in enumerate(sources, 1)
    ]
    maps = [read(source) for source in sources]
    pair = _make_pair(pair, maps)
    return [_bind(pair, m, name) for m, name in zip(maps, names, strict=True)], pair, names


def _make_pair(
    pair: Pair | Mapping[str, Tokenizer] | None, maps: Sequence[mapfile.StoredMap]
) -> Pair:
    if isinstance(pair, Pair):
        return _at_map_widths(pair, maps[0])
    sides: dict[str, Any] = {}
    for side in SIDES:
        vocabularies: list[Vocabulary] = [getattr(m, side) for m in maps]
        sides[side] = max(vocabularies, key=lambda v: (v.table is not None, v.vocab_size))
        if pair and side in pair:
            sides[f"{side}_tokenizer"] = pair[side]
            sides[side] = pair[side].vocabulary
    return _at_map_widths(Pair(**sides), maps[0]) if pair else Pair(**sides)


def _at_map_widths(pair: Pair, any_map: mapfile.StoredMap) -> Pair:
    changed: dict[str, Any] = {}
    for side in SIDES:
        pair_side, tokenizer = getattr(pair, side), getattr(pair, f"{side}_tokenizer")
        width = _shared_width(getattr(any_map, side), pair_side)
        if width == pair_side.vocab_size:
            continue
        if tokenizer is not None:
            changed[f"{side}_tokenizer"] = tokenizer = tokenizer.at_width(width)
            changed[side] = tokenizer.vocabulary
        elif pair_side.table is not None:
            table = pair_side.table.at_width(width)
            changed[side] = replace(pair_side, vocab_size=width, width_source="option", table=table)
    return replace(pair, **changed) if changed else pair


def _shared_width(map_side: Vocabulary, pair_side: Vocabulary) -> int:
    # Prefer the width that the user set, then the map's width if the tokens are equal, then the
    # width in the model's config
    if pair_side.width_source == "option":
        return pair_side.vocab_size
    if map_side.table is not None:
        same = same_tokens(map_side.table, pair_side.table)
        return map_side.vocab_size if same else pair_side.vocab_size
    if not map_side.is_lower_bound:
        return map_side.vocab_size
    if pair_side.width_source == "tokenizer" or map_side.width_source == "map":
        return max(map_side.vocab_size, pair_side.vocab_size)
    return pair_side.vocab_size


def _bind(pair: Pair, any_map: M, name: str) -> M:
    for side in SIDES:
        map_side: Vocabulary = getattr(any_map, side)
        pair_side: Vocabulary = getattr(pair, side)
        if map_side is pair_side:
            continue
        have_tokens = map_side.table is not None and pair_side.table is not None
        if have_tokens and not same_tokens(map_side.table, pair_side.table):
            raise _other_tokens(pair, side, any_map, name)
        is_same = map_side.vocab_size == pair_side.vocab_size
        if not (is_same or can_grow(map_side, pair_side) or can_grow(pair_side, map_side)):
            raise _other_width(side, map_side, pair_side, f"{name} ({map_side.model_id})")
        if map_side.table is None and pair_side.vocab_size >= map_side.vocab_size:
            if pair_side.table is not None:
                vocabulary = replace(pair_side, definition_sha256=map_side.definition_sha256)
                any_map = any_map.with_side(side, vocabulary)
            elif map_side.width_source == "ids":
                width, origin = pair_side.vocab_size, pair_side.width_source
                vocabulary = replace(map_side, vocab_size=width, width_source=origin)
                any_map = any_map.with_side(side, vocabulary)
    return any_map


def is_swapped(pair: Pair, any_map: mapfile.StoredMap) -> bool:
    """Whether the map's student is the pair's teacher, and vice versa."""
    map_student, map_teacher = any_map.student.table, any_map.teacher.table
    student, teacher = pair.student.table, pair.teacher.table
    crossed = same_tokens(map_student, teacher) and same_tokens(map_teacher, student)
    return map_student is not None and map_teacher is not None and crossed and not pair.is_same


def name_notes(pair: Pair, any_map: AnyMap | None) -> list[str]:
    """Return a note if the map names another model and contains no tokens to compare."""
    notes = []
    for side in SIDES if any_map else ():
        map_side, pair_side = getattr(any_map, side), getattr(pair, side)
        names = [v.model_id.rstrip("/").rpartition("/")[2].lower() for v in (map_side, pair_side)]
        if map_side.table is None and names[0] not in (names[1], "unknown"):
            notes.append(
                f"the map names {map_side.model_id} as its {side} and contains no token table to "
                f"check; assuming that the map belongs to {pair_side.model_id}"
            )
    return notes


def can_grow(map_side: Vocabulary, other: Vocabulary) -> bool:
    """Whether empty rows or columns may be added to a map to fit a model's width.

    A map may grow if its file records no width, or if the map has a row for each id of the
    tokenizer.
    """
    if not map_side.is_lower_bound or map_side.vocab_size > other.vocab_size:
        return False
    return map_side.width_source == "ids" or map_side.vocab_size >= other.num_ids


def _other_tokens(pair: Pair, side: str, any_map: mapfile.StoredMap, name: str) -> XtokError:
    stored, loaded = getattr(any_map, side), getattr(pair, side)
    problem = f"the {side} of {name} ({stored.model_id}) has other tokens than {loaded.model_id}"
    hint = "give models and maps of the same pair, with the student first; xtok inspect shows the "
    hint += "pair of a map"
    if is_swapped(pair, any_map):
        problem = (
            f"the sides are swapped: in {name}, the student is {any_map.student.model_id} and "
            f"the teacher is {any_map.teacher.model_id}"
        )
        hint = "give the map's student first, or build the map in the other direction"
    return XtokError(problem, hint=hint)


def _other_width(side: str, map_side: Vocabulary, other: Vocabulary, name: str) -> XtokError:
    hint = "give the map of this pair; xtok inspect shows the pair of a map"
    fits = other.num_ids <= map_side.vocab_size
    if fits or map_side.is_lower_bound:
        width = map_side.vocab_size if fits else other.vocab_size
        hint += f"; if the pair is correct, set the width to {width} with {{option}}"
    return XtokError(
        f"the {side} of {name} has width {map_side.vocab_size:,}, but {other.model_id} "
        f"has width {other.vocab_size:,}",
        hint=hint,
        parameter=f"{side}_vocab_size",
    )
