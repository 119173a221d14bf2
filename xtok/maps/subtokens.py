"""Each token spelled in the other side's tokens: in memory, and as NeMo-RL's drafts read it.

The drafts are its pull requests 3286 and 4177 ("v6"), which read two such tables instead of a map;
the reading is in `loss_functions.py` of the branch `avenkateshha/xtoken-v6-loss` (a84de17).
"""

from __future__ import annotations

import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from xtok.config import Loss
from xtok.maps.results import examples_of
from xtok.progress import Note, silent_note
from xtok.vocab.pair import Pair
from xtok.vocab.table import Vocabulary

N_MAX = 8
"""How many tokens of a spelling the drafts' tables hold."""


def subtokens(pair: Pair) -> dict[int, list[int]]:
    """Spell each token of a student as the teacher's tokenizer does in the middle of a text.

    A token whose bytes the other vocabulary has is that one token, whatever its tokenizer makes of
    them alone. A control token is the token of the same role, or has no spelling. Of several ids
    with the same bytes only the one that the tokenizer emits has a spelling: readers keep the
    lowest id for each token of the other side, which in a SentencePiece vocabulary is a byte token
    that no text has.

    Returns:
        the other side's ids for each id that has a spelling.
    """
    id_of = pair.tables[0].canonical_ids()
    _, teacher = pair.tokenizers
    spelled = dict(zip(id_of.values(), teacher.segment_batch(list(id_of)), strict=True))
    single = {i: t for i, t in pair.equal_bytes.items() if i in spelled} | pair.equal_roles
    return {i: ids for i, ids in spelled.items() if ids} | {i: [t] for i, t in single.items()}


def nemo_table(pair: Pair, note: Note = silent_note) -> bytes:
    """Return a `.pt` of a student's tokens, spelled in the teacher's, as NeMo-RL's drafts read it.

    `subtoks` is int64 `[V_src, N_max]`, padded with -1, V_src being the tokenizer's largest id + 1
    and not the width of the logits; `lengths` is 0 for a token without a spelling. A longer
    spelling is cut, and keeps its length in `lengths`: the drafts skip rows that are longer than
    the table is wide. With the length N_max they would take its beginning for the whole token.
    """
    import torch

    rows = _num_ids(pair.student)
    subtoks = np.full((rows, N_MAX), -1, np.int64)
    lengths = np.zeros(rows, np.int64)
    for i, ids in subtokens(pair).items():
        subtoks[i, : len(ids)] = ids[:N_MAX]
        lengths[i] = len(ids)
    names = pair.student.model_id, pair.teacher.model_id
    buffer = io.BytesIO()  # torch.save writes a file's name into the file
    contents: dict[str, Any] = {
        "subtoks": torch.from_numpy(subtoks),
        "lengths": torch.from_numpy(lengths),
        "src": names[0],
        "dst": names[1],
        "N_max": N_MAX,
        "V_src": rows,
        "V_dst": _num_ids(pair.teacher),
    }
    torch.save(contents, buffer)
    cut = np.flatnonzero(lengths > N_MAX).tolist()
    if cut:
        note(
            f"{names[0]}: more than {N_MAX} tokens of {names[1]}, cut to {N_MAX}, and skipped by "
            f"NeMo-RL: {examples_of(cut, pair.student.table)}"
        )
    return buffer.getvalue()


def _num_ids(vocabulary: Vocabulary) -> int:
    return vocabulary.tokenizer_vocab_size or vocabulary.vocab_size


def nemo_overrides(path: Path, loss: Loss | None = None) -> str:
    """Return what NeMo-RL's training script takes for a map, and for the loss that it is for."""
    words = [_override("teachers.0.projection_matrix_path", path)]
    if loss is not None:
        flags = {"gold_loss": loss != "p-kl", "xtoken_loss": loss == "h-kl"}
        words += [f"loss_fn.{name}={str(value).lower()}" for name, value in flags.items()]
    return f"for NeMo-RL 0.8.0: {' '.join(words)}"


def nemo_table_overrides(forward: Path, reverse: Path) -> str:
    """Return what NeMo-RL's drafts take for the two tables."""
    words = (
        "teachers.0.is_cross_tokenizer=true",
        "teachers.0.aligner.projection_matrix_path=null",
        _override("teachers.0.aligner.pseudo_target_path", forward),
        _override("teachers.0.aligner.reverse_pseudo_target_path", reverse),
        "loss_fn.common_indices_from_subtoks=true",
    )
    return f"for NeMo-RL, pull requests 3286 and 4177: {' '.join(words)}"


_PLAIN = re.compile(r"[\w/.+%@:-]+", re.ASCII)
"""Values that Hydra's grammar of overrides takes without quotes."""


def _override(key: str, path: Path) -> str:
    """Return one override as a shell takes it, its value quoted for Hydra where need be."""
    value = os.path.abspath(path)
    if not _PLAIN.fullmatch(value):
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
        value = f"'{escaped}'"
    return shlex.quote(f"{key}={value}")
