"""`xtok reapply-exact`."""

import xtok
from xtok.cli.command import command
from xtok.cli.options import MapArgument, MapOptions, ModelArguments, RefinedOutput
from xtok.cli.spellings import refined_name
from xtok.config import MATCHING, Canonicalization, SpecialTokens, option

_AS_MADE = option(None, "As in multitoken; by default what the map was made with.", panel=MATCHING)


@command
def reapply_exact(
    *,
    source: MapArgument,
    models: ModelArguments,
    output: RefinedOutput,
    special_tokens: SpecialTokens | None = _AS_MADE,
    canonicalization: Canonicalization | None = _AS_MADE,
    map_options: MapOptions,
) -> None:
    """Give tokens that both sides have a single entry of weight 1.

    A map without tokens, as NeMo-RL's tools write it, needs both models.
    """
    map_path = source.one_path()
    output.check(map_path)
    projection = map_options.load(map_path)
    projection, pair = models.with_map(projection, map_options, name=map_path)
    projection = xtok.reapply_exact(
        projection,
        special_tokens=special_tokens,
        canonicalization=canonicalization,
        student_model=pair,
    )
    name = refined_name(map_path, "reapply-exact", projection)
    output.write(projection, output.path(name, map_path))
