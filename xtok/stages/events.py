"""`events`: what losses over events take; both vocabularies cut into events."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import log2
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from xtok.config import EventLoss, EventsConfig, loss_name
from xtok.counting.measures import entropy_of, share_of
from xtok.counting.pair_text import TextLike, counts_of
from xtok.maps.admit import pair as pair_of
from xtok.maps.events import EventMap
from xtok.maps.parts import StageReport, history_step
from xtok.maps.results import tokenizer_notes
from xtok.maps.spellings import SpellingMap
from xtok.pairs import Pair
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.spellings import spellings_of_pair
from xtok.tokenizers import ModelLike

Ids = NDArray[np.int64]


@overload
def events(
    student_model: ModelLike,
    teacher_model: ModelLike,
    texts: TextLike = (),
    config: EventsConfig | None = None,
    *,
    for_loss: Literal["event-kl"] = "event-kl",
    field: str = "text",
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> EventMap: ...


@overload
def events(
    student_model: ModelLike,
    teacher_model: ModelLike,
    *,
    for_loss: Literal["csd"],
    progress: Progress = silent,
) -> SpellingMap: ...


def events(
    student_model: ModelLike,
    teacher_model: ModelLike,
    texts: TextLike = (),
    config: EventsConfig | None = None,
    *,
    for_loss: EventLoss = "event-kl",
    field: str = "text",
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> EventMap | SpellingMap:
    """Make what a loss over events takes: events of both vocabularies, or the tokens' spellings.

    *Event KL.* Each token joins the token of the other side that has its bytes or its role, else
    the first piece of its spelling in the other vocabulary. That needs no text. Then, of all pairs
    of events that tokens at shared boundaries of the text fall apart into, those are merged that
    take away most leak per bit of entropy lost, until at most `max_leak` is left. Unlinked tokens,
    such as special tokens without a partner, are together in the event `rest`.

    *CSD*, Common-Support Distillation, finds its events as it trains, from each side's tokens
    spelled in the other's; see `SpellingMap`.

    >>> xtok.events("bytes", "bytes")
    EventMap(bytes → bytes, 256 and 256 tokens, 256 events)
    >>> xtok.events("bytes", "bytes", for_loss="csd")
    SpellingMap(bytes → bytes, 256 and 256 tokens, 256 shared)

    Args:
        student_model: the model of the student, as `build` takes it.
        teacher_model: the teacher's.
        texts: paths and globs of text, as `build` takes them; none for the bytes alone.
        config: the options; the defaults if None.
        for_loss: `event-kl`, or `csd`, which takes neither text nor options.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read, or there is nothing to count in it.
        ValueError: if `csd` is given text or options, or there is no such loss.
    """
    for_loss = loss_name(for_loss, EventLoss)
    if for_loss == "csd" and (texts or config is not None):
        raise ValueError("csd takes neither text nor options: spellings are of the bytes alone")
    pair = pair_of(student_model, teacher_model)
    if for_loss == "csd":
        return spellings_of_pair(pair, progress)
    return events_of_pair(
        pair, texts, config, field=field, progress=progress, text_progress=text_progress
    )


def events_of_pair(
    pair: Pair,
    texts: TextLike = (),
    config: EventsConfig | None = None,
    *,
    field: str = "text",
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> EventMap:
    """Cut the vocabularies of a pair that is made already, with its tokenizers, into events."""
    config = EventsConfig.or_default(config)
    about: dict[str, Any] = {}
    pairs, mass = None, np.zeros(0)
    if texts:
        text = counts_of(pair, texts, field=field, progress=text_progress)
        sources = [asdict(source) for source in text.sources]
        about = {"texts": sources, "counted": asdict(text.totals)}
        pairs = _Pairs.of(*text.pairs, pair.shape[0])
        mass = pairs.mass
    s_link, t_link = _links(pair, progress), _links(pair.reversed, progress)
    joined = _components(s_link, t_link)
    measures: list[dict[str, float]] = []
    notes: list[str] = []
    if pairs is not None:
        measures.append(pairs.measures(np.concatenate(pair.common_ids)))
        measures.append(pairs.measures(_numbered(joined, mass, len(s_link))[0]))
        joined = pairs.merged(joined, config.max_leak)
    labels, rest = _numbered(joined, mass, len(s_link))
    if pairs is not None:
        measures.append(pairs.measures(labels))
        notes = text.notes
        about["measures"] = measures
    options = {"max_leak": config.max_leak} if pairs is not None else {}
    result = EventMap(
        student=pair.student,
        teacher=pair.teacher,
        student_event=labels[: len(s_link)],
        teacher_event=labels[len(s_link) :],
        student_link=s_link.astype(np.int32),
        teacher_link=t_link.astype(np.int32),
        rest=rest,
        history=(history_step("events", options, **about),),
    )
    result.check()
    return replace(result, reports=(_report(result, pair, measures, notes),))


def _report(
    result: EventMap,
    pair: Pair,
    measures: Sequence[Mapping[str, float]],
    more: Sequence[str],
) -> StageReport:
    alone = [int((links < 0).sum()) for links in (result.student_link, result.teacher_link)]
    counts = {
        "events": result.num_events,
        "unlinked student tokens": alone[0],
        "unlinked teacher tokens": alone[1],
    }
    notes = tokenizer_notes(pair)
    if measures:
        shared, by_bytes, final = measures
        notes.append(
            f"leak {final['leak']:.2%} of the text's shared token boundaries, "
            f"{by_bytes['leak']:.2%} by the bytes alone, {shared['leak']:.2%} for a shared "
            "vocabulary"
        )
        notes.append(
            f"{final['student_bits']:.2f} bits on the student's side, "
            f"{final['teacher_bits']:.2f} on the teacher's; a shared vocabulary keeps "
            f"{shared['student_bits']:.2f} and {shared['teacher_bits']:.2f}"
        )
    return StageReport("events", counts, (*notes, *more))


def _links(pair: Pair, progress: Progress) -> Ids:
    """Return each student token's linked teacher token, int64 `[V_student]`, or −1."""
    rows = pair.tables[0]
    links = np.full(len(rows), -1, np.int64)
    exact = pair.equal_bytes | pair.equal_roles
    links[list(exact)] = list(exact.values())
    ids = rows.text_ids[links[rows.text_ids] < 0]
    pieces, counts = pair.pieces(ids, progress)
    has_any = counts > 0
    links[ids[has_any]] = pieces[(np.cumsum(counts) - counts)[has_any]]
    return links


def _components(s_link: Ids, t_link: Ids) -> Ids:
    """Return the component of each token: student ids, then teacher ids, joined by their links."""
    offset = len(s_link)
    parent = list(range(offset + len(t_link)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    links = np.concatenate([np.where(s_link >= 0, s_link + offset, -1), t_link]).tolist()
    for node, other in enumerate(links):
        if other >= 0:
            a, b = root(node), root(other)
            parent[max(a, b)] = min(a, b)
    return np.array([root(node) for node in range(len(parent))])


class _Pairs(NamedTuple):
    """Pairs of tokens at shared boundaries, as places in one list of both vocabularies."""

    student: Ids
    teacher: Ids
    shares: NDArray[np.float64]  # of all occurrences
    mass: NDArray[np.float64]  # of each token, the mean of what either side gives it

    @staticmethod
    def of(keys: Ids, amounts: Ids, offset: int) -> _Pairs:
        student, teacher = keys >> 32, (keys & 0xFFFFFFFF) + offset
        shares = np.asarray(amounts / amounts.sum(), np.float64)
        both = np.concatenate([student, teacher])
        mass = np.asarray(np.bincount(both, np.tile(shares / 2, 2)), np.float64)
        return _Pairs(student, teacher, shares, mass)

    def measures(self, events: NDArray[Any]) -> dict[str, float]:
        """Measure events: the event of each token, any integers.

        `leak` is how often the two tokens at a shared boundary are in different events; the bits
        are the entropy of a side's events there.
        """
        labels, places = np.unique(events, return_inverse=True)
        a, b = places[self.student], places[self.teacher]
        return {
            "num_events": len(labels),
            "leak": share_of(self.shares, a != b),
            "student_bits": entropy_of(a, self.shares),
            "teacher_bits": entropy_of(b, self.shares),
        }

    def merged(self, events: Ids, max_leak: float) -> Ids:
        """Merge events greedily until at most `max_leak` is left; return each token's event.

        Of all pairs of events that leak, the next is the one with the most leak per bit of entropy
        lost, the mean of both sides' loss. A merge makes others dearer, never cheaper, unless it
        adds up their leaks, which gives them a new entry; so an entry that is out of date can go
        back into the heap with what it is worth now.
        """
        labels, places = np.unique(events, return_inverse=True)
        num = len(labels)
        a, b = places[self.student], places[self.teacher]
        masses = list(
            zip(
                np.bincount(a, self.shares, num).tolist(),
                np.bincount(b, self.shares, num).tolist(),
                strict=True,
            )
        )
        leaks = self._leaks(a, b)
        leak = float(np.fromiter(leaks.values(), np.float64).sum())
        neighbors: dict[int, set[int]] = defaultdict(set)
        for i, j in leaks:
            neighbors[i].add(j)
            neighbors[j].add(i)

        def worth(pair: tuple[int, int]) -> float:
            (p, q), (other_p, other_q) = masses[pair[0]], masses[pair[1]]
            return leaks[pair] / max(_lost(p, other_p) + _lost(q, other_q), 1e-18)

        heap = [(-worth(pair), pair) for pair in leaks]
        heapq.heapify(heap)
        into: dict[int, int] = {}
        while heap and leak > max_leak:
            expected, pair = heapq.heappop(heap)
            if pair not in leaks:
                continue  # one of them was merged
            if -worth(pair) > expected:
                heapq.heappush(heap, (-worth(pair), pair))
                continue
            leak -= leaks.pop(pair)
            i, j = pair if len(neighbors[pair[0]]) >= len(neighbors[pair[1]]) else pair[::-1]
            masses[i] = masses[i][0] + masses[j][0], masses[i][1] + masses[j][1]
            into[j] = i
            neighbors[i].remove(j)
            for other in sorted(neighbors.pop(j) - {i}):
                new = min(i, other), max(i, other)
                leaks[new] = leaks.get(new, 0.0) + leaks.pop((min(j, other), max(j, other)))
                neighbors[other] = neighbors[other] - {j} | {i}
                neighbors[i].add(other)
                heapq.heappush(heap, (-worth(new), new))
        final = list(range(num))
        for j, i in reversed(into.items()):  # the event that took it in was itself taken in later
            final[j] = final[i]
        merged: Ids = labels[np.array(final)[places]]
        return merged

    def _leaks(self, a: Ids, b: Ids) -> dict[tuple[int, int], float]:
        """Return how often two tokens are in each pair of events, the lower one first.

        `a` and `b` are the events of the student's and the teacher's tokens, int64 `[pairs]`.
        """
        apart = a != b
        low, high = np.minimum(a, b)[apart], np.maximum(a, b)[apart]
        keys, inverse = np.unique(low << 32 | high, return_inverse=True)
        amounts = np.bincount(inverse, self.shares[apart])
        events = zip((keys >> 32).tolist(), (keys & 0xFFFFFFFF).tolist(), strict=True)
        return dict(zip(events, amounts.tolist(), strict=True))


def _lost(p: float, q: float) -> float:
    """Return the entropy that is lost where two masses become one, in bits."""
    return sum(x * log2(x) for x in (p + q,) if x) - sum(x * log2(x) for x in (p, q) if x)


def _numbered(
    joined: Ids, mass: NDArray[np.float64], offset: int
) -> tuple[NDArray[np.int32], int | None]:
    """Put what one side alone has into one event, and number all by falling mass."""
    labels, first, places = np.unique(joined, return_index=True, return_inverse=True)
    num, mass = len(labels), np.pad(mass, (0, len(places) - len(mass)))
    weight = np.bincount(places, mass, num)
    order = np.lexsort((first, -weight))  # labels are the lowest token, students before teachers
    has = np.stack([np.bincount(part, minlength=num) > 0 for part in np.split(places, [offset])])
    alone = np.logical_not(has.all(0))
    rest = None
    if alone.any():
        both = has[:, alone].any(1).all()
        rest = int(np.flatnonzero(alone)[0] if both else order[~alone[order]][-1])
        places = np.where(alone[places], rest, places)
        weight = np.bincount(places, mass, num)
        order = np.lexsort((first, -weight))
    used = order[np.isin(order, places)]
    number = np.full(num, -1, np.int32)
    number[used] = np.arange(len(used), dtype=np.int32)
    return number[places], None if rest is None else int(number[rest])
