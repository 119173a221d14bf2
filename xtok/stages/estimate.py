"""`estimate`: a map of counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from xtok.config import EstimateConfig, MultitokenConfig
from xtok.counting.counts import (
    CountedText,
    CountingPlan,
    TextTotals,
    count_text,
    plan_counting,
    remove_checkpoints,
    require_starts,
)
from xtok.counting.encode import LONGEST_CHUNK, pair_edges, unit_of
from xtok.counting.smoothing import choose_alpha, smooth
from xtok.maps import file as mapfile
from xtok.maps.edges import heaviest
from xtok.maps.pair import with_vocabularies
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import finished, reported
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.exact import used_options, with_exact
from xtok.stages.matches import compared_tables, exact_matches
from xtok.stages.multitoken import multitoken
from xtok.tokenizers import ModelLike, as_tokenizer
from xtok.vocab.display import plural


def estimate(
    student_model: ModelLike,
    teacher_model: ModelLike,
    texts: str | Path | Sequence[str | Path],
    config: EstimateConfig | None = None,
    *,
    base: ProjectionMap | MultitokenConfig | None = None,
    checkpoint: Path | None = None,
    count: Callable[[CountingPlan], CountedText] | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Count a map on text: how likely teacher token t is where student token s begins.

    `W[s, t] = (count(s, t) + alpha * base[s, t]) / (count(s) + alpha)`, cut to `top_k`. What is
    counted depends on `config.target`; within chunks, the text is read a second time.
    Counts stay integers until all are added up, so the result depends on the texts alone, not on
    how they were read or interrupted.

    Args:
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        texts: a path or glob, or several, of plain text, JSON lines or Parquet, gzip and zstd
            included.
        config: the options; the defaults if None.
        base: a map of this pair to smooth towards, without its slots, or the options by which
            `multitoken` makes one; if None, those with the weights `prior` and this target.
        checkpoint: a file to save counts in every minute; counting resumes from it if it exists.
            It is removed at the end.
        count: counts a plan in another way, such as on a cluster, without `checkpoint` and
            `text_progress`; `count_text` if None.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read, there is nothing to count in it, or the base or the
            checkpoint is of other tokenizers or texts.
    """
    config = config or EstimateConfig()
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    base = base or MultitokenConfig(weights="prior", target=config.target, scale_trick=False)
    if isinstance(base, ProjectionMap):
        base = with_vocabularies(
            base, student=student.vocabulary, teacher=teacher.vocabulary, widths=True
        )
    options = used_options(base) if isinstance(base, ProjectionMap) else base
    plan = plan_counting(student, teacher, texts, config)
    if isinstance(base, MultitokenConfig):
        base = multitoken(student, teacher, base, progress=progress)
    count = count or partial(
        count_text, student=student, teacher=teacher, checkpoint=checkpoint, progress=text_progress
    )
    projection = map_of_counts(count(plan), base, plan, config)
    if config.target != "start":
        plan = plan.after(projection.edges, len(student.table))
        projection = map_of_counts(count(plan), base, plan, config)
    if config.exact_match:
        matches = exact_matches(*compared_tables(student, teacher, options), options)
        projection = with_exact(projection, matches, options)
    if checkpoint is not None:
        remove_checkpoints(checkpoint)
    return projection


def map_of_counts(
    counts: CountedText, base: ProjectionMap, plan: CountingPlan, config: EstimateConfig
) -> ProjectionMap:
    """Smooth counts towards a base map, and cut each row; no counts are an `XtokError`."""
    totals = counts.totals
    require_starts(totals.starts, totals.documents, totals.num_bytes)
    unit = unit_of(plan.target)
    towards = base.edges.take(~base.is_slot).normalized()
    alpha = config.alpha
    if alpha is None:
        alpha = choose_alpha(counts, towards, config.top_k, base.shape[1], unit)
    counted = pair_edges(
        np.concatenate([counts.keys, counts.held_keys]),
        np.concatenate([counts.counts, counts.held_counts]) / unit,
    )
    kind = base.row_kind.copy()
    kind[counted.student_ids] = RowKind.COUNTED
    projection = finished(
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


def _notes(totals: TextTotals, alpha: float, config: EstimateConfig) -> list[str]:
    notes = [
        f"{plural(totals.documents, 'document')}, {totals.student_tokens:,} student and "
        f"{totals.teacher_tokens:,} teacher tokens, {totals.starts:,} shared token boundaries"
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
