"""`convert`: a map as another file format; and what NeMo-RL's training script takes for it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from xtok.config import Loss
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, AnyMapLike, bind_map, read_map
from xtok.maps.nemo_tables import reverse_of
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import exact_rows, is_counted
from xtok.tokenizers.pairs import Pair


def convert(
    projection: AnyMapLike,
    output: str | PathLike[str],
    pair: Pair | None = None,
    **options: Any,
) -> Path:
    """Write a map in the format of the output's suffix, and return the output's path.

    Args:
        projection: a projection map or a spelling map, or the path of its file.
        output: a `.safetensors` file, or a `.pt` as NeMo-RL reads it; for a spelling map the
            student's table; the teacher's is written next to it, as `NAME.reverse.pt`.
        pair: the map's models, whose tokens a map without tokens takes.
        options: as for `load`, for a path.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
        XtokError: if the map is of another pair, or an event map.
    """
    target = mapfile.check_output(output)
    if isinstance(projection, AnyMap):
        if options:
            raise TypeError(f"{', '.join(options)}: options of reading a file, not of a map")
    else:
        projection = read_map(projection, **options)
    if isinstance(projection, EventMap):
        raise XtokError(
            "an event map has one format, .safetensors",
            hint="give a projection map or a spelling map; copy the file of an event map",
        )
    if pair is not None:
        projection, _ = bind_map(projection, pair)
    projection.save(target)
    return target


def nemo_overrides(any_map: AnyMap, path: Path, loss: Loss | None = None) -> list[str]:
    """Return what NeMo-RL's training script takes for a map, and for the loss that it is for.

    A counted map is for P-KL, or for gold where it has exact rows. A spelling map is
    for its draft "v6" alone, which has had two forms.
    """
    if not isinstance(any_map, ProjectionMap):
        return _draft_overrides(path)
    words = [_override("teachers.0.projection_matrix_path", path)]
    if loss is None and is_counted(any_map):
        loss = "gold" if exact_rows(any_map) else "p-kl"
    if loss is not None:
        flags = {"gold_loss": loss != "p-kl", "xtoken_loss": loss == "h-kl"}
        words += [f"loss_fn.{name}={str(value).lower()}" for name, value in flags.items()]
    return [f"for NeMo-RL 0.6.0: {' '.join(words)}"]


def _draft_overrides(path: Path) -> list[str]:
    """Return what NeMo-RL's draft "v6" takes for the two tables, in its newest and its first form.

    The newest is the draft author's branch in October 2026 (38aea62, 7e6492b), which refuses the
    paths of the first, pull request 4177 at a84de17. That takes a teacher without a projection path
    for one of the student's tokenizer, and reads the file only where `common_indices_from_subtoks`
    is false. Without `kl_chunk_shift` both score a chunk's tokens by the logits at their own
    places, which predict the tokens after them.
    """
    tables = {"pseudo_target": path, "reverse_pseudo_target": reverse_of(path)}
    flags = [f"loss_fn.{flag}=true" for flag in ("common_indices_from_subtoks", "kl_chunk_shift")]

    def paths(prefix: str, files: Mapping[str, Path]) -> list[str]:
        return [_override(f"{prefix}.{name}_path", file) for name, file in files.items()]

    newest = [
        "teachers.0.is_cross_tokenizer=true",
        "teachers.0.aligner.projection_matrix_path=null",
        *paths("teachers.0.aligner", tables),
        *flags,
    ]
    first = [*paths("teachers.0", {"projection_matrix": path, **tables}), *flags]
    return [
        f"for NeMo-RL's draft of October 2026: {' '.join(newest)}",
        f"for NeMo-RL's draft 4177: {' '.join(first)}",
    ]


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
