"""Rows of a batch: check and pad columns with one value per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from xtok.conversation.batching import pad

_T = TypeVar("_T")

IGNORED = -100
"""Label of tokens that are not targets. PyTorch's cross-entropy ignores this label."""


def checked_columns(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the named columns that exist in a row. Each column must have one value per token.

    `labels` are read only if there is no `loss_mask`, and replace it: the label -100 marks tokens
    that are not targets.
    """
    names = (*names, "attention_mask", *(["labels"] if row.get("loss_mask") is None else []))
    columns = {name: row[name] for name in names if row.get(name) is not None}
    for name, values in columns.items():
        if len(values) != (count := len(row["input_ids"])):
            raise ValueError(f"{name} has {len(values)} values for {count} input_ids")
    if not read_flags(columns, "attention_mask", len(row["input_ids"])).all():
        raise ValueError("attention_mask has 0: remove padding from the rows")
    if "labels" in columns:
        columns["loss_mask"] = np.asarray(columns["labels"]) != IGNORED
    return columns


def read_ids(values: Sequence[int], name: str) -> NDArray[np.int64]:
    """Return a column of token ids, int64."""
    ids = np.asarray(values)
    if ids.dtype.kind in "iuf":
        with np.errstate(invalid="ignore"):
            is_id = ids.astype(np.int64) == ids
    else:  # mixed types, or integers beyond 64 bits
        is_id = np.array([type(v) is int and -(1 << 63) <= v < 1 << 63 for v in ids.tolist()])
    if not is_id.all():
        wrong = ids.tolist()[int(np.flatnonzero(~is_id)[0])]
        raise ValueError(f"{name} contains {wrong}, which is not a token id")
    return ids.astype(np.int64)


def read_flags(columns: Mapping[str, Any], name: str, num_tokens: int) -> NDArray[np.bool_]:
    """Return a column of flags. If the column is missing, all flags are True."""
    values = np.asarray(columns.get(name, np.ones(num_tokens, np.bool_)))
    is_flag = np.isin(values, (0, 1)) & (values.dtype.kind in "biuf")
    if not is_flag.all():
        raise ValueError(f"{name} contains {values[~is_flag].tolist()[0]!r}, expected 0 or 1")
    return values.astype(np.bool_)


def check_length(max_length: int | None) -> None:
    """Raise a `ValueError` if `max_length` is below 1."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length is {max_length}, expected at least 1")


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to all tensors in nested dicts, lists, named tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(x, change) for name, x in value.items()}
    if isinstance(value, list) or hasattr(value, "_make"):
        return getattr(value, "_make", list)(map_tensors(x, change) for x in value)
    if is_dataclass(value) and any(isinstance(x, torch.Tensor) for x in vars(value).values()):
        value = copy(value)
        vars(value).update(map_tensors(vars(value), change))
    return value


def to_device(value: _T, device: torch.device | str) -> _T:
    """Move all tensors in a nested value to a device."""
    moved: _T = map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
    return moved


def stack(rows: Sequence[NDArray[Any]], fill: Any) -> torch.Tensor:
    """Pad arrays `[T_i, …]` on the right. Return a tensor `[B, T, …]` with T ≥ 1."""
    return torch.from_numpy(pad(rows, fill, padding_side="right"))
