"""`xtok overlap`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.command import Given, command, show
from xtok.cli.doctor import Loading, ModelList
from xtok.cli.options import Json, TextField, expanded
from xtok.config import TEXT, EstimateConfig


@command
def overlap(
    given: Given,
    models: ModelList,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Also weigh by this text, as acceptance in speculative decoding does: plain, "
            ".jsonl or .parquet, also as .gz or .zst; a quoted glob, too. Repeatable.",
            metavar="FILE",
            parser=expanded,
            rich_help_panel=TEXT,
        ),
    ] = None,
    field: TextField = EstimateConfig.field,
    json: Json = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, one line per ordered pair.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            help="Draw the matrix to a .png, .svg or .pdf file.",
            metavar="FILE",
            parser=expanded,
        ),
    ] = None,
    loading: Loading,
) -> None:
    """Show what share of each tokenizer's tokens the others have, byte by byte."""
    if json and csv:
        raise typer.BadParameter("give --json or --csv, not both")
    if "field" in given and not text:
        raise typer.BadParameter("--field goes with --text")
    from xtok import report
    from xtok.counting.texts import find_texts
    from xtok.inspection import overlap as sharing
    from xtok.report.tokenizers import print_overlap

    if plot is not None:
        sharing.check_plot(Path(plot))
    find_texts(text or [])
    shared = sharing.overlap(
        loading.load(models), text or [], field=field, progress=report.text_progress_bar
    )
    if plot is not None:
        sharing.plot_overlap(shared, Path(plot))
        report.print_notes([f"the plot is {plot}"])

    def print_csv(result: Any) -> None:
        print(sharing.overlap_csv(result), end="")  # noqa: T201

    show(shared, print_csv if csv else print_overlap, json=json)
