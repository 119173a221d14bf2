"""`xtok evaluate`."""

from typing import TextIO

import typer

import xtok
from xtok.building.counting.texts import check_texts
from xtok.cli import console
from xtok.cli.command import command, expanded, show
from xtok.cli.options import (
    KINDS,
    TEXT_FIELD,
    MapOptions,
    ModelOptions,
    json_option,
    loss_option,
    map_option,
    maps_and_models,
    text_option,
)
from xtok.cli.tables.quality import print_evaluation
from xtok.config import TEXT, Loss, option

_GATES = "Gates for scripts"


@command
def evaluate(
    stderr: TextIO,
    *,
    arguments: list[str] = map_option(
        "Map files of one pair, measured side by side, then the two models: " + KINDS,
        ...,
        argument="MAP... STUDENT TEACHER",
        parser=expanded,
    ),
    text: list[str] = text_option("Text to read: ", required=True),
    models: ModelOptions,
    field: str = TEXT_FIELD,
    group_by: str | None = option(
        None, "Field or column to group documents by. Default: group by file.", panel=TEXT
    ),
    for_loss: Loss | None = loss_option(
        Loss, None, "Rank the maps by the measure that matters for this loss."
    ),
    min_coverage: float | None = option(
        None,
        "Exit with 3 if a map's coverage of any group of text is lower.",
        min=0,
        max=1,
        panel=_GATES,
    ),
    max_cross_entropy: float | None = option(
        None, "Exit with 3 if a map's cross-entropy on any group is higher.", panel=_GATES
    ),
    max_leak: float | None = option(
        None,
        "Exit with 3 if an event map's leak on any group is higher.",
        min=0,
        max=1,
        panel=_GATES,
    ),
    json: bool = json_option(
        "student, teacher, measures, event_measures, classes, worst_rows, num_bytes, lost_bytes, "
        "differing, notes, by_chunk, ranking"
    ),
    map_options: MapOptions,
) -> None:
    """Measure maps on text: cross-entropy, coverage, leak.

    Of event maps: how often the two sides' tokens fall into different events (the leak), and the
    entropy kept.

    Example: xtok evaluate map.safetensors STUDENT TEACHER --text 'corpus/*.txt'
    """
    map_paths, given = maps_and_models(arguments, models)
    given.both()
    check_texts(text, field, group_by)
    maps = [map_options.load_any(path) for path in map_paths]
    are_events = [isinstance(one, xtok.EventMap) for one in maps]
    if max_leak is not None and not all(are_events):
        raise typer.BadParameter("--max-leak is for event maps")
    if any(are_events) and (for_loss or min_coverage is not None or max_cross_entropy is not None):
        raise typer.BadParameter(
            "--for, --min-coverage and --max-cross-entropy are not for event maps"
        )
    names = [str(path) for path in map_paths]
    maps[0], pair = given.with_map(maps[0], name=names[0])
    for one in maps:
        console.print_reports(one.reports)
    evaluation = xtok.evaluate(
        pair,
        maps,
        text,
        names=names,
        field=field,
        group_by=group_by,
        for_loss=for_loss,
        progress=console.progress_bar,
    )
    missed = evaluation.failing(
        min_coverage=min_coverage, max_cross_entropy=max_cross_entropy, max_leak=max_leak
    )
    console.print_failed(missed, stderr)
    show(evaluation, print_evaluation, json=json)
    if missed:
        raise typer.Exit(3)
