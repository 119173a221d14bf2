"""`xtok inspect`."""

from pathlib import Path

import typer

import xtok
from xtok._lib.fields import option
from xtok.cli import console, options
from xtok.cli.command import command, show
from xtok.cli.tables.inspection import print_inspection
from xtok.config import InspectConfig
from xtok.conversation.texts import check_texts


@command
def inspect(
    *,
    map_path: Path = options.MAP,
    tokens: list[str] = option(
        [],
        "Student tokens to explain, including spaces: ' the'. Put -- before a token that begins "
        "with a dash.",
        argument="[TOKEN]...",
    ),
    token_id: list[int] = option(
        [], "Explain the row of this student id. Repeatable.", name="id", metavar="ID"
    ),
    against: Path | None = options.map_option(
        "Compare the map row by row with this map of the same pair."
    ),
    config: InspectConfig,
    text: list[str] = options.text_option(
        "Weight rows by the frequency of their tokens in this text (requires --against and "
        "--student-model): "
    ),
    field: str = options.TEXT_FIELD,
    json: bool = options.json_option(
        "student, teacher; for an overview, also: method, history, rows_by_kind, examples and "
        "more; for rows: rows, rows_matching; with --against: rows, rows_that_differ, "
        "rows_of_other_top, mean_distance, weighted_by_text, examples"
    ),
    models: options.ModelOptions,
    map_options: options.MapOptions,
) -> None:
    """Show an overview of a map, some of its rows, or its differences from another map.

    If both models are given, the command also shows how the other model spells each token. For an
    event map, the command shows the tokens that share an event. For a spelling map, the command
    shows the spellings of tokens.

    Example: xtok inspect map.safetensors 201 ' the'
    """
    if text and (against is None or models.student is None):
        raise typer.BadParameter("--text requires --against and --student-model")
    check_texts(text, field)
    any_map = map_options.load_any(map_path)
    hint = "use --against {0} for a second map, and -s and -t for models"
    options.check_tokens(tokens, hint, any_map.student.table)
    any_map, pair = models.with_map(any_map, name=map_path)
    console.print_reports(any_map.reports)
    ids, error = any_map.student.find_ids([*tokens, *token_id])
    if error is not None and not ids:
        raise error
    inspection = xtok.inspect(
        any_map,
        ids,
        config,
        pair=pair,
        against=None if against is None else map_options.load(against),
        texts=text,
        field=field,
        names=[] if against is None else [str(map_path), str(against)],
    )
    show(inspection, print_inspection, json=json)
    if error is not None:  # rows of some tokens
        raise error
