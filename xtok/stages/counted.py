"""A map counted on text, smoothed towards another one, for `build` with texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import BuildConfig
from xtok.counting.counts import LONGEST_CHUNK, Rows, pair_edges, unit_of
from xtok.counting.pair_text import PairText, Wanted
from xtok.counting.smoothing import choose_alpha, smooth
from xtok.maps import file as mapfile
from xtok.maps.edges import Edges, heaviest
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import map_of_edges, reported
from xtok.vocab.display import plural


def wanted_by(config: BuildConfig) -> Wanted:
    """Return what is to be counted on text for a map."""
    return Wanted(target=config.target, hold_out=config.alpha is None)


def map_of_counts(text: PairText, base: ProjectionMap, config: BuildConfig) -> ProjectionMap:
    """Make a map of how likely teacher token t is where student token s begins.

    `W[s, t] = (count(s, t) + alpha * base[s, t]) / (count(s) + alpha)`, cut to `top_k`. What
    is counted depends on `config.target`; within chunks, in a second step of EM. Counts
    stay integers until all are added up, so the result depends on the texts alone, not on how they
    were read or interrupted.

    Raises:
        ValueError: if the text was counted for other options.
    """
    if text.wanted != wanted_by(config):
        raise ValueError(f"the text was counted as {text.wanted}, not as {wanted_by(config)}")
    towards = base.edges.take(~base.is_slot).normalized()
    edges, alpha, rows = _edges_of_counts(text, towards, base.shape, config)
    if config.target != "start":
        given = edges._replace(weights=edges.weights.astype(np.float32))  # as a map has them
        shared = Rows.of(given, base.shape[0])
        edges, alpha, rows = _edges_of_counts(text, towards, base.shape, config, shared)
    kind = base.row_kind.copy()
    kind[rows] = RowKind.COUNTED
    projection = map_of_edges(
        edges,
        before=base,
        row_kind=kind,
        scale_slot=None,
        method="count",
        top_k=config.top_k,
    ).after(
        "count",
        {"top_k": config.top_k, "target": config.target, "alpha": alpha},
        initial_sha256=mapfile.sha256(base),
        texts=[asdict(source) for source in text.sources],
        counted=asdict(text.totals),
    )
    return reported(projection, _notes(text, alpha, config))


def _edges_of_counts(
    text: PairText,
    towards: Edges,
    shape: tuple[int, int],
    config: BuildConfig,
    given: Rows | None = None,
) -> tuple[Edges, float, NDArray[np.signedinteger[Any]]]:
    """Return edges, their alpha, and the student ids that were counted.

    Chunks are shared as `given` predicts, equally without.
    """
    unit = unit_of(config.target)
    pairs, held = text.counted.pairs(given), text.held.pairs(given)
    alpha = config.alpha
    if alpha is None:
        alpha = choose_alpha(pairs, held, towards, config.top_k, shape[1], unit)
    keys, amounts = map(np.concatenate, zip(pairs, held, strict=True))
    counted = pair_edges(keys, amounts / unit)
    edges = heaviest(smooth(counted, towards, alpha), config.top_k)
    return edges, alpha, counted.student_ids


def _notes(text: PairText, alpha: float, config: BuildConfig) -> list[str]:
    totals = text.totals
    notes = [
        f"{plural(totals.documents, 'document')}, {totals.student_tokens:,} student and "
        f"{totals.teacher_tokens:,} teacher tokens, {totals.starts:,} shared token boundaries",
        *text.notes,
    ]
    if config.alpha is None and 0 < totals.held_out < totals.documents:
        notes.append(f"alpha {alpha:g}, chosen on {plural(totals.held_out, 'held-out document')}")
    elif config.alpha is None:
        notes.append(f"alpha {alpha:g}: the text has too few documents to choose it on")
    if totals.skipped_chunks:
        notes.append(
            f"{totals.skipped_chunks:,} chunks of more than {LONGEST_CHUNK} tokens left out"
        )
    return notes
