"""`SpellingMap`: each token of two vocabularies, spelled in the other side's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.maps.file import StoredMap
from xtok.tokenizers.sides import SIDES
from xtok.tokenizers.table import TokenTable, TokenType

Ids = NDArray[np.int64]

UNUSED = "unused"
"""The reason that is none: an id beyond the tokenizer's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SpellingMap(StoredMap):
    """How each side writes the other's tokens in the middle of a text, byte for byte.

    A token that is spelled by one token is *shared*: the two have the same bytes, or are special
    tokens of the same role. Shared tokens are one to one. Of several ids with the same bytes, the
    one that the tokenizer emits is spelled, and the others are left out, so that no two tokens of a
    side have the same spelling.

    Common-Support Distillation (arXiv 2610.28895) reads it: its events are the shared tokens, and
    the tokens that are spelled alike but for the last piece.
    """

    KIND = "spellings"

    student_pieces: NDArray[np.int32]  # [total], teacher ids: one token's spelling after another
    student_counts: NDArray[np.int32]  # [V_student], pieces of each: 1 shared, 0 left out
    teacher_pieces: NDArray[np.int32]  # [total], student ids
    teacher_counts: NDArray[np.int32]  # [V_teacher]

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        rows, columns = self.shape
        return f"SpellingMap({pair}, {rows} and {columns} tokens, {len(self.shared[0])} shared)"

    @property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        """Both sides' tokens."""
        return _table(self, "student"), _table(self, "teacher")

    @property
    def shared(self) -> tuple[Ids, Ids]:
        """The shared tokens' student ids, rising, and their teacher ids, int64 `[shared]` both."""
        ids = np.flatnonzero(self.student_counts == 1)
        first = np.cumsum(self.student_counts)[ids] - 1
        return ids, self.student_pieces[first].astype(np.int64)

    def left_out(self, side: str) -> dict[str, Ids]:
        """Return the ids of a side without a spelling, by the reason, int64 and rising.

        Args:
            side: `student` or `teacher`.
        """
        table, without = _table(self, side), getattr(self, f"{side}_counts") == 0
        canonical = np.zeros(len(table), np.bool_)
        canonical[list(table.canonical_ids().values())] = True
        has_bytes, unused = table.lengths > 0, table.types == TokenType.UNUSED
        return {
            "another id has the same bytes": np.flatnonzero(without & has_bytes & ~canonical),
            "cannot be spelled": np.flatnonzero(without & canonical),
            "special, without a partner": np.flatnonzero(without & ~has_bytes & ~unused),
            UNUSED: np.flatnonzero(without & unused),
        }


def _table(m: SpellingMap, side: str) -> TokenTable:
    table: TokenTable | None = getattr(m, side).table
    if table is None:
        raise ValueError(f"the {side} has no tokens")
    return table


def _check_spellings(m: SpellingMap) -> None:
    for side, other, width in zip(SIDES, SIDES[::-1], m.shape, strict=True):
        pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
        if counts.shape != (width,):
            raise ValueError(f"{side}_counts is not of shape [{width}]")
        if counts.min(initial=0) < 0:
            raise ValueError(f"{side}_counts is below 0 at {int(counts.argmin())}")
        total = int(counts.sum(dtype=np.int64))
        if pieces.shape != (total,):
            raise ValueError(f"{side}_pieces has {len(pieces)} pieces, {side}_counts {total}")
        columns: int = getattr(m, other).vocab_size
        if total and not 0 <= pieces.min() <= pieces.max() < columns:
            raise ValueError(f"{side}_pieces is not all in 0..{columns - 1}")


def _check_shared(m: SpellingMap) -> None:
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        partners, back = _partners(m, side), _partners(m, other)
        shared = np.flatnonzero(partners >= 0)
        apart = shared[back[partners[shared]] != shared]
        if len(apart):
            raise ValueError(f"{side} id {int(apart[0])} is not shared on both sides")


def _partners(m: SpellingMap, side: str) -> Ids:
    """Return the other side's id of each shared token, int64 `[V]`, or −1."""
    pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
    partners = np.full(len(counts), -1, np.int64)
    partners[counts == 1] = pieces[(np.cumsum(counts) - 1)[counts == 1]]
    return partners


def _check_bytes(m: SpellingMap) -> None:
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        table, others = _table(m, side), _table(m, other)
        pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
        partners = _partners(m, side)
        by_role = (partners >= 0) & ((table.lengths == 0) | (others.lengths[partners] == 0))
        ids = np.flatnonzero((counts > 0) & ~by_role)
        pieces = pieces[np.repeat(~by_role, counts)]
        ends = np.cumsum(counts[ids])
        spelled = np.diff(np.cumsum(others.lengths[pieces])[ends - 1], prepend=0)
        wrong = ids[spelled != table.lengths[ids]]
        if not len(wrong):
            differs = _bytes_of(table, ids) != _bytes_of(others, pieces)
            owners = np.repeat(ids, table.lengths[ids])
            wrong = owners[differs]
        if len(wrong) or (others.lengths[pieces] == 0).any():
            example = f": {wrong[0]}" if len(wrong) else ""
            raise ValueError(f"a token of the {side} is not spelled by its bytes{example}")


def _bytes_of(table: TokenTable, ids: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of some tokens, one after another, uint8 `[total]`."""
    lengths = table.lengths[ids]
    starts = table.offsets[ids] - (np.cumsum(lengths) - lengths)
    data: NDArray[np.uint8] = table.data[np.arange(int(lengths.sum())) + np.repeat(starts, lengths)]
    return data


SpellingMap.INVARIANTS = {
    "spellings": (_check_spellings, "ids of the other side, as many as are counted"),
    "shared": (_check_shared, "one to one"),
    "bytes": (_check_bytes, "each token's spelling has its bytes"),
}
