"""What a trainer minimizes: distillation from each teacher, plus the student's cross-entropy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from xtok.training.audit import audit
from xtok.training.collator import DistillationCollator
from xtok.training.heads import (
    Head,
    evaluating,
    find_heads,
    logits_of,
    rng_restored,
    router_loss,
    run,
)
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


class DistillationMixin:
    """What trainers of any library share: an objective, its teachers, and what they log.

    Each logged `loss` comes with `cross_entropy`, `distillation` and `coverage` (the share of the
    targets that are in a chunk), means over the same optimizer steps and over all processes. An
    evaluation has `eval_loss`, `eval_cross_entropy` and `eval_distillation`, means over all of it,
    and `eval_bits_per_byte`, the cross-entropy by what the student's targets are long.
    """

    loss_is_scaled_for_ga = True

    accelerator: Any
    model_wrapped: Any
    compute_loss_context_manager: Any
    _prepare_inputs: Any
    objective: Objective
    teachers: Sequence[Any]  # models; None for stored predictions
    hidden_states: bool | None = None  # as `find_heads` takes it
    router_aux_loss_coef: float | None = None  # TRL's; the model's own if None
    _headed: Any = None  # the model whose heads these are
    _heads: Sequence[Head | None] = ()  # of the student and its teachers
    _notes: Sequence[str] = ()
    audit: bool = True  # whether the first batch is still to be compared with the libraries
    audited_collator: Any  # that made it
    _sums: Tensor | None = None
    _eval_sums: Tensor | None = None  # of three terms, of what each is a mean over, and of bytes
    _steps = 0  # optimizer steps that are in the sums

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the terms with the total."""
        if "loss" in logs and self._sums is not None:
            sums = self.accelerator.reduce(self._sums, "sum") / self._steps
            logs |= dict(zip(LossTerms._fields[1:], sums.tolist(), strict=True))
            if not logs["router"]:
                del logs["router"]
            self._sums, self._steps = None, 0
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def count_all(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """Count the prepared batches of an optimizer's step, for `compute_loss`.

        Each gets its `count`, and their sum over all processes as `totals`, which is returned:
        int64 `[1 + teachers]`. With dynamic scaling, each also gets `whole`, which takes a pass
        over them without gradients: the factor of the first depends on the last.
        """
        self._steps += 1
        device = self.accelerator.device
        total = torch.zeros(1 + len(self.objective.losses), dtype=torch.int64, device=device)
        for batch in batches:
            batch["count"] = self.objective.count(batch)
            total += batch["count"]
        summed: Tensor = self.accelerator.reduce(total, "sum")
        for batch in batches:
            batch["totals"] = summed
        dynamic = self.objective.combine.dynamic_scaling
        if dynamic and len(batches) * self.accelerator.num_processes > 1:
            whole = self._whole(batches)
            for batch in batches:
                batch["whole"] = whole
        return summed

    def _whole(self, batches: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Return the distillation and cross-entropy of a step's batches on all processes."""
        again = rng_restored(self.accelerator.device)
        with torch.no_grad(), self.compute_loss_context_manager(), again:
            self.model_wrapped.train()
            terms = [
                self._terms(self.model_wrapped, batch, None, self.objective) for batch in batches
            ]
        parts = torch.stack([torch.stack([t.distillation, t.cross_entropy]) for t in terms])
        distillation, cross_entropy = self.accelerator.reduce(parts.sum(0), "sum")
        return distillation, cross_entropy

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the prepared batch of what the library hands to `compute_loss`."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of one batch: in training its share, in evaluation its mean.

        Processes average their gradients, so a share of all their terms is multiplied by their
        number.
        """
        batch = self.prepared(inputs)
        outputs = run(model, batch) if return_outputs else None
        if "totals" not in batch and not torch.is_grad_enabled():
            loss = self._evaluated(model, batch, outputs)
            return (loss, outputs) if return_outputs else loss
        terms = self._terms(model, batch, outputs, self.objective)
        loss = terms.loss
        if "totals" in batch:
            new = torch.stack([term.float() for term in terms[1:]])
            self._sums = new if self._sums is None else self._sums + new
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _evaluated(self, model: Any, batch: dict[str, Any], outputs: Any) -> Tensor:
        """Return the loss of a batch, and keep the sums that its parts are means of."""
        batch["count"] = count = self.objective.count(batch)
        plain = replace(self.objective, combine=CombineConfig())  # whose parts are all made
        terms = self._terms(model, batch, outputs, plain)
        weights = teacher_weights(self.objective.teacher_weights, len(count) - 1)
        of_teachers = sum(n * weight for n, weight in zip(count[1:], weights, strict=True))
        chunks = torch.as_tensor(of_teachers / (sum(weights) or 1), device=count.device)
        means = torch.stack([terms.cross_entropy, terms.distillation, terms.router]).float()
        numbers = torch.stack([count[0], chunks, count[0]]).float()
        num_bytes = numbers.new_zeros(())
        if isinstance(self.audited_collator, DistillationCollator):
            lengths = torch.from_numpy(self.audited_collator.student.table.lengths)
            num_bytes = lengths[batch["targets"][batch["targets"] >= 0].cpu()].sum().to(numbers)
        new = torch.cat([means * numbers, numbers, num_bytes[None]])
        self._eval_sums = new if self._eval_sums is None else self._eval_sums + new
        return self._loss_of(*means)

    def _loss_of(self, cross_entropy: Tensor, distillation: Tensor, router: Tensor) -> Tensor:
        weights = weights_of(self.objective.combine, distillation, cross_entropy)
        return weights[0] * distillation + weights[1] * cross_entropy + router

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate; the loss and its parts are means over all targets and chunks."""
        self._eval_sums = None
        output = super().evaluation_loop(  # type: ignore[misc]
            *args, metric_key_prefix=metric_key_prefix, **kwargs
        )
        if self._eval_sums is not None:
            sums, numbers, num_bytes = self.accelerator.reduce(self._eval_sums, "sum").split(
                [3, 3, 1]
            )
            means = sums / numbers.clamp(min=1)
            found = {
                "loss": self._loss_of(*means),
                "cross_entropy": means[0],
                "distillation": means[1],
            }
            if num_bytes:
                found["bits_per_byte"] = sums[0] / math.log(2) / num_bytes[0]
            output.metrics.update(
                {f"{metric_key_prefix}_{name}": float(value) for name, value in found.items()}
            )
        return output

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate a batch; whole logits are made only where they are asked for."""
        if not prediction_loss_only:
            return super().prediction_step(model, inputs, False, *args, **kwargs)  # type: ignore[misc]
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    def _terms(
        self, model: Any, batch: dict[str, Any], outputs: Any, objective: Objective
    ) -> LossTerms:
        """Run the teachers, and without its outputs the student; return what the losses are."""
        models, sides = [model, *self.teachers], [batch, *batch["teachers"]]
        if self._headed is not model:  # evaluation has it without what wraps it in training
            takes = self.objective.takes_hidden
            self._heads, notes = find_heads(models, sides, takes, self.hidden_states)
            for note in notes if notes != self._notes else ():
                self.accelerator.print(f"note: {note}", file=sys.stderr)
            self._headed, self._notes = model, notes
        if self.audit:
            self.audit = False
            with evaluating(self.teachers), self.accelerator.autocast():
                first = audit(models, batch, self.audited_collator, self._heads)
            if self.accelerator.is_main_process:
                first.report()
        if outputs is None:
            outputs = run(model, batch, self._heads[0])
        theirs: list[Any] = []
        with torch.no_grad(), evaluating(self.teachers), self.accelerator.autocast():
            for teacher, side, head in zip(self.teachers, sides[1:], self._heads[1:], strict=True):
                theirs.append(None if teacher is None else logits_of(teacher, side, head))
        router = router_loss(model, outputs, self.router_aux_loss_coef)
        totals, whole = batch.get("totals"), batch.get("whole")
        return objective.terms(outputs.logits, theirs, batch, totals, whole, router)


def require_own_loss(args: Any, compute_loss_func: Any = None) -> None:
    """Raise a `ValueError` for options of a `Trainer` that these trainers' loss does not have."""
    if given := args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor is {given}, and the loss has no smoothing")
    if compute_loss_func is not None:
        raise ValueError("compute_loss_func is given, and would not be called: use loss=")


def require_one_device(args: Any) -> None:
    """Raise an `XtokError` where a `Trainer` would split batches among GPUs by itself."""
    if args.n_gpu > 1:
        raise XtokError(
            f"one process with {args.n_gpu} GPUs would split batches, alignments aside",
            hint="start a process per GPU: torchrun --nproc-per-node N script.py",
        )


def on_device(teacher: Any, device: torch.device) -> Any:
    """Return a teacher on a device, unless it was spread over several, as `device_map` does.

    Accelerate's `prepare_model` would take it for the model that is trained.
    """
    if not hasattr(teacher, "hf_device_map") and next(teacher.parameters()).device != device:
        teacher.to(device)
    return teacher


def keep_batches(accelerator: Any) -> None:
    """Let each process read its share of an iterable dataset.

    By default, Accelerate reads it in one process, and cuts batches for the others, where rows have
    to be of one length and values tensors.

    Raises:
        XtokError: if that is asked for.
    """
    config = accelerator.dataloader_config
    if config.dispatch_batches:
        raise XtokError(
            "dispatch_batches=True would cut batches, alignments aside",
            hint="leave it out of accelerator_config: each process reads its rows of the dataset",
        )
    config.dispatch_batches = False
