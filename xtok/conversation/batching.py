"""Combine samples of different lengths into batches, and split batches into samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from xtok.conversation import Conversation

PaddingSide: TypeAlias = Literal["left", "right"]


def pad(rows: Sequence[ArrayLike], fill: Any, *, padding_side: PaddingSide) -> NDArray[Any]:
    """Pad arrays `[T_i, …]` to the largest length (at least 1), and stack the arrays."""
    if padding_side not in get_args(PaddingSide):
        raise ValueError(f"padding_side is {padding_side!r}, expected left or right")
    arrays = [np.asarray(row) for row in rows]
    longest = max(1, *map(len, arrays))
    padded = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill, np.result_type(*arrays))
    for row, array in zip(padded, arrays, strict=True):
        start = longest - len(array) if padding_side == "left" else 0
        row[start : start + len(array)] = array
    return padded


def collate(
    samples: Sequence[Conversation | Mapping[str, Any]],
    *,
    pad_id: int,
    pad_values: Mapping[str, Any] | None = None,
    padding_side: PaddingSide = "left",
) -> dict[str, Any]:
    """Combine B samples into a batch, and pad each field that has one value per token.

    A field is padded if it contains arrays (NumPy or CPU tensors), or lists of integers that are as
    long as the ids. A padded field becomes an array `[B, T, …]`. Any other field becomes a list of
    B values.

    Args:
        samples: conversations, or mappings with `ids` or `input_ids`, such as the rows of `xtok
            render`. All samples must have the same fields. An `attention_mask` in the samples is
            kept.
        pad_id: the padding id. For a prompt format, `PromptFormat.pad_id` returns this id.
        pad_values: padding values by field name. The default is -100 for `labels`, and False or 0
            for other fields.
        padding_side: `left` (required for generation) or `right`.

    Returns:
        a dict of the fields, and `attention_mask`: bool `[B, T]`, False at padding.
    """
    rows = [_sample_fields(sample) for sample in samples]
    key = _ids_key(rows)
    fill = {key: pad_id, "labels": -100, **(pad_values or {})}
    batch: dict[str, Any] = {}
    for name in rows[0]:
        batch[name] = [row[name] for row in rows]
        if name == key or all(_is_per_token(row[name], len(row[key])) for row in rows):
            batch[name] = pad(batch[name], fill.get(name, 0), padding_side=padding_side)
    masks = [_attention_mask(row, key) for row in rows]
    return {**batch, "attention_mask": pad(masks, False, padding_side=padding_side)}


def _sample_fields(sample: Conversation | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    names = ("ids", "assistant_mask", "message_spans", "text")
    return {name: getattr(sample, name) for name in names}


def _ids_key(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("all samples of a batch must have the same fields")
    for key in ("ids", "input_ids"):
        if key in rows[0]:
            return key
    raise ValueError("the samples have neither `ids` nor `input_ids`")


def _attention_mask(row: Mapping[str, Any], key: str) -> NDArray[np.bool_]:
    mask = np.asarray(row.get("attention_mask", [1] * len(row[key])), np.bool_)
    if mask.shape != (len(row[key]),):
        raise ValueError(f"the attention_mask and the {key} of a sample have different lengths")
    return mask


def _is_per_token(value: Any, num_tokens: int) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) == num_tokens and all(
            isinstance(item, (int, np.integer)) for item in value
        )
    return getattr(value, "ndim", 0) > 0


def unpad(batch: Mapping[str, Any], *, mask: str = "attention_mask") -> list[dict[str, Any]]:
    """Split a batch into B samples without padding; the inverse of `collate`.

    Args:
        batch: a dict with a mask `[B, T]` and other fields. The mask is 1 at tokens and 0 at
            padding. Padding is removed from arrays `[B, T, …]`, and from lists of B lists of T
            integers. Every other field must have B items, one for each sample.
        mask: name of the mask's field.

    Returns:
        B samples, without the mask. Arrays in samples are views of the batch's arrays.
    """
    is_token = np.asarray(batch.get(mask))
    if is_token.ndim != 2 or not np.isin(is_token, (0, 1)).all():
        raise ValueError(f"{mask} is not a mask [B, T] with only 0 and 1")
    edges = np.diff(is_token.astype(np.int8), axis=1, prepend=0, append=0)
    for row in np.flatnonzero((edges == 1).sum(axis=1) > 1):
        raise ValueError(f"{mask} has padding between the tokens of row {row}")
    starts, lengths = (edges == 1).argmax(axis=1), is_token.astype(bool).sum(axis=1)
    samples: list[dict[str, Any]] = [{} for _ in is_token]
    for name, rows in batch.items():
        if name == mask:
            continue
        if len(rows) != len(is_token):
            raise ValueError(f"{name} has {len(rows)} rows, but {mask} has {len(is_token)} rows")
        is_padded = _is_padded(rows, is_token.shape)
        for sample, row, start, length in zip(samples, rows, starts, lengths, strict=True):
            sample[name] = row[start : start + length] if is_padded else row
    return samples


def _is_padded(rows: Any, shape: tuple[int, ...]) -> bool:
    if isinstance(rows, (list, tuple)):
        return all(isinstance(r, (list, tuple)) and _is_per_token(r, shape[1]) for r in rows)
    return tuple(getattr(rows, "shape", ())[:2]) == shape
