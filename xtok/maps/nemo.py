"""NeMo-RL's `.pt` layout: `indices` and `likelihoods`, `[V_student, k]`, padded."""

from __future__ import annotations

import io
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from xtok.maps.projection_map import ProjectionMap, RowKind, StageReport
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
    unpinned = single & ~np.isin(projection.row_kind, [RowKind.EXACT, RowKind.ROLE])
    indices[unpinned, 1] = np.where(indices[unpinned, 0] == 0, min(1, projection.shape[1] - 1), 0)
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


class _Block(NamedTuple):
    """Whole rows of a file, as they stand in it; student ids count the block's rows, from 0."""

    rows: NDArray[np.integer[Any]]
    edges: Edges
    columns: NDArray[np.int64]


_BLOCK = 1 << 16
"""Entries of a file that are put in order at once: what this takes does not grow with the file."""

_MAX_ROW = 1 << 20
"""Entries of the longest row that is read; no vocabulary has so many tokens."""


@dataclass(frozen=True)
class _Entries:
    """The entries of a file as they stand in it, and what it says of them.

    Attributes:
        blocks: gives all rows that have entries, in order.
        nnz: how many entries there are at most.
        num_rows: the height of the matrix, or None if the file does not tell it.
        num_columns: its width, likewise.
        top_k: the number of columns of a padded layout, the last of which slots are in.
        least_ids: the lowest student and teacher id.
        most_ids: the highest ones.
        says: the names of the models, and whether there are slots.
        without_id: how many weights have no teacher id.
    """

    blocks: Callable[[], Iterator[_Block]]
    nnz: int
    num_rows: int | None
    num_columns: int | None
    top_k: int | None
    least_ids: tuple[int, int]
    most_ids: tuple[int, int]
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
        entries = _read_entries(load_pt(path, source), size)
        if isinstance(own := entries.says.get("xtok"), dict):
            check_json(own["metadata"])
            named = own["tensors"].items()  # copied: the map outlives the file
            tensors = {name: _strided(t, size).numpy().copy() for name, t in named}
            return _from_own(entries, tensors, own["metadata"], normalize)
        projection = _from_foreign(entries, preserve_last, normalize)
        del entries, own  # what is left of the file, before the check needs memory
        projection.check()
        return projection
    except (*MALFORMED, RuntimeError) as error:
        raise MapFileError(f"{source} is not a projection map: {error}", hint=MAP_HINT) from error


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
    told: dict[str, Any] = dict(says)
    if "enable_scale_trick" in told:
        told["enable_scale_trick"] = told["enable_scale_trick"].lower() == "true"
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
    s = tensors["student_ids"]
    edges = Edges(s, tensors["teacher_ids"], tensors["weights"])
    require(s.ndim == 1 and all(a.shape == s.shape for a in edges), "the shape of the entries")
    require((s[1:] >= s[:-1]).all(), "the order of student_ids")
    top_k = int(json.loads(metadata)["top_k"])
    slot = tensors.get("scale_slot")

    def blocks() -> Iterator[_Block]:
        for block in _blocks(edges):
            if slot is not None:
                ends = np.searchsorted(block.edges.student_ids, np.arange(len(block.rows)), "right")
                block.columns[ends[slot[block.rows] == 1] - 1] = top_k - 1
            yield block

    entries = _Entries(blocks, len(s), None, None, top_k, *_extremes(edges), {})
    return _from_own(entries, tensors, metadata, normalize)


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
        if loaded.layout == torch.strided:
            return _dense(_strided(loaded, size).numpy())
        sparse = loaded.detach()
        sparse = sparse if sparse.layout == torch.sparse_coo else sparse.to_sparse()
        ids, values = _strided(sparse._indices(), size), _strided(sparse._values(), size)
        require(ids.shape == (2, len(values)) and values.ndim == 1, "the shape of the matrix")
        num_rows, num_columns = loaded.shape
        s, t = ids.numpy()
        found = _coo(Edges(s, t, values.numpy()))
        return replace(found, num_rows=num_rows, num_columns=num_columns)
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


def _extremes(edges: Edges) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the lowest and the highest ids of both sides; 0 where there are none."""
    (s, t), n = edges[:2], len(edges.weights)
    if not n:
        return (0, 0), (0, 0)
    return (int(s.min()), int(t.min())), (int(s.max()), int(t.max()))


def _coo(edges: Edges) -> _Entries:
    """Take entries in any order."""
    s, order = edges.student_ids, None
    if (s[1:] < s[:-1]).any():
        order = np.argsort(s, kind="stable")

    def blocks() -> Iterator[_Block]:
        for block in _blocks(edges, order):
            yield block._replace(edges=block.edges.take(map_order(block.edges)))

    return _Entries(blocks, len(s), None, None, None, *_extremes(edges), {})


def _blocks(edges: Edges, order: NDArray[np.int64] | None = None) -> Iterator[_Block]:
    """Give entries in blocks of whole rows; sorted by student id, or so in the order given."""
    n, end = len(edges.weights), 0

    def row_at(place: int) -> int:
        return int(edges.student_ids[place if order is None else order[place]])

    while end < n:
        start, end = end, min(end + _BLOCK, n)
        if end < n and row_at(end - 1) == row_at(end):  # back to the row's start, or to its end
            row, places = row_at(end), range(n)
            begin = bisect_left(places, row, key=row_at)
            end = begin if begin > start else bisect_right(places, row, key=row_at)
            require(end - start <= _MAX_ROW, f"row {row}, which has {end - start} entries,")
        here = slice(start, end) if order is None else order[start:end]
        s, t, w = edges.student_ids[here], edges.teacher_ids[here], edges.weights[here]
        starts = row_starts(s)
        counted = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(s)))
        weights = w.astype(np.float64)
        yield _Block(s[starts], Edges(counted, t.astype(np.int64), weights), ranks(s))


def _padded(indices: NDArray[Any], likelihoods: NDArray[Any], says: Mapping[str, Any]) -> _Entries:
    """Take `indices`, padded with -1, and `likelihoods`, both `[num_rows, top_k]`."""
    require(indices.ndim == 2 and indices.shape == likelihoods.shape, "the shape of indices")
    require(indices.dtype.kind == "i", "the type of indices")
    num_rows, top_k = indices.shape
    require(top_k <= _MAX_ROW, f"a row of {top_k} columns")
    step = max(1, _BLOCK // max(1, top_k))

    def blocks() -> Iterator[_Block]:
        for start in range(0, num_rows, step):
            ids = indices[start : start + step]
            rows, columns = np.nonzero(ids >= 0)
            weights = likelihoods[start : start + step][rows, columns].astype(np.float64)
            edges = Edges(rows, ids[rows, columns].astype(np.int64), weights)
            yield _Block(np.arange(start, start + len(ids)), edges, columns)

    least = int(indices.min(initial=0))
    require(least >= -1, f"the teacher id {least} (padding is -1)")
    without_id = 0
    for start in range(0, num_rows, step):
        here = slice(start, start + step)
        padding = likelihoods[here][indices[here] < 0]
        require(not np.isnan(padding).any(), "a weight that is no number")
        without_id += int(np.count_nonzero(padding))
    most = max(0, num_rows - 1), int(indices.max(initial=0))
    return _Entries(blocks, indices.size, num_rows, None, top_k, (0, 0), most, says, without_id)


def _dense(matrix: NDArray[Any]) -> _Entries:
    """Take a matrix `[num_rows, num_columns]` of weights."""
    num_rows, num_columns = matrix.shape
    step = max(1, _BLOCK // max(1, num_columns))

    def blocks() -> Iterator[_Block]:
        for start in range(0, num_rows, step):
            here = matrix[start : start + step]
            rows, columns = np.nonzero(here)
            edges = Edges(rows, columns, here[rows, columns].astype(np.float64))
            edges = edges.take(map_order(edges))
            yield _Block(np.arange(start, start + len(here)), edges, ranks(edges.student_ids))

    nnz = sum(int(np.count_nonzero(matrix[i : i + step])) for i in range(0, num_rows, step))
    return _Entries(blocks, nnz, num_rows, num_columns, None, (0, 0), (0, 0), {})


class _Logits:
    """The rows of a file whose weights are taken as logits."""

    def __init__(self) -> None:
        self._rows = 0
        self._sum_to_1 = True

    def softmax(self, edges: Edges) -> Edges:
        """Return the edges with the softmax of each row's weights."""
        require(np.isfinite(edges.weights).all(), "a weight that is not finite")
        self._rows += len(np.unique(edges.student_ids))
        self._sum_to_1 &= bool((np.abs(row_sums(edges) - 1) <= SUM_TOLERANCE).all())
        largest = np.full(int(edges.student_ids.max(initial=0)) + 1, -np.inf)
        np.maximum.at(largest, edges.student_ids, edges.weights)
        weights = np.exp(edges.weights - largest[edges.student_ids])
        return edges._replace(weights=weights).normalized()

    @property
    def counts(self) -> dict[str, int]:
        """How many rows were rewritten."""
        return {"rows replaced by their softmax": self._rows} if self._rows else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What deserves a look."""
        if not self._rows or not self._sum_to_1:
            return ()
        return ("every row summed to 1 before the softmax: these were weights, not logits",)


def _from_own(
    entries: _Entries,
    tensors: Mapping[str, NDArray[Any]],
    metadata: str,
    normalize: Normalize | None,
) -> ProjectionMap:
    """Read back a map that xtok wrote; what was edited since is put in order and reported."""
    kind = tensors["row_kind"]
    slot = tensors.get("scale_slot", np.zeros(len(kind), np.uint8))

    logits = _Logits()

    def blocks() -> Iterator[tuple[_Block, NDArray[np.bool_]]]:
        for block in entries.blocks():
            rows, edges, columns = block
            if normalize == "softmax":  # fillers of rows without entries have no logit
                real = kind[rows][edges.student_ids] != RowKind.EMPTY
                block = _Block(rows, logits.softmax(edges.take(real)), columns[real])
            yield block, slot[rows] == 1

    edges, _, counts = _in_order(blocks(), entries, fillers_count=False)
    projection = unpack({**tensors, **edges._asdict()}, metadata)
    if normalize or any(counts.values()):
        projection = _imported(projection, logits.counts | counts, normalize, logits.notes)
    return projection


def _from_foreign(
    entries: _Entries, preserve_last: bool | None, normalize: Normalize | None
) -> ProjectionMap:
    """Make a map of what other programs wrote, whose invariants are not yet checked."""
    student, teacher = _vocabularies(entries)
    says = entries.says
    scale_trick = bool(says.get("enable_scale_trick") or preserve_last)
    kind, scale_slot = np.zeros((2, student.vocab_size), np.uint8)
    logits = _Logits()

    def blocks() -> Iterator[tuple[_Block, NDArray[np.bool_]]]:
        for block in entries.blocks():
            rows, edges, columns = block
            per_row = np.bincount(edges.student_ids, minlength=len(rows))
            sums = np.bincount(edges.student_ids, edges.weights, len(rows))
            strict = (per_row == 1) & (sums == 1)
            slots = np.zeros(len(rows), np.bool_)
            if scale_trick and entries.top_k is not None:
                slots[edges.student_ids[columns == entries.top_k - 1]] = True
            if normalize == "softmax":
                strict[:] = False
                edges = logits.softmax(edges)
            kind[rows[edges.student_ids[edges.weights > 0]]] = RowKind.MIXED
            kind[rows[strict]] = RowKind.EXACT
            yield _Block(rows, edges, columns), slots & ~strict

    edges, slotted, counts = _in_order(blocks(), entries)
    if entries.without_id:
        counts["weights without a teacher id dropped"] = entries.without_id
    scale_slot[slotted] = 1
    top_k = entries.top_k
    if top_k is None:
        entries_per_row = np.diff(row_starts(edges.student_ids), append=len(edges.weights))
        top_k = int(entries_per_row.max(initial=0))
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
    return _imported(projection, logits.counts | counts, normalize, logits.notes)


def _vocabularies(entries: _Entries) -> Iterator[Vocabulary]:
    """Give both sides, as far as a file tells: a width that it does not is at least its ids."""
    for side, old, told, lowest, highest in zip(
        ("student", "teacher"),
        ("model_A", "model_B"),
        (entries.num_rows, entries.num_columns),
        entries.least_ids,
        entries.most_ids,
        strict=True,
    ):
        size = highest + 1 if told is None else told
        require(lowest >= 0, f"the {side} id {lowest}")
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
    counts: dict[str, int],
    normalize: Normalize | None,
    notes: tuple[str, ...] = (),
) -> ProjectionMap:
    options = {"normalize": normalize} if normalize else {}
    step = {"stage": "import", "options": options, "xtok_version": __version__}
    return replace(
        projection,
        history=(*projection.history, step),
        reports=(StageReport("import", counts, notes),),
    )


def _in_order(
    blocks: Iterable[tuple[_Block, NDArray[np.bool_]]],
    entries: _Entries,
    *,
    fillers_count: bool = True,
) -> tuple[Edges, NDArray[np.integer[Any]], dict[str, int]]:
    """Put the entries of a file in a map's order, block by block; count what had to be done.

    Args:
        blocks: the rows of `entries`, and which of each block's have a slot.
        entries: how many there are.
        fillers_count: whether entries of weight 0 are worth a count.

    Returns:
        the edges with a map's dtypes and order, the rows whose last entry is a slot, the counts.
    """
    n = 0
    s, t = np.empty((2, entries.nnz), np.int32)
    w = np.empty(entries.nnz, np.float32)
    slotted: list[NDArray[np.integer[Any]]] = [np.zeros(0, np.int64)]
    total: Counter[str] = Counter()
    for block, has_slot in blocks:
        edges, is_last, counts = _rows_in_order(block, has_slot, (entries.top_k or 0) - 1)
        here = slice(n, n := n + len(edges.weights))
        s[here], t[here], w[here] = block.rows[edges.student_ids], edges.teacher_ids, edges.weights
        slotted.append(block.rows[edges.student_ids[is_last]])
        total.update(counts)
    if not fillers_count:
        del total[_COUNTED[0]]
    found = {name: total[name] for name in _COUNTED if name in total}
    return Edges(s[:n], t[:n], w[:n]), np.concatenate(slotted), found


_COUNTED = (
    "zero weights dropped",
    "rows reordered",
    "slots added to an entry of the same id",
    "duplicate entries added up",
    "rows normalized",
)


def _rows_in_order(
    block: _Block, has_slot: NDArray[np.bool_], slot_column: int
) -> tuple[Edges, NDArray[np.bool_], dict[str, int]]:
    """Add up duplicates, drop zero weights, normalize and sort; count what had to be done.

    A row's slot is its entry in the slots' column. Rows that are in order keep their bits.

    Returns:
        the edges, with float32 weights, which of them are slots, and the counts.
    """
    edges = block.edges
    valid = np.isfinite(edges.weights) & (edges.weights >= 0)
    require(
        valid.all(),
        "a weight that is negative or not finite (logits are read with convert --normalize "
        "softmax)",
    )
    last = has_slot[edges.student_ids] & (block.columns == slot_column)
    keep = edges.weights > 0
    edges, last = edges.take(keep), last[keep]
    moved = map_order(edges, last) != np.arange(len(last))
    order, starts = pair_order(edges)
    summed = sum_duplicates(edges)
    per_pair = np.diff(starts, append=len(order))
    is_last = np.logical_or.reduceat(last[order], starts) if len(starts) else last
    counts = {
        "zero weights dropped": int((~keep).sum()),
        "rows reordered": len(np.unique(edges.student_ids[moved])),
        "duplicate entries added up": len(order) - len(starts),
    }
    if last.any():
        added = int((is_last & (per_pair > 1)).sum())
        counts["slots added to an entry of the same id"] = added
    off = np.abs(row_sums(summed) - 1) > _ROUNDING
    counts["rows normalized"] = len(np.unique(summed.student_ids[off]))
    weights = np.where(off, summed.normalized().weights, summed.weights).astype(np.float32)
    result = summed._replace(weights=weights)
    seen = weights > 0  # in float32
    counts["zero weights dropped"] += int((~seen).sum())
    result, is_last = result.take(seen), is_last[seen]
    is_last &= np.bincount(result.student_ids, minlength=1)[result.student_ids] > 1
    order = map_order(result, is_last)
    return result.take(order), is_last[order], counts
