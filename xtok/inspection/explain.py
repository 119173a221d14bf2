"""`explain`: rows of a map that are asked for, or the worst ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.inspection.rows import ExplainedRow, explain_row
from xtok.maps.edges import row_starts
from xtok.maps.given import MapLike, admitted, as_map
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.tokenizers.classes import TokenClass, classes_named, token_classes
from xtok.tokenizers.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Rows of a map, explained."""

    student: str  # model id of the rows
    teacher: str
    rows: tuple[ExplainedRow, ...]
    rows_matching: int | None  # of how many the worst are listed; None for rows asked for by token


def explain(
    projection: MapLike,
    tokens: str | bytes | int | Sequence[str | bytes | int] = (),
    *,
    pair: Pair | None = None,
    worst: int | None = None,
    token_class: str | None = None,
    kind: str | None = None,
) -> Explanation:
    """Explain rows of a map: those of some tokens, or the worst ones.

    >>> xtok.explain("map.safetensors", "201").rows[0].why  # doctest: +SKIP
    'no teacher token has these bytes: spelled in pieces'

    The worst rows are those with the least weight on their heaviest entry, slots left out; empty
    rows come first. Ids without a token are among them only if their class is named.

    Args:
        projection: a map, or the path of one.
        tokens: student tokens: text, bytes or ids, as `ProjectionMap.student_ids_of` takes them.
        pair: the map's; as far as it has tokenizers, tokens are spelled in each other's pieces.
        worst: how many of the worst rows to explain; 20 if there is a `token_class` or `kind`.
        token_class: of these, a class or a group of them, as `classes_named` takes it.
        kind: of these, the name of a `RowKind`, in lower case.

    Raises:
        XtokError: if there is no such token, class or kind, or the map is of another pair.
    """
    pair, [m] = admitted(pair, as_map(projection))
    if isinstance(tokens, str | bytes | int):
        tokens = [tokens]
    ids = [i for token in tokens for i in m.student_ids_of(token)]
    matching = None
    if worst is not None and worst < 1:
        raise ValueError(f"worst is {worst}, and must be at least 1")
    if worst or token_class or kind:
        by_weight = _worst_first(m, token_class, kind)
        matching = len(by_weight)
        ids += by_weight[: worst or 20].tolist()
    return Explanation(
        student=m.student.model_id,
        teacher=m.teacher.model_id,
        rows=tuple(explain_row(m, pair, i) for i in ids),
        rows_matching=matching,
    )


def _worst_first(
    projection: ProjectionMap, token_class: str | None, kind: str | None
) -> NDArray[np.int64]:
    """Return the student ids of a class and a kind, those with the lightest best entry first."""
    use = np.ones(projection.shape[0], np.bool_)
    table = projection.student.table
    if table is not None:
        named = classes_named(token_class) if token_class else set(TokenClass) - {TokenClass.UNUSED}
        use = np.isin(token_classes(table), list(named))
    elif token_class:
        raise XtokError(
            "the map carries no tokens, so no classes: xtok did not write it",
            hint="list its rows by kind alone",
        )
    if kind is not None:
        kinds = {member.name.lower(): member for member in RowKind}
        if kind not in kinds:
            raise XtokError(
                f"there is no kind of row {kind!r}", hint=f"give one of: {', '.join(kinds)}"
            )
        use &= projection.row_kind == kinds[kind]
    heaviest = np.zeros(projection.shape[0])
    first = row_starts(projection.student_ids)
    heaviest[projection.student_ids[first]] = projection.weights[first]
    rows = np.flatnonzero(use)
    by_weight: NDArray[np.int64] = rows[np.argsort(heaviest[rows], kind="stable")]
    return by_weight
