"""Distil a teacher with another tokenizer into a student with TRL's GOLD, on policy and off.

    xtok build meta-llama/Llama-3.2-1B-Instruct Qwen/Qwen3-8B --for p-kl --output map.safetensors
    python scripts/examples/trl_gold.py --student meta-llama/Llama-3.2-1B-Instruct \
        --teacher Qwen/Qwen3-8B --map map.safetensors --dataset chats.jsonl --output_dir runs/gold \
        --lmbda 0.5 --learning_rate 1e-5 --max_steps 1000

A row of the dataset has `messages`, or `prompt` and `completion`; with `teacher_messages`, the
teacher reads more than the student. `--lmbda` is the share of batches that the student writes
itself. All options of TRL's GOLDConfig work; `--help` lists them. Run it again to resume from the
last checkpoint. The student is saved to OUTPUT_DIR.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

from xtok import XtokError, losses
from xtok.training import GOLDConfig, XTokGOLDTrainer


@dataclass
class Arguments:
    """What GOLDConfig lacks."""

    student: str = field(metadata={"help": "folder or repo id"})
    teacher: str = field(metadata={"help": "folder or repo id"})
    dataset: str = field(metadata={"help": ".jsonl or .parquet file, or repo id"})
    map: str | None = field(default=None, metadata={"help": "for p-kl, gold and h-kl"})
    loss: str = field(default="p-kl", metadata={"help": "p-kl, event-kl, … as make_loss has it"})
    teacher_template: str | None = field(default=None, metadata={"help": "default: its own"})


def read(name: str) -> Any:
    """Return the dataset of a file or a repo."""
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(name).suffix)
    return (
        load_dataset(kind, data_files=name, split="train")
        if kind
        else load_dataset(name, split="train")
    )


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    kinds: Any = [Arguments, GOLDConfig]
    options, config = HfArgumentParser(kinds).parse_args_into_dataclasses(argv)
    kind = losses.loss_named(options.loss).map
    if kind and not options.map:
        raise SystemExit(f"--loss {options.loss} needs {kind.name}: give it as --map")
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = XTokGOLDTrainer(
        options.student,
        options.teacher,
        config,
        loss=options.loss,  # or your own: make_loss("p-kl", map=…, config=PKLConfig(…))
        map=options.map,
        teacher_template=options.teacher_template,
        train_dataset=read(options.dataset),
        processing_class=tokenizer,
    )
    os.makedirs(config.output_dir, exist_ok=True)
    last = get_last_checkpoint(config.output_dir)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    try:
        main()
    except XtokError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
