"""What a trainer minimizes: distillation from each teacher, plus the student's cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import bind_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import Pair
from xtok.training.losses.chunks import chunks_in
from xtok.training.losses.combine import teacher_weights, weights_of
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.cross_entropy import plan_cross_entropy
from xtok.training.losses.event_kl import EventIndex
from xtok.training.losses.logits import AnyLogits
from xtok.training.losses.one_pass import Plan, one_pass
from xtok.training.losses.registry import BatchLoss, LossName, loss_named, make_loss
from xtok.training.losses.spelling_index import SpellingIndex
from xtok.training.module import ProjectionModule

Loss = LossName | BatchLoss
AnyMap = ProjectionMap | ProjectionModule | EventMap | SpellingMap | str | PathLike[str]


class LossTerms(NamedTuple):
    """What an objective adds up, each a scalar; all but `loss` without a gradient."""

    loss: Tensor
    cross_entropy: Tensor  # of the student alone; 0 if it does not count
    distillation: Tensor  # the weighted sum over the teachers
    coverage: Tensor  # the share of the targets that are in a chunk, a mean over the teachers
    router: Tensor  # the loss of a mixture of experts' router, as its library weighs it; else 0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A student's loss on a batch of `prepare`, exact over accumulated batches and processes."""

    losses: Sequence[BatchLoss]  # one per teacher
    teacher_weights: Sequence[float] | None = None  # each is 1 if None
    combine: CombineConfig = field(default_factory=CombineConfig)

    @property
    def takes_hidden(self) -> list[bool]:
        """Of whose logits `HiddenLogits` will do: the student's, then each teacher's."""
        of_teachers = [loss.takes_hidden for loss in self.losses]
        return [all(of_teachers), *of_teachers]

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the terms of each mean: of the cross-entropy, then of each teacher's loss.

        Add the counts of all batches of an optimizer's step, on all processes: `terms` takes the
        sum as `totals`, and a batch's own as `batch["count"]`, if it is there.
        int64 `[1 + teachers]`, on the batch's device.
        """
        sides = zip(self.losses, batch["teachers"], strict=True)
        num_targets = (batch["targets"] >= 0).sum()
        counts = [loss.count(batch, side) for loss, side in sides]
        return torch.stack(
            [num_targets, *(torch.as_tensor(n, device=num_targets.device) for n in counts)]
        )

    def terms(
        self,
        student_logits: AnyLogits,
        teacher_logits: Sequence[AnyLogits | None],
        batch: Mapping[str, Any],
        totals: Tensor | None = None,
        whole: tuple[Tensor, Tensor] | None = None,
        router: Tensor | None = None,
    ) -> LossTerms:
        """Return the loss of a batch, or with `totals` its share of that of all, and its parts.

        The shares of batches sum to what one batch of all rows gives, and so do their gradients;
        with `dynamic_scaling`, if all of them are given `whole`, the sums of their distillation
        and of their cross-entropy. One choice is made per batch and not over all: the columns of a
        P-KL with `top_k`.

        `router` is the student's `heads.router_loss`, which is added, weighed by the batch's
        targets. Logits may be `HiddenLogits` where `takes_hidden` is true. Each block of the
        student's is made once, for the cross-entropy and the losses of all teachers; with
        `dynamic_scaling` and without `whole` twice, as the factor is not known before.
        """
        count = batch["count"] if "count" in batch else self.count(batch)
        shares = count / (count if totals is None else totals.to(count)).clamp(min=1)
        sides = [*zip(self.losses, teacher_logits, batch["teachers"], strict=True)]
        given = student_logits, sides, batch, shares
        if self.combine.dynamic_scaling and whole is None:
            with torch.no_grad():
                whole = self._weighed(*given, (1.0, 1.0))[1:]
        weights = weights_of(self.combine, *(whole or (shares[0], shares[0])))
        loss, distillation, cross_entropy = self._weighed(*given, weights)
        inside = batch["targets"] >= 0
        covered = [(_covered(side) & inside).sum() for side in batch["teachers"]]
        coverage = sum(covered, torch.zeros_like(cross_entropy)) / max(1, len(covered))
        coverage = coverage * (shares[0] / count[0].clamp(min=1))
        own = loss.new_zeros(()) if router is None else router.to(loss) * shares[0]
        return LossTerms(loss + own, cross_entropy, distillation, coverage, own.detach())

    def _weighed(
        self,
        student_logits: AnyLogits,
        sides: Sequence[tuple[BatchLoss, Any, Mapping[str, Any]]],
        batch: Mapping[str, Any],
        shares: Tensor,
        weights: tuple[Tensor | float, Tensor | float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sum, and detached its parts: distillation and cross-entropy."""
        of_distillation, of_cross_entropy = weights
        of_teachers = teacher_weights(self.teacher_weights, len(sides))
        losses: list[tuple[Plan, Tensor, Tensor | float]] = []  # each with its share and weight
        if of_cross_entropy:
            plan = plan_cross_entropy(student_logits, batch["targets"])
            losses.append((plan, shares[0], of_cross_entropy))
        for (loss, logits, side), share, weight in zip(sides, shares[1:], of_teachers, strict=True):
            plan = loss.plan(student_logits, logits, batch, side)
            losses.append((plan, share * weight, of_distillation))
        zero = torch.zeros_like(shares[0])
        if not losses:
            return zero, zero, zero
        plans, of_plans, weighs = zip(*losses, strict=True)
        weighted = [weight * share for weight, share in zip(weighs, of_plans, strict=True)]
        total, means = one_pass(student_logits, plans, weighted)
        parts = [mean * share for mean, share in zip(means, of_plans, strict=True)]
        cross_entropy = parts.pop(0) if of_cross_entropy else zero
        return total, sum(parts, zero), cross_entropy


def _covered(side: Mapping[str, Any]) -> Tensor:
    """Return which of the student's positions predict what the loss compares, bool `[B, T]`."""
    if "stored" in side:
        return torch.nn.functional.pad(side["stored"].valid[:, 1:], (0, 1))
    chunks = chunks_in(side, (False, False))
    return chunks.student < chunks.total


def make_objective(
    pairs: Sequence[Pair | None],
    losses: Loss | Sequence[Loss],
    map: AnyMap | Sequence[AnyMap | None] | None = None,
    *,
    config: Any = None,
    teacher_weights: Sequence[float] | None = None,
    combine: CombineConfig | None = None,
    device: torch.device | str = "cpu",
) -> Objective:
    """Return the objective of a student and its teachers.

    Args:
        pairs: for each teacher, the pair of the student and this teacher, which its map must be
            of; None for stored predictions. A collator has them as `pairs`.
        losses: a name or a `BatchLoss`, for all teachers or one for each.
        map: a map, its file or its module, for all teachers or one for each; for `event-kl` an
            event map or its file, for `csd` a spelling map or its file; None for losses without a
            map.
        config: the options of losses given by name, for all teachers or one for each, as
            `make_loss` takes them.
        teacher_weights: of the teachers' losses; each is 1 if None.
        combine: the defaults if None.
        device: where the maps go.

    Raises:
        XtokError: if a loss needs a map and there is none, a map is of other tokenizers, its sides
            are swapped, or a loss of stored predictions has a model for a teacher.
        ValueError: if numbers of losses, maps and teachers do not fit.
    """
    names = _one_each("losses", losses, len(pairs))
    maps = _one_each("maps", map, len(pairs))
    configs = _one_each("configs", config, len(pairs))
    of_teachers = []
    for pair, loss, given, options in zip(pairs, names, maps, configs, strict=True):
        if not isinstance(loss, BatchLoss):
            loss = make_loss(loss, map=_bound(loss, given, pair, device), config=options)
        of_teachers.append(loss)
    return Objective(
        losses=of_teachers, teacher_weights=teacher_weights, combine=combine or CombineConfig()
    )


def _one_each(what: str, values: Any, count: int) -> list[Any]:
    one_each = list(values) if isinstance(values, list | tuple) else [values] * count
    if len(one_each) != count:
        raise ValueError(f"{len(one_each)} {what} for {count} teachers")
    return one_each


def _bound(
    name: LossName, given: Any, pair: Pair | None, device: torch.device | str
) -> ProjectionModule | EventIndex | SpellingIndex | None:
    """Return the map that a loss takes, on its device, if it is of these tokenizers."""
    row = loss_named(name)
    if row.is_stored is not (pair is None):
        what = "stored predictions" if row.is_stored else "a model as its teacher"
        hint = "topk-kl takes a TopKCollator, every other loss a DistillationCollator"
        raise XtokError(f"{name} needs {what}", hint=hint)
    if pair is not None and name == "same-tokenizer" and not pair.is_same:
        student, teacher = pair.student.model_id, pair.teacher.model_id
        raise XtokError(
            f"same-tokenizer needs one tokenizer, and those of {student} and {teacher} differ",
            hint="use event-kl, which takes what `xtok events STUDENT TEACHER` writes",
        )
    if row.map is None or pair is None:
        return None
    if isinstance(given, ProjectionModule) and given.learnable:
        raise XtokError(
            "the map is learnable, and a trainer optimizes only its model",
            hint="train it in your own loop, as scripts/examples/distill.py does, then give the "
            "map that `to_map` returns",
        )
    if isinstance(given, str | PathLike):
        given = row.map.of_file.load(given)
    any_map = given.map if isinstance(given, ProjectionModule) else given
    if not isinstance(any_map, row.map.of_file):
        return None
    bind_map(any_map, pair)
    on_device: ProjectionModule | EventIndex | SpellingIndex = row.map.on_device(given).to(device)
    return on_device
