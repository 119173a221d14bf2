"""What stands out of maps and their pair: sentences with numbers, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xtok.inspection.advice import Grade
from xtok.inspection.evaluate import MapMeasures
from xtok.inspection.pair_facts import PairFacts
from xtok.vocab.display import plural

LEVELS: tuple[Grade, ...] = ("bad", "care", "note", "good")
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

    level: Grade
    number: str
    text: str
    place: str
    map_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class MapNumbers:
    """What the verdict takes of a map.

    Attributes:
        empty: rows without an entry, of tokens that stand for text.
        empty_text: the share of the text's student tokens that these are.
        exact: exact rows of tokens that stand for text.
        slots: rows with a scale slot.
        slot_weight: the least share of such a row that its slot takes.
        unreached: teacher tokens that no row leads to.
        teacher_tokens: of so many.
        failed: checks of `verify` that failed.
        measures: over all text; None without text.
        lost: the share of the text that the two sides spell differently.
    """

    empty: int
    empty_text: float
    exact: int
    slots: int
    slot_weight: float
    unreached: int
    teacher_tokens: int
    failed: tuple[str, ...]
    measures: MapMeasures | None
    lost: float


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
    numbers, in_text = pair.numbers, ""
    missing = numbers.student - numbers.both
    is_rare = pair.missing_numbers_text is not None and pair.missing_numbers_text < 0.001
    if missing:
        if pair.missing_numbers_text is not None:
            in_text = f"; they are {pair.missing_numbers_text:.2%} of the text"
        found.append(
            Finding(
                level="care" if missing > numbers.student / 2 and not is_rare else "note",
                number=f"{missing:,}",
                text=f"of {plural(numbers.student, 'multi-digit number')} of the student have no "
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


def _of_map(n: MapNumbers) -> list[tuple[Grade, str, str, str]]:
    found: list[tuple[Grade, str, str, str]] = []
    if n.failed:
        checks = ", ".join(n.failed)
        number = f"{len(n.failed):,}"
        found.append(("bad", number, f"of verify's checks failed: {checks}.", "provenance"))
    if n.empty:
        in_text = "" if n.measures is None else f"; they are {n.empty_text:.2%} of the text"
        level: Grade = "bad" if n.empty_text > 0.01 else "care" if n.empty_text > 0 else "note"
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


def _measured(n: MapNumbers, m: MapMeasures) -> tuple[Grade, str, str, str]:
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
