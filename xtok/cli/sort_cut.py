"""`xtok sort-cut`."""

import xtok
from xtok.cli.command import command
from xtok.cli.options import PRESERVE_LAST, MapArgument, RefinedOutput
from xtok.cli.spellings import refined_name
from xtok.config import SortCutConfig


@command
def sort_cut(
    *,
    source: MapArgument,
    output: RefinedOutput,
    config: SortCutConfig,
    preserve_last: bool | None = PRESERVE_LAST,
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    map_path = source.one_path()
    output.check(map_path)
    projection = xtok.sort_cut(
        xtok.ProjectionMap.load(map_path, preserve_last=preserve_last), config
    )
    name = refined_name(map_path, "sort-cut", projection)
    output.write(projection, output.path(name, map_path))
