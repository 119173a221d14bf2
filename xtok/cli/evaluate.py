"""`xtok evaluate`."""

from pathlib import Path
from typing import TextIO

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.options import JSON, TEXT_FIELD, TEXTS, MapOptions, Models
from xtok.config import TEXT, Loss, option
from xtok.counting.texts import find_texts
from xtok.report.quality import print_evaluation


@command
def evaluate(
    stderr: TextIO,
    *,
    map_paths: list[Path] = option(
        ..., "Map files of one pair, measured side by side.", argument="MAP..."
    ),
    text: list[str] = TEXTS,
    models: Models,
    field: str = TEXT_FIELD,
    group_by: str | None = option(
        None, "Group documents by this field or column; by default by file.", panel=TEXT
    ),
    for_loss: Loss | None = option(
        None, "Rank the maps by what counts for this loss, and say which is better.", name="for"
    ),
    min_coverage: float | None = option(
        None, "Exit with 3 if a map covers less of any group of text.", min=0, max=1
    ),
    max_cross_entropy: float | None = option(
        None, "Exit with 3 if a map's cross-entropy is above this on any group."
    ),
    num_worst: int = option(5, "Show this many of each map's most costly rows.", min=0),
    json: bool = JSON,
    map_options: MapOptions,
) -> None:
    """Measure maps on text: cross-entropy, coverage, and how near they come to the best map."""
    models.both()
    find_texts(text)
    maps = [map_options.load(path) for path in map_paths]
    names = [str(path) for path in map_paths]
    maps[0], tokenizers = models.with_map(maps[0], name=names[0])
    for projection in maps:
        report.print_reports(projection.reports)
    evaluation = xtok.evaluate(
        maps,
        text,
        **tokenizers,
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
