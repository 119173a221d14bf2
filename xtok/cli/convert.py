"""`xtok convert`."""

from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import MapArgument, MapOptions, MapOutput
from xtok.config import Normalize


@command
def convert(
    map_path: MapArgument,
    output: MapOutput,
    *,
    normalize: Annotated[
        Normalize | None,
        typer.Option(
            help="Make rows of learned weights sum to 1: divide by the sum, or take the softmax.",
        ),
    ] = None,
    transpose: Annotated[
        bool,
        typer.Option(
            "--transpose", help="Swap the roles: a map from the teacher's tokens to the student's."
        ),
    ] = False,
    map_options: MapOptions,
) -> None:
    """Convert a map between xtok's .safetensors and NeMo-RL's .pt, both ways."""
    if output.output is None:
        raise typer.BadParameter("give the output: --output")
    output.check()
    from xtok.maps import convert as conversion
    from xtok.maps.names import map_name

    projection = map_options.load(map_path, normalize)
    if transpose:
        projection = conversion.transpose(projection)
    output.write(projection, output.path(map_name(projection)))
