"""`xtok inspect`."""

from functools import partial
from pathlib import Path

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.options import JSON, MAP, MapOptions
from xtok.config import option
from xtok.inspection.events import describe_events
from xtok.maps import event_file
from xtok.report.events import print_events
from xtok.report.maps import print_description, print_listing


@command
def inspect(
    *,
    map_path: Path = MAP,
    token: list[str] = option(
        [],
        "Show the row of this student token, spaces included: ' the'. Repeatable.",
        metavar="TEXT",
    ),
    token_id: list[int] = option(
        [], "Show the row of this student id. Repeatable.", name="id", metavar="ID"
    ),
    num_examples: int | None = option(
        None, "Show this many rows, evenly spread; 5 if none are asked for.", min=0
    ),
    classes: bool = option(
        False,
        "Show rows and teacher tokens by class (digits, punctuation, scripts …), and what they say "
        "of the choice of a loss. JSON has them always.",
        flag=True,
    ),
    token_class: str | None = option(
        None,
        "List the rows of this class of tokens instead, worst first: digits, han, punctuation, …",
        name="class",
        metavar="CLASS",
    ),
    kind: str | None = option(
        None,
        "List the rows of this kind instead, worst first: pieces, exact, empty, …",
        metavar="KIND",
    ),
    worst: int | None = option(
        None,
        "List so many rows, those with the least weight on their heaviest entry first; 20 with "
        "--class or --kind.",
        min=1,
    ),
    json: bool = JSON,
    map_options: MapOptions,
) -> None:
    """Show what a map holds: who maps to whom, how it was made, and rows of it; or events."""
    is_listing = bool(token_class or kind or worst)
    if is_listing and (token or token_id or num_examples is not None or classes):
        raise typer.BadParameter(
            "--class, --kind and --worst list rows; give none of --token, --id, --num-examples, "
            "--classes with them"
        )
    if event_file.holds_events(map_path):
        if is_listing or token or token_id or classes:
            raise typer.BadParameter(f"{map_path} is an event map, which has no rows; see explain")
        events = describe_events(xtok.EventMap.load(map_path), num_examples=num_examples or 5)
        show(events, print_events, json=json)
        return
    projection = map_options.load(map_path)
    if is_listing:
        listing = xtok.worst_rows(projection, token_class=token_class, kind=kind, count=worst or 20)
        show(listing, print_listing, json=json)
        return
    if num_examples is None:
        num_examples = 0 if token or token_id or classes else 5
    description = xtok.inspect(
        projection, tokens=token, ids=token_id, num_examples=num_examples, classes=classes or json
    )
    report.print_reports(projection.reports)
    show(description, partial(print_description, classes=classes), json=json)
    if classes and not json and description.coverage is None:
        report.print_notes(["the map carries no tokens, so no classes"])
