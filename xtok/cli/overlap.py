"""`xtok overlap`."""

from pathlib import Path
from typing import Any

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.doctor import MODEL_LIST, Loading
from xtok.cli.options import JSON, OVERLAP_TEXTS, TEXT_FIELD
from xtok.config import option
from xtok.counting.texts import find_texts
from xtok.report.stdout import print_result
from xtok.report.tokenizers import print_overlap


@command
def overlap(
    *,
    models: list[str] = MODEL_LIST,
    text: list[str] = OVERLAP_TEXTS,
    field: str = TEXT_FIELD,
    json: bool = JSON,
    csv: bool = option(False, "Print CSV, one line per ordered pair.", flag=True),
    plot: Path | None = option(None, "Draw the matrix to a .png, .svg or .pdf file."),
    loading: Loading,
) -> None:
    """Show what share of each tokenizer's tokens the others have, byte by byte."""
    if json and csv:
        raise typer.BadParameter("give --json or --csv, not both")
    from xtok.inspection.overlap import check_plot, overlap_csv, plot_overlap

    if plot is not None:
        check_plot(plot)
    find_texts(text)
    tokenizers = loading.load(models)
    shared = xtok.overlap(tokenizers, text, field=field, progress=report.text_progress_bar)
    if plot is not None:
        plot_overlap(shared, plot)
        report.print_notes([f"the plot is {plot}"])

    def print_csv(result: Any) -> None:
        print_result(overlap_csv(result), end="")

    show(shared, print_csv if csv else print_overlap, json=json)
