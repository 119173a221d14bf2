"""Tokens of two vocabularies that match: equal bytes, special tokens, near-equivalents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.edges import Edges, single_edges
from xtok.maps.records import RowKind
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import match_names
from xtok.tokenizers.sides import SIDES


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


def matching_options(config: MultitokenConfig) -> dict[str, str]:
    """Return the options of matches as a map's history has them."""
    options: dict[str, str] = {"special_tokens": config.special_tokens}
    if config.canonicalization == "relaxed":
        options["canonicalization"] = "relaxed"
    return options
