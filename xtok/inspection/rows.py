"""Why a row of a map, or an event of a token, is as it is: bytes, pieces both ways, stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.config import FIRST_PIECE_WEIGHT, MAX_ENTRIES, PIECE_DECAY, MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.projection_map import (
    ProjectionMap,
    RowEntry,
    RowKind,
    require_table,
    token_name,
)
from xtok.vocab.classes import TokenClass, text_class
from xtok.vocab.display import quoted
from xtok.vocab.relaxed import relaxed_form
from xtok.vocab.table import TokenTable, TokenType

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_SHOWN = 10
_MEMBERS = 20
_OTHER = {"student": "teacher", "teacher": "student"}


@dataclass(frozen=True, kw_only=True)
class InspectedEntry:
    """An entry of a row, or another token of an event, and what it has to do with the row's."""

    side: str
    token_id: int
    token: str | None
    weight: float | None  # None in an event
    is_slot: bool
    relation: str  # empty if the map carries no tokens


@dataclass(frozen=True, kw_only=True)
class SpelledPiece:
    """A token of one pass of `multitoken`, and the weight that this pass gives it.

    That is before both passes are added up, the row is cut, and exact tokens get rows of their own.
    """

    token_id: int  # forward, a piece of the row's token; in reverse, a token that has it as a piece
    token: str
    place: int  # which piece it is, from 0
    weight: float  # 0 beyond `max_pieces`, where weights were counted, and in events


@dataclass(frozen=True, kw_only=True)
class InspectedRow:
    """A row of a map, or a token with its event, and why it is as it is."""

    side: str  # `student`; of an event map `teacher`, where the student has no such token
    token_id: int
    token: str | None  # escaped, or a name; None if the map carries no tokens
    bytes: str  # in hexadecimal
    type: str  # the name of a `TokenType`, in lower case
    token_class: str  # the label of a `TokenClass`
    roles: tuple[str, ...]
    kind: str  # of the row, in lower case; `event 17`, or `rest`
    why: str
    entries: tuple[InspectedEntry, ...]
    num_entries: int  # in all; an event's list has the first few
    forward: tuple[SpelledPiece, ...] | None  # None without the other side's model
    reverse: tuple[SpelledPiece, ...] | None  # the heaviest; None without the row's own model
    reverse_count: int | None  # how many there are in all
    stages: tuple[str, ...]  # what each did to the row


def inspect_row(
    projection: ProjectionMap,
    student_id: int,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
) -> InspectedRow:
    """Explain a row; with the models' tokenizers, by real segmentation as well."""
    rows, columns = projection.student.table, projection.teacher.table
    row, kind = projection[student_id], RowKind(int(projection.row_kind[student_id]))
    forward = reverse = None
    why = ""
    relations = ["slot" if e.is_slot else "" for e in row.entries]
    decay = _decay(projection)
    if rows is not None and columns is not None:
        token = rows[student_id]
        why = _why(kind, rows, columns, student_id)
        relations = [_relation(e, rows, columns, student_id) for e in row.entries]
        if teacher is not None and token:
            forward = tuple(_forward(token, teacher, columns, decay))
        if student is not None and token and decay:
            holders = _reverse(student_id, student, columns, token, decay)
            reverse = tuple(sorted(holders, key=lambda piece: (-piece.weight, piece.token_id)))
    return InspectedRow(
        side="student",
        token_id=student_id,
        **_about(rows, student_id),
        kind=row.kind,
        why=why,
        entries=tuple(
            InspectedEntry(
                side="teacher",
                token_id=e.teacher_id,
                token=e.token,
                weight=e.weight,
                is_slot=e.is_slot,
                relation=relation,
            )
            for e, relation in zip(row.entries, relations, strict=True)
        ),
        num_entries=len(row.entries),
        forward=forward,
        reverse=None if reverse is None else reverse[:_SHOWN],
        reverse_count=None if reverse is None else len(reverse),
        stages=tuple(_stages(projection, kind, forward, reverse)),
    )


def inspect_token(
    events: EventMap,
    side: str,
    token_id: int,
    tokenizer: Tokenizer | None = None,
    num_members: int = _MEMBERS,
) -> InspectedRow:
    """Explain the event of a token of a side; `tokenizer` is the other side's, to spell it.

    Raises:
        XtokError: if the side has no such id.
    """
    width = events.shape[side == "teacher"]
    if not 0 <= token_id < width:
        raise XtokError(
            f"there is no {side} id {token_id}: the {side} has ids 0 to {width - 1}",
            hint="give another id, or the token itself",
        )
    event = int(getattr(events, f"{side}_event")[token_id])
    ids = {s: np.flatnonzero(getattr(events, f"{s}_event") == event).tolist() for s in _OTHER}
    other = _OTHER[side]
    members = [(other, i) for i in ids[other][: num_members // 2]]
    members += [(side, i) for i in ids[side] if i != token_id]
    table = require_table(getattr(events, side))
    forward = None
    if tokenizer is not None and table[token_id]:
        columns = require_table(getattr(events, other))
        forward = tuple(_forward(table[token_id], tokenizer, columns, ()))
    sizes = f"{len(ids['student']):,} student and {len(ids['teacher']):,} teacher tokens"
    parts = _parts(events, ids)
    is_merged = event != events.rest and parts > 1
    return InspectedRow(
        side=side,
        token_id=token_id,
        **_about(table, token_id),
        kind="rest" if event == events.rest else f"event {event}",
        why=f"{_link(events, side, token_id)}; {sizes}",
        entries=tuple(
            InspectedEntry(
                side=s,
                token_id=i,
                token=token_name(getattr(events, s), i),
                weight=None,
                is_slot=False,
                relation=_link(events, s, i),
            )
            for s, i in members[: num_members - 1]
        ),
        num_entries=len(ids["student"]) + len(ids["teacher"]) - 1,
        forward=forward,
        reverse=None,
        reverse_count=None,
        stages=(f"events: the text merged {parts} events into this one",) if is_merged else (),
    )


def _link(events: EventMap, side: str, token_id: int) -> str:
    """Say what put a token into its event."""
    other = _OTHER[side]
    ours, theirs = (require_table(getattr(events, s)) for s in (side, other))
    link = int(getattr(events, f"{side}_link")[token_id])
    if link < 0:
        return "unlinked"
    name = quoted(theirs.name(link))
    if not ours[token_id]:
        return f"same role as the {other}'s {name}"
    if ours[token_id] == theirs[link]:
        return f"same bytes as the {other}'s {name}"
    return f"first piece: the {other}'s {name}"


def _parts(events: EventMap, ids: Mapping[str, Sequence[int]]) -> int:
    """Count the parts that the links alone make of an event's tokens."""
    parent = {(side, i): (side, i) for side, members in ids.items() for i in members}
    parts = len(parent)

    def root(node: tuple[str, int]) -> tuple[str, int]:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for side, i in list(parent):
        link = int(getattr(events, f"{side}_link")[i])
        if link >= 0 and (one := root((side, i))) != (another := root((_OTHER[side], link))):
            parent[one] = another
            parts -= 1
    return parts


def _about(table: TokenTable | None, token_id: int) -> dict[str, Any]:
    if table is None:
        return {"token": None, "bytes": "", "type": "", "token_class": "", "roles": ()}
    return {
        "token": table.name(token_id),
        "bytes": table[token_id].hex(" "),
        "type": TokenType(int(table.types[token_id])).name.lower(),
        "token_class": _class_of(table, token_id).label,
        "roles": _roles(table, token_id),
    }


def _class_of(table: TokenTable, token_id: int) -> TokenClass:
    token = table[token_id]
    if not token:
        return TokenClass.CONTROL if token_id in table.control_names else TokenClass.UNUSED
    try:
        return text_class(token.decode())
    except UnicodeDecodeError:
        return TokenClass.PARTIAL_UTF8


def _roles(table: TokenTable, token_id: int) -> tuple[str, ...]:
    return tuple(role for role, ids in table.roles.items() if token_id in ids)


def _why(kind: RowKind, rows: TokenTable, columns: TokenTable, student_id: int) -> str:
    if kind == RowKind.EMPTY and student_id in rows.control_names:
        if roles := _roles(rows, student_id):
            return f"a special token: the teacher has none for it ({', '.join(roles)})"
        return "a special token without a known role, and without one of its name"
    if kind == RowKind.EMPTY:
        is_used = bool(rows[student_id])
        unspelled = "its id was ignored, or the teacher cannot spell it"
        return unspelled if is_used else "the tokenizer does not use this id"
    same = _same_bytes(columns, rows[student_id])
    exact = f"exact: teacher id {same} has the same bytes"
    pieces = f"teacher id {same} has the same bytes, but the row is not exact"
    if same is None:
        exact = "exact, but no teacher token has these bytes: equal in another token form, or "
        exact += "foreign"
        pieces = "no teacher token has these bytes: spelled in pieces, both ways"
    return {
        RowKind.EXACT: exact,
        RowKind.ROLE: "a special token, paired by role or by name",
        RowKind.RELAXED: "no teacher token has these bytes; one has the same relaxed form",
        RowKind.PIECES: pieces,
        RowKind.SIMILAR: "by the similarity of spelling or embeddings",
        RowKind.COUNTED: "counted on text, given or synthetic, and not exact",
        RowKind.MIXED: "from several sources, or an unknown one",
    }[kind]


def _same_bytes(table: TokenTable, token: bytes) -> int | None:
    """Return the id of a token; without the dict of all tokens, which takes a tenth of a second."""
    ids = np.flatnonzero(table.lengths == len(token)) if token else np.zeros(0, np.int64)
    for place, byte in enumerate(token[:64]):
        ids = ids[table.data[table.offsets[ids] + place] == byte]
    one = len(ids) == 1 and table[int(ids[0])] == token
    return int(ids[0]) if one else table.canonical_ids().get(token) if len(ids) else None


def _relation(entry: RowEntry, rows: TokenTable, columns: TokenTable, student_id: int) -> str:
    ours, theirs = rows[student_id], columns[entry.teacher_id]
    if entry.is_slot:
        return "slot"
    if not ours or not theirs:
        shared = [r for r in _roles(rows, student_id) if r in _roles(columns, entry.teacher_id)]
        return f"role {', '.join(shared)}" if shared else "special token"
    if ours == theirs:
        return "the same bytes"
    tests = {
        "the same relaxed form": relaxed_form(ours) == relaxed_form(theirs),
        "its beginning": ours.startswith(theirs),
        "longer, begins with it": theirs.startswith(ours),
        "a part of it": theirs in ours,
        "longer, contains it": ours in theirs,
        "neither contains the other": True,
    }
    return next(words for words, holds in tests.items() if holds)


def _decay(projection: ProjectionMap) -> list[float]:
    """Return the weights of a token's first pieces before they are normalized; none if counted."""
    steps = [s["options"] for s in projection.history if s["stage"] == "multitoken"]
    if steps and steps[-1].get("weights") == "prior":
        return []
    pieces = steps[-1].get("max_pieces") if steps else None
    if not (isinstance(pieces, int) and 1 <= pieces <= MAX_ENTRIES):
        pieces = MultitokenConfig.max_pieces
    return [FIRST_PIECE_WEIGHT * PIECE_DECAY**i for i in range(pieces)]


def _forward(
    token: bytes, teacher: Tokenizer, columns: TokenTable, decay: Sequence[float]
) -> Iterator[SpelledPiece]:
    [ids] = teacher.segment_batch([token])
    total = sum(decay[: len(ids or ())])
    for place, t in enumerate(ids or ()):
        weight = decay[place] / total if place < len(decay) else 0.0
        yield SpelledPiece(token_id=t, token=columns.name(t), place=place, weight=weight)


def _reverse(
    student_id: int, student: Tokenizer, columns: TokenTable, token: bytes, decay: Sequence[float]
) -> Iterator[SpelledPiece]:
    """Spell the teacher's tokens that contain the student's, and take those it is a piece of."""
    holders = [(t, whole) for t, whole in enumerate(columns.tokens()) if token in whole]
    spelled = student.segment_batch([whole for _, whole in holders])
    for (t, _), ids in zip(holders, spelled, strict=True):
        counted = list(ids or ())[: len(decay)]
        if student_id in counted:
            total = sum(decay[: len(counted)])
            yield SpelledPiece(
                token_id=t,
                token=columns.name(t),
                place=counted.index(student_id),
                weight=sum(w for i, w in zip(counted, decay, strict=False) if i == student_id)
                / total,
            )


def _stages(
    projection: ProjectionMap,
    kind: RowKind,
    forward: Sequence[SpelledPiece] | None,
    reverse: Sequence[SpelledPiece] | None,
) -> Iterator[str]:
    """Give a sentence about what each stage did to the row."""
    for step in projection.history:
        stage, options = str(step["stage"]), step["options"]
        most = f"at most {options.get('top_k')} entries"
        if stage == "multitoken" and kind == RowKind.ROLE:
            did = "special tokens are not spelled"
        elif stage == "multitoken" and options.get("weights") == "prior":
            did = f"counted on synthetic text, target {options.get('target', 'start')}; {most}"
        elif stage == "multitoken":
            spelled = [] if forward is None else [f"pieces forward: {len(forward)}"]
            if reverse is not None and options.get("reverse_pass", True):
                spelled.append(f"teacher tokens in reverse: {len(reverse):,}")
            slot = ", the slot included" if options.get("scale_trick") else ""
            did = "; ".join([*spelled, most + slot])
        elif stage == "reapply-exact":
            did = _MATCHED.get(kind, "left as it was: no equal bytes")
        elif stage == "sort-cut":
            did = most
        else:
            did = ", ".join(f"{k}={v}" for k, v in sorted(options.items())) or "done"
        yield f"{stage}: {did}"


_MATCHED = {
    RowKind.EXACT: "matched to the token of equal bytes",
    RowKind.ROLE: "matched to its counterpart",
    RowKind.RELAXED: "matched to the near-equivalent, beside the slot",
    RowKind.EMPTY: "no counterpart",
}
