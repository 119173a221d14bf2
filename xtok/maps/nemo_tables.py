"""NeMo-RL's two tables for Common-Support Distillation: `subtoks` and `lengths` of each side.

They are read by its draft "v6", pull request 4177: `_v3_fwd_table`, `_v3_rev_table` and
`_ensure_bidir_prefix_support_index` of `loss_functions.py` at a84de17.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.errors import MapFileError
from xtok.maps.tensors import own_tensors, require_valid
from xtok.tokenizers.sides import SIDES

if TYPE_CHECKING:
    from xtok.tokenizers.table import Vocabulary

Tensors = Mapping[str, NDArray[Any]]

N_MAX = 8
"""How many pieces of a spelling a row holds: the draft's default."""

_AGAIN_HINT = "xtok events STUDENT TEACHER --for csd -o NAME.pt makes both"


def are_tables(loaded: Any) -> bool:
    """Whether what a `.pt` file holds is one of the two tables."""
    return isinstance(loaded, dict) and {"subtoks", "lengths"} <= loaded.keys()


def reverse_of(path: Path) -> Path:
    """Return the path of the teacher's table, next to the student's.

    >>> reverse_of(Path("pair.pt")).name
    'pair.reverse.pt'
    """
    return path.with_name(f"{path.stem}.reverse{path.suffix}")


def to_tables(
    tensors: Tensors, metadata: str, student: Vocabulary, teacher: Vocabulary
) -> tuple[bytes, bytes]:
    """Return the bytes of the student's table and of the teacher's.

    `subtoks` is int64 `[V_src, N_MAX]`, padded with -1, V_src being the tokenizer's largest id + 1
    and not the width of the logits; `lengths`, int64 `[V_src]`, is 0 for a token that is left out.
    A longer spelling is cut, and keeps its length: the draft skips rows that are longer than the
    table is wide. With the length N_MAX it would take the beginning for the whole token.

    Args:
        tensors: the arrays of the `.safetensors` by name; each file carries those of its side.
        metadata: all else of the spelling map, as JSON, in both files.
        student: the student's vocabulary.
        teacher: the teacher's.
    """
    import torch

    files = []
    for side, vocabulary, into in zip(SIDES, (student, teacher), (teacher, student), strict=True):
        size = _num_ids(vocabulary)
        pieces, counts = tensors[f"{side}_pieces"], tensors[f"{side}_counts"]
        kept = {name: torch.from_numpy(t.copy()) for name, t in tensors.items() if side in name}
        buffer = io.BytesIO()  # torch.save writes a file's name into it
        torch.save(
            {
                "subtoks": torch.from_numpy(_padded(pieces, counts)[:size]),
                "lengths": torch.from_numpy(counts[:size].astype(np.int64)),
                "src": vocabulary.model_id,
                "dst": into.model_id,
                "N_max": N_MAX,
                "V_src": size,
                "V_dst": _num_ids(into),
                "xtok": {"side": side, "tensors": kept, "metadata": metadata},
            },
            buffer,
        )
        files.append(buffer.getvalue())
    return files[0], files[1]


def _num_ids(vocabulary: Vocabulary) -> int:
    return vocabulary.tokenizer_vocab_size or vocabulary.vocab_size


def _padded(pieces: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first `N_MAX` pieces of each token, int64 `[V, N_MAX]`, padded with -1."""
    rows = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    subtoks = np.full((len(counts), N_MAX), -1, np.int64)
    subtoks[rows[place < N_MAX], place[place < N_MAX]] = pieces[place < N_MAX]
    return subtoks


class _Table(NamedTuple):
    side: str
    pair: str
    tensors: Tensors
    metadata: str


def read_tables(loaded: Any, other: Any, source: Path) -> tuple[dict[str, NDArray[Any]], str]:
    """Read the two tables of a spelling map that xtok wrote.

    Args:
        loaded: what the student's file holds.
        other: the contents of the teacher's file, `reverse_of` this one; None if it is missing.
        source: the path of the student's.

    Returns:
        the tensors and the JSON text of the map, not yet checked.

    Raises:
        MapFileError: if a file is missing or the other side's, another pair's or program's.
        ValueError: if one is damaged; or a `KeyError` and its kind.
    """
    beside = reverse_of(source)
    student = _read(loaded, source)
    if student.side != "student":
        first = source.with_name(source.name.replace(".reverse.", "."))
        hint = f"the names of the two files are swapped; {_AGAIN_HINT}"
        if first != source:
            hint = f"give the student's, {first}; the teacher's is found next to it"
        raise MapFileError(f"{source} is the teacher's table", hint=hint)
    if other is None:
        raise MapFileError(
            f"{beside} is missing, the teacher's table that goes with {source}",
            hint=f"keep both files in one folder; {_AGAIN_HINT}",
        )
    teacher = _read(other, beside)
    if teacher.side != "teacher":
        raise MapFileError(f"{beside} is not the teacher's table", hint=_AGAIN_HINT)
    if student.metadata != teacher.metadata:
        pairs = f"{student.pair}, and {teacher.pair}"
        raise MapFileError(
            f"{source} and {beside} do not belong together: {pairs}", hint=_AGAIN_HINT
        )
    return {**student.tensors, **teacher.tensors}, student.metadata


def _read(loaded: Any, source: Path) -> _Table:
    stored = loaded.get("xtok") if are_tables(loaded) else None
    if not isinstance(stored, dict):
        raise MapFileError(f"{source} is not a table that xtok wrote", hint=_AGAIN_HINT)
    tensors, metadata = own_tensors(stored, source.stat().st_size)
    side = stored["side"]
    require_valid(isinstance(side, str) and side in SIDES, "the side")
    pieces, counts = tensors[f"{side}_pieces"], tensors[f"{side}_counts"]
    for name, values in ("pieces", pieces), ("counts", counts):
        require_valid(values.dtype == np.int32 and values.ndim == 1, f"{side}_{name}")
    require_valid((counts >= 0).all() and counts.sum() == len(pieces), f"{side}_counts")
    header = json.loads(metadata)
    src, dst = (header[name] for name in (SIDES if side == "student" else SIDES[::-1]))
    sizes = [v["tokenizer_vocab_size"] or v["vocab_size"] for v in (src, dst)]
    require_valid(all(type(size) is int for size in sizes), "the metadata")
    expected = {
        "src": src["model_id"], "dst": dst["model_id"],
        "N_max": N_MAX, "V_src": sizes[0], "V_dst": sizes[1],
    }  # fmt: skip
    same = all(type(loaded.get(k)) is type(v) and loaded[k] == v for k, v in expected.items())
    if not (
        same
        and _equals(loaded["lengths"], counts[: sizes[0]].astype(np.int64))
        and _equals(loaded["subtoks"], _padded(pieces, counts)[: sizes[0]])
    ):
        raise MapFileError(f"{source} was changed since xtok wrote it", hint=_AGAIN_HINT)
    return _Table(side, f"{src['model_id']} in {dst['model_id']}", tensors, metadata)


def _equals(found: Any, expected: NDArray[np.int64]) -> bool:
    """Whether what a file holds is this tensor."""
    import torch

    if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
        return False
    if found.device.type != "cpu" or found.dtype != torch.int64 or found.is_neg():
        return False
    return torch.equal(found, torch.from_numpy(expected))
