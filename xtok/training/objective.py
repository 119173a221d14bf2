"""What a trainer minimizes: distillation from each teacher, plus the student's cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.alignment.aligner import AlignmentBatch
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer
from xtok.tokenizers import pair as pair_of
from xtok.training.collator import DistillationCollator
from xtok.training.losses.combine import combine, sum_teachers
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.event_kl import EventIndex, event_index
from xtok.training.losses.named import BatchLoss, LossName, make_loss
from xtok.training.module import ProjectionModule

Loss = LossName | BatchLoss
Projection = ProjectionMap | ProjectionModule | EventMap | str | PathLike[str]


class Terms(NamedTuple):
    """What an objective adds up, each a scalar; all but `loss` without a gradient."""

    loss: Tensor
    cross_entropy: Tensor  # of the student alone; 0 if it does not count
    distillation: Tensor  # the weighted sum over the teachers
    coverage: Tensor  # the share of the targets that are in a chunk, a mean over the teachers


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A student's loss on a batch of `prepare`, exact over accumulated batches and processes."""

    losses: Sequence[BatchLoss]  # one per teacher
    teacher_weights: Sequence[float] | None = None  # each is 1 if None
    combine: CombineConfig = field(default_factory=CombineConfig)

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the terms of each mean: of the cross-entropy, then of each teacher's loss.

        Add the counts of all batches of an optimizer's step, on all processes: `__call__` takes
        the sum as `totals`. int64 `[1 + teachers]`, on the batch's device.
        """
        sides = zip(self.losses, batch["teachers"], strict=True)
        counts = [loss.count(batch, side) for loss, side in sides]
        targets: Tensor = batch["targets"]
        return torch.tensor([int((targets >= 0).sum()), *counts], device=targets.device)

    def __call__(
        self,
        student_logits: Tensor,
        teacher_logits: Sequence[Tensor],
        batch: Mapping[str, Any],
        totals: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch; with `totals`, its share of the loss of all batches.

        The shares of batches sum to what one batch of all rows gives, and so do their gradients.
        Two choices are made per batch and not over all: the columns of a P-KL with `top_k`, and
        the factor of `dynamic_scaling`.
        """
        return self.terms(student_logits, teacher_logits, batch, totals).loss

    def terms(
        self,
        student_logits: Tensor,
        teacher_logits: Sequence[Tensor],
        batch: Mapping[str, Any],
        totals: Tensor | None = None,
    ) -> Terms:
        """Return the loss of a batch, as `__call__` does, and what it is made of."""
        targets: Tensor = batch["targets"]
        inside = targets >= 0
        count = self.count(batch)
        shares = (count / (count if totals is None else totals.to(count)).clamp(min=1)).tolist()
        own = student_logits.new_zeros((), dtype=torch.float32)
        if self.combine.dynamic_scaling or self.combine.cross_entropy_weight > 0:
            rows = student_logits[inside].float()
            own = torch.nn.functional.cross_entropy(rows, targets[inside], reduction="sum")
            own = own * (shares[0] / max(1, int(count[0])))
        sides = zip(self.losses, teacher_logits, batch["teachers"], strict=True)
        parts = [
            loss(student_logits, logits, batch, side) * share
            for (loss, logits, side), share in zip(sides, shares[1:], strict=True)
        ]
        if not parts:
            loss, distillation = self.combine.cross_entropy_weight * own, torch.zeros_like(own)
        else:
            distillation = sum_teachers(parts, self.teacher_weights)
            loss = combine(distillation, own, self.combine)
        covered = [_in_chunks(side["shifted"])[inside].sum() for side in batch["teachers"]]
        coverage = sum(covered, torch.zeros_like(own)) / max(1, len(covered))
        coverage = coverage * (shares[0] / max(1, int(count[0])))
        return Terms(loss, own.detach(), distillation.detach(), coverage)


def _in_chunks(shifted: AlignmentBatch) -> Tensor:
    """Return which of the student's positions predict into a chunk that counts, bool `[B, T]`."""
    ids, valid = torch.as_tensor(shifted.student_chunk_id), torch.as_tensor(shifted.pair_valid)
    return (ids >= 0) & valid.gather(1, ids.clamp(min=0))


def make_objective(
    collator: DistillationCollator,
    losses: Loss | Sequence[Loss],
    projection: Projection | Sequence[Projection | None] | None = None,
    *,
    teacher_weights: Sequence[float] | None = None,
    combine: CombineConfig | None = None,
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
) -> Objective:
    """Return the objective of a collator's student and teachers.

    Args:
        collator: its tokenizers are what the maps must belong to.
        losses: a name or a `BatchLoss`, for all teachers or one for each.
        projection: a map, its file or its module, for all teachers or one for each; for
            `event-kl` an event map or its file; None for losses without a map.
        teacher_weights: as in `sum_teachers`.
        combine: the defaults if None.
        temperature: of the losses given by name.
        device: where the maps go.

    Raises:
        XtokError: if a loss needs a map and there is none, or a map is of other tokenizers.
        ValueError: if numbers of losses, maps and teachers do not fit.
    """
    teachers = collator.teachers
    names = _one_each("losses", losses, len(teachers))
    maps = _one_each("maps", projection, len(teachers))
    made = []
    for teacher, loss, of_pair in zip(teachers, names, maps, strict=True):
        module: ProjectionModule | EventIndex | None = None
        if of_pair is not None:
            read = _event_index if loss == "event-kl" else _module
            sides = (collator.student, teacher)
            if loss == "teacher-to-student-kl":
                sides = (teacher, collator.student)
            module = read(of_pair, *sides).to(device)
        if not isinstance(loss, BatchLoss):
            loss = make_loss(loss, module=module, temperature=temperature)
        made.append(loss)
    return Objective(
        losses=made, teacher_weights=teacher_weights, combine=combine or CombineConfig()
    )


def _one_each(what: str, given: Any, count: int) -> list[Any]:
    values = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(values) != count:
        raise ValueError(f"{len(values)} {what} for {count} teachers")
    return values


def _module(given: Any, student: Tokenizer, teacher: Tokenizer) -> ProjectionModule:
    """Return a map as a module, if it is of these tokenizers."""
    module = given if isinstance(given, ProjectionModule) else ProjectionModule(given)
    if module.learnable:
        raise XtokError(
            "the map is learnable, and a trainer optimizes only its model",
            hint="train it in your own loop, as scripts/examples/distill.py does, then give the "
            "map that `to_map` returns",
        )
    pair_of(student, teacher, of=module.map).admit(module.map)
    return module


def _event_index(given: Any, student: Tokenizer, teacher: Tokenizer) -> EventIndex:
    """Return the index of an event map, if it is of these tokenizers."""
    events = given if isinstance(given, EventMap) else EventMap.load(given)
    return event_index(pair_of(student, teacher, of=events).admit(events, name="the event map"))
