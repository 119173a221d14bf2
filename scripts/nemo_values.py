#!/usr/bin/env python
"""Compute NeMo-RL's values for the tests, and print the differences from the stored values.

    python scripts/nemo_values.py ~/RL            # tests/nemo_values/ is from 7ea279a
    python scripts/nemo_values.py ~/RL --write

Losses: the random inputs are kept; values and gradients are computed again. Maps: NeMo-RL's three
tools with defaults, Claude 2 → Mistral v3 (scripts/fetch_tokenizers.py), which need 9 GB; every
32nd row is stored. Runs on a CPU, with the stand-ins of peer_checks/nemo_rl.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peer_checks import nemo_rl, report
from tokenizers import Tokenizer, decoders, normalizers

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "tests" / "nemo_values"
EVERY = 32
Arrays = dict[str, NDArray[Any]]

P_KL: dict[str, Any] = {"vocab_topk": 8192}
GOLD: dict[str, Any] = {"gold_loss": True}
H_KL: dict[str, Any] = {"gold_loss": True, "xtoken_loss": True}
CASES: dict[str, dict[str, Any]] = {
    "p_kl": P_KL,
    "p_kl_topk12": {"vocab_topk": 12},
    "p_kl_reverse_t2": {**P_KL, "reverse_kl": True, "temperature": 2.0},
    "p_kl_exact_only": {**P_KL, "exact_token_match_only": True},
    "gold": GOLD,
    "gold_reverse_t2": {**GOLD, "reverse_kl": True, "temperature": 2.0},
    "gold_unc5": {**GOLD, "uncommon_topk": 5},
    "h_kl": H_KL,
    "h_kl_t2": {**H_KL, "temperature": 2.0},
}


def main() -> None:
    """Compute the values, compare them with the stored values, and write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of NeMo-RL")
    parser.add_argument("--write", action="store_true", help="keep them")
    options = parser.parse_args()
    checkout = options.checkout.expanduser().resolve(strict=True)
    with tempfile.TemporaryDirectory() as work:
        for path in sorted(VALUES.glob("*.npz")):
            kept = dict(np.load(path))
            made = (maps if path.stem == "maps" else losses)(checkout, Path(work), kept)
            apart = max(float(np.abs(made[name] - kept[name]).max()) for name in made)
            print(f"{path.name}: at most {apart:.1g} from the kept values")
            if options.write:
                np.savez_compressed(path, **kept | made)


def losses(checkout: Path, work: Path, kept: Arrays) -> Arrays:
    """Return the value and the gradient of each case, of the kept inputs."""
    inputs = {name: torch.from_numpy(values) for name, values in kept.items()}
    module = nemo_rl.losses_of(checkout)
    utils = report.imported(checkout, "nemo_rl.algorithms.x_token.loss_utils")
    # A new name for each map: NeMo-RL caches maps by path.
    path = Path(tempfile.mkdtemp(dir=work)) / "map.pt"
    table = {"indices": inputs["projection_indices"], "likelihoods": inputs["projection_weights"]}
    torch.save(table, path)
    logits = inputs["student_logits"], inputs["teacher_logits"]
    positions = logits[0].shape[:2]
    names = ("student_chunk_id", "teacher_chunk_id", "pair_valid", "pair_is_correct", "sample_mask")
    aligned = utils.LocalizedAlignment(
        student_input_ids=torch.zeros(positions, dtype=torch.long),
        student_token_mask=torch.ones(positions),
        **{name: inputs[name] for name in names},
    )
    widths = logits[0].shape[-1], logits[1].shape[-1]
    made: Arrays = {}
    for case, changed in CASES.items():
        loss = partial(nemo_rl.loss_of(module, path, widths, changed), aligned=aligned)
        value, gradient = report.value_and_gradient(loss, *logits)
        made |= {f"{case}__loss": value.numpy(), f"{case}__grad": gradient.numpy()}
    return made


def maps(checkout: Path, work: Path, kept: Arrays) -> Arrays:
    """Return rows of the map after the first of its tools and after the last."""
    models = {"student": work / "claude-2", "teacher": report.folder_of("mistral-v3", work)}
    # Without the dummy prefix: else its tools spell each token as at the start of a text.
    path = models["teacher"] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(path))
    shutil.copytree(ROOT / "data" / "tokenizers" / "claude-2", models["student"])
    config = '{"model_type": "gpt2", "vocab_size": 65000}'  # the type does not matter here
    (models["student"] / "config.json").write_text(config, encoding="utf-8")
    sides = [word for side, folder in models.items() for word in (f"--{side}-model", str(folder))]
    first, last = work / "made_special.pt", work / "cut.pt"

    def run(tool: str, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", f"tools.x_token.{tool}", *words]
        subprocess.run(
            command, check=True, env=environment, cwd=checkout, stdout=subprocess.DEVNULL
        )

    initial = "--initial-projection-path"
    run("minimal_projection_via_multitoken", *sides, "--output-dir", str(work),
        "--output-filename", "made")  # fmt: skip
    run("reapply_exact_map", *sides, initial, str(first))
    remapped = work / "made_special_exact_map_remapped.pt"
    run("sort_and_cut_projection_matrix", initial, str(remapped), "--top_k", "4",
        "--output_path", str(last))  # fmt: skip
    made: Arrays = {"rows": np.arange(0, len(kept["rows"]) * EVERY, EVERY)}
    for name, path in {"multitoken": first, "sort_cut": last}.items():
        data = torch.load(path, weights_only=True)
        made[f"{name}__indices"] = data["indices"][::EVERY].int().numpy()
        made[f"{name}__weights"] = data["likelihoods"][::EVERY].float().numpy()
    return made


if __name__ == "__main__":
    main()
