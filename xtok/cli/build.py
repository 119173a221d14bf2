"""`xtok build`."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.counting import checkpoint_of, counting_here, counting_on_ray, save_counted
from xtok.cli.options import (
    TEXT_FIELD,
    MapOptions,
    ModelArguments,
    StrictOutput,
    map_files,
    report_written,
    text_option,
)
from xtok.cli.spellings import nemo_name
from xtok.config import MAIN, OUTPUT, TEXT, WAIT, BuildConfig, Loss, option
from xtok.counting.texts import find_texts

_CLUSTER = "Cluster"


@command
def build(
    context: typer.Context,
    *,
    models: ModelArguments,
    for_loss: Loss | None = option(
        None,
        "Preset for a loss: p-kl, gold or h-kl; options that you give override it. Without it, the "
        "recipe of X-Token.",
        name="for",
        metavar="LOSS",
        panel=MAIN,
    ),
    output: StrictOutput,
    text: list[str] = text_option("Count the map on this text: "),
    field: str = TEXT_FIELD,
    initial_projection_path: Path | None = option(
        None,
        "With --text: smooth towards this map of the pair; by default towards one counted on "
        "synthetic text.",
        metavar="MAP",
        needs={"text": True},
        panel=TEXT,
        autocompletion=map_files,
    ),
    config: BuildConfig,
    skip_existing: bool = option(
        False,
        "Keep an output that is already the same map: same tokenizers, options and stages. Else "
        "one process makes it, and others that ask for the same file wait.",
        flag=True,
        panel=OUTPUT,
    ),
    timeout: float = option(
        WAIT,
        "Seconds to wait for another process that makes the same file; then make it here, too.",
        min=0,
        needs={"skip_existing": True},
        panel=OUTPUT,
    ),
    engine: Literal["local", "ray"] = option(
        "local",
        "Count on this machine, or on a Ray cluster, which survives lost nodes.",
        needs={"text": True},
        panel=_CLUSTER,
    ),
    address: str = option(
        "auto",
        "The Ray cluster's HOST:PORT, or auto for the one that this machine is part of.",
        needs={"engine": "ray"},
        panel=_CLUSTER,
    ),
    map_options: MapOptions,
) -> None:
    """Build a map for a pair of models, in one go: two tokenizers in, a finished map out.

    With --text, the map is counted on it; counts are saved beside the output while it takes.
    """
    names = models.both()
    find_texts(text)
    from xtok.maps.names import name_of_map
    from xtok.stages.build import difference, kept_or_made
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, names)
    own_name = name_of_map(student_id, teacher_id, config, loss=for_loss, texts=text)
    path = output.path((None if for_loss else nemo_name(context, models, config)) or own_name)
    if not (skip_existing and path.is_file()):  # a map that is kept is not written
        output.check()
    student, teacher, initial = models.pair_of_map(initial_projection_path, map_options)
    counting: Any = nullcontext()
    if text and engine == "ray":
        counting = counting_on_ray(models, student, teacher, address)
    elif text:
        counting = counting_here(student, teacher, checkpoint_of(path))

    def make() -> xtok.ProjectionMap:
        with counting as count:
            projection = xtok.build(
                student,
                teacher,
                config,
                texts=text,
                field=field,
                initial=initial,
                count=count,
                progress=report.progress_bar,
            )
            output.require_complete(projection)
            if text and engine == "local":
                save_counted(projection, path)
            else:
                projection.save(path)
        return projection

    if skip_existing:
        differs = partial(
            difference, student=student, teacher=teacher, config=config, texts=text, initial=initial
        )
        projection = kept_or_made(path, differs, make, timeout=timeout, note=report.print_note)
    else:
        projection = make()
    report_written(projection.reports, path, json=output.json)
    if path.suffix == ".pt":
        from xtok.maps.subtokens import nemo_overrides

        report.print_note(nemo_overrides(path, for_loss))
