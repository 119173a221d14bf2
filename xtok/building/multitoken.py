"""`multitoken`: map each token to the other tokenizer's tokens for the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.building.exact import Matches, check_ignored, find_matches, with_matches, without_ignored
from xtok.config import MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.creating import map_from_rows
from xtok.maps.edges import Edges, ranks
from xtok.maps.map_arguments import MapLike, bind_map, name_notes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import stage_recipe
from xtok.maps.records import RowKind, map_notes, stage_report
from xtok.tokenizers.notes import undecodable_tokens, unspelled_note
from xtok.tokenizers.pairs import Pair

FIRST_PIECE_WEIGHT = 0.9
"""Weight of a token's first piece. Each next weight is the previous weight times `PIECE_DECAY`."""

PIECE_DECAY = 0.1


def multitoken(
    pair: Pair,
    config: MultitokenConfig | None = None,
    *,
    initial: MapLike | None = None,
    progress: Progress = silent,
) -> ProjectionMap:
    """Map tokens by their spelling, in both directions.

    In the forward pass, the teacher's tokenizer segments the bytes of each student token. The first
    `max_pieces` pieces get the weights 0.9·0.1^i, normalized. In the reverse pass, the student's
    tokenizer segments each teacher token. Each student piece gets a weight for this teacher token.
    Finally, rows are normalized and cut, and get the scale slot of X-Token (arXiv 2605.21699).

    >>> projection = xtok.multitoken(xtok.load_pair("bytes", "bytes"))
    >>> projection["a"].entries
    (RowEntry(teacher_id=97, token='a', weight=1.0, is_slot=False),)

    The weights of the map `initial` (without slots) are added to the new weights.
    """
    config = MultitokenConfig.or_default(config)
    earlier = None if initial is None else ProjectionMap.of(initial)
    pair = pair if earlier is None else bind_map(earlier, pair)[1]
    check_ignored(pair, config)
    result, failures = spelled_map(
        pair, config, find_matches(pair, config), earlier=earlier, progress=progress
    )
    notes = [*map_notes(pair, result, config.ignored[0]), *name_notes(pair, earlier)]
    failures = [*undecodable_tokens(pair, config.ignored), *failures]
    report = stage_report("multitoken", result, notes, failures)
    recipe = stage_recipe(config) if earlier is None else None
    return replace(result, reports=(*result.reports, report), recipe=recipe)


def spelled_map(
    pair: Pair,
    config: MultitokenConfig,
    matches: Matches,
    *,
    earlier: ProjectionMap | None = None,
    only: NDArray[np.bool_] | None = None,
    progress: Progress = silent,
) -> tuple[ProjectionMap, list[str]]:
    """Build the map of `multitoken` without a report; also return notes about unspelled tokens.

    If the mask `only`, bool `[V_student]`, is given, all other rows are empty.
    """
    spelled, failures = _spelled_edges(matches.pair, config, only, progress)
    edges, kind = with_matches(spelled, RowKind.PIECES, matches, config, only)
    details: dict[str, Any] = {}
    if earlier is not None:
        details["initial_sha256"] = mapfile.sha256(earlier)
        bound, _ = bind_map(earlier, pair)
        initial_edges = without_ignored(bound.edges.take(~bound.is_slot), config).normalized()
        edges = Edges.concatenate([initial_edges, edges])
        mixed, initial_kind = np.uint8(RowKind.MIXED), bound.row_kind
        is_exact = initial_kind == RowKind.EXACT
        initial_kind = np.where(is_exact, mixed, initial_kind)  # because the row may get a slot
        differ = (kind != initial_kind) & (kind != RowKind.EMPTY) & (initial_kind != RowKind.EMPTY)
        kind = np.where(differ, mixed, np.maximum(kind, initial_kind))
    result = map_from_rows(pair, edges, kind, config, "multitoken", earlier)
    return result.after("multitoken", config.options, **details), failures


def _spelled_edges(
    in_form: Pair, config: MultitokenConfig, only: NDArray[np.bool_] | None, progress: Progress
) -> tuple[Edges, list[str]]:
    student, teacher = in_form.tables
    open_ids = student.text_ids if only is None else student.text_ids[only[student.text_ids]]
    forward, failures = _spell(in_form, open_ids, config.max_pieces, progress)
    parts = [forward]
    if config.reverse_pass:
        reverse, more = _spell(in_form.reversed, teacher.text_ids, config.max_pieces, progress)
        parts.append(Edges(reverse.teacher_ids, reverse.student_ids, reverse.weights))
        failures += more
    return Edges.concatenate(parts), failures


def _spell(
    pair: Pair, ids: NDArray[np.int64], max_pieces: int, progress: Progress
) -> tuple[Edges, list[str]]:
    pieces, counts = pair.pieces(ids, progress)
    owner = np.repeat(np.arange(len(ids)), counts)  # [pieces], index of each piece's token
    rank = ranks(owner)
    first = rank < max_pieces
    decay = FIRST_PIECE_WEIGHT * PIECE_DECAY ** np.arange(max_pieces)
    total = np.concatenate([[1.0], np.cumsum(decay)])
    edges = Edges(
        ids[owner[first]].astype(np.int32),
        pieces[first],
        decay[rank[first]] / total[np.minimum(counts, max_pieces)[owner[first]]],
    )
    return edges, unspelled_note(pair, ids[counts == 0].tolist())
