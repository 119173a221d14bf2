"""`xtok generate`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import MODELS, ModelArguments, StrictOutput, Widths, read_path
from xtok.cli.spellings import nemo_name
from xtok.config import COMPUTING, GenerateConfig


@command
def generate(
    context: typer.Context,
    models: ModelArguments,
    output: StrictOutput,
    *,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="sentence:MODEL, a sentence-transformers model; input:MODEL, the input-embedding "
            "layer of a language model; or own, the two models' own input embeddings. By default "
            "own if both models have weights, else "
            "all-MiniLM-L6-v2 of sentence-transformers.",
            metavar="KIND:MODEL",
            rich_help_panel=MODELS,
        ),
    ] = None,
    embedding_revision: Annotated[
        str | None,
        typer.Option(
            help="Branch, tag or commit of the embedding model's repo.", rich_help_panel=MODELS
        ),
    ] = None,
    config: GenerateConfig,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where embeddings are kept. By default $XTOK_CACHE_DIR, or xtok in the user's "
            "cache folder.",
            metavar="FOLDER",
            parser=read_path,
            rich_help_panel=COMPUTING,
        ),
    ] = None,
    force_recompute: Annotated[
        bool,
        typer.Option(
            "--force-recompute",
            help="Embed again, and replace what is kept.",
            rich_help_panel=COMPUTING,
        ),
    ] = False,
    widths: Widths,
) -> None:
    """Map each student token to the teacher tokens whose embeddings are most similar."""
    output.check()
    from xtok import report
    from xtok.embeddings import generate as stage
    from xtok.embeddings.cache import Cache
    from xtok.io import cache_folder
    from xtok.maps.names import map_name

    student, teacher = models.pair(widths)
    projection = stage.generate(
        student,
        teacher,
        embedding_model,
        config,
        embedding_revision=embedding_revision,
        offline=models.offline,
        cache=Cache(cache_dir or cache_folder(), recompute=force_recompute),
        progress=report.progress_bar,
    )
    name = nemo_name(context, models, config) or map_name(projection, "generate")
    output.write(projection, output.path(name))
