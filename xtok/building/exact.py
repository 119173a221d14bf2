"""Tokens of both sides that match: by which options, found, and put in the place of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import Canonicalization, MultitokenConfig, SpecialTokens
from xtok.errors import XtokError
from xtok.maps.edges import Edges, single_edges
from xtok.maps.map_arguments import MapLike, bind_map, name_notes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import map_of_edges, with_options
from xtok.maps.records import RowKind, with_report
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import match_names
from xtok.tokenizers.sides import SIDES

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
"""By stage, the options that its history leaves out at their defaults."""


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
    """Return how tokens match where a map is made of another: as there, or as in a config.

    Options at their defaults in the config do not count.
    """
    given: dict[str, Any] = {name: getattr(config, name) for name in _MATCHING}
    changed = {n: value for n, value in given.items() if value != getattr(MultitokenConfig, n)}
    return replace(used_options(projection), **changed)


def options_beside(projection: ProjectionMap, options: MultitokenConfig) -> dict[str, Any]:
    """Return those of how tokens match that a map's history does not have yet."""
    known = used_options(projection).options
    return {
        name: value
        for name, value in options.options.items()
        if name in _MATCHING and known.get(name) != value
    }


class Matches(NamedTuple):
    """The tokens of a pair that match, and the pair in the form that they are compared in."""

    pair: Pair  # without the ignored ids
    equal: Edges  # tokens of equal bytes, weight 1 each
    special: Edges  # special tokens; each row sums to 1
    relaxed: Edges  # of tokens without an exact counterpart, weight 1 each; they keep their slot
    is_exact: NDArray[np.bool_]  # [V_student], the rows of `equal` and `special`


def find_matches(pair: Pair, config: MultitokenConfig) -> Matches:
    """Match the tokens of a pair by bytes, by role or name, and, if they count, by relaxed form."""
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    pair = pair.in_form(config.token_form, ignored)
    ids = np.flatnonzero(pair.equal_bytes >= 0)
    equal = single_edges(ids, pair.equal_bytes[ids])
    special = _special_edges(pair, config)
    relaxed = pair.near_equivalents if config.canonicalization == "relaxed" else {}
    is_exact = np.zeros(pair.shape[0], np.bool_)
    is_exact[equal.student_ids] = is_exact[special.student_ids] = True
    return Matches(pair, equal, special, single_edges(relaxed, relaxed.values()), is_exact)


def _special_edges(pair: Pair, config: MultitokenConfig) -> Edges:
    """Return the rows of special tokens, each of which sums to 1."""
    if config.special_tokens == "fuzzy":
        roles = match_names(*pair.tables, threshold=config.fuzzy_threshold)
    else:
        roles = pair.equal_roles if config.special_tokens == "roles" else {}
    return single_edges(roles, roles.values())


def with_matches(
    edges: Edges,
    kind: RowKind,
    matches: Matches,
    config: MultitokenConfig,
    only: NDArray[np.bool_] | None = None,
) -> tuple[Edges, NDArray[np.uint8]]:
    """Add near-equivalents and special tokens to what a stage made of text tokens.

    Args:
        edges: the stage's own, of any rows.
        kind: of the rows that they make.
        matches: the pair's.
        config: how tokens match.
        only: bool `[V_student]`, the rows that are kept; all if None.

    Returns:
        The edges of these rows, and the kind of every row, uint8 `[V_student]`.
    """
    special = matches.special
    edges = without_ignored(Edges.concatenate([edges, matches.relaxed]), config)
    if only is not None:
        edges, special = (one.take(only[one.student_ids]) for one in (edges, special))
    kinds = np.zeros(matches.pair.shape[0], np.uint8)
    kinds[edges.student_ids], kinds[special.student_ids] = kind, RowKind.ROLE
    return Edges.concatenate([edges, special]), kinds


def without_ignored(edges: Edges, config: MultitokenConfig) -> Edges:
    """Return the edges but for those of ignored ids."""
    if not (config.ignore_student_ids or config.ignore_teacher_ids):
        return edges
    is_ignored = np.isin(edges.student_ids, config.ignore_student_ids)
    is_ignored |= np.isin(edges.teacher_ids, config.ignore_teacher_ids)
    return edges.take(~is_ignored)


def check_ignored(pair: Pair, config: MultitokenConfig) -> None:
    """Raise an `XtokError` if the pair has no such ids to ignore."""
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    for side, width, ids in zip(SIDES, pair.shape, ignored, strict=True):
        if ids and max(ids) >= width:
            raise XtokError(
                f"there is no {side} id {max(ids)} to ignore: "
                f"{getattr(pair, side).model_id} is {width} wide",
                hint=f"give ids from 0 to {width - 1} with {{option}}",
                parameter=f"ignore_{side}_ids",
            )


def with_exact(
    projection: ProjectionMap,
    matches: Matches,
    config: MultitokenConfig,
) -> ProjectionMap:
    """Put matches, which were made with these options, in the place of a map's own rows.

    student   the map's row                     matches           the row then
    ` the`    ` t` 0.76, `he` 0.07, slot 0.17   equal: ` the`     ` the` 1, no slot
    `</s>`    `</` 0.76, `s>` 0.07, slot 0.17   role: `<end>`     `<end>` 1, no slot
    ` The`    ` T` 0.76, `he` 0.07, slot 0.17   relaxed: ` the`   ` the` 0.83, slot 0.17
    ` zq`     ` z` 0.76, `q` 0.07, slot 0.17    none              as it was
    """
    relaxed_rows = matches.relaxed.student_ids
    kind = projection.row_kind.copy()
    kind[matches.equal.student_ids] = RowKind.EXACT
    kind[matches.special.student_ids] = RowKind.ROLE
    kind[relaxed_rows] = RowKind.RELAXED
    near = np.full(len(kind), -1)
    near[relaxed_rows] = matches.relaxed.teacher_ids
    of_row, near_of_row = projection.student_ids, near[projection.student_ids]
    # Of a row with a near-equivalent only the slot is left, and leaves it the rest of 1. In a map
    # of another program, the slot may be on the near-equivalent itself: then there is none.
    is_slot = projection.is_slot & (projection.teacher_ids != near_of_row)
    kept = ~matches.is_exact[of_row] & ((near_of_row < 0) | is_slot)
    others = projection.edges.take(kept)
    taken = np.zeros(len(kind))
    taken[others.student_ids] = others.weights
    relaxed = matches.relaxed._replace(weights=1 - taken[relaxed_rows])
    slot = projection.scale_slot
    result = map_of_edges(
        Edges.concatenate([relaxed, others, matches.equal, matches.special]),
        before=projection,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(taken > 0, slot, np.uint8(0)),
    )
    used = {"special_tokens", "canonicalization"} & config.options.keys()
    return result.after("reapply-exact", {name: config.options[name] for name in sorted(used)})


def reapply_exact(
    projection: MapLike,
    pair: Pair | None = None,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
) -> ProjectionMap:
    """Give each student token whose bytes a teacher token has that one entry, of weight 1.

    Special tokens are paired by role. These rows have no slot; the others stay. With the
    canonicalization `relaxed`, a token without an exact counterpart that has a near-equivalent has
    this one entry and its slot. Token form and ignored ids are those the map was made with.

    >>> spelled = xtok.multitoken(xtok.pair("bytes", "bytes"))
    >>> spelled["a"].kind, xtok.reapply_exact(spelled)["a"].kind
    ('pieces', 'exact')

    Args:
        projection: a map that carries both token tables, or whose pair is given; or its path.
        pair: the map's models; needed for a map without tokens, and for display strings, which a
            map does not carry.
        special_tokens: as in `MultitokenConfig`; None takes what the map was made with.
        canonicalization: None takes what the map was made with.

    Raises:
        XtokError: if the map carries no token tables, or was made with display strings and the
            pair is not given, or is of other tokenizers.
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
    return with_report(replace(result, recipe=recipe), notes)
