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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser
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
    if kind is None:
        return load_dataset(name, split="train")
    if not Path(name).exists():
        raise FileNotFoundError("the file does not exist")
    return load_dataset(kind, data_files=name, split="train")


@contextmanager
def usage_errors(own: Any, option: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Report exceptions of a kind as usage errors on one line."""
    try:
        yield
    except kind as error:
        text = " ".join(str(error).split())  # the hub's errors have several lines
        own.error(f"{option}: {text}" if option else text)


def parsed(argv: Sequence[str] | None) -> tuple[Any, Any, Any]:
    """Parse the options of this script, then those of GOLDConfig; return the first parser too."""
    own = HfArgumentParser(
        Arguments,  # type: ignore[arg-type]
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False,
        epilog="All options of trl.experimental.gold.GOLDConfig are accepted as well: "
        "https://huggingface.co/docs/trl/gold_trainer",
    )  # fmt: skip
    options, others = own.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    gold: Any = HfArgumentParser(GOLDConfig)  # type: ignore[arg-type]
    gold.error = own.error  # its own usage has 600 lines
    with usage_errors(own, ""):
        config, unknown = gold.parse_args_into_dataclasses(others, return_remaining_strings=True)
    if unknown:
        own.error(f"unknown options: {' '.join(unknown)}")
    with usage_errors(own, "--loss"):
        kind = losses.loss_spec(options.loss).map
    if kind and not options.map:
        own.error(f"--loss {options.loss} requires {kind.name}: give it as --map")
    for option in ("student", "teacher"):
        name = getattr(options, option)
        with usage_errors(own, f"--{option} {name}", OSError):
            AutoConfig.from_pretrained(name)
    return own, options, config


def main(argv: Sequence[str] | None = None) -> Any:
    """Parse, train, save; return the trainer."""
    own, options, config = parsed(argv)
    with usage_errors(own, f"--dataset {options.dataset}", OSError):
        dataset = read(options.dataset)
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
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    os.makedirs(config.output_dir, exist_ok=True)
    last = get_last_checkpoint(config.output_dir)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    return trainer


def program() -> None:
    """Run `main`. An `XtokError` becomes two lines; other exceptions keep their traceback."""
    try:
        main()
    except XtokError as error:
        hint = error.hint_with(f"--{error.parameter}".replace("_template", "_chat_template"))
        sys.exit(f"error: {error.message}\nhint: {hint}")


if __name__ == "__main__":
    program()
