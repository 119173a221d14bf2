"""A row of a map, and why it is as it is: bytes, pieces both ways, stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from xtok.building.match_options import said_options
from xtok.config import FIRST_PIECE_WEIGHT, MAX_ENTRIES, PIECE_DECAY, MultitokenConfig
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
    """A token of one pass of `multitoken`, and the weight that this pass gives it.

    That is before both passes are added up, the row is cut, and exact tokens get rows of their own.
    """

    token_id: int  # forward, a piece of the row's token; in reverse, a token that has it as a piece
    token: str
    place: int  # which piece it is, from 0
    weight: float  # 0 beyond `max_pieces`, and where no pass gave weights: counted, by similarity


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
    forward: tuple[SpelledPiece, ...] | None  # None without the teacher's tokenizer
    reverse: tuple[SpelledPiece, ...] | None  # the heaviest; None without the student's, or pass
    reverse_count: int | None  # how many there are in all
    stages: tuple[str, ...]  # what each did to the row


def explain_row(projection: ProjectionMap, pair: Pair, student_id: int) -> ExplainedRow:
    """Explain one row; as far as the pair has tokenizers, its token is spelled in pieces."""
    rows, columns = projection.student.table, projection.teacher.table
    row, kind = projection[student_id], RowKind(int(projection.row_kind[student_id]))
    forward = reverse = None
    why, token, decay = "", b"", _decay(projection)
    if rows is not None and columns is not None:
        token = rows[student_id]
        if kind == RowKind.COUNTED:
            why = _why_counted(projection, row.entries, columns, token)
        else:
            why = _why(projection, kind, rows, columns, student_id)
        if pair.teacher_tokenizer is not None and token:
            forward = _forward(student_id, pair, columns, decay)
        has_reverse = decay and _has_reverse_pass(projection)
        if pair.student_tokenizer is not None and token and has_reverse:
            reverse = _reverse(student_id, pair, columns, token, decay)
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
        stages=tuple(_stages(projection, kind)),
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


def _why(
    projection: ProjectionMap,
    kind: RowKind,
    rows: TokenTable,
    columns: TokenTable,
    student_id: int,
) -> str:
    if kind == RowKind.EMPTY and student_id in rows.control_names:
        return _why_special_is_empty(projection, student_id, _roles(rows, student_id))
    if kind == RowKind.EMPTY:
        is_used = bool(rows[student_id])
        unspelled = "its id was ignored, or the teacher cannot spell it"
        return unspelled if is_used else "the tokenizer does not use this id"
    if kind not in (RowKind.EXACT, RowKind.PIECES):
        return _REASONS[kind]
    same = columns.canonical_ids().get(rows[student_id])
    if same is None and kind == RowKind.PIECES:
        return f"no teacher token has these bytes: spelled in pieces, {_ways(projection)}"
    if same is None:
        return _REASONS[kind]
    if kind == RowKind.EXACT:
        return f"exact: teacher id {same} has the same bytes"
    return f"teacher id {same} has the same bytes, but the row is not exact"


def _why_special_is_empty(projection: ProjectionMap, student_id: int, roles: Sequence[str]) -> str:
    said = said_options(projection)
    if student_id in said.get("ignore_student_ids", ()):
        return "its id was ignored"
    how = said.get("special_tokens")
    if how != "roles":
        return _UNMATCHED.get(str(how), "a special token, which no stage has matched")
    if roles:
        return f"a special token: the teacher has none for it ({', '.join(roles)})"
    return "a special token without a known role, and without one of its name"


def _has_reverse_pass(projection: ProjectionMap) -> bool:
    """Whether weights were given in reverse, too, as the last stage says that says it."""
    options = (step["options"] for step in projection.history)
    return bool([True, *(o["reverse_pass"] for o in options if "reverse_pass" in o)][-1])


def _ways(projection: ProjectionMap) -> str:
    return "both ways" if _has_reverse_pass(projection) else "forward"


_UNMATCHED = {
    "off": "a special token: none were matched (special_tokens off)",
    "fuzzy": "a special token: the teacher has none of a similar name",
}

_REASONS = {
    RowKind.EXACT: "exact, but no teacher token has these bytes: equal in another token form, or "
    "foreign",
    RowKind.ROLE: "a special token, paired by role or by name",
    RowKind.RELAXED: "no teacher token has these bytes; one has the same relaxed form",
    RowKind.SIMILAR: "by the similarity of spelling or embeddings",
    RowKind.MIXED: "from several sources, or an unknown one",
}


_COUNTS = {
    "start": "how often each of its tokens begins where this one begins",
    "chunk": "each time, the tokens beside it in its chunk share 1",
    "both": "each time, 1 for the token that begins where it begins, and 1 shared by the "
    "tokens beside it in its chunk; divided by 2",
}


def _why_counted(
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
    """Return the weights of a token's first pieces before they are normalized.

    None where they were counted, or are by similarity.
    """
    steps = {step["stage"]: step["options"] for step in projection.history}
    if steps.keys() & {"count", "generate"} and "multitoken" not in steps:
        return []
    pieces = steps.get("multitoken", {}).get("max_pieces")
    if not (isinstance(pieces, int) and 1 <= pieces <= MAX_ENTRIES):
        pieces = MultitokenConfig.max_pieces
    return [FIRST_PIECE_WEIGHT * PIECE_DECAY**i for i in range(pieces)]


def _weighted(ids: Sequence[int], decay: Sequence[float]) -> list[tuple[int, float]]:
    """Return a token's pieces with their weights; those behind the decay's end have 0."""
    weights = decay[: len(ids)]
    total = sum(weights) or 1.0
    return [(i, (weight or 0.0) / total) for i, weight in zip_longest(ids, weights)]


def _forward(
    student_id: int, pair: Pair, columns: TokenTable, decay: Sequence[float]
) -> tuple[SpelledPiece, ...]:
    ids = pair.pieces(np.array([student_id])).ids.tolist()
    return tuple(
        SpelledPiece(token_id=t, token=columns.name(t), place=place, weight=weight)
        for place, (t, weight) in enumerate(_weighted(ids, decay))
    )


def _reverse(
    student_id: int, pair: Pair, columns: TokenTable, token: bytes, decay: Sequence[float]
) -> tuple[SpelledPiece, ...]:
    """Spell the teacher's tokens that contain the student's; return those it is a piece of."""
    holders = [t for t, whole in enumerate(columns.tokens()) if token in whole]
    spelled, counts = pair.reversed.pieces(np.array(holders, np.int64))
    pieces = []
    for t, ids in zip(holders, np.split(spelled, np.cumsum(counts)[:-1]), strict=False):
        weighted = _weighted(ids.tolist(), decay)
        weights = [weight if i == student_id else 0.0 for i, weight in weighted]
        if any(weights):
            place = next(place for place, weight in enumerate(weights) if weight)
            weight, name = sum(weights), columns.name(t)
            pieces.append(SpelledPiece(token_id=t, token=name, place=place, weight=weight))
    return tuple(sorted(pieces, key=lambda piece: (-piece.weight, piece.token_id)))


def _stages(projection: ProjectionMap, kind: RowKind) -> Iterator[str]:
    """Give a sentence about what each stage did to the row."""
    for step in projection.history:
        stage, options = step["stage"], step["options"]
        most = f"at most {options.get('top_k')} entries"
        if stage == "multitoken" and kind == RowKind.ROLE:
            did = "special tokens are not spelled"
        elif stage == "count" and kind == RowKind.ROLE:
            did = "special tokens are not counted"
        elif stage in ("multitoken", "count") and kind == RowKind.EMPTY:
            did = "left empty"
        elif stage == "count" and options.get("text") == "synthetic":
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
    RowKind.RELAXED: "matched to the near-equivalent; the slot stays",
    RowKind.EMPTY: "no counterpart",
}
