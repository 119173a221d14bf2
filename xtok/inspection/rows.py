"""Why a row of a map, or an event of a token, is as it is: bytes, pieces both ways, stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.config import FIRST_PIECE_WEIGHT, MAX_ENTRIES, PIECE_DECAY, MultitokenConfig
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap, RowEntry, RowKind, token_name
from xtok.vocab.classes import token_class
from xtok.vocab.pair import Pair, require_table
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
    weight: float | None = None  # None in an event
    is_slot: bool = False
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
    forward: tuple[SpelledPiece, ...] | None = None  # None without the other side's model
    reverse: tuple[SpelledPiece, ...] | None = None  # the heaviest; None without the row's
    reverse_count: int | None = None  # how many there are in all
    stages: tuple[str, ...]  # what each did to the row


def inspect_row(projection: ProjectionMap, pair: Pair, student_id: int) -> InspectedRow:
    """Explain a row; by real segmentation, too, as far as there are the sides' tokenizers."""
    rows, columns = projection.student.table, projection.teacher.table
    row, kind = projection[student_id], RowKind(int(projection.row_kind[student_id]))
    forward = reverse = None
    why, token, decay = "", b"", _decay(projection)
    if rows is not None and columns is not None:
        token = rows[student_id]
        if kind == RowKind.COUNTED:
            why = _counted(projection, row.entries, columns, token)
        else:
            why = _why(kind, rows, columns, student_id)
        if pair.teacher_tokenizer is not None and token:
            forward = _forward(token, pair.teacher_tokenizer, columns, decay)
        if pair.student_tokenizer is not None and token and decay:
            reverse = _reverse(student_id, pair.student_tokenizer, columns, token, decay)
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
                relation=_relation(e, rows, columns, student_id),
            )
            for e in row.entries
        ),
        num_entries=len(row.entries),
        forward=forward,
        reverse=None if reverse is None else reverse[:_SHOWN],
        reverse_count=None if reverse is None else len(reverse),
        stages=tuple(_stages(projection, kind)),
    )


def inspect_token(
    events: EventMap,
    pair: Pair,
    side: str,
    token_id: int,
    num_members: int = _MEMBERS,
) -> InspectedRow:
    """Explain the event of a token of a side; the other side's tokenizer, if any, spells it.

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
    speller: Tokenizer | None = getattr(pair, f"{other}_tokenizer")
    if speller is not None and table[token_id]:
        columns = require_table(getattr(events, other))
        forward = _forward(table[token_id], speller, columns, ())
    sizes = f"{len(ids['student']):,} student and {len(ids['teacher']):,} teacher tokens"
    parts = _parts(events, event)
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
                relation=_link(events, s, i),
            )
            for s, i in members[: num_members - 1]
        ),
        num_entries=len(ids["student"]) + len(ids["teacher"]) - 1,
        forward=forward,
        stages=(f"events: the text merged {parts} events into this one",) if is_merged else (),
    )


def _link(events: EventMap, side: str, token_id: int) -> str:
    """Say what put a token into its event."""
    other = _OTHER[side]
    ours, theirs = (require_table(getattr(events, s)) for s in (side, other))
    link = int(getattr(events, f"{side}_link")[token_id])
    if link < 0:
        return "unlinked"
    name = theirs.quoted(link)
    if not ours[token_id]:
        return f"same role as the {other}'s {name}"
    if ours[token_id] == theirs[link]:
        return f"same bytes as the {other}'s {name}"
    return f"first piece: the {other}'s {name}"


def _parts(events: EventMap, event: int) -> int:
    """Count the parts that the links alone make of an event's tokens.

    A token has one link or none, so that each part ends in a token without one, or in two tokens
    that are each other's.
    """
    s_links = events.student_link[events.student_event == event]
    t_links = events.teacher_link[events.teacher_event == event]
    linked = np.flatnonzero((events.student_event == event) & (events.student_link >= 0))
    mutual = events.teacher_link[events.student_link[linked]] == linked
    return int((s_links < 0).sum() + (t_links < 0).sum() + mutual.sum())


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
    if kind not in (RowKind.EXACT, RowKind.PIECES):
        return _REASONS[kind]
    same = columns.canonical_ids().get(rows[student_id])
    if same is None:
        return _REASONS[kind]
    if kind == RowKind.EXACT:
        return f"exact: teacher id {same} has the same bytes"
    return f"teacher id {same} has the same bytes, but the row is not exact"


_REASONS = {
    RowKind.EXACT: "exact, but no teacher token has these bytes: equal in another token form, or "
    "foreign",
    RowKind.ROLE: "a special token, paired by role or by name",
    RowKind.RELAXED: "no teacher token has these bytes; one has the same relaxed form",
    RowKind.PIECES: "no teacher token has these bytes: spelled in pieces, both ways",
    RowKind.SIMILAR: "by the similarity of spelling or embeddings",
    RowKind.MIXED: "from several sources, or an unknown one",
}


_COUNTS = {
    "start": "how often each of its tokens begins where this one begins",
    "chunk": "each time, the tokens beside it in its chunk share 1",
    "both": "each time, 1 for the token that begins where it begins, and 1 shared by the "
    "tokens beside it in its chunk; divided by 2",
}


def _counted(
    projection: ProjectionMap, entries: Sequence[RowEntry], columns: TokenTable, token: bytes
) -> str:
    """Return what was counted for a row; in numbers if the token is always spelled alike.

    Then, of its n pieces, the first has the weight (1 + 1/n) / 2 and each other one (1/n) / 2.
    """
    targets = [s["options"]["target"] for s in projection.history if "target" in s["options"]]
    target = targets[-1] if targets else "start"
    pieces = [columns[e.teacher_id] for e in entries]
    shares = 2 * np.array([e.weight for e in entries]) - np.eye(1, len(entries))[0]
    is_spelled = target == "both" and token.startswith(pieces[0])
    for n in range(2, len(token) + 1) if is_spelled else ():
        times = np.rint(n * shares).astype(int)
        if np.allclose(times, n * shares, atol=0.01) and times @ [*map(len, pieces)] == len(token):
            first, *rest = (columns.quoted(e.teacher_id) for e in entries)
            others = ", ".join(f"{name} ({k}/{n})" for name, k in zip(rest, times[1:], strict=True))
            why = f"{first} begins where it begins (1) and is one of the {n} tokens "
            why += f"beside it ({times[0]}/{n})"
            return f"{why}; only beside it: {others}; divided by 2" if rest else why
    return _COUNTS.get(target, "counted on text, given or synthetic")


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


def _decay(projection: ProjectionMap) -> list[float]:
    """Return the weights of a token's first pieces before they are normalized; none if counted."""
    steps = [s["options"] for s in projection.history if s["stage"] == "multitoken"]
    if steps and steps[-1].get("weights") == "prior":
        return []
    pieces = steps[-1].get("max_pieces") if steps else None
    if not (isinstance(pieces, int) and 1 <= pieces <= MAX_ENTRIES):
        pieces = MultitokenConfig.max_pieces
    return [FIRST_PIECE_WEIGHT * PIECE_DECAY**i for i in range(pieces)]


def _weighted(ids: Sequence[int] | None, decay: Sequence[float]) -> list[tuple[int, float]]:
    """Return a token's pieces with their weights; those behind the decay's end have 0."""
    weights = decay[: len(ids or ())]
    total = sum(weights) or 1.0
    return [(i, (weight or 0.0) / total) for i, weight in zip_longest(ids or (), weights)]


def _forward(
    token: bytes, teacher: Tokenizer, columns: TokenTable, decay: Sequence[float]
) -> tuple[SpelledPiece, ...]:
    [ids] = teacher.segment_batch([token])
    return tuple(
        SpelledPiece(token_id=t, token=columns.name(t), place=place, weight=weight)
        for place, (t, weight) in enumerate(_weighted(ids, decay))
    )


def _reverse(
    student_id: int, student: Tokenizer, columns: TokenTable, token: bytes, decay: Sequence[float]
) -> tuple[SpelledPiece, ...]:
    """Spell the teacher's tokens that contain the student's; return those it is a piece of."""
    holders = [t for t, whole in enumerate(columns.tokens()) if token in whole]
    spelled = student.segment_batch([columns[t] for t in holders])
    pieces = []
    for t, ids in zip(holders, spelled, strict=True):
        weights = [weight if i == student_id else 0.0 for i, weight in _weighted(ids, decay)]
        if any(weights):
            place = next(place for place, weight in enumerate(weights) if weight)
            weight, name = sum(weights), columns.name(t)
            pieces.append(SpelledPiece(token_id=t, token=name, place=place, weight=weight))
    return tuple(sorted(pieces, key=lambda piece: (-piece.weight, piece.token_id)))


def _stages(projection: ProjectionMap, kind: RowKind) -> Iterator[str]:
    """Give a sentence about what each stage did to the row."""
    for step in projection.history:
        stage, options = str(step["stage"]), step["options"]
        most = f"at most {options.get('top_k')} entries"
        if stage == "multitoken" and kind == RowKind.ROLE:
            did = "special tokens are not spelled"
        elif stage == "multitoken" and kind == RowKind.EMPTY:
            did = "left empty"
        elif stage == "multitoken" and options.get("weights") == "prior":
            did = f"counted on synthetic text, target {options.get('target', 'start')}; {most}"
        elif stage == "multitoken":
            ways = "both ways" if options.get("reverse_pass", True) else "forward"
            slot = ", the slot included" if options.get("scale_trick") else ""
            did = f"spelled in pieces, {ways}; {most}{slot}"
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
