"""`xtok verify`."""

from pathlib import Path

import typer

import xtok
from xtok.cli import options
from xtok.cli.command import command, show
from xtok.cli.tables.maps import print_verification
from xtok.tokenizers.table import SIDES


@command
def verify(
    *,
    map_path: Path = options.MAP,
    models: options.OptionalModels,
    json: bool = options.json_option("path, failed (names of the failed checks), checks"),
    widths: options.Widths,
) -> None:
    """Check a map file. If the models are given, also compare the map with the models.

    Run this command before training, and after copying or editing a map. The exit code is 3 if a
    check fails.

    Example: xtok verify map.safetensors
    """
    tokenizers = models.tokenizers(widths)
    verification = xtok.verify(map_path, *map(tokenizers.get, SIDES), **vars(widths))
    show(verification, print_verification, json=json)
    if verification.failed:
        raise typer.Exit(3)
