"""Distil teachers with other tokenizers into a student with `transformers.Trainer`.

    xtok events models/student models/teacher -o events.safetensors
    python scripts/examples/hf_trainer.py --student models/student --teacher models/teacher \
        --map events.safetensors --dataset corpus.jsonl --output_dir runs/event-kl --bf16 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --learning_rate 1e-4

A row of the dataset contains `text` or `messages`, and optionally `teacher_context` or
`teacher_messages`. Without --teacher, the student trains on text alone, with everything else equal.
Several teachers: `--teacher A B --map A.safetensors B.safetensors`. On several GPUs, start the
script with `torchrun --nproc-per-node 8` or `accelerate launch`. Run the same command again to
resume from the last checkpoint. The student is saved to OUTPUT_DIR.

With stored predictions of `xtok project`, no teacher runs:

    python scripts/examples/hf_trainer.py --student models/student --loss topk-kl \
        --dataset topk.parquet --output_dir runs/topk ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from xtok import XtokError, load_tokenizer, losses, read_samples
from xtok.training import DistillationCollator, TopKCollator, XTokTrainer

OPTIONS = {
    "map": "--map",
    "student_template": "--student_chat_template",
    "teacher_templates": "--teacher_chat_template",
}
"""Option of this script for each parameter that an error can name."""


@dataclass
class Arguments:
    """Options of this script, in addition to those of TrainingArguments."""

    student: str = field(metadata={"help": "folder or repo id"})
    dataset: str = field(metadata={"help": "JSON, JSON Lines or Parquet file, or repo id"})
    teacher: list[str] = field(
        default_factory=list, metadata={"help": "folders or repo ids; none: text alone"}
    )
    map: list[str] = field(default_factory=list, metadata={"help": "map file for each teacher"})
    eval_dataset: str | None = field(
        default=None, metadata={"help": "held-out rows; requires --eval_strategy steps or epoch"}
    )
    loss: str = field(default="event-kl", metadata={"help": "event-kl, csd, p-kl, gold, alm, …"})
    student_chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file or format name; default: the student's own"}
    )
    teacher_chat_template: list[str] = field(
        default_factory=list,
        metadata={"help": "Jinja file or format name for each teacher; default: its own"},
    )
    max_length: int = field(
        default=1024, metadata={"help": "maximum number of tokens per row, on each side"}
    )
    cross_entropy_weight: float = field(default=1.0, metadata={"help": "0: distillation only"})
    dynamic_scaling: bool = field(
        default=False, metadata={"help": "scale the distillation to the size of the cross-entropy"}
    )
    shard_teachers: bool = field(
        default=False, metadata={"help": "divide each teacher among the processes (FSDP 2)"}
    )
    logits: bool = field(
        default=False, metadata={"help": "use whole logits instead of hidden states"}
    )
    audit: bool = field(
        default=True, metadata={"help": "compare the first batch with the models' libraries"}
    )


def parsed(argv: Sequence[str] | None) -> tuple[Any, Any, list[str]]:
    """Parse the options of this script; return its parser, the options and the remaining arguments.

    A second parser reads the options of TrainingArguments, because a single --help would print 600
    lines, with these options among them.
    """
    own = HfArgumentParser(
        Arguments,  # type: ignore[arg-type]
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False,
        epilog="All options of transformers.TrainingArguments are accepted as well: "
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    )  # fmt: skip
    options, others = own.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    with usage_errors(own, "--loss"):
        losses.loss_spec(options.loss)
    if options.max_length < 1:
        own.error(f"--max_length is {options.max_length}, expected at least 1")
    if options.teacher and losses.loss_spec(options.loss).is_stored:
        own.error(f"--loss {options.loss} trains on stored predictions: remove --teacher")
    for name in ("map", "teacher_chat_template"):
        count = len(getattr(options, name) or options.teacher)
        if options.teacher and count != len(options.teacher):
            own.error(f"{count} of --{name} for {len(options.teacher)} of --teacher")
    return own, options, others


@contextmanager
def usage_errors(own: Any, option: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Report exceptions of a kind as usage errors on one line."""
    try:
        yield
    except kind as error:
        text = " ".join(str(error).split())  # the hub's errors have several lines
        own.error(f"{option}: {text}" if option else text)


def read(name: str | None, *, is_stored: bool = False) -> Any:
    """Return the rows of a file, or the dataset of a repo.

    `read_samples` keeps the rows as they are. `datasets` would give all rows the same columns, and
    all tool calls the same arguments.
    """
    if name is None:
        return None
    if Path(name).exists() and not is_stored:
        return [sample for _, sample in read_samples([name])]
    if Path(name).exists():
        kind = "parquet" if name.endswith(".parquet") else "json"
        return load_dataset(kind, data_files=name, split="train")
    if Path(name).suffix in (".json", ".jsonl", ".parquet"):  # not the name of a repo
        raise FileNotFoundError("the file does not exist")
    return load_dataset(name, split="train")


def read_inputs(own: Any, options: Any) -> list[Any]:
    """Return the two datasets. A usage error if they or the models do not exist."""
    for option, names in (("student", [options.student]), ("teacher", options.teacher)):
        for name in names:
            with usage_errors(own, f"--{option} {name}", OSError):
                AutoConfig.from_pretrained(name)
    is_stored, datasets = losses.loss_spec(options.loss).is_stored, []
    for option in ("dataset", "eval_dataset"):
        name = getattr(options, option)
        with usage_errors(own, f"--{option} {name}", OSError):
            datasets.append(read(name, is_stored=is_stored))
    return datasets


def collator_of(options: Any) -> Any:
    """Return the collator for stored predictions, or for a student and its teachers."""
    if losses.loss_spec(options.loss).is_stored:
        return TopKCollator(max_length=options.max_length)
    return DistillationCollator(
        load_tokenizer(options.student),
        [load_tokenizer(name) for name in options.teacher],
        student_template=options.student_chat_template,
        teacher_templates=(options.teacher and options.teacher_chat_template) or None,
        max_length=options.max_length,
    )


def layers_of(teacher: Any) -> list[Any]:
    """Return the layers of a model, or an empty list if the model does not declare them.

    `_no_split_modules` contains the names of the layers' classes. `--fsdp` uses it for the student.
    """
    names = getattr(teacher, "_no_split_modules", None) or ()
    return [module for module in teacher.modules() if type(module).__name__ in names]


def shard(own: Any, name: str, teacher: Any, config: Any) -> None:
    """Divide a teacher among the processes, layer by layer. `name` is its name in errors."""
    if not layers_of(teacher):
        kind = type(teacher).__name__
        own.error(f"--shard_teachers: {name} ({kind}) has no _no_split_modules; remove the option")
    if "RANK" not in os.environ:
        own.error("--shard_teachers requires torchrun or accelerate launch")
    mesh = init_device_mesh(config.device.type, (config.world_size,))
    for part in (*reversed(layers_of(teacher)), teacher):  # inner modules first
        fully_shard(part, mesh=mesh)


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    own, options, others = parsed(argv)
    training: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    training.error = own.error  # its own usage has 600 lines
    values, unknown = training.parse_known_args(others)
    if unknown:
        own.error(f"unknown options: {' '.join(unknown)}")
    spec = losses.loss_spec(options.loss)
    if spec.map and options.teacher and not options.map:
        raise XtokError(
            f"the loss {options.loss} requires {spec.map.name}",
            hint="build it, and give its path with {option}",
            parameter="map",
        )
    with usage_errors(own, ""):
        combine = losses.CombineConfig(
            cross_entropy_weight=options.cross_entropy_weight,
            dynamic_scaling=options.dynamic_scaling,
        )
    # Data and tokenizers come first, because large models take minutes to load.
    dataset, eval_dataset = read_inputs(own, options)
    collator = collator_of(options)
    # The teachers are loaded before TrainingArguments: with DeepSpeed's ZeRO-3, these arguments
    # make `from_pretrained` divide each model, and nothing would gather a teacher's weights again.
    dtype = torch.bfloat16 if values.bf16 else torch.float32
    teachers = [AutoModelForCausalLM.from_pretrained(x, dtype=dtype) for x in options.teacher]
    with usage_errors(own, ""):
        [config] = training.parse_args_into_dataclasses(others)
    with usage_errors(own, "--output_dir", OSError):
        os.makedirs(config.output_dir, exist_ok=True)
    if config.eval_strategy != "no" and not options.eval_dataset:
        own.error(f"--eval_strategy {config.eval_strategy.value} requires --eval_dataset")
    for name, teacher in zip(options.teacher, teachers, strict=True):
        if options.shard_teachers:
            shard(own, name, teacher, config)
    trainer = XTokTrainer(
        AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32),
        config,
        collator,
        teachers=teachers or (None if spec.is_stored else []),
        loss=options.loss,
        map=options.map or None,
        combine=combine,
        hidden_states=False if options.logits else None,
        audit=options.audit,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
    )
    last = get_last_checkpoint(config.output_dir)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    if trainer.is_world_process_zero():
        AutoTokenizer.from_pretrained(options.student).save_pretrained(config.output_dir)
    return trainer


def program() -> None:
    """Run `main`. An `XtokError` becomes two lines; other exceptions keep their traceback."""
    try:
        main()
    except XtokError as error:
        hint = error.hint_with(OPTIONS.get(error.parameter, f"{error.parameter}="))
        sys.exit(f"error: {error.message}\nhint: {hint}")


if __name__ == "__main__":
    program()
