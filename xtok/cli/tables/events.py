"""`inspect` of event maps and spelling maps as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from xtok.cli.tables._tables import header, new_table, print_all
from xtok.cli.tables.maps import SIDE_ROWS
from xtok.maps.nemo_tables import N_MAX
from xtok.tokenizers.display import quoted

if TYPE_CHECKING:
    from xtok.inspection.events import Event, EventDescription, EventExplanation, EventOfToken
    from xtok.inspection.spellings import SpelledToken, SpellingDescription, SpellingExplanation


def print_events(d: EventDescription) -> None:
    """Print what an event map holds."""
    rows = [(label, show(d.student), show(d.teacher)) for label, show in SIDE_ROWS.items()]
    rows.append(("events", f"{d.num_events:,}", f"{d.one_to_one:,} of one token each side"))
    if d.rest is not None:
        rest = f"{d.rest.student_count:,} tokens", f"{d.rest.teacher_count:,} tokens"
        rows.append(("without a partner", *rest))
    tables = [new_table("events", "student", "teacher", rows=rows)]
    if d.largest:
        largest = [(str(e.number), *_tokens(e)) for e in d.largest]
        heads = "largest event", "student tokens", "teacher tokens"
        tables.append(new_table(*heads, rows=largest, right=(0,)))
    print_all(tables)


def print_event_explanation(explanation: EventExplanation) -> None:
    """Print with what each token shares its event."""
    print_all(map(_event_of, explanation.tokens))


def _event_of(one: EventOfToken) -> Table:
    number = f"{one.event.number:,}" + (", of tokens without a partner" * one.event.is_rest)
    linked = "none" if one.link is None else f"{quoted(one.link)} #{one.link_id}"
    student, teacher = _tokens(one.event)
    rows = [("event", number), ("linked to", linked)]
    rows += [("student tokens", student), ("teacher tokens", teacher)]
    return new_table(f"student id {one.student_id}", header(quoted(one.token)), rows=rows)


def _tokens(event: Event) -> tuple[str, str]:
    """Return the tokens of both sides of an event, and how many they are."""
    sides = (event.student, event.student_count), (event.teacher, event.teacher_count)
    student, teacher = (
        f"{count:,}: {' '.join(map(quoted, names))}" + (" …" if count > len(names) else "")
        for names, count in sides
    )
    return student, teacher


def print_spelled(explanation: SpellingExplanation) -> None:
    """Print how tokens are spelled."""
    print_all([_spelled(explanation.tokens)])


def _spelled(tokens: Sequence[SpelledToken]) -> Table:
    rows = [
        (
            one.side,
            quoted(one.token),
            str(one.token_id),
            " ".join(map(quoted, one.pieces)) or f"({one.left_out})",
        )
        for one in tokens
    ]
    return new_table("of", "token", "id", "pieces", rows=rows, right=(2,))


def print_spellings(d: SpellingDescription) -> None:
    """Print what a spelling map holds."""
    sides = d.student, d.teacher
    rows = [(label, *map(show, sides)) for label, show in SIDE_ROWS.items()]
    spelled = d.spelled["student"], d.spelled["teacher"]
    rows.append(("shared", *(f"{one.shared:,}" for one in spelled)))
    for number in range(2, N_MAX + 1):
        counts = (d.pieces[side].get(number, 0) for side in d.spelled)
        rows.append((f"{number} pieces", *(f"{count:,}" for count in counts)))
    more = (sum(n for size, n in sizes.items() if size > N_MAX) for sizes in d.pieces.values())
    rows.append(("more, which NeMo-RL leaves out", *(f"{count:,}" for count in more)))
    reasons = dict.fromkeys(why for one in spelled for why in one.left_out)
    rows += [
        (f"left out: {why}", *(f"{one.left_out.get(why, 0):,}" for one in spelled))
        for why in reasons
    ]
    tables = [new_table("spellings", "student", "teacher", rows=rows)]
    print_all([*tables, _spelled(d.examples)] if d.examples else tables)
