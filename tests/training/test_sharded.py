"""Models in pieces, of FSDP2 and DeepSpeed, on CPUs: loss and gradients are one process's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from sharded import LAYOUTS, TEXTS, batches_of, models_of, objective_of, step
from tiny_models import one_torch_thread

import xtok

HERE = Path(__file__).parent


def run(processes: int, *args: str) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={processes}", str(HERE / "sharded.py"), *args,
    ]  # fmt: skip
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, ["root tied float32", "head untied float32", "head untied bfloat16"]),
        (4, ["layers tied float32"]),
        pytest.param(
            2,
            ["zero3 tied float32", "zero3 untied float32"],
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed"),
        ),
    ],
)
def test_heads_in_pieces(processes: int, cases: list[str], tmp_path: Path, small: Path) -> None:
    """Accumulated over two batches, with three teachers."""
    teacher = str(small / "small-digits")
    run(processes, teacher, str(tmp_path), *cases)
    pair = xtok.pair("bytes", teacher)
    [batch], objective = batches_of(pair, [TEXTS]), objective_of(pair)
    for case in cases:
        layout, tied, kind = case.split()
        assert layout in LAYOUTS
        value, found = torch.load(tmp_path / f"{case}.pt")
        with one_torch_thread():
            models = models_of(pair, None, tied=tied == "tied")
            expected, gradients = step(
                models, [batch], objective, objective.count(batch), 1, hidden=False
            )
        low = kind == "bfloat16"
        assert value == pytest.approx(float(expected), rel=3e-2 if low else 1e-6)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            if low:
                both = found[name].float().flatten(), gradient.flatten()
                assert torch.cosine_similarity(*both, dim=0) > 0.99
            else:
                close = 2e-6 * float(gradient.abs().max())
                torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=close)
