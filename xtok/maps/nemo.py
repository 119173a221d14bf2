"""NeMo-RL's `.pt` layout: `indices` and `likelihoods`, `[V_student, k]`, padded."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok import __version__
from xtok.config import Normalize
from xtok.errors import MAP_HINT, MapFileError, OutputError
from xtok.maps.edges import (
    SUM_TOLERANCE,
    Edges,
    map_order,
    pair_order,
    ranks,
    row_starts,
    row_sums,
    sum_duplicates,
)
from xtok.maps.packing import MALFORMED, pack_metadata, pack_tensors, require, unpack
from xtok.maps.projection_map import InvariantError, ProjectionMap, RowKind, StageReport
from xtok.maps.tensorfile import check_json
from xtok.maps.torchfile import load_pt
from xtok.vocab.table import MAX_WIDTH, Vocabulary

if TYPE_CHECKING:
    import torch


def to_nemo(projection: ProjectionMap) -> bytes:
    """Return the bytes of a `.pt` file in NeMo-RL's layout.

    `indices` int64 and `likelihoods` float32 are `[V_student, k]`, k = max(2, top_k), padded with
    -1 and 0; a scale slot is in the last column. Two fillers, ids of weight 0, say what the layout
    cannot: a single entry that is no exact match has one in its second column, and an empty last
    row has one, so that its reader sizes the matrix right.
    """
    import torch

    s, t, w = projection.edges
    num_rows, k = projection.shape[0], max(2, projection.top_k)
    if num_rows * k > _MAX_CELLS:
        raise OutputError(
            f"a .pt of {num_rows} rows of {k} columns would take {num_rows * k >> 30} times 12 GiB",
            hint="cut the map first with xtok sort-cut, or write .safetensors",
        )
    column = np.where(projection.is_slot, k - 1, ranks(s))
    indices = np.full((num_rows, k), -1, np.int64)
    likelihoods = np.zeros((num_rows, k), np.float32)
    indices[s, column], likelihoods[s, column] = t, w
    single = (indices[:, 0] >= 0) & (indices[:, 1:] < 0).all(axis=1)
    not_exact = single & ~np.isin(projection.row_kind, [RowKind.EXACT, RowKind.ROLE])
    indices[not_exact, 1] = np.where(indices[not_exact, 0] == 0, min(1, projection.shape[1] - 1), 0)
    if indices[-1].max() < 0:
        indices[-1, 0] = 0
    own, metadata = pack_tensors(projection), pack_metadata(projection)
    check_json(metadata)
    for name in ("student_ids", "teacher_ids", "weights"):
        del own[name]
    buffer = io.BytesIO()  # torch.save writes a file's name into it
    torch.save(
        {
            "indices": torch.from_numpy(indices),
            "likelihoods": torch.from_numpy(likelihoods),
            "student_model_id": projection.student.model_id,
            "teacher_model_id": projection.teacher.model_id,
            "enable_scale_trick": projection.enable_scale_trick,
            "xtok": {
                "tensors": {name: _to_torch(tensor) for name, tensor in own.items()},
                "metadata": metadata,
            },
        },
        buffer,
    )
    return buffer.getvalue()


def _to_torch(array: NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())


_MAX_CELLS = 2**30

_ROUNDING = 1e-6
"""How far the sum of a row of float32 weights may be off by rounding alone (2^-24 per weight)."""

_BLOCK = 1 << 16
"""Entries of a file that are put in order at once, so that memory holds little beside the map."""

_MAX_ROW = 1 << 20
"""Entries of the longest row that is read; no vocabulary has so many tokens."""


@dataclass(frozen=True)
class _Entries:
    """The entries of a file, and what it says of them.

    Attributes:
        edges: in arrays of their own, sorted by student id; ids int32, weights float32 or float64.
        is_last: bool `[nnz]`, the entries that are slots if their row has one.
        has_order: whether the entries of a row are in an order, as in a padded layout.
        num_rows: the height of the matrix, or None if the file does not say it.
        num_columns: its width, likewise.
        top_k: the number of columns of a padded layout, else the longest row.
        says: the names of the models, and whether there are slots.
        without_id: how many weights have no teacher id.
    """

    edges: Edges
    is_last: NDArray[np.bool_]
    has_order: bool
    num_rows: int | None
    num_columns: int | None
    top_k: int
    says: Mapping[str, Any]
    without_id: int = 0


def from_nemo(
    path: Path,
    source: Path,
    preserve_last: bool | None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    """Read a `.pt` map: one that xtok wrote, without loss, or any that NeMo-RL's tools write.

    It takes the memory of the file, and of the map.

    Args:
        path: where its bytes are.
        source: what messages call it.
        preserve_last: whether the last column holds scale slots, where the file does not say.
        normalize: how rows of learned weights are made to sum to 1; by their sum if None.

    Raises:
        MapFileError: if it would run code, or is damaged or something else.
    """
    try:
        size = path.stat().st_size
        loaded = load_pt(path, source)
        entries = _read_entries(loaded, size)
        if isinstance(own := entries.says.get("xtok"), dict):
            check_json(own["metadata"])
            named = own["tensors"].items()  # copied: the map outlives the file
            tensors = {name: _strided(t, size).numpy().copy() for name, t in named}
            return _from_own(entries, tensors, own["metadata"], normalize)
        projection = _from_foreign(entries, preserve_last, normalize)
        del loaded, entries, own  # what is left of the file, before the check needs memory
        projection.check()
        return projection
    except (*MALFORMED, RuntimeError) as error:
        raise not_a_map(f"{source} is not a projection map: {error}", error) from error


def not_a_map(message: str, error: Exception) -> MapFileError:
    """Return the error of a damaged file; one whose weights were trained can be read."""
    trained = isinstance(error, InvariantError) and error.invariant in _CHANGED_BY_TRAINING
    return MapFileError(
        message,
        hint="if its weights were trained, convert the map once with {option}"
        if trained
        else MAP_HINT,
        parameter="normalize" if trained else "",
    )


_CHANGED_BY_TRAINING = ("weights", "order", "sums")
"""Invariants that training breaks and `normalize` restores."""


def from_padded(
    tensors: Mapping[str, NDArray[Any]],
    says: Mapping[str, str],
    preserve_last: bool | None,
    normalize: Normalize | None,
) -> ProjectionMap:
    """Read `indices` and `likelihoods` out of a safetensors file, with its metadata.

    Raises:
        ValueError: if it is damaged.
    """
    scale_trick = says.get("enable_scale_trick", "").lower() == "true"
    told = {**says, "enable_scale_trick": scale_trick}
    entries = _padded(tensors["indices"], tensors["likelihoods"], told)
    projection = _from_foreign(entries, preserve_last, normalize)
    projection.check()
    return projection


def from_trained(
    tensors: Mapping[str, NDArray[Any]], metadata: str, normalize: Normalize
) -> ProjectionMap:
    """Read the tensors of a map by xtok whose weights were trained since.

    Raises:
        ValueError: if they are not a map for another reason than the sums and order of its rows;
            damaged JSON may raise any of `MALFORMED`.
    """
    edges = Edges(*(tensors[name] for name in ("student_ids", "teacher_ids", "weights")))
    s = edges.student_ids
    require(s.ndim == 1 and all(a.shape == s.shape for a in edges), "the shape of the entries")
    require((s[1:] >= s[:-1]).all(), "the order of student_ids")
    ends_row = np.append(s[1:] != s[:-1], True)[: len(s)]
    entries = replace(_coo(edges), is_last=ends_row, has_order=True)
    return _from_own(entries, tensors, metadata, normalize)


# Every layout as `_Entries`


def _strided(tensor: Any, size: int) -> torch.Tensor:
    """Return a dense tensor without its gradient; `ValueError` if it is more than its file."""
    import torch

    require(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided, "a tensor")
    require(tensor.device.type == "cpu" and not tensor.is_complex(), "the type of a tensor")
    if tensor.nbytes > size:
        raise ValueError(f"it holds {size} bytes, and claims a tensor of {tensor.nbytes}")
    plain: torch.Tensor = tensor.detach()
    return plain.float() if plain.dtype == torch.bfloat16 else plain


def _read_entries(loaded: Any, size: int) -> _Entries:
    """Read any of the layouts that NeMo-RL's tools write, from a file of `size` bytes.

    Raises:
        ValueError: if it is anything else.
    """
    import torch

    if isinstance(loaded, dict) and {"indices", "likelihoods"} <= loaded.keys():
        indices, likelihoods = (_strided(loaded[n], size) for n in ("indices", "likelihoods"))
        return _padded(indices.numpy(), likelihoods.numpy(), loaded)
    if isinstance(loaded, torch.Tensor) and loaded.ndim == 2:
        num_rows, num_columns = loaded.shape
        if loaded.layout == torch.strided:
            matrix = _strided(loaded, size).numpy()
            entries = _coo(_cells(matrix != 0, np.arange(num_columns, dtype=np.int32), matrix))
        else:
            sparse = loaded.detach()
            sparse = sparse if sparse.layout == torch.sparse_coo else sparse.to_sparse()
            ids, values = _strided(sparse._indices(), size), _strided(sparse._values(), size)
            require(ids.shape == (2, len(values)) and values.ndim == 1, "the shape of the matrix")
            s, t = ids.numpy()
            entries = _coo(Edges(s, t, values.numpy()))
        return replace(entries, num_rows=num_rows, num_columns=num_columns)
    if isinstance(loaded, dict) and loaded:
        return _coo(_counted(loaded))
    raise ValueError("it has neither indices and likelihoods, nor counts of pairs, nor a matrix")


def _counted(counts: Mapping[Any, Any]) -> Edges:
    """Return what `{(student_id, teacher_id): count}` holds; `ValueError` if it is something else.

    Ids are int64, counts float64.
    """
    pairs = all(
        type(pair) is tuple and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int
        for pair in counts
    )
    require(pairs and {int, float}.issuperset(map(type, counts.values())), "a dict of other things")
    n = len(counts)
    s, t = (np.fromiter((pair[side] for pair in counts), np.int64, n) for side in (0, 1))
    return Edges(s, t, np.fromiter(counts.values(), np.float64, n))


def _cells(mask: NDArray[np.bool_], ids: NDArray[Any], weights: NDArray[Any]) -> Edges:
    """Return the cells of a matrix that a mask chooses; teacher ids are broadcast to its shape."""
    rows = np.arange(mask.shape[0], dtype=np.int32)[:, None]
    s, t = (np.broadcast_to(array, mask.shape)[mask] for array in (rows, ids))
    return Edges(s, t, weights[mask])


def _padded(indices: NDArray[Any], likelihoods: NDArray[Any], says: Mapping[str, Any]) -> _Entries:
    """Take `indices`, padded with -1, and `likelihoods`, both `[num_rows, top_k]`."""
    require(indices.ndim == 2 and indices.shape == likelihoods.shape, "the shape of indices")
    require(indices.dtype.kind == "i", "the type of indices")
    num_rows, top_k = indices.shape
    least = int(indices.min(initial=0))
    require(least >= -1, f"the teacher id {least} (padding is -1)")
    mask = indices >= 0
    padding = likelihoods[~mask]
    require(not np.isnan(padding).any(), "a weight that is no number")
    in_last_column = np.broadcast_to(np.arange(top_k) == top_k - 1, mask.shape)[mask]
    return replace(
        _coo(_cells(mask, indices, likelihoods)),
        is_last=in_last_column,
        has_order=True,
        num_rows=num_rows,
        top_k=top_k,
        says=says,
        without_id=int(np.count_nonzero(padding)),
    )


def _coo(edges: Edges) -> _Entries:
    """Take entries in any order; those of a row stay in theirs."""
    for side, ids in zip(("student", "teacher"), edges[:2], strict=True):
        lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
        require(lowest >= 0, f"the {side} id {lowest}")
        require(highest < MAX_WIDTH, f"the {side} id {highest}")
    s, t = (np.array(ids, np.int32) for ids in edges[:2])
    w = np.array(edges.weights, np.result_type(edges.weights, np.float32))
    if (s[1:] < s[:-1]).any():
        order = np.argsort(s, kind="stable")
        s, t, w = s[order], t[order], w[order]
    starts = row_starts(s)
    sizes = np.diff(starts, append=len(s))
    longest = int(sizes.max(initial=0))
    if longest > _MAX_ROW:
        raise ValueError(f"row {s[starts[sizes.argmax()]]} has {longest} entries")
    is_last = np.zeros(len(s), np.bool_)
    return _Entries(Edges(s, t, w), is_last, False, None, None, longest, {})


# Entries as a map


def _from_own(
    entries: _Entries,
    tensors: Mapping[str, NDArray[Any]],
    metadata: str,
    normalize: Normalize | None,
) -> ProjectionMap:
    """Read back a map that xtok wrote; what was edited since is put in order and reported."""
    kind = tensors["row_kind"]
    slot = tensors.get("scale_slot", np.zeros(len(kind), np.uint8))
    s = entries.edges.student_ids
    entries = replace(entries, is_last=entries.is_last & (slot[s] == 1))
    if normalize == "softmax":  # fillers of rows without entries have no logit
        real = kind[s] != RowKind.EMPTY
        entries = replace(entries, edges=entries.edges.take(real), is_last=entries.is_last[real])
    counts, notes = _softmax_report(entries.edges) if normalize == "softmax" else ({}, ())
    edges, _, more = _in_order(entries, softmax=normalize == "softmax")
    # Fillers have weight 0 and are not worth a count.
    counts |= {name: n for name, n in more.items() if name != "zero weights dropped"}
    projection = unpack({**tensors, **edges._asdict()}, metadata)
    if normalize or counts:
        projection = _imported(projection, counts, normalize, notes)
    return projection


def _from_foreign(
    entries: _Entries, preserve_last: bool | None, normalize: Normalize | None
) -> ProjectionMap:
    """Make a map of what other programs wrote, whose invariants are not yet checked."""
    student, teacher = _vocabularies(entries)
    scale_trick = bool(entries.says.get("enable_scale_trick") or preserve_last)
    softmax = normalize == "softmax"
    s, _, w = entries.edges
    starts = row_starts(s)
    is_exact = (np.diff(starts, append=len(s)) == 1) & (w[starts] == 1) & (not softmax)
    exact_rows = s[starts[is_exact]]
    is_last = entries.is_last & scale_trick
    is_last[starts[is_exact]] = False
    counts, notes = _softmax_report(entries.edges) if softmax else ({}, ())
    edges, slotted, more = _in_order(replace(entries, is_last=is_last), softmax=softmax)
    counts |= more
    if entries.without_id:
        counts["weights without a teacher id dropped"] = entries.without_id
    kind, scale_slot = np.zeros((2, student.vocab_size), np.uint8)
    kind[edges.student_ids] = RowKind.MIXED
    kind[exact_rows] = RowKind.EXACT
    scale_slot[slotted] = 1
    top_k = entries.top_k
    if not entries.has_order:
        starts = row_starts(edges.student_ids)
        top_k = int(np.diff(starts, append=len(edges.weights)).max(initial=0))
    projection = ProjectionMap(
        student=student,
        teacher=teacher,
        student_ids=edges.student_ids,
        teacher_ids=edges.teacher_ids,
        weights=edges.weights,
        row_kind=kind,
        scale_slot=scale_slot if scale_trick else None,
        method="imported",
        top_k=top_k,
    )
    return _imported(projection, counts, normalize, notes)


def _vocabularies(entries: _Entries) -> Iterator[Vocabulary]:
    """Give both sides, as far as a file tells: a width that it does not is at least its ids."""
    for side, old, told, ids in zip(
        ("student", "teacher"),
        ("model_A", "model_B"),
        (entries.num_rows, entries.num_columns),
        entries.edges[:2],
        strict=True,
    ):
        highest = int(ids.max(initial=0))
        size = highest + 1 if told is None else told
        require(highest < size, f"the {side} id {highest} of {size}")
        require(0 < size <= MAX_WIDTH, f"the {side}'s vocabulary size {size}")
        model_id = str(entries.says.get(f"{side}_model_id") or entries.says.get(f"{old}_id") or "")
        model_id.encode()  # no lone surrogates
        yield Vocabulary(
            model_id=model_id or "unknown",
            revision=None,
            backend=None,
            vocab_size=size,
            width_source="ids" if told is None else "map",
            tokenizer_vocab_size=None,
            table=None,
        )


def _imported(
    projection: ProjectionMap,
    counts: Mapping[str, int],
    normalize: Normalize | None,
    notes: tuple[str, ...],
) -> ProjectionMap:
    options = {"normalize": normalize} if normalize else {}
    step = {"stage": "import", "options": options, "xtok_version": __version__}
    return replace(
        projection,
        history=(*projection.history, step),
        reports=(StageReport("import", counts, notes),),
    )


def _softmax_report(edges: Edges) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return how many rows a softmax replaces, and a note if their weights are no logits."""
    starts = row_starts(edges.student_ids)
    if not len(starts):
        return {}, ()
    sums = np.add.reduceat(edges.weights, starts, dtype=np.float64)
    notes: tuple[str, ...] = ()
    if (np.abs(sums - 1) <= SUM_TOLERANCE).all():
        notes = ("every row summed to 1 before the softmax: these were weights, not logits",)
    return {"rows replaced by their softmax": len(starts)}, notes


def _softmax(edges: Edges) -> Edges:
    """Return the edges with the softmax of each row's weights."""
    require(np.isfinite(edges.weights).all(), "a weight that is not finite")
    largest = np.full(int(edges.student_ids.max(initial=0)) + 1, -np.inf)
    np.maximum.at(largest, edges.student_ids, edges.weights)
    weights = np.exp(edges.weights - largest[edges.student_ids])
    return edges._replace(weights=weights).normalized()


def _in_order(
    entries: _Entries, *, softmax: bool
) -> tuple[Edges, NDArray[np.int32], dict[str, int]]:
    """Put the entries of a file in a map's order, block by block, in the same arrays.

    Returns:
        the edges with a map's dtypes and order, the rows whose last entry is a slot, and how many
        of what had to be changed.
    """
    s, t, w = entries.edges
    bounds = np.append(row_starts(s), len(s))
    slotted = [np.zeros(0, np.int32)]
    counts: Counter[str] = Counter()
    n = start = 0
    while start < len(s):
        after, past = np.searchsorted(bounds, [start, start + _BLOCK], "right")
        end = bounds[max(after, past - 1)]  # whole rows, one at least
        here = slice(start, end)
        rows, place = np.unique(s[here], return_inverse=True)
        block = Edges(place, t[here].astype(np.int64), w[here].astype(np.float64))
        if softmax:
            block = _softmax(block)
        if not entries.has_order:
            block = block.take(map_order(block))
        edges, is_last, more = _rows_in_order(block, entries.is_last[here])
        # There are at most as many edges as before, so this overwrites nothing that is to come.
        out = slice(n, n := n + len(edges.weights))
        s[out], t[out], w[out] = rows[edges.student_ids], edges.teacher_ids, edges.weights
        slotted.append(rows[edges.student_ids[is_last]])
        counts.update(more)
        start = end
    weights = w[:n].astype(np.float32, copy=False)
    return Edges(s[:n], t[:n], weights), np.concatenate(slotted), dict(+counts)


def _rows_in_order(
    edges: Edges, last: NDArray[np.bool_]
) -> tuple[Edges, NDArray[np.bool_], dict[str, int]]:
    """Add up duplicates, drop zero weights, normalize and sort; count what had to be done.

    Rows that are in order keep their bits.

    Args:
        edges: whole rows; student ids int64 from 0, weights float64.
        last: which of them are slots.

    Returns:
        the edges, with float32 weights, which of them are slots, and the counts.
    """
    valid = np.isfinite(edges.weights) & (edges.weights >= 0)
    if not valid.all():
        raise InvariantError("weights", "a weight is negative or not finite")
    keep = edges.weights > 0
    edges, last = edges.take(keep), last[keep]
    moved = map_order(edges, last) != np.arange(len(last))
    order, starts = pair_order(edges)
    summed = sum_duplicates(edges)
    per_pair = np.diff(starts, append=len(order))
    is_last = np.logical_or.reduceat(last[order], starts) if len(starts) else last
    off = np.abs(row_sums(summed) - 1) > _ROUNDING
    weights = np.where(off, summed.normalized().weights, summed.weights).astype(np.float32)
    seen = weights > 0  # in float32
    counts = {
        "zero weights dropped": int((~keep).sum()) + int((~seen).sum()),
        "rows reordered": len(np.unique(edges.student_ids[moved])),
        "slots added to an entry of the same id": int((is_last & (per_pair > 1)).sum()),
        "duplicate entries added up": len(order) - len(starts),
        "rows normalized": len(np.unique(summed.student_ids[off])),
    }
    result, is_last = summed._replace(weights=weights).take(seen), is_last[seen]
    is_last &= np.bincount(result.student_ids, minlength=1)[result.student_ids] > 1
    order = map_order(result, is_last)
    return result.take(order), is_last[order], counts
