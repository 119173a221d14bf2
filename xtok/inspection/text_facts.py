"""What text says of a pair of tokenizers, whatever the map: how often tokens occur and agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import PairCounts, PairEncoder, batches, boundary_keys
from xtok.counting.measures import entropy_of, kept_of, share_of
from xtok.counting.texts import ShardReader, find_texts, shards
from xtok.inspection.samples import Sentence, SentencePicker
from xtok.maps.event_map import EventMap
from xtok.progress import TextProgress
from xtok.stages.events import shared_vocabulary
from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What two sides have in common: the total of each, and how much is the same."""

    student: int
    teacher: int
    both: int


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What text says of a pair of tokenizers.

    Attributes:
        files: names of the text files.
        num_bytes: of text.
        tokens: tokens of each side, and those that both sides have at the same place.
        boundaries: shared token boundaries.
        leak: share of the boundaries at which one side's token is shared by both vocabularies, and
            the other side's is another one: what a comparison of shared tokens and a rest confuses.
        bits: entropy of these events on the student's side and on the teacher's, in bits.
        open_bits: what one side's token leaves open of the other's at a boundary, in bits: of the
            teacher's given the student's, and of the student's given the teacher's.
    """

    files: tuple[str, ...]
    num_bytes: int
    tokens: Shared
    boundaries: int
    leak: float
    bits: tuple[float, float]
    open_bits: tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCounts:
    """How often each token occurs, int64 `[V]` of each side; sentences to show; the facts.

    `pairs` are the tokens at shared boundaries: student ids, teacher ids, and how often.
    """

    student: NDArray[np.int64]
    teacher: NDArray[np.int64]
    pairs: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
    sentences: tuple[Sentence, ...]
    documents: int
    facts: TextFacts


def count_text(
    texts: str | Path | Sequence[str | Path],
    student: Tokenizer,
    teacher: Tokenizer,
    field: str,
    progress: TextProgress,
) -> TextCounts:
    """Read text once, and count.

    Args:
        texts: paths and globs.
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        field: the field or column that holds the text.
        progress: called for the text.
    """
    paths = find_texts(texts)
    picker, pairs, num_bytes, documents = SentencePicker(), PairCounts(), 0, 0
    counts = [np.zeros(len(side.table), np.int64) for side in (student, teacher)]
    total = sum(path.stat().st_size for path in paths)
    with PairEncoder(student, teacher) as encoder, progress("reading", total) as advance:
        for path in paths:
            for shard in shards(path, field):
                consumed = 0
                reader = ShardReader(shard)
                for batch in batches(reader):
                    for document in batch:
                        picker.look(document, path.name)
                    sides = encoder.encode(batch)
                    for count, side in zip(counts, sides, strict=True):
                        count += np.bincount(side.ids, minlength=len(count))
                    starts = encoder.boundaries(*sides)
                    pairs.add(boundary_keys(*sides, starts), np.ones(1, np.int64))
                    num_bytes += starts.bytes_of(batch)[0]
                    documents += len(batch)
                    advance(reader.consumed - consumed, len(sides[0].ids))
                    consumed = reader.consumed
                advance(shard.size - consumed, 0)
    keys, amounts = pairs.arrays()
    s, t = keys >> 32, keys & 0xFFFFFFFF
    shared = shared_vocabulary(student.table, teacher.table)
    a, b = shared[0][s], shared[1][t]
    facts = TextFacts(
        files=tuple(path.name for path in paths),
        num_bytes=num_bytes,
        tokens=Shared(
            student=int(counts[0].sum()),
            teacher=int(counts[1].sum()),
            both=int(amounts[(a >= 0) & (a == b)].sum()),
        ),
        boundaries=int(amounts.sum()),
        leak=share_of(amounts, a != b),
        bits=(entropy_of(a, amounts), entropy_of(b, amounts)),
        open_bits=(
            entropy_of(keys, amounts) - entropy_of(s, amounts),
            entropy_of(keys, amounts) - entropy_of(t, amounts),
        ),
    )
    return TextCounts(
        student=counts[0],
        teacher=counts[1],
        pairs=(s, t, amounts.astype(np.float64)),
        sentences=picker.sentences,
        documents=documents,
        facts=facts,
    )


@dataclass(frozen=True, kw_only=True)
class EventFacts:
    """A pair's events by the bytes alone: how many, and leak and kept (see `evaluate_events`).

    `leak` and `kept` are None without text.
    """

    num_events: int
    leak: float | None = None
    kept: float | None = None

    @staticmethod
    def of(events: EventMap, counts: TextCounts | None) -> EventFacts:
        """Measure events on counted text, if there is any."""
        if counts is None:
            return EventFacts(num_events=events.num_events)
        s, t, amounts = counts.pairs
        a, b = events.student_event[s], events.teacher_event[t]
        return EventFacts(
            num_events=events.num_events,
            leak=share_of(amounts, a != b),
            kept=kept_of((a, b), (s, t), amounts),
        )


MOST_LEAK = 0.05
"""Above this share of boundaries, events of the bytes alone are not recommended."""


def loss_on_text(text: TextFacts, events: EventFacts) -> tuple[str, str]:
    """Return which loss suits a pair, and why, by what its text says.

    In docs/guides/study.md, event KL did best beside cross-entropy whichever side had the longer
    tokens; a map did better in the direction that leaves less open.
    """
    forward, back = text.open_bits
    of_map = "P-KL" if forward <= back else "teacher-to-student KL"
    leak = events.leak or 0.0
    why = (
        f"events leak at {leak:.1%} of the text's shared boundaries, shared tokens and a rest at "
        f"{text.leak:.1%}"
    )
    with_map = f"student → teacher leaves {forward:.2f} bits open, teacher → student {back:.2f}"
    if leak > MOST_LEAK:
        return of_map, f"{with_map}; {why}, unless xtok events --text merges them"
    return "event KL", f"{why}; of maps, that for {of_map}: {with_map}"
