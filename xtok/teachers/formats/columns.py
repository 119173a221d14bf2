"""Read and write columns of Parquet files, for all formats of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.predictions.topk import TopK, candidate_indices
from xtok.teachers.formats.documents import PER_TOKEN, Documents, cache_error, locate
from xtok.teachers.formats.flat_values import Bounds, flat_numbers

PAD = -1e4
"""Log-probability of padding. With −inf, programs that read the file would compute NaN."""

CANDIDATE_COLUMNS = (
    *("compressed_logprobs", "bytepacked_indices", "token_ids", "top_values"),  # DistillKit
    *PER_TOKEN,
)
"""Columns that `project` computes for the student and never copies from the teacher's file."""


class CacheColumns:
    """A record batch with list columns and one document per row.

    Each method checks the types and lengths of the columns that the method reads.

    Attributes:
        bounds: int64 `[documents + 1]`, the start of each document in `token_ids`.
        token_ids: int32 `[tokens]`, the ids of all documents.

    Args:
        batch: a pyarrow record batch.
        locations: the location of each document, for error messages. Default: row numbers.
    """

    def __init__(self, batch: Any, locations: Sequence[object] = ()) -> None:
        self.batch, self.locations = batch, locations or [f"row {i}" for i in range(len(batch))]
        [self.bounds], self.token_ids = self.flat_lists("input_ids", 1, np.int32)
        is_null = self.is_null("input_ids")
        if is_null.any():
            location = self.locations[int(np.argmax(is_null))]
            raise cache_error(location, "it has no input_ids")

    def flat_lists(
        self, name: str, depth: int, dtype: type, *, optional: bool = False
    ) -> tuple[list[Bounds], NDArray[Any]]:
        """Return the bounds of a column's nested lists, outermost first, and the flat values.

        `depth` is 1 for a column with one value per token, and 2 for a column with one list per
        token.
        """
        import pyarrow.compute

        array, levels, types = self.batch.column(name), list[Bounds](), pyarrow.types
        for _ in range(depth):
            if not (types.is_list(array.type) or types.is_fixed_size_list(array.type)):
                kind = f"{'lists of ' * len(levels)}{array.type}"
                problem = f"{name} contains {kind}, expected {'lists of ' * depth}numbers"
                raise cache_error(self.locations[0], problem)
            sizes = pyarrow.compute.list_value_length(array).fill_null(0)
            levels.append(offsets_of(sizes.to_numpy(zero_copy_only=False)))
            array = array.flatten()
        return levels, flat_numbers(array, name, dtype, self.locations, levels, optional=optional)

    def is_null(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the documents in which a column is null."""
        mask: NDArray[np.bool_] = self.batch.column(name).is_null().to_numpy(zero_copy_only=False)
        return mask

    def per_token(self, name: str, dtype: type, absent: object = None) -> NDArray[Any] | None:
        """Return a column with one value per token, or None if the column is missing.

        If `absent` is given, all tokens of a document with a null column get this value.
        """
        names = self.batch.schema.names
        if name not in names or str(self.batch.column(name).type) == "null":
            return None
        [bounds], values = self.flat_lists(name, 1, dtype, optional=dtype is np.float32)
        is_null = self.is_null(name)
        if absent is not None and is_null.any():
            sizes = np.where(is_null, np.diff(self.bounds), np.diff(bounds))
            stored, bounds = values, offsets_of(sizes)
            values = np.full(bounds[-1], absent, stored.dtype)
            values[np.repeat(~is_null, sizes)] = stored
        self.check_lengths([self.bounds], [bounds], ("tokens", name))
        return values

    def candidates(
        self, ids_name: str, logprobs_name: str
    ) -> tuple[Bounds, Bounds, NDArray[np.int32], NDArray[np.float32]]:
        """Return the bounds of documents and rows, and the ids and log-probabilities."""
        [rows, starts], ids = self.flat_lists(ids_name, 2, np.int32)
        others, logprobs = self.flat_lists(logprobs_name, 2, np.float32)
        self.check_lengths([rows, starts], others, (ids_name, logprobs_name))
        return rows, starts, ids, logprobs

    def check_lengths(
        self, bounds: Sequence[Bounds], others: Sequence[Bounds], names: tuple[str, str]
    ) -> None:
        """Raise an error if the lists in two columns have different lengths."""
        for depth, (a, b) in enumerate(zip(bounds, others, strict=True)):
            sizes = np.stack([np.diff(a), np.diff(b)])
            differs = np.flatnonzero(sizes[0] != sizes[1])
            if len(differs):
                index = int(differs[0])
                rows = self.locations
                location = locate(index, rows, bounds[:depth]) if depth else rows[index]
                size, other = sizes[:, index]
                problem = f"{size} {names[0]}, but {other} {names[1]}"
                raise cache_error(location, problem)

    def documents(self, topk: TopK) -> Documents:
        """Combine predictions with the batch's loss mask and other columns, without padding."""
        mask = self.per_token("loss_mask", np.bool_, absent=True)
        if mask is None or self.is_null("loss_mask").any():
            mask = self._with_labels(mask)
        documents = Documents(topk, self._others(), self.locations, mask)
        is_token = self.per_token("attention_mask", np.bool_, absent=True)
        return documents if is_token is None else documents.at_tokens(is_token)

    def _with_labels(self, mask: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        """For documents without `loss_mask`, compute the mask from `labels` if `labels` exists."""
        labels = self.per_token("labels", np.int64, absent=0)
        if labels is None or mask is None:
            return mask if labels is None else labels != -100
        use_labels = np.repeat(self.is_null("loss_mask"), np.diff(self.bounds))
        mask[use_labels] = labels[use_labels] != -100
        return mask

    def _others(self) -> dict[str, Any]:
        import pyarrow

        names = self.batch.schema.names
        others = self.batch.select([name for name in names if name not in CANDIDATE_COLUMNS])
        if "text" in others.schema.names:
            kind = others.schema.field("text").type
            if str(kind) not in ("string", "null"):
                problem = f"the column 'text' has the type {kind}, expected string"
                raise cache_error(self.locations[0], problem, "drop or convert the column")
        try:
            others.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            problem = f"this row or one of the next {len(others)} rows is damaged: {error}"
            raise cache_error(self.locations[0], problem) from error
        return dict(zip(others.schema.names, others.columns, strict=True))


# Output


class StudentSide(NamedTuple):
    """The properties of the student that output formats require."""

    model: str
    width: int  # K
    pad_id: int  # id with negligible probability, for padding


def next_tokens(
    topk: TopK, target: StudentSide
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
    """Return ids, log-probabilities and a mask (False at padding), each `[N, K]`.

    Row i predicts token i + 1.
    """
    rows = np.arange(1, len(topk.token_ids) + 1)
    rows[np.isin(rows, topk.bounds)] = -1  # the last row of a document predicts no token
    starts, indices = candidate_indices(topk.starts, rows)
    is_real = np.arange(target.width) < np.diff(starts)[:, None]
    ids = np.full(is_real.shape, target.pad_id, np.int32)
    logprobs = np.full(is_real.shape, PAD, np.float32)
    ids[is_real], logprobs[is_real] = topk.ids[indices], topk.logprobs[indices]
    return ids, logprobs, is_real


def list_array(bounds: NDArray[np.int64], values: Any) -> Any:
    """Return a pyarrow list array with the given bounds. A matrix becomes nested lists."""
    import pyarrow

    if isinstance(values, np.ndarray) and values.ndim == 2:
        values = list_array(np.arange(len(values) + 1) * values.shape[1], values.ravel())
    elif isinstance(values, np.ndarray):
        values = pyarrow.array(values, from_pandas=True)  # NaN becomes null
    return pyarrow.ListArray.from_arrays(bounds.astype(np.int32), values)
