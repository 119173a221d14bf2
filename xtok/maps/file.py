"""Files of maps of every kind; NeMo-RL's `.pt` is in `nemo`.

Both formats store named tensors and one JSON text; `pack` and `assemble` convert fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
)

import numpy as np
from numpy.typing import NDArray

from xtok._lib import io
from xtok._lib.parsing import parse_json
from xtok.config import LOSS_INFO, MAP_NAMES, MapKind
from xtok.errors import MAP_HINT, MapFileError, OutputError, XtokError
from xtok.maps import nemo, nemo_tables
from xtok.maps.opening import (
    Tensors,
    is_on_hub,
    load_pt,
    naming,
    opened,
    read_tensors,
    require_valid,
)
from xtok.maps.records import InvariantError, StageReport
from xtok.tokenizers.display import listed
from xtok.tokenizers.table import MAX_WIDTH, SIDES, TokenTable, TokenType, Vocabulary

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap

Header: TypeAlias = Mapping[str, Any]  # the parsed JSON text
M = TypeVar("M", bound="StoredMap")

FORMAT_VERSION = 1

MAX_HEADER = 1 << 23  # maximum size of a map's JSON text, in bytes, for reading and writing

SUFFIXES = (".safetensors", ".pt")  # suffixes of map files


class LoadOptions(TypedDict, total=False):
    """Options of `StoredMap.load`."""

    student_vocab_size: int | None
    teacher_vocab_size: int | None
    preserve_last: bool | None
    normalize: bool


class FileContents(NamedTuple):
    """Contents of a map's file, for the class of its kind."""

    source: Path
    kind: MapKind
    tensors: Tensors  # both empty if another program wrote the file
    header: Header
    entries: nemo.PtEntries | None = None  # in NeMo-RL's layouts


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredMap:
    """Base class of maps: two vocabularies, a history, and a file."""

    KIND: ClassVar[MapKind]
    SUFFIXES: ClassVar[Sequence[str]] = SUFFIXES  # of the files that `save` can write
    ARRAYS: ClassVar[Mapping[str, str]]  # dtype of each array, by name; all are 1-D
    HAS_TOKENS: ClassVar[bool] = True  # whether each file contains both token tables
    # By name: a check that raises a `ValueError`, and the sentence for a map that passes. A check
    # may rely on the checks before it
    INVARIANTS: ClassVar[Mapping[str, tuple[Callable[[Any], None], str]]]

    student: Vocabulary
    teacher: Vocabulary
    history: tuple[Mapping[str, Any], ...] = ()  # one object per stage: name, options, version
    reports: tuple[StageReport, ...] = ()  # of the stages that ran in this process; not saved

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    def check(self) -> None:
        """Check the invariants; an `InvariantError` names the first that does not hold."""
        if "_holds" in vars(self):
            return
        for name, (check, _) in self.INVARIANTS.items():
            try:
                check(self)
            except ValueError as error:
                raise InvariantError(name, str(error)) from error
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        if not any(array.flags.writeable for array in arrays):
            vars(self)["_holds"] = True  # read-only arrays need one check

    def with_side(self, side: str, vocabulary: Vocabulary) -> Self:
        """Replace the vocabulary of a side by another that is at least as wide."""
        changed: dict[str, Any] = {side: vocabulary}
        return replace(self, **changed)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the map: `.safetensors`, or `.pt` in NeMo-RL's layout.

        The same map gives the same bytes. A spelling map as `.pt` consists of two files. Files are
        written completely, then renamed.

        Raises:
            OutputError: if a file cannot be written, or another file has the name of the second.
            ValueError: if the map breaks an invariant.
        """
        targets = [check_output(file, self.SUFFIXES) for file in self.files(Path(path))]
        self.check()
        contents = zip(targets, self._bytes_of_files(targets[0]), strict=True)
        io.write_all({target: [data] for target, data in contents})

    def files(self, path: Path) -> list[Path]:
        """Return the files that `save` writes for a path."""
        return [path]

    def _bytes_of_files(self, path: Path) -> Sequence[bytes]:
        """Return the contents of each of these files."""
        return [to_safetensors(self)]

    def header(self) -> dict[str, Any]:
        """Return the entries of the file's JSON that only this kind of map has."""
        return {"kind": self.KIND}

    @classmethod
    def header_fields(cls, header: Header, tensors: Tensors) -> dict[str, Any]:
        """Return the fields that only this kind of map has, except arrays that it requires."""
        return {}

    @classmethod
    def of(cls, source: Self | str | PathLike[str]) -> Self:
        """Load a map from its path; return a map unchanged."""
        return cls.load(source) if isinstance(source, str | PathLike) else source

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        student_vocab_size: int | None = None,
        teacher_vocab_size: int | None = None,
        preserve_last: bool | None = None,
        normalize: bool = False,
    ) -> Self:
        """Read a map of this class: `.safetensors`, or for projection maps any `.pt` of NeMo-RL.

        Args:
            path: a local path, or `hf:OWNER/NAME[@REVISION]/FILE` on the hub.
            student_vocab_size: width of the rows, if the file does not record it.
            teacher_vocab_size: width of the columns.
            preserve_last: whether the last column contains scale slots; overrides the file.
            normalize: normalize trained weights; a `.pt` always is.

        Raises:
            MapFileError: if the file contains another kind of map, is damaged, or has other widths.
        """
        return cls.of_contents(
            read(path),
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
            preserve_last=preserve_last,
            normalize=normalize,
        )

    @classmethod
    def of_contents(cls, contents: FileContents, **options: Unpack[LoadOptions]) -> Self:
        """Make a map of the contents of its file, with the options of `load`."""
        source = contents.source
        if contents.kind != cls.KIND:
            name = MAP_NAMES[cls.KIND]
            command = next(info.hint for info in LOSS_INFO.values() if info.map == cls.KIND)
            raise MapFileError(
                f"{source} is {MAP_NAMES[contents.kind]}, not {name}",
                hint=f"xtok verify checks it, xtok inspect shows it; {command} makes {name}",
            )
        with naming(source):
            made = cls._unpacked(
                contents, options.get("preserve_last"), options.get("normalize", False)
            )
            made.check()
        widths = options.get("student_vocab_size"), options.get("teacher_vocab_size")
        for side, width in zip(SIDES, widths, strict=True):
            if width is not None:
                made = made._at_width(side, width, str(source))
        return made

    @classmethod
    def _unpacked(cls, contents: FileContents, preserve_last: bool | None, normalize: bool) -> Self:
        """Make a map of the contents of its file; check the digests, not the invariants."""
        if normalize or preserve_last is not None:
            raise MapFileError(
                f"{contents.source} is {MAP_NAMES[cls.KIND]}, which has no weights",
                hint="leave out {option}",
                parameter="normalize" if preserve_last is None else "preserve_last",
            )
        made, is_whole = unpack(cls, contents.tensors, contents.header)
        if not is_whole:
            raise InvariantError("digest", "its tensors changed after it was written")
        return made

    def _at_width(self, side: str, width: int, name: str) -> Self:
        vocabulary: Vocabulary = getattr(self, side)
        if vocabulary.vocab_size != width and not vocabulary.is_lower_bound:
            problem = f"is {vocabulary.vocab_size} wide on the {side}'s side, expected {width}"
            hint = (
                f"check that the map belongs to this pair: its models are {self.student.model_id} "
                f"and {self.teacher.model_id}; or leave out {{option}}"
            )
        elif width < vocabulary.vocab_size:
            problem = f"has the {side} id {vocabulary.vocab_size - 1}, expected a width of {width}"
            hint = f"give the width of the logits with {{option}}, at least {vocabulary.vocab_size}"
        elif width > MAX_WIDTH:
            problem, hint = f"cannot be {width} wide", f"give {{option}} up to {MAX_WIDTH}"
        elif vocabulary.table is not None:
            return self
        else:
            known = replace(vocabulary, vocab_size=width, width_source="option")
            return self.with_side(side, known)
        raise MapFileError(f"{name} {problem}", hint=hint, parameter=f"{side}_vocab_size")


# Writing


def check_output(
    path: str | PathLike[str], suffixes: Sequence[str] = SUFFIXES, *, or_folder: bool = False
) -> Path:
    """Check that a map can be written to a path, before any work; see `io.check_output`."""
    if is_on_hub(path):
        raise OutputError(
            f"the output {path} is on the hub, and xtok writes local files only",
            hint="write a local file, then share it: hf upload OWNER/NAME FILE",
        )
    return io.check_output(path, suffixes, or_folder=or_folder)


def check_reverse(path: Path, student_id: str, teacher_id: str) -> None:
    """Check that the teacher's table, next to `path`, would only replace one of the same pair."""
    beside = nemo_tables.reverse_of(path)
    if not beside.exists():
        return
    try:
        table = load_pt(beside, beside)
    except MapFileError:
        table = None
    contents = "is not a table that xtok wrote"
    if nemo_tables.are_tables(table) and "xtok" in table:
        if (table.get("src"), table.get("dst")) == (teacher_id, student_id):
            return
        contents = f"contains the table of {table.get('src')} in {table.get('dst')}"
    raise OutputError(
        f"{beside} exists and {contents}; the teacher's table would replace it",
        hint=f"move it, or choose another output name than {path.name}",
    )


def to_safetensors(any_map: StoredMap) -> bytes:
    """Return the bytes of the map's `.safetensors` file."""
    from safetensors.numpy import save

    tensors, metadata = pack(any_map)
    return bytes(save(tensors, {"xtok": metadata}))  # the order of several keys would be random


def to_nemo(projection: ProjectionMap) -> bytes:
    """Return the bytes of the map's `.pt` file; see `nemo.to_nemo`."""
    sides = projection.student, projection.teacher
    return nemo.to_nemo(*pack(projection), *sides, projection.top_k)


def sha256(any_map: StoredMap) -> str:
    """Return the sha256 of the map's `.safetensors` file."""
    return hashlib.sha256(to_safetensors(any_map)).hexdigest()


# Reading


def read(path: str | PathLike[str]) -> FileContents:
    """Return the contents of a map's file, of any kind and in any format."""
    source = Path(path)
    with opened(source) as (contents, is_pt), naming(source):
        if is_pt:
            loaded = load_pt(contents, source)
            if nemo_tables.are_tables(loaded):
                raise MapFileError(
                    f"{source} contains a table for NeMo-RL, which xtok writes but does not read",
                    hint="give the map as .safetensors; xtok events --for csd makes one",
                )
            entries = nemo.read_pt(loaded, contents.stat().st_size)
            return _file_contents(source, entries.own, entries)
        tensors, metadata = read_tensors(contents, source)
        if "xtok" in metadata:
            return _file_contents(source, (tensors, metadata["xtok"]))
        if {"indices", "likelihoods"} & tensors.keys():
            slots = metadata.get("enable_scale_trick", "").lower() == "true"
            stated = {**metadata, "enable_scale_trick": slots}
            entries = nemo.read_padded(tensors["indices"], tensors["likelihoods"], stated)
            return _file_contents(source, None, entries)
    raise MapFileError(
        f"{source} is a safetensors file, but not an xtok map; its tensors: "
        f"{listed(map(repr, tensors), 5) or 'none'}",
        hint=MAP_HINT,
    )


def _file_contents(
    source: Path, own: tuple[Tensors, str] | None, entries: nemo.PtEntries | None = None
) -> FileContents:
    tensors, header = ({}, {}) if own is None else (own[0], parse_header(own[1]))
    return FileContents(source, kind_of(header), tensors, header, entries)


def table_digests(path: str | PathLike[str]) -> list[str] | None:
    """Return both sides' `table_sha256` from a table for NeMo-RL's draft; None for another file.

    The list is empty if another program wrote the table.
    """
    source = Path(path)
    with opened(source) as (contents, is_pt), naming(source):
        loaded: Any = load_pt(contents, source) if is_pt else None
        if not nemo_tables.are_tables(loaded):
            return None
        header = parse_json(loaded["xtok"]["metadata"]) if "xtok" in loaded else {}
        return [header[side]["table_sha256"] for side in SIDES if header]


# A map as tensors and JSON

_TABLE_DTYPES = {"bytes": "uint8", "offsets": "int64", "types": "uint8"}
_BOTH_TABLES_DTYPES = {f"{s}_token_{name}": d for s in SIDES for name, d in _TABLE_DTYPES.items()}

_VOCABULARY_TYPES = {
    "model_id": (str,),
    "revision": (str, NoneType),
    "backend": (str, NoneType),
    "vocab_size": (int,),
    "width_source": (str,),
    "tokenizer_vocab_size": (int, NoneType),
    "definition_sha256": (str, NoneType),
}


def _size_problem(text: str) -> str:
    size = len(text.encode())
    limit = f"expected at most {MAX_HEADER}"
    return f"its metadata has {size} bytes, {limit}" if size > MAX_HEADER else ""


def pack(any_map: StoredMap) -> tuple[dict[str, NDArray[Any]], str]:
    """Return a map's arrays by their names in a file, and all other fields as sorted JSON."""
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
    """Return the digest of a map's arrays, without token tables.

    It takes 1.3 of the 19 ms to load a map of Llama 3 and Qwen.
    """
    digest = hashlib.sha256()
    for name in sorted(any_map.ARRAYS):
        tensor: NDArray[Any] | None = getattr(any_map, name)
        if tensor is not None:
            digest.update(f"{name} {len(tensor)}\n".encode())
            digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def unpack(cls: type[M], tensors: Tensors, header: Header) -> tuple[M, bool]:
    """Make a map as `assemble` does; check the token tables, and return whether its arrays match.

    An array that differs from its digest was changed after the map was written.
    """
    made, digests = assemble(cls, tensors, header)
    for side in SIDES:
        table = getattr(made, side).table
        require_valid(
            table is None or table.sha256() == digests[side], f"the {side}'s table_sha256"
        )
    return made, digests["tensors"] in (None, tensors_sha256(made))


def assemble(cls: type[M], tensors: Tensors, header: Header) -> tuple[M, dict[str, str | None]]:
    """Make a map from a file's tensors and JSON; return it with the recorded digests.

    Neither invariants nor digests are checked; errors are of `MALFORMED`.
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
    digests["tensors"] = header.get("tensors_sha256")  # missing in files of earlier versions
    return cls(**fields), digests


def parse_header(metadata: str) -> dict[str, Any]:
    """Parse the JSON text of a map's file; check its size, version and history."""
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
    """Return the kind of map in a file; only projection maps do not declare it."""
    kind: MapKind = header.get("kind", "map")
    require_valid(kind in MAP_NAMES, f"the kind {kind!r}")
    return kind


def _vocabulary(
    side: str, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
) -> Vocabulary:
    fields = {"definition_sha256": None, **fields}  # missing in files of earlier versions
    for name, kinds in _VOCABULARY_TYPES.items():
        require_valid(type(fields[name]) in kinds, f"the {side}'s {name}")
    width = fields["vocab_size"]
    require_valid(0 < width <= MAX_WIDTH, f"the {side}'s vocab_size {width}")
    has_table = any(f"{side}_token_{name}" in tensors for name in _TABLE_DTYPES)
    table = _table(side, fields, tensors, width) if has_table else None
    known = {name: fields[name] for name in _VOCABULARY_TYPES}
    return Vocabulary(**known, table=table)


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
        token_id = int(value)  # keys of JSON objects are strings
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
    fields["table_sha256"]  # required
    return table
