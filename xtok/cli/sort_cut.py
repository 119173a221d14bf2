"""`xtok sort-cut`."""

from xtok.cli.command import command
from xtok.cli.options import InputMap, MapOptions, RefinedOutput
from xtok.cli.spellings import refined_name
from xtok.config import SortCutConfig


@command
def sort_cut(
    source: InputMap,
    output: RefinedOutput,
    *,
    config: SortCutConfig,
    map_options: MapOptions,
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    output = output.beside(source.path)
    output.check()
    from xtok import report
    from xtok.inspection import inspect
    from xtok.stages import sort_cut as stage

    projection = stage.sort_cut(map_options.load(source.path), config)
    output.write(projection, output.path(refined_name(source.path, "sort-cut", projection)))
    report.print_notes(inspect.weight_notes(projection))
