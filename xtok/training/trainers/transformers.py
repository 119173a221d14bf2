"""Distillation with `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from xtok.training.batches import Batch, slice_rows
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.registry import BatchLoss, loss_spec
from xtok.training.objective import LossArgument, MapArgument, make_objective
from xtok.training.topk_collator import TopKCollator
from xtok.training.trainers.distillation import DistillationTrainer, require_own_loss


class XTokTrainer(DistillationTrainer):
    """A `transformers.Trainer` that distils teachers with other tokenizers into a student.

    The loss is the weighted sum of the cross-entropy (a mean over targets) and the distillation
    losses (means over chunks or tokens). A mean includes all batches of an optimizer step, on all
    processes. `DistillationTrainer` describes the logs. Each of `loss` and `map` is one value for
    all teachers, or a list with one value per teacher. Only the student is trained and saved,
    including any parameters that the student shares with a teacher.

    Args:
        model: the student, a causal language model.
        args: the `TrainingArguments`; `remove_unused_columns` is set to False.
        data_collator: a `DistillationCollator` for the same student and teachers, or a
            `TopKCollator` for stored predictions. Each row of the dataset is a sample for the
            collator.
        teachers: for each teacher of the collator, a causal language model, its folder or its repo
            id. None trains on stored predictions, with the loss `alm` or `topk-kl`. An empty list
            trains without teachers, for comparison.
        loss: the name of a loss, or a `losses.BatchLoss`.
        map: an event map for `event-kl`, a spelling map for `csd`, a projection map for `p-kl`,
            `gold` and `h-kl`, or the path of its file.
        teacher_weights: weights of the teachers' losses, each 1 by default.
        combine: weights of the distillation loss and the cross-entropy, both 1 by default.
        **kwargs: arguments of a `Trainer`, and two options of xtok. If `hidden_states` is True,
            losses compute logits in blocks from hidden states. If `hidden_states` is False, models
            compute whole logits. By default, hidden states are used if possible. If `audit` is True
            (default), the trainer checks the first batch with the models' libraries.

    Raises:
        XtokError: if a map is missing or belongs to other tokenizers, if both weights are 0, if one
            process has several GPUs, or if `even_batches` is False with several processes.
        ValueError: if `teachers` is missing, although no predictions are stored, or if it is set,
            although predictions are stored. Also if the numbers of teachers, losses and maps
            differ, or if `args` sets label smoothing, or if a `compute_loss_func` is passed.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        data_collator: DistillationCollator | TopKCollator,
        *,
        teachers: Any = None,
        loss: LossArgument | Sequence[LossArgument] = "event-kl",
        map: MapArgument | Sequence[MapArgument | None] | None = None,
        teacher_weights: Sequence[float] | None = None,
        combine: CombineConfig | None = None,
        **kwargs: Any,
    ) -> None:
        require_own_loss(args, kwargs.get("compute_loss_func"))
        args.remove_unused_columns = False
        self.distillation_collator, pairs = data_collator, data_collator.pairs
        models = list(teachers) if isinstance(teachers, list | tuple) else [teachers]
        if teachers is None:
            models = [None] * len(pairs)
            options = pairs if None in pairs else [*pairs, map, teacher_weights]
            if any(x is not None for x in options) and not _takes_predictions(loss):
                raise ValueError(
                    "teachers is None, but this loss needs a teacher: pass one model for each of "
                    "the collator's teachers, or an empty list to train without teachers"
                )
        if None in pairs and any(x is not None for x in models):
            problem = "teachers is set, but a TopKCollator reads stored predictions"
            raise ValueError(f"{problem}: remove teachers, or pass a DistillationCollator")
        pairs = pairs if models else []
        if len(models) != len(pairs):
            raise ValueError(f"{len(models)} teachers, but the collator has {len(pairs)}")
        super().__init__(model, args, data_collator, **kwargs)
        # Workaround: Transformers before 5.19 ignores `loss_is_scaled_for_ga`, and divides the loss
        # by the number of batches unless `model_accepts_loss_kwargs` is True.
        self.model_accepts_loss_kwargs = True
        self.teachers = [None if x is None else self._load(x) for x in models]
        self.objective = make_objective(
            pairs, loss, map, teacher_weights=teacher_weights if pairs else None, combine=combine,
            device=self.accelerator.device,
        )  # fmt: skip

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of an optimizer step, and the `totals` of their loss terms."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        step = [self.prepared(batch) for batch in batches]
        # At the end of a stream, `Trainer` requests batches for a step that does not take place.
        return step, self.count_all(step) if step else None

    def prepared(self, inputs: Batch, num_rows: int | None = None) -> Batch:
        """Convert the inputs of `compute_loss`, or only their first rows, to a prepared batch."""
        if "totals" in inputs:
            return inputs
        batch = inputs if num_rows is None else slice_rows(inputs, num_rows)
        batch = batch if self.teachers else {**batch, "teachers": []}
        return prepare(batch, self.accelerator.device)

    def _load(self, teacher: Any) -> Any:
        if isinstance(teacher, str | PathLike):
            dtype = torch.bfloat16 if self.args.bf16 else torch.float32
            teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=dtype)
        device = self.accelerator.device
        is_placed = hasattr(teacher, "hf_device_map")  # placed on several devices by `device_map`
        if not is_placed and next(teacher.parameters()).device != device:
            teacher.to(device)  # `prepare_model` would treat the teacher as the trained model
        return teacher


def _takes_predictions(loss: LossArgument | Sequence[LossArgument]) -> bool:
    names = [loss] if isinstance(loss, str | BatchLoss) else loss
    specs = [loss_spec(name) for name in names if not isinstance(name, BatchLoss)]
    return len(specs) == len(names) and all(x.is_stored or x.takes_logprobs for x in specs)
