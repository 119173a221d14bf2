"""Map files: save, load and convert, in xtok's safetensors format and in NeMo-RL's `.pt`."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from xtok.config import Normalize
from xtok.errors import MAP_HINT, MapFileError, OutputError
from xtok.nemo import from_nemo, from_padded, from_trained, to_nemo
from xtok.packing import MALFORMED, pack_metadata, pack_tensors, unpack
from xtok.projection import ProjectionMap
from xtok.tensorfile import file_parts, read_tensors
from xtok.tokens import Vocabulary

SUFFIXES = (".safetensors", ".pt")


def save(projection: ProjectionMap, path: str | PathLike[str]) -> None:
    """Write a map: `.safetensors`, or `.pt` in NeMo-RL's layout. The same map, the same bytes.

    The file is written under a temporary name in the same folder, flushed, and renamed, so that
    there is never a half-written one under `path`.

    Raises:
        OutputError: if the path has another suffix or cannot be written.
        ValueError: if the map breaks an invariant of its class.
    """
    target = check_output(path)
    projection.check()
    parts = _parts(projection) if target.suffix == ".safetensors" else [to_nemo(projection)]
    try:
        with replacing(target) as temporary, temporary.open("wb") as file:
            file.writelines(parts)
    except OSError as error:
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="check the free space and the permissions of its folder, or give another --output",
        ) from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a temporary name in the target's folder; flush what was written, and rename it."""
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
    _remove_stale(target)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


STALE_AFTER = 3600.0
"""Seconds after which a temporary file is one that a killed process left: a write takes few."""


def _remove_stale(target: Path) -> None:
    """Remove what killed writers of this very target left behind."""
    pattern = re.compile(rf"\.{re.escape(target.name[:200])}\.[0-9a-f]{{12}}\.tmp")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name):
            with suppress(OSError):  # another process was quicker, or it is not ours to remove
                if time.time() - path.stat().st_mtime > STALE_AFTER:
                    path.unlink()


def check_output(path: str | PathLike[str]) -> Path:
    """Check, before any work is done, that a map can be written to a path.

    Raises:
        OutputError: if the suffix is not one of `SUFFIXES`, the folder is missing or not writable,
            or the path is a folder.
    """
    target = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    folder = target.parent
    if target.is_dir():
        raise OutputError(f"the output {target} is a folder", hint="give an --output in it")
    if target.suffix not in SUFFIXES:
        raise OutputError(
            f"the output {target} ends neither in .safetensors nor in .pt",
            hint=f"give --output {target.with_name((target.stem or 'map') + '.safetensors')}",
        )
    if not folder.exists():
        raise OutputError(f"the output folder {folder} does not exist", hint=f"mkdir -p {folder}")
    if not folder.is_dir():
        raise OutputError(
            f"the output folder {folder} is a file", hint="give an --output in a folder"
        )
    if target.exists() and not target.is_file():
        raise OutputError(f"the output {target} is no regular file", hint="give another --output")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"the output folder {folder} is not writable",
            hint="change its permissions, or give an --output elsewhere",
        )
    return target


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
    try:
        with source.open("rb") as file:
            data = file.read()
    except OSError as error:
        raise MapFileError(
            f"the map {source} cannot be read: {error.strerror or error}",
            hint="give the path of a .safetensors or .pt map; xtok build makes one",
        ) from error
    widths = {"student": student_vocab_size, "teacher": teacher_vocab_size}
    if data[:2] == b"PK" or source.suffix == ".pt":
        projection = from_nemo(data, source, widths, preserve_last, normalize)
    else:
        projection = _from_safetensors(data, source, widths, preserve_last, normalize)
    for side, width in widths.items():
        vocabulary: Vocabulary = getattr(projection, side)
        if width is not None and width != vocabulary.vocab_size:
            raise MapFileError(
                f"{source} is {vocabulary.vocab_size} wide on the {side}'s side, not {width}",
                hint=f"leave out --{side}-vocab-size, or build the map anew with it",
            )
    return projection


def convert(
    path: str | PathLike[str], output: str | PathLike[str], **options: Any
) -> ProjectionMap:
    """Write a map anew in the format that the output's suffix names; return it.

    Args:
        path: a map that `load` reads.
        output: a `.safetensors` or `.pt` file.
        options: as for `load`.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
    """
    check_output(output)
    projection = load(path, **options)
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
    try:
        tensors, header = read_tensors(data)
    except MALFORMED as error:
        raise MapFileError(
            f"{source} is not a whole safetensors file: {error}", hint=MAP_HINT
        ) from error
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
