"""`xtok reapply-exact`."""

from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import InputMap, MapOptions, Models, RefinedOutput
from xtok.cli.spellings import refined_name
from xtok.config import MATCHING, Canonicalization, SpecialTokens


@command
def reapply_exact(
    source: InputMap,
    models: Models,
    output: RefinedOutput,
    *,
    special_tokens: Annotated[
        SpecialTokens | None,
        typer.Option(
            help="As in multitoken; by default what the map was made with.",
            rich_help_panel=MATCHING,
        ),
    ] = None,
    canonicalization: Annotated[
        Canonicalization | None,
        typer.Option(
            help="As in multitoken; by default what the map was made with.",
            rich_help_panel=MATCHING,
        ),
    ] = None,
    map_options: MapOptions,
) -> None:
    """Give tokens that both sides have a single entry of weight 1.

    A map without tokens, as NeMo-RL's tools write it, needs both models.
    """
    output = output.beside(source.path)
    output.check()
    models.sides()
    from xtok.stages import exact

    projection = map_options.load(source.path)
    projection, tokenizers = models.with_map(projection, map_options, name=source.path)
    projection = exact.reapply_exact(
        projection, special_tokens=special_tokens, canonicalization=canonicalization, **tokenizers
    )
    output.write(projection, output.path(refined_name(source.path, "reapply-exact", projection)))
