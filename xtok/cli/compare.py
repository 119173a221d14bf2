"""`xtok compare`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.command import Given, command, show
from xtok.cli.options import Json, MapOptions, Models, TextField, expanded, read_path
from xtok.config import TEXT, EstimateConfig


@command
def compare(
    given: Given,
    first: Annotated[Path, typer.Argument(metavar="MAP", help="A map file.", parser=read_path)],
    second: Annotated[
        Path,
        typer.Argument(metavar="MAP", help="Another map of the same pair.", parser=read_path),
    ],
    *,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Weight rows by how often their tokens occur in this text, which the student's "
            "model tokenizes. Repeatable; globs, too.",
            metavar="FILE",
            parser=expanded,
            rich_help_panel=TEXT,
        ),
    ] = None,
    models: Models,
    field: TextField = EstimateConfig.field,
    num_examples: Annotated[
        int, typer.Option(help="Show this many rows that differ.", min=0, metavar="N")
    ] = 10,
    json: Json = False,
    map_options: MapOptions,
) -> None:
    """Compare two maps of one pair row by row: which differ, by how much, and where it matters."""
    if bool(text) != (models.student_model is not None):
        raise typer.BadParameter("--text and --student-model go together")
    if not text and "field" in given:
        raise typer.BadParameter("--field goes with --text")
    from xtok import report
    from xtok.counting.texts import find_texts
    from xtok.inspection import compare as comparing
    from xtok.report.quality import print_comparison

    find_texts(text or [])
    maps = [map_options.load(path) for path in (first, second)]
    for projection in maps:
        report.print_reports(projection.reports)
    maps[0], tokenizers = models.with_map(maps[0], name=first)
    counts = comparing.count_tokens(text, tokenizers["student_model"], field) if text else None
    comparison = comparing.compare(
        *maps, token_counts=counts, num_examples=num_examples, names=[str(first), str(second)]
    )
    show(comparison, print_comparison, json=json)
