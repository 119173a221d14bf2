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
from xtok.maps.binding import at_map_widths, bind_map
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import Pair
from xtok.training.losses.combine import combine, sum_teachers
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.event_kl import EventIndex
from xtok.training.losses.named import BatchLoss, LossName, loss_named, make_loss
from xtok.training.losses.spelling_index import SpellingIndex
from xtok.training.module import ProjectionModule

Loss = LossName | BatchLoss
Projection = ProjectionMap | ProjectionModule | EventMap | SpellingMap | str | PathLike[str]


class LossTerms(NamedTuple):
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

        Add the counts of all batches of an optimizer's step, on all processes: `terms` takes the
        sum as `totals`, and a batch's own as `batch["count"]`, if it is there.
        int64 `[1 + teachers]`, on the batch's device.
        """
        sides = zip(self.losses, batch["teachers"], strict=True)
        counts = [loss.count(batch, side) for loss, side in sides]
        targets: Tensor = batch["targets"]
        return torch.tensor([int((targets >= 0).sum()), *counts], device=targets.device)

    def terms(
        self,
        student_logits: Tensor,
        teacher_logits: Sequence[Tensor | None],
        batch: Mapping[str, Any],
        totals: Tensor | None = None,
        whole: tuple[Tensor, Tensor] | None = None,
    ) -> LossTerms:
        """Return the loss of a batch, or with `totals` its share of that of all, and its parts.

        The shares of batches sum to what one batch of all rows gives, and so do their gradients;
        with `dynamic_scaling`, if all of them are given `whole`, the sums of their distillation
        and of their cross-entropy. One choice is made per batch and not over all: the columns of a
        P-KL with `top_k`.
        """
        targets: Tensor = batch["targets"]
        inside = targets >= 0
        count = batch["count"] if "count" in batch else self.count(batch)
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
            loss = combine(distillation, own, self.combine, whole=whole)
        covered = [_covered(side)[inside].sum() for side in batch["teachers"]]
        coverage = sum(covered, torch.zeros_like(own)) / max(1, len(covered))
        coverage = coverage * (shares[0] / max(1, int(count[0])))
        return LossTerms(loss, own.detach(), distillation.detach(), coverage)


def _covered(side: Mapping[str, Any]) -> Tensor:
    """Return which of the student's positions predict what the loss compares, bool `[B, T]`."""
    if "stored" in side:
        return torch.nn.functional.pad(side["stored"].valid[:, 1:], (0, 1))
    shifted: AlignmentBatch = side["shifted"]
    ids, valid = torch.as_tensor(shifted.student_chunk_id), torch.as_tensor(shifted.pair_valid)
    return (ids >= 0) & valid.gather(1, ids.clamp(min=0))


def make_objective(
    pairs: Sequence[Pair | None],
    losses: Loss | Sequence[Loss],
    projection: Projection | Sequence[Projection | None] | None = None,
    *,
    teacher_weights: Sequence[float] | None = None,
    combine: CombineConfig | None = None,
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
) -> Objective:
    """Return the objective of a student and its teachers.

    Args:
        pairs: for each teacher, the pair of the student and this teacher, which its map must be
            of; None for stored predictions. A collator has them as `pairs`.
        losses: a name or a `BatchLoss`, for all teachers or one for each.
        projection: a map, its file or its module, for all teachers or one for each; for
            `event-kl` an event map or its file, for `csd` a spelling map or its file; None for
            losses without a map.
        teacher_weights: as in `sum_teachers`.
        combine: the defaults if None.
        temperature: of the losses given by name.
        device: where the maps go.

    Raises:
        XtokError: if a loss needs a map and there is none, a map is of other tokenizers, its sides
            are swapped, or a loss of stored predictions has a model for a teacher.
        ValueError: if numbers of losses, maps and teachers do not fit.
    """
    names = _one_each("losses", losses, len(pairs))
    maps = _one_each("maps", projection, len(pairs))
    of_teachers = []
    for pair, loss, source in zip(pairs, names, maps, strict=True):
        if not isinstance(loss, BatchLoss):
            module = _artefact(loss, source, pair, device)
            loss = make_loss(loss, module=module, temperature=temperature)
        of_teachers.append(loss)
    return Objective(
        losses=of_teachers, teacher_weights=teacher_weights, combine=combine or CombineConfig()
    )


def _one_each(what: str, values: Any, count: int) -> list[Any]:
    one_each = list(values) if isinstance(values, list | tuple) else [values] * count
    if len(one_each) != count:
        raise ValueError(f"{len(one_each)} {what} for {count} teachers")
    return one_each


def _artefact(
    name: LossName, source: Any, pair: Pair | None, device: torch.device | str
) -> ProjectionModule | EventIndex | SpellingIndex | None:
    """Return what a loss takes, on its device, if it is of these tokenizers."""
    row = loss_named(name)
    if row.is_stored is not (pair is None):
        what = "stored predictions" if row.is_stored else "a model as its teacher"
        hint = "topk-kl goes with a TopKCollator, every other loss with a DistillationCollator"
        raise XtokError(f"{name} needs {what}", hint=hint)
    if row.artefact is None or pair is None:
        return None
    if isinstance(source, ProjectionModule) and source.learnable:
        raise XtokError(
            "the map is learnable, and a trainer optimizes only its model",
            hint="train it in your own loop, as scripts/examples/distill.py does, then give the "
            "map that `to_map` returns",
        )
    if isinstance(source, str | PathLike):
        source = row.artefact.of_file.load(source)
    projection = source.map if isinstance(source, ProjectionModule) else source
    if not isinstance(projection, row.artefact.of_file):
        return None
    bind_map(at_map_widths(pair, projection), projection)
    artefact: ProjectionModule | EventIndex | SpellingIndex = (
        row.artefact.to_torch(source) if source is projection else source
    )
    return artefact.to(device)


class DistillationMixin:
    """What trainers of any library share: an objective, its teachers, and what they log.

    Each logged `loss` comes with `cross_entropy`, `distillation` and `coverage` (the share of the
    targets that are in a chunk), means over the same optimizer steps and over all processes.
    """

    loss_is_scaled_for_ga = True

    state: Any
    accelerator: Any
    model_wrapped: Any
    compute_loss_context_manager: Any
    objective: Objective
    teachers: Sequence[Any]  # models; None for stored predictions
    _sums: Tensor | None = None
    _logged_at = 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the terms beside the total."""
        if "loss" in logs and self._sums is not None:
            steps = max(1, self.state.global_step - self._logged_at)
            sums = self.accelerator.reduce(self._sums, "sum") / steps
            logs |= dict(zip(LossTerms._fields[1:], sums.tolist(), strict=True))
            self._sums, self._logged_at = None, self.state.global_step
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def count_all(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """Count the prepared batches of an optimizer's step, for `compute_loss`.

        Each gets its `count`, and their sum over all processes as `totals`, which is returned:
        int64 `[1 + teachers]`. With dynamic scaling, each also gets `whole`, which takes a pass
        over them without gradients: the factor of the first depends on the last.
        """
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
        device = self.accelerator.device
        generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
        # What is drawn here, by dropout, is drawn again when gradients are computed.
        with torch.no_grad(), self.compute_loss_context_manager(), generators:
            self.model_wrapped.train()
            terms = [self._terms(self.model_wrapped, batch)[0] for batch in batches]
        parts = torch.stack([torch.stack([t.distillation, t.cross_entropy]) for t in terms])
        distillation, own = self.accelerator.reduce(parts.sum(0), "sum")
        return distillation, own

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
        terms, of_student = self._terms(model, batch)
        loss = terms.loss
        if "totals" in batch:
            new = torch.stack([term.float() for term in terms[1:]])
            self._sums = new if self._sums is None else self._sums + new
            loss = loss * self.accelerator.num_processes
        return (loss, of_student) if return_outputs else loss

    def _terms(self, model: Any, batch: dict[str, Any]) -> tuple[LossTerms, Any]:
        """Run the models; return what their outputs add up to, and the student's."""

        def run(of: Any, side: dict[str, Any]) -> Any:
            mask = side["attention_mask"]
            return of(input_ids=side["input_ids"], attention_mask=mask, use_cache=False)

        of_student, logits = run(model, batch), []
        with torch.no_grad():
            for teacher, side in zip(self.teachers, batch["teachers"], strict=True):
                if teacher is not None:
                    teacher.eval()  # DeepSpeed's returns None
                logits.append(None if teacher is None else run(teacher, side).logits)
        terms = self.objective.terms(
            of_student.logits, logits, batch, batch.get("totals"), batch.get("whole")
        )
        return terms, of_student


def require_one_device(args: Any) -> None:
    """Raise an `XtokError` where a `Trainer` would split batches among GPUs by itself."""
    if args.n_gpu > 1:
        raise XtokError(
            f"one process with {args.n_gpu} GPUs would split batches, alignments aside",
            hint="start a process per GPU: torchrun --nproc-per-node N script.py",
        )
