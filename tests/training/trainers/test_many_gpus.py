"""The configuration files of the guide to many GPUs work on gloo with tiny models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import hf_trainer
import pytest
import teacher_memory
import torch
from conftest import ROOT
from forked import Forks
from safetensors.torch import load_file
from tiny_models import save_model

import xtok
from xtok.tokenizers import Tokenizer

EXAMPLES = ROOT / "scripts" / "examples"
TEXTS = ["The keeper lit 201 lamps.", "Fog.", "High water at 6:12; low water at 12:40.", "Light"]


@pytest.fixture(scope="module")
def options(
    tmp_path_factory: pytest.TempPathFactory, small: Path, digits: Tokenizer, byte_level: Tokenizer
) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "student", digits, small / "small-digits", seed=0, sharp=0.02)
    save_model(folder / "teacher", byte_level, small / "small-byte-level", seed=1, sharp=0.02)
    xtok.events(digits, byte_level).save(folder / "events.safetensors")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    return [
        f"--student={folder / 'student'}", f"--teacher={folder / 'teacher'}",
        f"--map={folder / 'events.safetensors'}", f"--dataset={folder / 'rows.jsonl'}",
        "--max_length=64", "--report_to=none", "--use_cpu", "--max_steps=2", "--save_strategy=no",
        "--learning_rate=0.01", "--disable_tqdm=true",
    ]  # fmt: skip


@pytest.mark.parametrize(("processes", "more"), [(2, ["--shard_teachers"]), (4, [])])
def test_fsdp_2_trains_as_one_process(
    options: list[str], tmp_path: Path, forks: Forks, processes: int, more: list[str]
) -> None:
    single = [*options, f"--output_dir={tmp_path / 'one'}", "--per_device_train_batch_size=1"]
    hf_trainer.main([*single, f"--gradient_accumulation_steps={processes}"])
    python = str(forks.folder / "python")
    result = subprocess.run(
        [
            python, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={processes}", "--no-python", python,
            str(Path(__file__).with_name("fsdp_on_cpu.py")), str(EXAMPLES / "hf_trainer.py"),
            *options, *more, f"--output_dir={tmp_path / 'many'}",
            "--per_device_train_batch_size=1", "--fsdp=full_shard",
            f"--fsdp_config={EXAMPLES / 'fsdp2.json'}",
        ],
        env=forks.env,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "not determined: process 0, 1" in result.stderr
    assert "UserWarning: first batch" not in result.stderr
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in ("one", "many"))
    start = load_file(Path(options[0].removeprefix("--student=")) / "model.safetensors")
    for name, values in first.items():
        assert not torch.equal(values, start[name])
        torch.testing.assert_close(second[name], values, rtol=1e-3, atol=1e-5)


def test_memory_of_a_teacher() -> None:
    """16 bytes per student parameter, 2 per teacher parameter, divided where sharded."""
    rows = teacher_memory.rows(student=1.0, teacher=8.0, gpus=8)
    assert rows == [
        ("replicated", "2.0 + 16.0"),
        ("sharded", "2.0 + 2.0"),
        ("stored", "2.0"),
        ("served", "2.0"),
    ]


def test_configuration_files_are_json() -> None:
    assert json.loads((EXAMPLES / "fsdp2.json").read_text())["version"] == 2
    zero = json.loads((EXAMPLES / "zero3.json").read_text())["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


def slurm_train(folder: Path, *arguments: str, **variables: str) -> Any:
    """Run `slurm_train.sh` with an `srun` that prints its arguments."""
    for name, line in (("scontrol", "printf 'node7\\nnode8\\n'"), ("srun", 'echo "$@"')):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(EXAMPLES / "slurm_train.sh"), *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **variables},
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_slurm_job_starts_a_process_per_gpu(tmp_path: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "42"}
    result = slurm_train(
        tmp_path, "--student", "a b", **job, SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK="32"
    )
    assert result.stdout == (
        "--cpus-per-task=32 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 42 "
        "--rdzv-backend c10d --rdzv-endpoint node7:29500 scripts/examples/hf_trainer.py "
        "--student a b\n"
    )
    result = slurm_train(tmp_path, **job)
    assert result.returncode == 1
    assert result.stderr.startswith("error: the options of hf_trainer.py are missing\nhint: sbatch")
    assert "error: this is not a Slurm job" in slurm_train(tmp_path, "--student", "a").stderr
