"""An evaluation counts each row once, in any number of processes."""

from __future__ import annotations

import json
import math
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluating import COUNTS, NUM_ROWS, TEXTS, folders_and_models
from forked import Forks

import xtok
from xtok.training import losses, prepare

HERE = Path(__file__).parent
TRAINERS = ["transformers", *(["gold"] if find_spec("trl") else [])]


def evaluated(forks: Forks, small: Path, output: Path, processes: int) -> dict[str, Any]:
    python = str(forks.folder / "python")
    paths = [str(HERE), str(HERE.parent)]
    program = (
        f"import sys; sys.path[:0] = {paths}; import evaluating; evaluating.main(*sys.argv[1:])"
    )
    result = subprocess.run(
        [python, "-c", "import sys; from torch.distributed.run import main; main(sys.argv[1:])",
         "--standalone", f"--nproc-per-node={processes}", "--no-python", python, "-c", program,
         str(small), str(output), *TRAINERS],
        env={**forks.env, "CI": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rank = f"process {processes - 1}: " * (processes > 1)
    assert f"first batch: {rank}the teacher needs" in result.stderr
    values: dict[str, Any] = json.loads((output / "values.json").read_text())
    return values


@pytest.fixture(scope="module")
def by_row(small: Path) -> list[tuple[float, ...]]:
    """Return per row: nats, targets, bytes, ALM times chunks, chunks, teacher's nats, bytes."""
    folders, (student, teacher) = folders_and_models(small)
    collate = xtok.DistillationCollator(*folders)
    rows = []
    for text in TEXTS:
        batch = prepare(collate([text]))
        [side] = batch["teachers"]
        sums: list[float] = []
        with torch.no_grad():
            logits = [m(s["input_ids"]).logits for m, s in ((student, batch), (teacher, side))]
            chunks = losses.count_chunks(side["shifted"], starts_only=True)
            targets = batch["targets"], side["targets"]
            alm = losses.alm(logits[0], logits[1], targets, side["shifted"])
        for values, side_inputs, tokenizer in zip(
            logits, (batch, side), (collate.student, *collate.teachers), strict=True
        ):
            ids = side_inputs["targets"][0][:-1]
            log_p = values[0, :-1].double().log_softmax(-1).gather(1, ids[:, None])
            sums += [-float(log_p.sum()), len(ids), int(tokenizer.table.lengths[ids].sum())]
        rows.append((*sums[:3], float(alm) * chunks, chunks, sums[3], sums[5]))
    return rows


@pytest.fixture(scope="module")
def single_process_metrics(
    forks: Forks, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the values of one process."""
    return evaluated(forks, small, tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.xdist_group("evaluation")  # all values come from one run of `single_process_metrics`
@pytest.mark.parametrize("processes", [1, 3])  # two processes repeat fewer rows than three
def test_each_row_counts_once(
    processes: int, tmp_path: Path, small: Path, forks: Forks, by_row: list[Any],
    single_process_metrics: dict[str, Any],
) -> None:  # fmt: skip
    evaluations = (
        single_process_metrics if processes == 1 else evaluated(forks, small, tmp_path, processes)
    )
    for count in range(1, NUM_ROWS + 1):
        nats, targets, size, alm, chunks, theirs, their_size = map(
            sum, zip(*by_row[:count], strict=True)
        )
        own, distillation = nats / targets, alm / chunks
        bits = nats / math.log(2) / size, theirs / math.log(2) / their_size
        expected = [own + distillation, own, distillation, *bits]
        for batch_size in (size for size, counts in COUNTS.items() if count in counts):
            name = f"transformers {batch_size} {count}"
            assert evaluations[name] == pytest.approx(expected, rel=1e-5), name
    whole = single_process_metrics[f"two teachers {NUM_ROWS}"]
    for batch_size in COUNTS:
        assert evaluations[f"two teachers {batch_size}"] == pytest.approx(whole, rel=1e-5)
    assert evaluations["transformers streamed"] == evaluations["transformers 1 7"]
    for name in TRAINERS:
        evaluated_first, plain = evaluations.pop(f"{name} trained")
        assert evaluated_first == plain == [plain[0]] * processes, name
    gold = {name: values for name, values in evaluations.items() if name.startswith("gold")}
    for name, values in gold.items():
        assert values == pytest.approx(single_process_metrics[name], rel=1e-5), name
