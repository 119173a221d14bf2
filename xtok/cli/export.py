"""`xtok export`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import OUTPUT, MapArgument, MapOptions, Models, expanded
from xtok.config import ExportFormat


@command
def export(
    map_path: MapArgument,
    *,
    kind: Annotated[
        ExportFormat,
        typer.Option("--format", help="What to write; the training guide says who reads it."),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Where to write. nemo-subtokens puts the teacher's side beside it, as "
            "NAME.reverse.pt; shared-vocab writes pairs as .json, vLLM's arrays as .safetensors.",
            metavar="FILE",
            parser=expanded,
        ),
    ],
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="With nemo-subtokens: print NeMo-RL's overrides for these files instead of their "
            "paths.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    models: Models,
    map_options: MapOptions,
) -> None:
    """Export a map to other formats: Parquet, SciPy, NeMo-RL's subtokens and more.

    nemo-subtokens spells tokens, and needs both models.
    """
    if print_config and kind != "nemo-subtokens":
        raise typer.BadParameter("--print-config goes with --format nemo-subtokens")
    from xtok import report
    from xtok.training import exports
    from xtok.training.subtokens import nemo_overrides

    exports.check_export(Path(output), kind)
    projection = map_options.load(map_path)
    report.print_reports(projection.reports)
    projection, tokenizers = models.with_map(projection)
    paths = exports.export(
        projection,
        Path(output),
        kind,
        note=lambda sentence: report.print_notes([sentence]),
        **tokenizers,
    )
    if print_config:
        forward, reverse = paths
        print(nemo_overrides(forward, reverse, map_path))  # noqa: T201
        return
    for path in paths:
        print(path)  # noqa: T201
