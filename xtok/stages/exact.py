"""`reapply_exact`: tokens that both sides have, matched to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import Canonicalization, MultitokenConfig, SpecialTokens, TokenForm
from xtok.errors import XtokError
from xtok.maps.edges import Edges, heaviest
from xtok.maps.file import MapLike, as_map
from xtok.maps.pair import require_table, with_vocabularies
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import finished, history_with, reported, stage_report
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.relaxed import match_relaxed
from xtok.vocab.roles import match_names, match_roles
from xtok.vocab.table import TokenTable, decode_vocabulary, match_bytes


def reapply_exact(
    projection: MapLike,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
) -> ProjectionMap:
    """Give each student token whose bytes a teacher token has that one entry, of weight 1.

    Special tokens are paired likewise. These rows have no slot; the others stay. With the
    canonicalization `relaxed`, a token without an exact counterpart that has a near-equivalent has
    this one entry, beside its slot. Token form and ignored ids are those the map was made with.

    Args:
        projection: a map that carries both token tables, or whose models are given; or its path.
        special_tokens: as in `MultitokenConfig`; None takes what the map was made with.
        canonicalization: likewise.
        student_model: the model of the rows, as `build` takes it: for a map without tokens, and for
            display strings, which a map does not carry.
        teacher_model: the model of the columns, likewise.

    Raises:
        XtokError: if the map carries no token tables, or was made with display strings and the
            models are not given, or is of other tokenizers.
    """
    student = None if student_model is None else as_tokenizer(student_model)
    teacher = None if teacher_model is None else as_tokenizer(teacher_model)
    projection = with_vocabularies(
        as_map(projection),
        student=None if student is None else student.vocabulary,
        teacher=None if teacher is None else teacher.vocabulary,
    )
    rows, columns = require_table(projection.student), require_table(projection.teacher)
    options = used_options(projection)
    options = replace(
        options,
        special_tokens=special_tokens or options.special_tokens,
        canonicalization=canonicalization or options.canonicalization,
    )
    rows = in_form(rows, student, options.token_form, options.ignore_student_ids)
    columns = in_form(columns, teacher, options.token_form, options.ignore_teacher_ids)
    return with_exact(projection, exact_matches(rows, columns, options), options)


@dataclass(frozen=True)
class ExactMatches:
    """The rows that need no spelling, and those that one near-equivalent settles.

    Attributes:
        equal: tokens of equal bytes, weight 1 each.
        special: special tokens; each row sums to 1.
        relaxed: near-equivalents of tokens without an exact counterpart, weight 1 each; these rows
            keep their slot.
        is_exact: bool `[V_student]`, the rows of `equal` and `special`.
    """

    equal: Edges
    special: Edges
    relaxed: Edges
    is_exact: NDArray[np.bool_]


def exact_matches(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> ExactMatches:
    """Match the tokens of two tables, which are in the form that they are compared in."""
    equal = single_edges(match_bytes(rows, columns))
    special = special_edges(rows, columns, config)
    relaxed = match_relaxed(rows, columns) if config.canonicalization == "relaxed" else {}
    is_exact = np.zeros(len(rows), np.bool_)
    is_exact[equal.student_ids] = is_exact[special.student_ids] = True
    return ExactMatches(equal, special, single_edges(relaxed), is_exact)


def with_exact(
    projection: ProjectionMap, matches: ExactMatches, config: MultitokenConfig
) -> ProjectionMap:
    """Put matches in the place of a map's own rows.

    Args:
        projection: the map.
        matches: of its two vocabularies.
        config: the options that the matches were made with.
    """
    special = heaviest(matches.special, projection.top_k)
    kind = projection.row_kind.copy()
    kind[matches.equal.student_ids], kind[special.student_ids] = RowKind.EXACT, RowKind.ROLE
    kind[matches.relaxed.student_ids] = RowKind.RELAXED
    replaced = np.zeros(len(kind), np.bool_)
    replaced[matches.relaxed.student_ids] = True
    of_row = projection.student_ids
    kept = ~matches.is_exact[of_row] & (~replaced[of_row] | projection.is_slot)
    others = projection.edges.take(kept)
    relaxed = matches.relaxed._replace(weights=beside_slots(matches.relaxed, others))
    slot = projection.scale_slot
    used: dict[str, str] = {"special_tokens": config.special_tokens}
    if config.canonicalization == "relaxed":
        used["canonicalization"] = "relaxed"
    result = finished(
        Edges.concatenate([relaxed, others, matches.equal, special]),
        student=projection.student,
        teacher=projection.teacher,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(matches.is_exact, np.uint8(0), slot),
        method=projection.method,
        top_k=projection.top_k,
        history=history_with(projection, {"stage": "reapply-exact", "options": used}),
        reports=projection.reports,
    )
    return reported(result, stage_report("reapply-exact", result))


def used_options(projection: ProjectionMap) -> MultitokenConfig:
    """Return what a map's last stage of each kind says of how tokens are matched."""
    options: dict[str, Any] = {}
    for step in projection.history:
        for name in _MATCHING:
            if name in step["options"]:
                value = step["options"][name]
                options[name] = tuple(value) if isinstance(value, list) else value
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
            "the map was made with the token form raw, and carries no display strings",
            hint="give both models, the student's with {option}",
            parameter="student_model",
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
