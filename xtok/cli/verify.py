"""`xtok verify`."""

from pathlib import Path

import typer

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import JSON, MAP, ModelArguments, Widths
from xtok.maps import event_file
from xtok.report.maps import print_verification


@command
def verify(
    *, map_path: Path = MAP, models: ModelArguments, json: bool = JSON, widths: Widths
) -> None:
    """Check a map file, and that it is of these models; exit with 3 if a check fails."""
    if event_file.holds_events(map_path):
        from xtok.inspection.events import verify_events

        verification = verify_events(map_path, **models.given())
    else:
        verification = xtok.verify(map_path, **vars(widths), **models.given())
    show(verification, print_verification, json=json)
    if verification.failed:
        raise typer.Exit(3)
