"""Distil a teacher with another tokenizer into a student with TRL's GOLD, on policy and off.

    xtok events meta-llama/Llama-3.2-1B-Instruct Qwen/Qwen3-8B --output events.safetensors
    python scripts/examples/trl_gold.py --student meta-llama/Llama-3.2-1B-Instruct \
        --teacher Qwen/Qwen3-8B --map events.safetensors --dataset chats.jsonl \
        --output_dir runs/gold --lmbda 0.5 --learning_rate 1e-5 --max_steps 1000

A row of the dataset contains `messages`, or `prompt` and `completion`, and optionally
`teacher_messages`. `--lmbda` is the share of batches that the student generates. Run the same
command again to resume from the last checkpoint. The student is saved to OUTPUT_DIR.
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
    """Options of this script, in addition to those of GOLDConfig."""

    student: str = field(metadata={"help": "folder or repo id"})
    teacher: str = field(metadata={"help": "folder or repo id"})
    dataset: str = field(metadata={"help": ".jsonl or .parquet file, or repo id"})
    map: str | None = field(default=None, metadata={"help": "map file of the loss"})
    loss: str = field(default="event-kl", metadata={"help": "event-kl, csd, p-kl, gold, alm, …"})
    student_chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file; default: the student's own"}
    )
    teacher_chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file or format name; default: the teacher's own"}
    )


def read(name: str) -> Any:
    """Return the dataset of a file or a repo."""
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(name).suffix)
    return (
        load_dataset(kind, data_files=name, split="train")
        if kind
        else load_dataset(name, split="train")
    )


def parsed(argv: Sequence[str] | None) -> tuple[Any, Any]:
    """Parse the options of this script, then those of GOLDConfig."""
    own = HfArgumentParser(
        Arguments,  # type: ignore[arg-type]
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False,
        epilog="All options of trl.experimental.gold.GOLDConfig are accepted as well: "
        "https://huggingface.co/docs/trl/gold_trainer",
    )  # fmt: skip
    options, others = own.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    gold: Any = HfArgumentParser(GOLDConfig)  # type: ignore[arg-type]
    config, unknown = gold.parse_args_into_dataclasses(others, return_remaining_strings=True)
    if unknown:
        own.error(f"unknown options: {' '.join(unknown)}")
    return options, config


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    options, config = parsed(argv)
    kind = losses.loss_spec(options.loss).map
    if kind and not options.map:
        raise SystemExit(f"--loss {options.loss} requires {kind.name}: give it as --map")
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if options.student_chat_template:
        tokenizer.chat_template = Path(options.student_chat_template).read_text(encoding="utf-8")
    trainer = XTokGOLDTrainer(
        options.student,
        options.teacher,
        config,
        loss=options.loss,  # or your own: make_loss("p-kl", map=…, config=PKLConfig(…))
        map=options.map,
        teacher_template=options.teacher_chat_template,
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
        hint = error.hint_with(f"--{error.parameter}".replace("_template", "_chat_template"))
        sys.exit(f"error: {error.message}\nhint: {hint}")
