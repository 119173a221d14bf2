"""`inspect` and `worst_rows`: what a map holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.inspection.advice import Advice, advise
from xtok.inspection.pair_facts import pair_facts
from xtok.maps.edges import row_starts
from xtok.maps.file import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap, Row, RowKind, token_name
from xtok.vocab.classes import TokenClass, classes_named, token_classes
from xtok.vocab.table import TokenType, Vocabulary

_LARGEST = 10


@dataclass(frozen=True, kw_only=True)
class SideDescription:
    """One side of a map. `token_types` counts ids by type; empty if the map carries no tokens."""

    model_id: str
    revision: str | None
    backend: str | None
    vocab_size: int
    width_source: str
    tokenizer_vocab_size: int | None
    token_types: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ColumnDescription:
    """One column: how many rows have it, and the sum of their weights."""

    teacher_id: int
    token: str | None
    rows: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class MapDescription:
    """What `inspect` found.

    Attributes:
        student: the rows' side.
        teacher: the columns' side.
        method: how the edges were found.
        history: one object per stage, as in the file.
        top_k: how many entries a row may have.
        enable_scale_trick: whether rows may have a scale slot.
        nnz: entries in all.
        rows_by_kind: row kind to number of rows.
        rows_by_entries: number of entries to number of rows.
        rows_with_slot: rows with a scale slot.
        slot_share: the slots' weight as a share of all weight.
        columns_used: teacher ids that some row has.
        largest_columns: the heaviest columns, slots included.
        coverage: rows and teacher ids by class of token; None if the map carries no tokens, or they
            were not asked for.
        examples: the rows that were asked for.
    """

    student: SideDescription
    teacher: SideDescription
    method: str
    history: Sequence[Mapping[str, Any]]
    top_k: int
    enable_scale_trick: bool
    nnz: int
    rows_by_kind: Mapping[str, int]
    rows_by_entries: Mapping[int, int]
    rows_with_slot: int
    slot_share: float
    columns_used: int
    largest_columns: tuple[ColumnDescription, ...]
    coverage: Coverage | None
    examples: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class RowListing:
    """The worst rows that match; `found` is how many match in all."""

    found: int
    rows: tuple[Row, ...]


def worst_rows(
    projection: MapLike,
    *,
    token_class: str | None = None,
    kind: str | None = None,
    count: int = 20,
) -> RowListing:
    """List rows by class of token and by kind, the worst first.

    The worst rows are those with the least weight on their heaviest entry, slots left out; empty
    rows come first. Ties go by student id. Ids without a token are listed only if their class is
    named.

    >>> xtok.worst_rows("map.safetensors", token_class="digits", count=5).rows  # doctest: +SKIP

    Args:
        projection: a map, or the path of one.
        token_class: a class, or a group of them, as `classes_named` takes it; all if None.
        kind: the name of a `RowKind`, in lower case; all if None.
        count: how many rows to list.

    Raises:
        XtokError: if there is no such class or kind, or the map carries no tokens to classify.
    """
    projection = as_map(projection)
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
    worst = rows[np.argsort(heaviest[rows], kind="stable")[:count]]
    return RowListing(found=len(rows), rows=tuple(projection[row] for row in worst.tolist()))


def inspect(
    projection: MapLike,
    *,
    tokens: Sequence[str | bytes] = (),
    ids: Sequence[int] = (),
    num_examples: int = 0,
    classes: bool = True,
) -> MapDescription:
    """Describe a map, with some of its rows as examples.

    Args:
        projection: a map, or the path of one.
        tokens: student tokens to show the rows of, as `ProjectionMap.student_ids_of` takes them.
        ids: student ids to show the rows of.
        num_examples: how many rows to show besides, evenly spread over those with several entries.
        classes: describe rows and teacher ids by class of token, which takes most of the time.

    Raises:
        XtokError: if the student has no such token or id.
    """
    projection = as_map(projection)
    chosen = [i for token in tokens for i in projection.student_ids_of(token)]
    student_ids = [*chosen, *ids, *example_ids(projection, num_examples)]
    kinds = np.bincount(projection.row_kind, minlength=len(RowKind)).tolist()
    entries = np.bincount(projection.entries_per_row).tolist()
    slots = projection.weights[projection.is_slot]
    total = float(projection.weights.sum(dtype=np.float64))
    width = projection.shape[1]
    rows = np.bincount(projection.teacher_ids, minlength=width)
    weight = np.bincount(projection.teacher_ids, projection.weights, width).astype(np.float64)
    least = np.sort(weight)[-_LARGEST:][0]
    largest = np.flatnonzero((weight >= least) & (weight > 0))
    return MapDescription(
        student=describe_side(projection.student),
        teacher=describe_side(projection.teacher),
        method=projection.method,
        history=projection.history,
        top_k=projection.top_k,
        enable_scale_trick=projection.enable_scale_trick,
        nnz=projection.nnz,
        rows_by_kind={kind.name.lower(): kinds[kind] for kind in RowKind if kinds[kind]},
        rows_by_entries={n: count for n, count in enumerate(entries) if count},
        rows_with_slot=len(slots),
        slot_share=float(slots.sum(dtype=np.float64)) / total if total else 0.0,
        columns_used=int(np.count_nonzero(rows)),
        largest_columns=tuple(
            ColumnDescription(
                teacher_id=t,
                token=token_name(projection.teacher, t),
                rows=int(rows[t]),
                weight=float(weight[t]),
            )
            for t in largest[np.argsort(-weight[largest], kind="stable")][:_LARGEST].tolist()
        ),
        coverage=cover(projection) if classes else None,
        examples=tuple(projection[s] for s in student_ids),
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
    return SideDescription(
        model_id=vocabulary.model_id,
        revision=vocabulary.revision,
        backend=vocabulary.backend,
        vocab_size=vocabulary.vocab_size,
        width_source=vocabulary.width_source,
        tokenizer_vocab_size=vocabulary.tokenizer_vocab_size,
        token_types={kind.name.lower(): counts[kind] for kind in TokenType if counts[kind]},
    )


def weight_notes(projection: ProjectionMap) -> list[str]:
    """Return the distribution of the weights, and where a row's heaviest entry stands, in words."""
    weights = projection.weights
    if not len(weights):
        return []
    quantiles = np.percentile(weights, [50, 90, 95, 99])
    shown = zip(("median", "90th percentile", "95th", "99th"), quantiles.tolist(), strict=True)
    starts = row_starts(projection.student_ids)
    first = int(np.count_nonzero(weights[starts] == np.maximum.reduceat(weights, starts)))
    return [
        f"{len(weights):,} weights: mean {weights.mean(dtype=np.float64):.4f}, "
        + ", ".join(f"{name} {value:.4f}" for name, value in shown)
        + f", least {weights.min():.4f}, largest {weights.max():.4f}",
        f"heaviest entry: the first in {first:,} rows, a scale slot in {len(starts) - first:,}",
    ]


@dataclass(frozen=True, kw_only=True)
class ClassCoverage:
    """What a map has for one class of tokens, on both sides.

    Attributes:
        token_class: the name of a `TokenClass`, in lower case.
        label: the class as a person reads it.
        rows: student tokens of the class.
        exact: exact rows, of equal bytes or of one role.
        empty: rows without an entry.
        mean_entries: entries per row that has any, slots left out.
        slot_share: the part of these rows' weight that is on slots.
        teacher_ids: teacher tokens of the class.
        teacher_unreached: those that no row leads to, but by a slot.
    """

    token_class: str
    label: str
    rows: int
    exact: int
    empty: int
    mean_entries: float
    slot_share: float
    teacher_ids: int
    teacher_unreached: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """A map by class of token, and the loss that suits its pair, as `doctor` says it."""

    classes: tuple[ClassCoverage, ...]
    advice: Advice


def cover(projection: ProjectionMap) -> Coverage | None:
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
        advice=advise(pair_facts(projection.student, projection.teacher)),
    )
