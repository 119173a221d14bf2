"""`xtok estimate`."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from xtok.cli.command import Given, command
from xtok.cli.counting import checkpoint_of, count_here, keeping
from xtok.cli.options import (
    MODELS,
    MapOptions,
    MapOutput,
    ModelArguments,
    Texts,
    read_path,
)
from xtok.config import EstimateConfig
from xtok.errors import XtokError

_CLUSTER = "Cluster"

Engine = Literal["local", "ray"]


@command
def estimate(
    given: Given,
    models: ModelArguments,
    output: MapOutput,
    *,
    text: Texts,
    initial_projection_path: Annotated[
        Path | None,
        typer.Option(
            help="Smooth towards this map of the pair; by default towards one counted on synthetic "
            "text.",
            metavar="MAP",
            parser=read_path,
            rich_help_panel=MODELS,
        ),
    ] = None,
    config: EstimateConfig,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Save counts here every minute, and resume from them after an interruption; by "
            "default beside the output.",
            metavar="FILE",
            parser=read_path,
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="Count on this machine, or on a Ray cluster.", rich_help_panel=_CLUSTER),
    ] = "local",
    address: Annotated[
        str,
        typer.Option(
            help="Of the Ray cluster: HOST:PORT, or auto for the one that this machine is part of.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "auto",
    map_options: MapOptions,
) -> None:
    """Count a map on text: which teacher tokens begin where a student token does, and how often."""
    if engine == "local" and "address" in given:
        raise typer.BadParameter("--address goes with --engine ray")
    if engine == "ray" and checkpoint is not None:
        raise typer.BadParameter("--checkpoint is for --engine local; Ray survives lost nodes")
    output.check()
    models.both()
    from xtok import report
    from xtok.counting.texts import find_texts
    from xtok.maps import names
    from xtok.stages import estimate as stage

    find_texts(text)
    if checkpoint is not None and not checkpoint.parent.is_dir():
        raise XtokError(
            f"--checkpoint: there is no folder {checkpoint.parent}",
            hint=f"mkdir -p {checkpoint.parent}",
        )
    base = None
    if initial_projection_path is None:
        student, teacher = models.pair(map_options)
    else:
        base = map_options.load(initial_projection_path)
        base, sides = models.with_map(base, map_options, name=initial_projection_path)
        student, teacher = sides["student_model"], sides["teacher_model"]
    ids = student.vocabulary.model_id, teacher.vocabulary.model_id
    chosen = {name: getattr(config, name) for name in ("target", "alpha", "exact_match")}
    words = names.option_words(chosen, asdict(EstimateConfig()))
    parts = "estimate", f"top{config.top_k}", *words, names.text_word(text)
    path = output.path(names.default_name(*ids, *parts))
    count: Any
    if engine == "local":
        saved = checkpoint or checkpoint_of(path)
        count = partial(count_here, student=student, teacher=teacher, checkpoint=saved)
    else:
        saved = None
        from xtok.counting import ray

        sources = []
        for side, tokenizer in (("student", student), ("teacher", teacher)):
            loading = models.loading(side, map_options)
            if base is not None:
                loading["vocab_size"] = tokenizer.vocabulary.vocab_size
            sources.append(ray.TokenizerSource(**loading))
        count = partial(
            ray.count_on_ray,
            student=sources[0],
            teacher=sources[1],
            address=address,
            progress=report.text_progress_bar,
        )
    with keeping(saved):
        with redirect_stdout(sys.stderr):  # Ray prints of lost nodes, and stdout is data
            projection = stage.estimate(
                student,
                teacher,
                text,
                config,
                base=base,
                count=count,
                progress=report.progress_bar,
            )
        output.write(projection, path)
