"""How tokens match, as the history of a map says it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xtok.config import MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap

_MATCHING = (
    "special_tokens",
    "fuzzy_threshold",
    "canonicalization",
    "token_form",
    "ignore_student_ids",
    "ignore_teacher_ids",
)
"""The options of how tokens are matched."""

_DEFAULTS_LEFT_OUT = {"multitoken": _MATCHING, "reapply-exact": ("canonicalization",)}
"""By stage, the options of which it says nothing where they are at their defaults."""


def used_options(projection: ProjectionMap) -> MultitokenConfig:
    """Return how tokens of a map are matched: as its last stage of each kind has it."""
    options: dict[str, Any] = {}
    for step in projection.history:
        for name in _DEFAULTS_LEFT_OUT.get(step["stage"], ()):
            options.pop(name, None)
        options |= {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in step["options"].items()
            if name in _MATCHING
        }
    try:
        return MultitokenConfig(**options)
    except (TypeError, ValueError) as error:
        raise XtokError(
            f"the map's history names options that this xtok does not know: {error}",
            hint="rebuild the map, or use the version of xtok that made it",
        ) from error


def options_after(projection: ProjectionMap, config: MultitokenConfig) -> MultitokenConfig:
    """Return how tokens match where a map is made of another: as there, or as a config says.

    What is at its default in the config says nothing.
    """
    defaults = MultitokenConfig()
    said = {name: getattr(config, name) for name in _MATCHING}
    changed = {name: value for name, value in said.items() if value != getattr(defaults, name)}
    return replace(used_options(projection), **changed)


def options_beside(projection: ProjectionMap, options: MultitokenConfig) -> dict[str, Any]:
    """Return those of how tokens match, for a map's history, that its history does not say yet."""
    known = used_options(projection).options
    return {
        name: value
        for name, value in options.options.items()
        if name in _MATCHING and known.get(name) != value
    }
