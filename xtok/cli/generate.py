"""`xtok generate`."""

from pathlib import Path

import typer

import xtok
from xtok._lib.fields import COMPUTING, MAIN, option
from xtok.cli import console, options
from xtok.cli.command import command
from xtok.cli.nemo_options import nemo_name
from xtok.config import GenerateConfig
from xtok.maps.names import map_name


@command
def generate(
    context: typer.Context,
    *,
    models: options.Models,
    output: options.StrictOutput,
    embedding_model: str | None = option(
        None,
        "Method for comparing tokens: own (the two models' input embeddings), spelling (byte "
        "n-grams, without a model), sentence:MODEL (a sentence-transformers model) or input:MODEL "
        "(a language model's input embeddings). Default: own if both models have safetensors "
        "weights, otherwise spelling.",
        metavar="KIND:MODEL",
        panel=MAIN,
    ),
    config: GenerateConfig,
    cache_dir: Path | None = option(
        None,
        "Cache folder for sentence embeddings. Default: $XTOK_CACHE_DIR, or xtok in the user's "
        "cache folder.",
        metavar="FOLDER",
        panel=COMPUTING,
    ),
    force_recompute: bool = option(
        False, "Recompute cached embeddings.", flag=True, panel=COMPUTING
    ),
    widths: options.Widths,
) -> None:
    """Map each student token to the most similar teacher tokens (NeMo-RL's first stage).

    Example: xtok generate meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o similar.safetensors
    """
    output.check()
    pair = models.pair(widths)
    options.note_one_vocabulary(pair)
    projection = xtok.generate(
        pair,
        embedding_model,
        config,
        cache_dir=cache_dir,
        force_recompute=force_recompute,
        progress=console.progress_bar,
    )
    name = nemo_name(context, models.both(), config) or map_name(projection, "generate")
    output.write_stage(projection, name)
