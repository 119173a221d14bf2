"""`xtok verify`."""

from pathlib import Path

import typer

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import JSON, MAP, ModelArguments, Widths
from xtok.report.maps import print_verification


@command
def verify(
    *, map_path: Path = MAP, models: ModelArguments, json: bool = JSON, widths: Widths
) -> None:
    """Check a map file, also against its models if given; exit with 3 if a check fails."""
    verification = xtok.verify(map_path, **vars(widths), **models.given())
    show(verification, print_verification, json=json)
    if verification.failed:
        raise typer.Exit(3)
