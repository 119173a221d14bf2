"""Whether a map suits each loss, and what stands out: sentences with numbers, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from xtok.config import Loss
from xtok.inspection.evaluate import MapMeasures
from xtok.inspection.text_facts import EventFacts, Shared, TextFacts
from xtok.vocab.classes import suited_loss
from xtok.vocab.display import plural

Level: TypeAlias = Literal["bad", "care", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "care", "note", "good")
_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that stands out.

    Attributes:
        level: how bad it is.
        number: the figure that it is about.
        text: a sentence.
        place: the part of the page that shows more.
        map_name: of two maps, the one that it is about; None if it is about the pair.
    """

    level: Level
    number: str
    text: str
    place: str
    map_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a map suits a loss, and why, in a sentence; event KL takes the pair's events."""

    loss: Loss | Literal["event-kl"]
    level: Level
    why: str


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """What the verdict takes of a pair.

    Attributes:
        vocabulary: byte strings of both sides.
        student_share: of the student's tokens with bytes, those that the teacher has.
        numerals: the student's multi-digit tokens.
        numerals_shared: those that the teacher has.
        numerals_text: the share of the text's student tokens that the others are.
        special: the student's special tokens.
        special_alone: those without a counterpart.
        roles_alone: the roles among them, but for reserved tokens.
        text: what the text says; None without text.
        events: of both tokenizers; None without them.
    """

    vocabulary: Shared
    student_share: float
    numerals: int
    numerals_shared: int
    numerals_text: float
    special: int
    special_alone: int
    roles_alone: tuple[str, ...]
    text: TextFacts | None
    events: EventFacts | None


@dataclass(frozen=True, kw_only=True)
class MapNumbers:
    """What the verdict takes of a map.

    Attributes:
        empty: rows without an entry, of tokens that stand for text.
        empty_text: the share of the text's student tokens that these are.
        exact: exact rows of tokens that stand for text.
        exact_share: these, of all tokens that stand for text.
        heavy_share: of the same, those with an entry of at least 0.6, which H-KL takes as a pair.
        slots: rows with a scale slot.
        slot_weight: the least share of such a row that its slot takes.
        is_counted: whether weights were counted; None if nothing tells.
        unreached: teacher tokens that no row leads to.
        teacher_tokens: of so many.
        failed: checks of `verify` that failed.
        measures: over all text; None without text.
        lost: the share of the text that the two sides spell differently.
    """

    empty: int
    empty_text: float
    exact: int
    exact_share: float
    heavy_share: float
    slots: int
    slot_weight: float
    is_counted: bool | None
    unreached: int
    teacher_tokens: int
    failed: tuple[str, ...]
    measures: MapMeasures | None
    lost: float


def fits(pair: PairFacts, numbers: MapNumbers) -> tuple[Fit, ...]:
    """Return whether a map suits each loss, and the pair event KL."""
    events = () if pair.events is None else (_event_kl(pair.events),)
    if numbers.failed:
        why = f"The map is not in order: {', '.join(numbers.failed)}."
        broken = (Fit(loss=loss, level="bad", why=why) for loss in get_args(Loss))
        return (*broken, *events)
    return (_p_kl(numbers), *_pairs(pair, numbers), *events)


def _event_kl(events: EventFacts) -> Fit:
    what = f"It needs no map: xtok events cuts the vocabularies into {events.num_events:,} events"
    if events.leak is None or events.kept is None:
        return Fit(loss="event-kl", level="note", why=f"{what}; text tells their leak.")
    why = f"{what}, which leak {events.leak:.1%} and keep {events.kept:.0%} of the bits here."
    is_good = events.leak <= 0.01 and events.kept >= 0.96
    level: Level = "good" if is_good else "care" if events.leak <= 0.05 else "bad"
    return Fit(loss="event-kl", level=level, why=why)


def _p_kl(n: MapNumbers) -> Fit:
    closed = None if n.measures is None else n.measures.chunk_closed
    problems = []
    if n.slots:
        problems.append(f"a scale slot takes {n.slot_weight:.0%} of {plural(n.slots, 'row')}")
    if n.exact:
        problems.append(
            f"{plural(n.exact, 'exact row')} put all weight on one token, though the teacher may "
            "begin a longer one there"
        )
    if n.is_counted is False:
        problems.append("weights were not counted")
    if n.measures is not None and closed is not None and closed.value < 0:
        value, recipe = n.measures.chunk_cross_entropy.value, n.measures.chunk_recipe
        values = f"{value:.3f} nats against {recipe:.3f}"
        worse = f"On this text it is worse than X-Token's recipe: {values} over chunks."
        return Fit(loss="p-kl", level="bad", why=worse)
    if n.empty_text > 0.01:
        empty = f"{n.empty_text:.1%} of the text's tokens have an empty row."
        return Fit(loss="p-kl", level="bad", why=empty)
    if problems:
        return Fit(loss="p-kl", level="care", why=_sentence("; ".join(problems)))
    rows = "Rows are counted probabilities" if n.is_counted else "Rows are probabilities"
    measured = (
        ""
        if closed is None
        else f"; they close {closed.value:.0%} of the way to this text's best map"
    )
    return Fit(loss="p-kl", level="good", why=f"{rows}, without exact rows or slots{measured}.")


def _pairs(pair: PairFacts, n: MapNumbers) -> tuple[Fit, Fit]:
    suited, why = suited_loss(pair.student_share, pair.numerals, pair.numerals_shared)
    if not n.exact:
        gold = Fit(loss="gold", level="bad", why="It compares exact rows, and the map has none.")
    elif suited == "P-KL":
        gold = Fit(loss="gold", level="care", why=_sentence(f"{why}: they are compared by rank"))
    else:
        gold = Fit(loss="gold", level="good", why=_sentence(why))
    if n.heavy_share < 0.5:
        heavy = f"Only {n.heavy_share:.0%} of the rows have an entry of 0.6, which makes a pair."
        return gold, Fit(loss="h-kl", level="bad", why=heavy)
    if not n.exact:
        heavy = f"No exact rows; {n.heavy_share:.0%} of the rows have an entry of 0.6 for a pair."
        return gold, Fit(loss="h-kl", level="care", why=heavy)
    return gold, Fit(loss="h-kl", level=gold.level, why=gold.why)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def findings(pair: PairFacts, maps: Sequence[tuple[str, MapNumbers]]) -> tuple[Finding, ...]:
    """Return three to six findings on a pair and its maps, by name, the worst first."""
    of_maps = [
        Finding(
            level=level,
            number=number,
            text=text,
            place=place,
            map_name=name if len(maps) > 1 else None,
        )
        for name, numbers in maps
        for level, number, text, place in _of_map(numbers)
    ]
    measured = [one for one in of_maps if one.place == "quality"]
    others = [one for one in of_maps if one.place != "quality"]
    found = [*measured, *_of_pair(pair, maps[0][1].lost), *others]
    found.sort(key=lambda one: LEVELS.index(one.level))
    return tuple(found[:_MOST])


def _of_pair(pair: PairFacts, lost: float) -> list[Finding]:
    found = []
    missing = pair.numerals - pair.numerals_shared
    if missing:
        in_text = f"; they are {pair.numerals_text:.2%} of the text" if pair.text else ""
        found.append(
            Finding(
                level="care" if missing > pair.numerals / 2 else "note",
                number=f"{missing:,}",
                text=f"of {plural(pair.numerals, 'multi-digit number')} of the student have no "
                f"exact counterpart{in_text}.",
                place="classes",
            )
        )
    share = pair.student_share
    same = "of the student's vocabulary is in the teacher's, byte for byte"
    if pair.text:
        tokens = pair.text.tokens
        text_share = tokens.both / max(1, tokens.student)
        same += f"; {text_share:.0%} of the text's tokens are the same token at the same place"
        share = min(share, text_share)
    found.append(
        Finding(
            level="good" if share >= 0.5 else "care",
            number=f"{pair.student_share:.0%}",
            text=f"{same}.",
            place="pair",
        )
    )
    if pair.special_alone:
        roles = [role.replace("_", " ") for role in pair.roles_alone]
        named = f" Among them: {', '.join(roles[:4])}{', …' if len(roles) > 4 else ''}."
        found.append(
            Finding(
                level="care" if roles else "note",
                number=f"{pair.special_alone:,}",
                text=f"of {plural(pair.special, 'special token')} of the student have no partner, "
                f"and empty rows.{named if roles else ' All are reserved, or have no known role.'}",
                place="classes",
            )
        )
    if lost > 0:
        found.append(
            Finding(
                level="bad" if lost > 0.05 else "care",
                number=f"{lost:.1%}",
                text="of the text is spelled differently by the two tokenizers, and not measured.",
                place="quality",
            )
        )
    if pair.text and pair.text.leak > 0.1:
        found.append(
            Finding(
                level="care",
                number=f"{pair.text.leak:.0%}",
                text="of the shared token boundaries leak if only shared tokens are compared.",
                place="quality",
            )
        )
    return found


def _of_map(n: MapNumbers) -> list[tuple[Level, str, str, str]]:
    found: list[tuple[Level, str, str, str]] = []
    if n.failed:
        checks = ", ".join(n.failed)
        number = f"{len(n.failed):,}"
        found.append(("bad", number, f"of verify's checks failed: {checks}.", "provenance"))
    if n.empty:
        in_text = "" if n.measures is None else f"; they are {n.empty_text:.2%} of the text"
        level: Level = "bad" if n.empty_text > 0.01 else "care" if n.empty_text > 0 else "note"
        words = "token has an empty row" if n.empty == 1 else "tokens have an empty row"
        found.append((level, f"{n.empty:,}", f"{words}{in_text}.", "classes"))
    else:
        found.append(("good", "0", "tokens have an empty row.", "classes"))
    if n.measures is not None:
        found.append(_measured(n, n.measures))
    if n.slots:
        text = f"rows give {n.slot_weight:.0%} of their weight to a scale slot, which has no token."
        found.append(("note", f"{n.slots:,}", text, "classes"))
    share = n.unreached / max(1, n.teacher_tokens)
    level = "good" if share < 0.01 else "note" if share < 0.5 else "care"
    text = "of the teacher's tokens are in no row: the map never predicts them."
    if not n.unreached:
        text = "of the teacher's tokens are in no row: the map can predict all of them."
    number = f"{share:.0%}" if share >= 0.01 else f"{n.unreached:,}"
    found.append((level, number, text, "classes"))
    return found


def _measured(n: MapNumbers, m: MapMeasures) -> tuple[Level, str, str, str]:
    """Say how near a map comes to the best: over chunks, or with exact rows at boundaries."""
    if n.exact:
        where, value, recipe = "at shared boundaries", m.cross_entropy.value, m.recipe
        floor, closed = m.floor, m.closed
    else:
        where, value, recipe = "over chunks", m.chunk_cross_entropy.value, m.chunk_recipe
        floor, closed = m.chunk_floor, m.chunk_closed
    if closed is None:
        text = f"nats {where}; X-Token's recipe is already close to the best map in hindsight."
        return "good", f"{value:.3f}", text, "quality"
    if closed.value < 0:
        text = (
            f"nats {where}: worse than X-Token's recipe, {recipe:.3f}; the best map in hindsight "
            f"has {floor:.3f}."
        )
        return "bad", f"{value:.3f}", text, "quality"
    text = (
        f"of the way from X-Token's recipe to the best map in hindsight is closed {where}: "
        f"{value:.3f} nats; the recipe has {recipe:.3f}, the best {floor:.3f}."
    )
    return "good" if closed.value >= 0.5 else "care", f"{closed.value:.0%}", text, "quality"
