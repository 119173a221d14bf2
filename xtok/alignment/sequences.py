"""Convert padded and ragged token ids to flat arrays without padding, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.kernels import Side
from xtok.tokenizers.table import TokenTable, TokenType


class FlatIds(NamedTuple):
    """Ids of many documents. Document d is `ids[bounds[d]:bounds[d + 1]]`."""

    ids: NDArray[np.int32]  # [tokens], ids of all documents
    bounds: NDArray[np.int64]  # [documents + 1], start of each document, and the end


class SymbolTable:
    """The vocabulary of one side as symbols for the kernels. Checks ids.

    `control` maps each control id that has a counterpart to its symbol. `unknown` is the symbol of
    unknown tokens.
    """

    def __init__(self, side: str, table: TokenTable, control: dict[int, int], unknown: int) -> None:
        self.side, self.table = side, table
        self.paired_controls = frozenset(control)
        self.stands_for_nothing = (table.lengths == 0) & ~table.is_control
        pads = set(table.roles.get("pad", ()))
        text_ends = {i for role in ("bos", "eos", "turn_end") for i in table.roles.get(role, ())}
        self._pads = sorted(pads - text_ends)
        self._ending_pads = sorted(pads & text_ends)
        self.unknown_ids = table.ids_of_type(TokenType.UNKNOWN)
        symbol_of = dict.fromkeys(self.unknown_ids.tolist(), unknown) | control
        ids = np.array(sorted(symbol_of), np.int64)
        lengths = table.lengths.copy()
        lengths[ids] = 1
        self.offsets = offsets_of(lengths)
        self.symbols = np.empty(int(self.offsets[-1]), np.uint16)
        is_text = np.ones(len(self.symbols), np.bool_)
        is_text[self.offsets[ids]] = False
        self.symbols[is_text] = table.data
        self.symbols[self.offsets[ids]] = [symbol_of[i] for i in ids.tolist()]

    @functools.cached_property
    def by_bytes(self) -> NDArray[np.int64]:
        """The ids of all text tokens, `[text tokens]`, int64, sorted by bytes."""
        tokens = self.table.tokens()
        return np.array(sorted(self.table.text_ids.tolist(), key=tokens.__getitem__), np.int64)

    def with_ids(self, rows: FlatIds | Sequences) -> Side:
        """Combine checked sequences with this vocabulary for the kernels."""
        return Side(rows.ids, rows.bounds, self.symbols, self.offsets)

    def check(
        self, ids: NDArray[Any], original_index: Callable[[int], list[int]]
    ) -> NDArray[np.int32]:
        """Return flat ids as int32. Invalid ids and ids without bytes raise a `ValueError`."""
        is_wrong = (ids < 0) | (ids >= len(self.table))
        problem = f"is outside 0..{len(self.table) - 1}"
        if not is_wrong.any():
            is_wrong, problem = self.stands_for_nothing[ids], "has no bytes"
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise ValueError(f"{self.side} id {ids[first]} at {original_index(first)} {problem}")
        return ids.astype(np.int32, copy=False)

    def flat(self, token_ids: ArrayLike, bounds: ArrayLike) -> FlatIds:
        """Check flat ids and their offsets, and return both as arrays."""
        ids, offsets = to_array(token_ids), to_array(bounds)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{self.side}_ids must be a flat array of integers")
        valid = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype.kind in "iu"
        valid = valid and offsets[0] == 0 and offsets[-1] == len(ids)
        if not valid or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{self.side}_offsets must increase from 0 to the number of ids, {len(ids)}"
            )

        def original_index(index: int) -> list[int]:
            document = int(np.searchsorted(offsets, index, side="right")) - 1
            return [document, int(index - offsets[document])]

        return FlatIds(self.check(ids, original_index), offsets.astype(np.int64))

    def padding(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Infer the padding mask from the ids: bool `[B, T]`, True at padding."""
        padding = np.isin(ids, self._pads)
        if self._ending_pads:
            ends = np.isin(ids, self._ending_pads)
            leading = np.logical_and.accumulate(ends, axis=1)
            trailing = np.logical_and.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
            padding |= leading & ~leading.all(axis=1, keepdims=True)
            padding[:, 1:] |= trailing[:, 1:] & trailing[:, :-1]
        return padding


class Sequences:
    """Sequences of one side as flat arrays, together with the original shape.

    `ids` and `bounds` have the format of `FlatIds`. `kept` is `[T]` or `[B, T]`, bool, False at
    padding.

    Args:
        symbols: the symbol table of the side.
        ids: one sequence `[T]`, a padded batch `[B, T]`, or a list of sequences, as NumPy arrays,
            torch tensors or lists.
        mask: the mask of a padded batch, 0 at padding. If None, pad tokens are padding.
    """

    def __init__(self, symbols: SymbolTable, ids: Any, mask: Any = None) -> None:
        self.side, self.is_list = symbols.side, _is_list(ids)
        if self.is_list:
            if mask is not None:
                raise ValueError(f"{self.side}_attention_mask requires a padded batch, not a list")
            self._like = ids[0]
            rows = [self._integers(row, (1,)) for row in ids]
            lengths = np.array([len(row) for row in rows])
            self.kept = np.arange(lengths.max()) < lengths[:, None]
            flat = np.concatenate(rows)
        else:
            self._like = ids
            array = self._integers(ids, (1, 2))
            if mask is not None:
                self.kept = to_array(mask) != 0
            elif array.ndim == 2:
                self.kept = ~symbols.padding(array)
            else:
                self.kept = np.ones(array.shape, np.bool_)
            if self.kept.shape != array.shape:
                raise ValueError(
                    f"{self.side}_attention_mask has the shape {list(self.kept.shape)}, but "
                    f"{self.side}_ids has the shape {list(array.shape)}"
                )
            flat = array[self.kept]  # padding may contain any id, even outside the vocabulary
        self.bounds = offsets_of(self.kept.sum(axis=-1))
        self.ids = symbols.check(flat, self.original_index)

    def values(self, name: str, values: Any, dtype: DTypeLike, *, ndim: int = 1) -> NDArray[Any]:
        """Return values of tokens as a flat array `[tokens]`, or `[tokens, K]` if `ndim` is 2."""
        if self.is_list:
            rows = [to_array(row, dtype) for row in values]
            expected = np.diff(self.bounds).tolist()
            if [len(row) if row.ndim == ndim else None for row in rows] != expected:
                shapes = [list(row.shape) for row in rows]
                raise ValueError(
                    f"{name} has the shapes {shapes}, but {self.side}_ids has the lengths "
                    f"{expected}"
                )
            return np.concatenate(rows)
        array = to_array(values, dtype)
        if array.shape[: array.ndim + 1 - ndim] != self.kept.shape:
            expected = ", ".join([*map(str, self.kept.shape), "K"][: self.kept.ndim + ndim - 1])
            problem = f"{name} has the shape {list(array.shape)}"
            raise ValueError(f"{problem}, but {self.side}_ids require [{expected}]")
        flat: NDArray[Any] = array[self.kept]
        return flat

    def restore(self, flat: NDArray[Any], fill: float) -> Any:
        """Return flat results in the original shape of the ids, with `fill` at padding."""
        if self.is_list:
            return [like(flat[a:b], self._like) for a, b in pairwise(self.bounds.tolist())]
        return like(filled(self.kept, flat, fill), self._like)

    def original_index(self, index: int) -> list[int]:
        """Return the position of a flat token in the original ids, `[t]` or `[row, t]`."""
        indices: list[int] = np.argwhere(self.kept)[index].tolist()
        return indices

    def _integers(self, ids: Any, dimensions: tuple[int, ...]) -> NDArray[Any]:
        array = to_array(ids)
        if array.dtype.kind not in "iu" or array.ndim not in dimensions:
            raise ValueError(
                f"{self.side}_ids have type {array.dtype} and shape {list(array.shape)}, expected "
                "integers [T] or [B, T], or a list of [T]"
            )
        return array


def filled(kept: NDArray[np.bool_], flat: NDArray[Any], fill: float) -> NDArray[Any]:
    """Return an array that contains `flat` where `kept` is True, and `fill` elsewhere."""
    result = np.full(kept.shape, fill, flat.dtype)
    result[kept] = flat
    return result


def to_array(values: Any, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """Convert a tensor, list or array to an array. In arrays of floats, None becomes NaN."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # NumPy has no bfloat16
    array = np.asarray(values, dtype)
    return array if array.size or dtype else array.astype(np.int64)  # an empty list gives float64


def like(array: NDArray[Any], other: Any) -> Any:
    """Convert an array to the type and device of another array or tensor."""
    if not hasattr(other, "detach"):
        return array
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(other.device)


def _is_list(ids: Any) -> bool:
    if not isinstance(ids, list | tuple) or not ids:
        return False
    return isinstance(ids[0], list | tuple) or getattr(ids[0], "ndim", 0) > 0
