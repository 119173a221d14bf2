"""`xtok multitoken`."""

from pathlib import Path

import typer

import xtok
from xtok._lib.fields import MAIN, MAKING, OUTPUT, option
from xtok.cli import console, options
from xtok.cli.command import command
from xtok.cli.nemo_options import nemo_name
from xtok.config import MultitokenConfig
from xtok.maps.names import map_name


@command
def multitoken(
    context: typer.Context,
    *,
    models: options.Models,
    output: options.StrictOutput,
    initial_projection_path: Path | None = options.map_option(
        "A map of the same pair to extend.", panel=MAIN
    ),
    config: MultitokenConfig,
    exact_match: bool = option(
        False, "Give each shared token a single entry with weight 1.", panel=MAKING
    ),
    num_examples: int = option(
        0, "Print this many rows of the map on stderr.", min=0, panel=OUTPUT
    ),
    map_options: options.MapOptions,
) -> None:
    """Map each student token to the teacher tokens that spell its bytes (NeMo-RL's second stage).

    Example: xtok multitoken meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o first.pt
    """
    output.check()
    initial, pair = models.with_initial(initial_projection_path, map_options)
    options.note_one_vocabulary(pair)
    projection = xtok.multitoken(
        pair, config=config, initial=initial, progress=console.progress_bar
    )
    if exact_match:
        projection = xtok.reapply_exact(projection, pair)
    name = nemo_name(context, models.both(), config) or map_name(projection, "multitoken")
    output.write(projection, name)
    if num_examples:
        from xtok.cli.tables.maps import print_examples

        print_examples(xtok.describe(projection, num_examples=num_examples).examples)
