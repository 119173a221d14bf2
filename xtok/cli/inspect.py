"""`xtok inspect`."""

from dataclasses import dataclass
from pathlib import Path

import typer

import xtok
from xtok.building.counting.texts import check_texts
from xtok.cli import console
from xtok.cli.command import command, show
from xtok.cli.options import (
    MAP,
    TEXT_FIELD,
    MapOptions,
    Models,
    check_tokens,
    json_option,
    map_option,
    text_option,
)
from xtok.cli.tables import maps as tables
from xtok.config import Config, option
from xtok.maps.file import KINDS


@dataclass(frozen=True, kw_only=True)
class ListedRows(Config):
    """Which rows are listed, as `xtok.explain` takes it."""

    panel = "List rows, worst first"
    worst: int | None = option(
        None,
        "List this many rows, starting with those whose heaviest entry is the lightest. Default "
        "with --class or --kind: 20.",
        min=1,
    )
    token_class: str | None = option(
        None,
        "Only rows of this class of tokens: digits, han, punctuation, …",
        name="class",
        metavar="CLASS",
    )
    kind: str | None = option(
        None, "Only rows of this kind: pieces, exact, empty, …", metavar="KIND"
    )


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
        "Number of example rows. Default: 5, evenly spread; with --against, the 10 that differ "
        "most.",
        min=0,
    ),
    classes: bool = option(
        False,
        "Show rows and teacher tokens by class: digits, punctuation, scripts …",
        flag=True,
    ),
    listed: ListedRows,
    text: list[str] = text_option(
        "With --against and the student's model: weight rows by how often their tokens occur in "
        "this text: "
    ),
    field: str = TEXT_FIELD,
    json: bool = json_option(
        "student, teacher, and of an overview method, history, rows_by_kind, examples and more; of "
        "rows: rows, rows_matching; with --against: rows, rows_that_differ, rows_of_other_top, "
        "mean_distance, weighted_by_text, examples"
    ),
    models: Models,
    map_options: MapOptions,
) -> None:
    """Show what a map holds, single rows, or where two maps differ.

    Given the models, tokens are also spelled in each other's pieces. Of an event map, it shows what
    shares an event with a token; of a spelling map, how the token is spelled.

    Example: xtok inspect map.safetensors 201 ' the'
    """
    is_listing = listed != ListedRows()
    is_explaining = bool(tokens or token_id)
    if is_listing + is_explaining + classes + (against is not None) > 1:
        raise typer.BadParameter(
            "give one of: tokens or --id; --worst, --class or --kind; --classes; --against"
        )
    if num_examples is not None and (is_listing or is_explaining):
        raise typer.BadParameter("--num-examples is for the overview and --against")
    if text and (against is None or models.student_model is None):
        raise typer.BadParameter("--text needs --against and --student-model")
    check_texts(text, field)
    loaded = map_options.load_any(map_path)
    table = loaded.student.table
    where = "a second map is --against {0}, models are -s and -t"
    check_tokens(tokens, where, table.ids_of if table else lambda token: [])
    if not isinstance(loaded, xtok.ProjectionMap):
        if is_listing or classes or against is not None:
            raise typer.BadParameter(
                f"{map_path} is {KINDS[loaded.KIND][0]}: "
                "give tokens or --id, or --num-examples alone"
            )
        other_kind, _ = models.with_map(loaded, name=map_path)
        _show_other(
            other_kind, [*tokens, *token_id], 5 if num_examples is None else num_examples, json
        )
        return
    projection, pair = models.with_map(loaded, name=map_path)
    console.print_reports(projection.reports)
    if against is not None:
        comparison = xtok.compare(
            projection, map_options.load(against), text, pair=pair, field=field,
            num_examples=10 if num_examples is None else num_examples,
            names=[str(map_path), str(against)],
        )  # fmt: skip
        show(comparison, tables.print_comparison, json=json)
    elif is_listing or is_explaining:
        explanation = xtok.explain(projection, [*tokens, *token_id], pair=pair, **vars(listed))
        show(explanation, tables.print_explanation, json=json)
    else:
        if num_examples is None:
            num_examples = 0 if classes else 5
        description = xtok.describe(projection, num_examples=num_examples, classes=classes)
        show(description, tables.print_description, json=json)
        if classes and description.coverage is None:
            console.print_notes(["the map carries no tokens, so no classes"])


def _show_other(
    m: xtok.EventMap | xtok.SpellingMap, tokens: list[str | int], num_examples: int, json: bool
) -> None:
    """Show an event map or a spelling map, or what it has of tokens."""
    from xtok.cli.tables import events as tables
    from xtok.inspection import events, spellings

    if isinstance(m, xtok.EventMap) and tokens:
        show(events.explain_events(m, tokens), tables.print_event_explanation, json=json)
    elif isinstance(m, xtok.EventMap):
        description = events.describe_events(m, num_examples=num_examples)
        show(description, tables.print_events, json=json)
    elif tokens:
        show(spellings.explain_spellings(m, tokens), tables.print_spelled, json=json)
    else:
        found = spellings.describe_spellings(m, num_examples=num_examples)
        show(found, tables.print_spellings, json=json)
