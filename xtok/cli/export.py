"""`xtok export`."""

from pathlib import Path

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.options import MAP, MapOptions, Models
from xtok.config import ExportFormat, option


@command
def export(
    *,
    map_path: Path = MAP,
    kind: ExportFormat = option(
        ..., "What to write; the training guide says who reads it.", name="format"
    ),
    output: Path = option(
        ...,
        "Where to write; nemo-subtokens puts the teacher's side beside it, as NAME.reverse.pt.",
        short="-o",
    ),
    models: Models,
    map_options: MapOptions,
) -> None:
    """Export a map to other formats: Parquet, SciPy, NeMo-RL's subtokens and more.

    nemo-subtokens spells tokens, and needs both models.
    """
    from xtok.training.exports import check_export

    check_export(output, kind)
    projection = map_options.load(map_path)
    report.print_reports(projection.reports)
    projection, tokenizers = models.with_map(projection)
    for path in xtok.export(projection, output, kind, **tokenizers):
        print(path)  # noqa: T201
