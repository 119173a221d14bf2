"""`convert`: write a map in another file format, with the options for NeMo-RL's script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Unpack

from xtok.loss_names import BuildLoss
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import AnyMap, AnyMapLike, bind_map, read_map
from xtok.maps.nemo_tables import reverse_path
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.suitability import exact_rows, is_counted
from xtok.tokenizers.pairs import Pair


def convert(
    any_map: AnyMapLike,
    output: str | PathLike[str],
    pair: Pair | None = None,
    **options: Unpack[mapfile.LoadOptions],
) -> Path:
    """Write a map in the format of the output's suffix, and return the output's path.

    >>> path = xtok.convert(xtok.build("bytes", "bytes"), "map.pt")
    >>> xtok.ProjectionMap.load(path)
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Args:
        any_map: a map of any kind, or the path of its file.
        output: a `.safetensors` file, or a `.pt` file for NeMo-RL (not for event maps). For a
            spelling map, `NAME.pt` contains the student's table, and `NAME.reverse.pt` contains
            the teacher's table.
        pair: the student and the teacher. If the map has no tokens, the pair's tokens are added.
        options: the options of `ProjectionMap.load`; allowed only if `any_map` is a path.
    """
    target = mapfile.check_map_output(output)
    if isinstance(any_map, AnyMap):
        if options:
            raise TypeError(f"{', '.join(options)} can only be used with the path of a map file")
    else:
        any_map = read_map(any_map, **options)
    if pair is not None:
        any_map, _ = bind_map(any_map, pair)
    any_map.save(target)
    return target


def nemo_overrides(any_map: AnyMap, path: Path, loss: BuildLoss | None = None) -> list[str]:
    """Return notes with the NeMo-RL options for training with a map.

    The default loss of a counted map is gold if the map has exact rows, otherwise P-KL.
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
    """Return the options for two versions of NeMo-RL's draft "v6": the newest and the first.

    The newest version is the author's branch in October 2026 (38aea62, 6bf7cb1, 7e6492b). The first
    version is pull request 4177 at a84de17. The first version requires the path of a projection
    map, although it does not read the map with these options. Without `kl_chunk_shift`, both
    versions compare logits with the wrong token: the logits at a position predict the next token,
    not the token at this position.
    """
    tables = {"pseudo_target": path, "reverse_pseudo_target": reverse_path(path)}
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


# Values that need no quotes in Hydra's override grammar
_UNQUOTED = re.compile(r"[\w/.+%@:-]+", re.ASCII)


def _override(key: str, path: Path) -> str:
    value = os.path.abspath(path)
    if not _UNQUOTED.fullmatch(value):
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
        value = f"'{escaped}'"
    return shlex.quote(f"{key}={value}")
