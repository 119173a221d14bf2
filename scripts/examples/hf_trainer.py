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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments
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


def parsed(argv: Sequence[str] | None) -> tuple[Any, list[Any], Any]:
    """Parse the options of this script, load the teachers, and parse those of TrainingArguments.

    Two parsers, because a single --help would print 600 lines, with these options among them. The
    teachers are loaded in between, because TrainingArguments with DeepSpeed's ZeRO-3 make
    `from_pretrained` divide each model, and nothing would gather a teacher's weights again.
    """
    own = HfArgumentParser(
        Arguments,  # type: ignore[arg-type]
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False,
        epilog="All options of transformers.TrainingArguments are accepted as well: "
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    )  # fmt: skip
    options, others = own.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    is_half = any(option.partition("=")[0] == "--bf16" for option in others)
    dtype = torch.bfloat16 if is_half else torch.float32
    teachers = [AutoModelForCausalLM.from_pretrained(x, dtype=dtype) for x in options.teacher]
    training: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    config, unknown = training.parse_args_into_dataclasses(others, return_remaining_strings=True)
    if unknown:
        own.error(f"unknown options: {' '.join(unknown)}")
    return options, teachers, config


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
    return load_dataset(name, split="train")


def collator_of(options: Any) -> Any:
    """Return the collator for stored predictions, or for a student and its teachers."""
    if losses.loss_spec(options.loss).is_stored:
        return TopKCollator(max_length=options.max_length)
    return DistillationCollator(
        load_tokenizer(options.student),
        [load_tokenizer(name) for name in options.teacher],
        student_template=options.student_chat_template,
        teacher_templates=options.teacher_chat_template or None,
        max_length=options.max_length,
    )


def shard(teacher: Any, config: Any) -> None:
    """Divide a teacher among the processes, layer by layer."""
    mesh = init_device_mesh(config.device.type, (config.world_size,))
    for part in (*teacher.get_decoder().layers, teacher):
        fully_shard(part, mesh=mesh)


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    options, teachers, config = parsed(argv)
    spec = losses.loss_spec(options.loss)
    if spec.map and options.teacher and not options.map:
        raise XtokError(
            f"the loss {options.loss} requires {spec.map.name}",
            hint="build it, and give its path with {option}",
            parameter="map",
        )
    for teacher in teachers if options.shard_teachers else ():
        shard(teacher, config)
    trainer = XTokTrainer(
        AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32),
        config,
        collator_of(options),
        teachers=teachers or (None if spec.is_stored else []),
        loss=options.loss,
        map=options.map or None,
        combine=losses.CombineConfig(
            cross_entropy_weight=options.cross_entropy_weight,
            dynamic_scaling=options.dynamic_scaling,
        ),
        hidden_states=False if options.logits else None,
        audit=options.audit,
        train_dataset=read(options.dataset, is_stored=spec.is_stored),
        eval_dataset=read(options.eval_dataset, is_stored=spec.is_stored),
    )
    os.makedirs(config.output_dir, exist_ok=True)
    last = get_last_checkpoint(config.output_dir)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    if trainer.is_world_process_zero():
        AutoTokenizer.from_pretrained(options.student).save_pretrained(config.output_dir)
    return trainer


if __name__ == "__main__":
    try:
        main()
    except XtokError as error:
        hint = error.hint_with(OPTIONS.get(error.parameter, f"{error.parameter}="))
        sys.exit(f"error: {error.message}\nhint: {hint}")
    except ValueError as error:
        sys.exit(f"error: {error}")
