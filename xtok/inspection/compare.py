"""`compare`: compare two maps of one pair row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xtok._lib.shards import Paths
from xtok.maps.edges import pair_keys
from xtok.maps.map_arguments import MapLike, bind_maps
from xtok.maps.projection_map import ProjectionMap, token_name
from xtok.maps.records import RowKind
from xtok.tokenizers.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """A row with different tokens or weights in the two maps."""

    student_id: int
    token: str
    distance: float  # total variation distance
    share: float  # share of the text; without text, share of the rows
    first: tuple[tuple[str, float], ...]
    second: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between two maps of one pair."""

    student: str  # model id of the student
    teacher: str
    rows: int  # rows with entries in at least one map
    rows_that_differ: int  # rows that differ by more than float32 rounding
    rows_of_other_top: int  # rows with a different heaviest entry
    mean_distance: float  # mean total variation distance, 0 to 1; with text, weighted by its tokens
    weighted_by_text: bool
    examples: tuple[RowDifference, ...]  # sorted by distance × share, largest first


_ROUNDING = 1e-6  # maximum total variation distance due to rounding


def compare(
    a: MapLike,
    b: MapLike,
    texts: Paths = (),
    *,
    pair: Pair | None = None,
    num_examples: int = 10,
    names: Sequence[str] = (),
    field: str = "text",
) -> Comparison:
    """Compare two maps of one pair by total variation distance.

    >>> pair = xtok.load_pair("bytes", "bytes")
    >>> comparison = xtok.compare(xtok.build(pair), xtok.generate(pair, "spelling"))
    >>> comparison.rows, comparison.rows_that_differ
    (256, 0)

    Args:
        a: a map, or its path.
        b: a second map.
        texts: paths and globs of text. Each row is weighted by its token's count in the text.
        pair: the pair; for `texts`, with the student's tokenizer.
        num_examples: number of rows to show.
        names: names of the maps in errors.
        field: the field or column with the text.

    Raises:
        XtokError: if the maps belong to different pairs, or a text cannot be read.
        ValueError: if texts are given without the student's tokenizer.
    """
    [first, second], pair, _ = bind_maps([a, b], ProjectionMap.of, pair, names)
    return compare_maps(first, second, _token_counts(texts, pair, field), num_examples)


def compare_maps(
    first: ProjectionMap,
    second: ProjectionMap,
    token_counts: NDArray[np.int64] | None = None,
    num_examples: int = 10,
) -> Comparison:
    """Compare two maps as `compare` does, but with token counts instead of a text.

    The distance of two rows is half the sum of the absolute differences of their weights. The
    distance of an empty row from a row with entries is 1. `token_counts`, int64 `[V_student]`, are
    the weights of the rows.
    """
    distance = _distances(first, second)
    filled = (first.row_kind != RowKind.EMPTY) | (second.row_kind != RowKind.EMPTY)
    share = filled / max(1, int(filled.sum()))
    if token_counts is not None:
        occurs = np.where(filled, token_counts, 0)
        share = occurs / max(1, int(occurs.sum()))
    cost = distance * share
    is_other = first.heaviest_teacher_ids != second.heaviest_teacher_ids
    rows = np.argsort(-cost, kind="stable")[:num_examples]
    return Comparison(
        student=first.student.model_id,
        teacher=first.teacher.model_id,
        rows=int(filled.sum()),
        rows_that_differ=int(np.count_nonzero(distance > _ROUNDING)),
        rows_of_other_top=int(np.count_nonzero(is_other)),
        mean_distance=float(cost.sum()),
        weighted_by_text=token_counts is not None,
        examples=tuple(
            RowDifference(
                student_id=row,
                token=token_name(first.student, row) or f"#{row}",
                distance=float(distance[row]),
                share=float(share[row]),
                first=_entries(first, row),
                second=_entries(second, row),
            )
            for row in rows.tolist()
            if distance[row] > _ROUNDING and cost[row] > 0
        ),
    )


def _token_counts(texts: Paths, pair: Pair | None, field: str) -> NDArray[np.int64] | None:
    if not texts:
        return None
    if pair is None or pair.student_tokenizer is None:
        raise ValueError("texts require the student's tokenizer")
    from xtok.building.counting.pair_text import PairText  # only required for text

    return PairText.read(replace(pair, teacher_tokenizer=None), texts, field=field).tokens[0]


def _distances(first: ProjectionMap, second: ProjectionMap) -> NDArray[np.float64]:
    keys = np.concatenate([pair_keys(m.student_ids, m.teacher_ids) for m in (first, second)])
    weights = np.concatenate([first.weights.astype(np.float64), -second.weights.astype(np.float64)])
    pairs, index = np.unique(keys, return_inverse=True)
    moved = np.abs(np.bincount(index, weights, len(pairs)))
    distance = np.bincount(pairs >> 32, moved, first.shape[0]) / 2
    distance[(first.row_kind == 0) != (second.row_kind == 0)] = 1.0
    return distance


def _entries(projection: ProjectionMap, row: int) -> tuple[tuple[str, float], ...]:
    return tuple((e.token or f"#{e.teacher_id}", e.weight) for e in projection[row].entries)
