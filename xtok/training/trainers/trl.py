"""Distillation in TRL's `GOLDTrainer`, on policy and off: any tokenizers, map and loss of xtok."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from xtok.conversation.files import chat_record
from xtok.conversation.teacher_side import (
    TEACHER_FIELDS,
    for_each_teacher,
    require_used,
    teachers_chat,
)
from xtok.errors import XtokError
from xtok.tokenizers import from_transformers
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.registry import BatchLoss, loss_named
from xtok.training.objective import (
    AnyMap,
    DistillationMixin,
    Loss,
    make_objective,
    require_one_device,
    require_own_loss,
)

OLDEST = "1.14"
"""The first TRL whose GOLD prepares texts for tokenizers that are not byte-level."""

INSTALL = "install TRL 1.14 to 1.16: pip install 'trl>=1.14,<1.17'"
"""The versions that the tests were run with."""

_HOOKS = (
    "compute_loss", "prediction_step", "_fill_buffer", "_prepare_inputs",
    "_prepare_dataset_with_original_text",
)  # fmt: skip
_OPTIONS = (
    "use_uld_loss", "use_extended_uld", "uld_crossentropy_weight", "uld_distillation_weight",
    "uld_student_temperature", "uld_teacher_temperature",
)  # fmt: skip


def gold_classes() -> tuple[type, type]:
    """Return TRL's `GOLDTrainer` and `GOLDConfig`, if they have what this module builds on."""
    try:
        import trl
    except ImportError:
        raise XtokError("TRL is not installed", hint=INSTALL) from None
    version = f"TRL {trl.__version__}"
    if Version(trl.__version__) < Version(OLDEST):
        problem = f"{version} is too old: its GOLD takes byte-level tokenizers only"
        raise XtokError(problem, hint=INSTALL)
    try:
        from trl.experimental.gold import GOLDConfig, GOLDTrainer
    except ImportError:
        raise XtokError(f"{version} has no GOLDTrainer", hint=INSTALL) from None
    fields = getattr(GOLDConfig, "__dataclass_fields__", {})
    missing = [name for name in _HOOKS if not hasattr(GOLDTrainer, name)]
    missing += [name for name in _OPTIONS if name not in fields]
    if missing:
        raise XtokError(f"the GOLDTrainer of {version} has no {', '.join(missing)}", hint=INSTALL)
    return GOLDTrainer, GOLDConfig


_GOLDTrainer, GOLDConfig = gold_classes()


class XTokGOLDTrainer(DistillationMixin, _GOLDTrainer):  # type: ignore[misc, valid-type]
    """TRL's `GOLDTrainer` with xtok's alignment, losses and maps, for tokenizers of any family.

    On policy (`lmbda` > 0) the student generates, and the teacher reads the same bytes, spelled in
    its own tokens; no text is decoded, so SentencePiece models and half a character are exact. Off
    policy the same holds for the dataset's completions. The teacher reads the prompts of
    conversations by its own chat template, and other prompts as the student's bytes.

    It may read more than the student, on policy and off: a column `teacher_messages` (or
    `teacher_prompt`, also as a text) is what it reads in place of the prompt, by its own chat
    template, up to the answer if it has one; `teacher_context` stands before prompts that are text.

    Of `GOLDConfig`, `uld_crossentropy_weight`, `uld_distillation_weight`, and the temperatures
    (which must be equal) hold for xtok's losses; other options of ULD, and `beta`, have no effect.
    The loss is exact over gradient accumulation and processes.

    Args:
        model: the student.
        teacher_model: the teacher.
        args: a `GOLDConfig`; `use_uld_loss` is set to True, `use_extended_uld` to False.
        loss: the name of a loss, or a `losses.BatchLoss`.
        map: a map, its file or its module; None for losses without a map.
        teacher_template: the teacher's chat template, if not its tokenizer's own: a file, the name
            of a format, or Jinja.
        hidden_states: as of an `XTokTrainer`.
        audit: as of an `XTokTrainer`.
        **kwargs: as of a `GOLDTrainer`: datasets, `processing_class` …

    Raises:
        XtokError: if a map is missing or of other tokenizers, for vision models, and for several
            GPUs in one process.
        ValueError: for label smoothing, which the loss does not have.
    """

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: Any = None,
        *,
        loss: Loss = "p-kl",
        map: AnyMap | None = None,
        teacher_template: str | Path | None = None,
        hidden_states: bool | None = None,
        audit: bool = True,
        **kwargs: Any,
    ) -> None:
        self.hidden_states, self.audit = hidden_states, audit
        if args is None:
            raise ValueError("args is None, and must be a GOLDConfig")
        if args.uld_student_temperature != args.uld_teacher_temperature:
            raise XtokError(
                f"uld_student_temperature is {args.uld_student_temperature}, "
                f"uld_teacher_temperature {args.uld_teacher_temperature}",
                hint="give the same temperature for both: xtok's losses have one",
            )
        require_own_loss(args)
        args.use_uld_loss, args.use_extended_uld = True, False
        super().__init__(model, teacher_model, args, **kwargs)
        require_one_device(args)
        if self._is_vlm:
            raise XtokError(
                "the student reads images", hint="use TRL's own GOLDTrainer for vision models"
            )
        student, teacher = (
            from_transformers(tokenizer, vocab_size=of_model.config.get_text_config().vocab_size)
            for tokenizer, of_model in (
                (self._tokenizer, self.accelerator.unwrap_model(self.model)),
                (self.teacher_tokenizer, self.accelerator.unwrap_model(self.teacher_model)),
            )
        )
        self.distillation_collator = self.audited_collator = DistillationCollator(
            student, teacher, teacher_templates=[teacher_template]
        )
        self.teachers = [self.teacher_model]
        # Else an evaluation before training takes it for the model, and does not prepare that.
        prepared = self.accelerator._models
        prepared[:] = [model for model in prepared if model is not self.teacher_model]
        self.objective = make_objective(
            self.distillation_collator.pairs,
            loss,
            map,
            combine=CombineConfig(
                distillation_weight=args.uld_distillation_weight,
                cross_entropy_weight=args.uld_crossentropy_weight,
            ),
            config=_options(loss, args.uld_student_temperature),
            device=self.accelerator.device,
        )
        self.data_collator: Any = _WithTeacherSide(self.data_collator)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        more = [
            name for name in (*_NAMES, "teacher_context") if name not in self._signature_columns
        ]
        self._signature_columns += more

    def _fill_buffer(self, generation_batch: Any, buffer_steps: int) -> None:
        """Make the batches of an optimizer's step at once: their terms are counted together."""
        super()._fill_buffer(generation_batch, buffer_steps)
        for inputs in self._buffered_inputs:
            inputs["_xtok"] = self.prepared(inputs)
        self.count_all([inputs["_xtok"] for inputs in self._buffered_inputs])

    def prepared(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return GOLD's batch as a prepared batch of the collator."""
        if "_xtok" in inputs:
            return inputs["_xtok"]  # type: ignore[no-any-return]
        given: dict[str, list[Any]] = {name: [] for name in TEACHER_FIELDS}
        for row in inputs.get(_TEACHER_SIDE, ()):
            for name, values in given.items():
                values.append(row.get(name))
        batch = self.distillation_collator.from_student_ids(
            inputs["input_ids"],
            inputs["attention_mask"],
            inputs["labels"],
            **{name: values or None for name, values in given.items()},
        )
        return prepare(batch, self.accelerator.device)


def _options(loss: Loss, temperature: float) -> Any:
    """Return the options of a loss given by name, with a temperature."""
    if isinstance(loss, BatchLoss):
        return None
    row = loss_named(loss)
    return row.config and row.config(temperature=temperature)


_TEACHER_SIDE = "xtok_teacher_side"
_NAMES = ("teacher_messages", "teacher_prompt")


class _WithTeacherSide:
    """A data collator that also hands on what the teacher's side reads before an answer."""

    def __init__(self, collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        sides = [_teacher_side(example, f"row {n}") for n, example in enumerate(examples)]
        return {**self.collate(examples), _TEACHER_SIDE: sides}


def _teacher_side(example: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return what stands before a dataset's completion for the teacher, as a collator takes it."""
    prompt, completion = example.get("prompt"), example.get("completion") or []
    if prompt is None and example.get("messages"):
        answers = [n for n, m in enumerate(example["messages"]) if m["role"] == "assistant"]
        end = answers[-1] if answers else 0
        prompt, completion = example["messages"][:end], example["messages"][end : end + 1]
    is_chat = bool(prompt) and not isinstance(prompt, str)
    given = {name: example[name] for name in _NAMES if example.get(name)}
    if len(given) > 1:
        what = f"{place}: it has both teacher_messages and teacher_prompt"
        raise XtokError(what, hint="give one of them")
    for name, value in given.items():
        [theirs] = for_each_teacher(value, 1, "teacher_messages", place)
        if is_chat and isinstance(theirs, str):
            theirs = [{"role": "user", "content": theirs}]
        if is_chat and theirs[-1]["role"] == "assistant":
            chat, end = chat_record({"messages": completion}, place), len(theirs) - len(completion)
            teachers_chat(chat, theirs[end:], name)  # raises for another answer
            theirs = theirs[:end]
        prompt, is_chat = theirs, not isinstance(theirs, str)
    if is_chat:
        require_used(example, place, "messages")
        prompt = {"messages": prompt, "chat_template_kwargs": example.get("chat_template_kwargs")}
    return {
        "teacher_messages": prompt if is_chat or given else None,
        "teacher_context": example.get("teacher_context"),
    }
