"""`StoredMap`: read and write map files of every kind (`nemo` handles NeMo-RL's `.pt`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from xtok._lib import io
from xtok.errors import MAP_HINT, MapFileError, OutputError
from xtok.loss_names import LOSS_INFO, MAP_NAMES, MapKind
from xtok.maps import nemo, nemo_tables
from xtok.maps.opening import Tensors, is_on_hub, load_pt, naming, opened, read_tensors
from xtok.maps.packing import Header, kind_of, pack, parse_header, unpack
from xtok.maps.records import InvariantError, StageReport
from xtok.tokenizers.display import listed
from xtok.tokenizers.table import MAX_WIDTH, SIDES, Vocabulary

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap

SUFFIXES = (".safetensors", ".pt")  # suffixes of map files


class LoadOptions(TypedDict, total=False):
    """Options of `StoredMap.load`."""

    student_vocab_size: int | None
    teacher_vocab_size: int | None
    preserve_last: bool | None
    normalize: bool


class FileContents(NamedTuple):
    """Contents of a map file, before conversion to a map class."""

    source: Path
    kind: MapKind
    tensors: Tensors  # tensors and header are empty if another program wrote the file
    header: Header
    entries: nemo.PtEntries | None = None  # only in NeMo-RL's layouts


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredMap:
    """Base class of maps: two vocabularies and a history, stored in a file."""

    KIND: ClassVar[MapKind]
    SUFFIXES: ClassVar[Sequence[str]] = SUFFIXES  # suffixes of the files that `save` can write
    ARRAYS: ClassVar[Mapping[str, str]]  # dtype of each array, by name; all arrays are 1-D
    HAS_TOKENS: ClassVar[bool] = True  # whether each file contains both token tables
    # For each name: a check that raises a `ValueError`, and the text to print if the check passes.
    # A check may rely on earlier checks.
    INVARIANTS: ClassVar[Mapping[str, tuple[Callable[[Any], None], str]]]

    student: Vocabulary
    teacher: Vocabulary
    history: tuple[Mapping[str, Any], ...] = ()  # name, options and version of each stage
    reports: tuple[StageReport, ...] = ()  # reports of stages in this process; not saved

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    def check(self) -> None:
        """Raise an `InvariantError` if the map breaks an invariant."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        is_fixed = not any(array.flags.writeable for array in arrays)
        if is_fixed and vars(self).get("_holds"):  # check read-only arrays only once
            return
        for name, (check, _) in self.INVARIANTS.items():
            try:
                check(self)
            except ValueError as error:
                raise InvariantError(name, str(error)) from error
        # Workaround: the dataclass is frozen, so assigning an attribute would raise an error.
        vars(self)["_holds"] = is_fixed

    def with_side(self, side: str, vocabulary: Vocabulary) -> Self:
        """Return a copy with a new vocabulary on one side, which must be at least as wide."""
        changed: dict[str, Any] = {side: vocabulary}
        return replace(self, **changed)

    def save(self, path: str | PathLike[str], *, overwrite: bool = True) -> None:
        """Write the map to a `.safetensors` file, or to a `.pt` file in NeMo-RL's layout.

        The same map always gives the same bytes. Each file is replaced atomically. A spelling map
        needs two `.pt` files.

        Raises:
            OutputError: if a file cannot be written, if the second file would replace an unrelated
                file, or if `overwrite` is False and an existing file has other contents.
            ValueError: if the map breaks an invariant.
        """
        target = check_map_output(path, self.SUFFIXES)  # resolves links for `files`
        targets = [check_map_output(file, self.SUFFIXES) for file in self.files(target)]
        self.check()
        contents = dict(zip(targets, self._encode_files(targets[0]), strict=True))
        for target, data in () if overwrite else contents.items():
            if target.exists() and target.read_bytes() != data:
                raise io.other_file(target, "its contents differ from the output of this command")
        io.write_all({target: [data] for target, data in contents.items()})

    def files(self, path: Path) -> list[Path]:
        """Return the files that `save` writes for a path."""
        return [path]

    def _encode_files(self, path: Path) -> Sequence[bytes]:
        return [to_safetensors(self)]

    def header(self) -> dict[str, Any]:
        """Return the JSON entries that only this map class has."""
        return {"kind": self.KIND}

    @classmethod
    def header_fields(cls, header: Header, tensors: Tensors) -> dict[str, Any]:
        """Read the fields that only this map class has, except required arrays."""
        return {}

    @classmethod
    def of(cls, source: Self | str | PathLike[str]) -> Self:
        """Load a map from its path, or return a given map unchanged."""
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
        """Read a map of this class from a `.safetensors` file, or a projection map from a `.pt`.

        Args:
            path: a local path, or `hf:OWNER/NAME[@REVISION]/FILE` on the hub. A `.pt` can have any
                layout of NeMo-RL.
            student_vocab_size: the width of the student's logits, if the file does not record this
                width.
            teacher_vocab_size: the width of the teacher's logits, if the file does not record this
                width.
            preserve_last: whether the last column contains scale slots. Overrides the file.
            normalize: normalize trained weights; the weights of a `.pt` are always normalized.

        Raises:
            MapFileError: if the file is damaged, or contains another kind of map or other widths.
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
        """Create a map from a file's contents, with the options of `load`."""
        source = contents.source
        if contents.kind != cls.KIND:
            name = MAP_NAMES[cls.KIND]
            command = next(info.hint for info in LOSS_INFO.values() if info.map == cls.KIND)
            raise MapFileError(
                f"{source} is {MAP_NAMES[contents.kind]}, not {name}",
                hint=f"use xtok verify or xtok inspect for this file; {command} makes {name}",
            )
        with naming(source):
            loaded = cls._unpack(
                contents, options.get("preserve_last"), options.get("normalize", False)
            )
            loaded.check()
        widths = options.get("student_vocab_size"), options.get("teacher_vocab_size")
        for side, width in zip(SIDES, widths, strict=True):
            if width is not None:
                loaded = loaded._at_width(side, width, str(source))
        return loaded

    @classmethod
    def _unpack(cls, contents: FileContents, preserve_last: bool | None, normalize: bool) -> Self:
        """Create a map from a file's contents; check digests, but not invariants."""
        if normalize or preserve_last is not None:
            raise MapFileError(
                f"{contents.source} is {MAP_NAMES[cls.KIND]}, which has no weights",
                hint="leave out {option}",
                parameter="normalize" if preserve_last is None else "preserve_last",
            )
        loaded, is_whole = unpack(cls, contents.tensors, contents.header)
        if not is_whole:
            raise InvariantError("digest", "the tensors changed after the file was written")
        return loaded

    def _at_width(self, side: str, width: int, name: str) -> Self:
        vocabulary: Vocabulary = getattr(self, side)
        if vocabulary.vocab_size != width and not vocabulary.is_lower_bound:
            problem = f"has width {vocabulary.vocab_size} on the {side}'s side, expected {width}"
            hint = (
                f"check that the map belongs to this pair (the map's models are "
                f"{self.student.model_id} and {self.teacher.model_id}), or leave out {{option}}"
            )
        elif width < vocabulary.vocab_size:
            problem = f"has the {side} id {vocabulary.vocab_size - 1}, but the width is {width}"
            hint = f"pass the width of the logits with {{option}}, at least {vocabulary.vocab_size}"
        elif width > MAX_WIDTH:
            problem, hint = f"cannot have width {width}", f"pass at most {MAX_WIDTH} as {{option}}"
        elif vocabulary.table is not None:
            return self
        else:
            resized = replace(vocabulary, vocab_size=width, width_source="option")
            return self.with_side(side, resized)
        raise MapFileError(f"{name} {problem}", hint=hint, parameter=f"{side}_vocab_size")


# Writing


def check_map_output(
    path: str | PathLike[str], suffixes: Sequence[str] = SUFFIXES, *, or_folder: bool = False
) -> Path:
    """Check that a map can be written to a path; see `io.check_output`."""
    if is_on_hub(path):
        raise OutputError(
            f"the output {path} is on the hub, but xtok only writes local files",
            hint="write a local file, then upload it: hf upload OWNER/NAME FILE",
        )
    return io.check_output(path, suffixes, or_folder=or_folder)


def check_reverse(path: Path, student_id: str, teacher_id: str) -> None:
    """Check that an existing file for the teacher's table belongs to the same pair."""
    reverse = nemo_tables.reverse_path(path)
    if not reverse.exists():
        return
    try:
        table = load_pt(reverse, reverse)
    except MapFileError:
        table = None
    contents = "is not a table that xtok wrote"
    if nemo_tables.are_tables(table) and "xtok" in table:
        if (table.get("src"), table.get("dst")) == (teacher_id, student_id):
            return
        contents = f"contains the table from {table.get('src')} to {table.get('dst')}"
    raise OutputError(
        f"{reverse} exists and {contents}; the teacher's table would replace this file",
        hint=f"move this file, or choose an output name other than {path.name}",
    )


def to_safetensors(any_map: StoredMap) -> bytes:
    """Return the bytes of the map's `.safetensors` file."""
    from safetensors.numpy import save

    tensors, metadata = pack(any_map)
    return bytes(save(tensors, {"xtok": metadata}))  # one key, because the order of keys is random


def to_nemo(projection: ProjectionMap) -> bytes:
    """Return the bytes of the map's `.pt` file; see `nemo.pt_bytes`."""
    sides = projection.student, projection.teacher
    return nemo.pt_bytes(*pack(projection), *sides, projection.top_k)


def sha256(any_map: StoredMap) -> str:
    """Return the sha256 of the map's `.safetensors` file."""
    return hashlib.sha256(to_safetensors(any_map)).hexdigest()


# Reading


def read(path: str | PathLike[str]) -> FileContents:
    """Read a map file of any kind and format."""
    source = Path(path)
    with opened(source) as (contents, is_pt), naming(source):
        if is_pt:
            loaded = load_pt(contents, source)
            if nemo_tables.are_tables(loaded):
                raise MapFileError(
                    f"{source} contains a table for NeMo-RL, which xtok can write but not read",
                    hint="pass the map as .safetensors, for example from xtok events --for csd",
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
        f"{source} is a safetensors file, but not an xtok map; the file contains the tensors "
        f"{listed(map(repr, tensors), 5) or '(none)'}",
        hint=MAP_HINT,
    )


def _file_contents(
    source: Path, stored: tuple[Tensors, str] | None, entries: nemo.PtEntries | None = None
) -> FileContents:
    tensors, header = ({}, {}) if stored is None else (stored[0], parse_header(stored[1]))
    return FileContents(source, kind_of(header), tensors, header, entries)


def table_digests(path: str | PathLike[str]) -> list[str] | None:
    """Return the `table_sha256` of student and teacher from a table file for NeMo-RL's draft.

    The list is empty if another program wrote the table. For any other file, the result is None.
    """
    source = Path(path)
    with opened(source) as (contents, is_pt), naming(source):
        loaded: Any = load_pt(contents, source) if is_pt else None
        if not nemo_tables.are_tables(loaded):
            return None
        header = parse_header(loaded["xtok"]["metadata"]) if "xtok" in loaded else {}
        return [header[side]["table_sha256"] for side in SIDES if header]
