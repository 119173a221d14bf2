"""`xtok compare`."""

from pathlib import Path

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.options import JSON, TEXT_FIELD, MapOptions, Models, map_files, text_option
from xtok.config import option
from xtok.counting.texts import find_texts
from xtok.report.quality import print_comparison

_TEXTS = text_option(
    [],
    "Weight rows by how often their tokens occur in this text, which the student's model "
    "tokenizes. Repeatable; globs, too.",
)


@command
def compare(
    *,
    first: Path = option(..., "A map file.", argument="MAP", autocompletion=map_files),
    second: Path = option(
        ..., "Another map of the same pair.", argument="MAP", autocompletion=map_files
    ),
    text: list[str] = _TEXTS,
    models: Models,
    field: str = TEXT_FIELD,
    num_examples: int = option(10, "Show this many rows that differ.", min=0),
    json: bool = JSON,
    map_options: MapOptions,
) -> None:
    """Compare two maps of one pair row by row: which differ, by how much, and where it matters."""
    if bool(text) != (models.student_model is not None):
        raise typer.BadParameter("--text and --student-model go together")
    from xtok.inspection.compare import count_tokens

    find_texts(text)
    maps = [map_options.load(path) for path in (first, second)]
    for projection in maps:
        report.print_reports(projection.reports)
    maps[0], tokenizers = models.with_map(maps[0], name=first)
    counts = count_tokens(text, tokenizers["student_model"], field) if text else None
    comparison = xtok.compare(
        *maps, token_counts=counts, num_examples=num_examples, names=[str(first), str(second)]
    )
    show(comparison, print_comparison, json=json)
