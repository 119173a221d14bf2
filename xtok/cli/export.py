"""`xtok export`."""

from pathlib import Path
from typing import Annotated

import typer

from xtok.cli.command import command
from xtok.cli.options import MapArgument, MapOptions, Models, expanded
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
            help="Where to write; nemo-subtokens puts the teacher's side beside it, as "
            "NAME.reverse.pt.",
            metavar="FILE",
            parser=expanded,
        ),
    ],
    models: Models,
    map_options: MapOptions,
) -> None:
    """Export a map to other formats: Parquet, SciPy, NeMo-RL's subtokens and more.

    nemo-subtokens spells tokens, and needs both models.
    """
    from xtok import report
    from xtok.training import exports

    exports.check_export(Path(output), kind)
    projection = map_options.load(map_path)
    report.print_reports(projection.reports)
    projection, tokenizers = models.with_map(projection)
    for path in exports.export(projection, Path(output), kind, **tokenizers):
        print(path)  # noqa: T201
