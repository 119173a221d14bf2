"""`xtok inspect`."""

from typing import Annotated

import typer

from xtok.cli.command import command, show
from xtok.cli.options import Json, MapArgument, MapOptions


@command
def inspect(
    map_path: MapArgument,
    *,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="Show the row of this student token, spaces included: ' the'. Repeatable.",
            metavar="TEXT",
        ),
    ] = None,
    token_id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Show the row of this student id. Repeatable.", metavar="ID"),
    ] = None,
    num_examples: Annotated[
        int | None,
        typer.Option(
            help="Show this many rows, evenly spread; 5 if none are asked for.", min=0, metavar="N"
        ),
    ] = None,
    classes: Annotated[
        bool,
        typer.Option(
            "--classes",
            help="Show rows and teacher tokens by class (digits, punctuation, scripts …), and what "
            "they say of the choice of a loss. JSON has them always.",
        ),
    ] = False,
    token_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="List the rows of this class of tokens instead, worst first: digits, han, "
            "punctuation, …",
            metavar="CLASS",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="List the rows of this kind instead, worst first: pieces, exact, empty, …",
            metavar="KIND",
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            help="List so many rows, those with the least weight on their heaviest entry first; "
            "20 with --class or --kind.",
            min=1,
            metavar="N",
        ),
    ] = None,
    json: Json = False,
    map_options: MapOptions,
) -> None:
    """Show what a map holds: who maps to whom, how it was made, and rows of it."""
    is_listing = bool(token_class or kind or worst)
    if is_listing and (token or token_id or num_examples is not None or classes):
        raise typer.BadParameter(
            "--class, --kind and --worst list rows; give none of --token, --id, --num-examples, "
            "--classes with them"
        )
    from xtok import report
    from xtok.inspection import inspect as look
    from xtok.report import maps as tables

    projection = map_options.load(map_path)
    if is_listing:
        listing = look.worst_rows(projection, token_class=token_class, kind=kind, count=worst or 20)
        show(listing, tables.print_listing, json=json)
        return
    if num_examples is None:
        num_examples = 0 if token or token_id or classes else 5
    description = look.inspect(
        projection,
        tokens=token or [],
        ids=token_id or [],
        num_examples=num_examples,
        classes=classes or json,
    )
    report.print_reports(projection.reports)
    show(description, lambda found: tables.print_description(found, classes=classes), json=json)
    if classes and not json and description.coverage is None:
        report.print_notes(["the map carries no tokens, so no classes"])
