"""Tables of `inspect` for event maps and spelling maps, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from xtok.cli.tables import maps
from xtok.cli.tables._tables import new_table, print_all
from xtok.maps.nemo_tables import N_MAX
from xtok.tokenizers.display import quoted

if TYPE_CHECKING:
    from xtok.inspection.events import (
        Event,
        EventDescription,
        EventOfToken,
        SpelledToken,
        SpellingDescription,
    )
    from xtok.inspection.explain import Explanation
    from xtok.inspection.inspect import Shown


def print_inspection(result: Shown) -> None:
    """Print the result of `inspect`."""
    print_all(_TABLES[type(result).__name__](result))


def _explanation(result: Explanation[Any]) -> Iterable[RenderableType]:
    kind = type(result.rows[0]).__name__ if result.rows else ""
    if kind == "EventOfToken":
        return _token_events(result.rows)
    return _spellings_table(result.rows) if kind == "SpelledToken" else maps.explanation(result)


def _events(d: EventDescription) -> Iterator[Table]:
    """Return tables of an event map: sides, number of events, and largest events."""
    rows = [(label, show(d.student), show(d.teacher)) for label, show in maps.SIDE_ROWS.items()]
    rows.append(("events", f"{d.num_events:,}", f"{d.one_to_one:,} with one token on each side"))
    if d.rest is not None:
        rest = (f"{d.rest.student_count:,} tokens", f"{d.rest.teacher_count:,} tokens")
        rows.append(("without a partner", *rest))
    yield new_table("events", "student", "teacher", rows=rows)
    if d.largest:
        largest = [(str(e.number), *_tokens(e)) for e in d.largest]
        heads = "largest event", "student tokens", "teacher tokens"
        yield new_table(*heads, rows=largest, right=(0,))


def _token_events(rows: Sequence[EventOfToken]) -> Iterator[Table]:
    """Return a table of tokens, with their events and linked tokens."""
    limit = 10 if len(rows) == 1 else 3
    lines = []
    for row in rows:
        token = f"{quoted(row.token)} #{row.student_id}"
        number = f"{row.event.number:,}{' (no partner)' * row.event.is_rest}"
        link = "none" if row.link is None else f"{quoted(row.link)} #{row.link_id}"
        lines.append((token, number, link, *_tokens(row.event, limit)))
    heads = "token", "event", "linked to", "student tokens", "teacher tokens"
    yield new_table(*heads, rows=lines, right=(1,))


def _tokens(event: Event, limit: int = 10) -> tuple[str, str]:
    sides = (event.student, event.student_count), (event.teacher, event.teacher_count)
    student, teacher = (
        f"{count:,}: {' '.join(map(quoted, names[:limit]))}" + (" …" if count > limit else "")
        for names, count in sides
    )
    return student, teacher


def _spellings_table(tokens: Sequence[SpelledToken]) -> Iterator[Table]:
    """Return a table of tokens and their spellings."""
    rows = []
    for token in tokens:
        pieces = " ".join(map(quoted, token.pieces)) or f"({token.left_out})"
        rows.append((token.side, quoted(token.token), str(token.token_id), pieces))
    yield new_table("of", "token", "id", "pieces", rows=rows, right=(2,))


def _spellings(d: SpellingDescription) -> Iterator[Table]:
    """Return a table with the numbers of shared, spelled and omitted tokens, and examples."""
    rows = [[label, show(d.student), show(d.teacher)] for label, show in maps.SIDE_ROWS.items()]
    rows += [[label, *(f"{n:,}" for n in counts)] for label, counts in _spelling_counts(d)]
    yield new_table("spellings", "student", "teacher", rows=rows)
    if d.examples:
        yield from _spellings_table(d.examples)


def _spelling_counts(d: SpellingDescription) -> Iterator[tuple[str, Sequence[int]]]:
    facts, sizes = [*d.spelled.values()], [*d.pieces.values()]
    yield "shared", [f.shared for f in facts]
    for num_pieces in range(2, N_MAX + 1):
        yield f"{num_pieces} pieces", [counts.get(num_pieces, 0) for counts in sizes]
    num_longer = [sum(n for size, n in counts.items() if size > N_MAX) for counts in sizes]
    yield "more, left out by NeMo-RL", num_longer
    for reason in dict.fromkeys(reason for f in facts for reason in f.left_out):
        yield f"left out: {reason}", [f.left_out.get(reason, 0) for f in facts]


_TABLES: Mapping[str, Callable[[Any], Iterable[RenderableType]]] = {
    "Description": maps.description,
    "Explanation": _explanation,
    "Comparison": maps.comparison,
    "EventDescription": _events,
    "SpellingDescription": _spellings,
}
"""Functions by type name, because importing the types takes longer than most commands."""
