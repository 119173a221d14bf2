"""Recommend a loss, a map file and the next command.

The advice follows the measurements in docs/guides/choosing.md: for every share of equal tokens,
event KL together with cross-entropy is at least as good as all other losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, get_args

import numpy as np

from xtok.inspection.pair_facts import PairFacts
from xtok.inspection.results import MOST_LEAK, Grade, leak_grade
from xtok.loss_names import BuildLoss, LossName
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.suitability import H_KL_THRESHOLD, exact_rows, is_counted, p_kl_problems
from xtok.tokenizers.display import percent, plural
from xtok.tokenizers.pairs import require_table

if TYPE_CHECKING:
    from xtok.inspection.measures import Verdict

Judgement: TypeAlias = tuple[Grade, str]
"""A grade, and a sentence with the reason."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation for training with a pair of tokenizers."""

    loss: str  # recommended together with cross-entropy
    map_loss: str | None  # for trainers that require a map; None if no map is needed
    sentence: str
    commands: tuple[tuple[str, ...], ...]  # commands that create the map files
    others: tuple[str, ...] = ()  # one sentence about each other loss


OTHER_LOSSES = (
    "CSD (for NeMo-RL's draft 4177) requires both models' logits, and the spelling map from xtok "
    "events --for csd.",
    "ALM requires only the teacher's log-probabilities of the text, and no map file.",
)
"""Requirements of the other losses for two tokenizers."""

USE_PLAIN_KL = "Use plain KL: both models have the same vocabulary, so no map is needed."

WHEN_TO_DISTIL = (
    "A teacher helps if you have little text, if you train on the same text again, or if its "
    "predictions are stored. Otherwise, training on new text for the same time is better."
)
"""When to use a teacher; docs/study/index.md contains the measurements."""


def advise(
    pair: PairFacts, names: Sequence[str] = (), maps: Sequence[ProjectionMap] = ()
) -> Advice:
    """Recommend a loss for a pair.

    `names` are the models' names in the commands (default: the model ids). If `maps` contains a map
    for the loss, the advice contains no command that builds such a map.
    """
    if pair.same:
        columns = f"Compare the first {pair.num_ids:,} columns; the other columns are padding."
        sentence = f"{USE_PLAIN_KL} {columns}"
        return Advice(loss="plain KL", map_loss=None, sentence=sentence, commands=())
    student, teacher = names or (pair.student, pair.teacher)
    events: tuple[str, ...] = "xtok", "events", student, teacher
    build: tuple[str, ...] = "xtok", "build", student, teacher, "--for", "p-kl"
    measured = ""
    if pair.text is not None:
        forward, back = pair.text.conditional_entropy
        lost_share = 0.0 if pair.text.left_out is None else pair.text.left_out.share
        equal = f"the {1 - lost_share:.1%} of this text for which both sides have the same bytes"
        part = equal if lost_share > 0.01 else "this text"
        measured = (
            f" On {part}, an event map leaks at {percent(pair.text.event_leak)} of the shared "
            f"token boundaries. A projection map leaves {forward:.2f} bits of uncertainty about "
            f"the teacher's token, and {back:.2f} bits about the student's token."
        )
    sentence = f"Use event KL, or P-KL if your trainer only supports projection maps.{measured}"
    has_map = any(not p_kl_problems(m) for m in maps)
    return Advice(
        loss="event KL",
        map_loss="P-KL",
        sentence=sentence,
        commands=(events,) if has_map else (events, build),
        others=OTHER_LOSSES,
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A grade for using a map with a loss, and a sentence with the reason."""

    loss: LossName
    grade: Grade
    why: str


def fits(
    projection: ProjectionMap,
    pair: PairFacts,
    *,
    failed: Sequence[str] = (),
    verdict: Verdict | None = None,
) -> tuple[Fit, ...]:
    """Grade a map for each loss; for event KL, grade the pair.

    `failed` contains the names of failed checks of `verify`. `verdict` is the verdict for P-KL, or
    None if the map was not measured on text.
    """
    is_text = require_table(projection.student).lengths > 0
    exact = exact_rows(projection)
    heavy = np.zeros(len(is_text), np.bool_)
    is_heavy = ~projection.is_slot & (projection.weights >= H_KL_THRESHOLD)
    heavy[projection.student_ids[is_heavy]] = True
    gold = _judge_gold(pair, exact)
    judged: dict[LossName, Judgement] = {
        "p-kl": p_kl_fit(projection, verdict),
        "gold": gold,
        "h-kl": _judge_h_kl(gold, exact, float(heavy[is_text].mean()) if is_text.any() else 0.0),
        "event-kl": _judge_event_kl(pair),
    }
    for loss in get_args(BuildLoss) if failed else ():
        judged[loss] = "bad", f"The map fails these checks: {', '.join(failed)}."
    return tuple(Fit(loss=loss, grade=grade, why=why) for loss, (grade, why) in judged.items())


def p_kl_fit(m: ProjectionMap, verdict: Verdict | None = None) -> Judgement:
    """Grade a map for P-KL by its rows and, if the map was measured on text, by the verdict."""
    if verdict is not None and verdict.grade == "bad":
        return "bad", _sentence(verdict.reason)
    if problems := p_kl_problems(m):
        return "usable", _sentence("; ".join(problems))
    rows = "All rows are counted probabilities" if is_counted(m) else "All rows are probabilities"
    measured = "" if verdict is None else f"; {verdict.reason}"
    grade: Grade = "good" if verdict is None else verdict.grade
    return grade, f"{rows}; no row is exact or has a slot{measured}."


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _judge_gold(pair: PairFacts, exact: int) -> Judgement:
    if not exact:
        return "bad", "The loss compares rows with equal bytes, but the map has no such rows."
    missing = pair.numbers.only_student
    if missing > pair.numbers.student / 2:
        summary = f"{missing:,} of {plural(pair.numbers.student, 'multi-digit ASCII number')}"
        return "usable", f"{summary} have no exact counterpart, so they are compared by rank."
    if pair.text is None:
        rows = plural(exact, "row")
        return "note", (
            f"The loss compares {rows} with equal bytes. Pass text to measure the error rate."
        )
    leak = pair.text.leak
    why = f"The loss compares wrong shared tokens at {percent(leak)} of this text's boundaries."
    return "good" if leak <= MOST_LEAK else "usable", why


def _judge_h_kl(gold: Judgement, exact: int, heavy: float) -> Judgement:
    if heavy < 0.5:
        few = f"Only {percent(heavy, 0)} of the rows"
        return "bad", f"{few} have an entry of at least {H_KL_THRESHOLD}, which H-KL requires."
    if not exact:
        pairs = f"{percent(heavy, 0)} of the rows have an entry of at least {H_KL_THRESHOLD}"
        return "usable", f"No rows have equal bytes; {pairs}."
    return gold


def _judge_event_kl(pair: PairFacts) -> Judgement:
    if pair.same:
        return "note", "With one vocabulary, use plain KL, which needs no map."
    if pair.text is None:
        return "good", "Event KL requires an event map. Pass text and models to measure the leak."
    return (
        leak_grade(pair.text.event_leak),
        "Event KL requires an event map from xtok events. On this text, the "
        f"{pair.text.num_events:,} events leak at {percent(pair.text.event_leak)} of the "
        f"boundaries and keep {percent(pair.text.event_kept, 0)} of the bits.",
    )
