"""`xtok convert`."""

from pathlib import Path

import typer

import xtok
from xtok.cli.command import command
from xtok.cli.options import MAP, MapOptions, MapOutput
from xtok.config import Normalize, option
from xtok.maps.names import map_name


@command
def convert(
    *,
    map_path: Path = MAP,
    output: MapOutput,
    normalize: Normalize | None = option(
        None, "Make rows of learned weights sum to 1: divide by the sum, or take the softmax."
    ),
    transpose: bool = option(
        False, "Swap the roles: a map from the teacher's tokens to the student's.", flag=True
    ),
    map_options: MapOptions,
) -> None:
    """Convert a map between xtok's .safetensors and NeMo-RL's .pt, both ways."""
    if output.output is None:
        raise typer.BadParameter("give the output: --output")
    output.check()
    projection = map_options.load(map_path, normalize=normalize)
    if transpose:
        projection = xtok.transpose(projection)
    output.write(projection, output.path(map_name(projection)))
