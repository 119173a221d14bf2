"""`xtok merge`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import MapOptions, MapOutput, read_path
from xtok.config import MergeConfig


@command
def merge(
    map_paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MAP MAP...", help="Two or more maps of one pair.", parser=read_path
        ),
    ],
    output: MapOutput,
    *,
    config: MergeConfig,
    map_options: MapOptions,
) -> None:
    """Make one map of several: a weighted sum of rows, or only what the first one lacks."""
    output.check()
    from xtok.maps.names import map_name
    from xtok.stages import merge as stage

    maps = [map_options.load(path) for path in map_paths]
    projection = stage.merge(maps, config, names=[str(path) for path in map_paths])
    output.write(projection, output.path(map_name(projection, "merge")))
