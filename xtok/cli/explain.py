"""`xtok explain`."""

from pathlib import Path

import typer

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import JSON, MAP, MapOptions, Models
from xtok.config import option
from xtok.inspection.events import explain_events
from xtok.maps import event_file
from xtok.report.events import print_event_explanations
from xtok.report.maps import print_explanations


@command
def explain(
    *,
    map_path: Path = MAP,
    token: str | None = option(
        None, "A student token, spaces included: ' the'.", argument="[TOKEN]"
    ),
    token_id: list[int] = option(
        [], "Explain the row of this student id. Repeatable.", name="id", metavar="ID"
    ),
    models: Models,
    json: bool = JSON,
    map_options: MapOptions,
) -> None:
    """Explain why a row is as it is: its bytes, its pieces both ways, what each stage did.

    With the models, tokens are also spelled in each other's pieces. Of an event map, it lists the
    tokens of an event.
    """
    if token is None and not token_id:
        raise typer.BadParameter("give a token, or --id")
    tokens: list[str | int] = [*([] if token is None else [token]), *token_id]
    if event_file.holds_events(map_path):
        explained = explain_events(xtok.EventMap.load(map_path), tokens)
        show(explained, print_event_explanations, json=json)
        return
    projection, tokenizers = models.with_map(map_options.load(map_path))
    show(xtok.explain(projection, tokens, **tokenizers), print_explanations, json=json)
