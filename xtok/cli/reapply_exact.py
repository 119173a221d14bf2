"""`xtok reapply-exact`."""

import xtok
from xtok._lib.fields import MATCHING, option
from xtok.cli import options
from xtok.cli.command import command
from xtok.cli.nemo_options import refined_name
from xtok.config import Canonicalization, SpecialTokens

_AS_MADE = option(None, "See xtok multitoken. Default: the value in the map.", panel=MATCHING)


@command
def reapply_exact(
    *,
    files: options.RefinedMap,
    models: options.OptionalModels,
    special_tokens: SpecialTokens | None = _AS_MADE,
    canonicalization: Canonicalization | None = _AS_MADE,
    map_options: options.MapOptions,
) -> None:
    """Give each shared token a single entry with weight 1 (NeMo-RL's third stage).

    Maps from NeMo-RL's tools contain no tokens. For such a map, name both models.

    Example: xtok reapply-exact first.pt -o exact.pt
    """
    files.check()
    source = files.source()
    projection, pair = models.with_map(map_options.load(source), map_options, name=source)
    projection = xtok.reapply_exact(
        projection, pair, special_tokens=special_tokens, canonicalization=canonicalization
    )
    files.write(projection, refined_name(source, "reapply-exact", projection))
