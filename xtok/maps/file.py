"""Files of maps and event maps: `.safetensors` here, NeMo-RL's `.pt` by `nemo`.

Both formats store a map as named tensors and one JSON text, which `pack` and `assemble` convert.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from xtok import io
from xtok.errors import MAP_HINT, MapFileError, XtokError
from xtok.maps import nemo
from xtok.maps.edges import in_map_order
from xtok.maps.events import EventMap
from xtok.maps.nemo import require
from xtok.maps.projection_map import InvariantError, ProjectionMap, RowKind
from xtok.vocab.table import MAX_WIDTH, TokenTable, TokenType, Vocabulary

FORMAT_VERSION = 1

MAX_HEADER = 1 << 23
"""Bytes of the longest JSON text that is read or written."""

MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError
)  # fmt: skip
"""What reading a damaged file can raise."""

_NO_MAP = "give the path of a .safetensors or .pt map; xtok build makes one of two models"

AnyMap: TypeAlias = ProjectionMap | EventMap
MapLike: TypeAlias = str | PathLike[str] | ProjectionMap
AnyMapLike: TypeAlias = MapLike | EventMap
"""What functions take for a map: the map, or the path of its file."""


def as_map(source: MapLike) -> ProjectionMap:
    """Return a map as it is, and load a path with the defaults of `load`."""
    return source if isinstance(source, ProjectionMap) else load(source)


def as_any_map(source: AnyMapLike) -> AnyMap:
    """Return a map or an event map as it is, and load a path, whichever its file holds."""
    return source if isinstance(source, ProjectionMap | EventMap) else _load(Path(source))


def as_maps(
    sources: Any, names: Sequence[str] = (), read: Callable[[Any], Any] = as_map
) -> tuple[list[Any], list[str]]:
    """Return the maps of one source or several, and what messages call them.

    Args:
        sources: maps or paths.
        names: a name for each; by default a file's path, and `map 1` and so on for other maps.
        read: makes a map of a source.

    Raises:
        ValueError: if there are other numbers of names than of maps.
    """
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        sources = [sources]
    if names and len(names) != len(sources):
        raise ValueError(f"{len(sources)} maps, {len(names)} names")
    defaults = [
        os.fspath(source) if isinstance(source, str | PathLike) else f"map {number}"
        for number, source in enumerate(sources, 1)
    ]
    return [read(source) for source in sources], list(names or defaults)


# Writing


def save(any_map: AnyMap, path: str | PathLike[str]) -> None:
    """Write a map: `.safetensors`, or `.pt` in NeMo-RL's layout. The same map, the same bytes.

    The file is written under a temporary name in the same folder, which is made if it is missing,
    flushed, and renamed, so that there is never a half-written one under `path`.

    Raises:
        OutputError: if the path has another suffix or cannot be written; an event map has no `.pt`.
        ValueError: if the map breaks an invariant of its class.
    """
    target = check_output(path, type(any_map))
    any_map.check()
    if isinstance(any_map, ProjectionMap) and target.suffix == ".pt":
        io.write(target, [to_nemo(any_map)])
    else:
        io.write(target, [to_safetensors(any_map)])


def check_output(path: str | PathLike[str], kind: type[AnyMap] = ProjectionMap) -> Path:
    """Check, before any work is done, that a map can be written there; see `io.check_output`."""
    suffixes = (".safetensors", ".pt") if kind is ProjectionMap else (".safetensors",)
    return io.check_output(path, suffixes, or_folder=True)


def to_safetensors(any_map: AnyMap) -> bytes:
    """Return the bytes of the map's `.safetensors` file."""
    from safetensors.numpy import save

    tensors, metadata = pack(any_map)
    return bytes(save(tensors, {"xtok": metadata}))  # several keys would be in random order


def to_nemo(projection: ProjectionMap) -> bytes:
    """Return the bytes of the map's `.pt` file; see `nemo.to_nemo`."""
    return nemo.to_nemo(projection, *pack(projection))


def sha256(projection: ProjectionMap) -> str:
    """Return the sha256 of the map's `.safetensors` file."""
    return hashlib.sha256(to_safetensors(projection)).hexdigest()


# Reading


def load(
    path: str | PathLike[str],
    *,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    preserve_last: bool | None = None,
    normalize: bool = False,
) -> ProjectionMap:
    """Read a map from `.safetensors`, or from any `.pt` that NeMo-RL's tools write.

    Args:
        path: the kind of file is told from its contents.
        student_vocab_size: the width of the rows, for a file that does not tell it; else it is at
            least the largest id + 1.
        teacher_vocab_size: the width of the columns.
        preserve_last: whether the last column holds scale slots, whatever the file says.
        normalize: divide rows of learned weights by their sums, slots included. Those of a `.pt`
            always are; a `.safetensors` is else taken only as it is.

    Raises:
        MapFileError: if the file is not a map, is damaged, or is of other widths.
    """
    source = Path(path)
    projection = _load(source, preserve_last, normalize)
    if isinstance(projection, EventMap):
        raise MapFileError(
            f"{source} is an event map, not a projection map",
            hint="xtok inspect, verify and evaluate read it; xtok build makes a map",
        )
    if preserve_last is not None:
        projection = _with_slots(projection, preserve_last)
    for side, width in (("student", student_vocab_size), ("teacher", teacher_vocab_size)):
        if width is not None:
            projection = projection.at_width(side, width, name=str(source))
    return projection


def load_events(path: str | PathLike[str]) -> EventMap:
    """Read an event map.

    Raises:
        MapFileError: if the file is not an event map, or is damaged.
    """
    events = _load(Path(path))
    if not isinstance(events, EventMap):
        raise MapFileError(f"{path} is not an event map", hint="xtok events makes one")
    return events


def _load(source: Path, preserve_last: bool | None = None, normalize: bool = False) -> AnyMap:
    """Read a map of any kind, as far as the file tells it."""
    with _opened(source) as (contents, is_pt):
        try:
            loaded: AnyMap
            if is_pt:
                loaded = nemo.read_pt(contents, source, preserve_last, unpack)
            else:
                loaded = _read(*_tensors(contents, source), source, preserve_last, normalize)
            loaded.check()
        except (*MALFORMED, RuntimeError) as error:
            raise _not_a_map(source, error) from error
    return loaded


def _read(
    tensors: dict[str, NDArray[Any]],
    header: Mapping[str, str],
    source: Path,
    preserve_last: bool | None,
    normalize: bool,
) -> AnyMap:
    """Make a map of a safetensors file; the invariants of its class are not yet checked."""
    if "xtok" in header and normalize and "student_event" not in tensors:
        return nemo.from_trained(tensors, header["xtok"], unpack)
    if "xtok" in header:
        return unpack(tensors, header["xtok"])
    if {"indices", "likelihoods"} & tensors.keys():
        return nemo.from_padded(tensors, header, preserve_last)
    raise MapFileError(f"{source} is a safetensors file, but not an xtok map", hint=MAP_HINT)


def _not_a_map(source: Path, error: Exception) -> MapFileError:
    """Return the error of a damaged file; one whose weights were trained can be read."""
    missing = "it lacks " if isinstance(error, KeyError) else ""
    message = f"{source} is not a valid map: {missing}{error}"
    # Training breaks these invariants, and `normalize` restores them.
    if isinstance(error, InvariantError) and error.invariant in ("weights", "order", "sums"):
        hint = "if its weights were trained, convert the map once with {option}"
        return MapFileError(message, hint=hint, parameter="normalize")
    return MapFileError(message, hint=MAP_HINT)


def _with_slots(projection: ProjectionMap, preserve_last: bool) -> ProjectionMap:
    """Take the entries of the last column as scale slots, or slots as entries like any others."""
    if preserve_last == projection.enable_scale_trick:
        return projection
    edges, slot = projection.edges, None
    if preserve_last:
        full = (projection.entries_per_row == projection.top_k) & (projection.top_k > 1)
        slot = full.astype(np.uint8)
        counts = {"rows whose last column is a scale slot": int(full.sum())}
        note = "the entries of the last column are scale slots, which a cut keeps"
    else:
        edges = in_map_order(edges, np.zeros(projection.nnz, np.bool_))
        counts = {"scale slots turned into entries": int(projection.is_slot.sum())}
        note = "the map has no scale slots any more: a cut may drop the entries that they were"
    result = replace(projection, **edges._asdict(), scale_slot=slot)
    return result.after("import", {"preserve_last": preserve_last}, counts, (note,))


@contextmanager
def _opened(source: Path) -> Iterator[tuple[Path, bool]]:
    """Give the path of a map's contents, and whether it is a `.pt`.

    The kind of file is told from its first bytes; the suffix decides where these tell nothing.
    """
    if "\0" in str(source):
        raise MapFileError(f"the map {source} has a NUL in its name", hint="give another path")
    try:
        with source.open("rb") as file:
            start = file.read(9)
            if not start:
                raise MapFileError(f"the map {source} is empty", hint=MAP_HINT)
            is_zip, is_json = start[:2] == b"PK", start[8:] == b"{"
            is_pt = is_zip or (source.suffix == ".pt" and not is_json)
            if file.seekable() and not (is_zip and source.suffix == ".safetensors"):
                yield source, is_pt
                return
            # The libraries read no pipes, and torch.load takes any .safetensors for safetensors.
            with tempfile.NamedTemporaryFile() as copy:
                copy.write(start)
                shutil.copyfileobj(file, copy)
                copy.flush()
                yield Path(copy.name), is_pt
    except OSError as error:
        hint = _NO_MAP
        if source.is_dir():
            hint += ", xtok doctor compares them"
        message = f"the map {source} cannot be read: {error.strerror or error}"
        raise MapFileError(message, hint=hint) from error


def read_parts(path: str | PathLike[str]) -> tuple[dict[str, NDArray[Any]], str] | None:
    """Return a `.safetensors` map's tensors and metadata, not checked; None for any other file.

    `assemble` makes a map of them.

    Raises:
        MapFileError: if the file cannot be read.
    """
    source = Path(path)
    with _opened(source) as (contents, is_pt):
        tensors, header = ({}, {}) if is_pt else _tensors(contents, source)
    return (tensors, header["xtok"]) if "xtok" in header else None


def holds_events(path: str | PathLike[str]) -> bool:
    """Whether a file is an event map, by its header; False for one that cannot be read."""
    if not Path(path).is_file():
        return False
    try:
        with safe_open(path, framework="np") as file:
            return "student_event" in file.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _tensors(contents: Path, source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of a safetensors file, read-only, and its metadata."""
    try:
        with safe_open(contents, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = dict(file.metadata() or {})
        with contents.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            json.loads(file.read(size), object_pairs_hook=_without_duplicates)
        check_json(header.get("xtok", ""))
    except (*MALFORMED, SafetensorError) as error:  # types that NumPy lacks raise several kinds
        message = f"{source} is not a whole safetensors file: {error}"
        hint = MAP_HINT if source.suffix == ".safetensors" else _NO_MAP
        raise MapFileError(message, hint=hint) from error
    for tensor in tensors.values():
        tensor.flags.writeable = False
    return tensors, header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"a name stands twice in its header: {max(names, key=names.count)}")


def check_json(text: str) -> None:
    """Check that JSON in a map file takes a bounded amount of memory; else a `ValueError`."""
    size = len(text.encode())
    if size > MAX_HEADER:
        raise ValueError(f"its metadata take {size} bytes, and may take {MAX_HEADER}")


# A map as tensors and JSON

_SIDES = ("student", "teacher")
_DTYPES: dict[type[AnyMap], dict[str, str]] = {
    ProjectionMap: {"student_ids": "int32", "teacher_ids": "int32", "weights": "float32",
                    "row_kind": "uint8", "scale_slot": "uint8"},
    EventMap: {f"{side}_{name}": "int32" for side in _SIDES for name in ("event", "link")},
}  # fmt: skip
_OF_TABLE = {"bytes": "uint8", "offsets": "int64", "types": "uint8"}
_OF_TABLES = {f"{s}_token_{name}": d for s in _SIDES for name, d in _OF_TABLE.items()}

_OF_VOCABULARY = {
    "model_id": (str,),
    "revision": (str, NoneType),
    "backend": (str, NoneType),
    "vocab_size": (int,),
    "width_source": (str,),
    "tokenizer_vocab_size": (int, NoneType),
}


def pack(any_map: AnyMap) -> tuple[dict[str, NDArray[Any]], str]:
    """Return a map's arrays by their names in a file, and all else as JSON with sorted keys.

    Raises:
        XtokError: if the JSON is too long to be read, as with thousands of very long names.
    """
    tensors = {name: getattr(any_map, name) for name in _DTYPES[type(any_map)]}
    fields: dict[str, Any] = {"format_version": FORMAT_VERSION, "history": any_map.history}
    if isinstance(any_map, EventMap):
        fields |= {"kind": "events", "rest": any_map.rest}
    else:
        fields |= {n: getattr(any_map, n) for n in ("method", "top_k", "enable_scale_trick")}
    for side in _SIDES:
        vocabulary: Vocabulary = getattr(any_map, side)
        table = vocabulary.table
        fields[side] = {name: getattr(vocabulary, name) for name in _OF_VOCABULARY}
        if table is not None:
            names = (f"{side}_token_{name}" for name in _OF_TABLE)
            tensors |= zip(names, (table.data, table.offsets, table.types), strict=True)
            fields[side] |= {
                "table_sha256": table.sha256(),
                "control_names": {str(i): name for i, name in table.control_names.items()},
                "roles": dict(table.roles),
                "preferred_ids": table.preferred_ids,
            }
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    try:
        check_json(text)
    except ValueError as error:
        sides = " and ".join(getattr(any_map, side).model_id for side in _SIDES)
        raise XtokError(
            f"a map of {sides} cannot be written: {error}",
            hint="shorten the names of the special tokens in the tokenizer's files",
        ) from error
    return {n: np.ascontiguousarray(t) for n, t in tensors.items() if t is not None}, text


def unpack(tensors: Mapping[str, NDArray[Any]], metadata: str) -> AnyMap:
    """Make a map of a file's tensors and JSON text as `assemble` does, and check its digests."""
    any_map, digests = assemble(tensors, metadata)
    for side, digest in digests.items():
        table = getattr(any_map, side).table
        require(table is None or table.sha256() == digest, f"the {side}'s table_sha256")
    return any_map


def assemble(
    tensors: Mapping[str, NDArray[Any]], metadata: str
) -> tuple[AnyMap, dict[str, str | None]]:
    """Make a map of a file's parts, whose invariants and digests are not yet checked.

    Returns:
        the map, and what the file says of each side's `table_sha256`.

    Raises:
        ValueError: if they are not a map; or any other of `MALFORMED`.
    """
    kind: type[AnyMap] = EventMap if "student_event" in tensors else ProjectionMap
    check_json(metadata)
    fields: dict[str, Any] = json.loads(metadata)
    version = fields["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"format version {version!r} is not {FORMAT_VERSION}, which this xtok reads"
        )
    for name, dtype in (_DTYPES[kind] | _OF_TABLES).items():
        if name in tensors and (tensors[name].dtype != dtype or tensors[name].ndim != 1):
            raise ValueError(f"{name} is not a list of {dtype}")
    json.dumps(fields, ensure_ascii=False).encode()  # no lone surrogates
    for step in fields["history"]:
        require(type(step["stage"]) is str and type(step["options"]) is dict, "history")
    parts: dict[str, Any] = {side: _vocabulary(side, fields[side], tensors) for side in _SIDES}
    digests = {side: fields[side].get("table_sha256") for side in _SIDES}
    parts |= {name: tensors[name] for name in _DTYPES[kind] if name != "scale_slot"}
    parts["history"] = tuple(dict(step) for step in fields["history"])
    if kind is EventMap:
        require(type(fields["rest"]) in (int, NoneType), "rest")
        for side in _SIDES:
            require(parts[side].table is not None, f"the {side}'s tokens")
        return EventMap(**parts, rest=fields["rest"]), digests
    if bool(fields["enable_scale_trick"]) != ("scale_slot" in tensors):
        raise ValueError("scale_slot and enable_scale_trick do not agree")
    top_k = fields["top_k"]
    require(type(top_k) is int and top_k <= MAX_WIDTH, "top_k")
    parts |= {"scale_slot": tensors.get("scale_slot"), "method": str(fields["method"])}
    parts["row_kind"] = _row_kind(parts["row_kind"], parts["history"])
    return ProjectionMap(**parts, top_k=top_k), digests


def _row_kind(kind: NDArray[np.uint8], history: Sequence[Mapping[str, Any]]) -> NDArray[np.uint8]:
    """Return the kinds of rows; older files call those that `multitoken` counted pieces."""
    weights = {s["options"].get("weights") for s in history if s["stage"] == "multitoken"}
    if weights != {"prior"}:
        return kind
    return np.where(kind == RowKind.PIECES, np.uint8(RowKind.COUNTED), kind)


def _vocabulary(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
) -> Vocabulary:
    """Return a side's vocabulary from a file's JSON about it and its arrays; see `assemble`."""
    for name, kinds in _OF_VOCABULARY.items():
        require(type(fields[name]) in kinds, f"the {side}'s {name}")
    width = fields["vocab_size"]
    require(0 < width <= MAX_WIDTH, f"the {side}'s vocab_size {width}")
    has_table = any(f"{side}_token_{name}" in tensors for name in _OF_TABLE)
    table = _table(side, fields, tensors, width) if has_table else None
    return Vocabulary(**{name: fields[name] for name in _OF_VOCABULARY}, table=table)


def _table(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], width: int
) -> TokenTable:
    data, offsets, types = (tensors[f"{side}_token_{name}"] for name in _OF_TABLE)
    require(len(types) == width == len(offsets) - 1, f"the {side}'s table is not {width} long")
    rising = bool((np.diff(offsets) >= 0).all())
    require(offsets[0] == 0 and offsets[-1] == len(data) and rising, f"{side}_token_offsets")
    require(bool(np.isin(types, list(TokenType)).all()), f"{side}_token_types")

    def checked(value: Any) -> int:
        token_id = int(value)  # keys of JSON objects are text
        require(0 <= token_id < width, f"the {side}'s token id {value}")
        return token_id

    table = TokenTable(
        data,
        offsets,
        types,
        control_names={checked(i): str(name) for i, name in fields["control_names"].items()},
        roles={str(role): tuple(map(checked, ids)) for role, ids in fields["roles"].items()},
        preferred_ids=tuple(map(checked, fields["preferred_ids"])),
    )
    without_bytes = ~np.isin(types, [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE])
    require(not table.lengths[without_bytes].any(), f"the {side}'s special tokens have bytes")
    fields["table_sha256"]  # a table has one
    return table
