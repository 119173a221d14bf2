"""`explain`: why a row of a map is as it is: bytes, pieces both ways, what each stage did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xtok.config import FIRST_PIECE_WEIGHT, MAX_ENTRIES, PIECE_DECAY, MultitokenConfig
from xtok.maps.file import MapLike, as_map
from xtok.maps.pair import with_vocabularies
from xtok.maps.projection_map import ProjectionMap, RowEntry, RowKind, require_table
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.classes import TokenClass, text_class
from xtok.vocab.relaxed import relaxed_form
from xtok.vocab.table import TokenTable, TokenType, match_bytes

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class ExplainedEntry:
    """An entry of the row, and what its token has to do with the row's."""

    teacher_id: int
    token: str
    weight: float
    relation: str


@dataclass(frozen=True, kw_only=True)
class SpelledPiece:
    """A teacher token of one pass of `multitoken`, and the weight that this pass gives it.

    That is before both passes are added up, the row is cut, and exact tokens get rows of their own.

    Attributes:
        teacher_id: forward, a piece of the student's token; in reverse, a token of the teacher's
            that has the student's as a piece.
        token: escaped.
        place: which piece it is, from 0.
        weight: 0 where it is beyond `max_pieces`, or the weights were counted (`prior`).
    """

    teacher_id: int
    token: str
    place: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a row is as it is.

    Attributes:
        student_id: the row.
        token: the student's token, escaped, or its name.
        bytes: in hexadecimal.
        type: the name of a `TokenType`, in lower case.
        token_class: the label of a `TokenClass`.
        roles: of a special token.
        kind: how the row came about.
        why: a sentence about that.
        entries: the row.
        forward: its pieces by the teacher's tokenizer; None if that was not given.
        reverse: the teacher tokens that have it as a piece by the student's tokenizer, heaviest
            first, at most 10; None if that was not given.
        reverse_count: how many there are in all.
        stages: a sentence about each.
    """

    student_id: int
    token: str
    bytes: str
    type: str
    token_class: str
    roles: tuple[str, ...]
    kind: str
    why: str
    entries: tuple[ExplainedEntry, ...]
    forward: tuple[SpelledPiece, ...] | None
    reverse: tuple[SpelledPiece, ...] | None
    reverse_count: int | None
    stages: tuple[str, ...]


def explain(
    projection: MapLike,
    tokens: str | bytes | int | Sequence[str | bytes | int],
    *,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
) -> tuple[Explanation, ...]:
    """Explain rows of a map, from the map alone and, with its models, by real segmentation.

    >>> xtok.explain("map.safetensors", "201")[0].why  # doctest: +SKIP
    'no teacher token has these bytes: spelled in pieces, both ways'

    Args:
        projection: a map that carries its tokens, or whose two models are given; or its path.
        tokens: a student token, or several: text, bytes or an id, as
            `ProjectionMap.student_ids_of` takes them. Text may stand for several rows.
        student_model: the model of the rows, as `build` takes it, to spell the teacher's tokens.
        teacher_model: the model of the columns, likewise, to spell the student's token.

    Raises:
        XtokError: if there is no such row, the map carries no tokens, or is of other tokenizers.
    """
    student = None if student_model is None else as_tokenizer(student_model)
    teacher = None if teacher_model is None else as_tokenizer(teacher_model)
    projection = with_vocabularies(
        as_map(projection),
        student=None if student is None else student.vocabulary,
        teacher=None if teacher is None else teacher.vocabulary,
    )
    same_bytes = match_bytes(require_table(projection.student), require_table(projection.teacher))
    if isinstance(tokens, str | bytes | int):
        tokens = [tokens]
    student_ids = [i for token in tokens for i in projection.student_ids_of(token)]
    return tuple(_explain(projection, i, same_bytes.get(i), student, teacher) for i in student_ids)


def _explain(
    projection: ProjectionMap,
    student_id: int,
    same: int | None,
    student: Tokenizer | None,
    teacher: Tokenizer | None,
) -> Explanation:
    rows, columns = require_table(projection.student), require_table(projection.teacher)
    row, token = projection[student_id], rows[student_id]
    kind = RowKind(int(projection.row_kind[student_id]))
    decay = _decay(projection)
    forward = reverse = None
    if teacher is not None and token:
        forward = tuple(_forward(token, teacher, columns, decay))
    if student is not None and token and decay:
        reverse = sorted(
            _reverse(student_id, student, columns, token, decay),
            key=lambda piece: (-piece.weight, piece.teacher_id),
        )
    return Explanation(
        student_id=student_id,
        token=rows.name(student_id),
        bytes=token.hex(" "),
        type=TokenType(int(rows.types[student_id])).name.lower(),
        token_class=_class_of(rows, student_id).label,
        roles=_roles(rows, student_id),
        kind=row.kind,
        why=_why(kind, rows, student_id, same),
        entries=tuple(
            ExplainedEntry(
                teacher_id=e.teacher_id,
                token=columns.name(e.teacher_id),
                weight=e.weight,
                relation=_relation(e, rows, columns, student_id),
            )
            for e in row.entries
        ),
        forward=forward,
        reverse=None if reverse is None else tuple(reverse[:_SHOWN]),
        reverse_count=None if reverse is None else len(reverse),
        stages=tuple(_stages(projection, kind, forward, reverse)),
    )


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


def _why(kind: RowKind, rows: TokenTable, student_id: int, same: int | None) -> str:
    if kind == RowKind.EMPTY and student_id in rows.control_names:
        if roles := _roles(rows, student_id):
            return f"a special token: the teacher has none for it ({', '.join(roles)})"
        return "a special token without a known role, and without one of its name"
    if kind == RowKind.EMPTY:
        is_used = bool(rows[student_id])
        unspelled = "its id was ignored, or the teacher cannot spell it"
        return unspelled if is_used else "the tokenizer does not use this id"
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
        RowKind.EMBEDDING: "by the similarity of embeddings",
        RowKind.COUNTED: "counted on text, given or synthetic, and not exact",
        RowKind.MIXED: "from several sources, or an unknown one",
    }[kind]


def _relation(entry: RowEntry, rows: TokenTable, columns: TokenTable, student_id: int) -> str:
    ours, theirs = rows[student_id], columns[entry.teacher_id]
    if entry.is_slot:
        return "scale slot: stands for nothing"
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
        yield SpelledPiece(teacher_id=t, token=columns.name(t), place=place, weight=weight)


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
                teacher_id=t,
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
