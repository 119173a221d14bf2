"""Recipes: record how maps were made, and compare a map with a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from xtok._lib.shards import SourceFile
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import Recipe
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES

_DIFFERENCE_WORDS = {
    "texts": "the map was counted on other text",
    "field": "the map was counted on another field",
    "initial_sha256": "the map was counted with another initial map",
}


def make_recipe(
    config: BuildConfig,
    texts: Iterable[SourceFile] = (),
    field: str = "text",
    initial: ProjectionMap | None = None,
) -> Recipe:
    """Return the recipe of a map that `build` makes.

    `texts` are the counted files, in order. The counts are smoothed towards `initial`.
    """
    digests = [text.sha256 for text in texts]
    recipe = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(config).items()}
    if not digests:
        return {"options": recipe}
    initial_sha256 = None if initial is None else mapfile.sha256(initial)
    return {"options": recipe, "texts": digests, "field": field, "initial_sha256": initial_sha256}


def stage_recipe(config: MultitokenConfig) -> Recipe:
    """Return the recipe of a map that `multitoken` makes."""
    shared = {f.name: getattr(config, f.name) for f in fields(MultitokenConfig)}
    return make_recipe(BuildConfig(**shared, prep_top_k=config.top_k, exact_match=False))


def with_options(projection: ProjectionMap, **options: Any) -> Recipe | None:
    """Return the map's recipe, updated with the given options.

    Returns None if the map has no recipe, or if `sort-cut` was applied to the map.
    """
    recipe = projection.recipe
    if recipe is None or "sort-cut" in projection.stages:
        return None
    return {**recipe, "options": {**recipe["options"], **options}}


def differing(earlier: Recipe, request: Recipe) -> list[str]:
    """Return the names of the requested values that are missing or different in a recipe."""
    return [name for name, value in request.items() if earlier.get(name) != value]


def difference(existing: mapfile.StoredMap, pair: Pair, recipe: Recipe | None) -> str | None:
    """Return the first difference between a map and the requested pair and recipe, or None."""
    for side, table, new_side in zip(SIDES, pair.tables, pair.sides, strict=True):
        old_side = getattr(existing, side)
        if old_side.vocab_size != new_side.vocab_size:
            return f"the map's {side} has width {old_side.vocab_size}, not {new_side.vocab_size}"
        if old_side.table is None or old_side.table.sha256() != table.sha256():
            return f"the map's {side} {old_side.model_id} has other tokens than {new_side.model_id}"
        if old_side.definition_sha256 is None:
            return f"an earlier version wrote the map without the {side}'s tokenizer definition"
        if old_side.definition_sha256 != new_side.definition_sha256:
            return f"the tokenizer definition of the {side} {old_side.model_id} has changed"
    earlier = existing.recipe if isinstance(existing, ProjectionMap) else None
    return None if earlier == recipe else _recipe_difference(earlier, recipe)


def _recipe_difference(earlier: Recipe | None, recipe: Recipe | None) -> str:
    if earlier is None or recipe is None:
        return "the map has no recipe, because an earlier version or another command made it"
    old, new = earlier.get("options", {}), recipe["options"]
    if isinstance(old, dict) and (names := differing(old, new)):
        return f"the map's {names[0]} is {old.get(names[0])}, not {new[names[0]]}"
    changed = (name for name in _DIFFERENCE_WORDS if earlier.get(name) != recipe.get(name))
    return next((_DIFFERENCE_WORDS[name] for name in changed), "the map's recipe differs")
