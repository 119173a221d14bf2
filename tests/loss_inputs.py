"""Inputs of losses: alignments, batches, maps on the CPU, and the values of NeMo-RL's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_maps import built
from numpy.typing import NDArray

import xtok
from xtok.alignment.aligner import ShiftedAlignment
from xtok.loss_names import LOSS_INFO, LossName
from xtok.tokenizers.pairs import Pair
from xtok.training.losses import EventIndex, event_index, spelling_index
from xtok.training.module import ProjectionModule


def loss_map(name: LossName, pair: Pair) -> Any:
    """Return the map of a loss on the CPU; None if the loss takes no map."""
    kind = LOSS_INFO[name].map
    if kind is None:
        return None
    if kind == "map":
        return ProjectionModule(built(*pair.tokenizers))
    if kind == "events":
        return event_index(xtok.events(*pair.tokenizers))
    return spelling_index(xtok.spellings(pair))


def nemo_values(name: str) -> dict[str, NDArray[Any]]:
    """Load the values of NeMo-RL's code (commit 7ea279a), from scripts/nemo_values.py."""
    return dict(np.load(Path(__file__).with_name("nemo_values") / f"{name}.npz"))


def alignment(
    student: Any, teacher: Any, valid: Any = None, correct: Any = None
) -> ShiftedAlignment[torch.Tensor]:
    """Return the alignment of positions; a chunk at position 0 may begin with token 0."""

    s, t = torch.as_tensor(student), torch.as_tensor(teacher)
    chunks = max(int(s.max()), int(t.max())) + 1
    pair_valid = torch.ones((len(s), chunks)).bool() if valid is None else torch.as_tensor(valid)
    has_start = torch.ones_like(pair_valid)
    has_start[:, 0] = (s[:, :1] != 0).all(1) & (t[:, :1] != 0).all(1)
    return ShiftedAlignment(
        has_start=has_start,
        pair_valid=pair_valid,
        pair_is_correct=pair_valid if correct is None else torch.as_tensor(correct),
        student_exact_partition_mask=torch.zeros_like(s),
        teacher_exact_partition_mask=torch.zeros_like(t),
        student_chunk_id=s,
        teacher_chunk_id=t,
        num_chunks=pair_valid.sum(1),
    )


def event_index_of(width: int, columns: int) -> EventIndex:
    """Return events with one and several tokens on each side."""

    class Events:
        num_events = 4
        student_event = torch.arange(width).numpy() % 4
        teacher_event = torch.arange(columns).numpy() % 4
        shape = (width, columns)

    Events.student_event[:4], Events.teacher_event[:4] = range(4), range(4)
    return event_index(Events)  # type: ignore[arg-type]


def batch_tensors(batch: Any) -> dict[str, Any]:
    """Return all tensors of a batch by name."""
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    for number, side in enumerate(batch["teachers"]):
        tensors |= {f"{number}.{name}": v for name, v in side.items() if torch.is_tensor(v)}
        tensors |= {f"{number}.{name}": v for name, v in vars(side["alignment"]).items()}
    return tensors


def check_same_batch(first: Any, second: Any) -> None:
    """Check that two batches have equal tensors."""
    a, b = batch_tensors(first), batch_tensors(second)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
