"""Event map files: save and load, as `.safetensors`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open

from xtok import io
from xtok.errors import MapFileError
from xtok.maps import file as mapfile
from xtok.maps.event_map import EventMap
from xtok.maps.file import (
    MALFORMED,
    is_event_map,
    pack_sides,
    read_parts,
    unpack_fields,
    unpack_side,
)
from xtok.maps.nemo import require
from xtok.maps.projection_map import ProjectionMap

_ARRAYS = ("student_event", "teacher_event", "student_link", "teacher_link")
_HINT = "make the event map again with xtok events, or give another file"


def save(events: EventMap, path: str | PathLike[str]) -> None:
    """Write an event map as `.safetensors`. The same events, the same bytes.

    Raises:
        OutputError: if the path has another suffix or cannot be written.
        ValueError: if the events are not whole.
    """
    target = check_output(path)
    events.check()
    io.write(target, [to_safetensors(events)])


def check_output(path: str | PathLike[str]) -> Path:
    """Check, before any work is done, that an event map can be written to a path.

    Raises:
        OutputError: if it is not `.safetensors`, or `io.check_output` refuses it.
    """
    return io.check_output(path, (".safetensors",), or_folder=True)


def to_safetensors(events: EventMap) -> bytes:
    """Return the bytes of the event map's file."""
    from safetensors.numpy import save

    tensors = {name: getattr(events, name) for name in _ARRAYS}
    fields = {
        "kind": "events",
        "rest": events.rest,
        "history": list(events.history),
    }
    packed, metadata = pack_sides(tensors, fields, events.student, events.teacher)
    return bytes(save(packed, {"xtok": metadata}))  # several keys would be in random order


def holds_events(path: str | PathLike[str]) -> bool:
    """Tell by its header whether a file is an event map; False for one that cannot be read."""
    if not Path(path).is_file():
        return False
    try:
        with safe_open(path, framework="np") as file:
            return "student_event" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def load_any(path: str | PathLike[str]) -> ProjectionMap | EventMap:
    """Read an event map or a projection map, whichever the file holds."""
    return load(path) if holds_events(path) else mapfile.load(path)


def load(path: str | PathLike[str]) -> EventMap:
    """Read an event map.

    Raises:
        MapFileError: if the file is not an event map, or is damaged.
    """
    parts = read_parts(path)
    if parts is None or not is_event_map(parts[0]):
        raise MapFileError(f"{path} is not an event map", hint="xtok events makes one")
    tensors, metadata = parts
    try:
        fields = unpack_fields(tensors, metadata)
        require(fields["rest"] is None or type(fields["rest"]) is int, "rest")
        sides = {s: unpack_side(s, fields[s], tensors) for s in ("student", "teacher")}
        for side, vocabulary in sides.items():
            digest = vocabulary.table and vocabulary.table.sha256()
            require(digest and digest == fields[side]["table_sha256"], f"the {side}'s table_sha256")
        result = EventMap(
            student=sides["student"],
            teacher=sides["teacher"],
            student_event=tensors["student_event"],
            teacher_event=tensors["teacher_event"],
            student_link=tensors["student_link"],
            teacher_link=tensors["teacher_link"],
            rest=fields["rest"],
            history=tuple(dict(step) for step in fields["history"]),
        )
        result.check()
        return result
    except MALFORMED as error:
        missing = "it lacks " if isinstance(error, KeyError) else ""
        raise MapFileError(
            f"{path} is not a valid event map: {missing}{error}", hint=_HINT
        ) from error
