"""verl: its loss `forward_kl_topk` on the rows that `xtok project` writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peer_checks import caches, report
from peer_checks.caches import Sample
from peer_checks.report import Checks

PEER = "verl"
LEFT_OUT = "Its packages are not initialized, and `verl.workers.config` is empty: types only."

_PACKAGES = ("verl", "verl.utils", "verl.trainer", "verl.trainer.distillation")


def checks(checkout: Path, work: Path) -> Checks:
    """Yield the lines about a checkout, or an unpacked wheel."""
    for name in _PACKAGES:
        report.stand_in(name, __path__=[str(checkout / name.replace(".", "/"))])
    report.stand_in("verl.workers")
    report.stand_in("verl.workers.config", DistillationConfig=None, DistillationLossConfig=None)
    module = report.imported(checkout, "verl.trainer.distillation.fsdp.losses")
    what = "`compute_forward_kl_topk`"
    yield from report.guarded(
        what, partial(caches.agree, "neutral", what, partial(_loss, module), _top_k_kl, work)
    )


def _top_k_kl(p: NDArray[Any], q: NDArray[Any]) -> float:
    """Forward KL over the candidates only, without the rest."""
    return float((np.exp(p) * (p - q)).sum())


def _loss(module: Any, sample: Sample, shift: int) -> float:
    """Return the loss per row: row i belongs to the next token, with K candidates each."""
    num_rows = len(sample.row["input_ids"])
    ids = torch.zeros(num_rows, caches.K, dtype=torch.int64)
    logprobs = torch.full((num_rows, caches.K), -1e9)
    both = zip(sample.row["topk_ids"], sample.row["topk_logprobs"], strict=True)
    for i, (some, values) in enumerate(both):
        ids[i, : len(some)], logprobs[i, : len(some)] = torch.tensor(some), torch.tensor(values)
    nested = [
        torch.nested.as_nested_tensor([rows.roll(shift - 1, 0)], layout=torch.jagged)
        for rows in (logprobs, ids)
    ]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    losses = module.compute_forward_kl_topk(sample.logits[None], *nested, config, "thd")
    has_target = torch.tensor([bool(some) for some in sample.row["topk_ids"]]).roll(shift - 1)
    return float(losses["distillation_losses"][0][has_target].mean())
