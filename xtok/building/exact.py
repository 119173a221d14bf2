"""`reapply_exact`: tokens that both sides have, matched to each other."""

from __future__ import annotations

from dataclasses import replace

from xtok.building.exact_rows import with_exact
from xtok.building.match_options import used_options
from xtok.building.matches import find_matches
from xtok.config import Canonicalization, SpecialTokens
from xtok.maps.binding import at_map_widths, bind_map, name_notes, pair_of_maps
from xtok.maps.map_like import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.recipe import with_options
from xtok.maps.stage_reports import with_report
from xtok.tokenizers.pairs import Pair


def reapply_exact(
    projection: MapLike,
    pair: Pair | None = None,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
) -> ProjectionMap:
    """Give each student token whose bytes a teacher token has that one entry, of weight 1.

    Special tokens are paired by role. These rows have no slot; the others stay. With the
    canonicalization `relaxed`, a token without an exact counterpart that has a near-equivalent has
    this one entry and its slot. Token form and ignored ids are those the map was made with.

    >>> spelled = xtok.multitoken(xtok.pair("bytes", "bytes"))
    >>> spelled["a"].kind, xtok.reapply_exact(spelled)["a"].kind
    ('pieces', 'exact')

    Args:
        projection: a map that carries both token tables, or whose pair is given; or its path.
        pair: the map's models; needed for a map without tokens, and for display strings, which a
            map does not carry.
        special_tokens: as in `MultitokenConfig`; None takes what the map was made with.
        canonicalization: None takes what the map was made with.

    Raises:
        XtokError: if the map carries no token tables, or was made with display strings and the
            pair is not given, or is of other tokenizers.
    """
    projection = as_map(projection)
    pair = pair_of_maps(projection) if pair is None else at_map_widths(pair, projection)
    notes = name_notes(pair, projection)
    projection = bind_map(pair, projection)
    used = used_options(projection)
    options = replace(
        used,
        special_tokens=special_tokens or used.special_tokens,
        canonicalization=canonicalization or used.canonicalization,
    )
    result = with_exact(projection, find_matches(pair, options), options)
    recipe = with_options(projection, exact_match=True) if options == used else None
    return with_report(replace(result, recipe=recipe), notes)
