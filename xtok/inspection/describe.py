"""`describe`: create an overview of a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.inspection.explain import ExplainedRow, explain_row
from xtok.maps.file import StoredMap
from xtok.maps.map_arguments import MapLike, bind_map
from xtok.maps.projection_map import ProjectionMap, token_name
from xtok.maps.records import RowKind
from xtok.tokenizers.classes import TokenClass, token_classes
from xtok.tokenizers.pairs import Pair, require_table
from xtok.tokenizers.table import SIDES, TokenType, Vocabulary, VocabularyFields

_LARGEST = 10


@dataclass(frozen=True, kw_only=True)
class SideDescription(VocabularyFields):
    """One side of a map."""

    token_types: Mapping[str, int]  # number of ids by type; empty if the map contains no tokens


@dataclass(frozen=True, kw_only=True)
class MapDescription:
    """The fields that overviews of all kinds of maps share."""

    student: SideDescription
    teacher: SideDescription
    history: Sequence[Mapping[str, Any]]  # one history step per stage


@dataclass(frozen=True, kw_only=True)
class ColumnDescription:
    """A column: its teacher token, the number of its rows, and the sum of its weights."""

    teacher_id: int
    token: str | None
    rows: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Description(MapDescription):
    """An overview of a projection map."""

    method: str  # origin of the edges
    nnz: int
    top_k: int
    enable_scale_trick: bool
    rows_by_kind: Mapping[str, int]
    rows_with_slot: int
    slot_share: float  # sum of the weights of slots, divided by the sum of all weights
    columns_used: int  # number of teacher ids that occur in at least one row
    largest_columns: tuple[ColumnDescription, ...]  # including slots
    coverage: tuple[ClassCoverage, ...] | None  # None unless `classes` is True
    examples: tuple[ExplainedRow, ...]


def describe(
    projection: MapLike, *, num_examples: int = 0, classes: bool = False, pair: Pair | None = None
) -> Description:
    """Describe the vocabularies, stages, rows and columns of a map.

    >>> xtok.describe("map.safetensors").rows_by_kind  # doctest: +SKIP
    {'exact': 109564, 'pieces': 18436, 'empty': 256}

    Args:
        projection: a map, or the path of its file.
        num_examples: number of rows to explain, spread evenly over the rows with several entries.
        classes: also count rows and teacher ids for each token class, which takes most of the time.
        pair: the map's pair. Default: a pair created from the map.

    Raises:
        MapFileError: if the file is not a map, or is damaged.
        XtokError: if `classes` is True and the map contains no tokens.
    """
    m, pair = bind_map(ProjectionMap.of(projection), pair)
    kinds = np.bincount(m.row_kind, minlength=len(RowKind)).tolist()
    slots = m.weights[m.is_slot]
    total = float(m.weights.sum(dtype=np.float64))
    columns_used, largest = _columns(m)
    # if no row has several entries, any rows
    examples = np.flatnonzero(m.entries_per_row > int((m.entries_per_row > 1).any()))
    return Description(
        **describe_sides(m),
        method=m.method,
        nnz=m.nnz,
        top_k=m.top_k,
        enable_scale_trick=m.enable_scale_trick,
        rows_by_kind={kind.name.lower(): kinds[kind] for kind in RowKind if kinds[kind]},
        rows_with_slot=len(slots),
        slot_share=float(slots.sum(dtype=np.float64)) / total if total else 0.0,
        columns_used=columns_used,
        largest_columns=largest,
        coverage=coverage_by_class(m, pair) if classes else None,
        examples=tuple(explain_row(m, pair, i) for i in evenly_spread(examples, num_examples)),
    )


def count_by_size(sizes: NDArray[Any]) -> dict[int, int]:
    """Count how often each size occurs."""
    return {n: count for n, count in enumerate(np.bincount(sizes).tolist()) if count}


def _columns(projection: ProjectionMap) -> tuple[int, tuple[ColumnDescription, ...]]:
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


def evenly_spread(ids: NDArray[np.int64], count: int) -> list[int]:
    """Select up to `count` of the ids, at equal distances in the array."""
    indices = np.linspace(0, len(ids) - 1, min(count, len(ids))).round().astype(np.int64)
    some: list[int] = ids[indices].tolist()
    return some


def describe_sides(m: StoredMap) -> dict[str, Any]:
    """Return the fields of `MapDescription`."""
    sides = {side: describe_side(getattr(m, side)) for side in SIDES}
    return {**sides, "history": m.history}


def describe_side(vocabulary: Vocabulary) -> SideDescription:
    """Describe one side of a map."""
    table = vocabulary.table
    types = np.zeros(0, np.uint8) if table is None else table.types
    counts = np.bincount(types, minlength=len(TokenType) + 1).tolist()
    details = {name: value for name, value in vars(vocabulary).items() if name != "table"}
    kinds = {kind.name.lower(): counts[kind] for kind in TokenType if counts[kind]}
    return SideDescription(**details, token_types=kinds)


@dataclass(frozen=True, kw_only=True)
class ClassCoverage:
    """A map's rows for one class of student tokens, and the teacher ids in this class."""

    token_class: str  # the name of a `TokenClass`, in lower case
    rows: int
    shared: int  # number of rows for which a teacher token has equal bytes
    exact: int  # number of rows with a token of equal bytes or role
    empty: int
    mean_entries: float  # entries per non-empty row, without slots
    slot_share: float  # slots' share of the weight in all rows of the class
    teacher_ids: int
    teacher_unreached: int  # teacher tokens that are in no row, or only as a slot


def coverage_by_class(projection: ProjectionMap, pair: Pair) -> tuple[ClassCoverage, ...]:
    """Measure the coverage of a map for each token class."""
    student, teacher = require_table(projection.student), require_table(projection.teacher)
    student_classes, teacher_classes = token_classes(student), token_classes(teacher)
    kind, is_slot = projection.row_kind, projection.is_slot
    entry_classes = student_classes[projection.student_ids]
    reached = np.zeros(len(teacher), np.bool_)
    reached[projection.teacher_ids[~is_slot]] = True

    def count(classes: NDArray[np.uint8], weights: NDArray[np.float32] | None = None) -> Any:
        return np.bincount(classes, weights, len(TokenClass))

    row_counts, empty = count(student_classes), count(student_classes[kind == RowKind.EMPTY])
    filled = np.maximum(1, row_counts - empty)
    per_class = {
        "rows": row_counts,
        "shared": count(student_classes[pair.equal_bytes >= 0]),
        "exact": count(student_classes[np.isin(kind, [RowKind.EXACT, RowKind.ROLE])]),
        "empty": empty,
        "mean_entries": count(entry_classes[~is_slot]) / filled,
        "slot_share": count(entry_classes[is_slot], projection.weights[is_slot]) / filled,
        "teacher_ids": count(teacher_classes),
        "teacher_unreached": count(teacher_classes[~reached]),
    }
    return tuple(
        ClassCoverage(
            token_class=member.name.lower(),
            **{name: values[member].item() for name, values in per_class.items()},
        )
        for member in TokenClass
        if per_class["rows"][member] or per_class["teacher_ids"][member]
    )
