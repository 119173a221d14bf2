"""`convert`: a map as another file format; and what NeMo-RL's training script takes for it."""

from __future__ import annotations

import os
import re
import shlex
from os import PathLike
from pathlib import Path
from typing import Any

from xtok.config import Loss
from xtok.maps import file as mapfile
from xtok.maps.admit import admit, at_widths_of
from xtok.maps.loss_fit import exact_rows, is_counted
from xtok.maps.map_like import MapLike
from xtok.maps.projection_map import ProjectionMap
from xtok.pairs import Pair


def convert(
    projection: MapLike,
    output: str | PathLike[str],
    pair: Pair | None = None,
    **options: Any,
) -> Path:
    """Write a map in the format that the output's suffix tells, and return the output's path.

    Args:
        projection: a map, or the path of any file that `load` reads.
        output: a `.safetensors` file, or a `.pt` as NeMo-RL reads it.
        pair: the map's models, whose tokens a map without tokens takes.
        options: as for `load`, for a path.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
        XtokError: if the map is of another pair.
    """
    target = mapfile.check_output(output)
    if isinstance(projection, ProjectionMap) and options:
        raise TypeError(f"{', '.join(options)}: options of reading a file, not of a map")
    if not isinstance(projection, ProjectionMap):
        projection = ProjectionMap.load(projection, **options)
    if pair is not None:
        projection = admit(at_widths_of(pair, projection), projection)
    projection.save(target)
    return target


def nemo_overrides(projection: ProjectionMap, path: Path, loss: Loss | None = None) -> str:
    """Return what NeMo-RL's training script takes for a map, and for the loss that it is for.

    A counted map tells its loss by itself: P-KL, or gold where it has exact rows.
    """
    words = [_override("teachers.0.projection_matrix_path", path)]
    if loss is None and is_counted(projection):
        loss = "gold" if exact_rows(projection) else "p-kl"
    if loss is not None:
        flags = {"gold_loss": loss != "p-kl", "xtoken_loss": loss == "h-kl"}
        words += [f"loss_fn.{name}={str(value).lower()}" for name, value in flags.items()]
    return f"for NeMo-RL 0.8.0: {' '.join(words)}"


_PLAIN = re.compile(r"[\w/.+%@:-]+", re.ASCII)
"""Values that Hydra's grammar of overrides takes without quotes."""


def _override(key: str, path: Path) -> str:
    """Return one override as a shell takes it, its value quoted for Hydra where need be."""
    value = os.path.abspath(path)
    if not _PLAIN.fullmatch(value):
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
        value = f"'{escaped}'"
    return shlex.quote(f"{key}={value}")
