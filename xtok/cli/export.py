"""`xtok export`."""

from pathlib import Path

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.options import MAP, MapOptions, Models
from xtok.config import OUTPUT, ExportFormat, option
from xtok.report.stdout import print_path, print_result


@command
def export(
    *,
    map_path: Path = MAP,
    kind: ExportFormat = option(
        ..., "What to write; the training guide says who reads it.", name="format"
    ),
    output: Path = option(
        ...,
        "Where to write. nemo-subtokens puts the teacher's side beside it, as NAME.reverse.pt; "
        "shared-vocab writes pairs as .json, vLLM's arrays as .safetensors.",
        short="-o",
    ),
    print_config: bool = option(
        False,
        "Print NeMo-RL's overrides for these files instead of their paths.",
        flag=True,
        needs_one_of=("kind nemo-subtokens",),
        panel=OUTPUT,
    ),
    models: Models,
    map_options: MapOptions,
) -> None:
    """Export a map to other formats: Parquet, SciPy, NeMo-RL's subtokens and more.

    nemo-subtokens spells tokens, and needs both models.
    """
    from xtok.training.exports import check_export
    from xtok.training.subtokens import nemo_overrides

    check_export(output, kind)
    projection = map_options.load(map_path)
    report.print_reports(projection.reports)
    projection, tokenizers = models.with_map(projection)
    paths = xtok.export(
        projection,
        output,
        kind,
        note=lambda sentence: report.print_notes([sentence]),
        **tokenizers,
    )
    if print_config:
        forward, reverse = paths
        print_result(nemo_overrides(forward, reverse, map_path))
        return
    for path in paths:
        print_path(path)
