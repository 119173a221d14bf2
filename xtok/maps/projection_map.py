"""`ProjectionMap`: a sparse matrix `[V_student, V_teacher]` with invariants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.maps import nemo
from xtok.maps.edges import (
    SUM_TOLERANCE,
    Edges,
    in_map_order,
    num_duplicates,
    out_of_order,
    pair_order,
    row_starts,
    slot_entries,
)
from xtok.maps.file import FileContents, StoredMap, to_nemo
from xtok.maps.opening import Tensors
from xtok.maps.packing import Header, unpack
from xtok.maps.records import (
    InvariantError,
    Recipe,
    RowKind,
    StageReport,
    history_step,
    require,
    require_valid,
)
from xtok.tokenizers.table import MAX_WIDTH, SIDES, Vocabulary

if TYPE_CHECKING:
    import torch
    from scipy import sparse


@dataclass(frozen=True, kw_only=True)
class RowEntry:
    """One entry of a row. `token` is escaped text, or the name of a control token."""

    teacher_id: int
    token: str | None
    weight: float
    is_slot: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a map, sorted by descending weight, with the slot last."""

    student_id: int
    token: str | None
    kind: str
    entries: tuple[RowEntry, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionMap(StoredMap):
    """A cross-tokenizer projection map W, float32 `[V_student, V_teacher]`, as sorted COO.

    Entries are sorted by student id, descending weight and teacher id. A scale slot is always the
    last entry of its row. The weights of each non-empty row sum to 1.
    """

    KIND = "map"
    ARRAYS: ClassVar = {
        "student_ids": "int32", "teacher_ids": "int32", "weights": "float32", "row_kind": "uint8",
        "scale_slot": "uint8",
    }  # fmt: skip
    HAS_TOKENS = False

    student_ids: NDArray[np.int32]  # int32 [nnz]
    teacher_ids: NDArray[np.int32]  # int32 [nnz]
    weights: NDArray[np.float32]  # float32 [nnz], > 0
    row_kind: NDArray[np.uint8]  # [V_student], values of `RowKind`
    scale_slot: NDArray[np.uint8] | None  # [V_student], 1 if the row's last entry is a slot
    method: str  # origin of the edges; documented in the file-format guide
    top_k: int  # maximum number of entries in a row
    recipe: Recipe | None = None  # the inputs of `build`, or None if another stage changed the map

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        return f"ProjectionMap({pair}, {self.shape[0]} × {self.shape[1]}, nnz={self.nnz})"

    @property
    def nnz(self) -> int:
        """Number of entries in the map."""
        return len(self.weights)

    @property
    def enable_scale_trick(self) -> bool:
        """Whether rows may have a scale slot."""
        return self.scale_slot is not None

    @property
    def stages(self) -> list[str]:
        """Names of the stages in the history."""
        return [str(step["stage"]) for step in self.history]

    @property
    def edges(self) -> Edges:
        """The three arrays of the COO matrix."""
        return Edges(self.student_ids, self.teacher_ids, self.weights)

    @property
    def entries_per_row(self) -> NDArray[np.int64]:
        """Number of entries of each row, int64 `[V_student]`."""
        return np.bincount(self.student_ids, minlength=self.shape[0])

    @property
    def is_slot(self) -> NDArray[np.bool_]:
        """Mask of the entries that are scale slots, bool `[nnz]`."""
        return slot_entries(self.student_ids, self.scale_slot)

    @property
    def heaviest_teacher_ids(self) -> NDArray[np.int32]:
        """Teacher id of each row's heaviest entry (not a slot), or −1, int32 `[V_student]`."""
        heaviest = np.full(self.shape[0], -1, np.int32)
        entries = self.edges.take(~self.is_slot)
        rows, indices = np.unique(entries.student_ids, return_index=True)
        heaviest[rows] = entries.teacher_ids[indices]
        return heaviest

    def row(self, token: str | bytes | int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the teacher ids (int32) and weights (float32) of one row, heaviest first."""
        student_id = self._emitted_id(token) if isinstance(token, str | bytes) else token
        if not 0 <= student_id < self.shape[0]:
            raise IndexError(f"student id {student_id} is outside 0..{self.shape[0] - 1}")
        ends = np.array([student_id, student_id + 1], self.student_ids.dtype)  # avoids a copy
        start, end = np.searchsorted(self.student_ids, ends)
        return self.teacher_ids[start:end], self.weights[start:end]

    def __getitem__(self, token: str | bytes | int) -> Row:
        """Return the row of a student token, given as text, bytes or an id.

        If several ids have the same bytes, the row belongs to the id that the tokenizer emits.

        >>> xtok.build("bytes", "bytes")["a"].entries
        (RowEntry(teacher_id=97, token='a', weight=1.0, is_slot=False),)

        Raises:
            XtokError: if the student has no such token or id.
        """
        student_id = self._emitted_id(token)
        teacher_ids, weights = (array.tolist() for array in self.row(student_id))
        has_slot = self.scale_slot is not None and bool(self.scale_slot[student_id])
        is_slot = [has_slot and index == len(weights) - 1 for index in range(len(weights))]
        return Row(
            student_id=student_id,
            token=token_name(self.student, student_id),
            kind=RowKind(int(self.row_kind[student_id])).name.lower(),
            entries=tuple(
                RowEntry(teacher_id=t, token=token_name(self.teacher, t), weight=w, is_slot=slot)
                for t, w, slot in zip(teacher_ids, weights, is_slot, strict=True)
            ),
        )

    def _emitted_id(self, token: str | bytes | int) -> int:
        ids = self.student.ids_of(token)
        table = self.student.table
        if len(ids) > 1 and table is not None:
            ids = [i for i in ids if table.canonical_ids().get(table[i]) == i] or ids
        return ids[0]

    def after(self, stage: str, options: Mapping[str, Any], **details: Any) -> Self:
        """Return a copy with an additional history step and without the recipe."""
        history = (*self.history, history_step(stage, options, **details))
        return replace(self, history=history, recipe=None)

    def with_side(self, side: str, vocabulary: Vocabulary) -> Self:
        """Return a copy with a new vocabulary on one side. New rows are empty."""
        changed = super().with_side(side, vocabulary)
        num_new = changed.shape[0] - self.shape[0]
        if not num_new:
            return changed
        slot = None if self.scale_slot is None else np.pad(self.scale_slot, (0, num_new))
        return replace(changed, row_kind=np.pad(self.row_kind, (0, num_new)), scale_slot=slot)

    def require_widths(self) -> None:
        """Raise an `XtokError` if a width was only inferred from the largest id."""
        for side in SIDES:
            vocabulary: Vocabulary = getattr(self, side)
            if vocabulary.width_source == "ids":
                raise XtokError(
                    f"the map file does not record the width of the {side}'s logits (largest id: "
                    f"{vocabulary.vocab_size - 1:,})",
                    hint="load or convert the map with {option}",
                    parameter=f"{side}_vocab_size",
                )

    def to_torch(self) -> torch.Tensor:
        """Return W as a coalesced sparse COO tensor, float32 `[V_student, V_teacher]`."""
        import torch

        order, _ = pair_order(self.edges)
        ids = np.stack([self.student_ids[order], self.teacher_ids[order]]).astype(np.int64)
        indices, weights = torch.from_numpy(ids), torch.from_numpy(self.weights[order])
        return torch.sparse_coo_tensor(
            indices, weights, self.shape, is_coalesced=True, check_invariants=True
        )

    def to_scipy(self) -> sparse.csr_matrix:
        """Return W as a SciPy CSR matrix, float32 `[V_student, V_teacher]`, with sorted indices."""
        try:
            from scipy import sparse
        except ImportError as error:
            raise ImportError("to_scipy needs SciPy: pip install scipy") from error
        ids = self.student_ids, self.teacher_ids
        return sparse.csr_matrix((self.weights, ids), shape=self.shape, dtype=np.float32)

    def with_slots(self, preserve_last: bool) -> Self:
        """Mark the entries of the last column as scale slots, or remove all such marks."""
        if preserve_last == self.enable_scale_trick:
            return self
        edges, slot = self.edges, None
        if preserve_last:
            full = (self.entries_per_row == self.top_k) & (self.top_k > 1)
            slot = full.astype(np.uint8)
            counts = {"rows with a scale slot in the last column": int(full.sum())}
            note = "the entries of the last column are now scale slots, which cutting keeps"
        else:
            edges = in_map_order(edges, np.zeros(self.nnz, np.bool_))
            counts = {"scale slots turned into entries": int(self.is_slot.sum())}
            note = "the scale slots are now ordinary entries, which cutting may drop"
        reports = (*self.reports, StageReport("import", counts, (note,)))
        result = replace(self, **edges._asdict(), scale_slot=slot, reports=reports)
        return result.after("import", {"preserve_last": preserve_last})

    # In a file

    def _encode_files(self, path: Path) -> Sequence[bytes]:
        return [to_nemo(self)] if path.suffix == ".pt" else super()._encode_files(path)

    def header(self) -> dict[str, Any]:
        """Return the method, `top_k`, the scale-trick flag and the recipe for the file's header."""
        names = ("method", "top_k", "enable_scale_trick", "recipe")
        fields = {name: getattr(self, name) for name in names}
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def header_fields(cls, header: Header, tensors: Tensors) -> dict[str, Any]:
        """Read the method, `top_k`, the scale slots and the recipe."""
        if bool(header["enable_scale_trick"]) != ("scale_slot" in tensors):
            raise ValueError("scale_slot and enable_scale_trick contradict each other")
        top_k, recipe = header["top_k"], header.get("recipe")
        require_valid(type(top_k) is int and top_k <= MAX_WIDTH, "top_k")
        require_valid(isinstance(recipe, dict | NoneType), "recipe")
        scale_slot, method = tensors.get("scale_slot"), str(header["method"])
        return {"scale_slot": scale_slot, "method": method, "top_k": top_k, "recipe": recipe}

    @classmethod
    def _unpack(cls, contents: FileContents, preserve_last: bool | None, normalize: bool) -> Self:
        _, _, tensors, header, entries = contents
        if entries is not None and not header:
            fields, counts, notes = nemo.foreign_fields(entries, preserve_last)
            reports = (StageReport("import", counts, notes),)
            loaded = cls(**fields, history=(history_step("import", {}),), reports=reports)
        elif entries is not None:
            loaded = cls._repair(entries, tensors, header)
        elif normalize:
            loaded = cls._repair(nemo.read_trained(tensors), tensors, header, normalize=True)
        else:
            loaded, is_whole = unpack(cls, tensors, header)
            if not is_whole:  # training can change only the weights of a projection map
                raise InvariantError("tensors", "the tensors changed after the file was written")
        if preserve_last is None:
            return loaded
        loaded.check()
        return loaded.with_slots(preserve_last)

    @classmethod
    def _repair(
        cls, entries: nemo.PtEntries, tensors: Tensors, header: Header, normalize: bool = False
    ) -> Self:
        repaired, counts = nemo.repaired_tensors(entries, tensors)
        loaded, is_whole = unpack(cls, repaired, header)
        if not (is_whole or counts or normalize):
            counts = {"files changed by another program": 1}
        if not (counts or normalize):
            return loaded
        loaded = loaded.after("import", {"normalize": True} if normalize else {})
        return replace(loaded, reports=(StageReport("import", counts),))


def token_name(vocabulary: Vocabulary, token_id: int) -> str | None:
    """Return a token in the form for reports, or None if the map contains no tokens."""
    return None if vocabulary.table is None else vocabulary.table.name(token_id)


# Each check reads the entries only a few times, and needs at most as much memory as the entries.


def _check_shapes(m: ProjectionMap) -> None:
    num_rows, _ = m.shape
    require(len(m.student_ids) == len(m.teacher_ids) == m.nnz, "the three arrays differ in length")
    require(m.row_kind.shape == (num_rows,), f"row_kind does not have shape [{num_rows}]")
    if m.scale_slot is not None:
        require(m.scale_slot.shape == (num_rows,), f"scale_slot does not have shape [{num_rows}]")


def _check_ids(m: ProjectionMap) -> None:
    num_rows, num_columns = m.shape
    _require_in(m.student_ids, num_rows, "student_ids")
    _require_in(m.teacher_ids, num_columns, "teacher_ids")


def _check_weights(m: ProjectionMap) -> None:
    lowest, highest = m.weights.min(initial=1), m.weights.max(initial=1)  # NaN if a weight is NaN
    require(np.isfinite(lowest) and np.isfinite(highest), "some weights are not finite")
    require(lowest > 0, "some weights are not above 0")


def _check_kinds(m: ProjectionMap) -> None:
    _require_in(m.row_kind, len(RowKind), "row_kind")
    starts = row_starts(m.student_ids)
    filled = np.zeros(m.shape[0], np.bool_)
    filled[m.student_ids[starts]] = True
    require(
        (filled == (m.row_kind != RowKind.EMPTY)).all(),
        "row_kind and the entries disagree about which rows are empty",
    )
    sizes = np.diff(starts, append=m.nnz)
    if m.scale_slot is not None:
        _require_in(m.scale_slot, 2, "scale_slot")
        require(filled[m.scale_slot == 1].all(), "an empty row has a scale slot")
        is_alone = m.scale_slot[m.student_ids[starts[sizes == 1]]] == 1
        require(not is_alone.any(), "a row contains only its scale slot")
    longest = int(sizes.max(initial=0))
    require(m.top_k >= longest, f"a row has more entries than top_k={m.top_k}")


def _check_order(m: ProjectionMap) -> None:
    rising = m.student_ids[1:] >= m.student_ids[:-1]
    require(rising.all(), "student_ids are not sorted")
    wrong = out_of_order(m.edges, m.is_slot)
    if wrong.any():
        row = int(m.student_ids[np.argmax(wrong)])
        raise ValueError(f"row {row} is not sorted by descending weight, then teacher id")
    require(num_duplicates(m.edges) == 0, "a row contains a teacher id twice")


def _check_sums(m: ProjectionMap) -> None:
    if not m.nnz:
        return
    starts = row_starts(m.student_ids)
    sums = np.add.reduceat(m.weights, starts, dtype=np.float64)
    is_off = np.abs(sums - 1) > SUM_TOLERANCE
    if is_off.any():
        index = int(np.argmax(is_off))
        row = int(m.student_ids[starts[index]])
        raise ValueError(f"the weights of row {row} sum to {sums[index]:.6g}, expected 1")


ProjectionMap.INVARIANTS = {
    "shapes": (_check_shapes, "every array has the expected length"),
    "ids": (_check_ids, "within the two widths"),
    "weights": (_check_weights, "finite and above 0"),
    "row kinds": (_check_kinds, "consistent with the rows; at most top_k entries per row"),
    "order": (_check_order, "sorted, without duplicates"),
    "sums": (_check_sums, "the weights of every non-empty row sum to 1"),
}


def _require_in(values: NDArray[Any], bound: int, name: str) -> None:
    is_within = not len(values) or (int(values.min()) >= 0 and int(values.max()) < bound)
    require(is_within, f"{name} contains values outside 0..{bound - 1}")
