"""What functions take for a map: the map, or the path of its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

from xtok.errors import MapFileError
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.projection_map import OTHER_KINDS, ProjectionMap, require_width
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.sides import SIDES

AnyMap: TypeAlias = ProjectionMap | EventMap | SpellingMap
MapLike: TypeAlias = str | PathLike[str] | ProjectionMap
AnyMapLike: TypeAlias = MapLike | EventMap | SpellingMap

CLASSES: Mapping[mapfile.Kind, type[AnyMap]] = {
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
    name, (what, _) = os.fspath(source), OTHER_KINDS[kind]
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
