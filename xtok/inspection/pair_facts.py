"""All that is said of two tokenizers: what their vocabularies share, and what a text adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import PairCounts, TextEncoder, boundary_keys
from xtok.counting.measures import entropy_of, kept_of, share_of
from xtok.counting.texts import find_shards
from xtok.progress import TextProgress
from xtok.vocab.classes import num_digits
from xtok.vocab.pair import Pair
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    from xtok.maps.events import EventMap
    from xtok.tokenizers import Tokenizer


@dataclass(frozen=True)
class Shared:
    """How many each side has, and how many are the same."""

    student: int
    teacher: int
    both: int


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What a text says of a pair."""

    files: tuple[str, ...]
    num_bytes: int
    tokens: Shared  # `both`: the same token at the same place
    boundaries: int  # shared token boundaries
    leak: float  # share of them where one token is of both vocabularies, the other another one
    bits: tuple[float, float]  # entropy of shared tokens and a rest, of student and teacher
    # What one side's token leaves open of the other's at a boundary, in bits: of the teacher's
    # given the student's, and of the student's given the teacher's.
    open_bits: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class EventFacts:
    """A pair's events by their bytes alone; `EventMapMeasures` has leak and kept."""

    num_events: int
    leak: float | None = None  # None without text
    kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """What two vocabularies have in common, and what a text says of it."""

    student: str
    teacher: str
    same: bool  # whether both are one vocabulary
    vocabulary: Shared  # different byte strings
    shared: int  # student tokens whose bytes the teacher has
    student_share: float  # these, of the student's tokens with bytes
    numbers: Shared  # multi-digit tokens; `both`: the student's that the teacher has
    missing_numbers_text: float | None  # share of the text that the student's others are
    digits: tuple[int, int]  # the most digits in a token, of student and teacher
    spaces: tuple[int, int]  # the longest token of spaces alone
    roles_alone: tuple[str, ...]  # roles none of whose tokens has one, reserved tokens aside
    text: TextFacts | None
    events: EventFacts | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCounts:
    """How often tokens occur in a text, and pairs of them at shared token boundaries."""

    files: tuple[str, ...]
    num_bytes: int
    num_documents: int
    tokens: tuple[NDArray[np.int64], ...]  # `[V]` for each tokenizer
    keys: NDArray[np.int64]  # pairs of the first two tokenizers, as `PairCounts` has them
    amounts: NDArray[np.int64]


def count_tokens(
    texts: str | Path | Sequence[str | Path],
    tokenizers: Sequence[Tokenizer],
    field: str,
    progress: TextProgress,
) -> TextCounts:
    """Read text once, and count the tokens of two tokenizers or more, and pairs of the first two.

    Raises:
        XtokError: if a text cannot be read.
    """
    shards = find_shards(texts, field)
    counts = [np.zeros(len(one.table), np.int64) for one in tokenizers]
    pairs, num_bytes, num_documents = PairCounts(), 0, 0
    with (
        TextEncoder(*tokenizers) as encoder,
        progress("reading the text", sum(shard.size for shard in shards)) as advance,
    ):
        for batch in encoder.read(shards, advance):
            student, teacher = batch.sides[:2]
            starts = encoder.boundaries(student, teacher)
            pairs.add(boundary_keys(student, teacher, starts), np.ones(1, np.int64))
            for count, side in zip(counts, batch.sides, strict=True):
                count += np.bincount(side.ids, minlength=len(count))
            num_bytes += starts.bytes_of(batch.texts)[0]
            num_documents += len(batch.texts)
    keys, amounts = pairs.arrays()
    return TextCounts(
        files=tuple(path.name for path in dict.fromkeys(shard.path for shard in shards)),
        num_bytes=num_bytes,
        num_documents=num_documents,
        tokens=tuple(counts),
        keys=keys,
        amounts=amounts,
    )


def pair_facts(
    pair: Pair,
    counts: TextCounts | None = None,
    events: EventMap | None = None,
) -> PairFacts:
    """Compare two vocabularies, and measure them and their events on a text if it was counted."""
    (rows, columns), same_bytes, same_role = pair.tables, pair.equal_bytes, pair.equal_roles
    digits = [num_digits(table) for table in (rows, columns)]
    ids_of_numbers = np.flatnonzero(digits[0] > 1)
    missing = [i for i in ids_of_numbers.tolist() if i not in same_bytes]
    strings = rows.canonical_ids().keys(), columns.canonical_ids().keys()
    missing_text = None
    if counts is not None:
        missing_text = float(counts.tokens[0][missing].sum() / max(1, counts.tokens[0].sum()))
    return PairFacts(
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        same=pair.is_same,
        vocabulary=Shared(len(strings[0]), len(strings[1]), len(strings[0] & strings[1])),
        shared=len(same_bytes),
        student_share=len(same_bytes) / max(1, len(rows.text_ids)),
        numbers=Shared(
            len(ids_of_numbers), int((digits[1] > 1).sum()), len(ids_of_numbers) - len(missing)
        ),
        missing_numbers_text=missing_text,
        digits=(_most_digits(digits[0]), _most_digits(digits[1])),
        spaces=(_longest_spaces(rows), _longest_spaces(columns)),
        roles_alone=tuple(
            role
            for role, ids in rows.roles.items()
            if role != "reserved" and not any(i in same_role or i in same_bytes for i in ids)
        ),
        text=None if counts is None else _text_facts(pair, counts),
        events=None if events is None else _event_facts(events, counts),
    )


def _text_facts(pair: Pair, counts: TextCounts) -> TextFacts:
    keys, amounts = counts.keys, counts.amounts
    s, t = keys >> 32, keys & 0xFFFFFFFF
    a, b = pair.common_ids[0][s], pair.common_ids[1][t]
    of_pairs = entropy_of(keys, amounts)
    return TextFacts(
        files=counts.files,
        num_bytes=counts.num_bytes,
        tokens=Shared(
            int(counts.tokens[0].sum()),
            int(counts.tokens[1].sum()),
            int(amounts[(a >= 0) & (a == b)].sum()),
        ),
        boundaries=int(amounts.sum()),
        leak=share_of(amounts, a != b),
        bits=(entropy_of(a, amounts), entropy_of(b, amounts)),
        open_bits=(of_pairs - entropy_of(s, amounts), of_pairs - entropy_of(t, amounts)),
    )


def _event_facts(events: EventMap, counts: TextCounts | None) -> EventFacts:
    if counts is None:
        return EventFacts(num_events=events.num_events)
    s, t = counts.keys >> 32, counts.keys & 0xFFFFFFFF
    a, b = events.student_event[s], events.teacher_event[t]
    return EventFacts(
        num_events=events.num_events,
        leak=share_of(counts.amounts, a != b),
        kept=kept_of((a, b), (s, t), counts.amounts),
    )


def _most_digits(digits: NDArray[np.int64]) -> int:
    """Return the most digits that a token has; a length of fewer than ten tokens is an accident."""
    often = np.bincount(digits)
    return max((n for n in range(1, len(often)) if often[n] >= (10 if n > 1 else 1)), default=0)


def _longest_spaces(table: TokenTable) -> int:
    return max((len(t) for t in table.tokens() if t and not t.strip(b" ")), default=0)
