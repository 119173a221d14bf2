"""`inspect`: what a map or an event map holds, why rows are as they are, how two maps differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.inspection import pair_of_map
from xtok.inspection.rows import InspectedRow, inspect_row, inspect_token
from xtok.maps.edges import row_starts
from xtok.maps.events import EventMap
from xtok.maps.map_like import AnyMapLike, MapLike, as_any_map, as_maps
from xtok.maps.projection_map import ProjectionMap, RowKind, token_name
from xtok.vocab.classes import TokenClass, classes_named, token_classes
from xtok.vocab.pair import Pair
from xtok.vocab.table import TokenType, Vocabulary

if TYPE_CHECKING:
    from xtok.inspection.compare import Comparison
    from xtok.tokenizers import ModelLike, PairLike

_LARGEST = 10
_MEMBERS = 8
"""How many tokens of an event stand in a list of events."""


@dataclass(frozen=True, kw_only=True)
class SideDescription:
    """One side of a map."""

    model_id: str
    revision: str | None
    backend: str | None
    vocab_size: int
    width_source: str
    tokenizer_vocab_size: int | None
    token_types: Mapping[str, int]  # ids by type; empty if the map carries no tokens


@dataclass(frozen=True, kw_only=True)
class ColumnDescription:
    """One column: how many rows have it, and the sum of their weights."""

    teacher_id: int
    token: str | None
    rows: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a map holds, or an event map: its events stand for rows, their tokens for entries."""

    student: SideDescription
    teacher: SideDescription
    method: str  # how the edges were found; `events` for an event map
    history: Sequence[Mapping[str, Any]]  # one object per stage
    nnz: int
    top_k: int | None = None  # None for an event map, as `columns_used`
    enable_scale_trick: bool = False
    rows_by_kind: Mapping[str, int]  # events: by how many tokens of each side they have
    rows_by_entries: Mapping[int, int]
    rows_with_slot: int = 0
    slot_share: float = 0.0  # the slots' weight as a share of all weight
    columns_used: int | None = None  # teacher ids that some row has
    largest_columns: tuple[ColumnDescription, ...] = ()  # slots included
    coverage: Coverage | None = None  # None unless asked for, and without tokens
    rows: tuple[InspectedRow, ...]  # those asked for; examples; or the worst
    rows_matching: int | None = None  # of how many the worst are listed
    comparison: Comparison | None = None  # with another map


def inspect(
    projection: AnyMapLike,
    tokens: str | bytes | int | Sequence[str | bytes | int] = (),
    *,
    student_model: PairLike | None = None,
    teacher_model: ModelLike | None = None,
    num_examples: int = 0,
    classes: bool = False,
    worst: int | None = None,
    token_class: str | None = None,
    kind: str | None = None,
    against: MapLike | None = None,
    texts: str | Path | Sequence[str | Path] = (),
    field: str = "text",
    names: Sequence[str] = (),
) -> Inspection:
    """Describe a map or an event map; explain rows of it; compare it with another map.

    >>> xtok.inspect("map.safetensors", "201").rows[0].why  # doctest: +SKIP
    'no teacher token has these bytes: spelled in pieces, both ways'

    The worst rows are those with the least weight on their heaviest entry, slots left out; empty
    rows come first. Ids without a token are among them only if their class is named.

    Args:
        projection: a map or an event map, or the path of one.
        tokens: student tokens to explain the rows of: text, bytes or ids, as
            `ProjectionMap.student_ids_of` takes them. In an event map also the teacher's, where
            the student has no such token.
        student_model: the model of the rows, as `build` takes it, to spell the teacher's tokens.
        teacher_model: the model of the columns, to spell the student's tokens.
        num_examples: how many rows to show besides: evenly spread over those with several entries;
            of an event map, the events with the most mass on the counted text, or most tokens. With
            `against`, how many rows that differ; 10 if 0.
        classes: describe rows and teacher ids by class of token, which takes most of the time.
        worst: how many of the worst rows to show; 20 if there is a `token_class` or `kind`.
        token_class: of these, a class or a group of them, as `classes_named` takes it.
        kind: of these, the name of a `RowKind`, in lower case.
        against: another map of the same pair, to compare with.
        texts: paths and globs of text, to weigh the rows compared by; needs `student_model`.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        names: what errors call the map, and the other.

    Raises:
        XtokError: if there is no such token, class or kind, the map is of other tokenizers, or an
            event map is asked for what only maps have.
    """
    if texts and student_model is None:
        raise ValueError("texts need the student's model")
    [name, *_] = names or ["the map"]
    projection = as_any_map(projection)
    pair = pair_of_map(projection, student_model, teacher_model)
    if student_model is not None or teacher_model is not None:
        projection = pair.admit(projection, name=name)
    if isinstance(tokens, str | bytes | int):
        tokens = [tokens]
    is_listing = bool(worst or token_class or kind)
    if isinstance(projection, EventMap):
        if classes or is_listing or against is not None:
            raise XtokError(
                "an event map has no rows to list by class or kind, or to compare",
                hint="inspect a token of it; evaluate measures event maps on text",
            )
        return _inspect_events(projection, tokens, pair, num_examples)
    explain = partial(inspect_row, projection, pair)
    rows = [explain(i) for token in tokens for i in projection.student_ids_of(token)]
    if against is None:
        rows += [explain(i) for i in example_ids(projection, num_examples)]
    matching = comparison = None
    if is_listing:
        ids = _worst_first(projection, token_class, kind)
        matching = len(ids)
        rows += [explain(i) for i in ids[: worst or 20].tolist()]
    if against is not None:
        from xtok.inspection.compare import compare

        counts = None
        if texts:
            from xtok.counting.pair_text import PairText

            text = PairText.read(replace(pair, teacher_tokenizer=None), texts, field=field)
            [counts] = text.tokens
        maps, names = as_maps([projection, against], names)
        of_both = Pair.of(*maps)
        a, b = (of_both.admit(one, name=name) for one, name in zip(maps, names, strict=True))
        comparison = compare(a, b, token_counts=counts, num_examples=num_examples or 10)
    kinds = np.bincount(projection.row_kind, minlength=len(RowKind)).tolist()
    slots = projection.weights[projection.is_slot]
    total = float(projection.weights.sum(dtype=np.float64))
    columns_used, largest = _columns(projection)
    return Inspection(
        student=describe_side(projection.student),
        teacher=describe_side(projection.teacher),
        method=projection.method,
        history=projection.history,
        nnz=projection.nnz,
        top_k=projection.top_k,
        enable_scale_trick=projection.enable_scale_trick,
        rows_by_kind={kind.name.lower(): kinds[kind] for kind in RowKind if kinds[kind]},
        rows_by_entries=_sizes(projection.entries_per_row),
        rows_with_slot=len(slots),
        slot_share=float(slots.sum(dtype=np.float64)) / total if total else 0.0,
        columns_used=columns_used,
        largest_columns=largest,
        coverage=coverage_by_class(projection) if classes else None,
        rows=tuple(rows),
        rows_matching=matching,
        comparison=comparison,
    )


def _sizes(entries: NDArray[np.int64]) -> dict[int, int]:
    """Return how many rows have how many entries."""
    return {n: count for n, count in enumerate(np.bincount(entries).tolist()) if count}


def _columns(projection: ProjectionMap) -> tuple[int, tuple[ColumnDescription, ...]]:
    """Return how many columns some row has, and the heaviest."""
    width = projection.shape[1]
    rows = np.bincount(projection.teacher_ids, minlength=width)
    weight = np.bincount(projection.teacher_ids, projection.weights, width).astype(np.float64)
    heaviest = np.argsort(-weight, kind="stable")[:_LARGEST]
    return int(np.count_nonzero(rows)), tuple(
        ColumnDescription(
            teacher_id=t,
            token=token_name(projection.teacher, t),
            rows=int(rows[t]),
            weight=float(weight[t]),
        )
        for t in heaviest.tolist()
        if rows[t]
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
    worst: NDArray[np.int64] = rows[np.argsort(heaviest[rows], kind="stable")]
    return worst


def _inspect_events(
    events: EventMap,
    tokens: Sequence[str | bytes | int],
    pair: Pair,
    num_examples: int,
) -> Inspection:
    explain = partial(inspect_token, events, pair)
    rows = [explain(side, i) for token in tokens for side, i in _ids_of(events, token)]
    num = events.num_events
    ours, theirs = (
        np.bincount(s, minlength=num) for s in (events.student_event, events.teacher_event)
    )
    is_rest = np.arange(num) == (-1 if events.rest is None else events.rest)
    order = np.argsort(-(ours + theirs), kind="stable")
    if any("measures" in step for step in events.history):
        order = np.arange(num)  # numbered by falling mass on the counted text
    listed = order[order != events.rest][:num_examples]
    first = np.unique(events.student_event, return_index=True)[1]  # a token of each event
    rows += [explain("student", i, num_members=_MEMBERS) for i in first[listed].tolist()]
    by_kind = {
        "one_to_one": (ours == 1) & (theirs == 1),
        "one_student": (ours == 1) & (theirs > 1),
        "one_teacher": (ours > 1) & (theirs == 1),
        "several": (ours > 1) & (theirs > 1),
    }
    kinds = {kind: int((use & ~is_rest).sum()) for kind, use in by_kind.items()}
    return Inspection(
        student=describe_side(events.student),
        teacher=describe_side(events.teacher),
        method="events",
        history=events.history,
        nnz=sum(events.shape),
        rows_by_kind={**kinds, "rest": int(is_rest.sum())},
        rows_by_entries=_sizes(ours + theirs),
        rows=tuple(rows),
    )


def _ids_of(events: EventMap, token: str | bytes | int) -> list[tuple[str, int]]:
    """Return the side and the ids of a token; an id is the student's."""
    if isinstance(token, int):
        return [("student", token)]
    for side in ("student", "teacher"):
        if ids := getattr(events, side).table.ids_of(token):
            return [(side, i) for i in ids]
    raise XtokError(
        f"neither side has a token {token!r}",
        hint="a space is part of a token, as in ' the'; bytes are written like '\\xe4'",
    )


def example_ids(projection: ProjectionMap, count: int) -> list[int]:
    """Return up to `count` student ids, evenly spread over the rows with more than one entry.

    Where no row has more than one, over all that have any.
    """
    entries = projection.entries_per_row
    rows = np.flatnonzero(entries > 1)
    if not len(rows):
        rows = np.flatnonzero(entries)
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64)
    chosen: list[int] = rows[places].tolist()
    return chosen


def describe_side(vocabulary: Vocabulary) -> SideDescription:
    """Describe one side of a map."""
    table = vocabulary.table
    types = np.zeros(0, np.uint8) if table is None else table.types
    counts = np.bincount(types, minlength=len(TokenType) + 1).tolist()
    own = {name: value for name, value in vars(vocabulary).items() if name != "table"}
    kinds = {kind.name.lower(): counts[kind] for kind in TokenType if counts[kind]}
    return SideDescription(**own, token_types=kinds)


@dataclass(frozen=True, kw_only=True)
class ClassCoverage:
    """What a map has for one class of tokens, on both sides."""

    token_class: str  # the name of a `TokenClass`, in lower case
    label: str  # as a person reads it
    rows: int
    exact: int  # of equal bytes or of one role
    empty: int
    mean_entries: float  # per row that has any, slots left out
    slot_share: float  # of these rows' weight
    teacher_ids: int
    teacher_unreached: int  # no row leads to them, but by a slot


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """A map by class of token."""

    classes: tuple[ClassCoverage, ...]


def coverage_by_class(projection: ProjectionMap) -> Coverage | None:
    """Measure a map by class of token; None if it carries no tokens."""
    rows, columns = projection.student.table, projection.teacher.table
    if rows is None or columns is None:
        return None
    ours, theirs = token_classes(rows), token_classes(columns)
    kind, is_slot = projection.row_kind, projection.is_slot
    of_entry = ours[projection.student_ids]
    reached = np.zeros(len(columns), np.bool_)
    reached[projection.teacher_ids[~is_slot]] = True

    def count(classes: NDArray[np.uint8], weights: NDArray[np.float32] | None = None) -> Any:
        return np.bincount(classes, weights, len(TokenClass))

    rows_of, empty = count(ours), count(ours[kind == RowKind.EMPTY])
    filled = np.maximum(1, rows_of - empty)
    per_class = {
        "rows": rows_of,
        "exact": count(ours[np.isin(kind, [RowKind.EXACT, RowKind.ROLE])]),
        "empty": empty,
        "mean_entries": count(of_entry[~is_slot]) / filled,
        "slot_share": count(of_entry[is_slot], projection.weights[is_slot]) / filled,
        "teacher_ids": count(theirs),
        "teacher_unreached": count(theirs[~reached]),
    }
    return Coverage(
        classes=tuple(
            ClassCoverage(
                token_class=member.name.lower(),
                label=member.label,
                **{name: values[member].item() for name, values in per_class.items()},
            )
            for member in TokenClass
            if per_class["rows"][member] or per_class["teacher_ids"][member]
        ),
    )
