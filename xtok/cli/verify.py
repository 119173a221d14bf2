"""`xtok verify`."""

import typer

from xtok.cli.command import command, show
from xtok.cli.options import Json, MapArgument, Models, Widths


@command
def verify(map_path: MapArgument, *, models: Models, json: Json = False, widths: Widths) -> None:
    """Check a map file, and that it is of these models; exit with 3 if a check fails."""
    from xtok.inspection import verify as check
    from xtok.report.maps import print_verification

    verification = check.verify(
        map_path,
        student_vocab_size=widths.student_vocab_size,
        teacher_vocab_size=widths.teacher_vocab_size,
        **models.given(),
    )
    show(verification, print_verification, json=json)
    if verification.failed:
        raise typer.Exit(3)
