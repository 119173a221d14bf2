"""`xtok reapply-exact`."""

import xtok
from xtok.cli.command import command
from xtok.cli.nemo_options import refined_name
from xtok.cli.options import MapOptions, OptionalModels, RefinedMap
from xtok.config import MATCHING, Canonicalization, SpecialTokens, option

_AS_MADE = option(None, "As in multitoken. Default: as when the map was made.", panel=MATCHING)


@command
def reapply_exact(
    *,
    files: RefinedMap,
    models: OptionalModels,
    special_tokens: SpecialTokens | None = _AS_MADE,
    canonicalization: Canonicalization | None = _AS_MADE,
    map_options: MapOptions,
) -> None:
    """Where both sides have a token, give it one entry of weight 1.

    A map without tokens, as NeMo-RL's tools write it, needs both models.

    Example: xtok reapply-exact first.pt -o exact.pt
    """
    files.check()
    source = files.source()
    projection, pair = models.with_map(map_options.load(source), map_options, name=source)
    projection = xtok.reapply_exact(
        projection, pair, special_tokens=special_tokens, canonicalization=canonicalization
    )
    files.write(projection, refined_name(source, "reapply-exact", projection))
