"""`xtok build-pairs`."""

from pathlib import Path
from typing import Annotated, TextIO

import typer

from xtok.cli.build import DryRun, ForLoss, SkipExisting, check_companions, remarks
from xtok.cli.command import Given, command
from xtok.cli.options import OUTPUT, Safety, expanded, read_path
from xtok.cli.plans import build_listed
from xtok.config import BuildConfig


@command
def build_pairs(
    given: Given,
    stderr: TextIO,
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A student, a teacher and optionally an output on each line.",
            parser=read_path,
        ),
    ],
    *,
    output_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the maps; the current one by default.",
            metavar="FOLDER",
            parser=expanded,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    for_loss: ForLoss = None,
    config: BuildConfig,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="A token that cannot be decoded or spelled fails its pair.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    skip_existing: SkipExisting = False,
    dry_run: DryRun = False,
    safety: Safety,
) -> None:
    """Build the maps of a list of pairs; each tokenizer is loaded once, a failure ends its pair."""
    check_companions(given, config)
    from xtok import report

    report.print_notes(remarks(given, config, for_loss))
    build_listed(
        pairs,
        Path(output_dir or ""),
        config,
        loss=for_loss,
        skip_existing=skip_existing,
        dry_run=dry_run,
        strict=strict,
        safety=dict(safety.safety),
        stderr=stderr,
    )
