"""Map files: save and load."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok import __version__, io
from xtok.config import Normalize
from xtok.errors import MAP_HINT, MapFileError
from xtok.maps.edges import in_map_order
from xtok.maps.nemo import from_nemo, from_padded, from_trained, not_a_map, to_nemo
from xtok.maps.packing import MALFORMED, pack_metadata, pack_tensors, unpack
from xtok.maps.pair import at_width
from xtok.maps.projection_map import ProjectionMap, StageReport
from xtok.maps.tensorfile import check_json, read_tensors, write_tensors

SUFFIXES = (".safetensors", ".pt")

MapLike = str | PathLike[str] | ProjectionMap
"""What functions take for a map: the map, or the path of its file."""


def as_map(source: MapLike) -> ProjectionMap:
    """Return a map as it is, and load a path with the defaults of `load`."""
    return source if isinstance(source, ProjectionMap) else load(source)


def as_maps(
    sources: MapLike | Sequence[MapLike], names: Sequence[str] = ()
) -> tuple[list[ProjectionMap], list[str]]:
    """Return the maps of one source or several, and what messages call them.

    Args:
        sources: maps or paths.
        names: a name for each; by default a file's path, and `map 1` and so on for other maps.

    Raises:
        ValueError: if there are other numbers of names than of maps.
    """
    if isinstance(sources, str | PathLike | ProjectionMap):
        sources = [sources]
    if names and len(names) != len(sources):
        raise ValueError(f"{len(sources)} maps, {len(names)} names")
    defaults = [
        f"map {number}" if isinstance(source, ProjectionMap) else os.fspath(source)
        for number, source in enumerate(sources, 1)
    ]
    return [as_map(source) for source in sources], list(names or defaults)


def save(projection: ProjectionMap, path: str | PathLike[str]) -> None:
    """Write a map: `.safetensors`, or `.pt` in NeMo-RL's layout. The same map, the same bytes.

    The file is written under a temporary name in the same folder, which is made if it is missing,
    flushed, and renamed, so that there is never a half-written one under `path`.

    Raises:
        OutputError: if the path has another suffix or cannot be written.
        ValueError: if the map breaks an invariant of its class.
    """
    target = check_output(path)
    projection.check()
    data = (to_safetensors if target.suffix == ".safetensors" else to_nemo)(projection)
    io.write(target, [data])


def check_output(path: str | PathLike[str]) -> Path:
    """Check, before any work is done, that a map can be written to a path.

    Raises:
        OutputError: if the suffix is not one of `SUFFIXES`, the path is a folder, or its folder
            can be neither written to nor made.
    """
    return io.check_output(path, SUFFIXES, or_folder=True)


def load(
    path: str | PathLike[str],
    *,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    preserve_last: bool | None = None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    """Read a map from `.safetensors`, or from any `.pt` that NeMo-RL's tools write.

    Args:
        path: the kind of file is told from its contents.
        student_vocab_size: the width of the rows, for a file that does not tell it; else it is at
            least the largest id + 1.
        teacher_vocab_size: the width of the columns, likewise.
        preserve_last: whether the last column holds scale slots, whatever the file says.
        normalize: how rows of learned weights are made to sum to 1: `sum` divides them, `softmax`
            takes them as logits; a slot counts like any other entry. None divides the rows of a
            `.pt`, and takes a `.safetensors` only as it is.

    Raises:
        MapFileError: if the file is not a map, is damaged, or is of other widths.
    """
    source = Path(path)
    with _opened(source) as (contents, is_pt):
        if is_pt:
            projection = from_nemo(contents, source, preserve_last, normalize)
        else:
            projection = _from_safetensors(contents, source, preserve_last, normalize)
    if preserve_last is not None:
        projection = _with_slots(projection, preserve_last)
    for side, width in (("student", student_vocab_size), ("teacher", teacher_vocab_size)):
        if width is not None:
            projection = at_width(projection, side, width, name=str(source))
    return projection


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
    options = {"preserve_last": preserve_last}
    step = {"stage": "import", "options": options, "xtok_version": __version__}
    return replace(
        projection,
        **edges._asdict(),
        scale_slot=slot,
        history=(*projection.history, step),
        reports=(*projection.reports, StageReport("import", counts, (note,))),
    )


@contextmanager
def _opened(source: Path) -> Iterator[tuple[Path, bool]]:
    """Give the path of a map's contents, and whether it is a `.pt`.

    The kind of file is told from its first bytes; the suffix decides where these tell nothing.
    """
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
        raise MapFileError(
            f"the map {source} cannot be read: {error.strerror or error}",
            hint="give the path of a .safetensors or .pt map; xtok build makes one",
        ) from error


def read_parts(path: str | PathLike[str]) -> tuple[dict[str, NDArray[Any]], str] | None:
    """Return a `.safetensors` map's tensors and metadata, not checked; None for any other file.

    `packing.assemble` makes a map of them.

    Raises:
        MapFileError: if the file cannot be read.
    """
    source = Path(path)
    with _opened(source) as (contents, is_pt):
        tensors, header = ({}, {}) if is_pt else _tensors(contents, source)
    return (tensors, header["xtok"]) if "xtok" in header else None


def sha256(projection: ProjectionMap) -> str:
    """Return the sha256 of the map's `.safetensors` file."""
    return hashlib.sha256(to_safetensors(projection)).hexdigest()


def to_safetensors(projection: ProjectionMap) -> bytes:
    """Return the bytes of the map's `.safetensors` file."""
    return write_tensors(pack_tensors(projection), {"xtok": pack_metadata(projection)})


def _from_safetensors(
    contents: Path, source: Path, preserve_last: bool | None, normalize: Normalize | None
) -> ProjectionMap:
    tensors, header = _tensors(contents, source)
    try:
        if "xtok" not in header and {"indices", "likelihoods"} <= tensors.keys():
            return from_padded(tensors, header, preserve_last, normalize)
        if "xtok" not in header:
            raise MapFileError(
                f"{source} is a safetensors file, but not an xtok map", hint=MAP_HINT
            )
        if normalize is not None:
            return from_trained(tensors, header["xtok"], normalize)
        return unpack(tensors, header["xtok"])
    except KeyError as error:
        raise MapFileError(
            f"{source} is not a valid map: it lacks {error}", hint=MAP_HINT
        ) from error
    except MALFORMED as error:
        raise not_a_map(f"{source} is not a valid map: {error}", error) from error


def _tensors(contents: Path, source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    try:
        tensors, header = read_tensors(contents)
        check_json(header.get("xtok", ""))
        return tensors, header
    except MALFORMED as error:
        raise MapFileError(
            f"{source} is not a whole safetensors file: {error}", hint=MAP_HINT
        ) from error
