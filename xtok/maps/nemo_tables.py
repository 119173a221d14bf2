"""Write NeMo-RL's two tables for Common-Support Distillation (CSD).

`loss_functions.py` in NeMo-RL's draft "v6" (pull request 4177 at a84de17) reads the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.maps.edges import ranks
from xtok.maps.opening import Tensors, torch_bytes
from xtok.tokenizers.table import SIDES, Vocabulary

N_MAX = 8  # maximum number of pieces per row; the draft's default


def are_tables(loaded: Any) -> bool:
    """Whether a `.pt` file contains a table for CSD."""
    return isinstance(loaded, dict) and {"subtoks", "lengths"} <= loaded.keys()


def reverse_path(path: Path) -> Path:
    """Return the path of the teacher's table, next to the student's table.

    >>> reverse_path(Path("pair.pt")).name
    'pair.reverse.pt'
    """
    return path.with_name(f"{path.stem}.reverse{path.suffix}")


def to_tables(
    tensors: Tensors, metadata: str, student: Vocabulary, teacher: Vocabulary
) -> tuple[bytes, bytes]:
    """Return the bytes of the student's table and of the teacher's table.

    `subtoks` is int64 `[V_src, N_MAX]`, padded with -1; V_src is the tokenizer's largest id + 1.
    `lengths` is int64 `[V_src]`, 0 for tokens without a spelling. `subtoks` contains only the first
    N_MAX pieces, but `lengths` counts all pieces. NeMo-RL's draft skips rows with more pieces.
    """
    import torch

    files = []
    for side, vocabulary, into in zip(SIDES, (student, teacher), (teacher, student), strict=True):
        size = vocabulary.num_ids
        pieces, counts = tensors[f"{side}_pieces"], tensors[f"{side}_counts"]
        table = {
            "subtoks": torch.from_numpy(_pad(pieces, counts)[:size]),
            "lengths": torch.from_numpy(counts[:size].astype(np.int64)),
            "src": vocabulary.model_id,
            "dst": into.model_id,
            "N_max": N_MAX,
            "V_src": size,
            "V_dst": into.num_ids,
            "xtok": {"side": side, "metadata": metadata},
        }
        files.append(torch_bytes(table))
    return files[0], files[1]


def _pad(pieces: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    rows = np.repeat(np.arange(len(counts)), counts)
    rank = ranks(rows)
    is_kept = rank < N_MAX
    subtoks = np.full((len(counts), N_MAX), -1, np.int64)
    subtoks[rows[is_kept], rank[is_kept]] = pieces[is_kept]
    return subtoks
