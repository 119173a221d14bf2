"""Models in FSDP2, DeepSpeed and DDP on CPUs have the loss and gradients of one process."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forked import Forks
from sharded import LAYOUTS, TEXTS, batches_of, models_of, objective_of, step

import xtok

HERE = Path(__file__).parent


def run(forks: Forks, processes: int, *args: str) -> None:
    python = str(forks.folder / "python")
    program = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]}; import sharded; "
    result = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
         "--no-python", python, "-c", program + "sharded.main(*sys.argv[1:])", *args],
        env={**forks.env, "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (
            2,
            [
                "root tied float32",
                "head untied float32",
                "head untied bfloat16",
                "ddp-static untied float32",
                "ddp tied float32",
            ],
        ),
        (4, ["layers tied float32"]),
        pytest.param(
            2,
            ["zero3 tied float32", "zero3 untied float32"],
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed"),
        ),
    ],
)
def test_heads_of_several_processes(
    processes: int, cases: list[str], tmp_path: Path, small: Path, forks: Forks
) -> None:
    """The batch is accumulated from two batches, with three teachers."""
    teacher = str(small / "small-digits")
    run(forks, processes, teacher, str(tmp_path), *cases)
    pair = xtok.load_pair("bytes", teacher)
    [batch], objective = batches_of(pair, [TEXTS]), objective_of(pair)
    for case in cases:
        layout, tied, kind = case.split()
        assert layout in LAYOUTS
        value, actual = torch.load(tmp_path / f"{case}.pt")
        models = models_of(pair, None, tied=tied == "tied")
        expected, gradients = step(
            models, [batch], objective, objective.count(batch), 1, hidden=False
        )
        low = kind == "bfloat16"
        assert value == pytest.approx(float(expected), rel=3e-2 if low else 1e-6)
        assert actual.keys() == gradients.keys()
        for name, gradient in gradients.items():
            if low:
                both = actual[name].float().flatten(), gradient.flatten()
                assert torch.cosine_similarity(*both, dim=0) > 0.99
            else:
                close = 2e-6 * float(gradient.abs().max())
                torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=close)
