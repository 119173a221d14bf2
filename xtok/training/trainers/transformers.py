"""Distillation in `transformers.Trainer`: any teacher, map and loss of xtok."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainingArguments

from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.objective import (
    AnyMap,
    DistillationMixin,
    Loss,
    keep_batches,
    make_objective,
    on_device,
    require_one_device,
    require_own_loss,
)
from xtok.training.topk_collator import TopKCollator


class XTokTrainer(DistillationMixin, Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that distils teachers with other tokenizers into its model.

    It minimizes the distillation losses plus the cross-entropy, as `combine` weighs them. The loss
    is exact over gradient accumulation and processes: the mean over the chunks and targets of all
    batches of an optimizer's step. What it is made of is logged with it (`DistillationMixin`).
    Only the model is trained and saved; of the teachers, what the model shares with them. With
    dynamic scaling, a step of several batches or processes runs the models once more, before any
    gradient.

    Args:
        model: the student, a causal language model.
        args: as of a `Trainer`; `remove_unused_columns` is set to False, as the collator reads the
            dataset's own columns.
        data_collator: for the same student and teachers; the dataset's rows are its samples, such
            as mappings with `text` or `messages`. A `TopKCollator` for stored predictions.
        teachers: causal language models, one for each of the collator's; they are put on the
            model's device, and run in evaluation mode. None for stored predictions.
        loss: the name of a loss or a `losses.BatchLoss`, for all teachers or one for each.
        map: a map, its file or its module, for all teachers or one for each; None for
            losses without a map.
        teacher_weights: of the teachers' losses; each is 1 if None.
        combine: the weights of distillation and cross-entropy; 1 and 1 if None.
        hidden_states: None: losses make logits from hidden states, a block at a time, wherever loss
            and models allow it, and a note names the others. False: models make whole logits. True:
            an error where they would have to.
        audit: compare the first batch with what the models' libraries make of it (`audit`): a line
            on stderr, or a warning for each difference.
        **kwargs: as of a `Trainer`: datasets, callbacks, optimizers …

    Raises:
        XtokError: if a map is missing or of other tokenizers, or for several GPUs in one process.
        ValueError: if numbers of teachers, losses and maps do not fit, and for label smoothing
            and a `compute_loss_func`, which the loss does not have.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        data_collator: DistillationCollator | TopKCollator,
        *,
        teachers: Any = None,
        loss: Loss | Sequence[Loss] = "p-kl",
        map: AnyMap | Sequence[AnyMap | None] | None = None,
        teacher_weights: Sequence[float] | None = None,
        combine: CombineConfig | None = None,
        hidden_states: bool | None = None,
        audit: bool = True,
        **kwargs: Any,
    ) -> None:
        self.hidden_states, self.audit, self.audited_collator = hidden_states, audit, data_collator
        require_own_loss(args, kwargs.get("compute_loss_func"))
        args.remove_unused_columns = False
        super().__init__(model, args, data_collator, **kwargs)
        require_one_device(args)
        # transformers before 5.19 knows no `loss_is_scaled_for_ga`, and takes this for it.
        self.model_accepts_loss_kwargs = True
        models = list(teachers) if isinstance(teachers, list | tuple) else [teachers]
        if len(models) != len(data_collator.pairs):
            raise ValueError(
                f"{len(models)} teachers, and the collator has {len(data_collator.pairs)}"
            )
        keep_batches(self.accelerator)
        device = self.accelerator.device
        self.teachers = [teacher and on_device(teacher, device) for teacher in models]
        self.objective = make_objective(
            data_collator.pairs,
            loss,
            map,
            teacher_weights=teacher_weights,
            combine=combine,
            device=device,
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of an optimizer's step, and the terms of all processes' means."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        step = [self.prepared(batch) for batch in batches]
        return step, self.count_all(step)

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as it is, where it is of a step's; else prepare it."""
        return inputs if "totals" in inputs else prepare(inputs, self.accelerator.device)
