"""`spellings`: build a spelling map for CSD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xtok._lib.progress import Progress, silent
from xtok.maps.records import StageReport, history_step
from xtok.maps.spellings import UNUSED, SpellingMap
from xtok.tokenizers import ModelLike, load_pair
from xtok.tokenizers.notes import examples_of, tokenizer_notes
from xtok.tokenizers.pairs import Pair, Pieces
from xtok.tokenizers.table import SIDES, Ids


def spellings(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    *,
    progress: Progress = silent,
) -> SpellingMap:
    """Build a spelling map for Common-Support Distillation (CSD).

    A student token and a teacher token with the same bytes or role form a shared pair. For every
    other token, the other tokenizer spells the token's bytes as a part of a longer text.

    >>> xtok.spellings("bytes", "bytes")
    SpellingMap(bytes → bytes, 256 and 256 tokens, 256 shared)
    """
    pair = load_pair(student_model, teacher_model)
    student, teacher = pair.shared
    student_spelled = _spelled(pair, student, progress)
    teacher_spelled = _spelled(pair.reversed, teacher, progress)
    result = SpellingMap(
        student=pair.sides[0],
        teacher=pair.sides[1],
        student_pieces=student_spelled.ids,
        student_counts=student_spelled.counts.astype(np.int32),
        teacher_pieces=teacher_spelled.ids,
        teacher_counts=teacher_spelled.counts.astype(np.int32),
        history=(history_step("spellings", {}),),
    )
    result.check()
    return replace(result, reports=(_report(result, pair),))


def partners_or_pieces(pair: Pair, partners: Ids, ids: Ids, progress: Progress = silent) -> Pieces:
    """Return the partner of each student token, or the pieces of a token without a partner.

    `partners`, int64 `[V_student]`, contains teacher ids, or −1 for tokens without a partner. Only
    tokens in `ids` (ascending) are spelled.
    """
    has_partner = partners >= 0
    ids = ids[~has_partner[ids]]
    spelled = pair.pieces(ids, progress)
    counts = has_partner.astype(np.int64)
    counts[ids] = spelled.counts
    is_partner = np.repeat(has_partner, counts)
    pieces = np.empty(len(is_partner), np.int32)
    pieces[is_partner], pieces[~is_partner] = partners[has_partner], spelled.ids
    return Pieces(pieces, counts)


def _spelled(pair: Pair, partners: Ids, progress: Progress) -> Pieces:
    return partners_or_pieces(pair, partners, pair.tables[0].emitted_ids, progress)


def _report(result: SpellingMap, pair: Pair) -> StageReport:
    counts: dict[str, float] = {"shared tokens": len(result.shared[0])}
    notes = tokenizer_notes(pair)
    for side, table in zip(SIDES, pair.tables, strict=True):
        pieces = getattr(result, f"{side}_counts")
        counts[f"{side} tokens spelled"] = int((pieces > 1).sum())
        left_out = {why: ids for why, ids in result.left_out(side).items() if why != UNUSED}
        counts[f"{side} tokens left out"] = sum(map(len, left_out.values()))
        notes += [
            f"{side}, {why}: {examples_of(ids.tolist(), table)}"
            for why, ids in left_out.items()
            if len(ids)
        ]
    return StageReport("spellings", counts, tuple(notes))
