"""What the cache folder holds, and how to empty it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from xtok.claims import newest_claim
from xtok.errors import OutputError
from xtok.io import cache_folder

Kind = Literal["map", "embeddings", "leftover", "in use"]


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """Something in the cache.

    Attributes:
        kind: a `map` of `get_map` or `build --cache`; `embeddings` of `generate`; a `leftover` of a
            process that was killed; or `in use`, what a process is building.
        name: what it is of.
        path: the file.
        num_bytes: its size.
    """

    kind: Kind
    name: str
    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheContents:
    """The files in a cache folder, or those removed from it, by kind and name."""

    folder: str
    files: tuple[CachedFile, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)


def list_cache(cache_dir: str | PathLike[str] | None = None) -> CacheContents:
    """Return what xtok keeps in a cache folder; files that are not xtok's are left out.

    Args:
        cache_dir: the folder; `$XTOK_CACHE_DIR` or the user's cache folder if None.
    """
    folder = cache_folder() if cache_dir is None else Path(cache_dir)
    files = [*_embeddings(folder), *_maps(folder / "maps")]
    order = sorted(files, key=lambda file: (file.kind != "map", file.kind, file.name, file.path))
    return CacheContents(folder=str(folder), files=tuple(order))


def clear_cache(cache_dir: str | PathLike[str] | None = None) -> CacheContents:
    """Remove what `list_cache` lists, but for what is in use, and return it.

    Raises:
        OutputError: if a file cannot be removed.
    """
    contents = list_cache(cache_dir)
    removed = tuple(file for file in contents.files if file.kind != "in use")
    for file in removed:
        path = Path(file.path)
        try:
            if file.kind == "map":  # first what says that it is whole
                path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"{path} cannot be removed: {error.strerror or error}",
                hint="check the permissions of its folder",
            ) from error
    return CacheContents(folder=contents.folder, files=removed)


_DIGEST = r"[0-9a-f]{64}"
_MAP_PART = re.compile(
    rf"{_DIGEST}\.(safetensors|json|claim-\d+)|\.{_DIGEST}\.\w+\.[0-9a-f]{{12}}\.tmp"
)
_EMBEDDINGS = re.compile(rf"{_DIGEST}\.safetensors")


def _maps(folder: Path) -> Iterator[CachedFile]:
    """Return the maps, each with its entry as one file, and all else that belongs to one."""
    paths = _matching(folder, _MAP_PART)
    whole = {path.stem for path in paths if path.suffix == ".json"}
    whole &= {path.stem for path in paths if path.suffix == ".safetensors"}
    for path in paths:
        is_temporary = path.suffix == ".tmp"
        key = path.name[1:65] if is_temporary else path.stem
        if path.suffix == ".safetensors" and key in whole:
            entry = path.with_suffix(".json")
            yield _file("map", _name(entry), path, _size(path) + _size(entry))
        elif path.suffix != ".json" or key not in whole:
            claim = newest_claim(folder / f"{key}.safetensors")
            in_use = claim is not None and not claim.is_gone() and not claim.is_silent()
            kind: Kind = "in use" if in_use else "leftover"
            yield _file(kind, path.name, path, _size(path))


def _embeddings(folder: Path) -> Iterator[CachedFile]:
    for path in _matching(folder, _EMBEDDINGS):
        try:
            with safe_open(path, framework="np") as file:
                key = json.loads((file.metadata() or {})["xtok"])
            name = f"{key['kind']}:{key['model']}"
        except (SafetensorError, OSError, ValueError, LookupError, TypeError):
            name = "damaged"
        yield _file("embeddings", name, path, _size(path))


def _file(kind: Kind, name: str, path: Path, num_bytes: int) -> CachedFile:
    return CachedFile(kind=kind, name=name, path=str(path), num_bytes=num_bytes)


def _name(entry: Path) -> str:
    try:
        return str(json.loads(entry.read_bytes())["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return "damaged"


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed since
        return 0
