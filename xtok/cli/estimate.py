"""`xtok estimate`."""

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.counting import checkpoint_of, counting_here
from xtok.cli.options import TEXTS, MapOptions, MapOutput, ModelArguments, map_files
from xtok.config import MODELS, EstimateConfig, option
from xtok.counting.texts import find_texts
from xtok.errors import XtokError
from xtok.maps import names

_CLUSTER = "Cluster"


@command
def estimate(
    *,
    models: ModelArguments,
    output: MapOutput,
    text: list[str] = TEXTS,
    initial_projection_path: Path | None = option(
        None,
        "Smooth towards this map of the pair; by default towards one counted on synthetic text.",
        metavar="MAP",
        panel=MODELS,
        autocompletion=map_files,
    ),
    config: EstimateConfig,
    checkpoint: Path | None = option(
        None,
        "Save counts here every minute, and resume from them after an interruption; by default "
        "beside the output.",
        goes_with=("engine local",),
    ),
    engine: Literal["local", "ray"] = option(
        "local",
        "Count on this machine, or on a Ray cluster, which survives lost nodes.",
        panel=_CLUSTER,
    ),
    address: str = option(
        "auto",
        "Of the Ray cluster: HOST:PORT, or auto for the one that this machine is part of.",
        goes_with=("engine ray",),
        panel=_CLUSTER,
    ),
    map_options: MapOptions,
) -> None:
    """Count a map on text: which teacher tokens begin where a student token does, and how often."""
    output.check()
    models.both()
    find_texts(text)
    if checkpoint is not None and not checkpoint.parent.is_dir():
        raise XtokError(
            f"--checkpoint: there is no folder {checkpoint.parent}",
            hint=f"mkdir -p {checkpoint.parent}",
        )
    student, teacher, base = models.pair_of_map(initial_projection_path, map_options)
    ids = student.vocabulary.model_id, teacher.vocabulary.model_id
    chosen = {name: getattr(config, name) for name in ("target", "alpha", "exact_match")}
    words = names.option_words(chosen, asdict(EstimateConfig()))
    parts = "estimate", f"top{config.top_k}", *words, names.text_word(text)
    path = output.path(names.default_name(*ids, *parts))
    counting: Any
    if engine == "local":
        counting = counting_here(student, teacher, checkpoint or checkpoint_of(path))
    else:
        from xtok.counting import ray

        sources: dict[str, Any] = {
            side: ray.TokenizerSource(
                **{**models.loading(side), "vocab_size": tokenizer.vocabulary.vocab_size}
            )
            for side, tokenizer in (("student", student), ("teacher", teacher))
        }
        count_on_ray = partial(ray.count_on_ray, address=address, **sources)
        counting = nullcontext(partial(count_on_ray, progress=report.text_progress_bar))
    with counting as count:
        with redirect_stdout(sys.stderr):  # Ray prints of lost nodes, and stdout is data
            projection = xtok.estimate(
                student, teacher, text, config, base=base, count=count, progress=report.progress_bar
            )
        output.write(projection, path)
