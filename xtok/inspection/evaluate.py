"""`evaluate`: measure maps on text.

Both tokenizers encode the text. If a student token s and a teacher token t begin at the same byte,
a good row W[s] has a high weight for t.

- Cross-entropy: the mean of `-ln((1 - eps) * W[s, t] + eps / V_teacher)`, eps = 1e-3, in nats.
- Coverage: the share of pairs (s, t) with W[s, t] > 0. Top-1: the share of pairs in which t is the
  heaviest entry of W[s].
- Floor: the cross-entropy of the best map for this text, counted on this text and cut to the same
  number of entries per row.
- Recipe: the cross-entropy of X-Token's map (arXiv 2605.21699) with weights .9, .09, …, both passes
  and exact matches, but without slots.
- Closed: (recipe - map) / (recipe - floor).

For P-KL, maps are measured over chunks: the prediction is the mean of the rows of all student
tokens in a chunk, and the loss is the mean over the chunk's teacher tokens. Gold and H-KL compare
the first tokens at shared boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok._lib.shards import Paths, SourceFile
from xtok.building.counting.counts import pair_edges
from xtok.building.counting.pair_text import CountPlan, PairText, PerDocument
from xtok.building.counting.smoothing import entropy_kept, entropy_of, share_of, weights_at
from xtok.building.counting.smoothing import losses as losses_of
from xtok.building.exact import find_matches, with_exact
from xtok.building.multitoken import spelled_map
from xtok.building.sort_cut import cut_rows
from xtok.config import MultitokenConfig
from xtok.errors import XtokError
from xtok.inspection.bootstrap import Ranking, mean_interval, rank
from xtok.inspection.costs import ClassMeasures, Occurrences, WorstRow
from xtok.inspection.measures import (
    SMALLEST_GAP,
    EventMapMeasures,
    MapLosses,
    MapMeasures,
    Verdict,
    empty_share,
    event_verdict,
    map_verdict,
)
from xtok.inspection.results import distinct_names
from xtok.loss_names import BuildLoss, loss_name
from xtok.maps.edges import Edges, heaviest
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, AnyMapLike, bind_maps, read_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.display import listed
from xtok.tokenizers.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of `evaluate`."""

    student: str  # model id of the student
    teacher: str
    measures: tuple[MapMeasures, ...] = ()  # by group of text, then by map; `all` comes last
    event_measures: tuple[EventMapMeasures, ...] = ()  # the same, if the maps are event maps
    classes: tuple[ClassMeasures, ...]  # for each map, by class of student tokens
    worst_rows: tuple[WorstRow, ...]  # for each map, the most costly rows first
    num_bytes: int  # bytes of text
    lost_bytes: int  # bytes that were left out, because the two sides differ there
    differing: int  # documents for which the two sides differ
    notes: tuple[str, ...]  # notes about the text, for example that the text is short
    by_chunk: bool = False  # whether `classes` and `worst_rows` measure losses over chunks
    ranking: Ranking | None = None  # ranking for the requested loss
    verdicts: tuple[Verdict, ...] = ()  # one verdict per map, over all text


def evaluate(
    pair: Pair,
    maps: AnyMapLike | Sequence[AnyMapLike],
    texts: Paths,
    *,
    names: Sequence[str] = (),
    field: str = "text",
    for_loss: BuildLoss | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure projection maps or event maps of one pair on text.

    >>> pair = xtok.load_pair("bytes", "bytes")
    >>> with open("text.txt", "w") as file:
    ...     _ = file.write("The tower has 201 steps.")
    >>> xtok.evaluate(pair, xtok.build(pair), "text.txt").verdicts[0].grade
    'good'

    Args:
        pair: the maps' pair, with its tokenizers.
        maps: one or more maps of the same kind and pair, or their paths.
        texts: paths and globs of files with texts or conversations; see `build`.
        names: names of the maps. Default: their paths, or `map 1`, `map 2`, …
        field: the field or column with the text.
        for_loss: the loss for which the maps are judged and ranked.
        progress: called for each pass over a vocabulary or the text.

    Raises:
        XtokError: if a text cannot be read or contains nothing to measure, if a map belongs to
            another pair or is a spelling map, or if event maps are mixed with projection maps or
            ranked for a loss.
        ValueError: if the maps are missing, or the number of names is wrong.
    """
    loaded, pair, names = bind_maps(maps, read_map, pair, names)
    if any(isinstance(m, SpellingMap) for m in loaded):
        raise XtokError(
            "spelling maps cannot be measured on text",
            hint="evaluate projection maps or event maps; xtok verify checks a spelling map",
        )
    are_events = [isinstance(m, EventMap) for m in loaded]
    if any(are_events) and (not all(are_events) or for_loss is not None):
        raise XtokError(
            "event maps cannot be compared with projection maps, or ranked for a loss",
            hint="evaluate the event maps separately, without a loss",
        )
    named = dict(zip(distinct_names(names), loaded, strict=True))
    text = PairText.read(pair, texts, CountPlan(per_document=True), field=field, progress=progress)
    return measure_maps(named, pair, text, for_loss=for_loss, progress=progress)


def measure_maps(
    maps: Mapping[str, AnyMap],
    pair: Pair,
    text: PairText,
    *,
    for_loss: BuildLoss | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure named maps on text that was counted per document."""
    documents = text.per_document
    assert documents is not None
    if for_loss is not None:
        for_loss = loss_name(for_loss)
    by_row = Occurrences(pair, documents, by_chunk=for_loss == "p-kl")
    projections = {n: m for n, m in maps.items() if isinstance(m, ProjectionMap)}
    event_maps = {n: m for n, m in maps.items() if isinstance(m, EventMap)}
    if event_maps:
        measured = _event_map_fields(event_maps, pair, documents, by_row)
        verdicts = [event_verdict(m) for m in measured["event_measures"][-len(maps) :]]
    else:
        recipes = _recipes(projections.values(), pair, progress)
        measured = _map_fields(projections, documents, recipes, by_row, for_loss)
        overall = measured["measures"][-len(maps) :]
        shares = [empty_share(m, text) for m in projections.values()]
        loss: BuildLoss = for_loss or "p-kl"
        verdicts = [map_verdict(m, loss, x) for m, x in zip(overall, shares, strict=True)]
    return Evaluation(
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        **measured,
        by_chunk=by_row.by_chunk,
        num_bytes=text.totals.num_bytes,
        lost_bytes=text.totals.lost_bytes,
        differing=text.totals.differing,
        notes=(*_counted_on(maps, text.sources), *text.notes, *_not_measured(documents)),
        verdicts=tuple(verdicts),
    )


def _event_map_fields(
    maps: Mapping[str, EventMap], pair: Pair, text: PerDocument, by_row: Occurrences
) -> dict[str, Any]:
    s, t = text.keys >> 32, text.keys & 0xFFFFFFFF
    events = {name: (m.student_event[s], m.teacher_event[t]) for name, m in maps.items()}
    leaks = {name: s_events != t_events for name, (s_events, t_events) in events.items()}
    shared_leaks = pair.shared[0][s] != np.where(pair.shared[1][t] >= 0, t, -1)
    measures: list[EventMapMeasures] = []
    for fields, _, counts in _groups(text):
        measures += [
            EventMapMeasures(
                name=name,
                **fields,
                leak=share_of(counts, leaks[name]),
                shared_leak=share_of(counts, shared_leaks),
                student_bits=entropy_of(sides[0], counts),
                teacher_bits=entropy_of(sides[1], counts),
                student_token_bits=entropy_of(s, counts),
                teacher_token_bits=entropy_of(t, counts),
                kept=entropy_kept(sides, (s, t), counts),
            )
            for name, sides in events.items()
        ]
    classes = [by_row.classes(name, leak, shared_leaks, ~leak) for name, leak in leaks.items()]
    worst = [by_row.worst(name, leak, ~leak) for name, leak in leaks.items()]
    return {
        "event_measures": tuple(measures),
        "classes": tuple(chain(*classes)),
        "worst_rows": tuple(chain(*worst)),
    }


def _map_fields(
    maps: Mapping[str, ProjectionMap],
    text: PerDocument,
    recipes: Mapping[int, Edges],
    by_row: Occurrences,
    for_loss: BuildLoss | None,
) -> dict[str, Any]:
    # Each map has two arrays of losses for all documents: at boundaries and over chunks. The losses
    # are computed only once, because a group only selects documents.
    views = [_View(text, by_row.shape, over_chunks=over) for over in (False, True)]
    losses = {name: [view.losses(m.edges) for view in views] for name, m in maps.items()}
    recipe_losses = {k: [view.losses(recipe) for view in views] for k, recipe in recipes.items()}
    is_covered = {name: weights_at(m.edges, text.keys) > 0 for name, m in maps.items()}
    s, t = text.keys >> 32, text.keys & 0xFFFFFFFF
    measures: list[MapMeasures] = []
    floors: dict[int, list[NDArray[np.float64]]] = {}  # after the loop: for all text
    for fields, in_group, counts in _groups(text):
        floors = {k: [view.losses(view.best_map(in_group, k)) for view in views] for k in recipes}
        for name, m in maps.items():
            triples = zip(losses[name], recipe_losses[m.top_k], floors[m.top_k], strict=True)
            at_starts, over_chunks = (
                view.measures(in_group, *three) for view, three in zip(views, triples, strict=True)
            )
            measures.append(
                MapMeasures(
                    name=name,
                    **fields,
                    coverage=share_of(counts, is_covered[name]),
                    top_1=share_of(counts, m.heaviest_teacher_ids[s] == t),
                    at_starts=at_starts,
                    over_chunks=over_chunks,
                )
            )
    view_index = int(by_row.by_chunk)  # the view for which classes, rows and ranking are computed
    classes, worst = [], []
    for name, m in maps.items():
        loss, floor = losses[name][view_index], floors[m.top_k][view_index]
        classes += by_row.classes(name, loss, floor, is_covered[name])
        worst += by_row.worst(name, loss - floor, weights_at(m.edges, by_row.keys))
    sums = np.stack([views[view_index].sums(by_view[view_index]) for by_view in losses.values()])
    ranking = None if for_loss is None else rank(for_loss, [*maps], sums, views[view_index].counts)
    return {
        "measures": tuple(measures),
        "classes": tuple(classes),
        "worst_rows": tuple(worst),
        "ranking": ranking,
    }


class _View:
    """Losses of maps on a text, at shared token boundaries or over chunks."""

    def __init__(self, text: PerDocument, shape: tuple[int, int], *, over_chunks: bool) -> None:
        self.text, self.shape, self.over_chunks = text, shape, over_chunks
        # returns the sum of the losses in each document
        self.sums = text.over_chunks if over_chunks else text.per_document
        num_losses = len(text.chunks.widths if over_chunks else text.keys)
        self.counts = self.sums(np.ones(num_losses))  # number of losses per document

    def losses(self, edges: Edges) -> NDArray[np.float64]:
        """Return a map's loss for each pair at boundaries, or for each chunk."""
        if self.over_chunks:
            return self.text.chunk_losses(edges, self.shape)
        return losses_of(weights_at(edges, self.text.keys), self.shape[1])

    def best_map(self, in_group: NDArray[np.bool_], top_k: int) -> Edges:
        if self.over_chunks:
            return self.text.hindsight(in_group, top_k, self.shape[0])
        counts = self.text.amounts(in_group)
        used = counts > 0
        return heaviest(pair_edges(self.text.keys[used], counts[used]), top_k)

    def measures(self, in_group: NDArray[np.bool_], *losses: NDArray[np.float64]) -> MapLosses:
        # Documents without chunks would change the interval.
        is_measured = in_group & (self.text.num_chunks > 0)
        counts = self.counts[is_measured]
        map_sums, recipe, floor = (self.sums(x)[is_measured] for x in losses)
        mean = mean_interval(map_sums, counts)
        to_recipe, to_floor = (float(x.sum() / max(1, counts.sum())) for x in (recipe, floor))
        gap = to_recipe - to_floor
        return MapLosses(
            cross_entropy=mean,
            recipe=to_recipe,
            floor=to_floor,
            closed=(to_recipe - mean.value) / gap if gap >= SMALLEST_GAP else None,
        )


def _recipes(maps: Iterable[ProjectionMap], pair: Pair, progress: Progress) -> dict[int, Edges]:
    """Return X-Token's map without slots, once for each distinct `top_k` of the maps."""
    config = MultitokenConfig(scale_trick=False)
    matches = find_matches(pair, config)
    spelled, _ = spelled_map(pair, config, matches, only=~matches.is_exact, progress=progress)
    exact = with_exact(spelled, matches, config)
    return {k: cut_rows(exact, k)[0].edges for k in {m.top_k for m in maps}}


def _counted_on(maps: Mapping[str, AnyMap], texts: Sequence[SourceFile]) -> list[str]:
    notes = []
    for name, m in maps.items():
        recorded = [step.get("texts") for step in m.history]
        entries = [e for entries in recorded if isinstance(entries, list) for e in entries]
        counted = {(e.get("size"), e.get("sha256")) for e in entries if isinstance(e, dict)}
        names = [text.name for text in texts if (text.size, text.sha256) in counted]
        if names:
            notes.append(
                f"{name} was counted on {', '.join(names)}, so its score on this text is too "
                "optimistic; evaluate on other text"
            )
    return notes


def _groups(
    text: PerDocument,
) -> Iterator[tuple[dict[str, Any], NDArray[np.bool_], NDArray[np.float64]]]:
    """Yield the fields of `Measures`, a mask of documents, and counts for each group of text.

    The last group contains all text. Groups without a shared token boundary are omitted.
    """
    names = np.array(text.groups)
    groups = {name: names == name for name in _measured(text)}
    if len(groups) > 1:
        labels = distinct_names([_ALL, *groups])[1:]
        groups = dict(zip(labels, groups.values(), strict=True))
        groups[_ALL] = np.ones(len(names), np.bool_)
    for group, in_group in groups.items():
        counts = text.amounts(in_group)
        fields = {"group": group, "documents": int(in_group.sum()), "starts": int(counts.sum())}
        yield fields, in_group, counts


def _not_measured(text: PerDocument) -> list[str]:
    measured = _measured(text)
    empty = [name for name in dict.fromkeys(text.groups) if name not in measured]
    return [f"nothing to measure in {listed(empty)}: no shared token boundary"] if empty else []


def _measured(text: PerDocument) -> dict[str, None]:
    return dict.fromkeys(np.array(text.groups)[text.num_chunks > 0].tolist())


_ALL = "all"
