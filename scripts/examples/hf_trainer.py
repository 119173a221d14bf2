"""Distil teachers with other tokenizers into a student with `transformers.Trainer`.

    python scripts/examples/hf_trainer.py --student models/student --teacher models/teacher \
        --map map.safetensors --dataset corpus.jsonl --output_dir runs/p-kl --bf16 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --learning_rate 1e-4

A row of the dataset has `text`, or `messages`; and `teacher_context`, or `teacher_messages`, if
teachers read more than the student. Several teachers: `--teacher A B --map A.safetensors
B.safetensors`. All options of TrainingArguments work; `--help` lists them. On several GPUs:
`torchrun --nproc-per-node 8 scripts/examples/hf_trainer.py …`. Run it again to resume from the last
checkpoint. The student is saved to OUTPUT_DIR.

From predictions that a teacher made before, as `xtok project` writes them, no teacher runs:

    python scripts/examples/hf_trainer.py --student models/student --loss topk-kl \
        --dataset topk.parquet --output_dir runs/topk …
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
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from xtok import XtokError, load_tokenizer, losses
from xtok.training import DistillationCollator, TopKCollator, XTokTrainer


@dataclass
class Arguments:
    """What TrainingArguments lacks."""

    student: str = field(metadata={"help": "folder or repo id"})
    dataset: str = field(metadata={"help": ".jsonl or .parquet file, or repo id"})
    teacher: list[str] = field(default_factory=list, metadata={"help": "folders or repo ids"})
    map: list[str] = field(default_factory=list, metadata={"help": "one per teacher"})
    eval_dataset: str | None = field(default=None, metadata={"help": "for --eval_strategy steps"})
    loss: str = field(default="p-kl", metadata={"help": "p-kl, event-kl, … as make_loss has it"})
    max_length: int = field(default=1024, metadata={"help": "tokens of a sample, on each side"})
    cross_entropy_weight: float = field(default=1.0, metadata={"help": "0: distillation only"})
    logits: bool = field(
        default=False, metadata={"help": "whole logits, where hidden states would do"}
    )
    audit: bool = field(
        default=True, metadata={"help": "compare the first batch with the models' libraries"}
    )
    dynamic_scaling: bool = field(
        default=False, metadata={"help": "scale the distillation to the size of the cross-entropy"}
    )


def read(name: str | None) -> Any:
    """Return the dataset of a file or a repo."""
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(name or "").suffix)
    if name is None or kind is None:
        return name and load_dataset(name, split="train")
    return load_dataset(kind, data_files=name, split="train")


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    kinds: Any = [Arguments, TrainingArguments]
    options, config = HfArgumentParser(kinds).parse_args_into_dataclasses(argv)
    kind = losses.loss_named(options.loss).map
    if kind and not options.map:
        raise SystemExit(f"--loss {options.loss} needs {kind.name}: give it as --map")
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    collate: Any = TopKCollator(max_length=options.max_length)
    if options.teacher:
        collate = DistillationCollator(
            load_tokenizer(options.student),
            [load_tokenizer(name) for name in options.teacher],
            max_length=options.max_length,
        )
    trainer = XTokTrainer(
        AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32),
        config,
        collate,
        teachers=[
            AutoModelForCausalLM.from_pretrained(name, dtype=dtype) for name in options.teacher
        ]
        or None,
        loss=options.loss,
        map=options.map or None,
        combine=losses.CombineConfig(
            cross_entropy_weight=options.cross_entropy_weight,
            dynamic_scaling=options.dynamic_scaling,
        ),
        hidden_states=False if options.logits else None,
        audit=options.audit,
        train_dataset=read(options.dataset),
        eval_dataset=read(options.eval_dataset),
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
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
