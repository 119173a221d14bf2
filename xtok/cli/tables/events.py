"""Tables of `inspect` for event maps and spelling maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from xtok.cli.tables._tables import new_table
from xtok.cli.tables.maps import SIDE_ROWS
from xtok.maps.nemo_tables import N_MAX
from xtok.tokenizers.display import quoted

if TYPE_CHECKING:
    from xtok.inspection.events import Event, EventDescription, EventOfToken
    from xtok.inspection.spellings import SpelledToken, SpellingDescription


def description(d: EventDescription) -> Iterator[Table]:
    """Show the sides of an event map, the number of its events, and the largest events."""
    rows = [(label, show(d.student), show(d.teacher)) for label, show in SIDE_ROWS.items()]
    rows.append(("events", f"{d.num_events:,}", f"{d.one_to_one:,} of one token each side"))
    if d.rest is not None:
        rest = f"{d.rest.student_count:,} tokens", f"{d.rest.teacher_count:,} tokens"
        rows.append(("without a partner", *rest))
    yield new_table("events", "student", "teacher", rows=rows)
    if d.largest:
        largest = [(str(e.number), *_tokens(e)) for e in d.largest]
        heads = "largest event", "student tokens", "teacher tokens"
        yield new_table(*heads, rows=largest, right=(0,))


def events_of_tokens(rows: Sequence[EventOfToken]) -> Iterator[Table]:
    """Show the event of each token, its link, and the tokens that share it."""
    most = 10 if len(rows) == 1 else 3
    lines = [
        (
            f"{quoted(one.token)} #{one.student_id}",
            f"{one.event.number:,}{' (no partner)' * one.event.is_rest}",
            "none" if one.link is None else f"{quoted(one.link)} #{one.link_id}",
            *_tokens(one.event, most),
        )
        for one in rows
    ]
    heads = "token", "event", "linked to", "student tokens", "teacher tokens"
    yield new_table(*heads, rows=lines, right=(1,))


def _tokens(event: Event, most: int = 10) -> tuple[str, str]:
    sides = (event.student, event.student_count), (event.teacher, event.teacher_count)
    student, teacher = (
        f"{count:,}: {' '.join(map(quoted, names[:most]))}" + (" …" if count > most else "")
        for names, count in sides
    )
    return student, teacher


def spelled(tokens: Sequence[SpelledToken]) -> Iterator[Table]:
    """Show the spelling of each token."""
    rows = [
        (
            one.side,
            quoted(one.token),
            str(one.token_id),
            " ".join(map(quoted, one.pieces)) or f"({one.left_out})",
        )
        for one in tokens
    ]
    yield new_table("of", "token", "id", "pieces", rows=rows, right=(2,))


def spellings(d: SpellingDescription) -> Iterator[Table]:
    """Show the numbers of shared, spelled and left-out tokens on each side."""
    rows = [[label, show(d.student), show(d.teacher)] for label, show in SIDE_ROWS.items()]
    rows += [[label, *(f"{n:,}" for n in of_sides)] for label, of_sides in _numbers(d)]
    yield new_table("spellings", "student", "teacher", rows=rows)
    if d.examples:
        yield from spelled(d.examples)


def _numbers(d: SpellingDescription) -> Iterator[tuple[str, Sequence[int]]]:
    facts, sizes = [*d.spelled.values()], [*d.pieces.values()]
    yield "shared", [one.shared for one in facts]
    for number in range(2, N_MAX + 1):
        yield f"{number} pieces", [of_side.get(number, 0) for of_side in sizes]
    more = [sum(n for size, n in of_side.items() if size > N_MAX) for of_side in sizes]
    yield "more, left out by NeMo-RL", more
    for why in dict.fromkeys(why for one in facts for why in one.left_out):
        yield f"left out: {why}", [one.left_out.get(why, 0) for one in facts]
