"""`xtok explain`."""

from typing import Annotated

import typer

from xtok.cli.command import command, show
from xtok.cli.options import Json, MapArgument, MapOptions, Models


@command
def explain(
    map_path: MapArgument,
    token: Annotated[
        str | None,
        typer.Argument(metavar="[TOKEN]", help="A student token, spaces included: ' the'."),
    ] = None,
    *,
    token_id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Explain the row of this student id. Repeatable.", metavar="ID"),
    ] = None,
    models: Models,
    json: Json = False,
    map_options: MapOptions,
) -> None:
    """Explain why a row is as it is: its bytes, its pieces both ways, what each stage did.

    With the models, tokens are also spelled in each other's pieces.
    """
    if token is None and not token_id:
        raise typer.BadParameter("give a token, or --id")
    from xtok.inspection import explain as why
    from xtok.report.maps import print_explanations

    projection, tokenizers = models.with_map(map_options.load(map_path))
    tokens: list[str | int] = [*([] if token is None else [token]), *(token_id or [])]
    rows = why.explain(projection, tokens, **tokenizers)
    show(rows, print_explanations, json=json)
