"""A map as named tensors and one JSON text, as both file formats store it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.maps.projection_map import ProjectionMap
from xtok.vocab.table import MAX_WIDTH, TokenTable, TokenType, Vocabulary

FORMAT_VERSION = 1

_TABLE_DTYPES = {"bytes": np.uint8, "offsets": np.int64, "types": np.uint8}
MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError
)  # fmt: skip
"""What reading a damaged file can raise."""

_DTYPES = {
    "student_ids": np.int32,
    "teacher_ids": np.int32,
    "weights": np.float32,
    "row_kind": np.uint8,
    "scale_slot": np.uint8,
} | {f"{s}_token_{name}": d for s in ("student", "teacher") for name, d in _TABLE_DTYPES.items()}


def pack_tensors(projection: ProjectionMap) -> dict[str, NDArray[Any]]:
    """Return the map's arrays by the names that they have in a file."""
    tensors: dict[str, NDArray[Any]] = {
        "student_ids": projection.student_ids,
        "teacher_ids": projection.teacher_ids,
        "weights": projection.weights,
        "row_kind": projection.row_kind,
    }
    if projection.scale_slot is not None:
        tensors["scale_slot"] = projection.scale_slot
    for side in ("student", "teacher"):
        table: TokenTable | None = getattr(projection, side).table
        if table is not None:
            tensors[f"{side}_token_bytes"] = table.data
            tensors[f"{side}_token_offsets"] = table.offsets
            tensors[f"{side}_token_types"] = table.types
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def pack_metadata(projection: ProjectionMap) -> str:
    """Return everything that is not an array, as JSON with sorted keys."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "student": _side_metadata(projection.student),
        "teacher": _side_metadata(projection.teacher),
        "method": projection.method,
        "top_k": projection.top_k,
        "enable_scale_trick": projection.enable_scale_trick,
        "history": list(projection.history),
    }
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False)


def _side_metadata(vocabulary: Vocabulary) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: getattr(vocabulary, name)
        for name in (
            "model_id", "revision", "backend", "vocab_size", "width_source", "tokenizer_vocab_size"
        )
    }  # fmt: skip
    table = vocabulary.table
    if table is not None:
        fields |= {
            "table_sha256": table.sha256(),
            "control_names": {str(i): name for i, name in table.control_names.items()},
            "roles": {role: list(ids) for role, ids in table.roles.items()},
            "preferred_ids": list(table.preferred_ids),
        }
    return fields


def unpack(tensors: Mapping[str, NDArray[Any]], metadata: str) -> ProjectionMap:
    """Make a map of a file's tensors and its JSON text, and check it whole.

    Raises:
        ValueError: if they are not a valid map; damaged JSON may raise what its shape provokes:
            any of `MALFORMED`.
    """
    projection, digests = assemble(tensors, metadata)
    for side, digest in zip(("student", "teacher"), digests, strict=True):
        table = getattr(projection, side).table
        require(table is None or table.sha256() == digest, f"the {side}'s table_sha256")
    projection.check()
    return projection


def assemble(
    tensors: Mapping[str, NDArray[Any]], metadata: str
) -> tuple[ProjectionMap, tuple[str | None, str | None]]:
    """Make a map of a file's parts, whose invariants and digests are not yet checked.

    Returns:
        the map, and what the file says of the `table_sha256` of student and teacher.

    Raises:
        ValueError: as `unpack`, or any of `MALFORMED`.
    """
    fields = json.loads(metadata)
    version = fields["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"format version {version!r} is not {FORMAT_VERSION}, which this xtok reads"
        )
    for name, dtype in _DTYPES.items():
        if name in tensors and (tensors[name].dtype != dtype or tensors[name].ndim != 1):
            raise ValueError(f"{name} is not a list of {np.dtype(dtype).name}")
    if bool(fields["enable_scale_trick"]) != ("scale_slot" in tensors):
        raise ValueError("scale_slot and enable_scale_trick do not agree")
    projection = ProjectionMap(
        student=_vocabulary("student", fields["student"], tensors),
        teacher=_vocabulary("teacher", fields["teacher"], tensors),
        student_ids=tensors["student_ids"],
        teacher_ids=tensors["teacher_ids"],
        weights=tensors["weights"],
        row_kind=tensors["row_kind"],
        scale_slot=tensors.get("scale_slot"),
        method=str(fields["method"]),
        top_k=fields["top_k"],
        history=tuple(dict(step) for step in fields["history"]),
    )
    require(type(projection.top_k) is int and projection.top_k <= MAX_WIDTH, "top_k")
    json.dumps(fields, ensure_ascii=False).encode()  # no lone surrogates
    for step in projection.history:
        require(type(step["stage"]) is str and type(step["options"]) is dict, "history")
    digests = (fields["student"].get("table_sha256"), fields["teacher"].get("table_sha256"))
    return projection, digests


def _vocabulary(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
) -> Vocabulary:
    width = fields["vocab_size"]
    for name, kind in (("revision", str), ("backend", str), ("tokenizer_vocab_size", int)):
        require(fields[name] is None or type(fields[name]) is kind, f"the {side}'s {name}")
    require(type(width) is int and 0 < width <= MAX_WIDTH, f"the {side}'s vocab_size {width}")
    names = [f"{side}_token_{name}" for name in _TABLE_DTYPES]
    table = None
    if any(name in tensors for name in names):
        data, offsets, types = (tensors[name] for name in names)
        require(len(types) == width == len(offsets) - 1, f"the {side}'s table is not {width} long")
        require(
            offsets[0] == 0 and offsets[-1] == len(data) and bool((np.diff(offsets) >= 0).all()),
            f"{side}_token_offsets",
        )
        require(bool(np.isin(types, list(TokenType)).all()), f"{side}_token_types")
        table = TokenTable(
            data,
            offsets,
            types,
            control_names={_id(i, width, side): str(n) for i, n in fields["control_names"].items()},
            roles={
                str(role): tuple(_id(i, width, side) for i in ids)
                for role, ids in fields["roles"].items()
            },
            preferred_ids=tuple(_id(i, width, side) for i in fields["preferred_ids"]),
        )
        without_bytes = ~np.isin(types, [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE])
        require(not table.lengths[without_bytes].any(), f"the {side}'s special tokens have bytes")
        fields["table_sha256"]  # a table has one
    return Vocabulary(
        model_id=str(fields["model_id"]),
        revision=fields["revision"],
        backend=fields["backend"],
        vocab_size=width,
        width_source=str(fields["width_source"]),
        tokenizer_vocab_size=fields["tokenizer_vocab_size"],
        table=table,
    )


def _id(value: Any, width: int, side: str) -> int:
    token_id = int(value)  # keys of JSON objects are text
    require(0 <= token_id < width, f"the {side}'s token id {value}")
    return token_id


def require(holds: object, what: str) -> None:
    """Raise a `ValueError` that names what is not valid, unless it holds."""
    if not holds:
        raise ValueError(f"{what} is not valid")
