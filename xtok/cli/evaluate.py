"""`xtok evaluate`."""

from math import isnan
from pathlib import Path
from typing import Annotated, TextIO

import typer

from xtok.cli.command import command, show
from xtok.cli.options import Json, MapOptions, Models, TextField, Texts, read_path
from xtok.config import TEXT, EstimateConfig, Loss


def _is_number(bound: float | None) -> float | None:
    """Refuse a gate that would be open whatever is measured."""
    if bound is not None and isnan(bound):
        raise typer.BadParameter("nan is no bound")
    return bound


@command
def evaluate(
    stderr: TextIO,
    map_paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MAP...", help="Map files of one pair, measured side by side.", parser=read_path
        ),
    ],
    *,
    text: Texts,
    models: Models,
    field: TextField = EstimateConfig.field,
    group_by: Annotated[
        str | None,
        typer.Option(
            help="Group documents by this field or column; by default by file.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    for_loss: Annotated[
        Loss | None,
        typer.Option(
            "--for", help="Rank the maps by what counts for this loss, and say which is better."
        ),
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option(
            help="Exit with 3 if a map covers less of any group of text.",
            min=0,
            max=1,
            callback=_is_number,
        ),
    ] = None,
    max_cross_entropy: Annotated[
        float | None,
        typer.Option(
            help="Exit with 3 if a map's cross-entropy is above this on any group.",
            callback=_is_number,
        ),
    ] = None,
    num_worst: Annotated[
        int, typer.Option(help="Show this many of each map's most costly rows.", min=0, metavar="N")
    ] = 5,
    json: Json = False,
    map_options: MapOptions,
) -> None:
    """Measure maps on text: cross-entropy, coverage, and how near they come to the best map."""
    models.both()
    from xtok import report
    from xtok.counting.texts import find_texts
    from xtok.inspection import evaluate as measure
    from xtok.report.quality import print_evaluation

    find_texts(text)
    maps = [map_options.load(path) for path in map_paths]
    names = [str(path) for path in map_paths]
    maps[0], tokenizers = models.with_map(maps[0], name=names[0])
    for projection in maps:
        report.print_reports(projection.reports)
    evaluation = measure.evaluate(
        maps,
        text,
        tokenizers["student_model"],
        tokenizers["teacher_model"],
        names=names,
        field=field,
        group_by=group_by,
        for_loss=for_loss,
        num_worst=num_worst,
        progress=report.progress_bar,
        text_progress=report.text_progress_bar,
    )
    missed = evaluation.failing(min_coverage=min_coverage, max_cross_entropy=max_cross_entropy)
    report.print_failed(missed, stderr)
    show(evaluation, print_evaluation, json=json)
    if missed:
        raise typer.Exit(3)
