"""`inspect` as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from xtok.cli.tables import events, maps
from xtok.cli.tables._tables import print_all

if TYPE_CHECKING:
    from xtok.inspection.explain import Explanation
    from xtok.inspection.inspect import Shown


def print_inspection(shown: Shown) -> None:
    """Print the result of `inspect`."""
    print_all(_TABLES[type(shown).__name__](shown))


def _explanation(shown: Explanation[Any]) -> Iterable[RenderableType]:
    kind = type(shown.rows[0]).__name__ if shown.rows else ""
    if kind == "EventOfToken":
        return events.events_of_tokens(shown.rows)
    return events.spelled(shown.rows) if kind == "SpelledToken" else maps.explanation(shown)


_TABLES: Mapping[str, Callable[[Any], Iterable[RenderableType]]] = {
    "Description": maps.description,
    "Explanation": _explanation,
    "Comparison": maps.comparison,
    "EventDescription": events.description,
    "SpellingDescription": events.spellings,
}
"""By name, because importing the types takes longer than a command that does not need them."""
