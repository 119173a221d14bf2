"""`evaluate`: measures of a map on text.

Text is tokenized by both sides. At each byte where a student token s and a teacher token t both
begin, a good row W[s] gives t a high weight.

- Cross-entropy: the mean of `-ln((1 - eps) * W[s, t] + eps / V_teacher)`, eps = 1e-3, in nats.
- Coverage: how often W[s, t] > 0. Top-1: how often t is the row's largest entry.
- Floor: the cross-entropy of the map in hindsight, counted on the measured text itself and cut to
  as many entries per row.
- Recipe: that of X-Token's map (arXiv 2605.21699): weights .9, .09, …, both passes, exact matches,
  no slot.
- Closed: (recipe - map) / (recipe - floor), the share of the way from the recipe to the floor.

The same over chunks, as P-KL averages: the student rows of a chunk are averaged, and so are the
losses of its teacher tokens. This decides for P-KL; shared token boundaries decide for gold and
H-KL, which compare the first tokens there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import Loss, MultitokenConfig, SortCutConfig
from xtok.counting.counts import require_starts
from xtok.counting.encode import pair_edges
from xtok.counting.smoothing import losses, weights_at
from xtok.counting.texts import find_texts
from xtok.inspection.advice import Advice, Ranking, advise, rank
from xtok.inspection.bootstrap import Interval, interval, resample
from xtok.inspection.pair_facts import PairFacts, TextCounts, pair_facts
from xtok.inspection.seen_text import SeenText, read_text
from xtok.maps.edges import Edges, heaviest
from xtok.maps.file import MapLike, as_maps
from xtok.maps.pair import with_vocabularies
from xtok.maps.projection_map import ProjectionMap, require_table
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.events import events
from xtok.stages.exact import reapply_exact
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.classes import TokenClass, token_classes

SMALLEST_GAP = 0.02
"""Nats between recipe and floor below which `closed` is noise, and left out."""


@dataclass(frozen=True, kw_only=True)
class MapMeasures:
    """How a map does on one group of text.

    Attributes:
        name: of the map.
        group: of text: a file's name (its path, where several have this name), or a field's value;
            `all` for everything.
        documents: in the group.
        starts: shared token boundaries, bytes at which a token begins on both sides.
        cross_entropy: at shared token boundaries, in nats.
        coverage: share of the starts with a weight above 0.
        coverage_of_floor: coverage divided by the floor's.
        top_1: share of the starts whose teacher token is the row's largest entry.
        floor: cross-entropy of the best map in hindsight with as many entries per row.
        recipe: cross-entropy of X-Token's recipe with as many entries per row.
        closed: share of the way from the recipe to the floor; None if they are too close.
        slot_weight: mean weight that the rows give to their scale slots.
        chunk_cross_entropy: averaged over chunks as P-KL does it.
        chunk_floor: over chunks, of the map counted on this text within chunks.
        chunk_recipe: over chunks, of the recipe.
        chunk_closed: over chunks, the share of the way from the recipe to the floor.
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
    chunk_floor: float
    chunk_recipe: float
    chunk_closed: Interval | None


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
        ranking: which map is best for the loss asked for; None if none was.
        pair: what the text says of the tokenizers, if a loss was asked for.
        advice: the loss, artefact and direction that suit them, as `doctor` says it; likewise.
    """

    student: str
    teacher: str
    measures: tuple[MapMeasures, ...]
    classes: tuple[ClassMeasures, ...]
    worst_rows: tuple[WorstRow, ...]
    num_bytes: int
    lost_bytes: int
    differing: int
    ranking: Ranking | None = None
    pair: PairFacts | None = None
    advice: Advice | None = None

    def failing(
        self, *, min_coverage: float | None = None, max_cross_entropy: float | None = None
    ) -> list[str]:
        """Say in a line each which maps miss a bound on any group of text.

        Raises:
            ValueError: if a bound is NaN, which nothing misses.
        """
        bounds = {"min_coverage": min_coverage, "max_cross_entropy": max_cross_entropy}
        for name, bound in bounds.items():
            if bound is not None and isnan(bound):
                raise ValueError(f"{name} is nan, which nothing misses")
        missed = []
        for m in self.measures:
            covered, nats = m.coverage.value, m.cross_entropy.value
            where = f"{m.name} on {m.group}"
            if min_coverage is not None and covered < min_coverage:
                missed.append(f"{where}: coverage {covered:.4f} is below {min_coverage:g}")
            if max_cross_entropy is not None and nats > max_cross_entropy:
                missed.append(f"{where}: cross-entropy {nats:.4f} is above {max_cross_entropy:g}")
        return missed


def evaluate(
    maps: MapLike | Sequence[MapLike],
    texts: str | Path | Sequence[str | Path],
    student_model: ModelLike,
    teacher_model: ModelLike,
    *,
    names: Sequence[str] = (),
    field: str = "text",
    group_by: str | None = None,
    for_loss: Loss | None = None,
    num_worst: int = 5,
    seed: int = 0,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> Evaluation:
    """Measure maps of one pair on text, in one pass over it.

    Args:
        maps: a map, the path of one, or several of either, all of one pair.
        texts: paths and globs of text, as `build` takes them.
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        names: what to call the maps; paths by default, or `map 1` and so on. Repeated ones get a
            number.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        group_by: a field or column by whose values text is grouped; files are groups if None.
        for_loss: a loss to rank the maps for.
        num_worst: how many of the most costly rows to list for each map.
        seed: of the bootstrap.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read or nothing in it measured, or a map is of another pair.
        ValueError: for no map, or names that are not as many.
    """
    loaded, names = as_maps(maps, names)
    if not loaded:
        raise ValueError("there is no map to evaluate")
    names = _distinct(names)
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    loaded = [
        with_vocabularies(
            projection,
            student=student.vocabulary,
            teacher=teacher.vocabulary,
            widths=True,
            name=name,
        )
        for name, projection in zip(names, loaded, strict=True)
    ]
    return measure(
        loaded, find_texts(texts), student, teacher, names=names, field=field, group_by=group_by,
        for_loss=for_loss, num_worst=num_worst, seed=seed, progress=progress,
        text_progress=text_progress,
    )[0]  # fmt: skip


def measure(
    loaded: Sequence[ProjectionMap],
    paths: Sequence[Path],
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    names: Sequence[str],
    field: str,
    group_by: str | None,
    for_loss: Loss | None,
    num_worst: int,
    seed: int,
    progress: Progress,
    text_progress: TextProgress,
) -> tuple[Evaluation, TextCounts]:
    """Measure maps whose names differ and that have these vocabularies; see `evaluate`.

    Returns:
        what was measured, and how often each token occurs in the text.
    """
    # X-Token's recipe without a slot, cut to each number of entries per row.
    whole = multitoken(student, teacher, MultitokenConfig(scale_trick=False), progress=progress)
    exact = reapply_exact(whole)
    cuts = sorted({m.top_k for m in loaded})
    recipes = {k: sort_cut(exact, SortCutConfig(top_k=k)) for k in cuts}
    measured_edges = [m.edges for m in (*loaded, *recipes.values())]
    seen = read_text(
        measured_edges, loaded[0].shape, paths, student, teacher, field, group_by, text_progress
    )
    require_starts(len(seen.keys), len(seen.groups), seen.num_bytes, "measured")
    recipe_column = {k: len(loaded) + n for n, k in enumerate(recipes)}
    measured = [
        _Measured(name, m, recipes[m.top_k].edges, seen, (n, recipe_column[m.top_k]))
        for n, (name, m) in enumerate(zip(names, loaded, strict=True))
    ]
    token_counts = seen.token_counts(paths)
    ranking = pair = None
    if for_loss is not None:
        sums, counts = seen.chunk_losses[:, : len(loaded)].T, seen.num_chunks
        if for_loss != "p-kl":
            sums = np.stack([one.start_losses() for one in measured])
            counts = np.bincount(seen.documents, seen.counts, len(seen.groups)).astype(np.int64)
        ranking = rank(for_loss, names, sums, counts, seed)
        pair = pair_facts(
            loaded[0].student, loaded[0].teacher, token_counts, events(student, teacher)
        )
    groups = [
        (group, np.array([g == group for g in seen.groups], np.bool_))
        for group in dict.fromkeys(seen.groups)
    ]
    if len(groups) > 1:
        groups.append(("all", np.ones(len(seen.groups), np.bool_)))
    measures = [
        one.measures(group, chosen, seed)  # the same documents for every map
        for group, chosen in groups
        for one in measured
    ]
    evaluation = Evaluation(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        measures=tuple(measures),
        classes=tuple(c for one in measured for c in one.classes()),
        worst_rows=tuple(row for one in measured for row in one.worst(num_worst)),
        num_bytes=seen.num_bytes,
        lost_bytes=seen.lost_bytes,
        differing=seen.differing,
        ranking=ranking,
        pair=pair,
        advice=None if pair is None else advise(pair),
    )
    return evaluation, token_counts


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the repeated names: a, a (2)."""
    times: Counter[str] = Counter()
    distinct = []
    for name in names:
        times[name] += 1
        distinct.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return distinct


class _Measured:
    """A map's weights and losses, and its recipe's, float64 `[pairs]` and `[documents]`.

    `columns` are those of the chunk losses that are the map's and the recipe's.
    """

    def __init__(
        self,
        name: str,
        projection: ProjectionMap,
        recipe: Edges,
        seen: SeenText,
        columns: tuple[int, int],
    ) -> None:
        self.name, self.projection, self.seen = name, projection, seen
        self.chunk_losses, self.recipe_chunk_losses = (seen.chunk_losses[:, n] for n in columns)
        self.weights = weights_at(projection.edges, seen.keys)
        self.losses = self._losses_of(self.weights)
        self.recipe = self._losses_of(weights_at(recipe, seen.keys))

    def _losses_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return losses(weights, self.projection.shape[1])

    def start_losses(self) -> NDArray[np.float64]:
        """Return each document's losses at shared token boundaries, added up."""
        weighted = self.seen.counts * self.losses[self.seen.places]
        return np.bincount(self.seen.documents, weighted, len(self.seen.groups)).astype(np.float64)

    def _floor(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weights of the map counted on this text, cut to as many entries per row."""
        used = counts > 0
        edges = heaviest(pair_edges(self.seen.keys[used], counts[used]), self.projection.top_k)
        return weights_at(edges, self.seen.keys)

    def measures(self, group: str, chosen: NDArray[np.bool_], seed: int) -> MapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        seen, projection = self.seen, self.projection
        use = chosen[seen.documents]
        documents, places = seen.documents[use], seen.places[use]
        amounts = seen.counts[use].astype(np.float64)
        counts = np.bincount(places, amounts, len(seen.keys)).astype(np.float64)
        floor_weights = self._floor(counts)
        students, teachers = seen.keys >> 32, seen.keys & 0xFFFFFFFF
        slots = projection.edges.take(projection.is_slot)
        slot_weight = np.zeros(projection.shape[0])
        slot_weight[slots.student_ids] = slots.weights
        per_pair = {
            "starts": np.ones(len(seen.keys)),
            "loss": self.losses,
            "covered": self.weights > 0,
            "top": projection.heaviest_teacher_ids[students] == teachers,
            "floor": self._losses_of(floor_weights),
            "covered by floor": floor_weights > 0,
            "recipe": self.recipe,
            "slots": slot_weight[students],
        }
        # What `_figures` needs, summed over each chosen document.
        sums: dict[str, NDArray[Any]] = {
            name: np.bincount(documents, amounts * values[places], len(seen.groups))[chosen]
            for name, values in per_pair.items()
        }
        sums["chunk loss"] = self.chunk_losses[chosen]
        sums["chunks"] = seen.num_chunks[chosen]
        sums["chunk recipe"] = self.recipe_chunk_losses[chosen]
        sums["chunk floor"] = seen.hindsight_losses(chosen, projection.top_k)
        table = np.stack(list(sums.values()), axis=1).astype(np.float64)
        whole = _figures(dict(zip(sums, table.sum(axis=0), strict=True)))
        drawn = _figures(dict(zip(sums, resample(table, seed).T, strict=True)))
        figures: dict[str, Any] = {name: float(value) for name, value in whole.items()}
        for name in ("cross_entropy", "coverage", "top_1", "chunk_cross_entropy"):
            figures[name] = interval(whole[name], drawn[name], len(table))
        for name in ("closed", "chunk_closed"):
            of = name.removesuffix("closed")
            is_noise = not whole[f"{of}recipe"] - whole[f"{of}floor"] >= SMALLEST_GAP
            figures[name] = None if is_noise else interval(whole[name], drawn[name], len(table))
        return MapMeasures(
            name=self.name,
            group=group,
            documents=int(chosen.sum()),
            starts=int(counts.sum()),
            **figures,
        )

    @cached_property
    def _totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each pair's count over all text, and its loss under the floor."""
        seen = self.seen
        counts = np.bincount(seen.places, seen.counts, len(seen.keys)).astype(np.float64)
        return counts, self._losses_of(self._floor(counts))

    def classes(self) -> list[ClassMeasures]:
        """Measure each class of student token over all text."""
        counts, floor = self._totals
        kinds = token_classes(require_table(self.projection.student))[self.seen.keys >> 32]
        classes = []
        for kind in np.unique(kinds).tolist():
            use = kinds == kind
            total = counts[use].sum()
            classes.append(
                ClassMeasures(
                    name=self.name,
                    token_class=TokenClass(kind).label,
                    starts=int(total),
                    cross_entropy=float((counts * self.losses)[use].sum() / total),
                    floor=float((counts * floor)[use].sum() / total),
                    coverage=float(counts[use & (self.weights > 0)].sum() / total),
                )
            )
        return classes

    def worst(self, number: int) -> list[WorstRow]:
        """Return the rows whose losses exceed the floor's most, over all text."""
        counts, floor = self._totals
        keys, tables = self.seen.keys, (self.projection.student, self.projection.teacher)
        student, teacher = map(require_table, tables)
        excess = np.bincount(keys >> 32, counts * (self.losses - floor)) / max(1.0, counts.sum())
        rows = []
        for row in np.argsort(-excess, kind="stable")[:number].tolist():
            places = np.flatnonzero(keys >> 32 == row)
            places = places[np.argsort(-counts[places], kind="stable")]
            total = counts[places].sum()
            wanted = tuple(
                (
                    teacher.name(int(keys[p] & 0xFFFFFFFF)),
                    float(counts[p] / total),
                    float(self.weights[p]),
                )
                for p in places[:3]
            )
            if excess[row] > 0:
                rows.append(
                    WorstRow(
                        name=self.name,
                        student_id=row,
                        token=student.name(row),
                        starts=int(total),
                        excess=float(excess[row]),
                        wanted=wanted,
                    )
                )
        return rows


def _figures(sums: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Turn sums over documents, numbers or float64 `[samples]`, into the figures of a map."""
    starts, chunks = np.maximum(sums["starts"], 1), np.maximum(sums["chunks"], 1)
    figures = {
        "cross_entropy": sums["loss"] / starts,
        "coverage": sums["covered"] / starts,
        "coverage_of_floor": sums["covered"] / np.maximum(sums["covered by floor"], 1),
        "top_1": sums["top"] / starts,
        "floor": sums["floor"] / starts,
        "recipe": sums["recipe"] / starts,
        "slot_weight": sums["slots"] / starts,
        "chunk_cross_entropy": sums["chunk loss"] / chunks,
        "chunk_floor": sums["chunk floor"] / chunks,
        "chunk_recipe": sums["chunk recipe"] / chunks,
    }
    for of, over in (("", ""), ("chunk_", "chunk ")):
        loss, floor, recipe = (sums[over + name] for name in ("loss", "floor", "recipe"))
        gap = np.where(recipe > floor, recipe - floor, np.nan)
        figures[f"{of}closed"] = (recipe - loss) / gap
    return figures
