"""`multitoken`: each side's tokens spelled in the other's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.config import FIRST_PIECE_WEIGHT, PIECE_DECAY, MultitokenConfig
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.admit import admit, at_widths_of, name_notes
from xtok.maps.edges import Edges, add_slots, heaviest, ranks, sum_duplicates
from xtok.maps.map_like import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import (
    examples_of,
    map_notes,
    map_of_edges,
    reported,
    tokenizer_notes,
    undecodable_tokens,
)
from xtok.progress import Progress, silent
from xtok.stages.matches import compared, relaxed_edges, special_edges
from xtok.vocab.pair import SIDES, Pair
from xtok.vocab.roles import slot_candidates


def multitoken(
    pair: Pair,
    config: MultitokenConfig | None = None,
    *,
    initial: MapLike | None = None,
    only: NDArray[np.bool_] | None = None,
    progress: Progress = silent,
) -> ProjectionMap:
    """Map each student token to the teacher tokens that spell it, and the other way round.

    Forward, a student token's bytes are segmented by the teacher's tokenizer; its first
    `max_pieces` pieces have the weights 0.9·0.1^i, normalized. In reverse, each teacher token is
    segmented by the student's, and its weights are added into (student piece, teacher token).
    Rows are normalized, cut, and given a scale slot, as X-Token does (arXiv 2605.21699).

    >>> projection = xtok.multitoken(xtok.pair("bytes", "bytes"))
    >>> projection["a"].entries
    (RowEntry(teacher_id=97, token='a', weight=1.0, is_slot=False),)

    Args:
        pair: the models of the rows and the columns, with their tokenizers.
        config: the options; the defaults if None.
        initial: a map of the same pair, or its path, whose weights (but for slots) are added in.
        only: bool `[V_student]`, the rows to make; the others stay empty. All if None.
        progress: called for each pass over a vocabulary.

    Raises:
        XtokError: if `initial` is of other tokenizers.
        ValueError: for a `target` without the weights `prior`, which alone are counted.
    """
    config = MultitokenConfig.or_default(config)
    if config.target != "start" and config.weights != "prior":
        raise ValueError(f"target {config.target!r} goes with weights 'prior', or with texts")
    earlier = None if initial is None else as_map(initial)
    pair = pair if earlier is None else at_widths_of(pair, earlier)
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    for side, width, ids in zip(SIDES, pair.shape, ignored, strict=True):
        if ids and max(ids) >= width:
            raise XtokError(
                f"there is no {side} id {max(ids)} to ignore: "
                f"{getattr(pair, side).model_id} is {width} wide",
                hint=f"give ids from 0 to {width - 1} with {{option}}",
                parameter=f"ignore_{side}_ids",
            )
    in_form = compared(pair, config)
    if only is None:
        only = np.ones(pair.shape[0], np.bool_)
    spelled, failures = _spelled_edges(pair, in_form, config, only, progress)
    special = special_edges(in_form, config)
    special = special.take(only[special.student_ids])
    kind = np.zeros(pair.shape[0], np.uint8)
    is_counted = config.weights == "prior"
    kind[spelled.student_ids] = RowKind.COUNTED if is_counted else RowKind.PIECES
    kind[special.student_ids] = RowKind.ROLE
    parts = [spelled, special]
    details: dict[str, Any] = {}
    notes: list[str] = []
    if earlier is not None:
        details["initial_sha256"] = mapfile.sha256(earlier)
        notes += name_notes(pair, earlier)
        earlier = admit(pair, earlier)
        parts.insert(0, _without(earlier.edges.take(~earlier.is_slot), config).normalized())
        others = earlier.row_kind
        differ = (kind != others) & (kind != RowKind.EMPTY) & (others != RowKind.EMPTY)
        kind = np.where(differ, np.uint8(RowKind.MIXED), np.maximum(kind, others))
    edges = Edges.concatenate(parts)
    del spelled, parts  # counted ones are millions
    edges = sum_duplicates(edges).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(kind)) > 0
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        candidates = [i for i in slot_candidates(pair.tables[1]) if i not in ignored[1]]
        edges, slot = add_slots(edges, candidates, len(kind))
    projection = map_of_edges(
        edges,
        student=pair.student,
        teacher=pair.teacher,
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method="multitoken",
        top_k=config.top_k,
        history=() if earlier is None else earlier.history,
        reports=() if earlier is None else earlier.reports,
    )
    projection = projection.after("multitoken", config.options, **details)
    failures = [*undecodable_tokens(pair, ignored), *failures]
    notes += [*tokenizer_notes(pair), *map_notes(projection, ignored[0])]
    return reported(projection, notes, failures)


def _spelled_edges(
    pair: Pair,
    in_form: Pair,
    config: MultitokenConfig,
    only: NDArray[np.bool_],
    progress: Progress,
) -> tuple[Edges, list[str]]:
    """Return the edges that text tokens of the wanted rows have, and what cannot be spelled."""
    rows, columns = in_form.tables
    if config.weights == "prior":
        from xtok.counting.prior import prior_edges

        edges, unspelled = prior_edges(pair, config.target, progress=progress)
        wanted = set(unspelled) - set(config.ignore_student_ids)
        parts, failures = [edges], _unspelled(in_form, wanted)
    else:
        open_ids = rows.text_ids[only[rows.text_ids]]
        forward, failures = _spell(in_form, open_ids, config.max_pieces, progress)
        parts = [forward]
        if config.reverse_pass:
            back = in_form.reversed
            reverse, more = _spell(back, columns.text_ids, config.max_pieces, progress)
            parts.append(Edges(reverse.teacher_ids, reverse.student_ids, reverse.weights))
            failures += more
    parts.append(relaxed_edges(in_form, config))
    edges = _without(Edges.concatenate(parts), config)
    return edges.take(only[edges.student_ids]), failures


def _without(edges: Edges, config: MultitokenConfig) -> Edges:
    """Return the edges but for those of ignored ids."""
    if not (config.ignore_student_ids or config.ignore_teacher_ids):
        return edges
    is_ignored = np.isin(edges.student_ids, config.ignore_student_ids)
    is_ignored |= np.isin(edges.teacher_ids, config.ignore_teacher_ids)
    return edges.take(~is_ignored)


def _spell(
    pair: Pair, ids: NDArray[np.int64], max_pieces: int, progress: Progress
) -> tuple[Edges, list[str]]:
    """Return edges from tokens of the student to the first pieces of each, and failures."""
    pieces, counts = pair.pieces(ids, progress)
    owner = np.repeat(np.arange(len(ids)), counts)  # the token of each piece
    place = ranks(owner)
    first = place < max_pieces
    decay = FIRST_PIECE_WEIGHT * PIECE_DECAY ** np.arange(max_pieces)
    total = np.concatenate([[1.0], np.cumsum(decay)])
    edges = Edges(
        ids[owner[first]].astype(np.int32),
        pieces[first],
        decay[place[first]] / total[np.minimum(counts, max_pieces)[owner[first]]],
    )
    return edges, _unspelled(pair, ids[counts == 0].tolist())


def _unspelled(pair: Pair, ids: Collection[int]) -> list[str]:
    examples = examples_of(sorted(ids), pair.tables[0]) if ids else ""
    return [f"{pair.teacher.model_id} cannot spell {examples}"] if ids else []
