"""`xtok build-pairs`."""

from pathlib import Path
from typing import TextIO

import typer

from xtok import report
from xtok.cli.command import command, hint
from xtok.cli.options import DRY_RUN, FOR_LOSS, SKIP_EXISTING, Safety, load_tokenizer
from xtok.config import OUTPUT, BuildConfig, Loss, option
from xtok.errors import XtokError
from xtok.report.stdout import print_path


@command
def build_pairs(
    context: typer.Context,
    stderr: TextIO,
    *,
    pairs: Path = option(
        ..., "A student, a teacher and optionally an output on each line.", argument="FILE"
    ),
    output_dir: Path | None = option(
        None, "Folder of the maps; the current one by default.", metavar="FOLDER", panel=OUTPUT
    ),
    for_loss: Loss | None = FOR_LOSS,
    config: BuildConfig,
    strict: bool = option(
        False, "A token that cannot be decoded or spelled fails its pair.", flag=True, panel=OUTPUT
    ),
    skip_existing: bool = SKIP_EXISTING,
    dry_run: bool = DRY_RUN,
    safety: Safety,
) -> None:
    """Build the maps of a list of pairs; each tokenizer is loaded once, a failure ends its pair."""
    from xtok.stages import build as stage

    listed = stage.read_pairs(pairs, output_dir or Path(), config, for_loss)
    failed: list[str] = []
    for result in stage.build_pairs(
        listed,
        config,
        skip_existing=skip_existing,
        dry_run=dry_run,
        strict=strict,
        load=lambda model: load_tokenizer(model, **vars(safety)),
        progress=report.progress_bar,
    ):
        line, path = f"line {result.pair.line}", result.pair.output
        if result.error is not None:
            failed.append(str(result.pair.line))
            message = f"{line}: {result.error.message}"
            report.print_error(message, hint(result.error, context), stderr)
        elif result.plan is not None:
            report.print_plan(path, result.plan, keep=skip_existing, replaced=result.replaced)
        else:
            if result.projection is None or result.replaced is not None:
                note = report.kept_or_replaced(path, result.replaced)
                report.print_notes([f"{line}: {note}"])
            if result.projection is not None:
                report.print_reports(result.projection.reports)
            print_path(path)
    if failed:
        lines = ", ".join(failed[:20]) + ", …" * (len(failed) > 20)
        raise XtokError(
            f"{len(failed)} of {len(listed)} pairs of {pairs} failed: "
            f"line{'s' * (len(failed) > 1)} {lines}",
            hint="fix these lines, then run the list again with --skip-existing",
        )
