"""`xtok multitoken`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.build import check_companions
from xtok.cli.command import Given, command
from xtok.cli.options import (
    MODELS,
    MapOptions,
    ModelArguments,
    StrictOutput,
    read_path,
)
from xtok.cli.spellings import nemo_name
from xtok.config import MultitokenConfig


@command
def multitoken(
    context: typer.Context,
    given: Given,
    models: ModelArguments,
    output: StrictOutput,
    *,
    initial_projection_path: Annotated[
        Path | None,
        typer.Option(
            help="A map of the same pair to extend.",
            metavar="MAP",
            parser=read_path,
            rich_help_panel=MODELS,
        ),
    ] = None,
    config: MultitokenConfig,
    exact_match: Annotated[
        bool,
        typer.Option(
            help="Then give tokens that both sides have a single entry of weight 1.",
            rich_help_panel="Making the map",
        ),
    ] = False,
    map_options: MapOptions,
) -> None:
    """Map each student token to the teacher tokens that spell it, and the other way round."""
    check_companions(given, config)
    output.check()
    from xtok import report
    from xtok.maps.names import map_name
    from xtok.stages import exact
    from xtok.stages import multitoken as stage

    initial = None
    if initial_projection_path is None:
        student, teacher = models.pair(map_options)
    else:
        models.both()
        path = initial_projection_path
        initial, sides = models.with_map(map_options.load(path), map_options, name=path)
        student, teacher = sides["student_model"], sides["teacher_model"]
    projection = stage.multitoken(
        student, teacher, config, initial=initial, progress=report.progress_bar
    )
    if exact_match:
        projection = exact.reapply_exact(projection, student_model=student, teacher_model=teacher)
    name = nemo_name(context, models, config) or map_name(projection, "multitoken")
    output.write(projection, output.path(name))
