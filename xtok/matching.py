"""Which tokens of two vocabularies are matched, by the options of a map, and as what edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.canonical import match_names, match_roles
from xtok.config import MultitokenConfig, TokenForm
from xtok.errors import XtokError
from xtok.projection import Edges, ProjectionMap
from xtok.tokens import TokenTable, decode_vocabulary

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


def used_options(projection: ProjectionMap) -> MultitokenConfig:
    """Return what a map's last stage of each kind says of how tokens are matched."""
    found: dict[str, Any] = {}
    for step in projection.history:
        found |= {name: step["options"][name] for name in _MATCHING if name in step["options"]}
    options: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in found.items()
    }
    try:
        return MultitokenConfig(**options)
    except (TypeError, ValueError) as error:
        raise XtokError(
            f"the map's history names options that this xtok does not know: {error}",
            hint="build the map anew, or take the version of xtok that it was made with",
        ) from error


_MATCHING = (
    "special_tokens",
    "fuzzy_threshold",
    "fuzzy_top_k",
    "canonicalization",
    "token_form",
    "ignore_student_ids",
    "ignore_teacher_ids",
)


def in_form(
    table: TokenTable, tokenizer: Tokenizer | None, form: TokenForm, ignore: tuple[int, ...]
) -> TokenTable:
    """Return a map's table in the form that tokens are compared in, without the ignored ids."""
    if form == "raw" and tokenizer is None:
        raise XtokError(
            "the map was made with --token-form raw, and carries no display strings",
            hint="give both tokenizers with --student-model and --teacher-model",
        )
    if tokenizer is not None and form == "raw":
        return tokenizer.table_as(form, ignore=ignore)
    if form == "bytes" and not ignore:
        return table
    changed, _ = decode_vocabulary(
        table.entries(), width=len(table), form=form, ignore=frozenset(ignore)
    )
    return changed.like(table)


def special_edges(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> Edges:
    """Return the rows of special tokens, each of which sums to 1."""
    if config.special_tokens == "fuzzy":
        pairs = match_names(
            rows, columns, threshold=config.fuzzy_threshold, top_k=config.fuzzy_top_k
        )
        s, t, w = (np.array([pair[i] for pair in pairs]) for i in range(3))
        return Edges(s.astype(np.int32), t.astype(np.int32), w.astype(np.float64)).normalized()
    return single_edges(match_roles(rows, columns) if config.special_tokens == "roles" else {})


def without(edges: Edges, student_ids: Sequence[int], teacher_ids: Sequence[int]) -> Edges:
    """Return the edges but for those of ignored ids."""
    if not (student_ids or teacher_ids):
        return edges
    ignored = np.isin(edges.student_ids, student_ids) | np.isin(edges.teacher_ids, teacher_ids)
    return edges.take(~ignored)


def beside_slots(edges: Edges, slots: Edges) -> NDArray[np.float64]:
    """Return what is left of 1 for single edges beside the slots of their rows, float64."""
    taken = np.zeros(1 + max(edges.student_ids.max(initial=0), slots.student_ids.max(initial=0)))
    taken[slots.student_ids] = slots.weights
    left: NDArray[np.float64] = 1 - taken[edges.student_ids]
    return left


def single_edges(pairs: Mapping[int, int]) -> Edges:
    """Return an edge of weight 1 for each student id to teacher id."""
    s, t = (np.fromiter(ids, np.int32, len(pairs)) for ids in (pairs, pairs.values()))
    return Edges(s, t, np.ones(len(pairs), np.float32))
