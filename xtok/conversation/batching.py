"""Samples of unequal length as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from xtok.conversation import Conversation

PaddingSide = Literal["left", "right"]


def pad(rows: Sequence[ArrayLike], fill: Any, *, padding_side: PaddingSide) -> NDArray[Any]:
    """Stack arrays `[T_i, …]` into `[B, T, …]`, filled up to the longest; T is at least 1."""
    if padding_side not in get_args(PaddingSide):
        raise ValueError(f"padding_side is {padding_side!r}, and must be left or right")
    arrays = [np.asarray(row) for row in rows]
    longest = max(1, *map(len, arrays))
    padded = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill, np.result_type(*arrays))
    for place, array in zip(padded, arrays, strict=True):
        start = longest - len(array) if padding_side == "left" else 0
        place[start : start + len(array)] = array
    return padded


def collate(
    samples: Sequence[Conversation | Mapping[str, Any]],
    *,
    pad_id: int,
    pad_values: Mapping[str, Any] | None = None,
    padding_side: PaddingSide = "left",
) -> dict[str, Any]:
    """Stack samples into a batch of B, each field padded to its own longest length.

    A field is per token if all samples have an array of at least one dimension for it (NumPy, or a
    tensor on the CPU), or all have a list of integers as long as their ids, such as
    `token_type_ids`: `[T_i, …]` becomes `[B, T, …]`. Every other field is passed on as a list of
    B, untouched.

    Args:
        samples: conversations, or mappings with at least `ids` or `input_ids`, such as the rows of
            `xtok render`; all with the same fields. An `attention_mask` of theirs stays as it is.
        pad_id: fills the ids; `PromptFormat.pad_id` knows that of a format.
        pad_values: by field, what fills it; by default -100 for `labels`, else False or 0.
        padding_side: `left`, as generation needs it, or `right`.

    Returns:
        The fields, NumPy arrays where per token, and `attention_mask`, bool `[B, T]`, False where
        the ids are padding.

    Raises:
        ValueError: if a sample lacks a field that another has, or has a mask of another length than
            its ids, or there are no samples.
    """
    fields = ("ids", "assistant_mask", "message_spans", "text")  # of a conversation
    rows = [
        dict(s) if isinstance(s, Mapping) else {name: getattr(s, name) for name in fields}
        for s in samples
    ]
    key = next((name for name in ("ids", "input_ids") if rows and name in rows[0]), None)
    if key is None or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("a batch needs samples with `ids` or `input_ids`, all of the same fields")
    fill = {key: pad_id, "labels": -100, **(pad_values or {})}
    batch: dict[str, Any] = {}
    for name in rows[0]:
        batch[name] = [row[name] for row in rows]
        if name == key or all(_is_per_token(row[name], len(row[key])) for row in rows):
            batch[name] = pad(batch[name], fill.get(name, 0), padding_side=padding_side)
    masks = [np.asarray(row.get("attention_mask", [1] * len(row[key])), np.bool_) for row in rows]
    if any(mask.shape != (len(row[key]),) for mask, row in zip(masks, rows, strict=True)):
        raise ValueError(f"an attention_mask is not as long as its {key}")
    batch["attention_mask"] = pad(masks, False, padding_side=padding_side)
    return batch


def _is_per_token(value: Any, num_tokens: int) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) == num_tokens and all(
            isinstance(item, (int, np.integer)) for item in value
        )
    return getattr(value, "ndim", 0) > 0


def unpad(batch: Mapping[str, Any], *, mask: str = "attention_mask") -> list[dict[str, Any]]:
    """Cut a batch of B into samples without padding; the inverse of `collate`.

    Args:
        batch: `mask`, True or 1 where a row has tokens, `[B, T]`, padded on either side; and other
            fields: arrays or tensors `[B, T, …]`, and lists of B lists of T integers, are cut as
            the mask has it; any other array or list of B is taken apart.
        mask: the name of the mask.

    Returns:
        B samples with all fields but the mask, the rows of arrays as views.

    Raises:
        ValueError: if the mask is missing or not of two dimensions, has a hole or other values than
            0 and 1, or a field does not have B rows.
    """
    kept = np.asarray(batch.get(mask))
    if kept.ndim != 2 or not np.isin(kept, (0, 1)).all():
        raise ValueError(f"{mask} is not a mask [B, T] of 0 and 1")
    edges = np.diff(kept.astype(np.int8), axis=1, prepend=0, append=0)
    for row in np.flatnonzero((edges == 1).sum(axis=1) > 1):
        raise ValueError(f"{mask} has a hole in row {row}: padding is at one end")
    starts, lengths = (edges == 1).argmax(axis=1), kept.astype(bool).sum(axis=1)
    samples: list[dict[str, Any]] = [{} for _ in kept]
    for name, rows in batch.items():
        if name == mask:
            continue
        if len(rows) != len(kept):
            raise ValueError(f"{name} has {len(rows)} rows, {mask} {len(kept)}")
        is_padded = tuple(getattr(rows, "shape", ())[:2]) == kept.shape or (
            isinstance(rows, (list, tuple))
            and all(isinstance(r, (list, tuple)) and _is_per_token(r, kept.shape[1]) for r in rows)
        )
        for sample, row, start, length in zip(samples, rows, starts, lengths, strict=True):
            sample[name] = row[start : start + length] if is_padded else row
    return samples
