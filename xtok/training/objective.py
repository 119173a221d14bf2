"""The objective of a trainer: distillation from each teacher plus the student's cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from xtok._lib.fields import OptionDetails, checked_value
from xtok.errors import XtokError
from xtok.loss_names import LossName
from xtok.maps.map_arguments import AnyMapLike, bind_map
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import Batch, SideBatch, predicted
from xtok.training.losses.chunks import chunks_in
from xtok.training.losses.config import ChunkFilter, CombineConfig
from xtok.training.losses.cross_entropy import loss_weights, plan_cross_entropy
from xtok.training.losses.logits import AnyLogits
from xtok.training.losses.one_pass import one_pass
from xtok.training.losses.registry import BatchLoss, LossSpec, loss_spec, make_loss, unused_map
from xtok.training.module import ProjectionModule

LossArgument: TypeAlias = LossName | BatchLoss
MapArgument: TypeAlias = AnyMapLike | ProjectionModule


class LossTerms(NamedTuple):
    """The loss of a batch and its parts, as scalars. Only `loss` has a gradient."""

    loss: Tensor
    cross_entropy: Tensor  # the student's cross-entropy; 0 if its weight is 0
    distillation: Tensor  # weighted sum of the teachers' losses
    coverage: Tensor  # share of the targets that are in a chunk, averaged over the teachers
    router: Tensor  # weighted router loss of a mixture of experts; 0 for other models


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The student's loss, independent of gradient accumulation and the number of processes."""

    losses: Sequence[BatchLoss]  # one loss per teacher
    teacher_weights: Sequence[float] | None = None  # None: each weight is 1
    combine: CombineConfig = field(default_factory=CombineConfig)

    def __post_init__(self) -> None:
        distils = self.combine.distillation_weight and any(self.weight_by_teacher)
        if not (distils or self.combine.cross_entropy_weight or self.combine.dynamic_scaling):
            raise XtokError(
                "the weights of distillation and cross-entropy are both 0, so nothing is trained",
                hint="use a cross_entropy_weight above 0, or a teacher with weights above 0",
            )

    @property
    def weight_by_teacher(self) -> list[float]:
        """The weight of each teacher's loss. Invalid weights raise a `ValueError`."""
        count = len(self.losses)
        weights = [1.0] * count if self.teacher_weights is None else list(self.teacher_weights)
        if len(weights) != count:
            raise ValueError(f"{len(weights)} teacher_weights for {count} teachers")
        name, details = "a teacher's weight", OptionDetails(help="", min=0)
        return [checked_value(name, weight, float, details) for weight in weights]

    @property
    def hidden_support(self) -> list[bool]:
        """Whether `HiddenLogits` are supported for the student, then for each teacher."""
        per_teacher = [loss.takes_hidden for loss in self.losses]
        return [all(per_teacher), *per_teacher]

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets, then the number of terms of each teacher's loss.

        The result is int64 `[1 + teachers]`. The terms of most losses are chunks. Sum the results
        over all processes and all batches of an optimizer step, and pass the sums to `terms` as
        `totals`.
        """
        sides = zip(self.losses, batch["teachers"], strict=True)
        num_targets = (batch["targets"] >= 0).sum()
        counts = [loss.count(batch, side_batch) for loss, side_batch in sides]
        loss_counts = torch.tensor(counts, dtype=torch.int64, device=num_targets.device)
        return torch.cat([num_targets[None], loss_counts])

    def terms(
        self,
        student_logits: AnyLogits,
        teacher_logits: Sequence[AnyLogits | None],
        batch: Batch,
        totals: Tensor | None = None,
        step_losses: tuple[Tensor, Tensor] | None = None,
        router: Tensor | None = None,
    ) -> LossTerms:
        """Return the loss of a batch and its parts.

        With `totals`, return the batch's share of the loss of an optimizer step. The shares of all
        batches in a step, and their gradients, add up to the loss and the gradient of one batch
        with all rows. P-KL with `top_k` is an exception, because P-KL selects the `top_k` columns
        for each batch.

        Args:
            student_logits: `[B, T_s, V_s]`, or `HiddenLogits` if `hidden_support` is True for the
                student.
            teacher_logits: `[B, T_t, V_t]` for each teacher; None for stored predictions.
            batch: a batch from `prepare`.
            totals: the sums of `count` over all batches of the step.
            step_losses: distillation loss and cross-entropy of the step, for `dynamic_scaling`.
            router: the student's `router_loss`.
        """
        count = batch["count"] if "count" in batch else self.count(batch)
        shares = count / (count if totals is None else totals.to(count)).clamp(min=1)
        scales = shares * torch.tensor([1.0, *self.weight_by_teacher], device=shares.device)

        def weighted_sum(
            distillation_weight: Tensor | float, cross_entropy_weight: float
        ) -> tuple[Tensor, Tensor, Tensor]:
            factors = [scales[0] * cross_entropy_weight, *(scales[1:] * distillation_weight)]
            factors = factors if cross_entropy_weight else factors[1:]
            total, means = self.means(student_logits, teacher_logits, batch, factors)
            parts = means * scales
            return total, parts[1:].sum(), parts[0]

        if self.combine.dynamic_scaling and step_losses is None:
            with torch.no_grad():
                step_losses = weighted_sum(1.0, 1.0)[1:]
        weights = loss_weights(self.combine, *(step_losses or (shares[0], shares[0])))
        loss, distillation, cross_entropy = weighted_sum(*weights)
        is_target = batch["targets"] >= 0
        covered = [(_is_covered(side_batch) & is_target).sum() for side_batch in batch["teachers"]]
        coverage = sum(covered, torch.zeros_like(cross_entropy)) / max(1, len(covered))
        coverage = coverage * (shares[0] / count[0].clamp(min=1))
        aux = loss.new_zeros(()) if router is None else router.to(loss) * shares[0]
        return LossTerms(loss + aux, cross_entropy, distillation, coverage, aux.detach())

    def means(
        self,
        student: AnyLogits,
        teachers: Sequence[AnyLogits | None],
        batch: Batch,
        factors: Sequence[Tensor | float],
    ) -> tuple[Tensor, Tensor]:
        """Return Σ factor · mean, and the means of the cross-entropy and each teacher's loss.

        The means, `[1 + teachers]`, have no gradient. The first factor belongs to the
        cross-entropy. Without this factor, the cross-entropy is not computed, and its mean is 0.
        """
        sides = zip(self.losses, teachers, batch["teachers"], strict=True)
        plans = [loss.plan(student, logits, batch, side) for loss, logits, side in sides]
        left_out = 1 + len(plans) - len(factors)
        if not left_out:
            plans.insert(0, plan_cross_entropy(student, batch["targets"]))
        total, means = one_pass(student, plans, factors)
        return total, torch.stack([torch.zeros_like(means[0])] * left_out + means)


def _is_covered(side_batch: SideBatch) -> Tensor:
    if "stored" in side_batch:
        return predicted(side_batch["stored"].valid, fill=False)
    chunks = chunks_in(side_batch["shifted"], ChunkFilter())
    return chunks.student < chunks.total


def make_objective(
    pairs: Sequence[Pair | None],
    losses: LossArgument | Sequence[LossArgument],
    map: MapArgument | Sequence[MapArgument | None] | None = None,
    *,
    config: Any = None,
    teacher_weights: Sequence[float] | None = None,
    combine: CombineConfig | None = None,
    device: torch.device | str = "cpu",
) -> Objective:
    """Build the objective of a student and its teachers.

    >>> collator = xtok.DistillationCollator("bytes", "bytes")
    >>> objective = xtok.training.make_objective(collator.pairs, "alm")
    >>> objective.count(xtok.training.prepare(collator(["hi"]))).tolist()  # targets, chunks
    [1, 1]

    Each of `losses`, `map` and `config` is one value for all teachers, or a list with one value per
    teacher.

    Args:
        pairs: the `pairs` of a collator, one per teacher; None for stored predictions.
        losses: a name or a `BatchLoss`.
        map: the map that the loss requires: a map, the path of its file, or a `ProjectionModule`.
        config: the options of the losses (see `make_loss`).
        teacher_weights: weights of the teachers' losses, each 1 by default.
        combine: weights of the distillation loss and the cross-entropy.
        device: device of the maps.

    Raises:
        XtokError: if a map is missing, unused or belongs to other tokenizers, if stored predictions
            do not match the losses, or if all weights are 0.
        ValueError: if the numbers of losses, maps and teachers differ.
    """
    names = _per_teacher("losses", losses, len(pairs))
    maps = _per_teacher("maps", map, len(pairs))
    configs = _per_teacher("configs", config, len(pairs))
    mapped_losses = [x for x in names if not isinstance(x, BatchLoss) and loss_spec(x).map]
    if not mapped_losses and any(x is not None for x in maps):
        raise unused_map(names[0] if isinstance(names[0], str) else "a BatchLoss")
    teacher_losses = [
        loss if isinstance(loss, BatchLoss) else _named_loss(loss_spec(loss), device, *inputs)
        for loss, *inputs in zip(names, pairs, maps, configs, strict=True)
    ]
    return Objective(
        losses=teacher_losses, teacher_weights=teacher_weights, combine=combine or CombineConfig()
    )


def _per_teacher(name: str, values: Any, count: int) -> list[Any]:
    if not count:
        return []
    per_teacher = list(values) if isinstance(values, list | tuple) else [values] * count
    if len(per_teacher) != count:
        raise ValueError(f"{len(per_teacher)} {name} for {count} teachers")
    return per_teacher


def _named_loss(
    spec: LossSpec, device: torch.device | str, pair: Pair | None, any_map: Any, config: Any
) -> BatchLoss:
    """Return a teacher's loss. Its map must belong to the pair of the student and the teacher."""
    if spec.is_stored is not (pair is None):
        need = "stored predictions" if spec.is_stored else "a model as its teacher"
        hint = "use a TopKCollator for topk-kl, and a DistillationCollator for every other loss"
        raise XtokError(f"{spec.name} needs {need}", hint=hint)
    if pair is not None and spec.name == "same-tokenizer" and not pair.is_same:
        student, teacher = pair.student.model_id, pair.teacher.model_id
        raise XtokError(
            f"the loss same-tokenizer needs equal tokenizers, but {student} and {teacher} differ",
            hint="use the loss 'event-kl' with a map from `xtok events STUDENT TEACHER`",
        )
    if spec.map is None or pair is None:
        return make_loss(spec.name, config=config)
    if isinstance(any_map, ProjectionModule) and any_map.learnable:
        raise XtokError(
            "the map is learnable, but a trainer optimizes only the student",
            hint="train the map in your own loop, as scripts/examples/distill.py does, then pass "
            "the map that `to_map` returns",
        )
    any_map, on_device = spec.map.file_type.of(any_map), None
    stored_map = any_map.map if isinstance(any_map, ProjectionModule) else any_map
    if isinstance(stored_map, spec.map.file_type):
        bind_map(stored_map, pair)
        on_device = spec.map.on_device(any_map).to(device)
    return make_loss(spec.name, map=on_device, config=config)
