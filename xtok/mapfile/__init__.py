"""Map files: save, load and convert, in xtok's safetensors format and in NeMo-RL's `.pt`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from xtok import io
from xtok.config import Normalize
from xtok.errors import MAP_HINT, MapFileError
from xtok.mapfile._nemo import from_nemo, from_padded, from_trained, to_nemo
from xtok.mapfile._packing import MALFORMED, assemble, pack_metadata, pack_tensors, unpack
from xtok.mapfile._tensorfile import file_parts, read_tensors
from xtok.projection import ProjectionMap
from xtok.projection import transpose as transposed
from xtok.tokens import Vocabulary

SUFFIXES = (".safetensors", ".pt")


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
    parts = _parts(projection) if target.suffix == ".safetensors" else [to_nemo(projection)]
    io.write(target, parts)


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
        student_vocab_size: the width of the rows, for a file that does not tell it.
        teacher_vocab_size: the width of the columns, likewise.
        preserve_last: whether the last column holds scale slots, for a `.pt` that does not say.
        normalize: how rows of learned weights are made to sum to 1: `sum` divides them, `softmax`
            takes them as logits; a slot counts like any other entry. None divides the rows of a
            `.pt`, and takes a `.safetensors` only as it is.

    Raises:
        MapFileError: if the file is not a map, is damaged, or lacks what the arguments could tell.
    """
    source = Path(path)
    widths = {"student": student_vocab_size, "teacher": teacher_vocab_size}
    with _opened(source) as (file, is_pt):
        if is_pt:
            projection = from_nemo(file, source, widths, preserve_last, normalize)
        else:
            data = file.read()
            projection = _from_safetensors(data, source, widths, preserve_last, normalize)
    for side, width in widths.items():
        vocabulary: Vocabulary = getattr(projection, side)
        if width is not None and width != vocabulary.vocab_size:
            raise MapFileError(
                f"{source} is {vocabulary.vocab_size} wide on the {side}'s side, not {width}",
                hint=f"leave out --{side}-vocab-size, or build the map anew with it",
            )
    return projection


@contextmanager
def _opened(source: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """Give a map's file, which can seek (a pipe is read whole), and whether it is a `.pt`."""
    try:
        with source.open("rb", buffering=0) as raw:
            file: BinaryIO = raw if raw.seekable() else BytesIO(raw.read())
            is_zip = file.read(2) == b"PK"
            file.seek(0)
            yield file, is_zip or source.suffix == ".pt"
    except OSError as error:
        raise MapFileError(
            f"the map {source} cannot be read: {error.strerror or error}",
            hint="give the path of a .safetensors or .pt map; xtok build makes one",
        ) from error


class InvalidMapError(Exception):
    """A map by xtok whose parts make no map."""


def load_unchecked(
    path: str | PathLike[str], **options: Any
) -> tuple[ProjectionMap, tuple[str | None, str | None]]:
    """Read a map, without checking its invariants and digests where the format allows that.

    Args:
        path: a map.
        options: as for `load`.

    Returns:
        the map, and what the file says of the `table_sha256` of student and teacher.

    Raises:
        MapFileError: if the file cannot be read, or is no map at all.
        InvalidMapError: if it is a map by xtok, whose parts do not fit.
    """
    source = Path(path)
    with _opened(source) as (file, is_pt):
        data = b"" if is_pt else file.read()
    if not is_pt:
        tensors, header = _tensors(data, source)
        if "xtok" in header:
            try:
                return assemble(tensors, header["xtok"])
            except MALFORMED as error:
                missing = "it lacks " if isinstance(error, KeyError) else ""
                raise InvalidMapError(f"{missing}{error}") from error
    projection = load(path, **options)
    tables = projection.student.table, projection.teacher.table
    student, teacher = (None if table is None else table.sha256() for table in tables)
    return projection, (student, teacher)


def convert(
    path: str | PathLike[str],
    output: str | PathLike[str],
    *,
    transpose: bool = False,
    **options: Any,
) -> ProjectionMap:
    """Write a map anew in the format that the output's suffix names; return it.

    Args:
        path: a map that `load` reads.
        output: a `.safetensors` or `.pt` file.
        transpose: write the map from the teacher's tokens to the student's.
        options: as for `load`.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
    """
    check_output(output)
    projection = load(path, **options)
    if transpose:
        projection = transposed(projection)
    save(projection, output)
    return projection


def sha256(projection: ProjectionMap) -> str:
    """Return the sha256 of the map's `.safetensors` file."""
    digest = hashlib.sha256()
    for part in _parts(projection):
        digest.update(part)
    return digest.hexdigest()


def to_safetensors(projection: ProjectionMap) -> bytes:
    """Return the bytes of the map's `.safetensors` file."""
    return b"".join(_parts(projection))


def _parts(projection: ProjectionMap) -> Iterator[bytes | memoryview]:
    return file_parts(pack_tensors(projection), {"xtok": pack_metadata(projection)})


def _from_safetensors(
    data: bytes,
    source: Path,
    widths: Mapping[str, int | None],
    preserve_last: bool | None,
    normalize: Normalize | None,
) -> ProjectionMap:
    tensors, header = _tensors(data, source)
    try:
        if "xtok" not in header and {"indices", "likelihoods"} <= tensors.keys():
            return from_padded(tensors, header, source, widths, preserve_last, normalize)
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
        trained = any(what in str(error) for what in ("sums to", "> 0", "not sorted by"))
        hint = "if its weights were trained, give xtok convert --normalize" if trained else MAP_HINT
        raise MapFileError(f"{source} is not a valid map: {error}", hint=hint) from error


def _tensors(data: bytes, source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    try:
        return read_tensors(data)
    except MALFORMED as error:
        raise MapFileError(
            f"{source} is not a whole safetensors file: {error}", hint=MAP_HINT
        ) from error
