"""`inspect` and `worst_rows`: what a map holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.maps.edges import row_starts
from xtok.maps.file import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap, Row, RowKind, token_name
from xtok.vocab.classes import NUMERALS, TokenClass, classes_named, suited_loss, token_classes
from xtok.vocab.table import TokenTable, TokenType, Vocabulary

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
    first = np.flatnonzero(np.diff(projection.student_ids, prepend=-1))
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
            for t in _largest(weight).tolist()
        ),
        coverage=cover(projection) if classes else None,
        examples=tuple(projection[s] for s in student_ids),
    )


def _largest(weight: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the columns with the largest weights, ties by id; none without weight."""
    count = min(_LARGEST, len(weight))
    least = np.partition(weight, -count)[-count]
    among = np.flatnonzero((weight >= least) & (weight > 0))
    return among[np.argsort(-weight[among], kind="stable")][:count]


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
    types: dict[str, int] = {}
    if table is not None:
        counts = np.bincount(table.types, minlength=len(TokenType) + 1).tolist()
        types = {kind.name.lower(): counts[kind] for kind in TokenType if counts[kind]}
    return SideDescription(
        model_id=vocabulary.model_id,
        revision=vocabulary.revision,
        backend=vocabulary.backend,
        vocab_size=vocabulary.vocab_size,
        width_source=vocabulary.width_source,
        tokenizer_vocab_size=vocabulary.tokenizer_vocab_size,
        token_types=types,
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
    """A map by class of token, and the loss that this suggests."""

    classes: tuple[ClassCoverage, ...]
    numerals: int
    numerals_exact: int
    loss: str
    why: str


def cover(projection: ProjectionMap) -> Coverage | None:
    """Measure a map by class of token; None if it carries no tokens."""
    rows, columns = projection.student.table, projection.teacher.table
    if rows is None or columns is None:
        return None
    ours, theirs = token_classes(rows), token_classes(columns)
    kind, slots = projection.row_kind, projection.is_slot
    exact = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])
    of_entry = ours[projection.student_ids]
    real = ~slots
    reached = np.zeros(len(columns), np.bool_)
    reached[projection.teacher_ids[real]] = True
    per_class = {
        "rows": _count(ours),
        "exact": _count(ours[exact]),
        "empty": _count(ours[kind == RowKind.EMPTY]),
        "entries": _count(of_entry[real]),
        "slots": np.bincount(of_entry[slots], projection.weights[slots], len(TokenClass)),
        "ids": _count(theirs),
        "unreached": _count(theirs[~reached]),
    }
    classes = []
    for member in TokenClass:
        n = {name: counts[member].item() for name, counts in per_class.items()}
        filled = max(1, n["rows"] - n["empty"])
        if n["rows"] or n["ids"]:
            classes.append(
                ClassCoverage(
                    token_class=member.name.lower(),
                    label=member.label,
                    rows=n["rows"],
                    exact=n["exact"],
                    empty=n["empty"],
                    mean_entries=n["entries"] / filled,
                    slot_share=n["slots"] / filled,
                    teacher_ids=n["ids"],
                    teacher_unreached=n["unreached"],
                )
            )
    numerals, exact_numerals = (
        int(per_class[of][list(NUMERALS)].sum()) for of in ("rows", "exact")
    )
    loss, why = suited_loss(_exact_share(rows, kind), numerals, exact_numerals)
    return Coverage(
        classes=tuple(classes), numerals=numerals, numerals_exact=exact_numerals, loss=loss, why=why
    )


def _count(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.bincount(classes, minlength=len(TokenClass))


def _exact_share(rows: TokenTable, kind: NDArray[np.uint8]) -> float:
    text = rows.text_ids
    return float(np.count_nonzero(kind[text] == RowKind.EXACT)) / max(1, len(text))
