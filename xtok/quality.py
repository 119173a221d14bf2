"""`evaluate`: measures of a map on text.

Text is tokenized by both sides. At each byte where a student token s and a teacher token t both
begin, a good row W[s] gives t a high weight.

- Cross-entropy: the mean of `-ln((1 - eps) * W[s, t] + eps / V_teacher)`, eps = 1e-3, in nats.
- Coverage: how often W[s, t] > 0. Top-1: how often t is the row's largest entry.
- Floor: the cross-entropy of the best map in hindsight, counted on the measured text itself and
  cut to as many entries per row.
- Recipe: that of X-Token's map (arXiv 2605.21699): weights .9, .09, …, both passes, exact rows
  pinned, no slot.
- Closed: (recipe - map) / (recipe - floor), the share of the way from the recipe to the floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.classes import TokenClass, token_classes
from xtok.config import MultitokenConfig, SortCutConfig
from xtok.cooccurrence import PairEncoder, Side, Starts, batches, pair_edges, start_keys
from xtok.counting import EPSILON, losses, weights_at
from xtok.errors import XtokError
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.projection import Edges, ProjectionMap, heaviest
from xtok.sides import require_table, with_vocabularies
from xtok.stages import multitoken, reapply_exact, sort_cut
from xtok.texts import ShardReader, find_texts, shards
from xtok.tokenizers import Tokenizer, as_tokenizer

SMALLEST_GAP = 0.02
"""Nats between recipe and floor below which `closed` says nothing, and is left out."""

_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % confidence interval, by bootstrap over documents.

    `low` and `high` are None where there is only one document.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class MapMeasures:
    """How a map does on one group of text.

    Attributes:
        name: of the map.
        group: of text: a file's name (its path, where several have this name), or a field's value;
            `all` for everything.
        documents: in the group.
        starts: bytes at which a token begins on both sides.
        cross_entropy: at common starts, in nats.
        coverage: share of the starts with a weight above 0.
        coverage_of_floor: coverage divided by the floor's.
        top_1: share of the starts whose teacher token is the row's largest entry.
        floor: cross-entropy of the best map in hindsight with as many entries per row.
        recipe: cross-entropy of X-Token's recipe with as many entries per row.
        closed: share of the way from the recipe to the floor; None if they are too close.
        slot_weight: mean weight that the rows give to their scale slots.
        chunk_cross_entropy: the same measure averaged over chunks as P-KL does it: the student
            rows of a chunk are averaged, and so are the losses of its teacher tokens.
    """

    name: str
    group: str
    documents: int
    starts: int
    cross_entropy: Interval
    coverage: Interval
    coverage_of_floor: float
    top_1: Interval
    floor: float
    recipe: float
    closed: Interval | None
    slot_weight: float
    chunk_cross_entropy: Interval


@dataclass(frozen=True, kw_only=True)
class ClassMeasures:
    """How a map does on the student tokens of one class, over all text."""

    name: str
    token_class: str
    starts: int
    cross_entropy: float
    floor: float
    coverage: float


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """A row that costs much: `excess` is its share of the cross-entropy above the floor's, in nats.

    Attributes:
        name: of the map.
        student_id: the row.
        token: the student's token, escaped.
        starts: how often it begins where a teacher token does.
        excess: see above.
        wanted: the teacher tokens that began there most, with their share and the map's weight.
    """

    name: str
    student_id: int
    token: str
    starts: int
    excess: float
    wanted: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured.

    Attributes:
        student: model id of the rows.
        teacher: model id of the columns.
        measures: for each group of text, then for each map; the group `all` comes last.
        classes: for each map, by class of student token.
        worst_rows: for each map, the most costly first.
        num_bytes: bytes of text.
        lost_bytes: of them, those behind a first difference between the two sides' spellings.
        differing: documents that the two sides spell differently.
    """

    student: str
    teacher: str
    measures: tuple[MapMeasures, ...]
    classes: tuple[ClassMeasures, ...]
    worst_rows: tuple[WorstRow, ...]
    num_bytes: int
    lost_bytes: int
    differing: int

    def failing(
        self, *, min_coverage: float | None = None, max_cross_entropy: float | None = None
    ) -> list[str]:
        """Say in a line each which maps miss a bound on any group of text."""
        missed = []
        for m in self.measures:
            if min_coverage is not None and m.coverage.value < min_coverage:
                missed.append(
                    f"{m.name} on {m.group}: coverage {m.coverage.value:.4f} is below "
                    f"{min_coverage:g}"
                )
            if max_cross_entropy is not None and m.cross_entropy.value > max_cross_entropy:
                missed.append(
                    f"{m.name} on {m.group}: cross-entropy {m.cross_entropy.value:.4f} is above "
                    f"{max_cross_entropy:g}"
                )
        return missed


class _Text(NamedTuple):
    """What was seen: pairs per document, and chunk losses per map and document."""

    groups: list[str]  # one per document
    keys: NDArray[np.int64]  # [pairs], all different
    documents: NDArray[np.int32]  # [entries]
    places: NDArray[np.int64]  # [entries], in keys
    counts: NDArray[np.int64]  # [entries]
    chunk_losses: NDArray[np.float64]  # [maps, documents]
    num_chunks: NDArray[np.int64]  # [documents]
    num_bytes: int
    lost_bytes: int
    differing: int


def evaluate(
    maps: Sequence[ProjectionMap],
    texts: Sequence[str | Path],
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    *,
    names: Sequence[str] = (),
    field: str = "text",
    group_by: str | None = None,
    num_worst: int = 5,
    seed: int = 0,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> Evaluation:
    """Measure maps of one pair on text, in one pass over it.

    Args:
        maps: maps of the pair.
        texts: paths and globs of text, as `estimate` takes them.
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        names: what to call the maps; `map 1` and so on if empty.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        group_by: a field or column by whose values text is grouped; files are groups if None.
        num_worst: how many of the most costly rows to list for each map.
        seed: of the bootstrap.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read or nothing in it measured, or a map is of another pair.
        ValueError: for no map, or names that are not as many.
    """
    if not maps or (names and len(names) != len(maps)):
        raise ValueError(f"{len(maps)} maps, {len(names)} names")
    names = names or [f"map {n}" for n in range(1, len(maps) + 1)]
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    maps = [
        with_vocabularies(
            projection,
            student=student.vocabulary,
            teacher=teacher.vocabulary,
            widths=True,
            name=name,
        )
        for name, projection in zip(names, maps, strict=True)
    ]
    paths = find_texts(texts)
    recipes = _recipes(student, teacher, {m.top_k for m in maps}, progress)
    seen = _read(maps, paths, student, teacher, field, group_by, text_progress)
    if not len(seen.keys):
        raise XtokError(
            f"nothing can be measured: {len(seen.groups):,} documents, {seen.num_bytes:,} bytes "
            "of text",
            hint="give text, not empty, that both tokenizers can spell; xtok align shows how they "
            "differ",
        )
    measured = [_Measured(m, recipes[m.top_k], seen) for m in maps]
    groups = [
        (group, np.array([g == group for g in seen.groups], np.bool_))
        for group in dict.fromkeys(seen.groups)
    ]
    if len(groups) > 1:
        groups.append(("all", np.ones(len(seen.groups), np.bool_)))
    measures = [
        one.measures(name, number, group, chosen, seed)  # the same documents for every map
        for group, chosen in groups
        for number, (name, one) in enumerate(zip(names, measured, strict=True))
    ]
    return Evaluation(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        measures=tuple(measures),
        classes=tuple(c for n, one in zip(names, measured, strict=True) for c in one.classes(n)),
        worst_rows=tuple(
            row for n, one in zip(names, measured, strict=True) for row in one.worst(n, num_worst)
        ),
        num_bytes=seen.num_bytes,
        lost_bytes=seen.lost_bytes,
        differing=seen.differing,
    )


def _recipes(
    student: Tokenizer, teacher: Tokenizer, cuts: set[int], progress: Progress
) -> dict[int, Edges]:
    """Return X-Token's recipe without a slot, cut to each number of entries per row."""
    whole = multitoken(student, teacher, MultitokenConfig(scale_trick=False), progress=progress)
    pinned = reapply_exact(whole)
    return {k: sort_cut(pinned, SortCutConfig(top_k=k)).edges for k in cuts}


def _read(
    maps: Sequence[ProjectionMap],
    paths: Sequence[Path],
    student: Tokenizer,
    teacher: Tokenizer,
    field: str,
    group_by: str | None,
    progress: TextProgress,
) -> _Text:
    rows = [_Rows.of(projection) for projection in maps]
    groups: list[str] = []
    parts: list[tuple[NDArray[np.int64], ...]] = []
    chunk_losses: list[NDArray[np.float64]] = []
    chunks: list[NDArray[np.int64]] = []
    num_bytes = lost = differing = 0
    total = sum(path.stat().st_size for path in paths)
    files = Counter(path.name for path in paths)
    with PairEncoder(student, teacher) as encoder, progress("measuring", total) as advance:
        for path in paths:
            name = path.name if files[path.name] == 1 else str(path)
            for shard in shards(path, field):
                consumed = 0
                reader = ShardReader(replace(shard, group_by=group_by))
                for batch in batches(reader):
                    groups += reader.take_groups() if group_by else [name] * len(batch)
                    sides = encoder.encode(batch)
                    starts = encoder.starts(*sides)
                    parts.append(_pairs_per_document(*sides, starts, len(groups) - len(batch)))
                    found = [r.chunk_losses(*sides, starts) for r in rows]
                    chunk_losses.append(np.stack([loss for loss, _ in found]))
                    chunks.append(found[0][1])
                    size, behind = starts.bytes_of(batch)
                    num_bytes, lost = num_bytes + size, lost + behind
                    differing += starts.num_differing
                    advance(reader.consumed - consumed, len(sides[0].ids))
                    consumed = reader.consumed
                advance(shard.size - consumed, 0)
    empty = np.zeros(0, np.int64)
    documents, keys, counts = (
        np.concatenate([part[n] for part in parts]) if parts else empty for n in range(3)
    )
    unique, places = np.unique(keys, return_inverse=True)
    return _Text(
        groups,
        unique,
        documents.astype(np.int32),
        places,
        counts,
        np.concatenate(chunk_losses, axis=1) if chunk_losses else np.zeros((len(maps), 0)),
        np.concatenate(chunks) if chunks else empty,
        num_bytes,
        lost,
        differing,
    )


def _pairs_per_document(
    student: Side, teacher: Side, starts: Starts, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return document, pair and count of each different pair of each document."""
    keys = start_keys(student, teacher, starts)
    documents = np.repeat(np.arange(len(starts.num_starts)), starts.num_starts)
    order = np.lexsort((keys, documents))
    keys, documents = keys[order], documents[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (documents[1:] != documents[:-1])
    places = np.flatnonzero(new)
    counts = np.diff(np.append(places, len(keys)))
    return documents[places] + first, keys[places], counts


class _Rows(NamedTuple):
    """A map's rows for a kernel: entries of row s are `bounds[s]` to `bounds[s + 1]`."""

    bounds: NDArray[np.int64]
    teacher_ids: NDArray[np.int32]
    weights: NDArray[np.float64]
    width: int

    @staticmethod
    def of(projection: ProjectionMap) -> _Rows:
        bounds = np.concatenate([[0], np.cumsum(projection.entries_per_row)])
        weights = projection.weights.astype(np.float64)
        return _Rows(bounds, projection.teacher_ids, weights, projection.shape[1])

    def chunk_losses(
        self, student: Side, teacher: Side, starts: Starts
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the sum of each document's chunk losses, and the number of its chunks."""
        from xtok.cooccurrence_kernels import chunk_losses

        losses = np.zeros(len(starts.num_starts))
        chunks = np.zeros(len(starts.num_starts), np.int64)
        chunk_losses(
            *student, *teacher, starts.s_starts, starts.t_starts, starts.num_starts,
            starts.complete, self.bounds, self.teacher_ids, self.weights,
            EPSILON, EPSILON / self.width, losses, chunks,
        )  # fmt: skip
        return losses, chunks


class _Measured:
    """A map's losses on the pairs that were seen."""

    def __init__(self, projection: ProjectionMap, recipe: Edges, seen: _Text) -> None:
        self.projection, self.seen = projection, seen
        self.weights = weights_at(projection.edges, seen.keys)
        self.losses = self._losses_of(self.weights)
        self.recipe = self._losses_of(weights_at(recipe, seen.keys))
        s = seen.keys >> 32
        self.is_top = projection.heaviest_teacher_ids[s] == (seen.keys & 0xFFFFFFFF)
        slots = projection.edges.take(projection.is_slot)
        slot_weight = np.zeros(projection.shape[0])
        slot_weight[slots.student_ids] = slots.weights
        self.slot_weight = slot_weight[s]

    def _losses_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return losses(weights, self.projection.shape[1])

    def _floor(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weights of the map counted on this text, cut to as many entries per row."""
        used = counts > 0
        edges = heaviest(pair_edges(self.seen.keys[used], counts[used]), self.projection.top_k)
        return weights_at(edges, self.seen.keys)

    def measures(
        self, name: str, number: int, group: str, chosen: NDArray[np.bool_], seed: int
    ) -> MapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        seen = self.seen
        use = chosen[seen.documents]
        documents, places = seen.documents[use], seen.places[use]
        amounts = seen.counts[use].astype(np.float64)
        counts = np.bincount(places, amounts, len(seen.keys)).astype(np.float64)
        floor_weights = self._floor(counts)
        per_pair = [
            np.ones(len(seen.keys)), self.losses, self.weights > 0, self.is_top,
            self._losses_of(floor_weights), floor_weights > 0, self.recipe, self.slot_weight,
        ]  # fmt: skip
        sums = [
            np.bincount(documents, amounts * values[places], len(seen.groups))[chosen]
            for values in per_pair
        ]
        sums += [seen.chunk_losses[number][chosen], seen.num_chunks[chosen].astype(np.float64)]
        table = np.stack(sums, axis=1).astype(np.float64)
        whole = _figures(table.sum(axis=0, keepdims=True))[0]
        resampled = _figures(_resample(table, seed)) if len(table) > 1 else None
        ce, coverage, top, floor, of_floor, recipe, slots, chunk, closed = whole.tolist()

        def interval(column: int, value: float) -> Interval:
            if resampled is None:
                return Interval(value=value)
            low, high = np.nanquantile(resampled[:, column], [0.025, 0.975]).tolist()
            return Interval(value=value, low=low, high=high)

        return MapMeasures(
            name=name,
            group=group,
            documents=int(chosen.sum()),
            starts=int(counts.sum()),
            cross_entropy=interval(0, ce),
            coverage=interval(1, coverage),
            coverage_of_floor=of_floor,
            top_1=interval(2, top),
            floor=floor,
            recipe=recipe,
            closed=interval(8, closed) if recipe - floor >= SMALLEST_GAP else None,
            slot_weight=slots,
            chunk_cross_entropy=interval(7, chunk),
        )

    @cached_property
    def _totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        seen = self.seen
        counts = np.bincount(seen.places, seen.counts, len(seen.keys)).astype(np.float64)
        return counts, self._losses_of(self._floor(counts))

    def classes(self, name: str) -> list[ClassMeasures]:
        """Measure each class of student token over all text."""
        counts, floor = self._totals
        kinds = token_classes(require_table(self.projection.student))[self.seen.keys >> 32]
        found = []
        for kind in np.unique(kinds).tolist():
            use = kinds == kind
            total = counts[use].sum()
            found.append(
                ClassMeasures(
                    name=name,
                    token_class=TokenClass(kind).label,
                    starts=int(total),
                    cross_entropy=float((counts * self.losses)[use].sum() / total),
                    floor=float((counts * floor)[use].sum() / total),
                    coverage=float(counts[use & (self.weights > 0)].sum() / total),
                )
            )
        return found

    def worst(self, name: str, number: int) -> list[WorstRow]:
        """Return the rows whose losses exceed the floor's most, over all text."""
        counts, floor = self._totals
        students = self.seen.keys >> 32
        excess = np.bincount(students, counts * (self.losses - floor)) / max(1.0, counts.sum())
        rows = np.argsort(-excess, kind="stable")[:number]
        return [
            self._worst(name, row, float(excess[row]), counts)
            for row in rows.tolist()
            if excess[row] > 0
        ]

    def _worst(self, name: str, row: int, excess: float, counts: NDArray[np.float64]) -> WorstRow:
        places = np.flatnonzero(self.seen.keys >> 32 == row)
        places = places[np.argsort(-counts[places], kind="stable")]
        total = counts[places].sum()
        teacher = require_table(self.projection.teacher)
        wanted = tuple(
            (
                teacher.name(int(self.seen.keys[p] & 0xFFFFFFFF)),
                float(counts[p] / total),
                float(self.weights[p]),
            )
            for p in places[:3]
        )
        token = require_table(self.projection.student).name(row)
        return WorstRow(
            name=name, student_id=row, token=token, starts=int(total), excess=excess, wanted=wanted
        )


def _figures(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn sums over documents, `[samples, 10]`, into figures, `[samples, 9]`."""
    starts, loss, covered, top, floor, floor_covered, recipe, slot, chunk, chunks = sums.T
    starts = np.maximum(starts, 1)
    gap = recipe - floor
    closed = np.divide(recipe - loss, gap, out=np.full_like(gap, np.nan), where=gap > 0)
    return np.stack(
        [
            loss / starts, covered / starts, top / starts, floor / starts,
            covered / np.maximum(floor_covered, 1), recipe / starts, slot / starts,
            chunk / np.maximum(chunks, 1), closed,
        ],
        axis=1,
    )  # fmt: skip


def _resample(table: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Draw documents with replacement, and add up; float64 `[resamples, columns]`."""
    rng = np.random.default_rng(seed)
    found = np.empty((_RESAMPLES, table.shape[1]))
    for row in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, len(table), len(table)), minlength=len(table))
        found[row] = times @ table
    return found
