"""`xtok inspect`."""

from pathlib import Path

import typer

import xtok
from xtok.building.counting.texts import check_texts
from xtok.cli import console
from xtok.cli.command import command, show
from xtok.cli.options import JSON, MAP, TEXT_FIELD, MapOptions, Models, map_option, text_option
from xtok.cli.tables import maps as tables
from xtok.config import option

_ROWS = "Rows, the worst first"


@command
def inspect(
    *,
    map_path: Path = MAP,
    tokens: list[str] = option(
        [],
        "Student tokens to explain, spaces included: ' the'.",
        argument="[TOKEN]...",
    ),
    token_id: list[int] = option(
        [], "Explain the row of this student id. Repeatable.", name="id", metavar="ID"
    ),
    against: Path | None = map_option(
        "Compare with this map of the same pair: which rows differ, and by how much."
    ),
    num_examples: int | None = option(
        None,
        "Show this many rows: evenly spread, by default 5; with --against those that differ most, "
        "by default 10.",
        min=0,
    ),
    classes: bool = option(
        False,
        "Show rows and teacher tokens by class: digits, punctuation, scripts …",
        flag=True,
    ),
    worst: int | None = option(
        None,
        "List so many rows, those with the least weight on their heaviest entry first; 20 with "
        "--class or --kind.",
        min=1,
        panel=_ROWS,
    ),
    token_class: str | None = option(
        None,
        "Only rows of this class of tokens: digits, han, punctuation, …",
        name="class",
        metavar="CLASS",
        panel=_ROWS,
    ),
    kind: str | None = option(
        None, "Only rows of this kind: pieces, exact, empty, …", metavar="KIND", panel=_ROWS
    ),
    text: list[str] = text_option(
        "With --against and the student's model: weight rows by how often their tokens occur in "
        "this text: "
    ),
    field: str = TEXT_FIELD,
    json: bool = JSON,
    models: Models,
    map_options: MapOptions,
) -> None:
    """Show what a map holds, single rows, or where two maps differ.

    Given the models, tokens are also spelled in each other's pieces.
    """
    is_listing = bool(token_class or kind or worst)
    is_explaining = bool(tokens or token_id)
    if is_listing + is_explaining + classes + (against is not None) > 1:
        raise typer.BadParameter(
            "give one of: tokens or --id; --worst, --class or --kind; --classes; --against"
        )
    if num_examples is not None and (is_listing or is_explaining):
        raise typer.BadParameter("--num-examples goes with the overview or --against")
    if text and (against is None or models.student_model is None):
        raise typer.BadParameter("--text goes with --against and --student-model")
    check_texts(text, field)
    loaded = map_options.load_any(map_path)
    if isinstance(loaded, xtok.SpellingMap):
        overview = not (is_listing or is_explaining or classes or against)
        _show_spellings(models.with_map(loaded, name=map_path)[0], num_examples, overview, json)
        return
    if not isinstance(loaded, xtok.ProjectionMap):
        loaded = map_options.load(map_path)  # which says what it is instead
    projection, pair = models.with_map(loaded, name=map_path)
    console.print_reports(projection.reports)
    if against is not None:
        other = map_options.load(against)
        comparison = xtok.compare(
            projection, other, text, pair=pair, field=field,
            num_examples=10 if num_examples is None else num_examples,
            names=[str(map_path), str(against)],
        )  # fmt: skip
        show(comparison, tables.print_comparison, json=json)
    elif is_listing or is_explaining:
        explanation = xtok.explain(
            projection,
            [*tokens, *token_id],
            pair=pair,
            worst=worst,
            token_class=token_class,
            kind=kind,
        )
        show(explanation, tables.print_explanation, json=json)
    else:
        if num_examples is None:
            num_examples = 0 if classes else 5
        description = xtok.describe(projection, num_examples=num_examples, classes=classes)
        show(description, tables.print_description, json=json)
        if classes and description.coverage is None:
            console.print_notes(["the map carries no tokens, so no classes"])


def _show_spellings(
    spellings: xtok.SpellingMap, num_examples: int | None, overview: bool, json: bool
) -> None:
    if not overview:
        raise typer.BadParameter("a spelling map has an overview alone, with --num-examples")
    from xtok.inspection.describe import describe_spellings

    number = 5 if num_examples is None else num_examples
    show(describe_spellings(spellings, num_examples=number), tables.print_spellings, json=json)
