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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import Loss, MultitokenConfig, SortCutConfig
from xtok.counting.counts import Counts, pair_edges
from xtok.counting.measures import entropy_of, kept_of, share_of
from xtok.counting.pair_text import PairText, PerDocument, Wanted
from xtok.counting.smoothing import losses, weights_at
from xtok.counting.texts import TextSource, little_text
from xtok.errors import XtokError
from xtok.inspection import distinct
from xtok.inspection.bootstrap import Interval, Ranking, interval, rank, resample
from xtok.maps.admit import admit, at_widths_of
from xtok.maps.edges import Edges, heaviest, ranks
from xtok.maps.events import EventMap
from xtok.maps.map_like import AnyMap, AnyMapLike, as_any_map, as_maps
from xtok.maps.projection_map import ProjectionMap
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.exact import with_exact
from xtok.stages.matches import exact_matches
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.vocab.classes import TokenClass, token_classes
from xtok.vocab.pair import Pair

_NO_PAIRS = np.zeros(0, np.int64), np.zeros(0, np.int64)

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
    top_1: Interval  # share of the starts whose teacher token is the row's heaviest entry
    floor: float
    recipe: float
    closed: Interval | None  # from the recipe to the floor; None if they are too close
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
    loss: float  # cross-entropy, at starts or over chunks; of an event map, leak
    reference: float  # the floor's; of an event map, that of a shared vocabulary
    coverage: float  # at starts


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """A row that costs much."""

    name: str  # of the map
    student_id: int
    token: str  # escaped
    starts: int  # how often it begins where a teacher token does
    excess: float  # its share of the cross-entropy above the floor's, or of all text's leak
    # The teacher tokens that began there most (over chunks: that stand beside it most), with their
    # share and the map's weight, which is 1 where an event map has both tokens in one event.
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
    by_chunk: bool = False  # whether losses of `classes` and `worst_rows` are over chunks
    ranking: Ranking | None = None  # of the maps for the loss asked for

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
    pair: Pair,
    maps: AnyMapLike | Sequence[AnyMapLike],
    texts: str | Path | Sequence[str | Path],
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
        pair: the maps', with its tokenizers.
        maps: a map or an event map, the path of one, or several of either kind, all of one pair.
        texts: paths and globs of text, as `build` takes them.
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
    pair = at_widths_of(pair, loaded[0])
    are_events = [isinstance(one, EventMap) for one in loaded]
    if any(are_events) and (not all(are_events) or for_loss is not None):
        raise XtokError(
            "event maps are measured neither beside maps nor for a loss",
            hint="evaluate the event maps alone, without a loss",
        )
    admitted = (admit(pair, one, name=name) for name, one in zip(names, loaded, strict=True))
    named = dict(zip(distinct(names), admitted, strict=True))
    text = PairText.read(
        pair, texts, Wanted(per_document=True), field=field, group_by=group_by,
        progress=text_progress,
    )  # fmt: skip
    return evaluation_of(
        named, pair, text, for_loss=for_loss, num_worst=num_worst, seed=seed, progress=progress
    )


def evaluation_of(
    maps: Mapping[str, AnyMap],
    pair: Pair,
    text: PairText,
    *,
    for_loss: Loss | None = None,
    num_worst: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> Evaluation:
    """Return what `evaluate` says of maps, by name, on text that was counted per document."""
    if text.per_document is None:
        raise ValueError("maps are measured on text that was counted per document")
    documents = text.per_document
    of_kind = {k: v for k, v in maps.items() if isinstance(v, ProjectionMap)}
    recipes = _recipes(of_kind.values(), pair, progress)
    of_maps = [_MapOnText(n, m, pair, documents, recipes[m.top_k]) for n, m in of_kind.items()]
    of_events = [
        _EventsOnText(n, m, pair, documents) for n, m in maps.items() if isinstance(m, EventMap)
    ]
    ranking = None
    if for_loss is not None:
        chunk, count = ("chunk_", "chunks") if for_loss == "p-kl" else ("", "starts")
        sums = np.stack([one.sums[f"{chunk}cross_entropy"] for one in of_maps])
        counts = of_maps[0].sums[count].astype(np.int64)
        ranking = rank(for_loss, list(maps), sums, counts, seed)
    groups = {
        group: np.array([one == group for one in documents.groups], np.bool_)
        for group in dict.fromkeys(documents.groups)
    }
    in_groups = [*groups.items()]
    if len(groups) > 1:
        in_groups.append(("all", np.ones(len(documents.groups), np.bool_)))
    measured = [*of_maps, *of_events]
    by_chunk = for_loss == "p-kl"
    costs = {one.name: one.chunk_costs() if by_chunk else one.costs() for one in measured}
    return Evaluation(
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        measures=tuple(one.measures(*group, seed) for group in in_groups for one in of_maps),
        event_measures=tuple(one.measures(*group) for group in in_groups for one in of_events),
        classes=tuple(c for one in measured for c in one.classes(costs[one.name])),
        worst_rows=tuple(row for one in measured for row in one.worst(costs[one.name], num_worst)),
        by_chunk=by_chunk,
        num_bytes=text.totals.num_bytes,
        lost_bytes=text.totals.lost_bytes,
        differing=text.totals.differing,
        notes=(*_counted_on(maps, text.sources), *little_text(text.totals.num_bytes)),
        ranking=ranking,
    )


def _recipes(maps: Iterable[ProjectionMap], pair: Pair, progress: Progress) -> dict[int, Edges]:
    """Return X-Token's recipe without a slot, cut to each number of entries that maps have."""
    cuts = sorted({one.top_k for one in maps})
    if not cuts:
        return {}
    config = MultitokenConfig(scale_trick=False)
    matches = exact_matches(pair, config)
    spelled = multitoken(pair, config=config, only=~matches.is_exact, progress=progress)
    exact = with_exact(spelled, matches, config)
    return {k: sort_cut(exact, SortCutConfig(top_k=k)).edges for k in cuts}


def _counted_on(maps: Mapping[str, AnyMap], texts: Sequence[TextSource]) -> list[str]:
    """Return a note for each map that was counted on some of the text, by the texts' digests."""
    notes = []
    for name, one in maps.items():
        lists = [step.get("texts") for step in one.history]
        counted = [t for listed in lists if isinstance(listed, list) for t in listed]
        known = {(t.get("size"), t.get("sha256")) for t in counted if isinstance(t, dict)}
        same = [text.name for text in texts if (text.size, text.sha256) in known]
        if same:
            notes.append(
                f"{name} was counted on {', '.join(same)}, so it measures better here than it is: "
                "take other text"
            )
    return notes


class _Costs(NamedTuple):
    """What a map costs on text, and on which rows."""

    rows: NDArray[np.int64]  # the student token of each place, or kind of place
    amounts: NDArray[np.float64]  # how often it occurs
    losses: NDArray[np.float64]
    reference: NDArray[np.float64]
    avoidable: NDArray[np.float64]  # of the losses
    # What teacher tokens are wanted: pairs, how often each occurs, and the map's weights.
    keys: NDArray[np.int64]
    wanted: NDArray[np.float64]
    weights: NDArray[np.float64]


class _OnText:
    """A map's losses on pairs of tokens, beside a reference's, and its weights.

    They are float64 `[pairs]`, over all text.
    """

    losses: NDArray[np.float64]
    reference: NDArray[np.float64]
    avoidable: NDArray[np.float64]  # of the losses
    weights: NDArray[np.float64]

    def __init__(self, name: str, pair: Pair, text: PerDocument) -> None:
        self.name, self.text = name, text
        self.totals = text.amounts(np.ones(len(text.groups), np.bool_))
        self.s, self.t = text.keys >> 32, text.keys & 0xFFFFFFFF
        self.student, self.teacher = pair.tables

    def costs(self) -> _Costs:
        """Return the costs at shared token boundaries."""
        of_pairs = self.losses, self.reference, self.avoidable
        wanted = self.text.keys, self.totals, self.weights
        return _Costs(self.s, self.totals, *of_pairs, *wanted)

    def chunk_costs(self) -> _Costs:
        """Return the costs over chunks, as far as a map has any."""
        return self.costs()

    def classes(self, costs: _Costs) -> list[ClassMeasures]:
        """Measure each class of student token over all text."""
        kind_of = token_classes(self.student)

        def count(rows: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
            return np.bincount(kind_of[rows], values, len(TokenClass)).astype(np.float64)

        starts, covered = (count(self.s, self.totals * v) for v in (1, self.weights > 0))
        amounts = np.maximum(count(costs.rows, costs.amounts), 1e-9)
        loss, reference = (
            count(costs.rows, costs.amounts * values) / amounts
            for values in (costs.losses, costs.reference)
        )
        return [
            ClassMeasures(
                name=self.name,
                token_class=kind.label,
                starts=int(starts[kind]),
                loss=float(loss[kind]),
                reference=float(reference[kind]),
                coverage=float(covered[kind] / starts[kind]),
            )
            for kind in TokenClass
            if starts[kind]
        ]

    def worst(self, costs: _Costs, number: int) -> list[WorstRow]:
        """Return the rows with the most avoidable losses, over all text."""
        share = costs.amounts / max(1.0, costs.amounts.sum())
        excess = np.bincount(costs.rows, share * costs.avoidable)
        rows = np.argsort(-excess, kind="stable")[:number].tolist()
        return [self._worst_row(costs, row, float(excess[row])) for row in rows if excess[row] > 0]

    def _worst_row(self, costs: _Costs, row: int, excess: float) -> WorstRow:
        places = np.flatnonzero(costs.keys >> 32 == row)
        total = costs.wanted[places].sum()
        most = places[np.argsort(-costs.wanted[places], kind="stable")][:3]
        shares, weights = costs.wanted[most] / total, costs.weights[most]
        tokens = [self.teacher.name(t) for t in (costs.keys[most] & 0xFFFFFFFF).tolist()]
        return WorstRow(
            name=self.name,
            student_id=row,
            token=self.student.name(row),
            starts=int(self.totals[self.s == row].sum()),
            excess=excess,
            wanted=tuple(zip(tokens, shares.tolist(), weights.tolist(), strict=True)),
        )


class _EventsOnText(_OnText):
    """An event map on text: its loss is its leak, its reference a shared vocabulary's."""

    def __init__(self, name: str, one: EventMap, pair: Pair, text: PerDocument) -> None:
        super().__init__(name, pair, text)
        self.events = one.student_event[self.s], one.teacher_event[self.t]
        shared = pair.common_ids
        self.losses = (self.events[0] != self.events[1]).astype(np.float64)
        self.reference = (shared[0][self.s] != shared[1][self.t]).astype(np.float64)
        self.avoidable = self.losses
        self.weights = 1 - self.losses

    def measures(self, group: str, chosen: NDArray[np.bool_]) -> EventMapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        counts = self.text.amounts(chosen)
        return EventMapMeasures(
            name=self.name,
            group=group,
            documents=int(chosen.sum()),
            starts=int(counts.sum()),
            leak=share_of(counts, self.losses > 0),
            shared_leak=share_of(counts, self.reference > 0),
            student_bits=entropy_of(self.events[0], counts),
            teacher_bits=entropy_of(self.events[1], counts),
            student_token_bits=entropy_of(self.s, counts),
            teacher_token_bits=entropy_of(self.t, counts),
            kept=kept_of(self.events, (self.s, self.t), counts),
        )


class _MapOnText(_OnText):
    """A map on text; its reference is the floor.

    `sums` are figures of `MapMeasures`, added up over each document, float64 `[documents]`.
    """

    def __init__(
        self, name: str, projection: ProjectionMap, pair: Pair, text: PerDocument, recipe: Edges
    ) -> None:
        super().__init__(name, pair, text)
        self.edges, self.top_k, self.shape = projection.edges, projection.top_k, pair.shape
        self.width = self.shape[1]
        self.weights = weights_at(projection.edges, text.keys)
        self.losses = losses(self.weights, self.width)
        self.reference = self._floor(self.totals)
        self.avoidable = self.losses - self.reference
        of_pairs = {
            "starts": np.ones(len(text.keys)),
            "cross_entropy": self.losses,
            "coverage": self.weights > 0,
            "top_1": projection.heaviest_teacher_ids[self.s] == self.t,
            "recipe": losses(weights_at(recipe, text.keys), self.width),
        }
        self.sums = {figure: text.per_document(values) for figure, values in of_pairs.items()}
        self.sums |= {
            "chunks": text.num_chunks,
            "chunk_cross_entropy": text.losses(projection.edges, self.shape),
            "chunk_recipe": text.losses(recipe, self.shape),
        }

    def chunk_costs(self) -> _Costs:
        """Return the costs over chunks: the student tokens of a chunk share its loss equally."""
        chunks = self.text.chunks
        owner = np.repeat(np.arange(len(chunks.widths)), chunks.widths)
        places = chunks.bounds[:-1][owner] + ranks(owner)
        everything = np.ones(len(self.text.groups), np.bool_)
        hindsight = self.text.hindsight(everything, self.top_k, self.shape[0])
        ours, floor = (self.text.chunk_losses(e, self.shape) for e in (self.edges, hindsight))
        keys, wanted = Counts(*_NO_PAIRS, chunks).pairs()
        return _Costs(
            chunks.ids[places].astype(np.int64),
            (chunks.counts / chunks.widths)[owner],
            ours[owner],
            floor[owner],
            (ours - floor)[owner],
            keys,
            wanted.astype(np.float64),
            weights_at(self.edges, keys),
        )

    def _floor(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the losses of the map counted on this text, cut to as many entries per row."""
        keys, used = self.text.keys, counts > 0
        edges = heaviest(pair_edges(keys[used], counts[used]), self.top_k)
        return losses(weights_at(edges, keys), self.width)

    def measures(self, group: str, chosen: NDArray[np.bool_], seed: int) -> MapMeasures:
        """Measure one group of text: the documents chosen, bool `[documents]`."""
        text, counts = self.text, self.text.amounts(chosen)
        hindsight = text.hindsight(chosen, self.top_k, self.shape[0])
        sums = self.sums | {
            "floor": text.per_document(self._floor(counts)),
            "chunk_floor": text.losses(hindsight, self.shape),
        }
        table = np.stack(list(sums.values()), axis=1)[chosen]
        whole = _figures(dict(zip(sums, table.sum(axis=0), strict=True)))
        drawn = _figures(dict(zip(sums, resample(table, seed).T, strict=True)))

        def figure(name: str) -> Interval:
            return interval(whole[name], drawn[name], len(table))

        def closed(of: str) -> Interval | None:
            gap = whole[f"{of}recipe"] - whole[f"{of}floor"]
            return figure(f"{of}closed") if gap >= SMALLEST_GAP else None

        return MapMeasures(
            name=self.name,
            group=group,
            documents=len(table),
            starts=int(counts.sum()),
            cross_entropy=figure("cross_entropy"),
            coverage=figure("coverage"),
            top_1=figure("top_1"),
            floor=float(whole["floor"]),
            recipe=float(whole["recipe"]),
            closed=closed(""),
            chunk_cross_entropy=figure("chunk_cross_entropy"),
            chunk_floor=float(whole["chunk_floor"]),
            chunk_recipe=float(whole["chunk_recipe"]),
            chunk_closed=closed("chunk_"),
        )


def _figures(sums: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Turn sums over documents, numbers or float64 `[samples]`, into the figures of a map."""
    starts, chunks = (np.maximum(sums[name], 1) for name in ("starts", "chunks"))
    figures = {n: one / (chunks if n.startswith("chunk_") else starts) for n, one in sums.items()}
    for of in ("", "chunk_"):
        loss, floor, recipe = (figures[of + n] for n in ("cross_entropy", "floor", "recipe"))
        gap = np.where(recipe > floor, recipe - floor, np.nan)
        figures[f"{of}closed"] = (recipe - loss) / gap
    return figures
