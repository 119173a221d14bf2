"""`explain`: return rows of a map with the reasons for their entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.maps.edges import row_starts
from xtok.maps.map_arguments import MapLike, bind_map
from xtok.maps.projection_map import ProjectionMap, RowEntry
from xtok.maps.records import RowKind
from xtok.tokenizers.classes import TokenClass, classes_named, token_classes
from xtok.tokenizers.pairs import Pair, require_table
from xtok.tokenizers.relaxed import relaxed_form
from xtok.tokenizers.table import Token, TokenTable, TokenType

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ExplainedEntry(RowEntry):
    """An entry of a row, with the relation between its two tokens."""

    relation: str  # empty if the map contains no tokens


@dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """A row of a map, with the reason for its entries."""

    student_id: int
    token: str | None  # escaped text or a name; None if the map contains no tokens
    bytes: str  # in hexadecimal
    type: str  # the name of a `TokenType`, in lower case
    token_class: str  # the name of a `TokenClass`, in lower case
    roles: tuple[str, ...]
    kind: str  # the name of a `RowKind`, in lower case
    why: str
    entries: tuple[ExplainedEntry, ...]
    pieces: tuple[str, ...] | None  # in teacher tokens; None without the teacher's tokenizer


def explain_row(projection: ProjectionMap, pair: Pair, student_id: int) -> ExplainedRow:
    """Explain one row; if the pair has a teacher tokenizer, add the student token's pieces."""
    student, teacher = projection.student.table, projection.teacher.table
    row, kind = projection[student_id], RowKind(int(projection.row_kind[student_id]))
    why, pieces = "", None
    if student is not None and teacher is not None:
        why = _reason(kind, student, teacher, student_id)
        if pair.teacher_tokenizer is not None and student[student_id]:
            pieces = tuple(map(teacher.name, pair.pieces(np.array([student_id])).ids.tolist()))
    return ExplainedRow(
        student_id=student_id,
        **_token_fields(student, student_id),
        kind=row.kind,
        why=why,
        entries=tuple(
            ExplainedEntry(**vars(e), relation=_relation(e, student, teacher, student_id))
            for e in row.entries
        ),
        pieces=pieces,
    )


def _token_fields(table: TokenTable | None, token_id: int) -> dict[str, Any]:
    if table is None:
        return {"token": None, "bytes": "", "type": "", "token_class": "", "roles": ()}
    return {
        "token": table.name(token_id),
        "bytes": table[token_id].hex(" "),
        "type": TokenType(int(table.types[token_id])).name.lower(),
        "token_class": TokenClass(token_classes(table)[token_id]).name.lower(),
        "roles": table.roles_by_id.get(token_id, ()),
    }


def _reason(kind: RowKind, student: TokenTable, teacher: TokenTable, student_id: int) -> str:
    if kind == RowKind.EMPTY and student_id in student.control_names:
        roles = ", ".join(student.roles_by_id.get(student_id, ()))
        return "a special token without a counterpart" + (f" ({roles})" if roles else "")
    if kind == RowKind.EMPTY and not student[student_id]:
        return "the tokenizer does not use this id"
    canonical_id = teacher.canonical_ids().get(student[student_id])
    if canonical_id is None or kind not in (RowKind.EXACT, RowKind.PIECES):
        return _REASONS[kind]
    if kind == RowKind.EXACT:
        return f"exact: teacher id {canonical_id} has the same bytes"
    return f"teacher id {canonical_id} has the same bytes, but the row is not exact"


_REASONS = {
    RowKind.EMPTY: "the id was ignored, or the teacher cannot spell the token",
    RowKind.EXACT: "exact, but no teacher token has these bytes: the tokens are equal in another "
    "token form, or another program made the map",
    RowKind.PIECES: "no teacher token has these bytes; spelled in pieces",
    RowKind.ROLE: "a special token that is paired by role or name",
    RowKind.RELAXED: "no teacher token has these bytes, but a token has the same relaxed form",
    RowKind.SIMILAR: "similar in spelling or embeddings",
    RowKind.COUNTED: "counted on text or synthetic text",
    RowKind.MIXED: "from several or unknown sources",
}


def _relation(
    entry: RowEntry, student: TokenTable | None, teacher: TokenTable | None, student_id: int
) -> str:
    if entry.is_slot:
        return "slot"
    if student is None or teacher is None:
        return ""
    token, partner = student[student_id], teacher[entry.teacher_id]
    if token and partner:
        return next(words for holds, words in _BYTE_RELATIONS if holds(token, partner))
    teacher_roles = teacher.roles_by_id.get(entry.teacher_id, ())
    shared = [role for role in student.roles_by_id.get(student_id, ()) if role in teacher_roles]
    return f"role {', '.join(shared)}" if shared else "special token"


_BYTE_RELATIONS: tuple[tuple[Callable[[bytes, bytes], bool], str], ...] = (
    (lambda s, t: s == t, "the same bytes"),
    (lambda s, t: relaxed_form(s) == relaxed_form(t), "the same relaxed form"),
    (lambda s, t: s.startswith(t), "its beginning"),
    (lambda s, t: t in s, "a part of it"),
    (lambda s, t: t.startswith(s), "longer, begins with it"),
    (lambda s, t: s in t, "longer, contains it"),
    (lambda s, t: True, "neither contains the other"),
)
"""Relations between the bytes of two tokens; the first match is used."""


@dataclass(frozen=True, kw_only=True)
class Explanation(Generic[R]):
    """Explained rows of a projection map, or explained tokens of an event or spelling map."""

    student: str  # model id of the student
    teacher: str
    rows: tuple[R, ...]
    rows_matching: int | None = None  # rows that match the filter; None for tokens


def explain(
    projection: MapLike,
    tokens: Token | Sequence[Token] = (),
    *,
    pair: Pair | None = None,
    worst: int | None = None,
    token_class: str | None = None,
    kind: str | None = None,
) -> Explanation[ExplainedRow]:
    """Explain rows of a map: the rows of given tokens, or the worst rows.

    >>> xtok.explain("map.safetensors", "201").rows[0].why  # doctest: +SKIP
    'no teacher token has these bytes; spelled in pieces'

    The worst rows are the rows with the lowest maximum weight. Slots are ignored, and empty rows
    come first. Unused ids are listed only if their class is requested.

    Args:
        projection: a map, or its path.
        tokens: student tokens as text, bytes or ids (see `Vocabulary.ids_of`).
        pair: the map's pair. If the pair has tokenizers, the result includes each token's pieces in
            the other vocabulary.
        worst: number of worst rows. Default with `token_class` or `kind`: 20.
        token_class: restrict the worst rows to a class, such as `digits`.
        kind: restrict the worst rows to a `RowKind`, in lower case.

    Raises:
        XtokError: if a token, class or kind is unknown, or the map belongs to another pair.
    """
    m, pair = bind_map(ProjectionMap.of(projection), pair)
    ids, matching = m.student.all_ids_of(tokens), None
    if worst is not None and worst < 1:
        raise ValueError(f"worst is {worst}, expected at least 1")
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
    use = np.ones(projection.shape[0], np.bool_)
    if token_class:
        table = require_table(projection.student)
        use = np.isin(token_classes(table), classes_named(token_class))
    elif projection.student.table is not None:
        use = token_classes(projection.student.table) != TokenClass.UNUSED
    if kind is not None:
        kinds = {member.name.lower(): member for member in RowKind}
        if kind not in kinds:
            raise XtokError(
                f"unknown kind of row {kind!r}", hint=f"give one of: {', '.join(kinds)}"
            )
        use &= projection.row_kind == kinds[kind]
    heaviest = np.zeros(projection.shape[0])
    first = row_starts(projection.student_ids)
    heaviest[projection.student_ids[first]] = projection.weights[first]
    rows = np.flatnonzero(use)
    by_weight: NDArray[np.int64] = rows[np.argsort(heaviest[rows], kind="stable")]
    return by_weight
