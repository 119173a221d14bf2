"""The base class of the trainers: objective, teachers, logs and evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from xtok.errors import XtokError
from xtok.training.audit import Audit, audit
from xtok.training.batches import Batch, SideBatch
from xtok.training.collator import DistillationCollator
from xtok.training.heads import Head, find_heads
from xtok.training.losses.cross_entropy import combine, cross_entropy
from xtok.training.losses.logits import AnyLogits
from xtok.training.objective import LossTerms, Objective
from xtok.training.running import (
    evaluating,
    logits_of,
    preserve_rng,
    require_id_rows,
    router_loss,
    run,
)

EVALUATION_NOTE = (
    "eval_loss is the training loss, which includes the teachers' losses: to compare runs with and "
    "without teachers, use eval_bits_per_byte"
)


class DistillationTrainer(Trainer):
    """A `Trainer` for an objective and its teachers, with logs and evaluation.

    In addition to `loss`, training logs contain the following averages, over the same optimizer
    steps and all processes:

    - `cross_entropy` and `distillation`, the two parts of the loss;
    - `coverage`, the share of targets in chunks.

    Evaluation logs contain the following averages over all rows of the dataset, without repeated
    rows:

    - `eval_loss`, `eval_cross_entropy` and `eval_distillation`;
    - `eval_bits_per_byte`, the student's cross-entropy in bits, divided by the targets' bytes;
    - `eval_teacher_bits_per_byte`, the same for the teacher (with several teachers,
      `eval_teacher_1_bits_per_byte` and so on).
    """

    loss_is_scaled_for_ga = True

    eval_dataset: Any
    objective: Objective
    distillation_collator: Any  # a `DistillationCollator` or a `TopKCollator`
    teachers: Sequence[Any]  # the teacher models; None for stored predictions
    router_aux_loss_coef: float | None = None  # set by TRL; None: the model's coefficient
    _heads_model: Any = None  # the student for which `_heads` are valid
    _heads: Sequence[Head | None] = ()  # heads of the student and its teachers
    _notes: Sequence[str] = ()
    _evaluation: _EvaluationSums | None = None  # sums during an evaluation, else None
    _is_explained = False  # whether `EVALUATION_NOTE` has been printed

    def __init__(
        self, *args: Any, hidden_states: bool | None = None, audit: bool = True, **kwargs: Any
    ) -> None:
        self.hidden_states, self.audit = hidden_states, audit
        super().__init__(*args, **kwargs)
        _require_supported(self.args, self.accelerator)
        self._sums = _StepSums()
        self.add_callback(self._sums)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the parts of the loss to the logs."""
        if "loss" in logs and self._sums.terms is not None:
            means = self.accelerator.reduce(self._sums.terms, "sum") / self._sums.num_steps
            terms = zip(LossTerms._fields[1:], means.tolist(), strict=True)
            logs |= {name: value for name, value in terms if value or name != "router"}
            self._sums.reset()
        super().log(logs, *args, **kwargs)

    def count_all(self, batches: Sequence[Batch]) -> Tensor:
        """Count the loss terms of an optimizer step, and store `count` and `totals` in its batches.

        With dynamic scaling, all batches first run once without gradients to compute `step_losses`.
        Returns `totals`, the sums over all batches and processes, int64 `[1 + teachers]`.
        """
        self._sums.num_steps += 1
        counts = [self.objective.count(batch) for batch in batches]
        totals: Tensor = self.accelerator.reduce(torch.stack(counts).sum(0), "sum")
        for batch, count in zip(batches, counts, strict=True):
            batch |= {"count": count, "totals": totals}
        dynamic = self.objective.combine.dynamic_scaling
        if dynamic and len(batches) * self.accelerator.num_processes > 1:
            step_losses = self._step_means(batches)
            for batch in batches:
                batch["step_losses"] = step_losses
        return totals

    def _step_means(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        rng_context = preserve_rng(self.accelerator.device)
        with torch.no_grad(), self.compute_loss_context_manager(), rng_context:
            self.model_wrapped.train()
            terms = [self._terms(self.model_wrapped, batch) for batch in batches]
        parts = torch.stack([torch.stack([t.distillation, t.cross_entropy]) for t in terms])
        distillation, cross_entropy = self.accelerator.reduce(parts.sum(0), "sum")
        return distillation, cross_entropy

    def prepared(self, inputs: Any, num_rows: int | None = None) -> Batch:
        """Convert the inputs of `compute_loss`, or only their first rows, to a prepared batch."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the batch's share of the step's loss (training) or its mean loss (evaluation).

        The share is multiplied by the number of processes, because processes average their
        gradients.
        """
        batch = self.prepared(inputs)
        if "totals" not in batch and not torch.is_grad_enabled():
            loss, outputs = self._evaluate_batch(model, inputs, batch, return_outputs)
        else:
            outputs = run(model, batch) if return_outputs else None
            terms = self._terms(model, batch, outputs)
            loss = terms.loss
            if "totals" in batch:
                self._sums.add(torch.stack([term.float() for term in terms[1:]]))
                loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _evaluate_batch(
        self, model: Any, inputs: Any, batch: Batch, return_outputs: bool
    ) -> tuple[Tensor, Any]:
        evaluation, size = self._evaluation, len(batch["input_ids"])
        num_rows = size if evaluation is None else evaluation.take(size)
        outputs = run(model, batch) if return_outputs else None  # Transformers drops repeated rows
        if num_rows < size:
            batch = self.prepared(inputs, max(1, num_rows))
        count = batch["count"] = self.objective.count(batch)
        student, teachers, router = self._forward(model, batch, outputs)
        _, means = self.objective.means(student, teachers, batch, [0.0] * len(count))
        router = means.new_zeros(()) if router is None else router.to(means)
        means = torch.cat([means, router[None]]).float()
        if evaluation is not None:
            counts = torch.cat([count, count[:1]]).float()
            sums = [*torch.stack([means * counts, counts], 1)]
            if isinstance(collator := self.distillation_collator, DistillationCollator):
                sides = [batch, *batch["teachers"]]
                sizes = [collator.target_bytes(n, side_batch) for n, side_batch in enumerate(sides)]
                sums.append(torch.stack([sums[0][0], sizes[0].sum().to(means)]))
                by_teacher = zip(teachers, batch["teachers"], sizes[1:], strict=True)
                sums += [_nats_and_bytes(*each).to(means) for each in by_teacher]
            evaluation.add(torch.stack(sums) * (num_rows > 0))
        return self._combine(means)["loss"], outputs

    def _combine(self, means: Tensor) -> dict[str, Tensor]:
        cross_entropy, router = means[0], means[-1]
        distillation = means.new_tensor(self.objective.weight_by_teacher) @ means[1:-1]
        loss = combine(distillation, cross_entropy, self.objective.combine) + router
        return {"loss": loss, "cross_entropy": cross_entropy, "distillation": distillation}

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the dataloader for an evaluation.

        With several processes, an iterable dataset is converted to a list, because the trainer
        needs its length to recognise repeated rows.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if isinstance(dataset, IterableDataset) and self.accelerator.num_processes > 1:
            eval_dataset = [*dataset]
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate the model. The loss and its parts are means over all targets and chunks."""
        self._evaluation = evaluation = _EvaluationSums(dataloader, self.accelerator)
        wrapped = self.model_wrapped
        try:
            output: Any = super().evaluation_loop(  # type: ignore[misc]
                dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
        finally:
            self._evaluation = None
        if not self.is_in_train and self.accelerator.distributed_type.startswith("MULTI_"):
            # Workaround: an evaluation before training marks the model as prepared, without DDP
            # (Transformers 5.24). `train` would then not synchronize the gradients.
            vars(self.model).pop("_is_accelerate_prepared", None)
            self.model_wrapped = wrapped
        if evaluation.terms is None:
            return output
        sums, counts = self.accelerator.reduce(evaluation.terms, "sum").unbind(1)
        means = sums / counts.clamp(min=1)
        start = 2 + len(self.objective.losses)  # index of the first sum for bits per byte
        metrics = self._combine(means[:start])
        prefixes = [f"teacher_{n}_" for n in range(1, 1 + len(self.teachers))]
        names = ["", *(prefixes if len(prefixes) > 1 else ["teacher_"])]
        for name, nats, num_bytes in zip(names, means[start:], counts[start:], strict=False):
            if num_bytes:
                metrics[f"{name}bits_per_byte"] = nats / math.log(2)
        output.metrics.update({f"{metric_key_prefix}_{n}": float(x) for n, x in metrics.items()})
        if not self._is_explained:
            self._is_explained = True
            self.accelerator.print(f"note: {EVALUATION_NOTE}", file=sys.stderr)
        return output

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate a batch. Whole logits are computed only if the caller needs the logits."""
        if not prediction_loss_only:
            return super().prediction_step(model, inputs, False, *args, **kwargs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    def _terms(self, model: Any, batch: Batch, outputs: Any = None) -> LossTerms:
        student, teachers, router = self._forward(model, batch, outputs)
        totals, step_losses = batch.get("totals"), batch.get("step_losses")
        return self.objective.terms(student, teachers, batch, totals, step_losses, router)

    def _forward(
        self, model: Any, batch: Batch, outputs: Any
    ) -> tuple[AnyLogits, list[AnyLogits | None], Tensor | None]:
        self._check_models([model, *self.teachers], batch)
        if outputs is None:
            outputs = run(model, batch, self._heads[0])
        elif len(outputs.logits) > len(batch["input_ids"]):
            outputs = copy(outputs)
            outputs.logits = outputs.logits[: len(batch["input_ids"])]
        runs = zip(self.teachers, batch["teachers"], self._heads[1:], strict=True)
        with torch.no_grad(), evaluating(self.teachers), self.accelerator.autocast():
            logits = [None if t is None else logits_of(t, side, head) for t, side, head in runs]
        return outputs.logits, logits, router_loss(model, outputs, self.router_aux_loss_coef)

    def _check_models(self, models: Sequence[Any], batch: Batch) -> None:
        """Check the ids of each batch; for the first batch, find the heads and run the audit."""
        sides = [batch, *batch["teachers"]]
        for index, (model, side_batch) in enumerate(zip(models, sides, strict=True)):
            require_id_rows(model, side_batch, index)
        if self._heads_model is not models[0]:  # an evaluation passes the model without its wrapper
            support = self.objective.hidden_support
            self._heads, notes = find_heads(models, sides, support, self.hidden_states)
            for note in notes if notes != self._notes else ():
                self.accelerator.print(f"note: {note}", file=sys.stderr)
            self._heads_model, self._notes = models[0], notes
        if self.audit:
            self.audit = False
            with evaluating(self.teachers), self.accelerator.autocast():
                findings = audit(models, batch, self.distillation_collator, self._heads)
            audits = gather_object([findings]) if self.accelerator.num_processes > 1 else [findings]
            if self.accelerator.is_main_process:
                Audit.from_processes(audits).report()


class _Sums:
    """Sums of values over several batches."""

    terms: Tensor | None = None

    def add(self, terms: Tensor) -> None:
        self.terms = terms if self.terms is None else self.terms + terms


class _StepSums(_Sums, TrainerCallback):
    """Sums over the optimizer steps since the last log, or since training began.

    `auto_find_batch_size` restarts training for each batch size, so the start of training resets
    the sums.
    """

    num_steps = 0

    def reset(self, *_: Any, **__: Any) -> None:
        self.terms, self.num_steps = None, 0

    on_train_begin = reset


class _EvaluationSums(_Sums):
    """Sums over one evaluation, and the number of rows to count in each batch.

    `terms`, `[n, 2]`, contains the sum and the number of values for each of n averages.

    With several processes, Accelerate repeats rows, so that all processes have the same number of
    batches. Repeated rows are not counted.
    """

    def __init__(self, dataloader: Any, accelerator: Any) -> None:
        self._rows_left, self._step = math.inf, 0  # rows after the start of the next batch
        if accelerator.num_processes > 1 and hasattr(dataloader.dataset, "__len__"):
            size = dataloader.total_batch_size
            first = size // accelerator.num_processes * accelerator.process_index
            self._rows_left, self._step = len(dataloader.dataset) - first, size

    def take(self, size: int) -> int:
        num_rows = min(size, max(0, self._rows_left))
        self._rows_left -= self._step
        return int(num_rows)


def _nats_and_bytes(logits: AnyLogits | None, side_batch: SideBatch, sizes: Tensor) -> Tensor:
    """Return a teacher's sum of −log p over the targets, and the targets' bytes, float32 `[2]`.

    If `logits` is None, targets without a stored log-probability are ignored. `sizes`, `[B, T]`,
    are the bytes of each target.
    """
    targets = side_batch["targets"]
    if logits is not None:
        nats = cross_entropy(logits, targets) * (targets >= 0).sum()
    else:
        unknown = torch.full(targets.shape, torch.nan)
        logprobs = side_batch.get("teacher_logprobs", unknown).to(targets.device)
        targets = targets.masked_fill(logprobs.isnan(), -1)
        nats = -logprobs[targets >= 0].sum()
    return torch.stack([nats.cpu().float(), sizes[targets.cpu() >= 0].sum().float()])


def require_own_loss(args: Any, compute_loss_func: Any = None) -> None:
    """Raise a `ValueError` for options of a `Trainer` that change the loss."""
    if factor := args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor is {factor}, but xtok's losses have no smoothing")
    if compute_loss_func is not None:
        raise ValueError("compute_loss_func is not supported: pass a custom loss as loss=")


def _require_supported(args: Any, accelerator: Any) -> None:
    """Raise an `XtokError` for setups that split batches, or distribute batches unevenly."""
    if args.n_gpu > 1:
        raise XtokError(
            f"one process with {args.n_gpu} GPUs is not supported",
            hint="start a process per GPU: torchrun --nproc-per-node N script.py",
        )
    problem = ""
    if accelerator.dataloader_config.dispatch_batches:
        problem = "dispatch_batches=True is not supported, because it cannot split alignments"
    elif not (accelerator.even_batches or args.dataloader_drop_last) and args.world_size > 1:
        problem = "even_batches=False gives some processes fewer batches: training hangs or crashes"
    if problem:
        raise XtokError(problem, hint="remove it from accelerator_config")
    # By default, one process reads an iterable dataset for all processes.
    accelerator.dataloader_config.dispatch_batches = False
