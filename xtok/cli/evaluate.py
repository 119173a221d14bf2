"""`xtok evaluate`."""

from pathlib import Path
from typing import TextIO

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.options import JSON, TEXT_FIELD, TEXTS, MapOptions, Models, map_files
from xtok.config import TEXT, Loss, option
from xtok.counting.texts import find_texts
from xtok.inspection.events import evaluate_events
from xtok.maps import event_file
from xtok.report.events import print_events_evaluation
from xtok.report.quality import print_evaluation


@command
def evaluate(
    stderr: TextIO,
    *,
    map_paths: list[Path] = option(
        ...,
        "Map files of one pair, measured side by side.",
        argument="MAP...",
        autocompletion=map_files,
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
    max_leak: float | None = option(
        None, "Exit with 3 if an event map leaks more than this on any group.", min=0, max=1
    ),
    num_worst: int = option(5, "Show this many of each map's most costly rows.", min=0),
    json: bool = JSON,
    map_options: MapOptions,
) -> None:
    """Measure maps on text: cross-entropy, coverage, and how near they come to the best map.

    Of event maps: how often the two sides' tokens fall into different events, and the entropy kept.
    """
    models.both()
    find_texts(text)
    are_events = [event_file.holds_events(path) for path in map_paths]
    if any(are_events):
        if not all(are_events) or for_loss or min_coverage or max_cross_entropy:
            raise typer.BadParameter(
                "event maps are measured by --max-leak, and not beside projection maps"
            )
        student, teacher = models.pair()
        measured = evaluate_events(
            [xtok.EventMap.load(path) for path in map_paths],
            text,
            student,
            teacher,
            names=[str(path) for path in map_paths],
            field=field,
            group_by=group_by,
            num_worst=num_worst,
            text_progress=report.text_progress_bar,
        )
        missed = [] if max_leak is None else measured.leaking(max_leak)
        report.print_failed(missed, stderr)
        show(measured, print_events_evaluation, json=json)
        if missed:
            raise typer.Exit(3)
        return
    if max_leak is not None:
        raise typer.BadParameter("--max-leak is for event maps")
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
