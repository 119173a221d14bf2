"""`xtok sort-cut`."""

import xtok
from xtok.cli import options
from xtok.cli.command import command
from xtok.cli.nemo_options import refined_name
from xtok.config import SortCutConfig


@command
def sort_cut(
    *,
    files: options.RefinedMap,
    config: SortCutConfig,
    preserve_last: bool | None = options.PRESERVE_LAST,
) -> None:
    """Keep the heaviest entries of each row, and normalize the row (NeMo-RL's last stage).

    A scale slot stays the last entry of its row.

    Example: xtok sort-cut exact.pt --top-k 4 -o map.pt
    """
    files.check()
    projection = xtok.ProjectionMap.load(files.source(), preserve_last=preserve_last)
    projection = xtok.sort_cut(projection, config)
    files.write_stage(projection, refined_name(files.source(), "sort-cut", projection))
