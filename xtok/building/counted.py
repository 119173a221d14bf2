"""Build maps by counting aligned tokens in synthetic or real text."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.building.counting.counts import LONGEST_CHUNK, MapRows, Pairs, count_unit, pair_edges
from xtok.building.counting.pair_text import PairText
from xtok.building.counting.smoothing import choose_alpha, smooth
from xtok.building.counting.synthetic import synthetic_edges
from xtok.building.exact import Matches, options_beside, with_matches, without_ignored
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.creating import map_from_edges, map_from_rows
from xtok.maps.edges import heaviest, pair_keys
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers.display import plural
from xtok.tokenizers.notes import unspelled_note
from xtok.tokenizers.pairs import Pair


def synthetic_map(
    pair: Pair,
    config: BuildConfig,
    matches: Matches,
    *,
    only: NDArray[np.bool_] | None = None,
    progress: Progress = silent,
) -> tuple[ProjectionMap, list[str]]:
    """Build a map from counts on synthetic text; also return notes about unspelled tokens.

    The map has no report. If the mask `only`, bool `[V_student]`, is given, all other rows are
    empty.
    """
    options = config.multitoken
    edges, unspelled = synthetic_edges(pair, config.target, progress=progress)
    edges, kind = with_matches(edges, RowKind.COUNTED, matches, options, only)
    projection = map_from_rows(pair, edges, kind, options, "count").after("count", config.counting)
    failures = unspelled_note(matches.pair, set(unspelled) - set(options.ignore_student_ids))
    return projection, failures


def counted_map(
    text: PairText, base: ProjectionMap, config: BuildConfig, options: MultitokenConfig
) -> tuple[ProjectionMap, list[str]]:
    """Estimate the probability of each teacher token t at the start of each student token s.

    `W[s, t] = (count(s, t) + alpha * base[s, t]) / (count(s) + alpha)`, cut to `top_k`. If pairs
    within chunks are counted, a second EM step follows. The second result is a list of notes.
    """
    (num_rows, width), unit = base.shape, count_unit(config.target)
    towards = without_ignored(base.edges.take(~base.is_slot), options).normalized()
    predicted: MapRows | None = None
    for further_steps in (0,) if config.target == "start" else (1, 0):
        pairs, held_out = (
            _without_ignored(counts.pairs(predicted), options)
            for counts in (text.counts, text.held_out)
        )
        alpha = choose_alpha(pairs, held_out, towards, config.top_k, width, unit)
        keys, amounts = map(np.concatenate, zip(pairs, held_out, strict=True))
        text_edges = pair_edges(keys, amounts / unit)
        edges = heaviest(smooth(text_edges, towards, alpha), config.top_k)
        if further_steps:  # the next step divides counts in proportion to the weights
            in_map = edges._replace(weights=edges.weights.astype(np.float32))
            predicted = MapRows.of(in_map, num_rows)
    kind = np.zeros_like(base.row_kind)
    kind[edges.student_ids] = base.row_kind[edges.student_ids]
    kind[text_edges.student_ids] = RowKind.COUNTED
    options_used = {"top_k": config.top_k, "target": config.target, "alpha": alpha}
    counted = map_from_edges(
        edges, before=base, row_kind=kind, scale_slot=None, method="count", top_k=config.top_k
    ).after(
        "count",
        options_used | options_beside(base, options),
        initial_sha256=mapfile.sha256(base),
        texts=[asdict(source) for source in text.sources],
        counted=asdict(text.totals),
    )
    return counted, _notes(text, alpha)


def _without_ignored(pairs: Pairs, options: MultitokenConfig) -> Pairs:
    edges = without_ignored(pair_edges(*pairs), options)
    keys = pair_keys(edges.student_ids, edges.teacher_ids)
    return keys, edges.weights.astype(np.int64, copy=False)


def _notes(text: PairText, alpha: float) -> list[str]:
    totals = text.totals
    choice = f", chosen on {plural(totals.held_out, 'held-out document')}"
    if not 0 < totals.held_out < totals.documents:
        choice = " (the default, because the text has too few documents to choose alpha)"
    notes = [
        f"{plural(totals.documents, 'document')}, {totals.student_tokens:,} student and "
        f"{totals.teacher_tokens:,} teacher tokens, {totals.starts:,} shared token boundaries",
        *text.notes,
        f"alpha {alpha:g}{choice}",
    ]
    if totals.skipped_chunks:
        notes.append(
            f"{totals.skipped_chunks:,} chunks with more than {LONGEST_CHUNK} tokens were skipped"
        )
    return notes
