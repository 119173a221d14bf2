"""Create maps, record how they were made, and check whether their rows suit P-KL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.shards import SourceFile
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.edges import Edges, add_slots, heaviest, in_map_order, sum_duplicates
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.records import Recipe
from xtok.tokenizers.display import percent, plural
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import slot_candidates
from xtok.tokenizers.table import SIDES

# H-KL compares two tokens if the row's heaviest entry has at least this weight (NeMo-RL).
H_KL_THRESHOLD = 0.6

_DIFFERENCE_WORDS = {
    "texts": "it was counted on other text",
    "field": "it was counted on another field",
    "initial_sha256": "it was counted with another initial map",
}

# Creating maps


def map_from_edges(
    edges: Edges,
    *,
    scale_slot: NDArray[np.uint8] | None,
    before: ProjectionMap | None = None,
    **fields: Any,
) -> ProjectionMap:
    """Create a map: round weights to float32, and sort each row with its slot last.

    `scale_slot`, uint8 `[V_student]`, is 1 for rows in which the last edge is a scale slot. Missing
    fields are copied from `before`.
    """
    edges = edges._replace(weights=edges.weights.astype(np.float32, copy=False))
    last = np.zeros(len(edges.weights), np.bool_)
    if scale_slot is not None:
        final = np.zeros(len(scale_slot), np.int64)
        np.maximum.at(final, edges.student_ids, np.arange(len(last)))
        last[final[scale_slot == 1]] = True
    keep = edges.weights > 0  # a piece's weight may underflow to 0 in float32
    if not keep.all():
        edges, last = edges.take(keep), last[keep]
    edges = in_map_order(edges, last)
    fields |= {
        "student_ids": edges.student_ids.astype(np.int32, copy=False),
        "teacher_ids": edges.teacher_ids.astype(np.int32, copy=False),
        "weights": edges.weights,
        "scale_slot": scale_slot,
    }
    return ProjectionMap(**fields) if before is None else replace(before, **fields)


def map_from_rows(
    pair: Pair,
    edges: Edges,
    kind: NDArray[np.uint8],
    config: MultitokenConfig,
    method: str,
    earlier: ProjectionMap | None = None,
) -> ProjectionMap:
    """Create a map from unsorted edges: add up duplicates, normalize, cut, and add scale slots."""
    edges = sum_duplicates(edges).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(kind)) > 0
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        ignored = config.ignore_teacher_ids
        candidates = [i for i in slot_candidates(pair.tables[1]) if i not in ignored]
        edges, slot = add_slots(edges, candidates, len(kind))
    return map_from_edges(
        edges,
        student=pair.sides[0],
        teacher=pair.sides[1],
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method=method,
        top_k=config.top_k,
        history=() if earlier is None else earlier.history,
        reports=() if earlier is None else earlier.reports,
    )


# Recipes


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
    """Return the map's recipe, updated with these options.

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
    """Return the reason why a map does not belong to a pair and recipe, or None if it does."""
    for side, table, new_side in zip(SIDES, pair.tables, pair.sides, strict=True):
        old_side = getattr(existing, side)
        if old_side.vocab_size != new_side.vocab_size:
            return f"its {side} has width {old_side.vocab_size}, not {new_side.vocab_size}"
        if old_side.table is None or old_side.table.sha256() != table.sha256():
            return f"its {side} {old_side.model_id} has other tokens than {new_side.model_id}"
        if old_side.definition_sha256 is None:
            return f"an earlier version wrote it without the {side}'s tokenizer definition"
        if old_side.definition_sha256 != new_side.definition_sha256:
            return f"the tokenizer definition of its {side} {old_side.model_id} has changed"
    earlier = existing.recipe if isinstance(existing, ProjectionMap) else None
    return None if earlier == recipe else _recipe_difference(earlier, recipe)


def _recipe_difference(earlier: Recipe | None, recipe: Recipe | None) -> str:
    if earlier is None or recipe is None:
        return "it contains no recipe, because an earlier version or another command made it"
    old, new = earlier.get("options", {}), recipe["options"]
    if isinstance(old, dict) and (names := differing(old, new)):
        return f"its {names[0]} is {old.get(names[0])}, not {new[names[0]]}"
    changed = (name for name in _DIFFERENCE_WORDS if earlier.get(name) != recipe.get(name))
    return next((_DIFFERENCE_WORDS[name] for name in changed), "its recipe differs")


# Counted or not


def p_kl_problems(projection: ProjectionMap) -> list[str]:
    """Return the reasons why a map's rows are not the probabilities that P-KL needs."""
    slots, exact = projection.weights[projection.is_slot], exact_rows(projection)
    problems = []
    if len(slots):
        problems.append(
            f"scale slots take {percent(float(slots.mean()), 0)} of the weight in "
            f"{plural(len(slots), 'row')}"
        )
    if exact:
        problems.append(
            f"{plural(exact, 'exact row')} put all weight on one token, although the teacher may "
            "use a longer token there"
        )
    if is_counted(projection) is False:
        problems.append("weights were not counted on text")
    return problems


def exact_rows(projection: ProjectionMap) -> int:
    """Return the number of exact rows, without special tokens if these are known."""
    is_exact = projection.row_kind == RowKind.EXACT
    if projection.student.table is not None:
        is_exact = is_exact & (projection.student.table.lengths > 0)
    return int(is_exact.sum())


def is_counted(projection: ProjectionMap) -> bool | None:
    """Whether a map's weights were counted on text; None if the map does not record its stages."""
    if (projection.row_kind == RowKind.COUNTED).any():
        return True
    stages = {step["stage"] for step in projection.history}
    return False if stages & {"multitoken", "generate"} else None
