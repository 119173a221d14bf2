"""Convert a map to named tensors and one JSON text (the contents of map files), and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parsing import parse_json
from xtok.errors import XtokError
from xtok.loss_names import MAP_NAMES, MapKind
from xtok.maps.opening import Tensors
from xtok.maps.records import require_valid
from xtok.tokenizers.table import (
    MAX_WIDTH,
    SIDES,
    TokenTable,
    TokenType,
    Vocabulary,
    VocabularyFields,
)

if TYPE_CHECKING:
    from xtok.maps.file import StoredMap

Header: TypeAlias = Mapping[str, Any]  # parsed JSON text
M = TypeVar("M", bound="StoredMap")

FORMAT_VERSION = 1

MAX_HEADER = 1 << 23  # maximum size of a map's JSON text in bytes, for reading and writing

_TABLE_DTYPES = {"bytes": "uint8", "offsets": "int64", "types": "uint8"}
_BOTH_TABLES_DTYPES = {f"{s}_token_{name}": d for s in SIDES for name, d in _TABLE_DTYPES.items()}

_VOCABULARY_TYPES = {  # the permitted types of each field
    name: get_args(hint) or (hint,) for name, hint in get_type_hints(VocabularyFields).items()
}


def _size_problem(text: str) -> str:
    size = len(text.encode())
    limit = f"expected at most {MAX_HEADER}"
    return f"its metadata has {size} bytes, {limit}" if size > MAX_HEADER else ""


def pack(any_map: StoredMap) -> tuple[dict[str, NDArray[Any]], str]:
    """Return a map's arrays by name, and all other fields as sorted JSON."""
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "history": any_map.history,
        "tensors_sha256": tensors_sha256(any_map),
        **any_map.header(),
    }
    tensors = {name: getattr(any_map, name) for name in any_map.ARRAYS}
    for side in SIDES:
        vocabulary: Vocabulary = getattr(any_map, side)
        table = vocabulary.table
        fields[side] = {name: getattr(vocabulary, name) for name in _VOCABULARY_TYPES}
        if vocabulary.definition_sha256 is None:
            del fields[side]["definition_sha256"]
        if table is not None:
            names = (f"{side}_token_{name}" for name in _TABLE_DTYPES)
            tensors |= zip(names, (table.data, table.offsets, table.types), strict=True)
            fields[side] |= {
                "table_sha256": table.sha256(),
                "control_names": {str(i): name for i, name in table.control_names.items()},
                "roles": dict(table.roles),
                "preferred_ids": table.preferred_ids,
            }
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    if problem := _size_problem(text):
        sides = f"{any_map.student.model_id} and {any_map.teacher.model_id}"
        raise XtokError(
            f"a map of {sides} cannot be written: {problem}",
            hint="shorten the names of the special tokens in the tokenizer's files",
        )
    return {n: np.ascontiguousarray(t) for n, t in tensors.items() if t is not None}, text


def tensors_sha256(any_map: StoredMap) -> str:
    """Return the digest of a map's arrays, without the token tables.

    For a map from Llama 3 to Qwen, this takes 1.3 ms of the 19 ms for loading.
    """
    digest = hashlib.sha256()
    for name in sorted(any_map.ARRAYS):
        tensor: NDArray[Any] | None = getattr(any_map, name)
        if tensor is not None:
            digest.update(f"{name} {len(tensor)}\n".encode())
            digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def unpack(cls: type[M], tensors: Tensors, header: Header) -> tuple[M, bool]:
    """Assemble a map, check its token tables, and return whether its arrays match their digest."""
    loaded, digests = assemble(cls, tensors, header)
    for side in SIDES:
        table = getattr(loaded, side).table
        require_valid(
            table is None or table.sha256() == digests[side], f"the {side}'s table_sha256"
        )
    return loaded, digests["tensors"] in (None, tensors_sha256(loaded))


def assemble(cls: type[M], tensors: Tensors, header: Header) -> tuple[M, dict[str, str | None]]:
    """Create a map from a file's tensors and JSON; return the map and the recorded digests.

    Does not check invariants or digests. A damaged file raises an exception in `MALFORMED`.
    """
    for name, dtype in {**cls.ARRAYS, **_BOTH_TABLES_DTYPES}.items():
        if name in tensors and (tensors[name].dtype != dtype or tensors[name].ndim != 1):
            raise ValueError(f"{name} is not a 1-D array of {dtype}")
    fields: dict[str, Any] = {side: _vocabulary(side, header[side], tensors) for side in SIDES}
    for side in SIDES if cls.HAS_TOKENS else ():
        require_valid(fields[side].table is not None, f"the {side}'s tokens")
    fields |= cls.header_fields(header, tensors)
    fields |= {name: tensors[name] for name in cls.ARRAYS if name not in fields}
    fields["history"] = tuple(dict(step) for step in header["history"])
    digests = {side: header[side].get("table_sha256") for side in SIDES}
    digests["tensors"] = header.get("tensors_sha256")  # not in files of earlier versions
    return cls(**fields), digests


def parse_header(metadata: str) -> dict[str, Any]:
    """Parse the JSON text of a map file, and check its size, version and history."""
    if problem := _size_problem(metadata):
        raise ValueError(problem)
    header: dict[str, Any] = parse_json(metadata)
    version = header["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version!r}, expected {FORMAT_VERSION}")
    json.dumps(header, ensure_ascii=False).encode()  # no lone surrogates
    for step in header["history"]:
        require_valid(type(step["stage"]) is str and type(step["options"]) is dict, "history")
    return header


def kind_of(header: Header) -> MapKind:
    """Return the kind of map in a file; projection maps declare no kind."""
    kind: MapKind = header.get("kind", "map")
    require_valid(kind in MAP_NAMES, f"the kind {kind!r}")
    return kind


def _vocabulary(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
) -> Vocabulary:
    fields = {"definition_sha256": None, **fields}  # not in files of earlier versions
    for name, kinds in _VOCABULARY_TYPES.items():
        require_valid(type(fields[name]) in kinds, f"the {side}'s {name}")
    width = fields["vocab_size"]
    require_valid(0 < width <= MAX_WIDTH, f"the {side}'s vocab_size {width}")
    has_table = any(f"{side}_token_{name}" in tensors for name in _TABLE_DTYPES)
    table = _table(side, fields, tensors, width) if has_table else None
    values = {name: fields[name] for name in _VOCABULARY_TYPES}
    return Vocabulary(**values, table=table)


def _table(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], width: int
) -> TokenTable:
    data, offsets, types = (tensors[f"{side}_token_{name}"] for name in _TABLE_DTYPES)
    require_valid(
        len(types) == width == len(offsets) - 1, f"the {side}'s table of {len(types)} tokens"
    )
    rising = bool((np.diff(offsets) >= 0).all())
    require_valid(offsets[0] == 0 and offsets[-1] == len(data) and rising, f"{side}_token_offsets")
    require_valid(bool(np.isin(types, list(TokenType)).all()), f"{side}_token_types")

    def known_id(value: Any) -> int:
        token_id = int(value)  # JSON object keys are strings
        require_valid(0 <= token_id < width, f"the {side}'s token id {value}")
        return token_id

    table = TokenTable(
        data,
        offsets,
        types,
        control_names={known_id(i): str(name) for i, name in fields["control_names"].items()},
        roles={str(role): tuple(map(known_id, ids)) for role, ids in fields["roles"].items()},
        preferred_ids=tuple(map(known_id, fields["preferred_ids"])),
    )
    without_bytes = ~np.isin(types, [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE])
    require_valid(not table.lengths[without_bytes].any(), f"a special token of the {side}")
    require_valid("table_sha256" in fields, f"the {side}'s table_sha256")
    return table
