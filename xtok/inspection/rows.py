"""A row of a map, and why it is as it is: bytes, kind, pieces both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtok.maps.projection_map import ProjectionMap, RowEntry, RowKind
from xtok.tokenizers.classes import token_class
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.relaxed import relaxed_form
from xtok.tokenizers.table import TokenTable, TokenType

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class ExplainedEntry(RowEntry):
    """An entry of a row, and what its token has to do with the row's."""

    relation: str  # empty if the map carries no tokens


@dataclass(frozen=True, kw_only=True)
class SpelledPiece:
    """A teacher token that spells a part of the row's token, or is spelled with it."""

    token_id: int
    token: str


@dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """A row of a map, and why it is as it is."""

    student_id: int
    token: str | None  # escaped, or a name; None if the map carries no tokens
    bytes: str  # in hexadecimal
    type: str  # the name of a `TokenType`, in lower case
    token_class: str  # the label of a `TokenClass`
    roles: tuple[str, ...]
    kind: str  # the name of a `RowKind`, in lower case
    why: str
    entries: tuple[ExplainedEntry, ...]
    forward: tuple[SpelledPiece, ...] | None  # its pieces; None without the teacher's tokenizer
    reverse: tuple[SpelledPiece, ...] | None  # the first teacher tokens that have it as a piece
    reverse_count: int | None  # how many there are in all; None without the student's tokenizer


def explain_row(projection: ProjectionMap, pair: Pair, student_id: int) -> ExplainedRow:
    """Explain one row; as far as the pair has tokenizers, its token is spelled in pieces."""
    rows, columns = projection.student.table, projection.teacher.table
    row, kind = projection[student_id], RowKind(int(projection.row_kind[student_id]))
    forward = reverse = None
    why = ""
    if rows is not None and columns is not None:
        why = _why(kind, rows, columns, student_id)
        if pair.teacher_tokenizer is not None and rows[student_id]:
            forward = _named(columns, pair.pieces(np.array([student_id])).ids.tolist())
        if pair.student_tokenizer is not None and rows[student_id]:
            reverse = _named(columns, _holders(student_id, pair, rows, columns))
    return ExplainedRow(
        student_id=student_id,
        **_about(rows, student_id),
        kind=row.kind,
        why=why,
        entries=tuple(
            ExplainedEntry(**vars(e), relation=_relation(e, rows, columns, student_id))
            for e in row.entries
        ),
        forward=forward,
        reverse=None if reverse is None else reverse[:_SHOWN],
        reverse_count=None if reverse is None else len(reverse),
    )


def _about(table: TokenTable | None, token_id: int) -> dict[str, Any]:
    if table is None:
        return {"token": None, "bytes": "", "type": "", "token_class": "", "roles": ()}
    return {
        "token": table.name(token_id),
        "bytes": table[token_id].hex(" "),
        "type": TokenType(int(table.types[token_id])).name.lower(),
        "token_class": token_class(table, token_id).label,
        "roles": _roles(table, token_id),
    }


def _roles(table: TokenTable, token_id: int) -> tuple[str, ...]:
    return table.roles_by_id.get(token_id, ())


def _why(kind: RowKind, rows: TokenTable, columns: TokenTable, student_id: int) -> str:
    if kind == RowKind.EMPTY and student_id in rows.control_names:
        roles = _roles(rows, student_id)
        return "a special token without a counterpart" + (f" ({', '.join(roles)})" if roles else "")
    if kind == RowKind.EMPTY and not rows[student_id]:
        return "the tokenizer does not use this id"
    same = columns.canonical_ids().get(rows[student_id])
    if same is None or kind not in (RowKind.EXACT, RowKind.PIECES):
        return _REASONS[kind]
    if kind == RowKind.EXACT:
        return f"exact: teacher id {same} has the same bytes"
    return f"teacher id {same} has the same bytes, but the row is not exact"


_REASONS = {
    RowKind.EMPTY: "its id was ignored, or the teacher cannot spell it",
    RowKind.EXACT: "exact, but no teacher token has these bytes: equal in another token form, or "
    "foreign",
    RowKind.PIECES: "no teacher token has these bytes: spelled in pieces",
    RowKind.ROLE: "a special token, paired by role or by name",
    RowKind.RELAXED: "no teacher token has these bytes; one has the same relaxed form",
    RowKind.SIMILAR: "by the similarity of spelling or embeddings",
    RowKind.COUNTED: "counted on text, given or synthetic",
    RowKind.MIXED: "from several sources, or an unknown one",
}


def _relation(
    entry: RowEntry, rows: TokenTable | None, columns: TokenTable | None, student_id: int
) -> str:
    if entry.is_slot:
        return "slot"
    if rows is None or columns is None:
        return ""
    ours, theirs = rows[student_id], columns[entry.teacher_id]
    if not ours or not theirs:
        shared = [r for r in _roles(rows, student_id) if r in _roles(columns, entry.teacher_id)]
        return f"role {', '.join(shared)}" if shared else "special token"
    if ours == theirs:
        return "the same bytes"
    if relaxed_form(ours) == relaxed_form(theirs):
        return "the same relaxed form"
    if theirs in ours:
        return "its beginning" if ours.startswith(theirs) else "a part of it"
    if ours in theirs:
        return "longer, begins with it" if theirs.startswith(ours) else "longer, contains it"
    return "neither contains the other"


def _named(columns: TokenTable, ids: Sequence[int]) -> tuple[SpelledPiece, ...]:
    return tuple(SpelledPiece(token_id=t, token=columns.name(t)) for t in ids)


def _holders(student_id: int, pair: Pair, rows: TokenTable, columns: TokenTable) -> list[int]:
    """Return the teacher tokens that have a student token as a piece: first piece, then second."""
    holders = [t for t, whole in enumerate(columns.tokens()) if rows[student_id] in whole]
    spelled, counts = pair.reversed.pieces(np.array(holders, np.int64))
    pieces = [ids.tolist() for ids in np.split(spelled, np.cumsum(counts)[:-1])]
    places = {
        t: p.index(student_id) for t, p in zip(holders, pieces, strict=False) if student_id in p
    }
    return sorted(places, key=lambda t: (places[t], t))
