"""A process of `test_evaluation.py`: evaluations of 1 to 17 rows in batches of 1, 2 and 5.

Batches of 1 and 2 evaluate fewer rows, because the sizes of the last batches of 3 processes repeat
after 3 and 6 rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from datasets import Dataset
from small_tokenizers import CORPUS
from tiny_models import tiny_model
from transformers import AutoTokenizer, TrainingArguments

import xtok
from xtok.training import XTokTrainer

COUNTS = {1: range(1, 8), 2: range(1, 11), 5: range(1, 18)}
"""The numbers of rows of evaluations, by batch size."""
NUM_ROWS = 17
WORDS = " ".join(CORPUS).split()
TEXTS = [" ".join(WORDS[2 * n : 2 * n + 2 + n % 5]) for n in range(NUM_ROWS)]
NAMES = (
    "eval_loss", "eval_cross_entropy", "eval_distillation", "eval_bits_per_byte",
    "eval_teacher_bits_per_byte",
)  # fmt: skip


class Streamed(torch.utils.data.IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def folders_and_models(small: Path) -> tuple[list[str], list[Any]]:
    folders = [str(small / "small-digits"), str(small / "small-byte-level")]
    widths = [xtok.load_tokenizer(folder).vocabulary.vocab_size for folder in folders]
    return folders, [tiny_model(width, seed=n, sharp=0.1) for n, width in enumerate(widths)]


def options(output: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output), "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "max_steps": 2, "learning_rate": 0.01, "save_strategy": "no",
    }  # fmt: skip


def transformers_trainer(small: Path, output: Path) -> Any:
    folders, (student, teacher) = folders_and_models(small)
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    return XTokTrainer(
        student, TrainingArguments(**options(output)), xtok.DistillationCollator(*folders),
        teachers=teacher, loss="alm", train_dataset=rows, eval_dataset=rows, audit=False,
    )  # fmt: skip


def trainer_with_two_teachers(small: Path, output: Path) -> Any:
    """Return a trainer with two teachers that have different numbers of chunks per row."""
    folders, (student, teacher) = folders_and_models(small)
    same = tiny_model(xtok.load_tokenizer(folders[0]).vocabulary.vocab_size, seed=2, sharp=0.1)
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    return XTokTrainer(
        student, TrainingArguments(**options(output)),
        xtok.DistillationCollator(folders[0], [folders[1], folders[0]]),
        teachers=[teacher, same], loss="alm", teacher_weights=[0.5, 2], eval_dataset=rows,
        audit=False,
    )  # fmt: skip


def gold_trainer(small: Path, output: Path) -> Any:
    from xtok.training import GOLDConfig, XTokGOLDTrainer

    folders, (student, teacher) = folders_and_models(small)
    rows = Dataset.from_list([{"prompt": t[:4], "completion": t[4:] + "."} for t in TEXTS])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GOLDConfig(
        **options(output),
        bf16=False,
        teacher_tokenizer_name_or_path=folders[1],
        lmbda=0.0,
        max_length=64,
        max_completion_length=8,
    )
    return XTokGOLDTrainer(
        student, teacher, config, loss="alm", train_dataset=rows, eval_dataset=rows,
        processing_class=tokenizer, audit=False,
    )  # fmt: skip


TRAINERS = {"transformers": transformers_trainer, "gold": gold_trainer}


def weights_by_process(trainer: Any) -> list[float]:
    """Train, and return the sum of the student's absolute weights in each process."""
    trainer.train()
    total = sum(float(weights.double().abs().sum()) for weights in trainer.model.parameters())
    by_process: list[float] = gather_object([total])
    return by_process


def main(small: str, output: str, *names: str) -> None:
    """Write the values of all trainers, by trainer, batch size and number of rows."""
    torch.set_num_threads(1)
    values_by_case: dict[str, Any] = {}
    for name in names:
        trainer = TRAINERS[name](Path(small), Path(output) / name)
        rows = trainer.eval_dataset
        for size, counts in COUNTS.items():
            trainer.args.per_device_eval_batch_size = size
            for count in counts:
                trainer.eval_dataset = rows.select(range(count))
                values = trainer.evaluate()
                values_by_case[f"{name} {size} {count}"] = [values[n] for n in NAMES]
        trainer.eval_dataset = Streamed([*rows.select(range(7))])
        trainer.args.per_device_eval_batch_size = 1
        values = trainer.evaluate()
        values_by_case[f"{name} streamed"] = [values[n] for n in NAMES]
        values_by_case[f"{name} trained"] = [
            weights_by_process(t) for t in (trainer, TRAINERS[name](Path(small), Path(output)))
        ]
    trainer = trainer_with_two_teachers(Path(small), Path(output) / "two")
    for size in (*COUNTS, NUM_ROWS):
        trainer.args.per_device_eval_batch_size = size
        values = trainer.evaluate()
        values_by_case[f"two teachers {size}"] = [values[n] for n in NAMES[:3]]
    rank, last = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) - 1
    trainer = transformers_trainer(Path(small), Path(output) / "audited")
    trainer.audit, trainer.args.per_device_eval_batch_size = True, 5
    if rank == last:  # as if a loader had read the file on rank 0 alone
        for parameter in trainer.teachers[0].parameters():
            parameter.data.normal_(0, 3)
    trainer.evaluate()
    if rank == 0:
        (Path(output) / "values.json").write_text(json.dumps(values_by_case))
