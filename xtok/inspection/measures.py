"""Measures of maps on text, and verdicts: good, usable or bad."""

from __future__ import annotations

from dataclasses import dataclass

from xtok.building.counting.pair_text import PairText
from xtok.building.counting.smoothing import share_of
from xtok.inspection.bootstrap import Interval
from xtok.inspection.results import GOOD_LEAK, MOST_LEAK, Grade, leak_grade
from xtok.loss_names import LOSS_INFO, BuildLoss
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers.display import percent
from xtok.tokenizers.pairs import require_table

SMALLEST_GAP = 0.02
"""Minimum gap between recipe and floor, in nats. If the gap is smaller, `closed` is omitted."""

# Limits of the verdicts, from `scripts/map_values.py` (six pairs, twenty maps). Over chunks,
# counted maps close 0.70 to 0.72 of the gap, default maps of `build` -0.15 to 0.00, and maps with
# too few pieces or in another token form -0.32 to -0.96. Event maps leak 0.0 % to 1.7 %.
GOOD_CLOSED, LEAST_CLOSED = 0.5, -0.2
MOST_EMPTY = 0.01
"""Maximum share of the text's student tokens with an empty row. Above this limit, a map is bad."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The results of any kind of map on one group of text."""

    name: str  # name of the map
    group: str  # name or path of a file, or `all` for all text
    documents: int
    starts: int  # number of shared token boundaries (bytes at which tokens of both sides begin)


@dataclass(frozen=True, kw_only=True)
class MapLosses:
    """The mean loss, in nats, of a map and of two reference maps with equally long rows."""

    cross_entropy: Interval
    recipe: float
    floor: float  # loss of the best map for this text
    closed: float | None  # position between recipe (0) and floor (1); None if the two are too close


@dataclass(frozen=True, kw_only=True)
class MapMeasures(Measures):
    """Measures of a projection map."""

    coverage: float  # share of starts at which the weight is above 0
    top_1: float  # share of starts at which the row's heaviest entry is the teacher's token
    at_starts: MapLosses
    over_chunks: MapLosses  # averaged over chunks, like P-KL

    def losses(self, loss: BuildLoss) -> MapLosses:
        """Return the losses that decide the verdict for a training loss."""
        return self.over_chunks if loss == "p-kl" else self.at_starts


@dataclass(frozen=True, kw_only=True)
class EventMapMeasures(Measures):
    """Measures of an event map. Entropies are in bits, at shared boundaries."""

    leak: float  # share of boundaries at which the two tokens have different events
    shared_leak: float  # leak of a partition into shared tokens and a rest
    student_bits: float  # entropy of the student's events
    teacher_bits: float
    student_token_bits: float  # entropy of the student's tokens
    teacher_token_bits: float
    kept: float  # smaller event entropy, divided by the smaller token entropy


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a map is good for a text, and the reason."""

    name: str  # name of the map
    grade: Grade  # `good`, `usable` or `bad`
    reason: str
    numbers: str  # measures that determine the verdict

    def __str__(self) -> str:
        return f"{self.name} is {self.grade}: {self.reason} ({self.numbers})"


def map_verdict(m: MapMeasures, loss: BuildLoss = "p-kl", empty: float = 0.0) -> Verdict:
    """Grade a projection map by its results on all text.

    For P-KL, the losses over chunks decide; for other losses, the losses at shared boundaries.
    `empty` is the share of the text's student tokens with an empty row.
    """
    place = "over chunks" if loss == "p-kl" else "at shared boundaries"
    losses = m.losses(loss)
    value, recipe, closed = losses.cross_entropy.value, losses.recipe, losses.closed or 0.0
    is_close = losses.closed is None
    is_worse = closed < LEAST_CLOSED or (is_close and value > recipe + SMALLEST_GAP)
    remark = "a counted map usually closes 70% of the gap to the best map"
    gap = f"the map closes {percent(closed, 0)} of the gap from X-Token's recipe to the best map"
    numbers = f"{LOSS_INFO[loss].label}: {value:.3f} nats {place}; X-Token's recipe {recipe:.3f}, "
    numbers += f"the best map {losses.floor:.3f}; coverage {percent(m.coverage)}"
    rules: list[tuple[bool, Grade, str]] = [
        (empty > MOST_EMPTY, "bad", f"{percent(empty)} of the text's tokens have an empty row"),
        (is_worse, "bad", "the map predicts the teacher's tokens worse than X-Token's recipe"),
        (is_close, "good", "the map and X-Token's recipe are close to the best map"),
        (closed >= GOOD_CLOSED, "good", gap),
        # Gold and H-KL require exact rows, which are not better than the recipe.
        (loss != "p-kl", "good", "the map predicts teacher tokens about as well as the recipe"),
        (closed < -LEAST_CLOSED, "usable", f"the map is about as good as the recipe; {remark}"),
        (True, "usable", f"{gap}; {remark}"),
    ]
    grade, reason = next((grade, reason) for holds, grade, reason in rules if holds)
    return Verdict(name=m.name, grade=grade, reason=reason, numbers=numbers)


def event_verdict(m: EventMapMeasures) -> Verdict:
    """Grade an event map by its leak (see `EventMap`) on all text."""
    grade = leak_grade(m.leak)
    reason = f"the map leaks at {percent(m.leak, 2)} of the shared boundaries; up to "
    reason += f"{percent(GOOD_LEAK, 0)} is normal, more than {percent(MOST_LEAK, 0)} is too much"
    numbers = f"keeps {percent(m.kept)} of the bits"
    return Verdict(name=m.name, grade=grade, reason=reason, numbers=numbers)


def empty_share(m: ProjectionMap, text: PairText | None) -> float:
    """Return the share of the text's student tokens with an empty row; 0 without text."""
    if text is None:
        return 0.0
    empty = (require_table(m.student).lengths > 0) & (m.row_kind == RowKind.EMPTY)
    return share_of(text.tokens[0], empty)
