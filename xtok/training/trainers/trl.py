"""Distillation with TRL's `GOLDTrainer`, on policy and off policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from xtok.conversation.files import chat_record
from xtok.conversation.teacher_side import (
    TEACHER_FIELDS,
    check_fields,
    teacher_chat,
    teacher_values,
)
from xtok.errors import XtokError
from xtok.tokenizers import from_transformers
from xtok.training.batches import Batch
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.registry import BatchLoss, loss_spec
from xtok.training.objective import LossArgument, MapArgument, make_objective
from xtok.training.trainers.distillation import DistillationTrainer, require_own_loss

VERSIONS = ">=1.14,<1.17"
"""Tested versions of TRL. Since version 1.14, GOLD supports tokenizers that are not byte-level. The
trainer overrides private methods, which later versions may rename."""

INSTALL = f"install TRL 1.14 to 1.16: pip install 'trl{VERSIONS}'"


def gold_classes() -> tuple[type, type]:
    """Return TRL's classes. Raise an `XtokError` if TRL is missing or not supported."""
    try:
        import trl
    except ImportError:
        raise XtokError("TRL is not installed", hint=INSTALL) from None
    if not SpecifierSet(VERSIONS).contains(trl.__version__, prereleases=True):
        raise XtokError(f"TRL {trl.__version__} is not supported", hint=INSTALL)
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    return GOLDTrainer, GOLDConfig


_GOLDTrainer, GOLDConfig = gold_classes()


class XTokGOLDTrainer(DistillationTrainer, _GOLDTrainer):  # type: ignore[misc, valid-type]
    """TRL's `GOLDTrainer` with xtok's alignment, losses and maps, for tokenizers of any family.

    On policy (`lmbda` > 0), the student generates completions, and the teacher reads the same
    bytes, tokenized with its own tokenizer. Off policy, completions come from the dataset. The
    teacher reads conversations in its own chat template. A column `teacher_messages` (or
    `teacher_prompt`) replaces the prompt for the teacher. If prompts are texts, the column
    `teacher_context` is a text that only the teacher reads, before the prompt.

    xtok's losses use the following options of `GOLDConfig`: `uld_crossentropy_weight`,
    `uld_distillation_weight`, and the two ULD temperatures, which must be equal. `beta` and the
    other ULD options have no effect.

    Args:
        model: the student.
        teacher_model: the teacher.
        args: a `GOLDConfig`. The trainer sets `use_uld_loss` to True and `use_extended_uld` to
            False.
        loss: the name of a loss, or a `losses.BatchLoss`.
        map: the map that the loss requires: a map, the path of its file, or a `ProjectionModule`.
        teacher_template: a chat template that replaces the template of the teacher's tokenizer.
        **kwargs: arguments of a `GOLDTrainer` (datasets, `processing_class` …), and the options
            `hidden_states` and `audit` of `XTokTrainer`.

    Raises:
        XtokError: if a map is missing or belongs to other tokenizers, if the student is a vision
            model, if one process has several GPUs, or if `even_batches` is False with several
            processes.
        ValueError: if `args` sets label smoothing.
    """

    _signature_columns: Any

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: Any = None,
        *,
        loss: LossArgument = "event-kl",
        map: MapArgument | None = None,
        teacher_template: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            raise ValueError("args is None, expected a GOLDConfig")
        if args.uld_student_temperature != args.uld_teacher_temperature:
            raise XtokError(
                f"uld_student_temperature is {args.uld_student_temperature}, but "
                f"uld_teacher_temperature is {args.uld_teacher_temperature}",
                hint="set both to the same value, because xtok's losses have one temperature",
            )
        require_own_loss(args)
        args.use_uld_loss, args.use_extended_uld = True, False
        super().__init__(model, teacher_model, args, **kwargs)
        if self._is_vlm:
            raise XtokError(
                "the student is a vision model", hint="use TRL's own GOLDTrainer for vision models"
            )
        models = [self.accelerator.unwrap_model(m) for m in (self.model, self.teacher_model)]
        widths = [model.config.get_text_config().vocab_size for model in models]
        tokenizers = zip((self._tokenizer, self.teacher_tokenizer), widths, strict=True)
        student, teacher = (from_transformers(t, vocab_size=width) for t, width in tokenizers)
        self.distillation_collator = DistillationCollator(
            student, teacher, teacher_templates=[teacher_template]
        )
        self.teachers = [self.teacher_model]
        # Workaround: Transformers (5.24) prepares the student for an evaluation before training
        # only if this private list is empty. GOLDTrainer (TRL 1.14 to 1.16) adds the teacher to the
        # list.
        prepared = self.accelerator._models
        prepared[:] = [model for model in prepared if model is not self.teacher_model]
        combine = CombineConfig(
            distillation_weight=args.uld_distillation_weight,
            cross_entropy_weight=args.uld_crossentropy_weight,
        )
        self.objective = make_objective(
            self.distillation_collator.pairs, loss, map, combine=combine,
            config=_options(loss, args.uld_student_temperature), device=self.accelerator.device,
        )  # fmt: skip
        self.data_collator: Any = partial(_with_teacher_side, self.data_collator)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = (*_PROMPT_FIELDS, "teacher_context")
        self._signature_columns += [name for name in columns if name not in self._signature_columns]

    def _fill_buffer(self, generation_batch: Any, buffer_steps: int) -> None:
        super()._fill_buffer(generation_batch, buffer_steps)
        for inputs in self._buffered_inputs:
            inputs["_xtok"] = self.prepared(inputs)
        self.count_all([inputs["_xtok"] for inputs in self._buffered_inputs])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, and log the mean losses on policy and off policy.

        TRL divides the sums of the losses by the number of batches. xtok undoes this division,
        because a batch's loss is already its share of the step's loss.
        """
        loss = super().training_step(*args, **kwargs)
        num_batches = self.args.gradient_accumulation_steps
        index = (self._step - 1) % num_batches
        batch = self._buffered_inputs[index]["_xtok"]
        share = float(batch["count"][0] / batch["totals"][0].clamp(min=1))
        change = share * self.accelerator.num_processes - 1 / num_batches
        # Workaround: GOLDTrainer (TRL 1.14 to 1.16) adds 1 / (number of batches) to this private
        # counter, in a long method that cannot be overridden in part.
        name = f"_{'on' if self._buffered_on_policy[index] else 'off'}_policy_step_equiv"
        setattr(self, name, getattr(self, name) + change)
        return loss

    def prepared(self, inputs: Mapping[str, Any], num_rows: int | None = None) -> Batch:
        """Convert the inputs of GOLD, or only their first rows, to a prepared batch."""
        if "_xtok" in inputs:
            return inputs["_xtok"]  # type: ignore[no-any-return]
        rows = inputs.get(_TEACHER_SIDE, ())[:num_rows]
        fields = {name: [row.get(name) for row in rows] or None for name in TEACHER_FIELDS}
        tensors = (inputs[name][:num_rows] for name in ("input_ids", "attention_mask", "labels"))
        batch = self.distillation_collator.from_student_ids(*tensors, **fields)
        return prepare(batch, self.accelerator.device)


def _options(loss: LossArgument, temperature: float) -> Any:
    if isinstance(loss, BatchLoss):
        return None
    spec = loss_spec(loss)
    return spec.config and spec.config(temperature=temperature)


_TEACHER_SIDE = "xtok_teacher_side"
_PROMPT_FIELDS = ("teacher_messages", "teacher_prompt")


def _with_teacher_side(collate: Any, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sides = [_teacher_side(example, f"row {n}") for n, example in enumerate(examples)]
    return {**collate(examples), _TEACHER_SIDE: sides}


def _teacher_side(example: Mapping[str, Any], location: str) -> dict[str, Any]:
    prompt, completion = _prompt_and_answer(example)
    is_chat = bool(prompt) and not isinstance(prompt, str)
    names = [name for name in _PROMPT_FIELDS if example.get(name)]
    if len(names) > 1:
        problem = f"{location}: both teacher_messages and teacher_prompt are set"
        raise XtokError(problem, hint="keep one of them")
    if names:
        [prompt] = teacher_values(example[names[0]], 1, "teacher_messages", location)
        if is_chat:
            prompt = _prompt_for_chat(prompt, completion, names[0], location)
        is_chat = not isinstance(prompt, str)
    if is_chat:
        check_fields(example, location, "messages")
        prompt = {"messages": prompt, "chat_template_kwargs": example.get("chat_template_kwargs")}
    return {
        "teacher_messages": prompt if is_chat or names else None,
        "teacher_context": example.get("teacher_context"),
    }


def _prompt_and_answer(example: Mapping[str, Any]) -> tuple[Any, Any]:
    if example.get("prompt") is not None or not example.get("messages"):
        return example.get("prompt"), example.get("completion") or []
    messages = example["messages"]
    end = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    return messages[:end], messages[end : end + 1]


def _prompt_for_chat(prompt: Any, completion: Any, name: str, location: str) -> list[Any]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt[-1]["role"] != "assistant":
        return list(prompt)
    end = len(prompt) - len(completion)
    teacher_chat(chat_record({"messages": completion}, location), prompt[end:], name)
    return list(prompt[:end])
