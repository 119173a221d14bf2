"""Match the tokens of both sides, and replace the rows of matching tokens in a map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import BuildConfig, Canonicalization, MultitokenConfig, SpecialTokens
from xtok.errors import XtokError
from xtok.maps.creating import map_from_edges
from xtok.maps.edges import Edges, single_edges
from xtok.maps.map_arguments import MapLike, bind_map, name_notes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import with_options
from xtok.maps.records import RowKind, stage_report
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import match_names
from xtok.tokenizers.table import SIDES

# Options that affect matching
_MATCHING = "special_tokens", "fuzzy_threshold", *MultitokenConfig.rarely_recorded

# For each stage, the options that the history omits at their default values
_DEFAULTS_LEFT_OUT = {"multitoken": _MATCHING, "reapply-exact": ("canonicalization",)}


def used_options(projection: ProjectionMap) -> MultitokenConfig:
    """Return the token-matching options that a map's history records."""
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
            f"the map's history contains unsupported options: {error}",
            hint="rebuild the map, or use the version of xtok that made it",
        ) from error


def config_after(projection: ProjectionMap, config: BuildConfig) -> BuildConfig:
    """Replace the default token-matching options in `config` by the map's options."""
    used = used_options(projection)
    defaults = [n for n in _MATCHING if getattr(config, n) == getattr(MultitokenConfig, n)]
    return replace(config, **{name: getattr(used, name) for name in defaults})


def options_beside(projection: ProjectionMap, options: MultitokenConfig) -> dict[str, Any]:
    """Return the token-matching options that differ from the values in the map's history."""
    used = used_options(projection).options
    return {
        name: value
        for name, value in options.options.items()
        if name in _MATCHING and used.get(name) != value
    }


class Matches(NamedTuple):
    """Matching tokens of a pair."""

    pair: Pair  # the pair in the token form that was compared, without ignored ids
    equal: Edges  # edges of tokens with equal bytes, weight 1
    special: Edges  # edges of special tokens, weight 1
    relaxed: Edges  # edges to near-equivalents, for tokens without an exact match, weight 1
    is_exact: NDArray[np.bool_]  # [V_student], rows with edges in `equal` or `special`


def find_matches(pair: Pair, config: MultitokenConfig) -> Matches:
    """Match tokens by bytes, by role or name, and optionally by relaxed form."""
    pair = pair.in_form(config.token_form, config.ignored)
    ids = np.flatnonzero(pair.equal_bytes >= 0)
    equal = single_edges(ids, pair.equal_bytes[ids])
    roles = pair.equal_roles if config.special_tokens == "roles" else {}
    if config.special_tokens == "fuzzy":
        roles = match_names(*pair.tables, threshold=config.fuzzy_threshold)
    special = single_edges(roles, roles.values())
    relaxed = pair.near_equivalents if config.canonicalization == "relaxed" else {}
    is_exact = np.zeros(pair.shape[0], np.bool_)
    is_exact[equal.student_ids] = is_exact[special.student_ids] = True
    return Matches(pair, equal, special, single_edges(relaxed, relaxed.values()), is_exact)


def with_matches(
    edges: Edges,
    kind: RowKind,
    matches: Matches,
    config: MultitokenConfig,
    only: NDArray[np.bool_] | None = None,
) -> tuple[Edges, NDArray[np.uint8]]:
    """Add the edges of near-equivalents and of special tokens to the edges of a stage.

    `kind` is the kind of the stage's rows. If the mask `only`, bool `[V_student]`, is given, all
    other rows are removed. The second result is the kind of each row, uint8 `[V_student]`.
    """
    special = matches.special
    edges = without_ignored(Edges.concatenate([edges, matches.relaxed]), config)
    if only is not None:
        edges, special = (part.take(only[part.student_ids]) for part in (edges, special))
    kinds = np.zeros(matches.pair.shape[0], np.uint8)
    kinds[edges.student_ids], kinds[special.student_ids] = kind, RowKind.ROLE
    return Edges.concatenate([edges, special]), kinds


def without_ignored(edges: Edges, config: MultitokenConfig) -> Edges:
    """Remove the edges of ignored ids."""
    if not any(config.ignored):
        return edges
    is_ignored = np.isin(edges.student_ids, config.ignore_student_ids)
    is_ignored |= np.isin(edges.teacher_ids, config.ignore_teacher_ids)
    return edges.take(~is_ignored)


def check_ignored(pair: Pair, config: MultitokenConfig) -> None:
    """Raise an `XtokError` if an ignored id does not exist."""
    for side, width, ids in zip(SIDES, pair.shape, config.ignored, strict=True):
        if ids and max(ids) >= width:
            raise XtokError(
                f"the ignored {side} id {max(ids)} does not exist, because "
                f"{getattr(pair, side).model_id} has width {width}",
                hint=f"pass ids from 0 to {width - 1} with {{option}}",
                parameter=f"ignore_{side}_ids",
            )


def with_exact(
    projection: ProjectionMap, matches: Matches, config: MultitokenConfig
) -> ProjectionMap:
    """Replace the rows of matching tokens in a map.

    student   row in the map                  match             new row
    ` the`    ` t` 0.76, `he` 0.07, slot 0.17   equal: ` the`     ` the` 1, no slot
    `</s>`    `</` 0.76, `s>` 0.07, slot 0.17   role: `<end>`     `<end>` 1, no slot
    ` The`    ` T` 0.76, `he` 0.07, slot 0.17   relaxed: ` the`   ` the` 0.83, slot 0.17
    ` zq`     ` z` 0.76, `q` 0.07, slot 0.17    none              unchanged
    """
    relaxed_rows = matches.relaxed.student_ids
    kind = projection.row_kind.copy()
    kind[matches.equal.student_ids] = RowKind.EXACT
    kind[matches.special.student_ids] = RowKind.ROLE
    kind[relaxed_rows] = RowKind.RELAXED
    near = np.full(len(kind), -1)
    near[relaxed_rows] = matches.relaxed.teacher_ids
    row_ids, row_near = projection.student_ids, near[projection.student_ids]
    # A row with a near-equivalent keeps its slot, and the near-equivalent gets the remaining
    # weight. In a map from another program, the near-equivalent can be the slot. Such a slot is
    # dropped.
    is_slot = projection.is_slot & (projection.teacher_ids != row_near)
    is_kept = ~matches.is_exact[row_ids] & ((row_near < 0) | is_slot)
    kept_edges = projection.edges.take(is_kept)
    slot_rows = np.zeros(len(kind))
    slot_rows[kept_edges.student_ids] = kept_edges.weights
    relaxed = matches.relaxed._replace(weights=1 - slot_rows[relaxed_rows])
    slot = projection.scale_slot
    result = map_from_edges(
        Edges.concatenate([relaxed, kept_edges, matches.equal, matches.special]),
        before=projection,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(slot_rows > 0, slot, np.uint8(0)),
    )
    names = {"special_tokens", "canonicalization"} & config.options.keys()
    return result.after("reapply-exact", {name: config.options[name] for name in sorted(names)})


def reapply_exact(
    projection: MapLike,
    pair: Pair | None = None,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
) -> ProjectionMap:
    """Replace the row of each token that matches a teacher token by one entry with weight 1.

    Tokens are compared by bytes, and special tokens by role. The new rows have no slot. With
    `canonicalization="relaxed"`, other tokens are mapped to near-equivalents; their rows keep the
    scale slot.

    >>> spelled = xtok.multitoken(xtok.load_pair("bytes", "bytes"))
    >>> spelled["a"].kind, xtok.reapply_exact(spelled)["a"].kind
    ('pieces', 'exact')

    Args:
        projection: a map or its path.
        pair: the two models of the map. Required if the map contains no tokens, or was built from
            display strings.
        special_tokens: see `MultitokenConfig`. Default: the map's value.
        canonicalization: see `MultitokenConfig`. Default: the map's value.

    Raises:
        XtokError: if a required pair is missing, or if the pair has other tokens than the map.
    """
    source = ProjectionMap.of(projection)
    projection, pair = bind_map(source, pair)
    notes = name_notes(pair, source)
    used = used_options(projection)
    options = replace(
        used,
        special_tokens=special_tokens or used.special_tokens,
        canonicalization=canonicalization or used.canonicalization,
    )
    result = with_exact(projection, find_matches(pair, options), options)
    recipe = with_options(projection, exact_match=True) if options == used else None
    report = stage_report("reapply-exact", result, notes)
    return replace(result, reports=(*result.reports, report), recipe=recipe)
