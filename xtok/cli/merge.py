"""`xtok merge`."""

from pathlib import Path

import xtok
from xtok.cli.command import command
from xtok.cli.options import MapOptions, MapOutput, map_files
from xtok.config import MergeConfig, option
from xtok.maps.names import map_name


@command
def merge(
    *,
    map_paths: list[Path] = option(
        ..., "Two or more maps of one pair.", argument="MAP MAP...", autocompletion=map_files
    ),
    output: MapOutput,
    config: MergeConfig,
    map_options: MapOptions,
) -> None:
    """Make one map of several: a weighted sum of rows, or only what the first one lacks."""
    output.check()
    maps = [map_options.load(path) for path in map_paths]
    projection = xtok.merge(maps, config, names=[str(path) for path in map_paths])
    output.write(projection, output.path(map_name(projection, "merge")))
