"""A map counted on text, smoothed towards another one; `build` with texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from xtok.config import BuildConfig
from xtok.counting.counts import (
    CountedText,
    CountingPlan,
    TextTotals,
    plan_counting,
    require_starts,
)
from xtok.counting.encode import LONGEST_CHUNK, Rows, pair_edges, unit_of
from xtok.counting.smoothing import choose_alpha, smooth
from xtok.counting.texts import little_text
from xtok.maps import file as mapfile
from xtok.maps.edges import heaviest
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import map_of_edges, reported
from xtok.progress import Progress, silent
from xtok.stages.exact import used_options, with_exact
from xtok.stages.matches import compared, exact_matches
from xtok.stages.multitoken import multitoken
from xtok.vocab.display import plural
from xtok.vocab.pair import Pair


def counted_map(
    pair: Pair,
    texts: str | Path | Sequence[str | Path],
    config: BuildConfig,
    *,
    field: str,
    initial: ProjectionMap | None,
    count: Callable[[CountingPlan], CountedText],
    progress: Progress = silent,
) -> ProjectionMap:
    """Count how likely teacher token t is where student token s begins.

    `W[s, t] = (count(s, t) + alpha * initial[s, t]) / (count(s) + alpha)`, cut to `top_k`. What
    is counted depends on `config.target`; within chunks, in a second step of EM. Counts
    stay integers until all are added up, so the result depends on the texts alone, not on how they
    were read or interrupted.
    """
    plan = plan_counting(*pair.tokenizers, texts, config, field)
    options = config.multitoken
    if initial is None:
        base = multitoken(pair, config=options, progress=progress)
    else:
        base = pair.admit(initial)
        options = used_options(base)
    counts = count(plan)
    projection = map_of_counts(counts, base, plan, config)
    if config.target != "start":
        given = Rows.of(projection.edges, pair.shape[0])
        projection = map_of_counts(counts, base, plan, config, given)
    if config.exact_match:
        matches = exact_matches(compared(pair, options), options)
        projection = with_exact(projection, matches, options)
    return projection


def map_of_counts(
    counts: CountedText,
    base: ProjectionMap,
    plan: CountingPlan,
    config: BuildConfig,
    given: Rows | None = None,
) -> ProjectionMap:
    """Smooth counts towards a base map, and cut each row; no counts are an `XtokError`.

    Chunks are shared as the map `given` predicts, equally without.
    """
    totals = counts.totals
    require_starts(totals.starts, totals.documents, totals.num_bytes)
    unit = unit_of(plan.target)
    towards = base.edges.take(~base.is_slot).normalized()
    pairs, held = counts.counted.pairs(given), counts.held.pairs(given)
    alpha = config.alpha
    if alpha is None:
        alpha = choose_alpha(pairs, held, towards, config.top_k, base.shape[1], unit)
    keys, amounts = map(np.concatenate, zip(pairs, held, strict=True))
    counted = pair_edges(keys, amounts / unit)
    kind = base.row_kind.copy()
    kind[counted.student_ids] = RowKind.COUNTED
    projection = map_of_edges(
        heaviest(smooth(counted, towards, alpha), config.top_k),
        before=base,
        row_kind=kind,
        scale_slot=None,
        method="estimate",
        top_k=config.top_k,
    ).after(
        "estimate",
        {"top_k": config.top_k, "target": config.target, "alpha": alpha},
        initial_sha256=mapfile.sha256(base),
        texts=[asdict(source) for source in plan.sources],
        counted=asdict(totals),
    )
    return reported(projection, _notes(totals, alpha, config))


def _notes(totals: TextTotals, alpha: float, config: BuildConfig) -> list[str]:
    notes = [
        f"{plural(totals.documents, 'document')}, {totals.student_tokens:,} student and "
        f"{totals.teacher_tokens:,} teacher tokens, {totals.starts:,} shared token boundaries",
        *little_text(totals.num_bytes),
    ]
    if config.alpha is None and totals.held_out:
        notes.append(f"alpha {alpha:g}, chosen on {plural(totals.held_out, 'held-out document')}")
    elif config.alpha is None:
        notes.append(f"alpha {alpha:g}: the text has too few documents to choose it on")
    if totals.differing:
        share = totals.lost_bytes / max(1, totals.num_bytes)
        notes.append(
            f"the tokenizers disagree on {plural(totals.differing, 'document')} (normalization); "
            f"each was counted up to that point, skipping {share:.1%} of the text"
        )
    if totals.skipped_chunks:
        notes.append(
            f"{totals.skipped_chunks:,} chunks of more than {LONGEST_CHUNK} tokens left out"
        )
    return notes
