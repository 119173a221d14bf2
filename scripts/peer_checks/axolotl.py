"""axolotl: its collator and its loss on the columns that `xtok project --to axolotl` writes."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from peer_checks import caches, report
from peer_checks.caches import Sample
from peer_checks.report import Checks

PEER = "axolotl"


def installed(work: Path) -> Checks:
    """Yield the lines about axolotl as installed."""
    warnings.simplefilter("ignore")
    name = next(iter(report.PAIRS.values()))[0]
    loss = partial(_loss, report.auto_tokenizer(name, work))
    what = "`DataCollatorForKD`, `LigerFusedLinearKLTopKLogprobLoss`"
    agree = partial(caches.agree, "axolotl", what, loss, caches.renormalized_kl, work)
    yield from report.guarded(what, agree)


def _loss(tokenizer: Any, sample: Sample, shift: int) -> float:
    """Return the loss a row; the head times the hidden states are the logits."""
    from axolotl.integrations.kd.collator import DataCollatorForKD
    from axolotl.integrations.kd.kernels.liger import LigerFusedLinearKLTopKLogprobLoss

    rows = pyarrow.parquet.read_table(sample.path).to_pylist()
    tokenizer.pad_token = tokenizer.eos_token
    batch = DataCollatorForKD(tokenizer)(rows)
    targets = [batch[name].roll(shift, 1) for name in ("target_token_ids", "target_logprobs")]
    mask = batch["target_mask"].roll(shift, 1)
    own = LigerFusedLinearKLTopKLogprobLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, temperature=1.0, beta=0.0, compiled=False,
        compute_ce_loss=False, normalize_topk=True,
    )  # fmt: skip
    head, hidden = sample.logits.T.contiguous(), torch.eye(len(sample.logits))[None]
    value = own(head.requires_grad_(), hidden, *targets, mask, true_labels=batch["labels"])
    return float(value) / int(mask.any(-1).sum())
