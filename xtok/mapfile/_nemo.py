"""NeMo-RL's `.pt` layout: `indices` and `likelihoods`, `[V_student, k]`, padded."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok._version import __version__
from xtok.config import Normalize
from xtok.errors import MAP_HINT, MapFileError, OutputError
from xtok.mapfile._packing import MALFORMED, pack_metadata, pack_tensors, require, unpack
from xtok.projection import (
    Edges,
    ProjectionMap,
    RowKind,
    StageReport,
    map_order,
    ranks,
    row_sums,
    sum_duplicates,
)
from xtok.tokens import MAX_WIDTH, Vocabulary

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
    own = pack_tensors(projection)
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
                "metadata": pack_metadata(projection),
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


@dataclass(frozen=True)
class _Entries:
    """The entries of a `.pt` file as they stand in it, row by row, and what it says of them."""

    edges: Edges
    columns: NDArray[np.int64]
    num_rows: int | None
    num_columns: int | None
    top_k: int | None
    says: Mapping[str, Any]
    without_id: int = 0


def from_nemo(
    data: bytes,
    source: Path,
    widths: Mapping[str, int | None],
    preserve_last: bool | None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    """Read a `.pt` map: one that xtok wrote, without loss, or any that NeMo-RL's tools write.

    Args:
        data: the file's bytes.
        source: its path, for messages.
        widths: the `student` and `teacher` vocabulary sizes, where the file does not tell them.
        preserve_last: whether the last column holds scale slots, where the file does not say.
        normalize: how rows of learned weights are made to sum to 1; by their sum if None.

    Raises:
        MapFileError: if it would run code, lacks a width, or is damaged or something else.
    """
    loaded = _torch_load(data, source)
    try:
        entries = _read_entries(loaded)
        if isinstance(own := entries.says.get("xtok"), dict):
            tensors = {name: tensor.numpy() for name, tensor in own["tensors"].items()}
            return _from_own(entries, tensors, own["metadata"], normalize)
        return _from_foreign(entries, source, widths, preserve_last, normalize)
    except (*MALFORMED, RuntimeError) as error:
        raise MapFileError(f"{source} is not a projection map: {error}", hint=MAP_HINT) from error


def from_padded(
    tensors: Mapping[str, NDArray[Any]],
    says: Mapping[str, str],
    source: Path,
    widths: Mapping[str, int | None],
    preserve_last: bool | None,
    normalize: Normalize | None,
) -> ProjectionMap:
    """Read `indices` and `likelihoods` out of a safetensors file, with its metadata.

    Raises:
        MapFileError: if it lacks a width.
        ValueError: if it is damaged.
    """
    told: dict[str, Any] = dict(says)
    if "enable_scale_trick" in told:
        told["enable_scale_trick"] = told["enable_scale_trick"].lower() == "true"
    entries = _padded(tensors["indices"], tensors["likelihoods"].astype(np.float64), told)
    return _from_foreign(entries, source, widths, preserve_last, normalize)


def from_trained(
    tensors: Mapping[str, NDArray[Any]], metadata: str, normalize: Normalize
) -> ProjectionMap:
    """Read the tensors of a map by xtok whose weights were trained since.

    Raises:
        ValueError: if they are not a map for another reason than the sums and order of its rows;
            damaged JSON may raise any of `MALFORMED`.
    """
    s = tensors["student_ids"]
    edges = Edges(s, tensors["teacher_ids"], tensors["weights"].astype(np.float64))
    top_k = int(json.loads(metadata)["top_k"])
    columns = ranks(s)
    if "scale_slot" in tensors:
        last = np.append(s[1:] != s[:-1], True)[: len(s)]
        columns[last & (tensors["scale_slot"][s] == 1)] = top_k - 1
    entries = _Entries(edges, columns, None, None, top_k, {})
    return _from_own(entries, tensors, metadata, normalize)


def _torch_load(data: bytes, source: Path) -> Any:
    import torch

    try:
        _require_stored(data)
        loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        for tensor in _tensors_in(loaded):
            if tensor.layout == torch.strided and tensor.nbytes > len(data):
                raise ValueError(
                    f"it holds {len(data)} bytes, and claims a tensor of {tensor.nbytes}"
                )
        return loaded
    except Exception as error:
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise MapFileError(
                f"{source} is damaged, or holds more than tensors, which could run code",
                hint="save only tensors, numbers and strings in it, or make it again",
            ) from error
        raise MapFileError(f"{source} is not a whole .pt file: {error}", hint=MAP_HINT) from error


def _require_stored(data: bytes) -> None:
    """Check that the archive holds what it says, as `torch.save` writes it, and not a bomb."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise ValueError("it is compressed, which torch.save does not do")
    if sum(m.file_size for m in members) > len(data):
        raise ValueError("it claims to hold more than it has bytes")


def _tensors_in(loaded: Any) -> Iterator[torch.Tensor]:
    """Give the tensors of a map: the thing itself, or those in a dict or in a dict in it."""
    import torch

    if isinstance(loaded, torch.Tensor):
        yield loaded
    elif isinstance(loaded, dict) and not any(isinstance(key, tuple) for key in loaded):
        for value in loaded.values():
            yield from _tensors_in(value)


def _read_entries(loaded: Any) -> _Entries:
    """Read any of the layouts that NeMo-RL's tools write; `ValueError` for anything else."""
    import torch

    if isinstance(loaded, dict) and {"indices", "likelihoods"} <= loaded.keys():
        return _padded(
            loaded["indices"].detach().numpy(),
            loaded["likelihoods"].detach().double().numpy(),
            loaded,
        )
    if isinstance(loaded, dict) and loaded and all(isinstance(key, tuple) for key in loaded):
        pairs = np.array([[*map(int, key)] for key in loaded], np.int64).reshape(len(loaded), 2)
        counts = np.array([float(value) for value in loaded.values()])
        return _coo(Edges(pairs[:, 0], pairs[:, 1], counts), (None, None))
    if isinstance(loaded, torch.Tensor) and loaded.ndim == 2:
        sparse = loaded.detach().to_sparse().coalesce()
        s, t = sparse.indices().numpy()
        edges = Edges(s, t, sparse.values().double().numpy())
        return _coo(edges, (loaded.shape[0], loaded.shape[1]))
    raise ValueError("it has neither indices and likelihoods, nor counts of pairs, nor a matrix")


def _coo(edges: Edges, shape: tuple[int | None, int | None]) -> _Entries:
    edges = edges.take(map_order(edges))
    return _Entries(edges, ranks(edges.student_ids), *shape, None, {})


def _padded(
    indices: NDArray[Any], weights: NDArray[np.float64], says: Mapping[str, Any]
) -> _Entries:
    require(indices.ndim == 2 and indices.shape == weights.shape, "the shape of indices")
    require(indices.dtype.kind == "i", "the type of indices")
    rows, columns = np.nonzero(indices >= 0)
    edges = Edges(rows, indices[rows, columns].astype(np.int64), weights[rows, columns])
    without_id = int(np.count_nonzero(weights[indices < 0]))
    return _Entries(edges, columns, len(indices), None, indices.shape[1], says, without_id)


def _softmax(edges: Edges) -> Edges:
    """Return the edges with the softmax of each row's weights."""
    require(np.isfinite(edges.weights).all(), "a weight that is not finite")
    largest = np.full(int(edges.student_ids.max(initial=0)) + 1, -np.inf)
    np.maximum.at(largest, edges.student_ids, edges.weights)
    weights = np.exp(edges.weights - largest[edges.student_ids])
    return edges._replace(weights=weights).normalized()


def _from_own(
    entries: _Entries,
    tensors: Mapping[str, NDArray[Any]],
    metadata: str,
    normalize: Normalize | None,
) -> ProjectionMap:
    """Read back a map that xtok wrote; what was edited since is put in order and reported."""
    kind = tensors["row_kind"]
    slot = tensors.get("scale_slot", np.zeros(len(kind), np.uint8))
    if normalize == "softmax":  # fillers of rows without entries have no logit
        real = kind[entries.edges.student_ids] != RowKind.EMPTY
        edges = _softmax(entries.edges.take(real))
        entries = replace(entries, edges=edges, columns=entries.columns[real])
    edges, _, counts = _in_order(entries, slot == 1, fillers_count=False)
    projection = unpack({**tensors, **edges._asdict()}, metadata)
    if normalize or any(counts.values()):
        projection = _imported(projection, counts, normalize)
    return projection


def _from_foreign(
    entries: _Entries,
    source: Path,
    widths: Mapping[str, int | None],
    preserve_last: bool | None,
    normalize: Normalize | None,
) -> ProjectionMap:
    sizes = []
    for side, told, ids in (
        ("student", entries.num_rows, entries.edges.student_ids),
        ("teacher", entries.num_columns, entries.edges.teacher_ids),
    ):
        size = widths[side] or told
        if size is None:
            raise MapFileError(
                f"{source} does not tell the {side}'s vocabulary size",
                hint=f"give it with --{side}-vocab-size (at least {int(ids.max(initial=0)) + 1})",
            )
        require(0 < size <= MAX_WIDTH, f"the {side}'s vocabulary size {size}")
        require(ids.max(initial=0) < size, f"the {side} id {ids.max(initial=0)} of {size}")
        sizes.append(size)
    says = entries.says
    scale_trick = bool(says.get("enable_scale_trick", preserve_last or False))
    given = entries.edges
    per_row = np.bincount(given.student_ids, minlength=sizes[0])
    strict = (per_row == 1) & (np.bincount(given.student_ids, given.weights, sizes[0]) == 1)
    slots = np.zeros(sizes[0], np.bool_)
    if scale_trick and entries.top_k is not None:
        slots[given.student_ids[entries.columns == entries.top_k - 1]] = True
    if normalize == "softmax":
        strict[:] = False
        entries = replace(entries, edges=_softmax(given))
    edges, last, counts = _in_order(entries, slots & ~strict)
    if entries.without_id:
        counts["weights without a teacher id dropped"] = entries.without_id
    kind = np.zeros(sizes[0], np.uint8)
    kind[edges.student_ids] = RowKind.MIXED
    kind[strict & (kind != RowKind.EMPTY)] = RowKind.EXACT
    scale_slot = np.zeros(sizes[0], np.uint8)
    scale_slot[edges.student_ids[last]] = 1
    student, teacher = (
        Vocabulary(
            model_id=str(says.get(f"{side}_model_id") or says.get(f"{old}_id") or "unknown"),
            revision=None,
            backend=None,
            vocab_size=size,
            width_source="option" if widths[side] else "map",
            tokenizer_vocab_size=None,
            table=None,
        )
        for side, old, size in zip(
            ("student", "teacher"), ("model_A", "model_B"), sizes, strict=True
        )
    )
    projection = ProjectionMap(
        student=student,
        teacher=teacher,
        student_ids=edges.student_ids.astype(np.int32),
        teacher_ids=edges.teacher_ids.astype(np.int32),
        weights=edges.weights.astype(np.float32),
        row_kind=kind,
        scale_slot=scale_slot if scale_trick else None,
        method="imported",
        top_k=entries.top_k or int(np.bincount(edges.student_ids, minlength=1).max()),
    )
    projection.check()
    return _imported(projection, counts, normalize)


def _imported(
    projection: ProjectionMap, counts: dict[str, int], normalize: Normalize | None
) -> ProjectionMap:
    options = {"normalize": normalize} if normalize else {}
    step = {"stage": "import", "options": options, "xtok_version": __version__}
    return replace(
        projection,
        history=(*projection.history, step),
        reports=(StageReport("import", counts),),
    )


def _in_order(
    entries: _Entries, has_slot: NDArray[np.bool_], *, fillers_count: bool = True
) -> tuple[Edges, NDArray[np.bool_], dict[str, int]]:
    """Add up duplicates, drop zero weights, normalize and sort; count what had to be done.

    A row's slot is its entry in the last column. Rows that are in order keep their bits.

    Returns:
        the edges with a map's dtypes and order, which of them are slots, and the counts.
    """
    edges = entries.edges
    valid = np.isfinite(edges.weights) & (edges.weights >= 0)
    require(
        valid.all(),
        "a weight that is negative or not finite (logits are read with convert --normalize "
        "softmax)",
    )
    last = has_slot[edges.student_ids] & (entries.columns == (entries.top_k or 0) - 1)
    keep = edges.weights > 0
    edges, last = edges.take(keep), last[keep]
    moved = map_order(edges, last) != np.arange(len(last))
    counts = {"zero weights dropped": int((~keep).sum())} if fillers_count else {}
    counts["rows reordered"] = len(np.unique(edges.student_ids[moved]))
    is_last = sum_duplicates(edges._replace(weights=last.astype(np.float32))).weights > 0
    summed = sum_duplicates(edges)
    if last.any():
        per_pair = sum_duplicates(edges._replace(weights=np.ones(len(last), np.float32))).weights
        counts["slots added to an entry of the same id"] = int((is_last & (per_pair > 1)).sum())
    is_last &= np.bincount(summed.student_ids, minlength=1)[summed.student_ids] > 1
    counts["duplicate entries added up"] = len(edges.weights) - len(summed.weights)
    off = np.abs(row_sums(summed) - 1) > _ROUNDING
    counts["rows normalized"] = len(np.unique(summed.student_ids[off]))
    weights = np.where(off, summed.normalized().weights, summed.weights).astype(np.float32)
    order = map_order(summed, is_last)
    result = Edges(
        summed.student_ids.astype(np.int32), summed.teacher_ids.astype(np.int32), weights
    )
    return result.take(order), is_last[order], counts
