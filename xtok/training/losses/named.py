"""Losses by name, on batches of the collator: what a training script chooses from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from xtok.errors import XtokError
from xtok.inspection.advice import p_kl_fit
from xtok.training.losses.chunks import count_chunks
from xtok.training.losses.combine import same_tokenizer_kl
from xtok.training.losses.config import (
    ChunkLossConfig,
    GoldConfig,
    PKLConfig,
    SameTokenizerConfig,
)
from xtok.training.losses.event_kl import EventIndex, event_kl
from xtok.training.losses.gold import exact_pairs, gold
from xtok.training.losses.p_kl import p_kl
from xtok.training.losses.teacher_to_student import teacher_to_student_kl
from xtok.training.module import ProjectionModule

LossName = Literal[
    "p-kl", "event-kl", "teacher-to-student-kl", "gold", "h-kl", "same-tokenizer"
]  # fmt: skip
Batch = Mapping[str, Any]


def _chunks(batch: Batch, side: Batch) -> int:
    return count_chunks(side["shifted"])


def _starts(batch: Batch, side: Batch) -> int:
    return count_chunks(side["shifted"], starts_only=True)


@dataclass(frozen=True)
class BatchLoss:
    """A loss as a trainer calls it, on a prepared batch and a teacher's part of it.

    `mean` takes the student's logits, the teacher's, the batch and the teacher's part, and returns
    a scalar, the mean over some terms. `count` takes the batch and the teacher's part, and returns
    how many terms these are: the chunks by default.
    """

    mean: Callable[[Tensor, Tensor, Batch, Batch], Tensor]
    count: Callable[[Batch, Batch], int] = _chunks

    def __call__(
        self, student_logits: Tensor, teacher_logits: Tensor, batch: Batch, side: Batch
    ) -> Tensor:
        """Return the mean."""
        return self.mean(student_logits, teacher_logits, batch, side)


H_KL_THRESHOLD = 0.6
"""The least weight that makes a row a pair for H-KL (NeMo-RL)."""


def make_loss(
    name: LossName,
    *,
    module: ProjectionModule | EventIndex | None = None,
    temperature: float = 1.0,
    reverse_kl: bool = False,
    top_k: int | None = None,
) -> BatchLoss:
    """Return a loss that takes a batch as `prepare` of the collator leaves it.

    Args:
        name: which one.
        module: the map, for `p-kl`, `gold` and `h-kl`; that from the teacher to the student, for
            `teacher-to-student-kl`; the `event_index` of an event map, for `event-kl`. Already on
            its device.
        temperature: as in the configurations.
        reverse_kl: the reverse KL; `teacher-to-student-kl` has none.
        top_k: for `p-kl` and `same-tokenizer`; their own defaults if None.

    Raises:
        XtokError: if the loss needs a map, or an event map, and there is none.
        ValueError: if there is no such loss.
    """
    if name not in get_args(LossName):
        raise ValueError(f"the loss is {name!r}, and must be one of {get_args(LossName)}")
    common: dict[str, Any] = {"temperature": temperature, "reverse_kl": reverse_kl}
    cut: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
    if name == "same-tokenizer":
        same = SameTokenizerConfig(**common, **cut)
        return BatchLoss(
            lambda s, t, batch, side: same_tokenizer_kl(s, t, batch["targets"] >= 0, same),
            lambda batch, side: int((batch["targets"] >= 0).sum()),
        )
    if not isinstance(module, EventIndex if name == "event-kl" else ProjectionModule):
        kind = "an event map" if name == "event-kl" else "a map"
        hint = "give one for each teacher, as projection= of a trainer or module= of make_loss"
        raise XtokError(f"{name} needs {kind}", hint=hint)
    if isinstance(module, EventIndex) or name == "teacher-to-student-kl":
        function: Any = event_kl if name == "event-kl" else teacher_to_student_kl
        plain = ChunkLossConfig(**common)
        return BatchLoss(
            lambda s, t, batch, side: function(s, t, module, side["shifted"], plain), _starts
        )
    if name == "p-kl":
        level, why = p_kl_fit(module.map)
        if level != "good":
            warnings.warn(
                f"this map is not made for P-KL: {why} Build one for it: xtok.get_map(student, "
                'teacher, for_loss="p-kl")',
                stacklevel=2,
            )
        projected = PKLConfig(**common, **cut)
        return BatchLoss(lambda s, t, batch, side: p_kl(s, t, module, side["shifted"], projected))
    threshold = H_KL_THRESHOLD if name == "h-kl" else None
    pairs = exact_pairs(module.map, threshold=threshold).to(module.weights.device)
    paired = GoldConfig(**common)
    return BatchLoss(lambda s, t, batch, side: gold(s, t, pairs, side["shifted"], paired))
