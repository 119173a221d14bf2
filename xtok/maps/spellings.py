"""`SpellingMap`: the spelling of each token in the other vocabulary's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtok.maps import nemo_tables
from xtok.maps.file import StoredMap, check_reverse
from xtok.maps.packing import pack
from xtok.maps.records import require
from xtok.tokenizers.pairs import require_table
from xtok.tokenizers.table import SIDES, Ids, TokenTable, TokenType

UNUSED = "unused"  # reason for ids beyond the tokenizer's largest id


@dataclass(frozen=True, kw_only=True, eq=False)
class SpellingMap(StoredMap):
    """The spelling of each student token in teacher tokens, and vice versa.

    A student token and a teacher token with the same bytes or role form a *shared* pair. Each token
    belongs to at most one pair. If several ids have the same bytes, only the id that the tokenizer
    emits has a spelling. Common-Support Distillation (arXiv 2610.28895) uses two kinds of events:
    shared tokens, and tokens with equal spellings except for the last piece.
    """

    KIND = "spellings"
    ARRAYS: ClassVar = {
        f"{side}_{name}": "int32" for side in SIDES for name in ("pieces", "counts")
    }

    student_pieces: NDArray[np.int32]  # [total], teacher ids of all spellings, concatenated
    student_counts: NDArray[np.int32]  # [V_student], number of pieces: 1 if shared, 0 if none
    teacher_pieces: NDArray[np.int32]  # [total], student ids
    teacher_counts: NDArray[np.int32]  # [V_teacher]

    def __repr__(self) -> str:
        pair = f"{self.student.model_id} → {self.teacher.model_id}"
        rows, columns = self.shape
        return f"SpellingMap({pair}, {rows} and {columns} tokens, {len(self.shared[0])} shared)"

    @property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        """Token tables of both sides."""
        return _table(self, "student"), _table(self, "teacher")

    @property
    def shared(self) -> tuple[Ids, Ids]:
        """Student ids (ascending) and teacher ids of the shared tokens, both int64 `[shared]`."""
        partners = _partners(self, "student")
        ids = np.flatnonzero(partners >= 0)
        return ids, partners[ids]

    def left_out(self, side: str) -> dict[str, Ids]:
        """Return the ids of one side that have no spelling, by reason."""
        table, is_empty = _table(self, side), getattr(self, f"{side}_counts") == 0
        canonical = np.zeros(len(table), np.bool_)
        canonical[table.emitted_ids] = True
        has_bytes, unused = table.lengths > 0, table.types == TokenType.UNUSED
        return {
            "another id has the same bytes": np.flatnonzero(is_empty & has_bytes & ~canonical),
            "cannot be spelled": np.flatnonzero(is_empty & canonical),
            "special, without counterpart": np.flatnonzero(is_empty & ~has_bytes & ~unused),
            UNUSED: np.flatnonzero(is_empty & unused),
        }

    def files(self, path: Path) -> list[Path]:
        """Return the files that `save` writes; in the format `.pt`, each direction has a file."""
        return [path, nemo_tables.reverse_path(path)] if path.suffix == ".pt" else [path]

    def _encode_files(self, path: Path) -> Sequence[bytes]:
        if path.suffix != ".pt":
            return super()._encode_files(path)
        check_reverse(path, self.student.model_id, self.teacher.model_id)
        return nemo_tables.to_tables(*pack(self), self.student, self.teacher)


def _table(m: SpellingMap, side: str) -> TokenTable:
    return require_table(getattr(m, side))


def _check_spellings(m: SpellingMap) -> None:
    for side, other, width in zip(SIDES, SIDES[::-1], m.shape, strict=True):
        pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
        require(counts.shape == (width,), f"{side}_counts does not have shape [{width}]")
        require((counts >= 0).all(), f"{side}_counts contains a negative count")
        total = int(counts.sum(dtype=np.int64))
        sizes = f"{side}_pieces has {len(pieces)} pieces, but {side}_counts adds up to {total}"
        require(pieces.shape == (total,), sizes)
        columns: int = getattr(m, other).vocab_size
        is_within = not total or 0 <= pieces.min() <= pieces.max() < columns
        require(is_within, f"{side}_pieces has values outside 0..{columns - 1}")


def _check_shared(m: SpellingMap) -> None:
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        partners, back = _partners(m, side), _partners(m, other)
        shared = np.flatnonzero(partners >= 0)
        one_sided = shared[back[partners[shared]] != shared]
        if len(one_sided):
            first = int(one_sided[0])
            raise ValueError(f"{side} id {first} is not the partner of its {other} partner")


def _partners(m: SpellingMap, side: str) -> Ids:
    pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
    partners = np.full(len(counts), -1, np.int64)
    partners[counts == 1] = pieces[(np.cumsum(counts) - 1)[counts == 1]]
    return partners


def _check_bytes(m: SpellingMap) -> None:
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        table, other_table = _table(m, side), _table(m, other)
        pieces, counts = getattr(m, f"{side}_pieces"), getattr(m, f"{side}_counts")
        partners = _partners(m, side)
        by_role = (partners >= 0) & ((table.lengths == 0) | (other_table.lengths[partners] == 0))
        ids = np.flatnonzero((counts > 0) & ~by_role)
        pieces = pieces[np.repeat(~by_role, counts)]
        ends = np.cumsum(counts[ids])
        spelled = np.diff(np.cumsum(other_table.lengths[pieces])[ends - 1], prepend=0)
        wrong = ids[spelled != table.lengths[ids]]
        if not len(wrong):
            differs = _token_bytes(table, ids) != _token_bytes(other_table, pieces)
            wrong = np.repeat(ids, table.lengths[ids])[differs]
        if len(wrong) or (other_table.lengths[pieces] == 0).any():
            example = f": {wrong[0]}" if len(wrong) else ""
            raise ValueError(f"the spelling of a {side} token has other bytes{example}")


def _token_bytes(table: TokenTable, ids: NDArray[Any]) -> NDArray[np.uint8]:
    lengths = table.lengths[ids]
    starts = table.offsets[ids] - (np.cumsum(lengths) - lengths)
    data: NDArray[np.uint8] = table.data[np.arange(int(lengths.sum())) + np.repeat(starts, lengths)]
    return data


SpellingMap.INVARIANTS = {
    "spellings": (_check_spellings, "all pieces are valid ids"),
    "shared": (_check_shared, "one to one"),
    "bytes": (_check_bytes, "each spelling has the bytes of its token"),
}
