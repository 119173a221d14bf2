"""`evaluate`: measures of maps on text.

Both sides tokenize the text. At each byte where a student token s and a teacher token t both start,
a good row W[s] gives t a high weight.

- Cross-entropy: the mean of `-ln((1 - eps) * W[s, t] + eps / V_teacher)`, eps = 1e-3, in nats.
- Coverage: share of W[s, t] > 0. Top-1: share where t is the row's heaviest entry.
- Floor: cross-entropy of the best map for this text: counted on it, cut to as many entries per row.
- Recipe: cross-entropy of X-Token's map (arXiv 2605.21699): weights .9, .09, …, both passes, exact
  matches, no slot.
- Closed: (recipe - map) / (recipe - floor).

The same measures over chunks average the student rows of a chunk and the losses of its teacher
tokens, as P-KL does. Gold and H-KL compare the first tokens at shared boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok._lib.shards import SourceFile
from xtok.building.counting.counts import pair_edges
from xtok.building.counting.pair_text import CountPlan, PairText, PerDocument
from xtok.building.counting.smoothing import entropy_kept, entropy_of, share_of, weights_at
from xtok.building.counting.smoothing import losses as losses_of
from xtok.building.exact import find_matches, with_exact
from xtok.building.multitoken import spelled_map
from xtok.building.sort_cut import cut_rows
from xtok.config import Loss, MultitokenConfig, SortCutConfig, loss_name
from xtok.errors import XtokError
from xtok.inspection import distinct_names
from xtok.inspection.bootstrap import Interval, Ranking, interval, rank, resample
from xtok.inspection.costs import ClassMeasures, Occurrences, WorstRow
from xtok.inspection.measures import (
    SMALLEST_GAP,
    EventMapMeasures,
    MapMeasures,
    Measures,
    Verdict,
    empty_share,
    event_verdict,
    map_verdict,
)
from xtok.maps.edges import Edges, heaviest
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, AnyMapLike, bind_maps
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.display import listed
from xtok.tokenizers.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of `evaluate`."""

    student: str  # model id of the rows
    teacher: str
    measures: tuple[MapMeasures, ...] = ()  # by group of text, then by map; `all` text comes last
    event_measures: tuple[EventMapMeasures, ...] = ()  # likewise, for event maps
    classes: tuple[ClassMeasures, ...]  # for each map, by class of student token
    worst_rows: tuple[WorstRow, ...]  # for each map, the most costly first
    num_bytes: int  # of text
    lost_bytes: int  # left out, because the two sides spell them differently
    differing: int  # documents that the two sides spell differently
    notes: tuple[str, ...]  # on the text: it is short, or a map was counted on it
    by_chunk: bool = False  # whether losses of `classes` and `worst_rows` are over chunks
    ranking: Ranking | None = None  # for the requested loss
    verdicts: tuple[Verdict, ...] = ()  # one for each map, over all text


def evaluate(
    pair: Pair,
    maps: AnyMapLike | Sequence[AnyMapLike],
    texts: str | Path | Sequence[str | Path],
    *,
    names: Sequence[str] = (),
    field: str = "text",
    for_loss: Loss | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure projection maps or event maps of one pair on text.

    Args:
        pair: the maps' pair, with its tokenizers.
        maps: one or several maps of one kind and pair, or their paths.
        texts: paths and globs of text or conversations, as for `build`.
        names: names of the maps; by default their paths, or `map 1` and so on.
        field: the field or column that holds the text.
        for_loss: loss to judge and rank the maps for.
        progress: called for each pass over a vocabulary, and for the text.

    Raises:
        XtokError: if a text cannot be read or has nothing to measure, a map belongs to another pair
            or contains spellings, or event maps are mixed with other maps or ranked for a loss.
        ValueError: for no map, or a wrong number of names.
    """
    loaded, pair, names = bind_maps(maps, pair, names, any_kind=True)
    if any(isinstance(one, SpellingMap) for one in loaded):
        raise XtokError(
            "spelling maps cannot be measured on text",
            hint="evaluate projection maps or event maps; xtok verify checks a spelling map",
        )
    are_events = [isinstance(one, EventMap) for one in loaded]
    if any(are_events) and (not all(are_events) or for_loss is not None):
        raise XtokError(
            "event maps cannot be measured together with maps, nor for a loss",
            hint="evaluate the event maps alone, without a loss",
        )
    named = dict(zip(distinct_names(names), loaded, strict=True))
    text = PairText.read(pair, texts, CountPlan(per_document=True), field=field, progress=progress)
    return evaluation_of(named, pair, text, for_loss=for_loss, progress=progress)


def evaluation_of(
    maps: Mapping[str, AnyMap],
    pair: Pair,
    text: PairText,
    *,
    for_loss: Loss | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure maps, by name, on text that was counted per document."""
    if text.per_document is None:
        raise ValueError(
            "text has no counts per document; read it with CountPlan(per_document=True)"
        )
    if for_loss is not None:
        for_loss = loss_name(for_loss)
    documents = text.per_document
    by_row = Occurrences(pair, documents, by_chunk=for_loss == "p-kl")
    of_tokens = {n: m for n, m in maps.items() if isinstance(m, ProjectionMap)}
    of_events = {n: m for n, m in maps.items() if isinstance(m, EventMap)}
    if of_events:
        measured = _event_map_fields(of_events, pair, documents, by_row)
    else:
        recipes = _recipes(of_tokens.values(), pair, progress)
        measured = _map_fields(of_tokens, documents, recipes, by_row, for_loss)
    verdicts = [
        map_verdict(one, for_loss or "p-kl", empty_share(of_tokens[one.name], text))
        for one in _over_all_text(measured.get("measures", ()))
    ]
    verdicts += map(event_verdict, _over_all_text(measured.get("event_measures", ())))
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


M = TypeVar("M", bound=Measures)


def _over_all_text(measures: Sequence[M]) -> list[M]:
    return [*{one.name: one for one in measures}.values()]


def _event_map_fields(
    maps: Mapping[str, EventMap], pair: Pair, text: PerDocument, by_row: Occurrences
) -> dict[str, Any]:
    s, t = text.keys >> 32, text.keys & 0xFFFFFFFF
    events = {name: (m.student_event[s], m.teacher_event[t]) for name, m in maps.items()}
    leaks = {name: of_s != of_t for name, (of_s, of_t) in events.items()}
    of_shared = pair.shared[0][s] != np.where(pair.shared[1][t] >= 0, t, -1)
    measures: list[EventMapMeasures] = []
    for group, chosen in _groups(text):
        counts = text.amounts(chosen)
        measures += [
            EventMapMeasures(
                name=name,
                group=group,
                documents=int(chosen.sum()),
                starts=int(counts.sum()),
                leak=share_of(counts, leaks[name]),
                shared_leak=share_of(counts, of_shared),
                student_bits=entropy_of(of_tokens[0], counts),
                teacher_bits=entropy_of(of_tokens[1], counts),
                student_token_bits=entropy_of(s, counts),
                teacher_token_bits=entropy_of(t, counts),
                kept=entropy_kept(of_tokens, (s, t), counts),
            )
            for name, of_tokens in events.items()
        ]
    classes = [by_row.classes(name, leak, of_shared, ~leak) for name, leak in leaks.items()]
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
    for_loss: Loss | None,
) -> dict[str, Any]:
    shape = by_row.shape
    losses = {name: _losses(text, m.edges, shape) for name, m in maps.items()}
    of_recipes = {
        top_k: _sums(text, _losses(text, recipe, shape), "recipe")
        for top_k, recipe in recipes.items()
    }
    sums = {
        name: of_recipes[m.top_k] | _sums(text, losses[name], "cross_entropy") | _hits(text, m)
        for name, m in maps.items()
    }
    measures: list[MapMeasures] = []
    floors: dict[int, Any] = {}  # finally of the last group, all text
    for group, chosen in _groups(text):
        floors = {top_k: _floor(text, chosen, top_k, shape) for top_k in recipes}
        of_floors = {top_k: _sums(text, floor, "floor") for top_k, floor in floors.items()}
        measures += [
            _measures(name, group, sums[name] | of_floors[m.top_k], chosen)
            for name, m in maps.items()
        ]
    prefix = _OVER_CHUNKS if by_row.by_chunk else _AT_STARTS
    classes, worst = [], []
    for name, m in maps.items():
        loss, floor = losses[name][prefix], floors[m.top_k][prefix]
        at_starts, wanted = (weights_at(m.edges, keys) for keys in (text.keys, by_row.keys))
        classes.append(by_row.classes(name, loss, floor, at_starts > 0))
        worst.append(by_row.worst(name, loss - floor, wanted))
    ranking = None
    if for_loss is not None:
        of_loss = np.stack([one[f"{prefix}cross_entropy"] for one in sums.values()])
        counts = text.num_chunks if by_row.by_chunk else text.per_document(np.ones(len(text.keys)))
        ranking = rank(for_loss, list(maps), of_loss, counts.astype(np.int64))
    return {
        "measures": tuple(measures),
        "classes": tuple(chain(*classes)),
        "worst_rows": tuple(chain(*worst)),
        "ranking": ranking,
    }


def _recipes(maps: Iterable[ProjectionMap], pair: Pair, progress: Progress) -> dict[int, Edges]:
    """Return X-Token's map without a slot, cut to the size of each map."""
    cuts = sorted({one.top_k for one in maps})
    if not cuts:
        return {}
    config = MultitokenConfig(scale_trick=False)
    matches = find_matches(pair, config)
    only = ~matches.is_exact
    spelled, _ = spelled_map(pair, config, matches, only=only, progress=progress)
    exact = with_exact(spelled, matches, config)
    return {k: cut_rows(exact, SortCutConfig(top_k=k))[0].edges for k in cuts}


def _counted_on(maps: Mapping[str, AnyMap], texts: Sequence[SourceFile]) -> list[str]:
    notes = []
    for name, one in maps.items():
        recorded = [step.get("texts") for step in one.history]
        entries = [e for entries in recorded if isinstance(entries, list) for e in entries]
        known = {(e.get("size"), e.get("sha256")) for e in entries if isinstance(e, dict)}
        same = [text.name for text in texts if (text.size, text.sha256) in known]
        if same:
            notes.append(
                f"{name} was counted on {', '.join(same)}, so its score on this text is too "
                "optimistic; evaluate on other text"
            )
    return notes


def _groups(text: PerDocument) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return the documents of each group, bool `[documents]`; all text comes last.

    Groups without a boundary are left out; a group with the name `all` gets a number.
    """
    names = np.array(text.groups)
    groups = [(name, names == name) for name in _measured(text)]
    if len(groups) == 1:
        return groups
    shown = distinct_names([_ALL, *(name for name, _ in groups)])[1:]
    chosen = (documents for _, documents in groups)
    return [*zip(shown, chosen, strict=True), (_ALL, np.ones(len(names), np.bool_))]


def _not_measured(text: PerDocument) -> list[str]:
    measured = _measured(text)
    empty = [name for name in dict.fromkeys(text.groups) if name not in measured]
    return [f"nothing to measure in {listed(empty)}: no shared token boundary"] if empty else []


def _measured(text: PerDocument) -> dict[str, None]:
    return dict.fromkeys(np.array(text.groups)[text.num_chunks > 0].tolist())


_ALL = "all"
"""The group of all text."""
_AT_STARTS, _OVER_CHUNKS = "", "chunk_"
"""Prefixes of a map's figures at shared boundaries and over chunks."""
_Losses: TypeAlias = dict[str, NDArray[np.float64]]
"""A map's losses at each pair at a boundary and over each chunk, by prefix."""


def _losses(
    text: PerDocument, edges: Edges, shape: tuple[int, int], in_chunks: Edges | None = None
) -> _Losses:
    return {
        _AT_STARTS: losses_of(weights_at(edges, text.keys), shape[1]),
        _OVER_CHUNKS: text.chunk_losses(edges if in_chunks is None else in_chunks, shape),
    }


def _floor(
    text: PerDocument, chosen: NDArray[np.bool_], top_k: int, shape: tuple[int, int]
) -> _Losses:
    counts = text.amounts(chosen)
    keys, used = text.keys, counts > 0
    at_starts = heaviest(pair_edges(keys[used], counts[used]), top_k)
    return _losses(text, at_starts, shape, text.hindsight(chosen, top_k, shape[0]))


def _sums(text: PerDocument, losses: _Losses, figure: str) -> dict[str, NDArray[np.float64]]:
    return {
        f"{_AT_STARTS}{figure}": text.per_document(losses[_AT_STARTS]),
        f"{_OVER_CHUNKS}{figure}": text.over_chunks(losses[_OVER_CHUNKS]),
    }


def _hits(text: PerDocument, m: ProjectionMap) -> dict[str, NDArray[np.float64]]:
    s, t = text.keys >> 32, text.keys & 0xFFFFFFFF
    return {
        "starts": text.per_document(np.ones(len(s))),
        "chunks": text.num_chunks,
        "coverage": text.per_document(weights_at(m.edges, text.keys) > 0),
        "top_1": text.per_document(m.heaviest_teacher_ids[s] == t),
    }


def _measures(
    name: str, group: str, sums: Mapping[str, NDArray[np.float64]], chosen: NDArray[np.bool_]
) -> MapMeasures:
    measured = chosen & (sums["chunks"] > 0)  # other documents would change the interval
    table = np.stack(list(sums.values()), axis=1)[measured]
    totals = dict(zip(sums, table.sum(axis=0), strict=True))
    whole = _figures(totals)
    drawn = _figures(dict(zip(sums, resample(table).T, strict=True)))

    def figure(name: str) -> Interval:
        return interval(whole[name], drawn[name], len(table))

    def closed(prefix: str) -> Interval | None:
        gap = whole[f"{prefix}recipe"] - whole[f"{prefix}floor"]
        return figure(f"{prefix}closed") if gap >= SMALLEST_GAP else None

    return MapMeasures(
        name=name,
        group=group,
        documents=int(chosen.sum()),
        starts=int(totals["starts"]),
        cross_entropy=figure("cross_entropy"),
        coverage=figure("coverage"),
        top_1=figure("top_1"),
        floor=float(whole["floor"]),
        recipe=float(whole["recipe"]),
        closed=closed(_AT_STARTS),
        chunk_cross_entropy=figure("chunk_cross_entropy"),
        chunk_floor=float(whole["chunk_floor"]),
        chunk_recipe=float(whole["chunk_recipe"]),
        chunk_closed=closed(_OVER_CHUNKS),
    )


def _figures(sums: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Turn sums over documents, numbers or float64 `[samples]`, into figures."""
    starts, chunks = (np.maximum(sums[name], 1) for name in ("starts", "chunks"))
    figures = {
        name: total / (chunks if name.startswith(_OVER_CHUNKS) else starts)
        for name, total in sums.items()
    }
    for prefix in (_AT_STARTS, _OVER_CHUNKS):
        loss, floor, recipe = (figures[prefix + n] for n in ("cross_entropy", "floor", "recipe"))
        gap = np.where(recipe > floor, recipe - floor, np.nan)
        figures[f"{prefix}closed"] = (recipe - loss) / gap
    return figures
