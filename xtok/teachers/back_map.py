"""The map from a teacher to a student that projecting needs: how it is built, or checked."""

from __future__ import annotations

from xtok.config import BuildConfig
from xtok.errors import XtokError
from xtok.maps.binding import at_map_widths, bind_map, is_swapped
from xtok.maps.map_like import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.pairs import Pair

BACK_MAP = BuildConfig.for_loss("p-kl", target="start", top_k=32)
"""How a map from the teacher to the student is built, where none is given."""


def bind_back_map(pair: Pair, back_map: MapLike | None) -> tuple[Pair, ProjectionMap | None]:
    """Return a pair as wide as a map from its teacher to its student, and the map, if one is given.

    Raises:
        XtokError: if it is of another pair, or has scale slots.
    """
    if back_map is None:
        return pair, None
    given = as_map(back_map)
    name = "the map" if given is back_map else str(back_map)
    pair = at_map_widths(pair.reversed, given).reversed
    hint = "leave out {option}, or build it of the teacher and the student, in this order"
    try:
        bound_map = bind_map(pair.reversed, given)
    except XtokError as error:
        sides = f"{given.student.model_id} → {given.teacher.model_id}"
        wanted = f"{pair.teacher.model_id} → {pair.student.model_id}"
        problem = f"it is of {sides}, and must lead from the teacher to the student, {wanted}"
        if not is_swapped(pair.reversed, given) and sides == wanted:
            problem = error.message
        raise XtokError(f"{name}: {problem}", hint=hint, parameter="back_map") from error
    if bound_map.enable_scale_trick:
        raise XtokError(f"{name}: it has scale slots", hint=hint, parameter="back_map")
    return pair, bound_map
