"""NeMo-RL's `.pt` layout: `indices` and `likelihoods`, `[V_student, k]`, padded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.errors import OutputError
from xtok.maps.edges import SUM_TOLERANCE, Edges, ranks, repaired, row_starts, slot_entries
from xtok.maps.opening import Tensors, own_tensors, strided, torch_bytes
from xtok.maps.records import InvariantError, RowKind, require_valid
from xtok.tokenizers.display import listed
from xtok.tokenizers.table import MAX_WIDTH, SIDES, Vocabulary

if TYPE_CHECKING:
    import torch


_MAX_CELLS = 2**30

# 1 - 2⁻²⁴, written instead of 1 if the two tokens are not an exact pair
_BELOW_1 = np.nextafter(np.float32(1), np.float32(0))

# Name of the tensor under `xtok` that lists the rows with a lowered first weight, int64
_LOWERED = "lowered_rows"


# Writing


def pt_bytes(
    tensors: Tensors, metadata: str, student: Vocabulary, teacher: Vocabulary, top_k: int
) -> bytes:
    """Return the bytes of a `.pt` file in NeMo-RL's layout.

    `indices` (int64) and `likelihoods` (float32) are `[V_student, k]` with k = max(2, top_k),
    padded with -1 and 0. Scale slots are in the last column. If a map has slots, and any row
    without a slot has k entries, the tables get one more column.

    NeMo-RL treats every weight of 1 as an exact pair. In rows that are not exact, a weight of 1 is
    therefore lowered to 1 - 2⁻²⁴; `lowered_rows` lists these rows. NeMo-RL infers the number of
    rows from the last row with an id, so an empty last row gets an id with weight 0. If a map was
    counted without exact rows (for P-KL), the file contains no exact pairs. NeMo-RL's draft 4177
    rejects such a file, because training with the file would use only special tokens.

    The key `xtok` contains the map's other arrays and its JSON text.
    """
    import torch

    s, t, w = (tensors[name] for name in Edges._fields)
    kinds, slot = tensors["row_kind"], tensors.get("scale_slot")
    num_rows, k = student.vocab_size, max(2, top_k)
    if num_rows * k > _MAX_CELLS:
        raise OutputError(
            f"a .pt of {num_rows} rows and {k} columns would take {12 * num_rows * k >> 30} GiB",
            hint="cut the map first with xtok sort-cut, or write .safetensors",
        )
    is_slot, column = slot_entries(s, slot), ranks(s)
    # NeMo-RL reads the last column as slots, so other entries must not use this column.
    k += int(is_slot.any() and (column[~is_slot] == k - 1).any())
    column[is_slot] = k - 1
    indices = np.full((num_rows, k), -1, np.int64)
    likelihoods = np.zeros((num_rows, k), np.float32)
    indices[s, column], likelihoods[s, column] = t, w
    pairs = [RowKind.EXACT, RowKind.ROLE]
    if RowKind.COUNTED in kinds and RowKind.EXACT not in kinds:
        pairs = []
    lowered = np.flatnonzero((likelihoods[:, 0] == 1) & ~np.isin(kinds, pairs))
    likelihoods[lowered, 0] = _BELOW_1
    if indices[-1].max() < 0:
        indices[-1, 0] = 0
    kept = {
        name: torch.from_numpy(tensor if tensor.flags.writeable else tensor.copy())
        for name, tensor in {**tensors, _LOWERED: lowered}.items()
        if name not in Edges._fields
    }
    return torch_bytes({
        "indices": torch.from_numpy(indices),
        "likelihoods": torch.from_numpy(likelihoods),
        "student_model_id": student.model_id,
        "teacher_model_id": teacher.model_id,
        "enable_scale_trick": bool(is_slot.any()),
        "xtok": {"tensors": kept, "metadata": metadata},
    })  # fmt: skip


# Reading: convert every layout to `PtEntries`, then sort the entries


class PtEntries(NamedTuple):
    """Entries and metadata of a file in any layout."""

    edges: Edges  # copies, sorted by student id; ids int32, weights floating-point
    is_last: NDArray[np.bool_]  # [nnz], True in the last column, where slots are
    top_k: int | None = None  # number of columns in a padded layout
    has_order: bool = False  # whether the layout defines the order of a row's entries
    shape: tuple[int | None, int | None] = (None, None)  # None if the file does not contain it
    stated: Mapping[str, Any] = MappingProxyType({})  # names of the models, and whether slots exist
    without_id: int = 0  # number of weights without a teacher id
    own: tuple[Tensors, str] | None = None  # tensors and JSON text that xtok wrote


def read_pt(loaded: Any, size: int) -> PtEntries:
    """Read the contents of a `.pt` (`size` bytes) that xtok or NeMo-RL's tools wrote."""
    entries = _read_entries(loaded, size)
    own = entries.stated.get("xtok")
    return entries._replace(own=own_tensors(own, size)) if isinstance(own, dict) else entries


def read_trained(tensors: Tensors) -> PtEntries:
    """Read the tensors of an xtok map with trained weights."""
    edges = Edges(*(tensors[name] for name in Edges._fields))
    s = edges.student_ids
    require_valid(
        s.ndim == 1 and all(a.shape == s.shape for a in edges), "the shape of the entries"
    )
    require_valid((s[1:] >= s[:-1]).all(), "the order of student_ids")
    ends_row = np.append(s[1:] != s[:-1], True)[: len(s)]
    return _entries_by_row(edges)._replace(is_last=ends_row, has_order=True)


def _read_entries(loaded: Any, size: int) -> PtEntries:
    import torch

    if isinstance(loaded, dict) and {"indices", "likelihoods"} & loaded.keys():
        indices, likelihoods = (strided(loaded[n], size) for n in ("indices", "likelihoods"))
        return read_padded(indices.numpy(), likelihoods.numpy(), loaded)
    if isinstance(loaded, torch.Tensor) and loaded.ndim == 2:
        if loaded.layout == torch.strided:
            matrix = strided(loaded, size).numpy()
            s, t = np.nonzero(matrix)
            entries = _entries_by_row(Edges(s, t, matrix[s, t]))
        else:
            entries = _entries_by_row(_read_sparse(loaded.detach(), size))
        return entries._replace(shape=(loaded.shape[0], loaded.shape[1]))
    if isinstance(loaded, dict) and any(type(key) is tuple for key in loaded):
        return _entries_by_row(_count_edges(loaded))
    contents = type(loaded).__name__
    if isinstance(loaded, dict):
        contents = f"a dict with the keys {listed(map(repr, loaded), 5) or '(none)'}"
    raise ValueError(
        f"the file contains {contents}, expected indices and likelihoods, pair counts, or a matrix"
    )


def _read_sparse(matrix: torch.Tensor, size: int) -> Edges:
    import torch

    is_coo = matrix.layout == torch.sparse_coo
    require_valid(is_coo or matrix.layout == torch.sparse_csr, f"the layout {matrix.layout}")
    names = ("_indices", "_values") if is_coo else ("crow_indices", "col_indices", "values")
    parts = [strided(getattr(matrix, name)(), size) for name in names]
    build: Any = torch.sparse_coo_tensor if is_coo else torch.sparse_csr_tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse C|Validating sparse", UserWarning)
        checked = build(*parts, matrix.shape, check_invariants=True).to_sparse()
    ids, values = checked._indices(), checked._values()
    require_valid(ids.shape == (2, len(values)) and values.ndim == 1, "the shape of the matrix")
    s, t = ids.numpy()
    return Edges(s, t, values.numpy())


def _count_edges(counts: Mapping[Any, Any]) -> Edges:
    are_pairs = all(type(k) is tuple and [*map(type, k)] == [int, int] for k in counts)
    are_numbers = {int, float}.issuperset(map(type, counts.values()))
    require_valid(are_pairs and are_numbers, "a key or value of the dict")
    n = len(counts)
    s, t = (np.fromiter((pair[i] for pair in counts), np.int64, n) for i in (0, 1))
    return Edges(s, t, np.fromiter(counts.values(), np.float64, n))


def read_padded(
    indices: NDArray[Any], likelihoods: NDArray[Any], stated: Mapping[str, Any]
) -> PtEntries:
    """Read `indices`, padded with -1, and `likelihoods`, both `[num_rows, top_k]`.

    `stated` contains the values of all other keys in the file.
    """
    require_valid(indices.ndim == 2 and indices.shape == likelihoods.shape, "the shape of indices")
    require_valid(indices.dtype.kind == "i", "the type of indices")
    num_rows, top_k = indices.shape
    least = int(indices.min(initial=0))
    require_valid(least >= -1, f"the teacher id {least} (padding is -1)")
    is_entry = indices >= 0
    padding = likelihoods[~is_entry]
    require_valid(not np.isnan(padding).any(), "a NaN weight")
    s, column = np.nonzero(is_entry)
    return _entries_by_row(Edges(s, indices[s, column], likelihoods[s, column]))._replace(
        is_last=column == top_k - 1,
        top_k=top_k,
        has_order=True,
        shape=(num_rows, None),
        stated=stated,
        without_id=int(np.count_nonzero(padding)),
    )


def _entries_by_row(edges: Edges) -> PtEntries:
    for side, ids in zip(SIDES, edges[:2], strict=True):
        lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
        require_valid(lowest >= 0, f"the {side} id {lowest}")
        require_valid(highest < MAX_WIDTH, f"the {side} id {highest}")
    s, t = (np.array(ids, np.int32) for ids in edges[:2])
    w = np.array(edges.weights, np.result_type(edges.weights, np.float32))
    if not (np.isfinite(edges.weights) & (edges.weights >= 0)).all():
        raise InvariantError("weights", "a weight is negative or not finite")
    if (s[1:] < s[:-1]).any():
        order = np.argsort(s, kind="stable")
        s, t, w = s[order], t[order], w[order]
    return PtEntries(Edges(s, t, w), np.zeros(len(s), np.bool_))


def repaired_tensors(
    entries: PtEntries, tensors: Tensors
) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    """Repair an xtok map that another program edited, and count the changes.

    NeMo-RL's tools edit the rows, but copy unknown keys. The row kinds and slots in the file may
    therefore be out of date.
    """
    s, _, w = entries.edges
    lowered = tensors.get(_LOWERED)
    # Earlier versions wrote no list, and lowered only rows with a single entry.
    was_1 = np.bincount(s, minlength=1)[s] == 1 if lowered is None else np.isin(s, lowered)
    weights = np.where(was_1 & (w == _BELOW_1), 1, w)
    entries = entries._replace(edges=entries.edges._replace(weights=weights))
    kind = tensors["row_kind"].copy()
    slot = tensors.get("scale_slot", np.zeros(len(kind), np.uint8))
    is_last = entries.is_last & (slot[entries.edges.student_ids] == 1)
    edges, slotted, counts = repaired(entries.edges, is_last, entries.has_order, SUM_TOLERANCE)
    counts.pop("zero weights dropped", None)  # xtok wrote the zeros as padding
    has_entries = np.zeros(len(kind), np.bool_)
    has_entries[edges.student_ids] = True
    kind[~has_entries] = RowKind.EMPTY
    kind[has_entries & (kind == RowKind.EMPTY)] = RowKind.MIXED
    changed = {**tensors, **edges._asdict(), "row_kind": kind}
    if "scale_slot" in tensors:
        changed["scale_slot"] = np.zeros(len(kind), np.uint8)
        changed["scale_slot"][slotted] = 1
    return changed, counts


def foreign_fields(
    entries: PtEntries, preserve_last: bool | None
) -> tuple[dict[str, Any], dict[str, float], tuple[str, ...]]:
    """Return the fields of another program's map, the counts of repairs, and notes."""
    student, teacher = sides = [_side(index, entries) for index in (0, 1)]
    scale_trick = bool(entries.stated.get("enable_scale_trick") or preserve_last)
    s, _, w = entries.edges
    starts = row_starts(s)
    # Exact rows must be found before the repair. In NeMo-RL's format, an entry of weight 0 marks a
    # row that is not exact. The repair drops such entries, and normalizes single entries to 1.
    is_single = np.diff(starts, append=len(s)) == 1
    exact = starts[is_single & (w[starts] == 1)]
    exact_rows = s[exact]
    is_last = entries.is_last & scale_trick
    is_last[exact] = False  # the only entry of an exact row is the match, not a slot
    edges, slotted, counts = repaired(entries.edges, is_last, entries.has_order)
    if entries.without_id:
        counts["weights without a teacher id dropped"] = entries.without_id
    kind, scale_slot = np.zeros((2, student.vocab_size), np.uint8)
    kind[edges.student_ids] = RowKind.MIXED
    kind[exact_rows] = RowKind.EXACT
    scale_slot[slotted] = 1
    longest = int(np.bincount(edges.student_ids, minlength=1).max())
    fields = {
        "student": student,
        "teacher": teacher,
        **edges._asdict(),
        "row_kind": kind,
        "scale_slot": scale_slot if scale_trick else None,
        "method": "imported",
        "top_k": longest if entries.top_k is None else entries.top_k,
    }
    unknown = tuple(
        f"the file does not record the width of the {side}; the largest id + 1 is used, which is "
        f"{vocabulary.vocab_size:,}"
        for side, vocabulary in zip(SIDES, sides, strict=True)
        if vocabulary.width_source == "ids"
    )
    return fields, counts, unknown


def _side(index: int, entries: PtEntries) -> Vocabulary:
    side, old = (("student", "model_A"), ("teacher", "model_B"))[index]
    width, highest = entries.shape[index], int(entries.edges[index].max(initial=0))
    size = highest + 1 if width is None else width
    require_valid(highest < size, f"the {side} id {highest} (width {size})")
    require_valid(0 < size <= MAX_WIDTH, f"the {side}'s vocabulary size {size}")
    stated = entries.stated
    model_id = str(stated.get(f"{side}_model_id") or stated.get(f"{old}_id") or "unknown")
    model_id.encode()  # rejects unpaired surrogates
    source = "ids" if width is None else "map"
    return Vocabulary(model_id=model_id, vocab_size=size, width_source=source)
