"""The map from a teacher to a student that projection requires."""

from __future__ import annotations

from xtok._lib.progress import Note
from xtok.errors import XtokError
from xtok.maps.map_arguments import MapLike, bind_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import map_of_edges
from xtok.tokenizers.pairs import Pair


def bind_back_map(pair: Pair, back_map: MapLike, note: Note) -> tuple[Pair, ProjectionMap]:
    """Return a pair with the widths of its map from teacher to student, and the map.

    The map loses its scale slots, which correspond to no token.

    Raises:
        XtokError: if the map belongs to a different pair.
    """
    projection = ProjectionMap.of(back_map)
    name = "the map" if projection is back_map else str(back_map)
    try:
        bound_map, back = bind_map(projection, pair.reversed)
    except XtokError as error:
        sides = f"{projection.student.model_id} → {projection.teacher.model_id}"
        expected = f"{pair.teacher.model_id} → {pair.student.model_id}"
        problem = f"the map leads from {sides}, expected {expected} (teacher → student)"
        if sides == expected:
            problem = error.message
        hint = "build {option} from the teacher to the student: the teacher is its first model"
        raise XtokError(f"{name}: {problem}", hint=hint, parameter="back_map") from error
    if bound_map.enable_scale_trick:
        edges = bound_map.edges.take(~bound_map.is_slot).normalized()
        note(f"{name}: ignoring its {bound_map.is_slot.sum():,} scale slots")
        bound_map = map_of_edges(edges, before=bound_map, scale_slot=None)
    return back.reversed, bound_map
