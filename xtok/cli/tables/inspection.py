"""`inspect` as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from xtok.cli.tables import events, maps
from xtok.cli.tables._tables import print_all

if TYPE_CHECKING:
    from xtok.inspection.inspect import Shown

_TABLES: Mapping[str, Callable[[Any], Iterable[RenderableType]]] = {
    "Description": maps.description,
    "Explanation": maps.explanation,
    "Comparison": maps.comparison,
    "EventDescription": events.description,
    "EventExplanation": events.explanation,
    "SpellingDescription": events.spellings,
    "SpellingExplanation": events.spelled,
}


def print_inspection(shown: Shown) -> None:
    """Print the result of `inspect`."""
    print_all(_TABLES[type(shown).__name__](shown))
