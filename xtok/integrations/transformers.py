"""Distillation in `transformers.Trainer`: any teacher, map and loss of xtok."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from xtok.errors import XtokError
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.objective import Loss, Objective, Projection, Terms, make_objective


class Distils:
    """What trainers of any library share: an objective, its teachers, and what they log.

    Each logged `loss` comes with `cross_entropy`, `distillation` and `coverage` (the share of the
    targets that are in a chunk), means over the same optimizer steps and over all processes.
    """

    loss_is_scaled_for_ga = True

    state: Any
    accelerator: Any
    objective: Objective
    _sums: Tensor | None = None
    _logged_at = 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the terms beside the total."""
        if "loss" in logs and self._sums is not None:
            steps = max(1, self.state.global_step - self._logged_at)
            sums = self.accelerator.reduce(self._sums, "sum") / steps
            logs |= dict(zip(Terms._fields[1:], sums.tolist(), strict=True))
            self._sums, self._logged_at = None, self.state.global_step
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _count(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """Return the sum of the batches' counts over all processes, int64 `[1 + teachers]`."""
        counts = torch.zeros(1 + len(self.objective.losses), dtype=torch.int64)
        for batch in batches:
            counts += self.objective.count(batch).cpu()
        summed: Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return summed

    def _loss(
        self,
        model: Any,
        teachers: Sequence[Any],
        batch: dict[str, Any],
        totals: Tensor | None,
        *,
        outputs: bool,
    ) -> Any:
        """Run the models on a prepared batch; return the loss, and the student's outputs if asked.

        Processes average their gradients, so a share of all their terms is multiplied by their
        number.
        """

        def run(of: Any, side: dict[str, Any]) -> Any:
            mask = side["attention_mask"]
            return of(input_ids=side["input_ids"], attention_mask=mask, use_cache=False)

        of_student = run(model, batch)
        logits = []
        with torch.no_grad():
            for teacher, side in zip(teachers, batch["teachers"], strict=True):
                teacher.eval()  # DeepSpeed's returns None
                logits.append(run(teacher, side).logits)
        terms = self.objective.terms(of_student.logits, logits, batch, totals)
        loss = terms.loss
        if totals is not None:
            new = torch.stack([term.float() for term in terms[1:]])
            self._sums = new if self._sums is None else self._sums + new
            loss = loss * self.accelerator.num_processes
        return (loss, of_student) if outputs else loss


def require_one_device(args: Any) -> None:
    """Raise an `XtokError` where a `Trainer` would split batches among GPUs by itself."""
    if args.n_gpu > 1:
        raise XtokError(
            f"one process with {args.n_gpu} GPUs would split batches, alignments aside",
            hint="start a process per GPU: torchrun --nproc-per-node N script.py",
        )


class DistillationTrainer(Distils, Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that distils teachers with other tokenizers into its model.

    It minimizes the distillation losses plus the cross-entropy, as `combine` weighs them. The loss
    is exact over gradient accumulation and processes: the mean over the chunks and targets of all
    batches of an optimizer's step. What it is made of is logged beside it (`Distils`). Only the
    model is trained and saved, not the teachers.

    Args:
        model: the student, a causal language model.
        args: as of a `Trainer`; `remove_unused_columns` is set to False, as the collator reads the
            dataset's own columns.
        data_collator: for the same student and teachers; the dataset's rows are its samples, such
            as mappings with `text` or `messages`.
        teachers: causal language models, one for each of the collator's; they are put on the
            model's device, and not trained.
        loss: the name of a loss or a `losses.BatchLoss`, for all teachers or one for each.
        projection: a map, its file or its module, for all teachers or one for each; None for
            losses without a map.
        teacher_weights: of the teachers' losses; each is 1 if None.
        combine: the weights of distillation and cross-entropy; 1 and 1 if None.
        **kwargs: as of a `Trainer`: datasets, callbacks, optimizers …

    Raises:
        XtokError: if a map is missing or of other tokenizers, or for several GPUs in one process.
        ValueError: if numbers of teachers, losses and maps do not fit.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        data_collator: DistillationCollator,
        *,
        teachers: Any,
        loss: Loss | Sequence[Loss] = "p-kl",
        projection: Projection | Sequence[Projection | None] | None = None,
        teacher_weights: Sequence[float] | None = None,
        combine: CombineConfig | None = None,
        **kwargs: Any,
    ) -> None:
        args.remove_unused_columns = False
        super().__init__(model, args, data_collator, **kwargs)
        require_one_device(args)
        # transformers before 5.19 knows no `loss_is_scaled_for_ga`, and takes this for it.
        self.model_accepts_loss_kwargs = True
        models = list(teachers) if isinstance(teachers, list | tuple) else [teachers]
        if len(models) != len(data_collator.teachers):
            raise ValueError(
                f"{len(models)} teachers, and the collator has {len(data_collator.teachers)}"
            )
        self.teachers = [
            self.accelerator.prepare_model(teacher.requires_grad_(False), evaluation_mode=True)
            for teacher in models
        ]
        self.objective = make_objective(
            data_collator,
            loss,
            projection,
            teacher_weights=teacher_weights,
            combine=combine,
            device=self.accelerator.device,
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of an optimizer's step, and the terms of all processes' means."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        device = self.accelerator.device
        prepared = [prepare(batch, device) for batch in batches]
        return batches, self._count(prepared)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of one batch: in training its share, in evaluation its mean."""
        batch = prepare(inputs, self.accelerator.device)
        totals = num_items_in_batch if model.training else None
        return self._loss(model, self.teachers, batch, totals, outputs=return_outputs)
