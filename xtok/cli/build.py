"""`xtok build`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.counting import (
    checkpoint_of,
    counts_saved,
    read_here,
    read_on_cluster,
    save_counted,
)
from xtok.cli.options import (
    ADDRESS,
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
from xtok.counting.texts import check_texts

if TYPE_CHECKING:
    from xtok.counting.pair_text import PairText


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
        panel="Cluster",
    ),
    address: str = ADDRESS,
    map_options: MapOptions,
) -> None:
    """Build a map for a pair of models, in one go: two tokenizers in, a finished map out.

    With --text, the map is counted on it; counts are saved beside the output while it takes.
    """
    names = models.both()
    check_texts(text, field)
    from xtok.maps.names import name_of_map
    from xtok.stages.build import difference, load_or_build
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, names)
    own_name = name_of_map(student_id, teacher_id, config, loss=for_loss, texts=text)
    path = output.path((None if for_loss else nemo_name(context, models, config)) or own_name)
    if not (skip_existing and path.is_file()):  # a map that is kept is not written
        output.check()
    pair, initial = models.pair_of_map(initial_projection_path, map_options)
    checkpoint = checkpoint_of(path)

    def counted() -> "PairText":
        from xtok.stages.counted import wanted_by

        job: Any = pair, text, wanted_by(config)
        if engine == "ray":
            return read_on_cluster(models, *job, field=field, address=address)
        return read_here(*job, field=field, checkpoint=checkpoint)

    def make() -> xtok.ProjectionMap:
        with counts_saved(checkpoint):
            projection = xtok.build(
                pair,
                config=config,
                texts=counted() if text else (),
                initial=initial,
                progress=report.progress_bar,
            )
            output.require_complete(projection)
            save_counted(projection, path, checkpoint)
        return projection

    if skip_existing:
        differs = partial(difference, pair=pair, config=config, texts=text, initial=initial)
        projection = load_or_build(path, differs, make, timeout=timeout, note=report.print_note)
    else:
        projection = make()
    report_written(projection.reports, path, json=output.json)
    if path.suffix == ".pt":
        from xtok.maps.subtokens import nemo_overrides

        report.print_note(nemo_overrides(path, for_loss))
