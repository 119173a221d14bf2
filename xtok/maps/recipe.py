"""What made a map, compared as a whole: is a map in a file the one that is asked for?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from xtok._lib.shards import SourceFile
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.records import Recipe
from xtok.tokenizers.pairs import SIDES, Pair

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap

_IN_WORDS = {
    "texts": "it was counted on other text",
    "field": "it was counted on another field",
    "initial_sha256": "it was counted with another initial map",
}


def recipe_of(
    config: BuildConfig,
    texts: Iterable[SourceFile] = (),
    field: str = "text",
    initial: ProjectionMap | None = None,
) -> Recipe:
    """Return the recipe of the map that `build` makes.

    Args:
        config: the options.
        texts: the files that it is counted on, in their order.
        field: the field or column of them that holds the text.
        initial: the map that it is smoothed towards, if one is given.
    """
    digests = [text.sha256 for text in texts]
    options = asdict(config.for_text() if digests else config)
    recipe = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    if not digests:
        return {"options": recipe}
    of_initial = None if initial is None else mapfile.sha256(initial)
    return {"options": recipe, "texts": digests, "field": field, "initial_sha256": of_initial}


def recipe_of_stage(config: MultitokenConfig) -> Recipe:
    """Return the recipe of what the stage `multitoken` makes: `build` does the same until then."""
    shared = {f.name: getattr(config, f.name) for f in fields(MultitokenConfig)}
    return recipe_of(BuildConfig(**shared, prep_top_k=config.top_k, exact_match=False))


def with_options(projection: ProjectionMap, **options: Any) -> Recipe | None:
    """Return a map's recipe after a stage that does what these options of `build` do.

    None after stages that stand in another order than in `build`.
    """
    made = projection.recipe
    if made is None or "sort-cut" in projection.stages:
        return None
    return {**made, "options": {**made["options"], **options}}


def differing(made: Recipe, asked: Recipe) -> list[str]:
    """Return in what the recipe of what is kept differs from the one that is asked for."""
    return [name for name, value in asked.items() if made.get(name) != value]


def difference(existing: mapfile.StoredMap, pair: Pair, recipe: Recipe | None) -> str | None:
    """Return how a map differs from the one of a pair and a recipe, in words; None if it does not.

    Tokenizers are compared by their definition, and where it differs by their tokens. Versions of
    xtok are not compared; nor are recipes where there is none, as of event maps.
    """
    for side, table, now in zip(SIDES, pair.tables, pair.sides, strict=True):
        before = getattr(existing, side)
        if before.vocab_size != now.vocab_size:
            return f"its {side} is {before.vocab_size} wide, not {now.vocab_size}"
        if before.table is None or before.table.sha256() != table.sha256():
            return f"its {side} {before.model_id} has other tokens than {now.model_id}"
        if before.definition_sha256 is None:
            return f"an earlier version made it: how its {side} was defined is not known"
        if before.definition_sha256 != now.definition_sha256:
            return f"its {side} {before.model_id} was changed since, though not in its tokens"
    made = getattr(existing, "recipe", None)
    if made == recipe:
        return None
    if made is None or recipe is None:
        return "it does not say how it was built: an earlier version or another command made it"
    old, new = made.get("options", {}), recipe["options"]
    if isinstance(old, dict) and (names := differing(old, new)):
        return f"its {names[0]} is {old.get(names[0])}, not {new[names[0]]}"
    words = (why for name, why in _IN_WORDS.items() if made.get(name) != recipe.get(name))
    return next(words, "it was made in another way")
