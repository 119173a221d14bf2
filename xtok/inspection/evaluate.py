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
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import Loss, MultitokenConfig, SortCutConfig
from xtok.counting.counts import require_starts
from xtok.counting.encode import pair_edges
from xtok.counting.measures import entropy_of, kept_of, share_of
from xtok.counting.smoothing import losses, weights_at
from xtok.counting.texts import describe_text, find_texts, little_text
from xtok.errors import XtokError
from xtok.inspection.advice import Advice, Ranking, advise, rank
from xtok.inspection.bootstrap import Interval, interval, resample
from xtok.inspection.measured_text import MeasuredText, measure_text
from xtok.inspection.pair_facts import PairFacts, TextCounts, pair_facts
from xtok.maps.edges import Edges, heaviest
from xtok.maps.events import AnyMap, AnyMapLike, EventMap, as_any_map
from xtok.maps.file import as_maps
from xtok.maps.pair import with_vocabularies
from xtok.maps.projection_map import ProjectionMap, require_table
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.events import events
from xtok.stages.exact import reapply_exact
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.classes import TokenClass, token_classes
from xtok.vocab.table import common_ids

SMALLEST_GAP = 0.02
"""Nats between recipe and floor below which `closed` is noise, and left out."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """How a map or an event map does on one group of text."""

    name: str  # of the map
    group: str  # a file's name, or its path, or a field's value; `all` for all text
    documents: int
    starts: int  # shared token boundaries: bytes at which a token begins on both sides


@dataclass(frozen=True, kw_only=True)
class MapMeasures(Measures):
    """What a map gives the teacher's tokens, in nats; recipe and floor have its `top_k`."""

    cross_entropy: Interval  # at shared token boundaries
    coverage: Interval  # share of the starts with a weight above 0
    coverage_of_floor: float  # coverage divided by the floor's
    top_1: Interval  # share of the starts whose teacher token is the row's heaviest entry
    floor: float
    recipe: float
    closed: Interval | None  # from the recipe to the floor; None if they are too close
    slot_weight: float  # the mean that the rows give to their scale slots
    chunk_cross_entropy: Interval  # averaged over chunks as P-KL does it
    chunk_floor: float  # of the map counted on this text within chunks
    chunk_recipe: float
    chunk_closed: Interval | None


@dataclass(frozen=True, kw_only=True)
class EventMapMeasures(Measures):
    """What an event map confuses, and what it keeps; entropies in bits at shared boundaries."""

    leak: float  # how often the two tokens at a boundary are in different events
    shared_leak: float  # of a strict shared vocabulary and a rest
    student_bits: float  # entropy of the student's events
    teacher_bits: float
    student_token_bits: float  # entropy of the student's tokens
    teacher_token_bits: float
    kept: float  # the smaller entropy of events, as a share of the smaller one of tokens


@dataclass(frozen=True, kw_only=True)
class ClassMeasures:
    """How a map does on the student tokens of one class, over all text."""

    name: str  # of the map
    token_class: str
    starts: int
    loss: float  # cross-entropy; of an event map, leak
    reference: float  # the floor's; of an event map, that of a shared vocabulary
    coverage: float


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """A row that costs much."""

    name: str  # of the map
    student_id: int
    token: str  # escaped
    starts: int  # how often it begins where a teacher token does
    excess: float  # its share of the cross-entropy above the floor's, or of all text's leak
    # The teacher tokens that began there most, with their share and the map's weight, which is 1
    # where an event map has both tokens in one event.
    wanted: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured."""

    student: str  # model id of the rows
    teacher: str
    measures: tuple[MapMeasures, ...]  # by group of text, then by map; the group `all` comes last
    event_measures: tuple[EventMapMeasures, ...]  # likewise of event maps
    classes: tuple[ClassMeasures, ...]  # for each map, by class of student token
    worst_rows: tuple[WorstRow, ...]  # for each map, the most costly first
    num_bytes: int  # of text
    lost_bytes: int  # of them, those behind a first difference between the two sides' spellings
    differing: int  # documents that the two sides spell differently
    notes: tuple[str, ...]  # on the text: it is short, or a map was counted on it
    ranking: Ranking | None = None  # of the maps for the loss asked for
    pair: PairFacts | None = None  # what the text says of the tokenizers, if a loss was asked for
    advice: Advice | None = None  # what suits them, as `doctor` says it; likewise

    def failing(
        self,
        *,
        min_coverage: float | None = None,
        max_cross_entropy: float | None = None,
        max_leak: float | None = None,
    ) -> list[str]:
        """Say in a line each which maps miss a bound on any group of text.

        Raises:
            ValueError: if a bound is NaN, which nothing misses.
        """
        bounds = {
            "min_coverage": min_coverage,
            "max_cross_entropy": max_cross_entropy,
            "max_leak": max_leak,
        }
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
        missed += [
            f"{m.name} on {m.group}: leak {m.leak:.4f} is above {max_leak:g}"
            for m in self.event_measures
            if max_leak is not None and m.leak > max_leak
        ]
        return missed


def evaluate(
    maps: AnyMapLike | Sequence[AnyMapLike],
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
    """Measure maps or event maps of one pair on text, in one pass over it.

    Args:
        maps: a map or an event map, the path of one, or several of either kind, all of one pair.
        texts: paths and globs of text, as `build` takes them.
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns.
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
        XtokError: if a text cannot be read or nothing in it measured, a map is of another pair, or
            event maps are ranked for a loss or measured beside maps.
        ValueError: for no map, or names that are not as many.
    """
    loaded, names = as_maps(maps, names, as_any_map)
    if not loaded:
        raise ValueError("there is no map to evaluate")
    names = _distinct(names)
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    of_maps = [one for one in loaded if isinstance(one, ProjectionMap)]
    if len(of_maps) < len(loaded):
        if of_maps or for_loss is not None:
            raise XtokError(
                "event maps are measured neither beside maps nor for a loss",
                hint="evaluate the event maps alone, without a loss",
            )
        for name, one in zip(names, loaded, strict=True):
            one.require({"student": student.vocabulary, "teacher": teacher.vocabulary}, name)
    else:
        loaded = [
            with_vocabularies(
                projection,
                student=student.vocabulary,
                teacher=teacher.vocabulary,
                widths=True,
                name=name,
            )
            for name, projection in zip(names, of_maps, strict=True)
        ]
    return measure(
        loaded, find_texts(texts), student, teacher, names=names, field=field, group_by=group_by,
        for_loss=for_loss, num_worst=num_worst, seed=seed, progress=progress,
        text_progress=text_progress,
    )[0]  # fmt: skip


def measure(
    loaded: Sequence[AnyMap],
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
    maps = [one for one in loaded if isinstance(one, ProjectionMap)]
    recipes: dict[int, ProjectionMap] = {}
    if maps:  # X-Token's recipe without a slot, cut to each number of entries per row
        whole = multitoken(student, teacher, MultitokenConfig(scale_trick=False), progress=progress)
        exact = reapply_exact(whole)
        cuts = sorted({m.top_k for m in maps})
        recipes = {k: sort_cut(exact, SortCutConfig(top_k=k)) for k in cuts}
    measured_edges = [m.edges for m in (*maps, *recipes.values())]
    text = measure_text(
        measured_edges, loaded[0].shape, paths, student, teacher, field, group_by, text_progress
    )
    require_starts(len(text.keys), len(text.groups), text.num_bytes, "measured")
    recipe_column = {k: len(maps) + n for n, k in enumerate(recipes)}
    of_maps = [
        _MapOnText(name, m, recipes[m.top_k].edges, text, (n, recipe_column[m.top_k]))
        for n, (name, m) in enumerate(zip(names, loaded, strict=True))
        if isinstance(m, ProjectionMap)
    ]
    of_events = [
        _EventsOnText(name, m, text)
        for name, m in zip(names, loaded, strict=True)
        if isinstance(m, EventMap)
    ]
    token_counts = text.token_counts(paths)
    ranking = pair = None
    if for_loss is not None:
        sums, counts = text.chunk_losses[:, : len(maps)].T, text.num_chunks
        if for_loss != "p-kl":
            sums = np.stack([one.start_losses() for one in of_maps])
            counts = np.bincount(text.documents, text.counts, len(text.groups)).astype(np.int64)
        ranking = rank(for_loss, names, sums, counts, seed)
        pair = pair_facts(
            loaded[0].student, loaded[0].teacher, token_counts, events(student, teacher)
        )
    groups = [
        (group, np.array([g == group for g in text.groups], np.bool_))
        for group in dict.fromkeys(text.groups)
    ]
    if len(groups) > 1:
        groups.append(("all", np.ones(len(text.groups), np.bool_)))
    measured = [*of_maps, *of_events]
    evaluation = Evaluation(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        measures=tuple(one.measures(*group, seed) for group in groups for one in of_maps),
        event_measures=tuple(one.measures(*group) for group in groups for one in of_events),
        classes=tuple(c for one in measured for c in one.classes()),
        worst_rows=tuple(row for one in measured for row in one.worst(num_worst)),
        num_bytes=text.num_bytes,
        lost_bytes=text.lost_bytes,
        differing=text.differing,
        notes=(*_seen(names, loaded, paths), *little_text(text.num_bytes)),
        ranking=ranking,
        pair=pair,
        advice=None if pair is None else advise(pair),
    )
    return evaluation, token_counts


def _seen(names: Sequence[str], maps: Sequence[AnyMap], paths: Sequence[Path]) -> list[str]:
    """Return a note for each map that was counted on some of the text, by the texts' digests."""
    notes = []
    digests: dict[Path, str] = {}
    for name, one in zip(names, maps, strict=True):
        lists = [step.get("texts") for step in one.history]
        counted = [t for texts in lists if isinstance(texts, list) for t in texts]
        known = {(t.get("size"), t.get("sha256")) for t in counted if isinstance(t, dict)}
        sizes = {size for size, _ in known}
        same = []
        for path in paths:
            if path.stat().st_size in sizes:
                digests[path] = digests.get(path) or describe_text(path).sha256
                if (path.stat().st_size, digests[path]) in known:
                    same.append(path.name)
        if same:
            notes.append(
                f"{name} was counted on {', '.join(same)}, so it measures better here than it is: "
                "take other text"
            )
    return notes


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the repeated names: a, a (2)."""
    times: Counter[str] = Counter()
    distinct = []
    for name in names:
        times[name] += 1
        distinct.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return distinct


class _OnText:
    """A map on text: for each pair of tokens its loss, a reference's, and the map's weight.

    They are float64 `[pairs]`, over all text.
    """

    unavoidable: NDArray[np.float64] | float  # of the losses

    def __init__(self, name: str, one: AnyMap, text: MeasuredText) -> None:
        self.name, self.text = name, text
        self.student, self.teacher = require_table(one.student), require_table(one.teacher)
        self.s, self.t = text.keys >> 32, text.keys & 0xFFFFFFFF
        self.totals = text.amounts()
        self.losses: NDArray[np.float64]
        self.reference: NDArray[np.float64]
        self.weights: NDArray[np.float64]

    def classes(self) -> list[ClassMeasures]:
        """Measure each class of student token over all text."""
        kinds = token_classes(self.student)[self.s]
        classes = []
        for kind in np.unique(kinds).tolist():
            counts = self.totals * (kinds == kind)
            total = counts.sum()
            classes.append(
                ClassMeasures(
                    name=self.name,
                    token_class=TokenClass(kind).label,
                    starts=int(total),
                    loss=float((counts * self.losses).sum() / total),
                    reference=float((counts * self.reference).sum() / total),
                    coverage=float(counts[self.weights > 0].sum() / total),
                )
            )
        return classes

    def worst(self, number: int) -> list[WorstRow]:
        """Return the rows whose losses exceed what is unavoidable most, over all text."""
        costs = self.totals * (self.losses - self.unavoidable) / max(1.0, self.totals.sum())
        excess = np.bincount(self.s, costs)
        rows = []
        for row in np.argsort(-excess, kind="stable")[:number].tolist():
            places = np.flatnonzero(self.s == row)
            places = places[np.argsort(-self.totals[places], kind="stable")]
            total = self.totals[places].sum()
            if excess[row] > 0:
                rows.append(
                    WorstRow(
                        name=self.name,
                        student_id=row,
                        token=self.student.name(row),
                        starts=int(total),
                        excess=float(excess[row]),
                        wanted=tuple(
                            (
                                self.teacher.name(int(self.t[p])),
                                float(self.totals[p] / total),
                                float(self.weights[p]),
                            )
                            for p in places[:3]
                        ),
                    )
                )
        return rows


class _EventsOnText(_OnText):
    """An event map on text: its loss is its leak, its reference a shared vocabulary's."""

    unavoidable = 0.0

    def __init__(self, name: str, one: EventMap, text: MeasuredText) -> None:
        super().__init__(name, one, text)
        self.events = one.student_event[self.s], one.teacher_event[self.t]
        shared = common_ids(self.student, self.teacher)
        self.losses = (self.events[0] != self.events[1]).astype(np.float64)
        self.reference = (shared[0][self.s] != shared[1][self.t]).astype(np.float64)
        self.weights = 1 - self.losses

    def measures(self, group: str, chosen: NDArray[np.bool_]) -> EventMapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        counts = self.text.amounts(chosen)
        bits, token_bits = (
            [entropy_of(ids, counts) for ids in sides] for sides in (self.events, (self.s, self.t))
        )
        return EventMapMeasures(
            name=self.name,
            group=group,
            documents=int(chosen.sum()),
            starts=int(counts.sum()),
            leak=share_of(counts, self.losses > 0),
            shared_leak=share_of(counts, self.reference > 0),
            student_bits=bits[0],
            teacher_bits=bits[1],
            student_token_bits=token_bits[0],
            teacher_token_bits=token_bits[1],
            kept=kept_of(self.events, (self.s, self.t), counts),
        )


class _MapOnText(_OnText):
    """A map on text, beside its recipe and its floor.

    `columns` are those of the chunk losses that are the map's and the recipe's.
    """

    def __init__(
        self,
        name: str,
        projection: ProjectionMap,
        recipe: Edges,
        text: MeasuredText,
        columns: tuple[int, int],
    ) -> None:
        super().__init__(name, projection, text)
        self.projection = projection
        self.chunk_losses, self.recipe_chunk_losses = (text.chunk_losses[:, n] for n in columns)
        self.weights = weights_at(projection.edges, text.keys)
        self.losses = self._losses_of(self.weights)
        self.recipe = self._losses_of(weights_at(recipe, text.keys))
        self.reference = self.unavoidable = self._losses_of(self._floor(self.totals))

    def _losses_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return losses(weights, self.projection.shape[1])

    def start_losses(self) -> NDArray[np.float64]:
        """Return each document's losses at shared token boundaries, added up."""
        text, weighted = self.text, self.text.counts * self.losses[self.text.places]
        return np.bincount(text.documents, weighted, len(text.groups)).astype(np.float64)

    def _floor(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weights of the map counted on this text, cut to as many entries per row."""
        keys, used = self.text.keys, counts > 0
        edges = heaviest(pair_edges(keys[used], counts[used]), self.projection.top_k)
        return weights_at(edges, keys)

    def measures(self, group: str, chosen: NDArray[np.bool_], seed: int) -> MapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        text, projection = self.text, self.projection
        use = chosen[text.documents]
        documents, places = text.documents[use], text.places[use]
        amounts = text.counts[use].astype(np.float64)
        counts = text.amounts(chosen)
        floor_weights = self._floor(counts)
        slots = projection.edges.take(projection.is_slot)
        slot_weight = np.zeros(projection.shape[0])
        slot_weight[slots.student_ids] = slots.weights
        per_pair = {
            "starts": np.ones(len(text.keys)),
            "loss": self.losses,
            "covered": self.weights > 0,
            "top": projection.heaviest_teacher_ids[self.s] == self.t,
            "floor": self._losses_of(floor_weights),
            "covered by floor": floor_weights > 0,
            "recipe": self.recipe,
            "slots": slot_weight[self.s],
        }
        # What `_figures` needs, summed over each chosen document.
        sums: dict[str, NDArray[Any]] = {
            name: np.bincount(documents, amounts * values[places], len(text.groups))[chosen]
            for name, values in per_pair.items()
        }
        sums["chunk loss"] = self.chunk_losses[chosen]
        sums["chunks"] = text.num_chunks[chosen]
        sums["chunk recipe"] = self.recipe_chunk_losses[chosen]
        sums["chunk floor"] = text.hindsight_losses(chosen, projection.top_k)
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
