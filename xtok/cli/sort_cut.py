"""`xtok sort-cut`."""

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.options import MapArgument, MapOptions, RefinedOutput
from xtok.cli.spellings import refined_name
from xtok.config import SortCutConfig


@command
def sort_cut(
    *, source: MapArgument, output: RefinedOutput, config: SortCutConfig, map_options: MapOptions
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    map_path = source.one_path()
    output = output.beside(map_path)
    output.check()
    from xtok.inspection.inspect import weight_notes

    projection = xtok.sort_cut(map_options.load(map_path), config)
    output.write(projection, output.path(refined_name(map_path, "sort-cut", projection)))
    report.print_notes(weight_notes(projection))
