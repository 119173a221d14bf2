"""Small maps, maps that are built once, and damaged or foreign map files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

import xtok
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.opening import torch_bytes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType, Vocabulary

NO_SLOT = MultitokenConfig(scale_trick=False)


@cache
def built(
    student: Tokenizer, teacher: Tokenizer, config: BuildConfig | None = None
) -> ProjectionMap:
    """Build a map once; its arrays are read-only."""
    projection = xtok.build(student, teacher, config)
    for value in vars(projection).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return projection


def equal_maps(a: mapfile.StoredMap, b: mapfile.StoredMap) -> bool:
    return mapfile.to_safetensors(a) == mapfile.to_safetensors(b)


def row(projection: ProjectionMap, i: int) -> list[tuple[int, float]]:
    ids, weights = projection.row(i)
    return list(zip(ids.tolist(), [round(float(w), 6) for w in weights], strict=True))


def vocabulary(width: int, **fields: Any) -> Vocabulary:
    """Return the vocabulary of one side of a map, by default without tokens."""
    values: dict[str, Any] = {
        "model_id": "m", "revision": None, "backend": None, "width_source": "map",
        "tokenizer_vocab_size": None, "table": None,
    }  # fmt: skip
    return Vocabulary(vocab_size=width, **(values | fields))


def tiny_map(rows: dict[int, list[tuple[int, float]]], **fields: Any) -> ProjectionMap:
    flat = [(s, t, w) for s, row in rows.items() for t, w in row]
    kind = np.zeros(4, np.uint8)
    kind[[row for row in rows if row < 4]] = 2
    return ProjectionMap(
        **{
            "student": vocabulary(4),
            "teacher": vocabulary(6),
            "student_ids": np.array([s for s, _, _ in flat], np.int32),
            "teacher_ids": np.array([t for _, t, _ in flat], np.int32),
            "weights": np.array([w for _, _, w in flat], np.float32),
            "row_kind": kind,
            "scale_slot": None,
            "method": "multitoken",
            "top_k": 3,
            **fields,
        }
    )


GOOD = tiny_map({0: [(3, 0.75), (1, 0.25)], 2: [(5, 1.0)], 3: [(0, 0.5), (4, 0.5)]})
SLOT = np.array([1, 0, 0, 1], np.uint8)


def random_map(rows: int, columns: int, seed: int = 0) -> ProjectionMap:
    random = np.random.default_rng(seed)
    dense = np.where(random.random((rows, columns)) < 0.2, random.random((rows, columns)), 0)
    dense[:, 0] += 0.01
    dense /= dense.sum(1, keepdims=True)
    entries = {
        s: sorted(((int(t), float(row[t])) for t in np.flatnonzero(row)), key=lambda e: -e[1])
        for s, row in enumerate(dense)
    }
    flat = [(s, t, w) for s, row in entries.items() for t, w in row]
    return replace(
        tiny_map({}),
        student=replace(GOOD.student, vocab_size=rows),
        teacher=replace(GOOD.teacher, vocab_size=columns),
        student_ids=np.array([s for s, _, _ in flat], np.int32),
        teacher_ids=np.array([t for _, t, _ in flat], np.int32),
        weights=np.array([w for _, _, w in flat], np.float32),
        row_kind=np.full(rows, RowKind.MIXED, np.uint8),
        top_k=columns,
    )


def tiny_vocabulary(name: str, *tokens: bytes, width: int) -> Vocabulary:
    entries = [TokenEntry(0, TokenType.CONTROL, b"<s>")]
    entries += [TokenEntry(i, TokenType.NORMAL, token) for i, token in enumerate(tokens, 1)]
    table = Decoded(entries).table(width)
    return vocabulary(
        width, model_id=name, revision="main", backend="hf", width_source="option",
        tokenizer_vocab_size=len(tokens) + 1, table=replace(table, roles={"bos": (0,)}),
    )  # fmt: skip


TINY = ProjectionMap(
    student=tiny_vocabulary("org/student", b"a", b"\xff\xfe", b"ab", width=6),
    teacher=tiny_vocabulary("org/teacher", b"a", b"b", width=4),
    student_ids=np.array([0, 1, 2, 2, 3, 3, 3], np.int32),
    teacher_ids=np.array([0, 1, 2, 3, 1, 2, 3], np.int32),
    weights=np.array([1, 1, 0.75, 0.25, 0.625, 0.125, 0.25], np.float32),
    row_kind=np.array([3, 1, 2, 2, 0, 0], np.uint8),
    scale_slot=np.array([0, 0, 1, 1, 0, 0], np.uint8),
    method="multitoken",
    top_k=4,
    history=({"stage": "multitoken", "options": {"top_k": 4}, "xtok_version": "0.1.0"},),
)


def edited(tensors: dict[str, Any] | None = None, **metadata: Any) -> bytes:
    """Return the file of `TINY` with other tensors or metadata, for example `top_k=3`.

    In `student__vocab_size`, `__` separates the keys of nested metadata.
    """

    def change(header: dict[str, Any], fields: dict[str, Any]) -> None:
        header.update(tensors or {})
        for path, value in metadata.items():
            target, *rest = path.split("__")
            inner = fields
            for key in rest:
                inner, target = inner[target], key
            inner[target] = value

    return changed_file(mapfile.to_safetensors(TINY), change)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""A function that changes the tensors and the metadata of a map."""


def changed_file(data: bytes, change: Change) -> bytes:
    """Return a map file after a change of its tensors and metadata. None removes a tensor.

    The file has no digest of the tensors, like a file of an earlier version.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    fields = json.loads(header["__metadata__"]["xtok"])
    del fields["tensors_sha256"]
    tensors = {name: tensor.copy() for name, tensor in load_tensors(data).items()}
    change(tensors, fields)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return save(kept, {"xtok": json.dumps(fields)})


FOREIGN: dict[str, Any] = {
    "indices": torch.tensor([[2, -1, -1], [1, 0, 3], [1, 1, 2], [0, 3, 3], [-1, -1, -1]]),
    "likelihoods": torch.tensor(
        [[1, 0, 0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.0, 0.25], [0, 0, 0]]
    ),
    "model_A_id": "a/student",
    "model_B_id": "b/teacher",
}
"""The contents of a `.pt` file of another program."""


pt_bytes: Callable[[Any], bytes] = torch_bytes  # of any contents


def load_bytes(data: bytes, folder: Path, **options: Any) -> ProjectionMap:
    """Write a map file in any format, and load it."""
    path = folder / "foreign.pt"
    path.write_bytes(data)
    return ProjectionMap.load(path, **options)


def read_pt(folder: Path, value: Any, **options: Any) -> ProjectionMap:
    return load_bytes(pt_bytes(value), folder, **options)
