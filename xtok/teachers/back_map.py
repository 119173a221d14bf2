"""The map from a teacher to a student that projecting needs: how it is built and kept, or given."""

from __future__ import annotations

from xtok._lib.progress import Note, Progress, silent, silent_note
from xtok.building.build import build, get_map
from xtok.config import BACK_MAP
from xtok.errors import OutputError, XtokError
from xtok.maps.map_arguments import MapLike, admitted, as_map, is_swapped
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import map_of_edges
from xtok.tokenizers.pairs import Pair


def kept_back_map(
    pair: Pair, progress: Progress = silent, note: Note = silent_note
) -> ProjectionMap:
    """Return the map from a pair's teacher to its student: built once, and kept by `get_map`."""
    back = pair.reversed
    try:
        made: ProjectionMap = get_map(back, config=BACK_MAP, progress=progress, note=note)
    except OutputError as error:
        note(f"the map from the teacher to the student is not kept: {error}")
        made = build(back, config=BACK_MAP, progress=progress)
    return made


def bind_back_map(
    pair: Pair, back_map: MapLike, note: Note = silent_note
) -> tuple[Pair, ProjectionMap]:
    """Return a pair as wide as a map from its teacher to its student, and the map.

    It has no scale slots, which stand for no token.

    Raises:
        XtokError: if it is of another pair.
    """
    given = as_map(back_map)
    name = "the map" if given is back_map else str(back_map)
    hint = "leave out {option}, or build it of the teacher and the student, in this order"
    try:
        back, [bound_map] = admitted(pair.reversed, given)
    except XtokError as error:
        sides = f"{given.student.model_id} → {given.teacher.model_id}"
        wanted = f"{pair.teacher.model_id} → {pair.student.model_id}"
        problem = f"it is of {sides}, and must lead from the teacher to the student, {wanted}"
        if not is_swapped(pair.reversed, given) and sides == wanted:
            problem = error.message
        raise XtokError(f"{name}: {problem}", hint=hint, parameter="back_map") from error
    if bound_map.enable_scale_trick:
        edges = bound_map.edges.take(~bound_map.is_slot).normalized()
        note(f"{name}: its {bound_map.is_slot.sum():,} scale slots are left out")
        bound_map = map_of_edges(edges, before=bound_map, scale_slot=None)
    return back.reversed, bound_map
