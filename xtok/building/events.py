"""`events`: build an event map for event KL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.building.spellings import partners_or_pieces
from xtok.maps.events import EventMap
from xtok.maps.records import StageReport, history_step
from xtok.tokenizers import ModelLike, load_pair
from xtok.tokenizers.notes import tokenizer_notes
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Ids


def events(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    *,
    progress: Progress = silent,
) -> EventMap:
    """Build an event map for event KL.

    Each token is linked to one token of the other model. Linked tokens belong to the same event.
    The link is the token with the same bytes or role, or otherwise the first piece of the token's
    spelling. Tokens without a link form the event `rest`.

    >>> xtok.events("bytes", "bytes")
    EventMap(bytes → bytes, 256 and 256 tokens, 256 events)
    """
    pair = load_pair(student_model, teacher_model)
    s_link, t_link = _links(pair, progress), _links(pair.reversed, progress)
    labels, rest = number_events(find_components(s_link, t_link), len(s_link))
    result = EventMap(
        student=pair.sides[0],
        teacher=pair.sides[1],
        student_event=labels[: len(s_link)],
        teacher_event=labels[len(s_link) :],
        student_link=s_link.astype(np.int32),
        teacher_link=t_link.astype(np.int32),
        rest=rest,
        history=(history_step("events", {}),),
    )
    result.check()
    return replace(result, reports=(_report(result, pair),))


def _report(result: EventMap, pair: Pair) -> StageReport:
    alone = [int((links < 0).sum()) for links in (result.student_link, result.teacher_link)]
    counts = {
        "events": result.num_events,
        "unlinked student tokens": alone[0],
        "unlinked teacher tokens": alone[1],
    }
    return StageReport("events", counts, tuple(tokenizer_notes(pair)))


def _links(pair: Pair, progress: Progress) -> Ids:
    pieces, counts = partners_or_pieces(pair, pair.partners, pair.tables[0].text_ids, progress)
    links = np.full(len(counts), -1)
    links[counts > 0] = pieces[(np.cumsum(counts) - counts)[counts > 0]]
    return links


def find_components(s_link: Ids, t_link: Ids) -> Ids:
    """Return the first token of each token's connected component; student tokens come first."""
    links = np.concatenate([np.where(s_link >= 0, s_link + len(s_link), -1), t_link])
    tokens = np.flatnonzero(links >= 0)
    lowest, before = np.arange(len(links)), np.zeros(0, np.int64)
    while not np.array_equal(lowest, before):
        before = lowest.copy()
        least = np.minimum(lowest[tokens], lowest[links[tokens]])
        np.minimum.at(lowest, tokens, least)
        np.minimum.at(lowest, links[tokens], least)
        lowest = lowest[lowest]
    return lowest


def number_events(joined: Ids, offset: int) -> tuple[NDArray[np.int32], int | None]:
    """Number events in the order of their first tokens.

    Components with tokens of only one side are merged.
    """
    labels, components = np.unique(joined, return_inverse=True)
    sides = np.split(components, [offset])
    has = np.stack([np.bincount(events, minlength=len(labels)) > 0 for events in sides])
    alone = np.logical_not(has.all(0))
    rest = None
    if alone.any():
        is_both = has[:, alone].any(1).all()
        rest = np.flatnonzero(alone)[0] if is_both else np.flatnonzero(~alone)[-1]
        components = np.where(alone[components], rest, components)
    unique, event_ids = np.unique(components, return_inverse=True)
    return event_ids.astype(np.int32), None if rest is None else int(np.searchsorted(unique, rest))
