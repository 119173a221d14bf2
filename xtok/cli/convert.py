"""`xtok convert`."""

from pathlib import Path

import typer

import xtok
from xtok import report
from xtok.cli.command import command, read_path
from xtok.cli.options import JSON, MAP, MapOptions, Models, report_written
from xtok.config import OUTPUT, MapFormat, option


@command
def convert(
    *,
    map_path: Path = MAP,
    target: Path | None = option(
        None,
        "Where to write: .safetensors, or .pt as NeMo-RL reads it.",
        argument="OUTPUT",
        parser=read_path,
    ),
    output: Path | None = option(None, "Where to write, instead of OUTPUT.", short="-o"),
    to: MapFormat | None = option(
        None,
        "What to write, if not what the suffix tells. nemo-subtokens: the two tables (.pt) of "
        "NeMo-RL's drafts, from both models; the teacher's is NAME.reverse.pt.",
        panel=OUTPUT,
    ),
    normalize: bool = option(False, "Divide the rows of learned weights by their sums.", flag=True),
    json: bool = JSON,
    models: Models,
    map_options: MapOptions,
) -> None:
    """Convert a map between .safetensors and NeMo-RL's .pt, or to what other programs read."""
    from xtok.maps.convert import check_converted
    from xtok.maps.subtokens import nemo_overrides, nemo_table_overrides

    if (target is None) == (output is None):
        raise typer.BadParameter("give one output: OUTPUT, or --output")
    path = check_converted(target or output or "", to)
    projection = map_options.load(map_path, normalize=normalize)
    reports = projection.reports
    projection, pair = models.with_map(projection)
    paths = xtok.convert(projection, path, to=to, note=report.print_note, student_model=pair)
    if to == "nemo-subtokens":
        report.print_note(nemo_table_overrides(*paths))
    elif path.suffix == ".pt":
        report.print_note(nemo_overrides(path))
    report_written(reports, *paths, json=json)
